"""Group commit: writes that wait for the database at the same time reach it in one transaction."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from contextvars import Context
from itertools import groupby
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

from sqlalchemy.orm import Session

from tinycortex.db import Database, share_transactions
from tinycortex.errors import StorageBusyError, StorageCorruptError, StorageError, StorageUnavailableError
from tinycortex.threads import Call, SerialThread, Waiting
from tinycortex.writer import Writer

T = TypeVar("T")


class Write(NamedTuple):
    """One write.

    Attributes:
        make: writes inside the session of a group or, given None, in a transaction of its own. It may be called
            twice: what a group wrote is undone, and written one by one, when one of them fails.
        alone: it must not share its transaction, as others would wait for what it does there, or go down with it.
        closes: its transaction ends with it, since others may wait for what it takes hold of.
        context: where ``make`` is called; that of its batch when left out.
        pieces: what to make one by one instead, where the group fails, when ``make`` returns a list of outcomes.
    """

    make: Callable[[Session | None], object]
    alone: bool = False
    closes: bool = False
    context: Context | None = None
    pieces: Sequence[Callable[[Session | None], object]] = ()


Batch = Generator[Sequence[Write], list[Any], T]
"""Writes of one caller: it yields them once, and is sent what each returned, or raised, after the commit."""

_MOST_CALLS = 100
"""Taken together, for as long as another process may have to wait for the write lock."""

_NOBODY_COULD = (StorageUnavailableError, StorageCorruptError)
"""Faults that each write alone would meet again."""

_MOST_WAITS = 2
"""Writes of one group that may wait for a row's lock in vain, one after another, before the others wait no more."""


class _BatchCall(Waiting):
    """A batch that waits for its turn."""

    def __init__(self, batch: Batch[Any]) -> None:
        super().__init__()
        self._batch = batch
        self.writes: Sequence[Write] = ()

    def begin(self) -> None:
        """Ask for the writes; an error, or a batch without any, has ended it already."""
        if self.future.set_running_or_notify_cancel():
            self._go_on(self._batch.__next__)

    def end(self, outcomes: list[Any]) -> None:
        """Hand over what has become of the writes."""
        if not self.future.done():
            self._go_on(self._batch.send, outcomes)

    def _go_on(self, resume: Callable[..., Sequence[Write]], *sent: object) -> None:
        try:
            self.writes = self.context.run(resume, *sent)
        except StopIteration as end:
            self.future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.future.set_exception(error)


class GroupCommit(SerialThread):
    """A serial thread that writes all batches which wait together in one transaction.

    One bad write never takes its neighbours down: then each is made alone, in the same order. The
    transaction is not synced to the disk by itself: a power cut may take the last ones back, whole ones
    and never one of the middle, so nobody outside may have been promised anything on their account.
    """

    def __init__(self, name: str, database: Database) -> None:
        super().__init__(name)
        self._database = database

    def submit_batch(self, batch: Batch[T]) -> "Future[T]":
        """Have a batch written; return the future of what it returns."""
        call = _BatchCall(batch)
        self._put(call)
        return call.future

    def _serve(self, calls: "SimpleQueue[Waiting | None]") -> None:
        # Nobody but this frame knows the writer: a child that was forked meanwhile must not let go of the connection.
        with closing(Writer(self._database)) as writer:
            while True:
                for kind, run in groupby(_take_waiting(calls), type):
                    if kind is _BatchCall:
                        self._write(writer, cast("list[_BatchCall]", list(run)))
                        continue
                    for call in run:
                        if not isinstance(call, Call):
                            return
                        call.make()

    def _write(self, writer: Writer, group: list[_BatchCall]) -> None:
        for batch in group:
            batch.begin()
        writes = [(write, write.context or batch.context) for batch in group for write in batch.writes]
        outcomes = _Writing(self._database, writer).write(writes)
        for batch in group:
            count = len(batch.writes)
            batch.end(outcomes[:count])
            del outcomes[:count]


class _Writing:
    """The writing of one group."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._writer = writer
        self._fault: StorageError | None = None
        """What all that is still to be written would meet as well."""
        # Where there is one lock for all, who waits for it in vain has done so for everybody. A row's lock may concern
        # one write alone, and one of the table, which takes as long to be told from it, all of them.
        self._waits_left = _MOST_WAITS if database.row_lock else 0

    def write(self, writes: Sequence[tuple[Write, Context]]) -> list[Any]:
        outcomes: list[Any] = []
        run: list[tuple[Write, Context]] = []
        for write in writes:
            if write[0].alone:
                outcomes += self._write_together(run) + self._write_one_by_one([write])
                run = []
                continue
            run.append(write)
            if write[0].closes:
                outcomes += self._write_together(run)
                run = []
        return outcomes + self._write_together(run)

    def _write_together(self, writes: list[tuple[Write, Context]]) -> list[Any]:
        outcomes: dict[int, Any] = {}
        left = list(range(len(writes)))
        while left and self._fault is None:
            made: dict[int, Any] = {}
            number = left[0]
            try:
                with self._writer.transaction() as session:
                    for number in left:
                        write, context = writes[number]
                        share_transactions(context)
                        made[number] = context.run(write.make, session)
            except _NOBODY_COULD as error:
                self._fault = error
            except StorageBusyError as error:
                self._note_wait(error)
                if writes[number][0].pieces:
                    break
                outcomes[number] = error
                left.remove(number)
            except BaseException:  # noqa: BLE001 - whoever raised it will again, alone
                break
            else:
                outcomes |= made
                left = []
        outcomes |= zip(left, self._write_one_by_one([writes[number] for number in left]), strict=True)
        return [outcomes[number] for number in range(len(writes))]

    def _write_one_by_one(self, writes: list[tuple[Write, Context]]) -> list[Any]:
        return [
            [self._write_alone(piece, context) for piece in write.pieces]
            if write.pieces
            else self._write_alone(write.make, context)
            for write, context in writes
        ]

    def _write_alone(self, make: Callable[[Session | None], object], context: Context) -> object:
        if self._fault is not None:
            return self._fault
        try:
            return context.run(make, None)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            if isinstance(error, StorageBusyError):
                self._note_wait(error)
            return error

    def _note_wait(self, error: StorageBusyError) -> None:
        """Let nobody wait any more, each for as long as this one did, when enough have."""
        if self._waits_left == 0:
            self._fault = error
        self._waits_left -= 1


def _take_waiting(calls: "SimpleQueue[Waiting | None]") -> list[Waiting | None]:
    """Wait for a call, and take those that wait behind it, too."""
    waiting = [calls.get()]
    while len(waiting) < _MOST_CALLS and not calls.empty():  # there is no other taker
        waiting.append(calls.get())
    return waiting
