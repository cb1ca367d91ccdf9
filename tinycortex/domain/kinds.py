"""Kinds of jobs: their words on the wire, and everything that is special about one (spec: Job kinds)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self, TypedDict

from pydantic import BaseModel

from tinycortex.domain import payloads, policy
from tinycortex.domain.text import check_text
from tinycortex.errors import InvalidInputError, UnknownKindError

RETIRED_JOB_KINDS = frozenset({"topic_route", "digest_daily"})
"""Kinds of the removed global and topic trees: never parsed, never claimed, purged at start-up."""

MAX_KIND_LENGTH = 200

DEFAULT_RANK = 4
"""Drain-forward order of the kinds furthest upstream."""


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


class OnDuplicate(StrEnum):
    """What an enqueue does to the active row that already has its key; it returns None in every case."""

    IGNORE = "ignore"
    """Nothing."""
    RERUN = "rerun"
    """A running row runs once more with the newest payload: it may have looked before the request came."""
    REPLACE = "replace"
    """A ready row takes the newest payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """Everything that is special about one kind; nothing else in the package compares kinds.

    Attributes:
        kind: the word in ``mem_tree_jobs.kind``.
        payload: the pydantic model of its payload.
        rank: drain-forward order; a lower rank is claimed first whatever its age.
        llm_bound: whether its handler holds an LLM permit.
        max_attempts: the budget of a job that names none.
        timeout_s: how long its handler may run (seconds); None for no limit.
        lease_ms: length of its leases (ms); None for the worker's own.
        on_duplicate: what an enqueue does to the active row that already has its key.
        outranks: with ``rerun``, tells whether a payload also replaces the one that waits; None: never a
            ready row's, always an earlier request's.
        remember_ms: how long a settled row is kept from the purge whatever it is asked (ms).
    """

    kind: str
    payload: type[BaseModel]
    rank: int = DEFAULT_RANK
    llm_bound: bool = False
    max_attempts: int = policy.DEFAULT_MAX_ATTEMPTS
    timeout_s: float | None = None
    lease_ms: int | None = None
    on_duplicate: OnDuplicate | Literal["ignore", "rerun", "replace"] = OnDuplicate.IGNORE
    outranks: Callable[[Any], bool] | None = None
    remember_ms: int = 0

    def __post_init__(self) -> None:
        check_kind(self.kind)
        check_max_attempts(self.max_attempts)
        if not (isinstance(self.payload, type) and issubclass(self.payload, BaseModel)):
            raise InvalidInputError(
                f"the payload of kind {self.kind!r} must be a pydantic model class, not {self.payload!r}"
            )
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise InvalidInputError(f"the rank of kind {self.kind!r} must be a whole number, not {self.rank!r}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidInputError(f"timeout_s of kind {self.kind!r} must be seconds above 0, not {self.timeout_s!r}")
        if self.lease_ms is not None:
            check_lease_ms(self.lease_ms)
        if self.on_duplicate not in tuple(OnDuplicate):
            words = ", ".join(OnDuplicate)
            raise InvalidInputError(f"on_duplicate of kind {self.kind!r} is one of {words}, not {self.on_duplicate!r}")
        object.__setattr__(self, "on_duplicate", OnDuplicate(self.on_duplicate))


class KindOptions(TypedDict, total=False):
    """What a registration may say beside kind and payload; each is the field of KindSpec by its name."""

    rank: int
    llm_bound: bool
    max_attempts: int
    timeout_s: float | None
    lease_ms: int | None
    on_duplicate: OnDuplicate | Literal["ignore", "rerun", "replace"]
    outranks: Callable[[Any], bool] | None
    remember_ms: int


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


def check_lease_ms(lease_ms: object) -> int:
    """Return ``lease_ms`` when it is whole milliseconds above zero, or raise :class:`InvalidInputError`."""
    if isinstance(lease_ms, bool) or not isinstance(lease_ms, int) or not 0 < lease_ms < 2**31:
        raise InvalidInputError(f"lease_ms is a whole number of milliseconds above 0, not {lease_ms!r}")
    return lease_ms


def _is_forced(payload: payloads.SealPayload) -> bool:
    return payload.force_now_ms is not None


_SPECS = (
    KindSpec(
        kind=JobKind.SEAL.value,
        payload=payloads.SealPayload,
        rank=1,
        llm_bound=True,
        # A push may fill the buffer while its seal is running and has looked already; and a forced seal
        # must not be lost behind an unforced one that would find the gate unmet.
        on_duplicate=OnDuplicate.RERUN,
        outranks=_is_forced,
    ),
    KindSpec(
        kind=JobKind.FLUSH_STALE.value,
        payload=payloads.FlushStalePayload,
        rank=2,
        remember_ms=policy.FLUSH_BLOCK_MS,  # one flush per block, so its row must outlive the block
    ),
    KindSpec(kind=JobKind.APPEND_BUFFER.value, payload=payloads.AppendBufferPayload, rank=3),
    KindSpec(kind=JobKind.EXTRACT_CHUNK.value, payload=payloads.ExtractChunkPayload, llm_bound=True),
    KindSpec(
        kind=JobKind.REEMBED_BACKFILL.value,
        payload=payloads.ReembedBackfillPayload,
        llm_bound=True,
        max_attempts=policy.REEMBED_MAX_ATTEMPTS,
        # A chunk admitted while the last batch runs would otherwise wait for the next admission.
        on_duplicate=OnDuplicate.RERUN,
    ),
    KindSpec(kind=JobKind.SEAL_DOCUMENT.value, payload=payloads.SealDocumentPayload, llm_bound=True),
)

BUILTIN_KINDS: Mapping[str, KindSpec] = {spec.kind: spec for spec in _SPECS}
"""The table of the specification's section Job kinds, with the order of Claiming and ordering."""
