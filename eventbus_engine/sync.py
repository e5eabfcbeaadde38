"""`engine.sync`: the engine for a program without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from eventbus_engine._loop import PrivateLoop, new_private_loop
from eventbus_engine._steps import leave_loop, without_loop
from eventbus_engine.closing import closing_engine
from eventbus_engine.envelope import current
from eventbus_engine.errors import SyncUsageError

if TYPE_CHECKING:
    from eventbus_engine.closing import CloseReport
    from eventbus_engine.engine import Engine
    from eventbus_engine.event import EventName
    from eventbus_engine.pair import Pair
    from eventbus_engine.trace import Traces

__all__ = ["LoopThread", "SyncEngine"]

log: logging.Logger = logging.getLogger("eventbus_engine")

T = TypeVar("T")

TURNS = 4
"""Turns of the private loop that are made before a runner takes over, which has Ctrl-C cancel what waits there.

An async handler that suspends once takes three. Until then Ctrl-C is raised
where it hits, as in any plain program: to redirect it and back takes as long as all of these turns together.
"""

GRACE = 0.5
"""Seconds that what has been told to end gets for it, however little of the deadline is left."""


class SyncEngine:
    """The blocking face of an engine.

    An event whose participants are all plain functions runs right here, on the calling thread, without any event
    loop. As soon as something asynchronous takes part, the rest of the event runs as a task on a private asyncio loop
    driven on the calling thread, so that what belongs to the thread (torch's autocast and no_grad) holds. Where a
    loop is running on this thread already, as in Jupyter, that rest runs on a loop thread while this one waits.
    The workers of background callbacks live on that loop thread too, from their first event until `close`.

    Calls from several threads take turns.
    """

    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine
        self._turn = threading.Lock()
        self._runner: asyncio.Runner | None = None
        self._loop: asyncio.AbstractEventLoop
        self._thread: LoopThread | None = None
        engine._delivery.start_thread = self._loop_thread

    def run_event(self, event: EventName | str, state: Any = None, *, key: Hashable = None) -> Traces:
        """Like `Engine.run_event`, blocking.

        Raises:
            SyncUsageError: called from one of the engine's own handlers; await `engine.run_event` there.
        """
        return self._run(self._engine.run_event(event, state, key=key))

    @contextlib.contextmanager
    def pair(self, event: EventName | str, state: Any = None, *, key: Hashable = None) -> Iterator[Pair]:
        """Like `Engine.pair`, as a plain context manager."""
        pair = self._engine.pair(event, state, key=key)
        self._run(pair.__aenter__())
        try:
            yield pair
        except BaseException as error:
            raised = error
            self._run(pair.__aexit__(type(raised), raised, raised.__traceback__))
            raise
        self._run(pair.__aexit__(None, None, None))

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Like `Engine.close`, blocking; also ends the private event loop and the loop thread."""
        deadline = time.monotonic() + timeout
        report = self._run(self._engine.close(timeout))
        with self._turn:
            if self._runner is not None:
                # On a thread without a loop, whatever runs on this one.
                closing = threading.Thread(target=self._runner.close, name="eventbus-engine-close")
                closing.start()
                closing.join()
                self._runner = None
            if self._thread is not None:
                self._thread.stop(max(deadline - time.monotonic(), GRACE))
                self._thread = None
        return report

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if (current.get() is not None or closing_engine.get() is not None) and self._engine._inside():
            coroutine.close()
            raise SyncUsageError(
                "engine.sync was called from one of the engine's own handlers, which would wait for itself; make the "
                "handler async and await engine.run_event(...) there"
            )
        result: list[T] = []
        whole = _put_result(coroutine, result)
        # By hand: a `with` takes three times as long.
        self._turn.acquire()
        outside = without_loop.around
        try:
            without_loop.around = asyncio._get_running_loop()
            # Plain functions run right here, in the caller's context. `for`, because `send` would raise the result.
            for _ in whole.__await__():
                self._finish(whole)
                break
        finally:
            without_loop.around = outside
            self._turn.release()
        return result[0]

    def _finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Give a coroutine that turned out to need an event loop one from there on, in the caller's context as well."""
        context = copy_context()
        context.run(leave_loop)
        before = context.copy()
        try:
            if _loop_is_running():
                self._loop_thread().run(coroutine, context)
            else:
                self._drive(coroutine, context)
        except BaseException:
            # Interrupted before the loop had it, it would be left half-way.
            context.run(coroutine.close)
            raise
        finally:
            for variable, value in context.items():
                if before.get(variable, self) is not value:
                    variable.set(value)

    def _drive(self, coroutine: Coroutine[Any, Any, None], context: Context) -> None:
        """Run it as a task on the private loop."""
        if self._runner is None:
            # A factory, because without one the runner would install its loop as this thread's current one.
            self._runner = asyncio.Runner(loop_factory=new_private_loop)
            self._loop = self._runner.get_loop()
        loop = self._loop
        # What an earlier event has left there comes first.
        private = loop if isinstance(loop, PrivateLoop) and loop.idle else None
        task = loop.create_task(coroutine, context=context) if private is None else private.prepare(coroutine, context)
        try:
            if private is not None:
                private.step(context)
            turns = TURNS
            while turns and not task.done():
                turns -= 1
                loop.stop()  # after one turn
                loop.run_forever()
        except BaseException:
            task.cancel()
            if private is not None:
                private.put_back(context)
            with contextlib.suppress(BaseException):
                self._runner.run(_result_of(task))
            raise
        return task.result() if task.done() else self._runner.run(_result_of(task))

    def _loop_thread(self) -> LoopThread:
        if self._thread is None:
            self._thread = LoopThread()
        return self._thread


class LoopThread:
    """An asyncio event loop that runs on a thread of its own until it is stopped.

    A daemon: a program that forgets to close the engine still ends.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._ready = threading.Event()
        # A loop keeps no more than weak references to its tasks.
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._main, name="eventbus-engine-loop", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _main(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._ready.set()
        await self._stopping.wait()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plain function on the thread, and wait for what it returns."""
        if threading.get_ident() == self._thread.ident:
            return function(*arguments)

        # Set by the call itself: what it has set going may block the loop before anything else runs there.
        returned: Future[T] = Future()

        async def call() -> None:
            try:
                returned.set_result(function(*arguments))
            except BaseException as error:
                returned.set_exception(error)

        # In no context of the caller's: a worker started from here belongs to no event.
        _ = Context().run(asyncio.run_coroutine_threadsafe, call(), self._loop)
        return returned.result()

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task on the loop, and leave it."""
        self._tasks.append(self.call(lambda: self._loop.create_task(function())))

    def run(self, coroutine: Coroutine[Any, Any, T], context: Context) -> T:
        """Run a task on the loop, in that very context, and wait for it. An interrupt cancels it first."""
        done = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine, context=context))
            tasks[0].add_done_callback(lambda _: done.set())

        def cancel() -> None:
            # Called after `start`, if that has been called at all: an interrupt may come at any time.
            if tasks:
                tasks[0].cancel()
            else:
                context.run(coroutine.close)
                done.set()

        try:
            self._loop.call_soon_threadsafe(start)
            done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            done.wait()
            raise
        return tasks[0].result()

    async def visit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on the thread, plain or async, and wait for it without holding up the caller's loop."""

        async def call() -> Any:
            result = function(*arguments)
            return await result if isinstance(result, Awaitable) else result

        if threading.get_ident() == self._thread.ident:
            return await call()
        context = copy_context()
        context.run(leave_loop)
        future = context.run(asyncio.run_coroutine_threadsafe, call(), self._loop)
        try:
            return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True)
        except BaseException:
            future.cancel()
            raise

    def stop(self, timeout: float) -> None:
        """End the loop and the thread; what still runs there is cancelled, and after so many seconds abandoned."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.error("a background callback holds up its thread, which is left behind")


async def _put_result(coroutine: Coroutine[Any, Any, T], result: list[T]) -> None:
    result.append(await coroutine)


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


def _loop_is_running() -> bool:
    """Whether an event loop, of whichever library, is running on this thread."""
    if asyncio._get_running_loop() is not None:
        return True
    # Not by way of anyio, for which it is an error if there is none.
    in_trio_run = getattr(sys.modules.get("trio.lowlevel"), "in_trio_run", None)
    return in_trio_run is not None and in_trio_run()
