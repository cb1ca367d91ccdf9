"""The one tree of exceptions.

Outcomes are returned and failures raised; non-events are values: a suppressed duplicate is ``None``, a
stale settlement ``False``. A message says what happened, with which value, and what to do next.
"""

from enum import StrEnum
from typing import Self


class TinycortexError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(TinycortexError):
    """A setting, a database URL or the way the package is called cannot work."""


class InvalidInputError(TinycortexError, ValueError):
    """A value handed to a public entry is outside its contract; nothing was written."""


class PayloadError(InvalidInputError):
    """A payload is not JSON, has a wrong type, lacks a field, or holds a value that no payload may hold."""


class RegistrationError(TinycortexError):
    """A handler cannot be registered, or a kind is not one that can be used."""


class DuplicateKindError(RegistrationError):
    """A kind already has a handler."""


class UnknownKindError(RegistrationError, ValueError):
    """A word is not a live kind: unknown, or retired."""


class JobNotFoundError(TinycortexError, LookupError):
    """No job has the given id."""


class LeaseLostError(TinycortexError):
    """A handler goes on although another worker may hold its job by now; what it plans will not be written."""


class SourceError(TinycortexError):
    """A file cannot be ingested; other files of the same call are not affected."""


class MoveError(TinycortexError):
    """A queue cannot be moved whole; both databases hold the rows that they held before."""


class SchemaError(TinycortexError):
    """The database's schema does not fit this package."""


class SchemaMissingError(SchemaError):
    """The database has no schema of ours yet."""


class SchemaOutdatedError(SchemaError):
    """The database is at another revision than this package's newest."""


class TransactionEndedError(TinycortexError):
    """A write transaction was over before its block: ended by an error that the block caught, or by the block.

    What the block wrote before that is lost, or committed when it was a COMMIT; nothing was written after it.
    """


class StorageError(TinycortexError):
    """The database could not do its work. Always raised from the driver's own error.

    Args:
        message: what happened, and to which database.
        url: the database's URL, its password masked; None when it is not known.
    """

    def __init__(self, message: str, *, url: str | None = None) -> None:
        super().__init__(message)
        self.url = url


class StorageBusyError(StorageError):
    """Another connection held the lock for longer than the busy timeout; trying again is safe."""


class StorageUnavailableError(StorageError):
    """The database cannot be opened, read or written just now."""


class StorageFullError(StorageError):
    """The disk, or the database's own size limit, is full."""


class HostIOError(StorageError):
    """The operating system reported an I/O fault, a full disk or a read-only file system."""


class StorageCorruptError(StorageError):
    """The file is damaged or is no database. Nothing was changed; restore it or move it away."""


class FailureClass(StrEnum):
    """Whether trying again can help; the wire values of ``mem_tree_jobs.failure_class``."""

    TRANSIENT = "transient"
    UNRECOVERABLE = "unrecoverable"


class JobFailure(TinycortexError):  # noqa: N818 - the specification's name
    """A handler's typed failure, found by the worker however deeply it is wrapped (spec: Typed failures).

    Args:
        code: machine-readable reason, stored in ``failure_reason``.
        failure_class: ``unrecoverable`` ends the job at its first attempt; ``transient`` keeps the retries.
        message: what happened, for people; the code when left out.
        retry_after_s: how long the provider asks to be left alone (s): the job is not tried again before, and no
            other LLM-bound job begins until then; none of this process, or of all that share
            ``queue.llm_permits_global``.
    """

    def __init__(
        self,
        code: str,
        failure_class: FailureClass,
        message: str | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        if not isinstance(code, str) or not code.strip():
            raise InvalidInputError(f"a failure's code must be a word, not {code!r}")
        super().__init__(message if message is not None else code)
        self.code = code
        self.failure_class = FailureClass(failure_class)
        self.retry_after_s = None if retry_after_s is None else _check_wait(retry_after_s)

    @classmethod
    def transient(cls, code: str, message: str | None = None, *, retry_after_s: float | None = None) -> Self:
        """Build a failure that a later attempt may overcome, at once or after ``retry_after_s`` seconds."""
        return cls(code, FailureClass.TRANSIENT, message, retry_after_s=retry_after_s)

    @classmethod
    def unrecoverable(cls, code: str, message: str | None = None) -> Self:
        """Build a failure that no later attempt can overcome."""
        return cls(code, FailureClass.UNRECOVERABLE, message)

    @classmethod
    def budget_exhausted(cls) -> Self:
        """Build the unrecoverable failure ``budget_exhausted``."""
        return cls.unrecoverable("budget_exhausted")

    @property
    def is_unrecoverable(self) -> bool:
        """Tell whether retrying cannot help."""
        return self.failure_class is FailureClass.UNRECOVERABLE

    def __reduce__(self) -> tuple[object, tuple[type[Self], str, FailureClass, str, float | None]]:
        # Exception's default would call the class with the message alone, which breaks pickling and copying.
        return _rebuild, (type(self), self.code, self.failure_class, str(self), self.retry_after_s)


_LONGEST_WAIT_S = 7 * 24 * 3_600


def _check_wait(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_WAIT_S:
        raise InvalidInputError(f"retry_after_s is a number of seconds from 0 to a week, not {seconds!r}")
    return float(seconds)


def _rebuild(
    kind: type[JobFailure], code: str, failure_class: FailureClass, message: str, retry_after_s: float | None
) -> JobFailure:
    return kind(code, failure_class, message, retry_after_s=retry_after_s)
