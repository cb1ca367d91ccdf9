"""The payloads of the built-in kinds, and their wire JSON (contract §2).

Compact, fields in the order written here, absent optionals as ``null``, non-ASCII as UTF-8. On read,
unknown fields are ignored and a missing optional is None; anything else wrong raises PayloadError.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError, from_json

from tinycortex.domain.text import StoredText, find_text_fault
from tinycortex.errors import PayloadError

PayloadT = TypeVar("PayloadT", bound=BaseModel)

Instant = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Milliseconds since the Unix epoch, UTC; any instant that a column can hold."""

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Payload(BaseModel):
    """Base of the built-in payloads: immutable, no coercion, unknown fields ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class LeafRef(Payload):
    """A chunk, as a node of a tree."""

    kind: Literal["leaf"] = "leaf"
    chunk_id: StoredText

    @property
    def dedupe_fragment(self) -> str:
        """Return the node's part of a dedupe key."""
        return f"leaf:{self.chunk_id}"


class SummaryRef(Payload):
    """A sealed summary, as a node of a tree."""

    kind: Literal["summary"] = "summary"
    summary_id: StoredText

    @property
    def dedupe_fragment(self) -> str:
        """Return the node's part of a dedupe key."""
        return f"summary:{self.summary_id}"


class SourceTarget(Payload):
    """The tree of one source, found or made by its source id."""

    kind: Literal["source"] = "source"
    source_id: StoredText

    @property
    def dedupe_fragment(self) -> str:
        """Return the target's part of a dedupe key."""
        return f"source:{self.source_id}"


class TopicTarget(Payload):
    """One existing topic tree."""

    kind: Literal["topic"] = "topic"
    tree_id: StoredText

    @property
    def dedupe_fragment(self) -> str:
        """Return the target's part of a dedupe key."""
        return f"topic:{self.tree_id}"


NodeRef = LeafRef | SummaryRef
"""What ``append_buffer`` pushes."""

AppendTarget = SourceTarget | TopicTarget
"""Where ``append_buffer`` pushes it."""


class ExtractChunkPayload(Payload):
    """Score one chunk and decide its admission."""

    chunk_id: StoredText

    @property
    def dedupe_key(self) -> str:
        """Return the key that one chunk's extraction is unique by."""
        return f"extract:{self.chunk_id}"


class AppendBufferPayload(Payload):
    """Push one node into the first buffer of one tree."""

    node: Annotated[NodeRef, Field(discriminator="kind")]
    target: Annotated[AppendTarget, Field(discriminator="kind")]

    @property
    def dedupe_key(self) -> str:
        """Return the key that one node's push into one tree is unique by."""
        return f"append:{self.target.dedupe_fragment}:{self.node.dedupe_fragment}"


class SealPayload(Payload):
    """Seal one level of one tree; ``force_now_ms`` (ms, UTC) seals it before its gate is met."""

    tree_id: StoredText
    level: Annotated[int, Field(ge=0, lt=2**31)]
    force_now_ms: Instant | None = None

    @property
    def dedupe_key(self) -> str:
        """Return the key of one level's seal; a forced and an unforced one share it."""
        return f"seal:{self.tree_id}:{self.level}"


class FlushStalePayload(Payload):
    """Force a seal of every buffer older than ``max_age_secs`` seconds."""

    max_age_secs: Count

    @staticmethod
    def dedupe_key(date_iso: str, hour_block: int) -> str:
        """Return the key of one 3-hour UTC block; both parts come from one reading of the clock."""
        return f"flush_stale:{date_iso}-h{hour_block}"


class ReembedBackfillPayload(Payload):
    """Embed what lacks a vector at one signature, a batch at a time."""

    signature: StoredText

    @property
    def dedupe_key(self) -> str:
        """Return the key that one signature's chain is unique by."""
        return f"reembed_backfill:{self.signature}"


class SealDocumentPayload(Payload):
    """Build the subtree of one version of a document and merge its root into ``tree_scope``'s tree."""

    tree_scope: StoredText
    doc_id: StoredText
    version_ms: Instant | None = None
    chunk_ids: list[StoredText]

    @property
    def dedupe_key(self) -> str:
        """Return the key of one document version."""
        version = "" if self.version_ms is None else f"@{self.version_ms}"
        return f"seal_doc:{self.doc_id}{version}"


def check_json(text: str) -> str:
    """Return ``text`` when it is JSON, or raise :class:`PayloadError`.

    NaN and the infinities are refused: JSON has no word for them, though many parsers take them.
    """
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise PayloadError(f"the payload is not JSON: {error}") from error
    return text


def parse_payload(model: type[PayloadT], text: str) -> PayloadT:
    """Return the JSON ``text`` as ``model``, or raise :class:`PayloadError` saying what is wrong where."""
    check_json(text)  # pydantic's own parser would let NaN through to any model that did not forbid it
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        )
        raise PayloadError(f"{model.__name__}: {faults}") from error


def dump_payload(payload: BaseModel) -> str:
    """Return the wire JSON of ``payload``, or raise :class:`PayloadError` when it could not be read back."""
    if not isinstance(payload, BaseModel):
        raise PayloadError(f"a payload is a pydantic model, not {type(payload).__name__}")
    try:
        text = payload.model_dump_json()
    except (PydanticSerializationError, ValueError) as error:
        raise PayloadError(f"{type(payload).__name__} cannot be written as JSON: {error}") from error
    if fault := find_text_fault(text):
        raise PayloadError(f"{type(payload).__name__} contains {fault}, which the database cannot hold")
    parse_payload(type(payload), text)
    return text
