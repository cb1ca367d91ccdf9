"""Settlement: the one place that makes a handler's plan happen, in one transaction."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from tinycortex.config import QueueSettings
from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock
from tinycortex.domain.cooldown import cooldown_ms
from tinycortex.domain.failures import describe_error, find_failure, iter_causes
from tinycortex.domain.jobs import Job, JobStatus
from tinycortex.domain.outcomes import Defer, Done, JobPlan, Writes
from tinycortex.domain.redact import scrub_for_log
from tinycortex.errors import InvalidInputError, JobFailure, StorageBusyError, StorageError
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.producer import Producer

logger = logging.getLogger(__name__)

_NOT_HELD = (
    "was cancelled, or claimed anew after its lease, or settled by a commit whose answer was lost; "
    "nothing more is written"
)


class Settlement:
    """Ends claims: the row's status, its follow-up jobs and the handler's writes commit together."""

    def __init__(
        self,
        database: Database,
        jobs: JobRepository,
        producer: Producer,
        settings: QueueSettings,
        clock: Clock,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._producer = producer
        self._settings = settings
        self._clock = clock

    def settle(self, job: Job, result: JobPlan | BaseException, *, session: Session | None = None) -> bool:
        """End the claim ``job`` with what its handler planned or raised.

        Whatever the plan's own writes or follow-ups raise undoes the whole plan and fails the attempt.

        Args:
            job: the claim.
            result: the plan, or the error.
            session: a transaction to settle it in; in one of its own when left out.

        Returns:
            Whether it took effect; False when the claim was no longer held, and then nothing is written.

        Raises:
            StorageError: nothing was written; the claim still holds.
            BaseException: only with a ``session``, which must be rolled back then, and the claim settled alone.
        """
        if not isinstance(result, JobPlan):
            return self._fail(job, result, session)
        try:
            held = self._apply(job, result, session)
        except StorageError:
            raise
        except BaseException as error:  # its own writes may raise anything; no Ctrl-C arrives here
            if session is not None:
                raise
            return self._fail(job, error, None)
        if not held:
            logger.warning("job %s (%s) %s", job.id, job.kind, _NOT_HELD)
        return held

    def settle_done(
        self, done: Sequence[tuple[Job, Done]], handler_ms: Sequence[float | None], *, session: Session | None = None
    ) -> list[bool]:
        """End many claims of different rows as done, with their follow-ups, all or none.

        Args:
            done: the claims, and their plans, which have no writes of their own.
            handler_ms: how long each handler ran (ms).
            session: a transaction to settle them in; in one of its own when left out.

        Returns:
            For each, whether it took effect; see :meth:`settle`.

        Raises:
            BaseException: nothing was written; each may be settled by itself.
        """
        jobs = [job for job, _plan in done]
        with self._database.within(session) as tx:
            held = self._jobs.mark_done_many(jobs, handler_ms=handler_ms, session=tx)
            plans = [plan for (_job, plan), is_held in zip(done, held, strict=True) if is_held]
            if follow_ups := [follow_up for plan in plans for follow_up in plan.follow_ups]:
                self._producer.enqueue_many(follow_ups, session=tx)
            held = [is_held or self._was_done(job, tx) for job, is_held in zip(jobs, held, strict=True)]
        for job, is_held in zip(jobs, held, strict=True):
            if not is_held:
                logger.warning("job %s (%s) %s", job.id, job.kind, _NOT_HELD)
        return held

    def _apply(self, job: Job, plan: JobPlan, around: Session | None) -> bool:
        # A handler's writes are given an ordinary session.
        with self._database.transaction() if around is None else nullcontext(around) as session:
            # First the row: a stale holder writes nothing else, and learns it before its writes run.
            if not self._end(job, plan, session):
                return isinstance(plan, Done) and self._was_done(job, session)
            if plan.writes is not None:
                self._write(plan.writes, session)
            for follow_up in plan.follow_ups:
                self._producer.enqueue(follow_up, session=session)
            if isinstance(plan, Defer):
                self._jobs.close_gate(job, cooldown_ms(plan, self._clock.now_ms()), session=session)
        return True

    def _was_done(self, job: Job, session: Session) -> bool:
        """Tell whether this very claim has ended so before, by a commit that was kept although its answer was lost."""
        found = self._jobs.find_job(job.id, session=session)
        return found is not None and found.status is JobStatus.DONE and found.claim_token == job.claim_token

    def _write(self, writes: Writes, session: Session) -> None:
        """Call a handler's writes in the settlement's transaction, which they cannot end.

        Raises:
            StorageError: this database could not take them; the result is kept, and tried again. So it is when
                they met a lock of somebody else's, which only an engine with many writers has.
            BaseException: whatever else they met; it fails the attempt, or it would be tried again for ever.
        """
        connection = session.connection()
        try:
            with self._database.keep_open(session), _no_commit(session):
                _refuse_awaitable(writes(session))
                session.flush()
        except BaseException as error:
            fault = next(filter(self._database.owns, iter_causes(error)), None)
            if fault is not None and self._is_theirs(fault, connection):
                raise fault from error
            if self._database.is_busy(error):  # not for others: this settlement holds what it waited for
                raise InvalidInputError(
                    "writes= waited for the write lock that its own settlement holds; write through its session"
                ) from error
            if isinstance(error, StorageError):
                raise InvalidInputError(f"writes= met a fault outside its session: {error}") from error
            raise

    def _is_theirs(self, fault: StorageError, connection: Connection) -> bool:
        """Tell whether ``fault`` is due to others, or to the database itself, and not to the settlement's own lock."""
        return not isinstance(fault, StorageBusyError) or self._database.waited_for_others(fault, connection)

    def _end(self, job: Job, plan: JobPlan, session: Session) -> bool:
        if not isinstance(plan, Defer):
            return self._jobs.mark_done(job, session=session)
        now_ms = self._clock.now_ms()
        since_ms = job.deferred_since_ms
        if not plan.progress and since_ms is not None and now_ms - since_ms > self._settings.max_defer_age_ms:
            failure = JobFailure.unrecoverable(policy.REASON_DEFER_AGE)
            message = f"deferred without progress since {since_ms} ms; last reason: {plan.reason}"
            return self._jobs.mark_failed_typed(job, message, failure, session=session)
        # A defer to now or to the past would spin, and a drain would never end.
        until_ms = max(plan.until_ms, now_ms + self._settings.min_defer_ms)
        return self._jobs.mark_deferred(job, until_ms, plan.reason, progress=plan.progress, session=session)

    def _fail(self, job: Job, error: BaseException, session: Session | None) -> bool:
        message = describe_error(error)
        with self._database.within(session) as tx:
            held = self._jobs.mark_failed_typed(job, message, find_failure(error), session=tx)
            if held:
                self._jobs.close_gate(job, cooldown_ms(error, self._clock.now_ms()), session=tx)
            self._database.on_commit(tx, partial(_log_failure, job, message, held=held))
        return held


def _log_failure(job: Job, message: str, *, held: bool) -> None:
    logger.warning(
        "job %s (%s) attempt %d of %d failed%s: %s",
        job.id,
        job.kind,
        job.attempts,
        job.max_attempts,
        "" if held else f"; it {_NOT_HELD}",
        scrub_for_log(message),
    )


def _refuse_awaitable(returned: object) -> None:
    """Refuse writes that have only begun: nobody would await them, and the job would be done without them."""
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise InvalidInputError("writes= is a plain function; one that must be awaited would never have run")


@contextmanager
def _no_commit(session: Session) -> Iterator[None]:
    """Refuse a commit of the session or of its connection with a message that says what is wrong.

    Savepoints are the handler's own.
    """

    def refuse(_what: object) -> None:
        raise InvalidInputError("writes= must not commit: its session commits with the settlement")

    def refuse_outermost(committing: Session) -> None:
        if not committing.in_nested_transaction():
            refuse(committing)

    transaction, connection = session.get_transaction(), session.connection()
    event.listen(session, "before_commit", refuse_outermost)
    event.listen(connection, "commit", refuse)
    try:
        yield
    finally:
        event.remove(session, "before_commit", refuse_outermost)
        event.remove(connection, "commit", refuse)
    if session.get_transaction() is not transaction or not connection.in_transaction():
        raise InvalidInputError("writes= must not end its transaction: the settlement would go with it")
