"""The whole pipeline: killed at every job, it ends with the same memory as if it had never been."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import select

from tinycortex import Cortex, Settings, schema
from tinycortex.config import MemorySettings
from tinycortex.domain.kinds import BUILTIN_KINDS
from tinycortex.domain.payloads import (
    AppendBufferPayload,
    ExtractChunkPayload,
    Payload,
    ReembedBackfillPayload,
    SealDocumentPayload,
    SealPayload,
    parse_payload,
)
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.memory.sources import list_sources
from tinycortex.models import ChunkEmbeddingRow, ChunkRow, EntityRow, SummaryEmbeddingRow, SummaryRow
from tinycortex.testing import ManualClock

SETTINGS = Settings(
    memory=MemorySettings(
        chunk_max_tokens=60, input_token_budget=300, output_token_budget=60, fan_out=3, embed_batch=10
    )
)
Memory = list[list[tuple[object, ...]]]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, topic in (("a.md", "deploys"), ("b.md", "gardens"), ("c.txt", "cooking")):
        lines = (
            f"Entry {number} on {topic} mentions item{number * 7 % 11} and p{number}@x.org." for number in range(40)
        )
        (folder / name).write_text("\n".join(lines))
    return folder


def open_queue(path: Path, clock: ManualClock) -> Cortex:
    schema.upgrade(f"sqlite:///{path}")
    return Cortex.open(f"sqlite:///{path}", settings=SETTINGS, clock=clock)


def ingest(cortex: Cortex, notes: Path) -> int:
    text = (notes / "a.md").read_text()
    files = [cortex.ingestor.ingest_file(source) for source in list_sources([notes]).sources]
    document = cortex.ingestor.ingest_document("conn", "page", 3, text, timestamp_ms=3)
    return sum(result.jobs_enqueued for result in [*files, document])


def remember(cortex: Cortex) -> Memory:
    searches = (
        select(ChunkRow.id, ChunkRow.content, ChunkRow.lifecycle_status, ChunkRow.parent_summary_id),
        select(
            SummaryRow.id, SummaryRow.level, SummaryRow.parent_id, SummaryRow.child_ids_json, SummaryRow.content,
            SummaryRow.score, SummaryRow.entities_json, SummaryRow.doc_id,
        ),
        select(ChunkEmbeddingRow.chunk_id, ChunkEmbeddingRow.vector),
        select(SummaryEmbeddingRow.summary_id, SummaryEmbeddingRow.vector),
        select(EntityRow.entity_id, EntityRow.node_id, EntityRow.tree_id),
    )  # fmt: skip
    with cortex.database.reading() as session:
        return [sorted(tuple(row) for row in session.execute(search)) for search in searches]


async def perform(memory: MemoryDelegates, payload: Payload) -> None:
    """Do the heavy work of one job and die before anything of it is settled."""
    match payload:
        case ExtractChunkPayload():
            await memory.extract_chunk(payload.chunk_id)
        case AppendBufferPayload():
            await memory.append_node(payload.node, payload.target)
        case SealPayload():
            await memory.seal_level(payload)
        case SealDocumentPayload():
            await memory.seal_document(payload)
        case ReembedBackfillPayload():
            await memory.reembed_batch(payload.signature)


def kill_next_job(cortex: Cortex, clock: ManualClock) -> None:
    job = cortex.jobs.claim_next(worker_id="doomed")
    if job is None:
        return
    if job.attempts > 1:  # a deferred row comes back often, and its budget is no part of this
        cortex.jobs.release(job)
        return
    payload = parse_payload(BUILTIN_KINDS[job.kind].payload, job.payload_json)
    assert isinstance(payload, Payload)
    asyncio.run(perform(MemoryDelegates(cortex.database, SETTINGS.memory, clock), payload))
    cortex.jobs.recover_owned(["doomed"])


def drain(cortex: Cortex, clock: ManualClock, *, kill: bool) -> None:
    while True:
        if kill:
            kill_next_job(cortex, clock)
        if not cortex.run_once():
            if cortex.status().by_status["ready"] == 0:
                return
            clock.advance(750)


def test_a_kill_after_every_job_s_work_changes_nothing(tmp_path: Path, notes: Path) -> None:
    """Chunks, summaries, links, vectors and entities are those of a run that was left in peace."""
    memories: list[Memory] = []
    for kill in (False, True):
        clock = ManualClock()
        with open_queue(tmp_path / f"{kill}.db", clock) as cortex:
            ingest(cortex, notes)
            drain(cortex, clock, kill=kill)
            assert cortex.status().by_status["failed"] == 0
            memories.append(remember(cortex))
            assert ingest(cortex, notes) == 0
            drain(cortex, clock, kill=False)
            assert remember(cortex) == memories[-1]
    peaceful, killed = memories
    assert peaceful == killed
    assert max(int(str(row[1])) for row in peaceful[1]) >= 2
    assert len(peaceful[2]) == len(peaceful[0])


def test_the_clock_leaves_no_trace_in_content(tmp_path: Path, notes: Path) -> None:
    """The same notes, years later and in another database, become the same memory."""
    memories: list[Memory] = []
    for now_ms in (0, 4_000_000_000_000):
        clock = ManualClock(now_ms)
        with open_queue(tmp_path / f"{now_ms}.db", clock) as cortex:
            ingest(cortex, notes)
            drain(cortex, clock, kill=False)
            memories.append(remember(cortex))
    assert memories[0] == memories[1]
