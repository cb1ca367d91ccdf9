"""The built-in handlers against delegates that only answer (spec: Pipeline shape; contract §4.11)."""

import pytest

from tinycortex import (
    AppendBufferPayload,
    AppendDecision,
    Cortex,
    ExtractChunkPayload,
    ExtractDecision,
    FlushStalePayload,
    Job,
    JobFailure,
    JobStatus,
    LeafRef,
    NewJob,
    ReembedBackfillPayload,
    ReembedProgress,
    SealDocumentPayload,
    SealPayload,
    SourceTarget,
    StaleBuffer,
    SummaryRef,
    TopicTarget,
)
from tinycortex.testing import FakeDelegates, ManualClock

EXTRACT = NewJob.extract_chunk(ExtractChunkPayload(chunk_id="c1"))
APPEND = NewJob.append_buffer(
    AppendBufferPayload(node=LeafRef(chunk_id="c1"), target=SourceTarget(source_id="slack:#eng"))
)
REEMBED = NewJob.reembed_backfill(ReembedBackfillPayload(signature="embed-v2"))
SEAL = NewJob.seal(SealPayload(tree_id="tree-1", level=0))


def run(cortex: Cortex, new: NewJob) -> Job:
    """Run one job and return its row."""
    job_id = cortex.enqueue(new)
    assert cortex.run_once()
    return cortex.get_job(str(job_id))


def follow_ups(cortex: Cortex, *of: Job) -> list[tuple[str, str, str | None]]:
    settled = {job.id for job in of}
    rows = [job for job in cortex.jobs.list_jobs() if job.id not in settled]
    return sorted((job.kind, job.payload_json, job.dedupe_key) for job in rows)


def wire(*jobs: NewJob) -> list[tuple[str, str, str | None]]:
    return sorted((job.kind, job.payload_json, job.dedupe_key) for job in jobs)


# extract_chunk


def test_a_kept_chunk_of_a_flat_source_is_appended(cortex: Cortex, delegates: FakeDelegates) -> None:
    """One ``append_buffer``, of the chunk as a leaf, into its source's tree."""
    delegates.extract = ExtractDecision(kept=True, tree_scope="slack:#eng")
    job = run(cortex, EXTRACT)
    assert job.status is JobStatus.DONE
    assert delegates.calls[0] == ("extract_chunk", ("c1",))
    assert follow_ups(cortex, job) == wire(APPEND)


def test_a_kept_chunk_with_uncovered_embedding_work_arms_the_chain(cortex: Cortex, delegates: FakeDelegates) -> None:
    """One ``reembed_backfill`` at the active signature, beside the append."""
    delegates.extract = ExtractDecision(kept=True, tree_scope="slack:#eng")
    delegates.signature, delegates.uncovered = "embed-v2", True
    assert follow_ups(cortex, run(cortex, EXTRACT)) == wire(APPEND, REEMBED)


@pytest.mark.parametrize(("signature", "uncovered"), [(None, True), ("embed-v2", False)])
def test_without_embedding_work_no_chain_is_armed(
    cortex: Cortex, delegates: FakeDelegates, signature: str | None, uncovered: bool
) -> None:
    """Embedding off, or all covered: only the append follows."""
    delegates.extract = ExtractDecision(kept=True, tree_scope="slack:#eng")
    delegates.signature, delegates.uncovered = signature, uncovered
    assert follow_ups(cortex, run(cortex, EXTRACT)) == wire(APPEND)


@pytest.mark.parametrize("decision", [ExtractDecision(kept=False, tree_scope="slack:#eng"), None])
def test_a_dropped_or_missing_chunk_is_done(
    cortex: Cortex, delegates: FakeDelegates, decision: ExtractDecision | None
) -> None:
    """Nothing follows, and the job is no failure."""
    delegates.extract = decision
    delegates.signature, delegates.uncovered = "embed-v2", True
    job = run(cortex, EXTRACT)
    assert job.status is JobStatus.DONE
    assert follow_ups(cortex, job) == []


def test_a_chunk_of_a_document_subtree_is_not_appended(cortex: Cortex, delegates: FakeDelegates) -> None:
    """Its document's own seal places it; it is embedded all the same."""
    delegates.extract = ExtractDecision(kept=True, tree_scope="notion:conn1", document_subtree=True)
    delegates.signature, delegates.uncovered = "embed-v2", True
    assert follow_ups(cortex, run(cortex, EXTRACT)) == wire(REEMBED)


# append_buffer


@pytest.mark.parametrize("node", [LeafRef(chunk_id="c1"), SummaryRef(summary_id="s1")])
@pytest.mark.parametrize("target", [SourceTarget(source_id="slack:#eng"), TopicTarget(tree_id="topic:ops")])
def test_a_push_that_meets_the_gate_seals_level_0(
    cortex: Cortex, delegates: FakeDelegates, node: LeafRef | SummaryRef, target: SourceTarget | TopicTarget
) -> None:
    """One unforced ``seal`` of level 0 of the tree that took the node."""
    delegates.append = AppendDecision(tree_id="tree-1", gate_met=True)
    job = run(cortex, NewJob.append_buffer(AppendBufferPayload(node=node, target=target)))
    assert job.status is JobStatus.DONE
    assert delegates.calls == [("append_node", (node, target))]
    assert follow_ups(cortex, job) == wire(SEAL)


@pytest.mark.parametrize("decision", [AppendDecision(tree_id="tree-1", gate_met=False), None])
def test_a_push_below_the_gate_or_into_nothing_is_done(
    cortex: Cortex, delegates: FakeDelegates, decision: AppendDecision | None
) -> None:
    """A gate that is not met, a missing node or a missing tree: nothing follows."""
    delegates.append = decision
    job = run(cortex, APPEND)
    assert job.status is JobStatus.DONE
    assert follow_ups(cortex, job) == []


# seal


def test_a_seal_that_cascades_enqueues_the_parent_level(cortex: Cortex, delegates: FakeDelegates) -> None:
    """A parent payload becomes a ``seal`` of its own."""
    parent = SealPayload(tree_id="tree-1", level=1)
    delegates.seal = parent
    job = run(cortex, SEAL)
    assert delegates.calls == [("seal_level", (SealPayload(tree_id="tree-1", level=0),))]
    assert follow_ups(cortex, job) == wire(NewJob.seal(parent))


def test_a_seal_without_a_parent_ends_the_cascade(cortex: Cortex, delegates: FakeDelegates) -> None:
    """No payload, no follow-up."""
    delegates.seal = None
    job = run(cortex, SEAL)
    assert job.status is JobStatus.DONE
    assert follow_ups(cortex, job) == []


def test_a_seal_may_ask_for_the_same_level_again(cortex: Cortex, delegates: FakeDelegates) -> None:
    """The settled row frees its key in the same transaction, so its own level can be sealed once more."""
    delegates.seal = SealPayload(tree_id="tree-1", level=0)
    job = run(cortex, SEAL)
    assert follow_ups(cortex, job) == wire(SEAL)


# flush_stale


def test_a_flush_forces_one_seal_for_each_stale_buffer(
    cortex: Cortex, delegates: FakeDelegates, clock: ManualClock
) -> None:
    """All of them with one flush instant."""
    delegates.stale = [StaleBuffer(tree_id="tree-1", level=0), StaleBuffer(tree_id="tree-2", level=3)]
    flush = NewJob.flush_stale(FlushStalePayload(max_age_secs=60), now_ms=clock.now_ms())
    job = run(cortex, flush)
    assert delegates.calls == [("list_stale_buffers", (60,))]
    assert follow_ups(cortex, job) == wire(
        NewJob.seal(SealPayload(tree_id="tree-1", level=0, force_now_ms=clock.now_ms())),
        NewJob.seal(SealPayload(tree_id="tree-2", level=3, force_now_ms=clock.now_ms())),
    )


def test_a_flush_of_nothing_is_done(cortex: Cortex, clock: ManualClock) -> None:
    """No stale buffer, no follow-up."""
    job = run(cortex, NewJob.flush_stale(FlushStalePayload(max_age_secs=60), now_ms=clock.now_ms()))
    assert job.status is JobStatus.DONE
    assert follow_ups(cortex, job) == []


# reembed_backfill


def test_a_batch_with_more_to_come_puts_its_own_row_off(
    cortex: Cortex, delegates: FakeDelegates, clock: ManualClock
) -> None:
    """Spec: revisited 750 ms out, on the same row, so that its key stays held; no attempt burnt."""
    delegates.reembed = [ReembedProgress(written=8, more_remaining=True)]
    job = run(cortex, REEMBED)
    assert (job.status, job.attempts, job.available_at_ms) == (JobStatus.READY, 0, clock.now_ms() + 750)
    assert cortex.enqueue(REEMBED) is None
    assert cortex.backfill_in_progress()


def test_the_chain_ends_when_all_is_covered(cortex: Cortex, delegates: FakeDelegates, clock: ManualClock) -> None:
    """Batch after batch on one row, then done."""
    delegates.reembed = [
        ReembedProgress(written=8, more_remaining=True),
        ReembedProgress(written=8, more_remaining=True),
        ReembedProgress(written=4, more_remaining=False),
    ]
    job = run(cortex, REEMBED)
    for _ in range(2):
        clock.advance(750)
        assert cortex.run_once()
    assert cortex.get_job(job.id).status is JobStatus.DONE
    assert follow_ups(cortex, job) == []
    assert not cortex.backfill_in_progress()


def test_a_batch_that_wrote_nothing_ends_the_chain(cortex: Cortex, delegates: FakeDelegates) -> None:
    """Without progress the chain does not come back for ever, even when more seems to remain."""
    delegates.reembed = [ReembedProgress(written=0, more_remaining=True)]
    assert run(cortex, REEMBED).status is JobStatus.DONE


def test_a_long_chain_with_progress_does_not_grow_too_old(
    cortex: Cortex, delegates: FakeDelegates, clock: ManualClock
) -> None:
    """Each batch that writes starts the seven days of deferring afresh."""
    delegates.reembed = [ReembedProgress(written=1, more_remaining=True)]
    job = run(cortex, REEMBED)
    for _ in range(3):
        clock.advance(5 * 86_400_000)
        assert cortex.run_once()
        assert cortex.get_job(job.id).status is JobStatus.READY


# seal_document


def document(*chunk_ids: str) -> NewJob:
    payload = SealDocumentPayload(tree_scope="notion:conn1", doc_id="pageA", version_ms=1, chunk_ids=list(chunk_ids))
    return NewJob.seal_document(payload)


def test_a_document_without_chunks_is_done_without_the_delegate(cortex: Cortex, delegates: FakeDelegates) -> None:
    """Contract §4.11: the delegate is not even asked."""
    assert run(cortex, document()).status is JobStatus.DONE
    assert delegates.calls == []


@pytest.mark.parametrize("following", [None, SealPayload(tree_id="tree-1", level=0)])
def test_a_document_is_sealed_and_its_tree_when_due(
    cortex: Cortex, delegates: FakeDelegates, following: SealPayload | None
) -> None:
    """What the delegate reports as due follows as a seal."""
    delegates.document = following
    job = run(cortex, document("c1", "c2"))
    assert [name for name, _arguments in delegates.calls] == ["seal_document"]
    assert follow_ups(cortex, job) == ([] if following is None else wire(NewJob.seal(following)))


# All of them


@pytest.mark.parametrize("new", [EXTRACT, APPEND, SEAL, REEMBED, document("c1")])
def test_a_delegates_failure_decides_for_its_job(cortex: Cortex, delegates: FakeDelegates, new: NewJob) -> None:
    """A typed failure of a delegate is a typed failure of the job."""
    delegates.error = JobFailure.unrecoverable("no_model")
    job = run(cortex, new)
    assert (job.status, job.failure_reason, job.attempts) == (JobStatus.FAILED, "no_model", 1)


def test_the_pipeline_runs_from_chunk_to_cascade(cortex: Cortex, delegates: FakeDelegates) -> None:
    """Spec, Pipeline shape: extract, append, seal, parent seal, each once and in this order."""
    delegates.extract = ExtractDecision(kept=True, tree_scope="slack:#eng")
    delegates.append = AppendDecision(tree_id="tree-1", gate_met=True)
    cortex.enqueue(EXTRACT)
    delegates.seal = SealPayload(tree_id="tree-1", level=1)
    assert cortex.drain_until_idle(on_step=lambda: drop_parent(delegates)) == 4
    asked = [name for name, _arguments in delegates.calls if name != "active_signature"]
    assert asked == ["extract_chunk", "append_node", "seal_level", "seal_level"]


def drop_parent(delegates: FakeDelegates) -> None:
    if delegates.calls[-1][0] == "seal_level":
        delegates.seal = None
