"""The pure rules of the contract: kinds, payloads, keys, figures, failures, error classes."""

import json
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError

from tinycortex import (
    AppendBufferPayload,
    ExtractChunkPayload,
    FlushStalePayload,
    InvalidInputError,
    JobFailure,
    JobKind,
    JobStatus,
    LeafRef,
    NewJob,
    PayloadError,
    ReembedBackfillPayload,
    SealDocumentPayload,
    SealPayload,
    SourceTarget,
    SummaryRef,
    TopicTarget,
    UnknownKindError,
    backoff_ms,
    is_host_io,
    is_retired_kind,
    is_sqlite_busy,
    is_sqlite_corrupt,
    is_sqlite_disk_full,
    is_sqlite_io_transient,
)
from tinycortex.domain.payloads import parse_payload

LEAF, SUMMARY = LeafRef(chunk_id="c1"), SummaryRef(summary_id="summary-9")
SLACK, OPS = SourceTarget(source_id="slack:#eng"), TopicTarget(tree_id="topic:ops")


@pytest.mark.parametrize("kind", JobKind)
def test_a_kind_is_read_back_from_its_word(kind: JobKind) -> None:
    """Parsing is the inverse of writing."""
    assert JobKind.parse(kind.value) is kind


@pytest.mark.parametrize("word", ["topic_route", "digest_daily"])
def test_a_retired_word_is_told_apart(word: str) -> None:
    """Who meets an old row learns that its kind is retired."""
    assert is_retired_kind(word)
    with pytest.raises(UnknownKindError, match="retired"):
        JobKind.parse(word)


@pytest.mark.parametrize("word", ["", "Seal", "extract", "nonsense"])
def test_any_other_word_is_unknown(word: str) -> None:
    """No other word is taken for a kind."""
    assert not is_retired_kind(word)
    with pytest.raises(UnknownKindError, match="unknown"):
        JobKind.parse(word)


def test_four_kinds_are_llm_bound() -> None:
    """Only these hold a permit."""
    assert {kind.value for kind in JobKind if kind.is_llm_bound} == {
        "extract_chunk",
        "seal",
        "reembed_backfill",
        "seal_document",
    }


def test_three_statuses_are_terminal() -> None:
    """No worker touches these again by itself."""
    assert {status.value for status in JobStatus if status.is_terminal} == {"done", "failed", "cancelled"}


@pytest.mark.parametrize(
    ("job", "key", "wire"),
    [
        (
            NewJob.extract_chunk(ExtractChunkPayload(chunk_id="chunk-123")),
            "extract:chunk-123",
            '{"chunk_id":"chunk-123"}',
        ),
        (
            NewJob.append_buffer(AppendBufferPayload(node=LEAF, target=SLACK)),
            "append:source:slack:#eng:leaf:c1",
            '{"node":{"kind":"leaf","chunk_id":"c1"},"target":{"kind":"source","source_id":"slack:#eng"}}',
        ),
        (
            NewJob.append_buffer(AppendBufferPayload(node=SUMMARY, target=OPS)),
            "append:topic:topic:ops:summary:summary-9",
            '{"node":{"kind":"summary","summary_id":"summary-9"},"target":{"kind":"topic","tree_id":"topic:ops"}}',
        ),
        (
            NewJob.seal(SealPayload(tree_id="tree-1", level=0)),
            "seal:tree-1:0",
            '{"tree_id":"tree-1","level":0,"force_now_ms":null}',
        ),
        (
            NewJob.seal(SealPayload(tree_id="tree-1", level=0, force_now_ms=7)),
            "seal:tree-1:0",
            '{"tree_id":"tree-1","level":0,"force_now_ms":7}',
        ),
        (
            NewJob.flush_stale(FlushStalePayload(max_age_secs=3600), now_ms=1_779_148_800_000),
            "flush_stale:2026-05-19-h0",
            '{"max_age_secs":3600}',
        ),
        (
            NewJob.flush_stale(FlushStalePayload(max_age_secs=3600), now_ms=1_779_235_199_999),
            "flush_stale:2026-05-19-h7",
            '{"max_age_secs":3600}',
        ),
        (
            NewJob.reembed_backfill(ReembedBackfillPayload(signature="embed-v2")),
            "reembed_backfill:embed-v2",
            '{"signature":"embed-v2"}',
        ),
        (
            NewJob.seal_document(
                SealDocumentPayload(
                    tree_scope="s", doc_id="notion:conn1:pageA", version_ms=1717000000000, chunk_ids=["ü"]
                )
            ),
            "seal_doc:notion:conn1:pageA@1717000000000",
            '{"tree_scope":"s","doc_id":"notion:conn1:pageA","version_ms":1717000000000,"chunk_ids":["ü"]}',
        ),
        (
            NewJob.seal_document(SealDocumentPayload(tree_scope="s", doc_id="d", chunk_ids=[])),
            "seal_doc:d",
            '{"tree_scope":"s","doc_id":"d","version_ms":null,"chunk_ids":[]}',
        ),
    ],
)
def test_keys_and_wire_json_are_the_contracts(job: NewJob, key: str, wire: str) -> None:
    """Another program reads the same rows, so both are fixed to the byte."""
    assert (job.dedupe_key, job.payload_json) == (key, wire)


def test_unknown_fields_are_ignored_and_missing_optionals_are_none() -> None:
    """A newer program may write more, an older one less."""
    assert parse_payload(SealPayload, '{"tree_id":"t","level":1,"new":true}') == SealPayload(tree_id="t", level=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        '{"tree_id":"t"}',
        '{"tree_id":1,"level":0}',
        '{"tree_id":"t","level":-1}',
        '{"tree_id":"t","level":"0"}',
        '{"tree_id":"t","level":true}',
        '{"tree_id":"t","level":NaN}',
        '{"tree_id":"t","level":0.5}',
        '{"tree_id":"t","level":0,"force_now_ms":99999999999999999999}',
        '{"tree_id":"t\\u0000","level":0}',
    ],
)
def test_a_malformed_payload_is_refused(text: str) -> None:
    """Nothing but the model's own shape is taken."""
    with pytest.raises(PayloadError):
        parse_payload(SealPayload, text)


class Measured(BaseModel):
    value: float


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_could_not_be_read_back_is_refused_at_the_door(value: float) -> None:
    """A payload that JSON cannot hold never becomes a row."""
    with pytest.raises(PayloadError):
        NewJob.of("measure", Measured(value=value))


def test_a_built_in_kind_takes_its_own_payload_only() -> None:
    """The wrong model is told at the call, not by a worker."""
    with pytest.raises(PayloadError, match="SealPayload"):
        NewJob.of("seal", ExtractChunkPayload(chunk_id="c"))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": None},
        {"kind": ""},
        {"kind": "two words"},
        {"kind": "nul\x00"},
        {"kind": "topic_route"},
        {"payload_json": None},
        {"payload_json": "{"},
        {"dedupe_key": ""},
        {"dedupe_key": "nul\x00"},
        {"dedupe_key": "\ud800"},
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": True},
        {"max_attempts": "5"},
        {"available_at_ms": 1.5},
        {"available_at_ms": 2**63},
    ],
)
def test_a_job_outside_its_contract_cannot_be_built(fields: dict[str, object]) -> None:
    """Bad input is a typed error before anything is written."""
    good: dict[str, object] = {"kind": "custom", "payload_json": "{}"}
    with pytest.raises((InvalidInputError, UnknownKindError)):
        NewJob(**good | fields)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("attempts", "delay"),
    [(0, 60_000), (1, 60_000), (2, 120_000), (3, 240_000), (6, 1_920_000), (7, 3_600_000), (10**9, 3_600_000)],
)
def test_the_backoff_is_the_contracts(attempts: int, delay: int) -> None:
    """One minute, doubled each time, at most an hour, without overflow."""
    assert backoff_ms(attempts) == delay


@given(st.integers(min_value=-5, max_value=10**18))
def test_the_backoff_never_shrinks(attempts: int) -> None:
    """More failures never mean an earlier retry."""
    assert 60_000 <= backoff_ms(attempts) <= backoff_ms(attempts + 1) <= 3_600_000


def test_failures_say_their_class() -> None:
    """The three constructors of the specification."""
    assert not JobFailure.transient("timeout").is_unrecoverable
    assert JobFailure.unrecoverable("gone").is_unrecoverable
    exhausted = JobFailure.budget_exhausted()
    assert (exhausted.code, exhausted.is_unrecoverable) == ("budget_exhausted", True)


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("words that decide nothing")
    error.sqlite_errorcode = code
    return error


CLASSIFIERS = (is_sqlite_busy, is_sqlite_io_transient, is_sqlite_disk_full, is_sqlite_corrupt, is_host_io)


@pytest.mark.parametrize(
    ("code", "place"),
    [
        (5, 0),
        (6, 0),
        (10, 1),
        (14, 1),
        (1546, 1),
        (4618, 1),
        (4874, 1),
        (5386, 1),
        (8714, 1),
        (13, 2),
        (11, 3),
        (26, 3),
    ],
)
def test_an_error_is_classed_by_its_code(code: int, place: int) -> None:
    """Exactly one class each, through SQLAlchemy's wrapping and a chain of causes too."""
    error = sqlite_error(code)
    wrapped = OperationalError("SELECT 1", {}, error)
    caused = RuntimeError("outer")
    caused.__cause__ = wrapped
    for link in (error, wrapped, caused):
        assert [classify(link) for classify in CLASSIFIERS] == [number == place for number in range(5)]


@pytest.mark.parametrize(("errno", "expected"), [(5, True), (28, True), (30, True), (2, False), (13, False)])
def test_the_hosts_own_faults(errno: int, expected: bool) -> None:
    """I/O, a full disk and a read-only file system are the host's; a missing file is the caller's."""
    assert is_host_io(OSError(errno, "x")) is expected


@pytest.mark.parametrize("text", ["database is locked", "disk is full", "database disk image is malformed"])
def test_a_message_decides_nothing(text: str) -> None:
    """User data can reach a message, so no class is read from one."""
    assert not any(classify(RuntimeError(text)) or classify(sqlite3.OperationalError(text)) for classify in CLASSIFIERS)


def test_every_kind_has_a_wire_payload_that_is_json() -> None:
    """A row by hand can be checked with any JSON reader."""
    assert json.loads(NewJob.seal(SealPayload(tree_id="t", level=0)).payload_json)["tree_id"] == "t"
