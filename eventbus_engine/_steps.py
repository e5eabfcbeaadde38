"""Coroutines taken step by step: carry on one that is under way, and let one that needs an event loop say so."""

from __future__ import annotations

from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

__all__ = ["NEED_LOOP", "Resumed", "need_loop", "resume", "without_loop"]

NEED_LOOP = object()
"""What a coroutine that is being stepped without an event loop yields, before it does what takes one."""

without_loop: ContextVar[bool] = ContextVar("eventbus_engine_without_loop", default=False)


class _Request:
    def __await__(self) -> Generator[object, None, None]:
        yield NEED_LOOP


async def need_loop() -> None:
    """Make sure there is an event loop from here on. Under one, as nearly always, it does nothing."""
    if without_loop.get():
        without_loop.set(False)
        await _Request()


class Resumed:
    """Awaits the rest of a coroutine that has been stepped so far by hand."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            yielded = self._coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        return (yield from resume(self._coroutine, yielded))


def resume(steps: Any, yielded: Any) -> Generator[Any, Any, Any]:
    """What `yield from steps` does (PEP 380), for an iterator that has already yielded `yielded`."""
    while True:
        try:
            sent = yield yielded
        except GeneratorExit:
            _close(steps)
            raise
        except BaseException as error:
            if not hasattr(steps, "throw"):
                raise
            try:
                yielded = steps.throw(error)
            except StopIteration as stop:
                return stop.value
        else:
            try:
                yielded = next(steps) if sent is None and not hasattr(steps, "send") else steps.send(sent)
            except StopIteration as stop:
                return stop.value


def _close(steps: Any) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()
