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
        engine: looked after from now on. SQLAlchemy makes both calls for each statement that goes through it.
        before: called with the connection, the driver's cursor and the statement, among others.
        after: called with the same.
        leaves_results: whether ``after`` is there for results that may not be read to their end.

    Attributes:
        before: who runs a statement on a cursor of the driver's own calls it instead.
        after: the same, after a result that was read to its end; None when there is nothing to be done then.
    """

    def __init__(
        self, engine: Engine, before: Callable[..., None], after: Callable[..., None], *, leaves_results: bool = False
    ) -> None:
        self.before = before
        self.after = None if leaves_results else after
        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "after_cursor_execute", after)
        events: Any = engine.dispatch
        # Each holds those of the engine, and those of all engines; they are counted at every statement.
        both = (events.before_cursor_execute, events.after_cursor_execute)
        self._before, self._before_all, self._after, self._after_all = (
            listeners for one in both for listeners in (one.listeners, one.parent_listeners)
        )
        engine.update_execution_options(**{_OPTION: self})

    @property
    def is_alone(self) -> bool:
        """Tell whether nobody else listens to the engine's statements, as a tracer or a test does, or logs them."""
        others = len(self._before) + len(self._before_all) + len(self._after) + len(self._after_all) - 2
        return others == 0 and not _LOGGER.isEnabledFor(logging.INFO)

    @classmethod
    def find_alone(cls, connection: Connection) -> Self | None:
        """Return the guard where a statement may go straight to the driver; None where that would pass somebody over.

        It would on an engine of another program's, too.
        """
        guard: Self | None = connection.get_execution_options().get(_OPTION)
        return guard if guard is not None and guard.is_alone else None
