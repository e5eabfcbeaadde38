"""`engine.sync`: the engine for a program without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.lowlevel import current_token

from eventbus_engine._steps import NEED_LOOP, Resumed, without_loop
from eventbus_engine.errors import SyncUsageError

if TYPE_CHECKING:
    from eventbus_engine.closing import CloseReport
    from eventbus_engine.engine import Engine
    from eventbus_engine.event import EventName
    from eventbus_engine.pair import Pair
    from eventbus_engine.trace import Traces

__all__ = ["SyncEngine"]

T = TypeVar("T")
_MISSING = object()


class SyncEngine:
    """The blocking face of an engine.

    An event whose participants are all plain functions runs right here, on the calling thread, without any event
    loop. As soon as something asynchronous takes part, the rest of the event runs as a task on a private asyncio loop
    driven on the calling thread, so that what belongs to the thread (torch's autocast and no_grad) holds. Where a
    loop is running on this thread already, as in Jupyter, that rest runs on another thread while this one waits.

    Calls from several threads take turns.
    """

    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine
        self._turn = threading.Lock()
        self._runner: asyncio.Runner | None = None

    def run_event(self, event: EventName | str, state: Any = None) -> Traces:
        """Like `Engine.run_event`, blocking.

        Raises:
            SyncUsageError: called from one of the engine's own handlers; await `engine.run_event` there.
        """
        return self._run(lambda: self._engine.run_event(event, state))

    @contextlib.contextmanager
    def pair(self, event: EventName | str, state: Any = None) -> Iterator[Pair]:
        """Like `Engine.pair`, as a plain context manager."""
        pair = self._engine.pair(event, state)
        self._run(pair.__aenter__)
        try:
            yield pair
        except BaseException as error:
            raised = error
            self._run(lambda: pair.__aexit__(type(raised), raised, raised.__traceback__))
            raise
        self._run(lambda: pair.__aexit__(None, None, None))

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Like `Engine.close`, blocking; also closes the private event loop."""
        report = self._run(lambda: self._engine.close(timeout))
        with self._turn:
            if self._runner is not None:
                runner, self._runner = self._runner, None
                _outside_any_loop(runner.close)
        return report

    def _run(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._engine._inside():
            raise SyncUsageError(
                "engine.sync was called from one of the engine's own handlers, which would wait for itself; make the "
                "handler async and await engine.run_event(...) there"
            )
        with self._turn:
            context = copy_context()
            try:
                return self._step(start(), context)
            finally:
                _take_over(context)

    def _step(self, coroutine: Coroutine[Any, Any, T], context: Context) -> T:
        """Step the coroutine here; if it turns out to need an event loop, give it one from there on."""
        context.run(without_loop.set, True)
        try:
            context.run(coroutine.send, None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            context.run(without_loop.set, False)

        async def rest() -> T:
            value: T = await Resumed(coroutine)
            return value

        if self._runner is None:
            # A factory, because without one the runner would install its loop as this thread's current one.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        runner = self._runner
        return _outside_any_loop(lambda: runner.run(rest(), context=context))


def _outside_any_loop(function: Callable[[], T]) -> T:
    """Call a function that drives an event loop: here, or on another thread if one is running on this."""
    try:
        current_token()
    except anyio.NoEventLoopError:
        return function()
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.extend((function(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=call, name="eventbus-engine-sync")
    thread.start()
    thread.join()
    result, error = outcome
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _take_over(context: Context) -> None:
    """Set here what was set in there: plain functions run in the caller's context, as far as anybody can tell."""
    for variable, value in context.items():
        if variable is not without_loop and variable.get(_MISSING) is not value:
            variable.set(value)
