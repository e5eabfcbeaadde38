"""Limits on what a handler takes: the seconds until it is cancelled, and those that it may hold up the event loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import coroutine
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine.errors import HandlerTimeoutError

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.handlers import Handler

__all__ = ["check_step", "step_checker", "time_limit", "timed"]


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


@coroutine
def timed(steps: Any, handler: Handler, event: EventName) -> Generator[Any, Any, Any]:
    """Await the coroutine of a handler, and tell its owner if a step of it holds up the event loop too long."""
    send = step = steps.send
    value: Any = None
    before = perf_counter()
    try:
        while True:
            yielded = step(value)
            if (seconds := perf_counter() - before) > handler.blocks_after:
                handler.owner.blocked(seconds, event)
            try:
                step, value = send, (yield yielded)
            except BaseException as error:
                step, value = steps.throw, error
            before = perf_counter()
    except StopIteration as stop:
        return stop.value
    finally:
        value = None  # an exception that is raised from here holds this frame
        if (seconds := perf_counter() - before) > handler.blocks_after:
            handler.owner.blocked(seconds, event)


def step_checker(handler: Handler, event: EventName) -> Callable[[float], None] | None:
    """What to tell how long each step of an async handler has taken, None where nobody wants to know."""
    return None if handler.blocks_after == math.inf else partial(check_step, handler, event)
