"""The database engines. ``dialect.name`` is asked here, by revisions, and nowhere else."""

from collections.abc import Callable

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from tinycortex.dialects.base import Dialect, Observer, Presence, Watch
from tinycortex.dialects.sqlite import SQLiteDialect
from tinycortex.errors import ConfigurationError

__all__ = ["Dialect", "Observer", "Presence", "Watch", "dialect_for"]


def _postgresql() -> Dialect:
    try:
        from tinycortex.dialects.postgresql import PostgreSQLDialect  # noqa: PLC0415 - its driver is an extra
    except ImportError as error:
        raise ConfigurationError('PostgreSQL needs psycopg; run: pip install "tinycortex[postgres]"') from error
    return PostgreSQLDialect()


_DIALECTS: dict[str, Callable[[], Dialect]] = {"sqlite": SQLiteDialect, "postgresql": _postgresql}


def dialect_for(url: str | URL) -> Dialect:
    """Return the engine that ``url`` names, or raise :class:`ConfigurationError`."""
    try:
        backend = make_url(url).get_backend_name()
    except ArgumentError:
        # The URL itself stays out of the message: it may hold a password.
        raise ConfigurationError("the database URL is no SQLAlchemy URL; use one such as sqlite:///chunks.db") from None
    if backend not in _DIALECTS:
        raise ConfigurationError(f"no support for {backend!r} databases; supported: {', '.join(_DIALECTS)}")
    return _DIALECTS[backend]()
