"""The relay: async handlers on asyncio, started at once, with no more tasks than handlers that suspend.

A task is started whose first step is taken here and now. It runs the handlers one after another; the moment one
suspends, the task is that handler's own, and a new one takes over the rest. So the handlers start in their order, each
sees one `current_task()` from beginning to end that is not its caller's, and each starts from the same context: one
that leaves a context variable changed is the last of its task.

Each task is inside a cancel scope. The caller waits for all tasks, and hands a cancellation of its own on to their
scopes, where shields hold as they would in a task group.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from asyncio import AbstractEventLoop, Future, Task
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from time import perf_counter, perf_counter_ns
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from eventbus_engine.handlers import Handler, judge
from eventbus_engine.limits import Timed, check_step

if TYPE_CHECKING:
    from eventbus_engine.fanout import FanOut

__all__ = ["Relay", "find_relay"]

_Coroutine: TypeAlias = "Coroutine[Any, Any, None]"

enabled: bool = True
"""Off, everything runs in task groups. The tests hold the two against each other."""


def find_relay(fan: FanOut) -> Relay | None:
    """A relay for these handlers; None if it takes a task group, which goes everywhere and costs what it costs."""
    if not enabled:
        return None
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None  # trio
    parent = asyncio.current_task(loop)
    if parent is None or loop.get_task_factory() is not None or not _can_start(loop):
        return None
    # Inside a scope with a deadline, or one that is cancelled, the handlers have to see that of their own scopes.
    if anyio.current_effective_deadline() != math.inf:
        return None
    return Relay(fan, loop, parent)


class Relay:
    """Runs the async handlers of a fan-out, and the plain functions between them.

    Args:
        fan: the fan-out.
        loop: the running event loop.
        parent: the current task.
    """

    __slots__ = ("_began", "_fan", "_fatal", "_handed_on", "_loop", "_parent", "_pending", "_relayed", "_waiter")

    def __init__(self, fan: FanOut, loop: AbstractEventLoop, parent: Task[Any]) -> None:
        self._fan = fan
        self._loop = loop
        self._parent = parent
        self._pending: dict[Task[None], anyio.CancelScope] = {}
        self._fatal: BaseException | None = None
        self._handed_on = 0
        self._began = 0.0
        self._waiter: Future[None] | None = None
        self._relayed: dict[int, int] | None = None
        if (dispatch := fan.occasion.dispatch) is not None:
            dispatch.task_id = dispatch.task_id or id(parent)
            self._relayed = dispatch.lanes.relayed

    async def run(self) -> BaseException | None:
        """Run them; returns what ended it all before its time: a cancellation, say."""
        fan = self._fan
        try:
            while fan.unfinished:
                self._start()
            if self._pending:
                self._waiter = self._loop.create_future()
                await self._waiter
        except BaseException as error:
            self._fatal = error
        if self._pending:
            await self._cancel()
        return self._fatal

    def _start(self) -> None:
        """Start a task with the handler that comes next; it goes on with those after it while none suspends."""
        scope, occasion = _cancel_scope(), self._fan.occasion
        walk, context = self._walk(scope), self._fan.base.copy()
        task = _start_now(walk, self._loop, self._parent, context)
        if task.done():
            if self._relayed is not None:
                del self._relayed[id(task)]
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        else:
            self._handed_on += 1
            handler = self._fan.handlers[self._fan.at - 1]
            if occasion.now is not None and not handler.suspends:
                check_step(handler, occasion.event, perf_counter() - self._began)
            handler.suspends = True
            self._pending[task] = scope
            if occasion.now is not None:
                occasion.begin_task(task, occasion.now.name, perf_counter_ns())
                occasion.now = None
            task.add_done_callback(self._end)

    async def _walk(self, scope: anyio.CancelScope) -> None:
        """Run handlers until one has suspended, or has left something behind that the next one would see."""
        fan, occasion, turn = self._fan, self._fan.occasion, self._handed_on
        handlers, arguments, plain = fan.handlers, occasion.arguments, occasion.tracer is None
        task, at, end = asyncio.current_task(self._loop), fan.at, len(fan.handlers)
        assert task is not None  # noqa: S101 -- it runs in one
        if self._relayed is not None:
            self._relayed[id(task)] = id(self._parent)
        occasion.since = 0
        with scope:
            before = copy_context()
            while True:
                handler, awaited = handlers[at], fan.begun
                fan.at = at = at + 1
                if plain and awaited is None and handler.timeout is None:
                    occasion.now = handler
                    self._began = began = perf_counter()
                    try:
                        steps = handler.call(*arguments[handler.takes])
                        await (self._timed(handler, steps) if handler.suspends else steps)
                        if handler.heeded:
                            handler.owner.succeeded()
                    except BaseException as error:
                        self._judge(at - 1, handler, error)
                    if turn != self._handed_on:
                        return
                    if handler.suspends:
                        handler.suspends = False
                    elif (took := perf_counter() - began) > handler.blocks_after:
                        check_step(handler, occasion.event, took)
                else:
                    fan.begun = None
                    await fan.run_one(at - 1, awaited, _nothing)
                    if turn != self._handed_on:
                        return
                occasion.now = None
                if at == end or not handlers[at].is_async or task.cancelling() or copy_context() != before:
                    return

    def _timed(self, handler: Handler, steps: Any) -> Any:
        """A handler that suspends may hold up the loop whenever it goes on."""
        if type(steps) is not CoroutineType or handler.blocks_after == math.inf:
            return steps
        return Timed(steps, handler, self._fan.occasion.event)

    def _judge(self, at: int, handler: Handler, raised: BaseException) -> None:
        """Note what a handler has failed with; what is no failure of its own goes on from here."""
        error, outward = judge(handler, self._fan.occasion.event, raised)
        if isinstance(error, Exception):
            self._fan.fail(at, error)
        if outward is not None:
            raise outward

    def _end(self, task: Task[None]) -> None:
        """Note that a task is done, and wake who waits for the last one."""
        self._pending.pop(task, None)
        self._fan.occasion.end_task(task)
        if self._relayed is not None:
            self._relayed.pop(id(task), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # No Exception: those are kept. It ends the others as well.
            self._fatal = self._fatal or error
            self._wake()
        if not self._pending:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _cancel(self) -> None:
        """Cancel what still runs, and wait for it, however often that is interrupted."""
        for scope in self._pending.values():
            scope.cancel()
        with anyio.CancelScope(shield=True):
            while self._pending:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                except asyncio.CancelledError as error:
                    self._fatal = self._fatal or error


def _cancel_scope() -> anyio.CancelScope:
    """A new scope, by way of the class that the event loop's own are of, which is half the price."""
    return _scope_class()()


@functools.cache
def _scope_class() -> type[anyio.CancelScope]:
    return type(anyio.CancelScope())


def _nothing() -> None:
    pass


if sys.version_info >= (3, 12):  # pragma: no cover -- coverage is measured on 3.11, whose branch is the longer one

    def _can_start(loop: AbstractEventLoop) -> bool:
        return True

    def _start_now(steps: _Coroutine, loop: AbstractEventLoop, parent: Task[Any], context: Context) -> Task[None]:
        """A task whose first step is done."""
        return Task(steps, loop=loop, context=context, eager_start=True)

else:

    class _Captured:
        """Takes down what a task asks its loop for as it is made: to run its first step, in that context."""

        __slots__ = ("arguments", "callback", "context", "otherwise")

        def __init__(self, context: Context, otherwise: Callable[..., Any]) -> None:
            self.context = context
            self.otherwise = otherwise

        def __call__(self, callback: Callable[..., Any], *arguments: Any, context: Context | None = None) -> Any:
            if context is not self.context:  # somebody's finalizer, run by a garbage collection just now
                return self.otherwise(callback, *arguments, context=context)
            self.callback = callback
            self.arguments = arguments
            return None

    def _can_start(loop: AbstractEventLoop) -> bool:
        # Not if somebody else has put something in its place.
        return "call_soon" not in getattr(loop, "__dict__", {"call_soon": None})

    def _start_now(steps: _Coroutine, loop: AbstractEventLoop, parent: Task[Any], context: Context) -> Task[None]:
        """A task whose first step is done: what Python does from 3.12 on."""
        captured = _Captured(context, loop.call_soon)
        loop.call_soon = captured  # type: ignore[method-assign, assignment]
        try:
            task = Task(steps, loop=loop, context=context)
        finally:
            del loop.call_soon
        # How to make one task current in place of another is documented under "Extending asyncio".
        asyncio.tasks._leave_task(loop, parent)
        try:
            context.run(captured.callback, *captured.arguments)
        except BaseException:
            # A KeyboardInterrupt, say, goes two ways: it is the task's own as well, which nobody will ask for it.
            _ = task.done() and not task.cancelled() and task.exception()
            raise
        finally:
            asyncio.tasks._enter_task(loop, parent)
        return task
