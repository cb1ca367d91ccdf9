"""Kinds of jobs: their words on the wire, and everything that is special about one (spec: Job kinds)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from pydantic import BaseModel

from tinycortex.domain import payloads, policy
from tinycortex.domain.text import check_text
from tinycortex.errors import InvalidInputError, UnknownKindError

RETIRED_JOB_KINDS = frozenset({"topic_route", "digest_daily"})
"""Kinds of the removed global and topic trees: never parsed, never claimed, purged at start-up."""

MAX_KIND_LENGTH = 200


def is_retired_kind(kind: str) -> bool:
    """Tell whether ``kind`` is one of the two retired words (spec: Retired kinds)."""
    return kind in RETIRED_JOB_KINDS


class JobKind(StrEnum):
    """The six built-in kinds; the values are their words in ``mem_tree_jobs.kind``."""

    EXTRACT_CHUNK = "extract_chunk"
    APPEND_BUFFER = "append_buffer"
    SEAL = "seal"
    FLUSH_STALE = "flush_stale"
    REEMBED_BACKFILL = "reembed_backfill"
    SEAL_DOCUMENT = "seal_document"

    @classmethod
    def parse(cls, word: str) -> Self:
        """Return the kind that ``word`` names, or raise :class:`UnknownKindError` (saying if it is retired)."""
        if is_retired_kind(word):
            raise UnknownKindError(f"job kind {word!r} is retired; its rows are purged when a worker starts")
        try:
            return cls(word)
        except ValueError as error:
            known = ", ".join(cls)
            raise UnknownKindError(f"unknown job kind {word!r}; the built-in kinds are {known}") from error

    @property
    def is_llm_bound(self) -> bool:
        """Tell whether a handler of this kind runs under an LLM permit (spec: LLM concurrency)."""
        return BUILTIN_KINDS[self].llm_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """Everything that is special about one kind; nothing else in the package compares kinds.

    Attributes:
        kind: the word in ``mem_tree_jobs.kind``.
        payload: the pydantic model of its payload.
        rank: drain-forward order; a lower rank is claimed first whatever its age.
        llm_bound: whether its handler holds an LLM permit.
        max_attempts: the budget of a job that names none.
    """

    kind: str
    payload: type[BaseModel]
    rank: int = 4
    llm_bound: bool = False
    max_attempts: int = policy.DEFAULT_MAX_ATTEMPTS

    def __post_init__(self) -> None:
        check_kind(self.kind)
        check_max_attempts(self.max_attempts)
        if not (isinstance(self.payload, type) and issubclass(self.payload, BaseModel)):
            raise InvalidInputError(
                f"the payload of kind {self.kind!r} must be a pydantic model class, not {self.payload!r}"
            )
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise InvalidInputError(f"the rank of kind {self.kind!r} must be a whole number, not {self.rank!r}")


def check_kind(kind: object) -> str:
    """Return ``kind`` when it is a word that a job may carry, or raise.

    Raises:
        UnknownKindError: the kind is retired.
        InvalidInputError: it is not a string, is empty, too long, or has white space or a NUL in it.
    """
    if not isinstance(kind, str):
        raise InvalidInputError(f"a job kind is a string, not {type(kind).__name__}")
    if not kind or len(kind) > MAX_KIND_LENGTH or kind.split() != [kind]:
        raise InvalidInputError(
            f"a job kind is a word of 1 to {MAX_KIND_LENGTH} characters without spaces, not {kind[:250]!r}"
        )
    if is_retired_kind(kind):
        raise UnknownKindError(f"job kind {kind!r} is retired and can neither be enqueued nor registered")
    return check_text(str(kind))


def check_max_attempts(max_attempts: object) -> int:
    """Return ``max_attempts`` when it is a whole number of at least 1, or raise :class:`InvalidInputError`."""
    if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or not 1 <= max_attempts < 2**31:
        raise InvalidInputError(f"max_attempts must be a whole number of at least 1, not {max_attempts!r}")
    return max_attempts


BUILTIN_KINDS: dict[JobKind, KindSpec] = {
    spec_kind: KindSpec(
        kind=spec_kind.value, payload=payload, rank=rank, llm_bound=llm_bound, max_attempts=max_attempts
    )
    for spec_kind, payload, rank, llm_bound, max_attempts in (
        (JobKind.SEAL, payloads.SealPayload, 1, True, policy.DEFAULT_MAX_ATTEMPTS),
        (JobKind.FLUSH_STALE, payloads.FlushStalePayload, 2, False, policy.DEFAULT_MAX_ATTEMPTS),
        (JobKind.APPEND_BUFFER, payloads.AppendBufferPayload, 3, False, policy.DEFAULT_MAX_ATTEMPTS),
        (JobKind.EXTRACT_CHUNK, payloads.ExtractChunkPayload, 4, True, policy.DEFAULT_MAX_ATTEMPTS),
        (JobKind.REEMBED_BACKFILL, payloads.ReembedBackfillPayload, 4, True, policy.REEMBED_MAX_ATTEMPTS),
        (JobKind.SEAL_DOCUMENT, payloads.SealDocumentPayload, 4, True, policy.DEFAULT_MAX_ATTEMPTS),
    )
}
"""The table of the specification's section Job kinds, with the order of Claiming and ordering."""
