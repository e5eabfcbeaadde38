"""Coroutines taken step by step: one that starts without an event loop, and one that says when it first suspends."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from time import perf_counter
from typing import Any, Final, TypeVar

import anyio

__all__ = ["NOWHERE", "FirstStep", "current_task_id", "leave_loop", "need_loop", "steps_of", "without_loop"]

T = TypeVar("T")

NOWHERE: Final = object()


class _WithoutLoop(threading.local):
    """Whether what runs on this thread is being stepped by hand, with no event loop to suspend to.

    Attributes:
        around: the loop that was running when the stepping began, as in a notebook; None for none; NOWHERE while
            nothing is being stepped. A loop that is another has been started since, by a plain handler for instance.
        driven: whether this is a thread for computations, on which a coroutine is driven as far as it gets: what does
            not belong there, or has to wait, goes on under the loop that it has come from.
    """

    around: object = NOWHERE
    driven: bool = False

    def get(self) -> bool:
        """Whether it is."""
        around = self.around
        return around is not NOWHERE and asyncio._get_running_loop() is around


without_loop = _WithoutLoop()


async def need_loop() -> None:
    """Make sure there is an event loop from here on. Under one, as nearly always, it does nothing.

    A coroutine that is being stepped without a loop suspends here, once, before it does what takes one; whoever steps
    it awaits the rest under a loop.
    """
    if without_loop.get():
        await _Suspension()


def current_task_id() -> int:
    """The id by which anyio knows the current task, at a seventh of its price where that is asyncio's."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return anyio.get_current_task().id if task is None else id(task)


class _Suspension:
    def __await__(self) -> Generator[None, None, None]:
        yield


def leave_loop() -> None:
    """Forget, in the current context, which event loop the caller runs on, if any: it goes on elsewhere."""
    # What anyio and trio go by, where it is there. A context taken from a trio task would be taken for trio's anywhere.
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None and sniffio.current_async_library_cvar.get() is not None:
        sniffio.current_async_library_cvar.set(None)


def steps_of(awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
    """The steps of an awaitable, for as many as wanted to be taken by hand: `send(None)`."""
    return (yield from awaitable.__await__())


class FirstStep(Generator[Any, Any, Any]):
    """Await something, and say so when it first suspends (never, if it does not).

    Args:
        awaitable: what to await.
        then: called when it first suspends.
        took: called after every step with the seconds it has taken, None if nobody asks.
    """

    __slots__ = ("_steps", "_then", "_took")

    def __init__(
        self, awaitable: Awaitable[Any], then: Callable[[], None], took: Callable[[float], None] | None = None
    ) -> None:
        self._steps = steps_of(awaitable)
        self._took = took
        self._then: Callable[[], None] | None = then

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def send(self, value: Any) -> Any:
        """Take a step."""
        if self._took is None:
            yielded = self._steps.send(value)
        else:
            before = perf_counter()
            try:
                yielded = self._steps.send(value)
            finally:
                self._took(perf_counter() - before)
        then, self._then = self._then, None
        if then is not None:
            then()
        return yielded

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise an exception where the awaitable is suspended."""
        return self._steps.throw(kind if value is None else value)
