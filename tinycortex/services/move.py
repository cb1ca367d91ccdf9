"""Moving a whole queue into an empty database, of the same engine or of another."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from tinycortex import schema
from tinycortex.config import DatabaseSettings, Settings, load_settings
from tinycortex.db import Database, ObservedDatabase
from tinycortex.dialects import dialect_for
from tinycortex.domain.checksums import Checksum, Digest
from tinycortex.domain.jobs import JobStatus
from tinycortex.errors import MoveError, StorageError
from tinycortex.repositories.job_reader import JobReader

if TYPE_CHECKING:
    from tinycortex.repositories.tables import StoredRows

_LOOK_AGAIN_S = 0.25
"""Pause between two looks for running jobs."""


class MoveStage(StrEnum):
    """What a move is at."""

    WAIT = "wait"
    COPY = "copy"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveProgress:
    """How far a move has come.

    Attributes:
        stage: what it is at.
        done: rows copied or read again; 0 while it waits.
        total: rows that the stage has in all; while it waits, jobs that are running.
    """

    stage: MoveStage
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What was moved. The same rows give the same checksums on every engine.

    Attributes:
        source: where from; the URL without its password.
        target: where to; the URL without its password.
        tables: rows and checksum of each table, by its name.
        active_keys: rows and checksum of the dedupe keys that ready jobs hold.
    """

    source: str
    target: str
    tables: Mapping[str, Digest]
    active_keys: Digest


def _ignore(_progress: MoveProgress) -> None:
    pass


def move(
    source: str,
    target: str,
    *,
    wait: bool = False,
    settings: Settings | None = None,
    on_progress: Callable[[MoveProgress], None] = _ignore,
) -> MoveReport:
    """Copy every row of the queue at one URL into the empty database at another.

    What is read is one snapshot of the source, in which no job is running; nothing is written there. All is
    copied in one transaction of the target, and read again from both sides before it commits: counts, a
    checksum for each table, and the dedupe keys of active rows. So the workers and the producers of the source
    should have been stopped: what they write meanwhile makes the move fail, and what they write later stays
    behind.

    Args:
        source: URL of the queue, which must be at the newest revision.
        target: URL of a database without a row of ours; it is made, and upgraded, when it has no schema.
        wait: wait until no job of the source is running, rather than raise.
        settings: everything else about both databases, less the schema for one on SQLite; from the environment
            when left out.
        on_progress: called again and again, in this thread; what it raises ends the move.

    Raises:
        MoveError: the source has running jobs, was changed meanwhile, or holds a row that cannot be stored; or
            the target has rows, or is not what was copied.
        SchemaMissingError: the source has no schema.
        SchemaOutdatedError: source or target is at another revision.
        ConfigurationError: a URL, or a setting, cannot work.
        StorageError: a database could not do its work.
    """
    settings = settings or load_settings()
    mover = _Mover(_settings_of(source, settings), _settings_of(target, settings), on_progress)
    return mover.run(wait=wait)


def _settings_of(url: str, settings: Settings) -> DatabaseSettings:
    found = settings.with_url(url).database
    # Said for the other of the two, since it is an error here.
    return found if dialect_for(url).has_schemas else found.model_copy(update={"schema_name": None})


class _Mover:
    def __init__(
        self, source: DatabaseSettings, target: DatabaseSettings, on_progress: Callable[[MoveProgress], None]
    ) -> None:
        self._source = source
        self._target = target
        self._on_progress = on_progress
        from tinycortex.repositories.tables import active_keys, all_tables  # noqa: PLC0415 - it maps every table

        self._tables, self._keys = all_tables(), active_keys()
        self._all_rows = [*self._tables, self._keys]

    def run(self, *, wait: bool) -> MoveReport:
        with _observe(self._target) as seen:  # before anything is waited for, made, or adopted
            if seen.exists():
                self._refuse_rows(seen)
        with self._find_quiet_source(wait=wait) as (source, snapshot):
            self._prepare_target()
            target = Database(self._target)
            try:
                with target.transaction() as session:
                    self._wait_for_other_moves(target, session)
                    self._refuse_rows(target, session)
                    copied = self._copy(snapshot, session)
                    self._verify(copied, session, target.masked_url)
            finally:
                target.dispose()
        *tables, keys = copied
        return MoveReport(
            source=source.masked_url,
            target=target.masked_url,
            tables={stored.name: digest for stored, digest in zip(self._tables, tables, strict=True)},
            active_keys=keys,
        )

    @contextmanager
    def _find_quiet_source(self, *, wait: bool) -> Iterator[tuple[Database, Session]]:
        """Open the one snapshot that all is copied from, in which no job is running."""
        while True:
            with _observe(self._source) as database:
                if not database.exists():
                    raise MoveError(f"there is no database at {database.masked_url} to move from; check the URL")
                _check_schema(database)
                with database.reading() as session:
                    jobs = JobReader(database)
                    running = jobs.count_by_status(session=session)[JobStatus.RUNNING]
                    if not running:
                        yield database, session
                        return
                    (example,) = jobs.list_jobs(status=JobStatus.RUNNING, limit=1, session=session)
            if not wait:
                raise MoveError(
                    f"jobs of database {database.masked_url} that are running: {running}, such as {example.id}; stop "
                    "its workers, let `tinycortex tick` recover what dead ones left, or wait for them with --wait"
                )
            self._on_progress(MoveProgress(stage=MoveStage.WAIT, done=0, total=running))
            time.sleep(_LOOK_AGAIN_S)

    def _wait_for_other_moves(self, target: Database, session: Session) -> None:
        # Where several can write at a time, each of two moves would find the target empty, and both would stay.
        for statement in target.list_preliminaries():
            session.connection().exec_driver_sql(statement)

    def _refuse_rows(self, target: Database, session: Session | None = None) -> None:
        with target.reading_within(session) as tx:
            filled = [stored.name for stored in self._tables if stored.has_any(tx)]
        if filled:
            raise MoveError(
                f"database {target.masked_url} has rows already, in {', '.join(filled)}; move into an empty one"
            )

    def _prepare_target(self) -> None:
        with _observe(self._target) as target:
            revision = schema.find_revision(target)
        if revision is None:
            schema.upgrade(self._target.url, schema=self._target.schema_name)
        with _observe(self._target) as target:
            _check_schema(target)

    def _copy(self, snapshot: Session, session: Session) -> list[Digest]:
        counted = self._counter(MoveStage.COPY, sum(stored.count(snapshot) for stored in self._tables))
        digests = []
        for stored in self._tables:
            checksum = Checksum()
            with stored.read(snapshot) as portions:
                for rows in portions:
                    checksum.add(rows)
                    stored.insert(session, rows)
                    counted(len(rows))
            digests.append(checksum.digest())
        return [*digests, _digest(self._keys, snapshot, lambda _rows: None)]

    def _verify(self, copied: Sequence[Digest], session: Session, target_url: str) -> None:
        counted = self._counter(MoveStage.VERIFY, 2 * sum(digest.rows for digest in copied))
        for stored, expected in zip(self._all_rows, copied, strict=True):
            found = _digest(stored, session, counted)
            if found != expected or stored.count(session) != expected.rows:
                raise MoveError(
                    f"database {target_url} does not hold what was copied into {stored.name} ({found.rows} rows of "
                    f"{expected.rows}); nothing was kept"
                )
        # Once more the source, as it is now: what was enqueued or run meanwhile would be left behind unseen.
        with _observe(self._source) as source, source.reading() as now:
            for stored, expected in zip(self._all_rows, copied, strict=True):
                if _digest(stored, now, counted) != expected or not source.was_still():
                    raise _changed(source)

    def _counter(self, stage: MoveStage, total: int) -> Callable[[int], None]:
        done = 0

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            self._on_progress(MoveProgress(stage=stage, done=done, total=total))

        return count


@contextmanager
def _observe(settings: DatabaseSettings) -> Iterator[ObservedDatabase]:
    database = ObservedDatabase(settings)
    try:
        yield database
    except StorageError as error:
        if database.owns(error) and not database.was_still():  # what was read is half of one state, half of another
            raise _changed(database) from error
        raise
    finally:
        database.dispose()


def _changed(database: Database) -> MoveError:
    return MoveError(
        f"database {database.masked_url} was changed while it was moved; stop its workers and whatever else writes "
        "to it, and move again"
    )


def _check_schema(database: Database) -> None:
    schema.verify(database)
    if differences := schema.find_differences(database):
        raise MoveError(
            f"database {database.masked_url} differs from its schema: {differences[0]}; "
            "`tinycortex doctor` tells all, and how to mend it"
        )


def _digest(stored: "StoredRows", session: Session, counted: Callable[[int], None]) -> Digest:
    checksum = Checksum()
    with stored.read(session) as portions:
        for rows in portions:
            checksum.add(rows)
            counted(len(rows))
    return checksum.digest()
