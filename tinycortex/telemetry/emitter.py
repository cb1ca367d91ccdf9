"""The emitter: takes events to their subscribers, and keeps their faults away from the queue."""

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tinycortex.domain.redact import scrub_for_log
from tinycortex.errors import InvalidInputError
from tinycortex.telemetry.events import Event
from tinycortex.telemetry.tracing import NO_TRACER, Tracer

logger = logging.getLogger(__name__)

Subscriber = Callable[[Event], object]

_HANDLER_MS: ContextVar[float | None] = ContextVar("tinycortex_handler_ms", default=None)


@contextmanager
def handler_took(handler_ms: float | None) -> Iterator[None]:
    """Say how long the handler ran (ms) whose claim the block ends."""
    token = _HANDLER_MS.set(handler_ms)
    try:
        yield
    finally:
        _HANDLER_MS.reset(token)


def current_handler_ms() -> float | None:
    """Return what :func:`handler_took` says here; None outside of it."""
    return _HANDLER_MS.get()


@dataclass(slots=True, eq=False)
class _Subscription:
    callback: Subscriber
    has_raised: bool = False


class Emitter:
    """The events of one queue.

    Attributes:
        tracer: follows jobs from their enqueue to their handler; one that does nothing, until somebody traces.
    """

    def __init__(self) -> None:
        self.tracer: Tracer = NO_TRACER
        self._lock = threading.Lock()
        self._subscriptions: tuple[_Subscription, ...] = ()

    @property
    def is_heard(self) -> bool:
        """Tell whether there is a subscriber; without one, an event need not even be made."""
        return bool(self._subscriptions)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Have ``callback`` called with each event; return what ends that.

        It is called in the thread that committed, a worker's or a producer's, one event after another in the
        order of the commits of that thread; threads may call it at the same time. It should be quick, for its
        caller waits. What it raises is logged once and goes no further.

        Raises:
            InvalidInputError: it cannot be called, or would have to be awaited.
        """
        if not callable(callback):
            raise InvalidInputError(f"a subscriber is called with each event, which {callback!r} cannot be")
        if inspect.iscoroutinefunction(callback):
            raise InvalidInputError("a subscriber is a plain function; nobody would await an asynchronous one")
        subscription = _Subscription(callback)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)

        def unsubscribe() -> None:
            with self._lock:
                self._subscriptions = tuple(other for other in self._subscriptions if other is not subscription)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Tell every subscriber of what has been committed; a Ctrl-C is all that it lets through."""
        for subscription in self._subscriptions:
            try:
                subscription.callback(event)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a worker must survive SystemExit too
                if not subscription.has_raised:
                    subscription.has_raised = True
                    logger.warning(
                        "a subscriber raised at %s, and is called all the same from now on: %s: %s",
                        type(event).__name__,
                        type(error).__name__,
                        scrub_for_log(str(error)),
                    )


class Observable:
    """What tells its events.

    Attributes:
        emitter: takes them to the subscribers.
    """

    def __init__(self) -> None:
        self.emitter = Emitter()

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Have ``callback`` called with what is done through this object; see :meth:`Emitter.subscribe`."""
        return self.emitter.subscribe(callback)
