"""Ingestor: text into chunk rows, each committed together with its first job (spec: Pipeline shape)."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import NewJob, check_instant
from tinycortex.domain.payloads import ExtractChunkPayload, SealDocumentPayload
from tinycortex.domain.text import check_text
from tinycortex.errors import InvalidInputError, SourceError
from tinycortex.memory.admission import DOCUMENT
from tinycortex.memory.chunking import canonical_text, chunk_id, count_tokens, split_text
from tinycortex.memory.sources import FILE, Source, SourceListing, list_sources, show_path
from tinycortex.repositories.chunks import Chunk, ChunkRepository, Lifecycle
from tinycortex.repositories.jobs import JobRepository

__all__ = ["DEFAULT_OWNER", "Ingested", "Ingestor", "Source", "SourceListing", "list_sources"]

DEFAULT_OWNER = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What one text became.

    Attributes:
        source_id: what its chunks are stored under.
        chunk_ids: every chunk of it, in order.
        chunks_added: how many of them are new.
        jobs_enqueued: jobs that were inserted with them.
    """

    source_id: str
    chunk_ids: tuple[str, ...]
    chunks_added: int
    jobs_enqueued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """A text and what all of its chunks have in common."""

    content: str
    source_kind: str
    source_id: str
    path_scope: str | None
    source_ref: str | None
    owner: str
    timestamp_ms: int
    tags: Sequence[str]


class Ingestor:
    """Takes texts in. A chunk that is there already is left alone, and gets no second job."""

    def __init__(
        self, database: Database, jobs: JobRepository, settings: MemorySettings, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._settings = settings
        self._clock = clock or database.clock

    def list_sources(self, paths: Sequence[Path | str], *, source_id: str | None = None) -> SourceListing:
        """List the files that ``paths`` name; see :func:`tinycortex.memory.sources.list_sources`."""
        return list_sources(paths, source_id=source_id)

    def ingest_file(self, source: Source, *, owner: str = DEFAULT_OWNER) -> Ingested:
        """Take in one file, in one transaction. Its time is that of its last change.

        Raises:
            SourceError: the file cannot be read, is empty, or is not text; nothing was written.
            InvalidInputError: the owner is no text that the database can hold.
            StorageError: nothing was written.
        """
        try:
            with source.path.open("rb") as file:
                timestamp_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
                raw = file.read()
        except OSError as error:
            raise SourceError(f"{show_path(source.path)}: cannot be read: {error.strerror}") from error
        try:
            content = canonical_text(raw)
        except InvalidInputError as error:
            raise SourceError(f"{show_path(source.path)}: {error}") from error
        if not content.strip():
            raise SourceError(f"{show_path(source.path)}: is empty")
        text = _Text(
            content=content,
            source_kind=FILE,
            source_id=source.source_id,
            path_scope=source.path_scope,
            source_ref=source.path.as_posix(),
            owner=_check_word("owner", owner),
            timestamp_ms=timestamp_ms,
            tags=(),
        )
        return self._store(text, self._cut(text), None)

    def ingest_text(
        self,
        source_kind: str,
        source_id: str,
        text: str,
        *,
        timestamp_ms: int,
        owner: str = DEFAULT_OWNER,
        path_scope: str | None = None,
        source_ref: str | None = None,
        tags: Sequence[str] = (),
        session: Session | None = None,
    ) -> Ingested:
        """Take in one text, in ``session`` when one is given, and else in a transaction of its own.

        Args:
            source_kind: what it comes from, such as ``chat`` or ``email``; not ``document``.
            source_id: the source, such as a conversation; chunks of one source share a tree.
            text: what it says; a blank one has no chunks.
            timestamp_ms: when it was said (ms since the epoch, UTC).
            owner: whose it is.
            path_scope: scope of the tree instead of the source's own.
            source_ref: where to find the original.
            tags: what the source says about it.
            session: the caller's transaction on the same database.

        Raises:
            InvalidInputError: an argument is outside its contract, or no database can hold it.
            StorageError: nothing was written.
        """
        if source_kind == DOCUMENT:
            raise InvalidInputError("a document is sealed as a whole; use ingest_document for it")
        checked = _check_text(
            text,
            source_kind=source_kind,
            source_id=source_id,
            path_scope=path_scope,
            source_ref=source_ref,
            owner=owner,
            timestamp_ms=timestamp_ms,
            tags=tags,
        )
        return self._store(checked, self._cut(checked), session)

    def ingest_document(
        self,
        tree_scope: str,
        doc_id: str,
        version_ms: int | None,
        text: str,
        *,
        timestamp_ms: int,
        owner: str = DEFAULT_OWNER,
        source_ref: str | None = None,
        tags: Sequence[str] = (),
        session: Session | None = None,
    ) -> Ingested:
        """Take in one version of a document, with one job that seals it as a whole.

        The chunks' source is ``<doc_id>@<version_ms>``, as in the seal's dedupe key, so that versions with
        text in common share no chunk; without a version it is ``doc_id``.

        Args:
            tree_scope: scope of the tree that the document's root joins.
            doc_id: the document.
            version_ms: its version (ms since the epoch, UTC), or None.
            text: as for :meth:`ingest_text`, like all that follow.
            timestamp_ms: when this version was written (ms since the epoch, UTC).
            owner: whose it is.
            source_ref: where to find the original.
            tags: what the source says about it.
            session: the caller's transaction on the same database.

        Raises:
            InvalidInputError: an argument is outside its contract, or no database can hold it.
            StorageError: nothing was written.
        """
        version = "" if version_ms is None else f"@{check_instant('version_ms', version_ms)}"
        document = _check_text(
            text,
            source_kind=DOCUMENT,
            source_id=f"{_check_word('doc_id', doc_id)}{version}",
            path_scope=_check_word("tree_scope", tree_scope),
            source_ref=source_ref,
            owner=owner,
            timestamp_ms=timestamp_ms,
            tags=tags,
        )
        chunks = self._cut(document)
        seal = SealDocumentPayload(
            tree_scope=tree_scope, doc_id=doc_id, version_ms=version_ms, chunk_ids=[chunk.id for chunk in chunks]
        )
        return self._store(document, chunks, session, NewJob.seal_document(seal))

    def _cut(self, text: _Text) -> list[Chunk]:
        now_ms = self._clock.now_ms()
        tags_json = json.dumps(list(text.tags), ensure_ascii=False, separators=(",", ":"))
        pieces = split_text(text.content, self._settings.chunk_max_tokens, self._settings.chunk_overlap)
        return [
            Chunk(
                id=chunk_id(text.source_kind, text.source_id, sequence, piece.text),
                source_kind=text.source_kind,
                source_id=text.source_id,
                path_scope=text.path_scope,
                source_ref=text.source_ref,
                owner=text.owner,
                timestamp_ms=text.timestamp_ms,
                time_range_start_ms=text.timestamp_ms,
                time_range_end_ms=text.timestamp_ms,
                tags_json=tags_json,
                content=piece.text,
                token_count=count_tokens(piece.text),
                seq_in_source=sequence,
                created_at_ms=now_ms,
                lifecycle_status=Lifecycle.PENDING.value,
            )
            for sequence, piece in enumerate(pieces)
        ]

    def _store(self, text: _Text, chunks: list[Chunk], session: Session | None, *further: NewJob) -> Ingested:
        """Insert the new ones of ``chunks`` with a job each; with any new one, the ``further`` jobs too."""
        with self._database.within(session) as tx:
            repository = ChunkRepository(tx)
            added = repository.insert_new(chunks)
            wanted = [NewJob.extract_chunk(ExtractChunkPayload(chunk_id=chunk_id)) for chunk_id in added]
            wanted += further if added else ()
            enqueued = self._jobs.enqueue_many(wanted, session=tx) if wanted else []
            if chunks:
                repository.record_source(text.source_kind, text.source_id, self._clock.now_ms())
        return Ingested(
            source_id=text.source_id,
            chunk_ids=tuple(chunk.id for chunk in chunks),
            chunks_added=len(added),
            jobs_enqueued=sum(job_id is not None for job_id in enqueued),
        )


def _check_text(
    text: str,
    *,
    source_kind: str,
    source_id: str,
    path_scope: str | None,
    source_ref: str | None,
    owner: str,
    timestamp_ms: int,
    tags: Sequence[str],
) -> _Text:
    """Return what a caller handed in, or raise :class:`InvalidInputError` naming what cannot be stored."""
    if not isinstance(text, str):
        raise InvalidInputError(f"text is a string, not {type(text).__name__}")
    try:
        content = canonical_text(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"text {error}") from error
    return _Text(
        content=content,
        source_kind=_check_word("source_kind", source_kind),
        source_id=_check_word("source_id", source_id),
        path_scope=None if path_scope is None else _check_word("path_scope", path_scope),
        source_ref=None if source_ref is None else _check_word("source_ref", source_ref),
        owner=_check_word("owner", owner),
        timestamp_ms=check_instant("timestamp_ms", timestamp_ms),
        tags=[_check_word("tags", tag) for tag in tags],
    )


def _check_word(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{name} is a string of at least one character, not {value!r}")
    try:
        return check_text(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name} {value!r}: {error}") from error
