"""One step of a worker: claim a row, perform its handler, settle (spec: Worker loop)."""

import asyncio
from dataclasses import dataclass

from tinycortex.config import QueueSettings
from tinycortex.dialects import Presence
from tinycortex.domain.jobs import Job
from tinycortex.domain.outcomes import JobPlan
from tinycortex.errors import StorageError
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.dispatcher import Dispatcher
from tinycortex.services.gate import LlmGate, Permit
from tinycortex.services.portal import LoopThread
from tinycortex.services.settlement import Settlement
from tinycortex.worker.identity import WorkerIdentity


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased row, and the permit that its handler runs under when its kind is LLM-bound."""

    job: Job
    permit: Permit | None


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
        settings: QueueSettings,
    ) -> None:
        self._jobs = jobs
        self._registry = registry
        self._dispatcher = dispatcher
        self._settlement = settlement
        self._gate = gate
        self._presence = presence
        self._portal = portal
        self._settings = settings
        self._identity = WorkerIdentity()

    @property
    def worker_id(self) -> str:
        """Return the word that this process's claims carry in ``locked_by``."""
        return self._identity.current()

    def run_once(self) -> bool:
        """Claim one job, run its handler, settle; False when nothing was claimable.

        Raises:
            StorageError: the database could not do its work; a claim that was made holds until its lease ends.
        """
        claim = self.claim()
        if claim is None:
            return False
        try:
            result = self._portal.run(self.perform(claim))
        except BaseException:  # only the caller's own interruption: perform returns what a handler raises
            self._jobs.release(claim.job)
            raise
        self.settle(claim, result)
        return True

    async def run_once_async(self) -> bool:
        """Do as :meth:`run_once` on the running loop; storage is used in threads only."""
        claiming = asyncio.ensure_future(asyncio.to_thread(self.claim))
        try:
            claim = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            if (claimed := await claiming) is not None:
                await asyncio.to_thread(self._give_up, claimed)
            raise
        if claim is None:
            return False
        try:
            result = await self.perform(claim)
        except asyncio.CancelledError:
            await asyncio.to_thread(self._jobs.release, claim.job)
            raise
        await asyncio.shield(asyncio.to_thread(self.settle, claim, result))
        return True

    def claim(self) -> Claim | None:
        """Lease the next due row of the registered kinds, or return None.

        The permit comes first: with none free, LLM-bound kinds are left out and the others go on.
        """
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
        return None if job is None else Claim(job, permit)

    async def perform(self, claim: Claim) -> JobPlan | BaseException:
        """Run the handler under its permit and return its plan, or whatever it raised.

        Raises:
            asyncio.CancelledError: this task itself was cancelled.
        """
        try:
            return await self._dispatcher.dispatch(claim.job)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return error  # the handler's own, raised by mistake: a failed attempt
        except BaseException as error:  # noqa: BLE001 - SystemExit from a handler must not end the worker
            return error
        finally:
            if claim.permit is not None:
                claim.permit.release()

    def settle(self, claim: Claim, result: JobPlan | BaseException) -> bool:
        """End the claim; see :meth:`Settlement.settle`.

        A storage fault that a handler met is not the job's fault: its claim is given back, attempt and
        all, and the fault raised for the loop to wait it out.
        """
        if isinstance(result, StorageError):
            self._jobs.release(claim.job)
            raise result
        return self._settlement.settle(claim.job, result)

    def _give_up(self, claim: Claim) -> None:
        if claim.permit is not None:
            claim.permit.release()
        self._jobs.release(claim.job)
