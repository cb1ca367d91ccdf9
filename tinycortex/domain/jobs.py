"""Jobs as values: a request to enqueue one, and a frozen snapshot of one row (spec: The Job row)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from pydantic import BaseModel

from tinycortex.domain import policy
from tinycortex.domain.clock import flush_block
from tinycortex.domain.kinds import BUILTIN_KINDS, JobKind, check_kind, check_max_attempts
from tinycortex.domain.payloads import (
    AppendBufferPayload,
    ExtractChunkPayload,
    FlushStalePayload,
    ReembedBackfillPayload,
    SealDocumentPayload,
    SealPayload,
    check_json,
    dump_payload,
)
from tinycortex.domain.text import find_text_fault
from tinycortex.errors import FailureClass, InvalidInputError, PayloadError


class JobStatus(StrEnum):
    """The values of ``mem_tree_jobs.status`` (spec: Statuses)."""

    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @classmethod
    def parse(cls, word: str) -> Self:
        """Return the status that ``word`` names, or raise :class:`InvalidInputError`."""
        try:
            return cls(word)
        except ValueError as error:
            raise InvalidInputError(f"a job's status is one of {', '.join(cls)}, not {word!r}") from error

    @property
    def is_terminal(self) -> bool:
        """Tell whether no worker will touch the row again by itself."""
        return self in TERMINAL_STATUSES


TERMINAL_STATUSES = (JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED)

ACTIVE_KEY_PREDICATE = "dedupe_key IS NOT NULL AND status IN ('ready', 'running')"
"""In SQL, the rows that hold their dedupe key: the unique index and an enqueue's conflict clause must spell it alike.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row of ``mem_tree_jobs`` as it stood when it was read; for a claimed row also the claim itself.

    ``payload_json`` stays raw text, parsed by the dispatcher. Instants are ms since the epoch, UTC.
    ``claim_token`` grows with every claim of the row and is never reused, so a settlement that quotes it
    takes effect only while that claim holds. ``trace_context`` is a JSON object of W3C trace headers.
    """

    id: str
    kind: str
    payload_json: str
    dedupe_key: str | None
    status: JobStatus
    attempts: int
    max_attempts: int
    available_at_ms: int
    locked_until_ms: int | None
    last_error: str | None
    created_at_ms: int
    started_at_ms: int | None
    completed_at_ms: int | None
    failure_reason: str | None
    failure_class: FailureClass | None
    claim_token: int
    locked_by: str | None
    deferred_since_ms: int | None
    heals: int
    rerun_payload_json: str | None
    cancel_requested_at_ms: int | None
    claimed_at_ms: int | None
    trace_context: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A request to enqueue: a job less what the store mints (id, times, lease).

    Attributes:
        kind: a live kind, built in or an application's own.
        payload_json: the payload on the wire.
        dedupe_key: at most one ready or running row has it; None for no such limit.
        max_attempts: the budget; None for the kind's own.
        available_at_ms: earliest instant of the first claim (ms, UTC); None for at once.

    Raises:
        InvalidInputError: a field is outside its contract.
        PayloadError: ``payload_json`` is not a string of JSON.
    """

    kind: str
    payload_json: str
    dedupe_key: str | None = None
    max_attempts: int | None = None
    available_at_ms: int | None = None

    def __post_init__(self) -> None:
        check_kind(self.kind)
        check_payload_text(self.payload_json)
        if self.dedupe_key is not None:
            _check_key(self.dedupe_key)
        if self.max_attempts is not None:
            check_max_attempts(self.max_attempts)
        if self.available_at_ms is not None:
            check_instant("available_at_ms", self.available_at_ms)

    @classmethod
    def of(
        cls,
        kind: str,
        payload: BaseModel,
        *,
        dedupe_key: str | None = None,
        max_attempts: int | None = None,
        available_at_ms: int | None = None,
    ) -> Self:
        """Build a job of any kind from its payload model.

        Raises:
            PayloadError: the payload is no model, could not be read back from JSON, or is not the model of
                a built-in kind.
            InvalidInputError: another field is outside its contract.
        """
        spec = BUILTIN_KINDS.get(kind) if isinstance(kind, str) else None
        if spec is not None and not isinstance(payload, spec.payload):
            raise PayloadError(f"kind {kind!r} takes {spec.payload.__name__}, not {type(payload).__name__}")
        return cls(
            kind=kind,
            payload_json=dump_payload(payload),
            dedupe_key=dedupe_key,
            max_attempts=max_attempts,
            available_at_ms=available_at_ms,
        )

    @classmethod
    def extract_chunk(cls, payload: ExtractChunkPayload) -> Self:
        """Build the job that scores one chunk."""
        return cls.of(JobKind.EXTRACT_CHUNK.value, payload, dedupe_key=payload.dedupe_key)

    @classmethod
    def append_buffer(cls, payload: AppendBufferPayload) -> Self:
        """Build the job that pushes one node into a tree."""
        return cls.of(JobKind.APPEND_BUFFER.value, payload, dedupe_key=payload.dedupe_key)

    @classmethod
    def seal(cls, payload: SealPayload) -> Self:
        """Build the job that seals one level of one tree."""
        return cls.of(JobKind.SEAL.value, payload, dedupe_key=payload.dedupe_key)

    @classmethod
    def flush_stale(cls, payload: FlushStalePayload, *, now_ms: int) -> Self:
        """Build the flush of the 3-hour UTC block that ``now_ms`` falls in."""
        return cls.of(
            JobKind.FLUSH_STALE.value,
            payload,
            dedupe_key=FlushStalePayload.dedupe_key(*flush_block(check_instant("now_ms", now_ms))),
        )

    @classmethod
    def reembed_backfill(cls, payload: ReembedBackfillPayload) -> Self:
        """Build the chain that embeds what lacks a vector at one signature; three attempts."""
        return cls.of(
            JobKind.REEMBED_BACKFILL.value,
            payload,
            dedupe_key=payload.dedupe_key,
            max_attempts=policy.REEMBED_MAX_ATTEMPTS,
        )

    @classmethod
    def seal_document(cls, payload: SealDocumentPayload) -> Self:
        """Build the job that seals one version of a document."""
        return cls.of(JobKind.SEAL_DOCUMENT.value, payload, dedupe_key=payload.dedupe_key)


def check_payload_text(text: object) -> str:
    """Return ``text`` when it is a string of JSON that the database can hold, or raise :class:`PayloadError`."""
    if not isinstance(text, str):
        raise PayloadError(f"payload_json is a string of JSON, not {type(text).__name__}")
    if fault := find_text_fault(text):
        raise PayloadError(f"payload_json contains {fault}, which the database cannot hold")
    return check_json(text)


def check_instant(name: str, value: object) -> int:
    """Return ``value`` when it is whole milliseconds that a column can hold, or raise InvalidInputError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(f"{name} is whole milliseconds since the epoch (UTC), not {value!r}")
    if not -policy.MAX_TIME_MS <= value <= policy.MAX_TIME_MS:
        raise InvalidInputError(f"{name} is beyond what the database can hold: {value}")
    return value


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise InvalidInputError(f"a dedupe key is a string of at least one character or None, not {key!r}")
    if fault := find_text_fault(key):
        raise InvalidInputError(f"dedupe key {key!r} contains {fault}, which the database cannot hold")
