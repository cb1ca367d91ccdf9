"""The guard of an engine's statements, by which some of them may go straight to the driver."""

import logging
from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import Connection, Engine, event

_OPTION = "tinycortex_guard"

_LOGGER = logging.getLogger("sqlalchemy.engine.Engine")
"""Where SQLAlchemy shows each statement, when it is asked to."""


class Guard:
    """What an engine looks at before and after each statement, and whether anybody else does.

    Args:
        engine: looked after from now on. SQLAlchemy makes both calls for each statement that goes through it; who
            runs one on the driver's own cursor makes them instead.
        before: called with the connection, the driver's cursor and the statement, among others.
        after: called with the same.
    """

    def __init__(self, engine: Engine, before: Callable[..., None], after: Callable[..., None]) -> None:
        self.before = before
        self.after = after
        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "after_cursor_execute", after)
        events: Any = engine.dispatch
        self._listeners = (events.before_cursor_execute, events.after_cursor_execute)
        engine.update_execution_options(**{_OPTION: self})

    @property
    def is_alone(self) -> bool:
        """Tell whether nobody else listens to the engine's statements, as a tracer or a test does, or logs them."""
        return all(len(listeners) == 1 for listeners in self._listeners) and not _LOGGER.isEnabledFor(logging.INFO)

    @classmethod
    def find_alone(cls, connection: Connection) -> Self | None:
        """Return the guard where a statement may go straight to the driver; None where that would pass somebody over.

        It would on an engine of another program's, too.
        """
        guard: Self | None = connection.get_execution_options().get(_OPTION)
        return guard if guard is not None and guard.is_alone else None
