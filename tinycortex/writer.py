"""The write transactions of one thread, all on one connection."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Pool
from sqlalchemy.orm import Session

from tinycortex.commits import AfterCommit
from tinycortex.db import Database, IdleSession


class Writer:
    """Writes one transaction after another, as :meth:`Database.transaction` does, for one thread.

    A session, a pooled connection and a look at the pool take several times as long as the statements of a small
    transaction. So the connection is kept for the next one, and the session does nothing until it is asked for more
    than that connection. After an error, or a session that was used, both are let go of, and nothing of what was done
    with them is met again.

    The commits are not durable: a power cut may take the last ones back, whole ones and never one of the middle.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._session: IdleSession | None = None
        self._pool: Pool | None = None

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Run the block in one write transaction: commit at its end, roll back when it raises.

        Raises:
            InvalidInputError: it would wait for the transaction that its own caller holds open.
            TransactionEndedError: the block went on after the transaction was over.
            StorageError: the database could not do its work; nothing of the block was kept.
        """
        with self._database.inside_transaction():
            session = self._open()
            try:
                with session.kept_transaction():
                    yield session
            except BaseException:
                self.close()
                raise
            if session.was_used:
                self.close()
        AfterCommit.make_due_calls_of(session)  # only here, where they may write too

    def _open(self) -> IdleSession:
        if self._session is not None and not self._can_go_on(self._session.kept):
            self.close()
        if self._session is None:
            self._session = self._database.open_idle_session()
            self._pool = self._database.engine.pool
            AfterCommit.leave_to_owner(self._session)
        return self._session

    def _can_go_on(self, kept: Connection) -> bool:
        # Who disposes of an engine has it make a new pool, and wants no connection of the old one to be used again.
        return self._pool is self._database.engine.pool and self._database.can_go_on(kept)

    def close(self) -> None:
        """Let go of the connection; a later transaction takes another one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            if self._pool is not self._database.engine.pool:
                session.kept.detach()  # nobody closes what goes back to a pool that was disposed of
            session.kept.close()
