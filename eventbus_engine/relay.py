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
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, copy_context
from time import perf_counter, perf_counter_ns
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from eventbus_engine.handlers import HOOK, Handler, judge, open_span, outcome_of
from eventbus_engine.limits import check_step, timed

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.fanout import FanOut
    from eventbus_engine.telemetry.spans import Activity

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

    __slots__ = (
        "_ended",
        "_fan",
        "_fatal",
        "_front",
        "_handed_on",
        "_loop",
        "_parent",
        "_pending",
        "_waiter",
    )

    _front: Task[Any]

    def __init__(self, fan: FanOut, loop: AbstractEventLoop, parent: Task[Any]) -> None:
        self._fan = fan
        self._loop = loop
        self._parent = parent
        self._pending: dict[Task[None], anyio.CancelScope] = {}
        self._fatal: BaseException | None = None
        self._ended: BaseException | None = None
        self._handed_on = 0
        self._waiter: Future[None] | None = None

    def family(self) -> Iterator[tuple[int, int]]:
        """The ids of the tasks that it has started and that may still run, each with that of the task it waits in."""
        for task in (*self._pending, self._front):
            yield id(task), id(self._parent)

    def start(self) -> bool:
        """Run them as far as that goes at once; whether `finish` is to be awaited."""
        fan, dispatch = self._fan, self._fan.occasion.dispatch
        if dispatch is not None:
            dispatch.task_id = dispatch.task_id or id(self._parent)
            dispatch.lanes.relays.add(self)
        try:
            self._start_task()
            while fan.unfinished:
                self._start_task()
        except BaseException as error:
            self._fatal = error
        if self._pending or self._fatal is not None:
            return True
        if dispatch is not None:
            dispatch.lanes.relays.discard(self)
        return False

    async def finish(self) -> BaseException | None:
        """Wait for those that have suspended; returns what ended it all before its time: a cancellation, say."""
        dispatch = self._fan.occasion.dispatch
        try:
            if self._pending and self._fatal is None:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                except BaseException as error:
                    self._fatal = error
            if self._pending:
                await self._cancel()
        finally:
            if dispatch is not None:
                dispatch.lanes.relays.discard(self)
        return self._fatal

    def _start_task(self) -> None:
        """Start a task with the handler that comes next; it goes on with those after it while none suspends."""
        scope, fan, occasion = _scope_class()(), self._fan, self._fan.occasion
        first, began = fan.at, perf_counter()
        task = _start_now(self._run_task(scope), self._loop, self._parent, fan.base.copy())
        took, pending = perf_counter() - began, not task.done()
        if pending:
            self._handed_on += 1
            self._pending[task] = scope
            if occasion.now is not None:
                occasion.begin_task(task, occasion.now.name, perf_counter_ns(), occasion.span)
                occasion.now = None
            fan.handlers[fan.at - 1].suspends = True
        if took > fan.patience:
            self._look_back(first, took)
        if not pending and self._ended is not None and not isinstance(self._ended, asyncio.CancelledError):
            _ = task.exception()  # or asyncio would complain that nobody has asked for it
            raise self._ended

    async def _run_task(self, scope: anyio.CancelScope) -> None:  # noqa: PLR0912 -- a call less for each handler
        """What a task does: run handlers until one has suspended, or has left behind what the next one would see."""
        fan, occasion, turn = self._fan, self._fan.occasion, self._handed_on
        handlers, state, logger, plain = fan.handlers, occasion.state, occasion.logger, occasion.tracer is None
        at, end, before = fan.at, len(handlers), fan.base
        awaited, fan.begun = fan.begun, None  # only of the first may anything have been awaited so far
        occasion.since = 0
        fatal: BaseException | None = None
        task = asyncio.current_task(self._loop)
        assert task is not None  # noqa: S101 -- it runs in one
        self._front = task
        try:
            with scope:
                while True:
                    handler = handlers[at]
                    fan.at = at = at + 1
                    if awaited is None and handler.timeout is None:
                        occasion.span = span = None if plain else open_span(handler, occasion)
                        occasion.now, call, takes = handler, handler.call, handler.takes
                        try:
                            steps = call(state, logger) if takes == HOOK else call(*occasion.arguments(takes))
                            await (_watched(steps, handler, occasion.event) if handler.suspends else steps)
                            if handler.heeded:
                                handler.owner.succeeded()
                            if span is not None:
                                span.end("ok")
                        except BaseException as error:
                            self._judge(at - 1, handler, error, span)
                    else:
                        occasion.now = None
                        await fan.run_one(at - 1, awaited, _nothing)
                        awaited = None
                    if turn != self._handed_on:
                        return
                    handler.suspends = handler.suspect
                    try:
                        if at == end or not handlers[at].is_async or task.cancelling() or copy_context() != before:
                            break
                    except Exception:  # an array in place of another, say, which cannot be compared
                        break
                occasion.now = None
        except BaseException as error:
            fatal = error
            raise
        finally:
            if turn == self._handed_on:
                self._ended = fatal
            else:
                self._end(task, fatal)

    def _look_back(self, first: int, took: float) -> None:
        """See which of those that a task has run in one step has held up the event loop.

        That shows as soon as each is timed by itself; until then, it would cost more than calling them.
        """
        fan = self._fan
        handlers = fan.handlers[first : fan.at]
        if len(handlers) == 1:
            check_step(handlers[0], fan.occasion.event, took)
        elif any(took > handler.blocks_after for handler in handlers):
            for handler in handlers:
                handler.suspect = handler.suspends = True

    def _judge(self, at: int, handler: Handler, raised: BaseException, span: Activity | None) -> None:
        """Note what a handler has failed with; what is no failure of its own goes on from here."""
        error, outward = judge(handler, self._fan.occasion.event, raised)
        if isinstance(error, Exception):
            self._fan.fail(at, error)
        if span is not None:
            span.end(outcome_of(error), error)
        if outward is not None:
            raise outward

    def _end(self, task: Task[None], fatal: BaseException | None) -> None:
        """Note that a task is about to be done, and wake who waits for the last one.

        The task says so itself: a callback of its own would come a turn of the event loop later.
        """
        del self._pending[task]
        self._fan.occasion.end_task(task)
        if fatal is not None and not isinstance(fatal, asyncio.CancelledError):
            # No Exception: those are kept. It ends the others as well.
            self._fatal = self._fatal or fatal
            task.add_done_callback(Task.exception)  # or asyncio would complain that nobody has asked for it
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


@functools.cache
def _scope_class() -> type[anyio.CancelScope]:
    """The class that the event loop's own cancel scopes are of: to ask for it each time would be twice as dear."""
    return type(anyio.CancelScope())


def _watched(steps: Any, handler: Handler, event: EventName) -> Any:
    """A coroutine that suspends may hold up the loop whenever it goes on."""
    return timed(steps, handler, event) if type(steps) is CoroutineType else steps


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

        context: Context
        otherwise: Callable[..., Any]
        callback: Callable[..., Any]
        arguments: tuple[Any, ...]

        def take(self, callback: Callable[..., Any], *arguments: Any, context: Context | None = None) -> Any:
            if context is not self.context:  # somebody's finalizer, run by a garbage collection just now
                return self.otherwise(callback, *arguments, context=context)
            self.callback, self.arguments = callback, arguments
            return None

    _CLOSED = {"call_soon": None}  # a loop that nothing can be put into

    def _can_start(loop: AbstractEventLoop) -> bool:
        # Not if somebody else has put something in its place.
        return "call_soon" not in getattr(loop, "__dict__", _CLOSED)

    def _start_now(steps: _Coroutine, loop: AbstractEventLoop, parent: Task[Any], context: Context) -> Task[None]:
        """A task whose first step is done: what Python does from 3.12 on."""
        captured = _Captured()
        captured.context, captured.otherwise = context, loop.call_soon
        loop.call_soon = captured.take  # type: ignore[method-assign, assignment]
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
