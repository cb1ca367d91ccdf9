"""What a session does once its transaction has been committed, and never when it was not."""

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Self

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

_KEY = "tinycortex_after_commit"
_OWNED = "tinycortex_owned"


class AfterCommit:
    """The calls that wait for the outermost commit of one session, of whatever engine or owner.

    A call belongs to the transaction, or to the savepoint, in which it was asked for, and goes with it.
    """

    def __init__(self, session: Session) -> None:
        self._waiting: dict[SessionTransaction, dict[Callable[[], object], tuple[Connection, Context]]] = {}
        self._due: list[tuple[Callable[[], object], Context]] = []
        self._committed: SessionTransaction | None = None
        event.listen(session, "after_commit", self._note_commit)
        event.listen(session, "after_transaction_end", self._note_end)

    @classmethod
    def of(cls, session: Session) -> Self:
        """Return the one of ``session``, which keeps it."""
        found = cls.find(session)
        if found is None:
            found = session.info[_KEY] = cls(session)
        return found

    @classmethod
    def find(cls, session: Session) -> Self | None:
        """Return the one of ``session``, or None when nothing was asked for there."""
        found: Self | None = session.info.get(_KEY)
        return found

    @staticmethod
    def leave_to_owner(session: Session) -> None:
        """Have the calls wait for :meth:`make_due_calls_of` instead of making them as the commit ends."""
        session.info[_OWNED] = True

    def add(self, session: Session, do: Callable[[], object]) -> None:
        """Have ``do`` called after the commit, in this context; once, however often one transaction asks for it."""
        transaction = _innermost(session) or session.begin()
        self._waiting.setdefault(transaction, {})[do] = session.connection(), copy_context()

    def _note_commit(self, session: Session) -> None:
        self._committed = _innermost(session)

    def _note_end(self, session: Session, transaction: SessionTransaction) -> None:
        ended = self._waiting.pop(transaction, None)
        committed, self._committed = self._committed is transaction, None
        if not ended or not committed:
            return
        around = _innermost(session)
        if around is not None:
            self._waiting.setdefault(around, {}).update(ended)
            return
        # A session may have joined a transaction of its connection, whose end nobody would tell us.
        self._due += [
            (do, context)
            for do, (connection, context) in ended.items()
            if connection.closed or not connection.in_transaction()
        ]
        if _OWNED not in session.info:
            self.make_due_calls()

    @classmethod
    def make_due_calls_of(cls, session: Session) -> None:
        """Make the calls of ``session`` whose transaction has committed, each once."""
        if (found := cls.find(session)) is not None:
            found.make_due_calls()

    def make_due_calls(self) -> None:
        """Make the calls whose transaction has committed, each once."""
        due, self._due = self._due, []
        for do, context in due:
            context.run(do)


def _innermost(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()
