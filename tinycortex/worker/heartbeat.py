"""Heartbeat: looks after the claims of running handlers, from a thread that no handler can block."""

import logging
import os
import threading
import time
from dataclasses import dataclass

from tinycortex.domain.jobs import Job
from tinycortex.errors import StorageError
from tinycortex.handlers.context import RunSignals
from tinycortex.repositories.jobs import JobRepository

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3

_TELL_EVERY_S = 60.0
"""A fault that lasts is told this often, not at each beat."""


@dataclass(slots=True)
class _Watched:
    job: Job
    signals: RunSignals
    lease_ms: int
    renewed_at: float  # monotonic seconds: a wall clock that is set must not make a lease look fresh or old


class Heartbeat:
    """Renews leases at a third of their length, and tells handlers of a lost lease or a request to stop.

    Its thread starts with the first claim, sleeps while there are none, and does not survive a fork.
    """

    def __init__(self, jobs: JobRepository, *, beat_ms: int) -> None:
        self._jobs = jobs
        self._beat_ms = beat_ms
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._watched: dict[str, _Watched] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._asleep = False
        self._tell_again_at = 0.0

    def watch(self, job: Job, signals: RunSignals, renewed_at: float | None = None) -> None:
        """Look after the claim ``job`` until it is dropped.

        Args:
            job: the claim.
            signals: what its handler is told.
            renewed_at: when its lease was renewed (monotonic seconds), as :meth:`drop` says; just now when left out.
        """
        if self._process != os.getpid():
            self._start_afresh()  # thread, claims and perhaps a held lock are the parent's
        lease_ms = (job.locked_until_ms or 0) - (job.started_at_ms or 0)
        with self._changed:
            other = self._watched.get(job.id)
            if other is not None and other.job.claim_token > job.claim_token:
                signals.lease_lost = True
                return
            if other is not None and other.job.claim_token < job.claim_token:
                other.signals.lease_lost = True  # this very process has claimed the row anew
            self._watched[job.id] = _Watched(
                job, signals, lease_ms, time.monotonic() if renewed_at is None else renewed_at
            )
            if self._thread is None:
                # Each thread has a stop of its own: one that is still ending cannot be called back to life.
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._stop,), name="tinycortex-heartbeat", daemon=True
                )
                self._thread.start()
            elif self._asleep or lease_ms < self._beat_ms * _RENEWALS_PER_LEASE:
                self._changed.notify_all()

    def drop(self, job: Job) -> float | None:
        """Look after the claim no more; return when its lease was renewed, None when nobody looked after it."""
        with self._changed:
            watched = self._watched.get(job.id)
            if watched is None or watched.job.claim_token != job.claim_token:
                return None
            del self._watched[job.id]
            return watched.renewed_at

    def list_claims(self) -> set[tuple[str, int]]:
        """Return the claims that are looked after, each by its row's id and its token."""
        with self._changed:
            return {(watched.job.id, watched.job.claim_token) for watched in self._watched.values()}

    def is_healthy(self) -> bool:
        """Tell whether the thread that renews leases is alive, or not needed yet."""
        return self._process != os.getpid() or self._thread is None or self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread, and wait for its end."""
        if self._process != os.getpid():
            return
        with self._changed:
            thread, self._thread = self._thread, None
            self._watched.clear()
            self._stop.set()
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def beat(self) -> None:
        """Look once after every claim: is it still held, was it asked to stop, is its renewal due?"""
        with self._changed:
            watched = list(self._watched.values())
        for claim in watched:
            claim.signals.look_at_loop()
        if not watched:
            return
        try:
            held = self._jobs.watch(claim.job for claim in watched)
            for claim in watched:
                self._look_after(claim, held.get(claim.job.id))
        except StorageError as error:
            if time.monotonic() >= self._tell_again_at:
                self._tell_again_at = time.monotonic() + _TELL_EVERY_S
                logger.warning("the heartbeat cannot reach the database: %s", type(error).__name__)
            for claim in watched:
                # Nobody can tell now; past its lease another worker may have the row.
                if time.monotonic() - claim.renewed_at > claim.lease_ms / 1000:
                    claim.signals.lease_lost = True

    def _look_after(self, claim: _Watched, asked_to_stop: bool | None) -> None:
        if asked_to_stop is None:
            self._lose(claim)
            return
        if asked_to_stop:
            claim.signals.request_cancel()
        now = time.monotonic()
        if now - claim.renewed_at >= claim.lease_ms / 1000 / _RENEWALS_PER_LEASE:
            if self._jobs.renew(claim.job, claim.lease_ms):
                claim.renewed_at = now
            else:
                self._lose(claim)

    def _lose(self, claim: _Watched) -> None:
        with self._changed:
            dropped = self._watched.get(claim.job.id) is not claim
            if not dropped:
                del self._watched[claim.job.id]
        if not dropped:  # else it has settled since the look
            claim.signals.lease_lost = True
            logger.warning("job %s (%s): its lease is lost", claim.job.id, claim.job.kind)

    def _serve(self, stop: threading.Event) -> None:
        beaten_at = time.monotonic()
        while self._wait_for_beat(stop, beaten_at):
            try:
                self.beat()
            except Exception:
                # Whatever it is, leases must go on being renewed.
                logger.exception("the heartbeat failed once and goes on")
            beaten_at = time.monotonic()

    def _wait_for_beat(self, stop: threading.Event, beaten_at: float) -> bool:
        """Wait until the next beat is due; False when the thread shall end.

        What is waited for is asked before each wait: a notice that comes while nobody waits is gone.
        And a notice only shortens the wait: claims that come and go must not put a beat off.
        """
        with self._changed:
            while not stop.is_set():
                if not self._watched:
                    self._asleep = True
                    self._changed.wait()
                    self._asleep = False
                    continue
                leases = (claim.lease_ms / _RENEWALS_PER_LEASE for claim in self._watched.values())
                left = beaten_at + min(self._beat_ms, *leases) / 1000 - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
        return False
