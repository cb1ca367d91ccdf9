"""OpenTelemetry: spans and metrics of a queue (needs the extra ``tinycortex[otel]``)."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from tinycortex.errors import ConfigurationError
from tinycortex.telemetry.emitter import Emitter
from tinycortex.telemetry.tracing import NO_TRACER

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


class Status(Protocol):
    """What the gauges show of ``Cortex.status()``."""

    @property
    def by_kind(self) -> Mapping[str, Mapping[str, int]]:
        """Rows by kind, then by status."""

    @property
    def oldest_ready_age_ms(self) -> int | None:
        """How long the longest-waiting due row has been due (ms); None when none is due."""


class Gate(Protocol):
    """What the gauges show of ``Cortex.llm_gate``."""

    @property
    def permits(self) -> int:
        """How many there are."""

    @property
    def available(self) -> int:
        """How many are free."""


class Queue(Protocol):
    """What is instrumented: a ``Cortex``."""

    @property
    def emitter(self) -> Emitter:
        """What tells its events, and asks its tracer."""

    @property
    def llm_gate(self) -> Gate:
        """The gate of the LLM-bound handlers."""

    def status(self) -> Status:
        """Return how the queue is doing."""


def instrument(
    cortex: Queue,
    tracer_provider: "TracerProvider | None" = None,
    meter_provider: "MeterProvider | None" = None,
) -> Callable[[], None]:
    """Trace and measure what is done through ``cortex``; see ``docs/telemetry.md`` for spans and metrics.

    Args:
        cortex: the queue; every process that enqueues or works instruments its own.
        tracer_provider: where spans go; OpenTelemetry's global one when left out.
        meter_provider: where metrics go; OpenTelemetry's global one when left out.

    Returns:
        What ends it; call it before the queue is closed.

    Raises:
        ConfigurationError: the extra ``tinycortex[otel]`` is not installed, or ``cortex`` is instrumented already.
    """
    try:
        from tinycortex.telemetry.otel_metrics import Metrics  # noqa: PLC0415 - only here may OpenTelemetry be needed
        from tinycortex.telemetry.otel_spans import Spans  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"instrument() needs OpenTelemetry ({error.name} is missing); run: pip install 'tinycortex[otel]'"
        ) from error
    emitter = cortex.emitter
    if emitter.tracer is not NO_TRACER:
        raise ConfigurationError("this queue is instrumented already, and would be counted twice; end that one first")
    spans, metrics = Spans(tracer_provider), Metrics(cortex, meter_provider)
    emitter.tracer = spans
    ends = [emitter.subscribe(spans.hear), emitter.subscribe(metrics.hear)]

    def end() -> None:
        emitter.tracer = NO_TRACER
        metrics.end()
        for unsubscribe in ends:
            unsubscribe()

    return end
