"""The built-in handlers, registered through the same door as an application's own."""

from tinycortex.domain.kinds import BUILTIN_KINDS, JobKind
from tinycortex.handlers.append_buffer import append_buffer
from tinycortex.handlers.extract_chunk import extract_chunk
from tinycortex.handlers.flush_stale import flush_stale
from tinycortex.handlers.reembed_backfill import reembed_backfill
from tinycortex.handlers.registry import Handler, HandlerRegistry
from tinycortex.handlers.seal import seal
from tinycortex.handlers.seal_document import seal_document

_HANDLERS: dict[JobKind, Handler] = {
    JobKind.EXTRACT_CHUNK: extract_chunk,
    JobKind.APPEND_BUFFER: append_buffer,
    JobKind.SEAL: seal,
    JobKind.FLUSH_STALE: flush_stale,
    JobKind.REEMBED_BACKFILL: reembed_backfill,
    JobKind.SEAL_DOCUMENT: seal_document,
}


def register_builtin_handlers(registry: HandlerRegistry) -> None:
    """Register the handlers of the six built-in kinds."""
    for kind, handler in _HANDLERS.items():
        registry.register(BUILTIN_KINDS[kind], handler)
