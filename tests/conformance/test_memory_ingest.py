"""Ingest: chunks and their first jobs, together or not at all, and never twice."""

import json
import os
from pathlib import Path

import pytest
from sqlalchemy import func, select

from tinycortex import Database, InvalidInputError, JobKind, NewJob, SourceError
from tinycortex.config import MemorySettings
from tinycortex.domain.jobs import Job
from tinycortex.memory.ingest import Ingested, Ingestor
from tinycortex.memory.sources import list_sources
from tinycortex.memory.tokens import count_tokens
from tinycortex.models import ChunkRow, IngestedSourceRow, JobRow
from tinycortex.repositories.chunks import Chunk, ChunkRepository
from tinycortex.repositories.jobs import JobRepository
from tinycortex.testing import ManualClock

PROSE = "The deploy went out on Tuesday. Nobody noticed anything strange about it. " * 40


@pytest.fixture
def jobs(database: Database, clock: ManualClock) -> JobRepository:
    return JobRepository(database, clock)


@pytest.fixture
def ingestor(database: Database, jobs: JobRepository, clock: ManualClock) -> Ingestor:
    return Ingestor(database, jobs, MemorySettings(chunk_max_tokens=200), clock)


def ingest(ingestor: Ingestor, path: Path) -> Ingested:
    [source] = list_sources([path]).sources
    return ingestor.ingest_file(source)


def list_chunks(database: Database, ids: tuple[str, ...]) -> list[Chunk]:
    with database.reading() as session:
        return ChunkRepository(session).list_by_ids(ids)


def count(database: Database, model: type[ChunkRow | JobRow | IngestedSourceRow]) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(model)) or 0


def list_jobs(database: Database) -> list[tuple[str, str]]:
    with database.reading() as session:
        return [(row.kind, row.payload_json) for row in session.scalars(select(JobRow).order_by(JobRow.id))]


def test_a_file_becomes_chunks_with_a_job_each(database: Database, ingestor: Ingestor, tmp_path: Path) -> None:
    """Every chunk waits for its extraction, and carries where and when it is from."""
    path = tmp_path / "note.md"
    path.write_text(PROSE)
    os.utime(path, ns=(0, -86_400_000_000_000))
    result = ingest(ingestor, path)
    chunks = list_chunks(database, result.chunk_ids)
    assert result.chunks_added == result.jobs_enqueued == len(chunks) > 1
    assert list_jobs(database) == [("extract_chunk", f'{{"chunk_id":"{chunk.id}"}}') for chunk in chunks]
    assert [chunk.seq_in_source for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert (chunk.source_kind, chunk.source_id, chunk.source_ref) == ("file", path.as_posix(), path.as_posix())
        assert chunk.timestamp_ms == chunk.time_range_start_ms == chunk.time_range_end_ms == -86_400_000
        assert (chunk.owner, chunk.lifecycle_status) == ("local", "pending_extraction")
        assert chunk.token_count == count_tokens(chunk.content) <= 200
    assert count(database, IngestedSourceRow) == 1


def test_the_same_file_again_adds_nothing(database: Database, ingestor: Ingestor, tmp_path: Path) -> None:
    """Neither a row nor a job, even when the first jobs are long done."""
    path = tmp_path / "note.md"
    path.write_text(PROSE)
    first = ingest(ingestor, path)
    with database.transaction() as session:
        for row in session.scalars(select(JobRow)):
            row.status = "done"
    again = ingest(ingestor, path)
    assert (again.chunk_ids, again.chunks_added, again.jobs_enqueued) == (first.chunk_ids, 0, 0)
    assert count(database, JobRow) == first.chunks_added


def test_a_longer_file_adds_only_what_is_new(database: Database, ingestor: Ingestor, tmp_path: Path) -> None:
    """Chunks before the change keep their ids, so only those after it are new."""
    path = tmp_path / "note.md"
    path.write_text(PROSE)
    first = ingest(ingestor, path)
    path.write_text(PROSE + "And then there was something new at the end.")
    second = ingest(ingestor, path)
    assert 0 < second.chunks_added < len(second.chunk_ids)
    assert second.chunk_ids[: len(first.chunk_ids) - 1] == first.chunk_ids[:-1]
    assert count(database, ChunkRow) == first.chunks_added + second.chunks_added


def test_ids_are_the_same_in_every_database(ingestor: Ingestor, clock: ManualClock, tmp_path: Path) -> None:
    """Nothing in an id depends on the clock or on what else is stored."""
    first = ingestor.ingest_text("chat", "room", PROSE, timestamp_ms=1)
    clock.advance(1_000_000)
    second = ingestor.ingest_text("chat", "room", PROSE, timestamp_ms=2)
    assert first.chunk_ids == second.chunk_ids
    assert ingestor.ingest_text("chat", "other", PROSE, timestamp_ms=1).chunk_ids != first.chunk_ids
    assert tmp_path.exists()


def test_a_large_file_is_taken_in_whole(database: Database, ingestor: Ingestor, tmp_path: Path) -> None:
    """Five megabytes on one line need no more than one transaction."""
    path = tmp_path / "line.txt"
    path.write_text("abcdefghi " * 500_000)
    result = ingest(ingestor, path)
    assert result.chunks_added == result.jobs_enqueued == count(database, ChunkRow) > 5_000


@pytest.mark.parametrize(
    ("raw", "words"),
    [(b"", "is empty"), (b" \n\t", "is empty"), (b"a\x00b", "NUL"), (b"\x89PNG\xff\xfe", "UTF-8")],
)
def test_a_file_that_is_no_text_is_refused(
    database: Database, ingestor: Ingestor, tmp_path: Path, raw: bytes, words: str
) -> None:
    """One line names the path and the reason, and nothing is written."""
    path = tmp_path / "note.md"
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=words) as error:
        ingest(ingestor, path)
    assert path.as_posix() in str(error.value)
    assert "\n" not in str(error.value)
    assert count(database, ChunkRow) == count(database, JobRow) == count(database, IngestedSourceRow) == 0


def test_a_file_that_is_gone_is_refused(ingestor: Ingestor, tmp_path: Path) -> None:
    """Between the listing and the reading a file may vanish."""
    path = tmp_path / "note.md"
    path.write_text(PROSE)
    [source] = list_sources([path]).sources
    path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        ingestor.ingest_file(source)


def test_chunks_and_jobs_share_the_fate_of_the_transaction(
    database: Database, ingestor: Ingestor, jobs: JobRepository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kill before the commit leaves neither, and the same ingest again leaves both."""
    path = tmp_path / "note.md"
    path.write_text(PROSE)

    def die(*_args: object, **_options: object) -> list[Job]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "enqueue_many", die)
        with pytest.raises(KeyboardInterrupt):
            ingest(ingestor, path)
    assert count(database, ChunkRow) == count(database, JobRow) == 0
    assert ingest(ingestor, path).jobs_enqueued == count(database, ChunkRow)


def test_a_text_can_join_the_caller_s_transaction(database: Database, ingestor: Ingestor, jobs: JobRepository) -> None:
    """Chunks, their jobs and the application's own rows commit or vanish together."""
    with pytest.raises(RuntimeError), database.transaction() as session:  # noqa: PT012 - the block is the transaction
        ingestor.ingest_text("chat", "room", PROSE, timestamp_ms=1, session=session)
        jobs.enqueue(NewJob(kind="own", payload_json="{}"), session=session)
        raise RuntimeError
    assert count(database, ChunkRow) == count(database, JobRow) == 0
    with database.transaction() as session:
        result = ingestor.ingest_text(
            "chat", "room", PROSE, timestamp_ms=1, path_scope="team", tags=["a", "ü"], session=session
        )
    [chunk, *_] = list_chunks(database, result.chunk_ids)
    assert (chunk.tree_scope, chunk.tags, chunk.tags_json) == ("team", ["a", "ü"], '["a","ü"]')


def test_a_blank_text_has_no_chunks(database: Database, ingestor: Ingestor) -> None:
    """An empty message is no error, and leaves no trace."""
    assert ingestor.ingest_text("chat", "room", " \n", timestamp_ms=1).chunk_ids == ()
    assert count(database, IngestedSourceRow) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"text": "a\x00b"},
        {"text": "a\ud800b"},
        {"source_id": "a\x00b"},
        {"source_id": ""},
        {"source_kind": "document"},
        {"owner": "\ud800"},
        {"path_scope": "\x00"},
        {"tags": ["\x00"]},
        {"timestamp_ms": 1.5},
        {"timestamp_ms": 2**63},
    ],
    ids=str,
)
def test_values_that_no_database_holds_are_refused(
    database: Database, ingestor: Ingestor, bad: dict[str, object]
) -> None:
    """The same refusal on every engine, before anything is written."""
    values = {"source_kind": "chat", "source_id": "room", "text": PROSE, "timestamp_ms": 1, **bad}
    with pytest.raises(InvalidInputError):
        ingestor.ingest_text(**values)  # type: ignore[arg-type]
    assert count(database, ChunkRow) == 0


@pytest.mark.parametrize("timestamp_ms", [-62_135_596_800_000, -1, 253_402_300_799_999])
def test_dates_of_any_year_are_kept(database: Database, ingestor: Ingestor, timestamp_ms: int) -> None:
    """Year 1, just before 1970 and year 9999."""
    result = ingestor.ingest_text("email", "inbox", PROSE, timestamp_ms=timestamp_ms)
    assert list_chunks(database, result.chunk_ids)[0].timestamp_ms == timestamp_ms


def test_a_document_gets_one_seal_with_all_of_its_chunks(database: Database, ingestor: Ingestor) -> None:
    """Extraction per chunk, one seal per version; the same version again enqueues nothing."""
    result = ingestor.ingest_document("notion:conn1", "pageA", 7, PROSE, timestamp_ms=7)
    kinds = [kind for kind, _payload in list_jobs(database)]
    assert kinds == ["extract_chunk"] * result.chunks_added + [JobKind.SEAL_DOCUMENT]
    payload = json.loads(list_jobs(database)[-1][1])
    assert payload == {
        "tree_scope": "notion:conn1",
        "doc_id": "pageA",
        "version_ms": 7,
        "chunk_ids": list(result.chunk_ids),
    }
    chunk = list_chunks(database, result.chunk_ids)[0]
    assert (chunk.source_kind, chunk.source_id, chunk.tree_scope) == ("document", "pageA@7", "notion:conn1")
    assert ingestor.ingest_document("notion:conn1", "pageA", 7, PROSE, timestamp_ms=7).jobs_enqueued == 0


def test_versions_of_a_document_share_no_chunk(ingestor: Ingestor) -> None:
    """A version that repeats the text of an older one is whole all the same."""
    first = ingestor.ingest_document("scope", "doc", 1, PROSE, timestamp_ms=1)
    second = ingestor.ingest_document("scope", "doc", 2, PROSE, timestamp_ms=2)
    plain = ingestor.ingest_document("scope", "doc", None, PROSE, timestamp_ms=2)
    assert not set(first.chunk_ids) & set(second.chunk_ids)
    assert plain.chunks_added == second.chunks_added == first.chunks_added
