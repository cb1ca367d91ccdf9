"""OpenTelemetry: spans from an enqueue to its handler, and metrics, through the SDK's in-memory exporters."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tinycortex import ConfigurationError, Cortex, Defer, Done, JobContext, JobFailure, JobPlan, NewJob
from tinycortex.telemetry.otel import instrument
from tinycortex.testing import ManualClock

Find = Callable[[str], list[ReadableSpan]]
Collect = Callable[[], dict[str, list[tuple[dict[str, Any], Any]]]]


class Note(BaseModel):
    """The payload of the kind of these tests."""

    text: str = "n"


NOTE = NewJob.of("note", Note())


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer_provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def end(cortex: Cortex, tracer_provider: TracerProvider, reader: InMemoryMetricReader) -> Iterator[Callable[[], None]]:
    """The test's queue is instrumented; what ends that."""
    meters = MeterProvider([reader], shutdown_on_exit=False)
    end = instrument(cortex, tracer_provider, meters)
    yield end
    end()
    meters.shutdown()


@pytest.fixture
def find(exporter: InMemorySpanExporter, end: Callable[[], None]) -> Find:  # noqa: ARG001 - instruments the queue
    """Return the spans of one name, in the order in which they ended."""
    return lambda name: [span for span in exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def collect(reader: InMemoryMetricReader, end: Callable[[], None]) -> Collect:  # noqa: ARG001 - as above
    """Return the points of every metric: attributes, and the value or the sum and count of a histogram."""

    def read() -> dict[str, list[tuple[dict[str, Any], Any]]]:
        found: dict[str, list[tuple[dict[str, Any], Any]]] = {}
        data = reader.get_metrics_data()
        for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else []:
            for point in metric.data.data_points:
                value = point.value if hasattr(point, "value") else (point.sum, point.count)
                found.setdefault(metric.name, []).append((dict(point.attributes or {}), value))
        return found

    return read


def handle(cortex: Cortex, run: Callable[[], JobPlan | None], *, max_attempts: int = 5) -> None:
    def handler(_context: JobContext, _payload: Note) -> JobPlan | None:
        return run()

    cortex.handler("note", payload=Note, max_attempts=max_attempts)(handler)


def fail(error: Exception) -> JobPlan | None:
    raise error


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return int(context.span_id)


def test_a_trace_leads_from_the_request_through_the_enqueue_to_the_handler(
    cortex: Cortex, find: Find, tracer_provider: TracerProvider
) -> None:
    """The run's parent is its enqueue, whose parent is what the producer was doing."""
    handle(cortex, lambda: None)
    with tracer_provider.get_tracer("host").start_as_current_span("request"):
        job_id = cortex.enqueue(NOTE)
    cortex.run_once()
    (request,), (enqueue,), (run,) = find("request"), find("enqueue note"), find("process note")
    assert (parent_id(enqueue), parent_id(run)) == (span_id(request), span_id(enqueue))
    assert (enqueue.kind, run.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(run.attributes or {}) == {
        "messaging.system": "tinycortex",
        "messaging.destination.name": "note",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": job_id,
        "tinycortex.job.attempt": 1,
        "tinycortex.job.outcome": "done",
    }


def test_a_row_carries_w3c_headers(cortex: Cortex, find: Find) -> None:
    """Any program that knows the standard can read where a job comes from."""
    job_id = str(cortex.enqueue(NOTE))
    (enqueue,) = find("enqueue note")
    carried = json.loads(str(cortex.get_job(job_id).trace_context))
    assert list(carried) == ["traceparent"]
    assert carried["traceparent"].split("-")[2] == f"{span_id(enqueue):016x}"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_handlers_own_spans_are_inside_its_run(
    cortex: Cortex, find: Find, tracer_provider: TracerProvider, asynchronous: bool
) -> None:
    """In a thread and on a loop, the run is the current span."""
    tracer = tracer_provider.get_tracer("host")

    if asynchronous:

        @cortex.handler("note", payload=Note)
        async def handle_on_loop(_context: JobContext, _payload: Note) -> None:
            with tracer.start_as_current_span("model"):
                await asyncio.sleep(0)
    else:

        @cortex.handler("note", payload=Note)
        def handle_in_thread(_context: JobContext, _payload: Note) -> None:
            with tracer.start_as_current_span("model"):
                pass

    cortex.enqueue(NOTE)
    cortex.run_once()
    (model,), (run,) = find("model"), find("process note")
    assert parent_id(model) == span_id(run)


def test_follow_ups_and_reruns_continue_the_trace_of_their_run(cortex: Cortex, find: Find) -> None:
    """What a settlement enqueues comes from the run that it settles."""
    twin = NewJob.of("note", Note(), dedupe_key="k")
    runs: list[str | None] = []

    @cortex.handler("note", payload=Note, on_duplicate="rerun")
    def handler(_context: JobContext, _payload: Note) -> JobPlan:
        if not runs:
            runs.append(cortex.enqueue(twin))
        return Done(follow_ups=[NewJob.of("other", Note())])

    cortex.enqueue(twin)
    cortex.run_once()
    (run,) = find("process note")
    (follow_up,) = find("enqueue other")
    rerun = find("enqueue note")[-1]
    assert (parent_id(follow_up), parent_id(rerun)) == (span_id(run), span_id(run))
    cortex.drain_until_idle()
    assert parent_id(find("process note")[1]) == span_id(rerun)


def test_each_attempt_is_a_child_of_the_enqueue(cortex: Cortex, find: Find, clock: ManualClock) -> None:
    """A retry tells the attempt, and that it failed; a secret in the error stays out."""
    handle(cortex, lambda: fail(ValueError("password=hunter2")), max_attempts=2)
    cortex.enqueue(NOTE)
    cortex.run_once()
    clock.advance(3_600_000)
    cortex.run_once()
    (enqueue,), runs = find("enqueue note"), find("process note")
    assert [parent_id(run) for run in runs] == [span_id(enqueue)] * 2
    assert [(run.attributes or {})["tinycortex.job.outcome"] for run in runs] == ["retried", "failed"]
    assert [run.status.status_code for run in runs] == [StatusCode.ERROR] * 2
    assert "hunter2" not in str([run.to_json() for run in runs])


def test_a_typed_failures_code_is_the_error_type(cortex: Cortex, find: Find) -> None:
    """Codes are few, so that they can be grouped by."""
    handle(cortex, lambda: fail(JobFailure.unrecoverable("no_such_page", "page 7")))
    cortex.enqueue(NOTE)
    cortex.run_once()
    (run,) = find("process note")
    assert (run.attributes or {})["error.type"] == "no_such_page"


def test_a_batch_is_one_span(cortex: Cortex, find: Find) -> None:
    """Its jobs share it; without one kind it names none."""
    cortex.enqueue_many([NOTE, NewJob.of("other", Note())])
    (enqueue,) = find("enqueue")
    assert (enqueue.attributes or {})["messaging.batch.message_count"] == 2
    assert len({job.trace_context for job in cortex.jobs.list_jobs()}) == 1


def test_an_enqueue_that_fails_says_so(cortex: Cortex, find: Find) -> None:
    """The span has the error's class."""
    with cortex.transaction() as session:
        session.execute(text("DROP INDEX idx_mem_tree_jobs_dedupe_active"))
    with pytest.raises(Exception, match="ON CONFLICT"):
        cortex.enqueue(NOTE)
    (enqueue,) = find("enqueue note")
    assert enqueue.status.status_code is StatusCode.ERROR
    assert "error.type" in (enqueue.attributes or {})


def test_an_async_session_is_traced(cortex: Cortex, find: Find, database_url: str) -> None:
    """The enqueue's span ends with it, on the loop too."""

    async def produce() -> None:
        engine = create_async_engine(database_url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with AsyncSession(engine) as session:
            await cortex.enqueue(NOTE, session=session)
            await session.commit()
            assert trace.get_current_span() is trace.INVALID_SPAN
        await engine.dispose()

    asyncio.run(produce())
    assert len(find("enqueue note")) == 1


@pytest.mark.parametrize("carried", [None, "", "[]", "{", '{"traceparent": 7}', '{"traceparent": "00-0-0-00"}'])
def test_a_run_of_an_untraced_job_begins_a_trace(cortex: Cortex, find: Find, carried: str | None) -> None:
    """Whatever stands in the column: jobs of other programs run."""
    handle(cortex, lambda: None)
    cortex.enqueue(NOTE)
    with cortex.transaction() as session:
        session.execute(text("UPDATE mem_tree_jobs SET trace_context = :carried"), {"carried": carried})
    assert cortex.run_once()
    (run,) = find("process note")
    assert run.parent is None


def test_a_replaced_payload_brings_its_trace(cortex: Cortex, find: Find) -> None:
    """A ready row that takes a newer payload belongs to the newer request."""

    @cortex.handler("note", payload=Note, on_duplicate="replace")
    def handler(_context: JobContext, _payload: Note) -> None: ...

    for words in ("old", "new"):
        cortex.enqueue(NewJob.of("note", Note(text=words), dedupe_key="k"))
    cortex.run_once()
    assert parent_id(find("process note")[0]) == span_id(find("enqueue note")[1])


def test_jobs_are_counted_by_kind_and_outcome(cortex: Cortex, collect: Collect, clock: ManualClock) -> None:
    """Enqueued and ended ones, with the messaging conventions' names."""
    plans = iter([Done(), Defer(until_ms=clock.now_ms() + 60_000, reason="later"), Done()])
    handle(cortex, lambda: next(plans))
    cortex.enqueue_many([NOTE, NOTE, NOTE])
    cortex.drain_until_idle()
    metrics = collect()
    ((sent, count),) = metrics["messaging.client.sent.messages"]
    assert (sent["messaging.destination.name"], count) == ("note", 3)
    ended = {attributes["tinycortex.job.outcome"]: n for attributes, n in metrics["messaging.client.consumed.messages"]}
    assert ended == {"done": 2, "deferred": 1}


def test_waits_claims_and_handlers_are_measured_in_seconds(
    cortex: Cortex, collect: Collect, clock: ManualClock
) -> None:
    """The wait is the queue's own time, so a test can know it."""
    handle(cortex, lambda: None)
    cortex.enqueue(NOTE)
    clock.advance(1_500)
    cortex.run_once()
    metrics = collect()
    assert metrics["tinycortex.job.wait.duration"] == [({"messaging.destination.name": "note"}, (1.5, 1))]
    for name in ("messaging.client.operation.duration", "messaging.process.duration"):
        ((_attributes, (seconds, count)),) = metrics[name]
        assert 0 < seconds < 60
        assert count == 1


def test_gauges_show_the_queue_and_the_gate(cortex: Cortex, collect: Collect, clock: ManualClock) -> None:
    """Depth by kind and status, the oldest due job's age (s), permits in use."""
    cortex.enqueue_many([NOTE, NOTE])
    clock.advance(2_000)
    with cortex.llm_gate.acquire():
        metrics = collect()
    depth = {attributes["tinycortex.job.status"]: jobs for attributes, jobs in metrics["tinycortex.queue.depth"]}
    assert depth == {"ready": 2, "running": 0}
    assert metrics["tinycortex.queue.oldest_age"] == [({}, 2.0)]
    assert metrics["tinycortex.gate.in_use"] == [({}, 1)]
    assert metrics["tinycortex.gate.limit"] == [({}, cortex.llm_gate.permits)]


def test_recoveries_are_counted(cortex: Cortex, collect: Collect, clock: ManualClock) -> None:
    """Rows taken from workers that are gone."""
    handle(cortex, lambda: None)
    cortex.enqueue(NOTE)
    cortex.jobs.claim_next(1_000, kinds=cortex.list_kinds())
    clock.advance(2_000)
    cortex.recover_stale_locks()
    assert collect()["tinycortex.leases.recovered"] == [({}, 1)]


def test_what_is_ended_traces_and_shows_nothing_more(
    cortex: Cortex, find: Find, collect: Collect, end: Callable[[], None]
) -> None:
    """And may be begun anew."""
    end()
    job_id = str(cortex.enqueue(NOTE))
    assert find("enqueue note") == []
    assert cortex.get_job(job_id).trace_context is None
    assert collect() == {}
    instrument(cortex)()


def test_a_queue_is_instrumented_once(cortex: Cortex, find: Find) -> None:
    """Else every job would be counted twice."""
    assert find("process note") == []
    with pytest.raises(ConfigurationError, match="already"):
        instrument(cortex)


def test_without_opentelemetry_the_error_names_the_extra() -> None:
    """The package itself never needs it."""
    command = """
import sys
sys.modules["opentelemetry"] = None
import tinycortex.cli, tinycortex.telemetry.otel
try:
    tinycortex.telemetry.otel.instrument(None)
except tinycortex.ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert "tinycortex[otel]" in done.stdout
