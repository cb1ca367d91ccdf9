"""One step of a worker: claim a row, perform its handler, settle (spec: Worker loop)."""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from tinycortex.config import QueueSettings
from tinycortex.dialects import Presence
from tinycortex.domain.jobs import Job
from tinycortex.domain.outcomes import JobPlan
from tinycortex.errors import StorageError
from tinycortex.handlers.context import RunSignals
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.dispatcher import Dispatcher
from tinycortex.services.gate import LlmGate, Permit
from tinycortex.services.portal import LoopThread
from tinycortex.services.settlement import Settlement
from tinycortex.worker.heartbeat import Heartbeat
from tinycortex.worker.identity import WorkerIdentity

Result = JobPlan | BaseException
"""What a handler planned, or what it raised."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased row, the permit its handler runs under when its kind is LLM-bound, and what the handler is told."""

    job: Job
    permit: Permit | None
    signals: RunSignals = field(default_factory=RunSignals)


class WorkerStep:
    """Claim, perform, settle: every loop drives these three, and nothing else touches a claim."""

    def __init__(
        self,
        *,
        jobs: JobRepository,
        registry: HandlerRegistry,
        dispatcher: Dispatcher,
        settlement: Settlement,
        gate: LlmGate,
        presence: Presence,
        portal: LoopThread,
        heartbeat: Heartbeat,
        settings: QueueSettings,
    ) -> None:
        self._jobs = jobs
        self._registry = registry
        self._dispatcher = dispatcher
        self._settlement = settlement
        self._gate = gate
        self._presence = presence
        self._portal = portal
        self._heartbeat = heartbeat
        self._settings = settings
        self._identity = WorkerIdentity()
        self._unsettled: deque[tuple[Claim, Result | None]] = deque()

    @property
    def worker_id(self) -> str:
        """Return the word that this process's claims carry in ``locked_by``."""
        return self._identity.current()

    def run_once(self) -> bool:
        """Claim one job, run its handler, settle; False when nothing was claimable.

        Raises:
            StorageError: the database could not do its work. A result that could not be written is kept,
                its lease renewed, and written by the next step.
        """
        claim = self.claim()
        if claim is None:
            return False
        self.settle(claim, self._portal.run(self.perform(claim)))
        return True

    async def run_once_async(self) -> bool:
        """Do as :meth:`run_once` on the running loop; storage is used in threads only."""
        claiming = asyncio.ensure_future(asyncio.to_thread(self.claim))
        try:
            claim = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with suppress(StorageError):  # it must not take the place of the request to stop
                if (claimed := await claiming) is not None:
                    await asyncio.to_thread(self._give_back, claimed)
            raise
        if claim is None:
            return False
        result = await self.perform(claim)
        await asyncio.shield(asyncio.to_thread(self.settle, claim, result))
        return True

    def claim(self) -> Claim | None:
        """Lease the next due row of the registered kinds, or return None.

        The permit comes first: with none free, LLM-bound kinds are left out and the others go on.
        """
        self.settle_kept()
        self._presence.announce(self.worker_id)
        permit = self._gate.try_acquire()
        specs = self._registry.list_specs()
        if permit is None:
            specs = [spec for spec in specs if not spec.llm_bound]
        try:
            job = self._jobs.claim_next(self._settings.lease_ms, kinds=specs, worker_id=self.worker_id)
        except BaseException:
            if permit is not None:
                permit.release()
            raise
        if permit is not None and (job is None or not self._registry.get(job.kind).spec.llm_bound):
            permit.release()
            permit = None
        if job is None:
            return None
        claim = Claim(job, permit)
        self._heartbeat.watch(job, claim.signals)
        return claim

    async def perform(self, claim: Claim) -> Result:
        """Run the handler under its permit and return its plan, or whatever it raised.

        Raises:
            asyncio.CancelledError: this task itself was cancelled. The claim has been given back, unless
                the handler's thread is still running: its row stays leased until then, and is given back after.
        """
        try:
            result: Result = await self._dispatcher.dispatch(claim.job, claim.signals)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A storage fault must not take the place of the request to stop.
                if not claim.signals.after_thread(lambda: self._give_back_quietly(claim)):
                    await asyncio.shield(asyncio.to_thread(self._give_back_quietly, claim))
                raise
            result = error  # the handler's own, or of a job that was asked to stop
        except BaseException as error:  # noqa: BLE001 - SystemExit from a handler must not end the worker
            result = error
        if claim.permit is not None:
            claim.permit.release()
        return result

    def settle(self, claim: Claim, result: Result) -> None:
        """End the claim; see :meth:`Settlement.settle`.

        A storage fault that a handler met is not the job's fault: its claim is given back, attempt and
        all, and the fault raised for the loop to wait it out.

        Raises:
            StorageError: the handler's, or the database could not write how the claim ended, which is then kept.
        """
        fault = result if isinstance(result, StorageError) else None
        self._end(claim, None if fault else result)
        if fault:
            raise fault

    def settle_kept(self) -> None:
        """Write the results that the database could not take before.

        Raises:
            StorageError: it still cannot.
        """
        while True:
            try:
                claim, result = self._unsettled.popleft()
            except IndexError:  # asked this way, since another thread may take the last one first
                return
            self._end(claim, result)

    def _end(self, claim: Claim, result: Result | None) -> None:
        """Write how a claim ended, None for one that is given back unused; keep what cannot be written."""
        self._heartbeat.drop(claim.job)
        try:
            if result is None:
                self._jobs.release(claim.job)
            else:
                self._settlement.settle(claim.job, result)
        except StorageError:
            self._heartbeat.watch(claim.job, claim.signals)
            self._unsettled.append((claim, result))
            raise

    def _give_back(self, claim: Claim) -> None:
        if claim.permit is not None:
            claim.permit.release()
        self._end(claim, None)

    def _give_back_quietly(self, claim: Claim) -> None:
        with suppress(StorageError):  # kept, and nobody is there to be told
            self._give_back(claim)
