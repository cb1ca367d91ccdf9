"""Reading an error: the typed failure in its chain of causes, and its text for ``last_error``."""

from collections.abc import Iterator

from tinycortex.domain import policy
from tinycortex.domain.text import error_text
from tinycortex.errors import JobFailure

_MAX_LINKS = 64


def iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all that led to it, nearest first, each once.

    Follows ``raise … from``, what was being handled when it was raised (unless ``from None`` says
    otherwise), and the members of exception groups.
    """
    waiting, seen = [error], {id(error)}
    while waiting and len(seen) <= _MAX_LINKS:
        link = waiting.pop(0)
        yield link
        causes: list[BaseException | None] = [link.__cause__]
        if not link.__suppress_context__:
            causes.append(link.__context__)
        if isinstance(link, BaseExceptionGroup):
            causes.extend(link.exceptions)
        for cause in causes:
            if cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                waiting.append(cause)


def find_failure(error: BaseException) -> JobFailure | None:
    """Return the nearest :class:`JobFailure` in the chain, however deeply it is wrapped (contract §4.6)."""
    return next((link for link in iter_causes(error) if isinstance(link, JobFailure)), None)


def describe_error(error: BaseException) -> str:
    """Return the full chain of causes as text that a database can hold, at most 64 KiB.

    Never raises, whatever the error's own ``__str__`` does.
    """
    return error_text("; caused by ".join(_describe_link(link) for link in iter_causes(error)))


def _describe_link(error: BaseException) -> str:
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as fault:  # noqa: BLE001 - an error that cannot be printed must still be recorded
        message = f"<its __str__ raised {type(fault).__name__}>"
    # Cut before joining: sixty-four links of twenty megabytes are not one string.
    return f"{name}: {message[: policy.LAST_ERROR_MAX_BYTES]}" if message else name
