"""Spans: one for each enqueue, one for each run, whose parent is the enqueue that the job came from."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tinycortex.domain.jobs import Job
from tinycortex.domain.redact import scrub_for_log
from tinycortex.telemetry import otel_names as names
from tinycortex.telemetry.events import Event, JobSettled

_RUN: ContextVar[tuple[Job, Span] | None] = ContextVar("tinycortex_run", default=None)
"""The run that the running code belongs to; the thread that settles is handed its task's context."""


class Spans:
    """The tracer of one queue."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = get_tracer("tinycortex", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def sending(self, kinds: Sequence[str]) -> Iterator[str | None]:
        """Trace an enqueue; its jobs carry what the block gets."""
        (kind, *others) = sorted(set(kinds)) or [""]
        attributes: dict[str, str | int] = {**names.attributes_of(kind, "enqueue", "send")}
        if others or not kind:  # no one destination
            del attributes[names.DESTINATION]
        if len(kinds) != 1:
            attributes[names.BATCH_COUNT] = len(kinds)
        name = f"enqueue {attributes[names.DESTINATION]}" if names.DESTINATION in attributes else "enqueue"
        with self._span(name, SpanKind.PRODUCER, attributes, None):
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier)
            yield json.dumps(carrier) if carrier else None

    @contextmanager
    def handling(self, job: Job) -> Iterator[None]:
        """Trace a run, as a child of the enqueue that its job carries."""
        attributes: dict[str, str | int] = {**names.attributes_of(job.kind, "process", "process")}
        attributes |= {names.MESSAGE_ID: job.id, names.ATTEMPT: job.attempts}
        with self._span(f"process {job.kind}", SpanKind.CONSUMER, attributes, job.trace_context) as span:
            token = _RUN.set((job, span))
            try:
                yield
            finally:
                _RUN.reset(token)

    def hear(self, event: Event) -> None:
        """Say on a run's span how the run ended."""
        run = _RUN.get()
        if run is None or not isinstance(event, JobSettled) or event.job != run[0]:
            return
        span = run[1]
        span.set_attribute(names.OUTCOME, names.OUTCOMES[type(event)])
        if (error_type := names.error_type_of(event)) is not None:
            _mark_failed(span, error_type, event.reason or "")

    @contextmanager
    def _span(self, name: str, kind: SpanKind, attributes: dict[str, str | int], carried: str | None) -> Iterator[Span]:
        # OpenTelemetry would write an exception down as it is, and so what it quotes of a payload.
        with self._tracer.start_as_current_span(
            name,
            context=None if carried is None else self._propagator.extract(_read(carried)),
            kind=kind,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                _mark_failed(span, type(error).__name__, str(error))
                raise


def _mark_failed(span: Span, error_type: str, message: str) -> None:
    span.set_attribute(names.ERROR_TYPE, error_type)
    span.set_status(Status(StatusCode.ERROR, scrub_for_log(message)))


def _read(carried: str) -> dict[str, str]:
    """Return the headers that a row carries; none when another program wrote something else there."""
    try:
        headers = json.loads(carried)
    except (ValueError, RecursionError):
        return {}
    return {k: v for k, v in headers.items() if isinstance(v, str)} if isinstance(headers, dict) else {}
