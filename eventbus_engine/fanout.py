"""Run the handlers of one event, started in their order: plain functions here and now, async ones in tasks.

Where the event loop allows it a relay runs the async ones, with no more tasks than handlers that suspend (`relay.py`).
Elsewhere an anyio task group does, with a task for each of them. Both do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from eventbus_engine._steps import FirstStep, need_loop, without_loop
from eventbus_engine.handlers import Handler, Occasion, judge, open_span, outcome_of
from eventbus_engine.limits import check_step, step_checker, time_limit
from eventbus_engine.relay import Relay, find_relay
from eventbus_engine.telemetry.spans import Activity

if TYPE_CHECKING:
    from eventbus_engine.participants import Course

__all__ = ["FanOut", "begin_course", "run_fanout"]

log: logging.Logger = logging.getLogger("eventbus_engine")

Rest: TypeAlias = Callable[[], Awaitable[None]]
"""What runs beside the handlers in the caller's own task and context, from when the last of them has started."""

Begun: TypeAlias = "tuple[Awaitable[Any], Activity | None]"
"""What a plain function returned that has to be awaited, and its span."""


async def run_fanout(
    handlers: Sequence[Handler], occasion: Occasion, rest: Rest | None = None
) -> list[tuple[Handler, Exception]]:
    """Run handlers, all of them whatever the others do, and return what failed, in the order given.

    Plain functions run in the caller's task and context, at their place in the order; every async one starts from a
    copy of the context at fan-out, and is in a task of its own from when it first suspends. Cancellation reaches all of
    them, and is waited for.
    """
    return await FanOut(handlers, occasion, rest).finish() if handlers or rest is not None else []


def begin_course(course: Course, handlers: Sequence[Handler], occasion: Occasion) -> FanOut | None:
    """Call the plain hooks that come first; None if that was all there is, and none of them failed.

    What is different from one hook to the next has been worked out with the course: this loop runs on every event.

    Args:
        course: of the event.
        handlers: its inline callbacks, and what comes behind them.
        occasion: the event.
    """
    if occasion.tracer is not None or not course.first:
        return FanOut(handlers, occasion, patience=course.patience)
    state, logger, closely, fan = occasion.state, occasion.logger, course.closely, None
    occasion.since = 0
    start = before = perf_counter()
    for hook, call in course.first:
        occasion.now = hook
        try:
            result = call(state, logger)
        except Exception as error:
            fan, result = FanOut(handlers, occasion, at=handlers.index(hook), patience=course.patience), error
        if closely:
            # One look at the clock for each: the end of one is the beginning of the next.
            began, before = before, perf_counter()
            check_step(hook, occasion.event, before - began)
        if result is not None:
            if fan is not None:
                fan.fail(fan.at, result)
                fan.at += 1
                break
            if isinstance(result, Awaitable):
                fan = FanOut(handlers, occasion, at=handlers.index(hook), patience=course.patience)
                fan.begun = result, None
                break
    occasion.now = None
    took = perf_counter() - start
    if closely or took > course.patience:
        course.took(took)
    if fan is None and len(handlers) > len(course.first):
        fan = FanOut(handlers, occasion, at=len(course.first), patience=course.patience)
    return fan


class FanOut:
    """The handlers of one event, and how far they are.

    Attributes:
        handlers: in their order.
        occasion: the event.
        rest: what runs beside them, if anything.
        at: the next one to start.
        begun: what the plain function at `at` has returned, if that has to be awaited.
        base: the context that every async one starts from.
        patience: seconds past which one of them may have held up the event loop.
        runner: what runs the async ones, while there is something to wait for.
    """

    __slots__ = ("at", "base", "begun", "errors", "handlers", "occasion", "patience", "rest", "runner")

    base: Context

    def __init__(
        self,
        handlers: Sequence[Handler],
        occasion: Occasion,
        rest: Rest | None = None,
        at: int = 0,
        patience: float = 0.0,
    ) -> None:
        self.handlers: Sequence[Handler] = handlers
        self.occasion: Occasion = occasion
        self.rest: Rest | None = rest
        self.at: int = at
        self.patience: float = patience
        self.begun: Begun | None = None
        self.errors: dict[int, Exception] | None = None
        self.runner: Relay | _Group | None = None

    def call_plain(self) -> bool:
        """Call the plain functions that come next, up to what has to be awaited; whether there is such a one."""
        handlers, occasion = self.handlers, self.occasion
        arguments, traced = occasion.arguments, occasion.tracer is not None
        occasion.since = 0
        after = perf_counter()
        for handler in handlers[self.at :]:
            if handler.is_async:
                break
            occasion.now, before = handler, after
            try:
                if traced:
                    self.begun = self._call_traced(handler, arguments(handler.takes))
                else:
                    result = handler.call(*arguments(handler.takes))
                    if result is not None and isinstance(result, Awaitable):
                        self.begun = result, None
            except Exception as error:
                self.fail(self.at, error)
            else:
                if self.begun is None and handler.heeded:
                    handler.owner.succeeded()
            after = perf_counter()
            if after - before > handler.blocks_after:
                check_step(handler, occasion.event, after - before)
            if self.begun is not None:
                break
            self.at += 1
        occasion.now = None
        return self.at < len(handlers)

    def _call_traced(self, handler: Handler, arguments: tuple[Any, ...]) -> Begun | None:
        self.occasion.span = span = open_span(handler, self.occasion)
        assert span is not None  # noqa: S101 -- there is a tracer
        try:
            result = handler.call(*arguments)
        except BaseException as error:
            span.end(outcome_of(error), error)
            raise
        if result is not None and isinstance(result, Awaitable):
            span.leave()
            return result, span
        span.end("ok")
        return None

    @property
    def unfinished(self) -> bool:
        """Whether something has to be awaited, once the plain functions that come next have been called."""
        handlers, at = self.handlers, self.at
        return self.begun is not None or (at < len(handlers) and (handlers[at].is_async or self.call_plain()))

    def start(self) -> bool:
        """Run what is left as far as that goes at once; whether `finish` has something to wait for."""
        if not self.unfinished:
            return self.rest is not None
        if without_loop.get():
            return True
        self.base = self.occasion.context or copy_context()
        relay = find_relay(self) if self.rest is None else None
        runner = _Group(self) if relay is None else relay
        if runner.start():
            self.runner = runner
            return True
        return False

    async def finish(self) -> list[tuple[Handler, Exception]]:
        """Run what is left, started or not, and return what failed, in the order of the handlers."""
        if self.runner is not None or self.start():
            await self._wait()
        return self.failures()

    async def _wait(self) -> None:
        """Wait for what does not end at once."""
        if self.runner is None and self.unfinished:
            await need_loop()
            if not self.start():
                return
        if self.runner is None:
            assert self.rest is not None  # noqa: S101 -- or there was nothing to wait for
            await self.rest()
            return
        runner, self.runner = self.runner, None  # which holds this, and would be garbage only the collector finds
        fatal = await runner.finish()
        if fatal is not None:
            # What handlers raise is kept, not raised. Where the event ends otherwise, nobody else would tell of it.
            for handler, failure in self.failures():
                name, event = handler.name, self.occasion.event.name
                log.error("callback %s failed on %s, which was cancelled", name, event, exc_info=failure)
            raise _fatal(fatal)

    async def run_one(self, at: int, begun: Begun | None, started: Callable[[], None]) -> None:
        """Run an async handler, in a task that is its own from when it first suspends.

        Args:
            at: which one.
            begun: what it has returned and its span, if it has been called already.
            started: called when it first suspends.

        Raises:
            BaseException: what is no failure of the handler: a cancellation from outside, say.
        """
        handler, occasion = self.handlers[at], self.occasion
        if begun is None:
            awaitable, span = None, open_span(handler, occasion)
        else:
            awaitable, span = begun
            if span is not None:
                span.enter()
        error: BaseException | None = None
        key = object()
        occasion.begin_task(key, handler.name, perf_counter_ns(), span)
        try:
            what = f"callback {handler.name} did not finish {occasion.event.name}"
            with nullcontext() if handler.timeout is None else time_limit(handler.timeout, what):
                steps = handler.call(*occasion.arguments(handler.takes)) if awaitable is None else awaitable
                await FirstStep(steps, started, step_checker(handler, occasion.event))
            if handler.heeded:
                handler.owner.succeeded()
        except BaseException as raised:
            error, outward = judge(handler, occasion.event, raised)
            if isinstance(error, Exception):
                self.fail(at, error)
            if outward is not None:
                raise outward  # noqa: B904 -- it is what was raised, or a part of it
        finally:
            occasion.end_task(key)
            if span is not None:
                span.end(outcome_of(error), error)

    def fail(self, at: int, error: Exception) -> None:
        """Note what a handler raised."""
        if self.errors is None:
            self.errors = {}
        self.errors[at] = error

    def failures(self) -> list[tuple[Handler, Exception]]:
        """What failed, in the order of the handlers."""
        errors = self.errors
        return [] if errors is None else [(self.handlers[at], errors[at]) for at in sorted(errors)]


class _Group:
    """Runs the async handlers in the tasks of an anyio task group: on any event loop."""

    def __init__(self, fan: FanOut) -> None:
        self.fan = fan
        self.group: TaskGroup

    def start(self) -> bool:
        """Nothing runs at once."""
        return True

    async def finish(self) -> BaseException | None:
        """Run them, the plain functions between them and the rest; returns what ended it all before its time."""
        fan = self.fan
        await fan.occasion.enter_task()
        try:
            async with anyio.create_task_group() as self.group:
                while fan.unfinished:
                    await self._start_tasks()
                if fan.rest is not None:
                    await fan.rest()
            # Whether a task group that was cancelled while it waited raises that is up to the event loop.
            await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException as error:
            return error
        return None

    async def _start_tasks(self) -> None:
        """Start the async handlers that come next."""
        fan = self.fan
        first, begun, end, total = fan.at, fan.begun, fan.at + 1, len(fan.handlers)
        while begun is None and end < total and fan.handlers[end].is_async:
            end += 1
        fan.at, fan.begun = end, None
        # What follows in this task has to start after them.
        started = anyio.Event() if end < total or fan.rest is not None else None
        self._start(first, end, begun, started)
        if started is not None:
            await started.wait()

    def _start(self, at: int, end: int, begun: Begun | None, started: anyio.Event | None) -> None:
        """Start one in a task; it starts the next one, up to `end`, as soon as it first suspends.

        Starting them all at once would leave the order to the event loop, and trio shuffles on purpose.
        """
        _ = self.fan.base.copy().run(self.group.start_soon, self._run_task, at, end, begun, started)

    async def _run_task(self, at: int, end: int, begun: Begun | None, started: anyio.Event | None) -> None:
        """Run one; the next one starts when it first suspends, or ends."""
        handed_on = False

        def hand_on() -> None:
            nonlocal handed_on
            if handed_on:
                return
            handed_on = True
            if at + 1 < end:
                self._start(at + 1, end, None, started)
            elif started is not None:
                started.set()

        await self.fan.run_one(at, begun, hand_on)
        hand_on()


def _fatal(error: BaseException) -> BaseException:
    """What ended it all: in a group, the first that is neither an Exception nor a cancellation, if there is one."""
    harmless = (Exception, BaseExceptionGroup, anyio.get_cancelled_exc_class())
    while isinstance(error, BaseExceptionGroup):
        error = (error.subgroup(lambda each: not isinstance(each, harmless)) or error).exceptions[0]
    return error
