"""Metrics: counters and histograms of the events, gauges of the queue's state."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

from tinycortex.errors import TinycortexError
from tinycortex.telemetry import otel_names as names
from tinycortex.telemetry.events import Event, JobClaimed, JobsEnqueued, JobSettled, LeasesRecovered, WorkerPaused
from tinycortex.telemetry.otel import Queue

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""From a claim to a long call of a model."""

_ACTIVE = ("ready", "running")

_Observe = Callable[[Queue], Iterator[Observation]]
_Record = Callable[[float, Mapping[str, str] | None], None]


class Metrics:
    """The metrics of one queue."""

    def __init__(self, queue: Queue, provider: MeterProvider | None) -> None:
        self._queue: Queue | None = queue
        meter = get_meter("tinycortex", meter_provider=provider)

        def histogram(name: str, description: str) -> _Record:
            return meter.create_histogram(
                name, unit="s", description=description, explicit_bucket_boundaries_advisory=_BUCKETS_S
            ).record

        def counter(name: str, unit: str, description: str) -> _Record:
            return meter.create_counter(name, unit=unit, description=description).add

        self._sent = counter("messaging.client.sent.messages", "{message}", "Jobs enqueued.")
        self._settled = counter("messaging.client.consumed.messages", "{message}", "Runs that ended, by outcome.")
        self._recovered = counter("tinycortex.leases.recovered", "{lease}", "Rows taken from workers that are gone.")
        self._paused = counter("tinycortex.worker.pauses", "{pause}", "Storage faults that a worker waited out.")
        self._claim_s = histogram("messaging.client.operation.duration", "Duration of a claim.")
        self._wait_s = histogram("tinycortex.job.wait.duration", "From a job's due time to its claim.")
        self._handler_s = histogram("messaging.process.duration", "Duration of a handler.")
        for name, unit, observe, description in (
            ("tinycortex.queue.depth", "{job}", self._observe_depth, "Ready and running jobs."),
            ("tinycortex.queue.oldest_age", "s", self._observe_age, "How long the oldest due job has been due."),
            ("tinycortex.gate.in_use", "{permit}", self._observe_gate, "LLM permits in use."),
            ("tinycortex.gate.limit", "{permit}", self._observe_limit, "LLM permits there are."),
        ):
            meter.create_observable_gauge(name, [self._quietly(observe)], unit=unit, description=description)

    def end(self) -> None:
        """Let the gauges show nothing more; they cannot be taken back from their provider."""
        self._queue = None

    def _quietly(self, observe: _Observe) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def call(_options: CallbackOptions) -> Iterable[Observation]:
            try:
                return [] if self._queue is None else list(observe(self._queue))
            except TinycortexError:  # a storage fault is told by the workers, and seen here as a gap
                return []

        return call

    def hear(self, event: Event) -> None:
        """Count one event."""
        match event:
            case JobsEnqueued(kinds=kinds):
                for kind, jobs in Counter(kinds).items():
                    self._sent(jobs, names.attributes_of(kind, "enqueue", "send"))
            case JobClaimed(job=job):
                attributes = names.attributes_of(job.kind, "claim", "receive")
                self._claim_s(event.claim_ms / 1000, attributes)
                self._wait_s(event.waited_ms / 1000, {names.DESTINATION: job.kind})
            case JobSettled(job=job):
                attributes = names.attributes_of(job.kind, "process", "process")
                attributes[names.OUTCOME] = names.OUTCOMES[type(event)]
                if (error_type := names.error_type_of(event)) is not None:
                    attributes[names.ERROR_TYPE] = error_type
                self._settled(1, attributes)
                if event.handler_ms is not None:
                    self._handler_s(event.handler_ms / 1000, attributes)
            case LeasesRecovered(count=count):
                self._recovered(count, None)
            case WorkerPaused(error=error):
                self._paused(1, {names.ERROR_TYPE: error})
            case _:
                pass

    def _observe_depth(self, queue: Queue) -> Iterator[Observation]:
        for kind, statuses in queue.status().by_kind.items():
            for status in _ACTIVE:
                yield Observation(statuses.get(status, 0), {names.DESTINATION: kind, "tinycortex.job.status": status})

    def _observe_age(self, queue: Queue) -> Iterator[Observation]:
        yield Observation((queue.status().oldest_ready_age_ms or 0) / 1000)

    def _observe_gate(self, queue: Queue) -> Iterator[Observation]:
        yield Observation(queue.llm_gate.permits - queue.llm_gate.available)

    def _observe_limit(self, queue: Queue) -> Iterator[Observation]:
        yield Observation(queue.llm_gate.permits)
