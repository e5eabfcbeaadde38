"""Limits on what a handler takes: the seconds until it is cancelled, and those that it may hold up the event loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine.errors import HandlerTimeoutError

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.handlers import Handler

__all__ = ["Timed", "check_step", "step_checker", "time_limit"]


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Cancel what runs inside after so many seconds. Past them it has failed, whatever it makes of its cancellation.

    Raises:
        HandlerTimeoutError: with what it raised instead, if anything, as the cause.
    """
    with anyio.move_on_after(seconds) as scope:
        try:
            yield
        except Exception as error:
            if scope.cancel_called:
                raise HandlerTimeoutError(f"{what} within {seconds:g} s") from error
            raise
    if scope.cancel_called:
        raise HandlerTimeoutError(f"{what} within {seconds:g} s")


def check_step(handler: Handler, event: EventName, seconds: float) -> None:
    """Tell a handler's owner if it has held up the event loop for longer than it may."""
    if seconds > handler.blocks_after:
        handler.owner.blocked(seconds, event)


class Timed(Generator[Any, Any, Any]):
    """Awaits what an async handler has to do, and tells its owner if a step of it holds up the event loop too long."""

    __slots__ = ("_coroutine", "_event", "_handler")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], handler: Handler, event: EventName) -> None:
        self._coroutine = coroutine
        self._handler = handler
        self._event = event

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def send(self, value: Any) -> Any:
        """Take a step."""
        before = perf_counter()
        try:
            return self._coroutine.send(value)
        finally:
            if (seconds := perf_counter() - before) > self._handler.blocks_after:
                self._handler.owner.blocked(seconds, self._event)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise an exception where it is suspended."""
        return self._coroutine.throw(kind if value is None else value)


def step_checker(handler: Handler, event: EventName) -> Callable[[float], None] | None:
    """What to tell how long each step of an async handler has taken, None where nobody wants to know."""
    return None if handler.blocks_after == math.inf else partial(check_step, handler, event)
