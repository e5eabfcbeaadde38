"""Run the handlers of one event concurrently: started in their order, each in a task and a context of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from eventbus_engine._steps import FirstStep, need_loop
from eventbus_engine.errors import CallbackErrors, HandlerCancelledError, HandlerTimeoutError
from eventbus_engine.in_flight import Progress
from eventbus_engine.telemetry.spans import Activity, EngineTracer, Template, handler_template

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.lanes import Dispatch
    from eventbus_engine.trace import Outcome

__all__ = [
    "ENVELOPE",
    "EVENT",
    "HOOK",
    "Handler",
    "Occasion",
    "Owner",
    "add_note",
    "outcome_of",
    "raise_failures",
    "run_fanout",
]

log: logging.Logger = logging.getLogger("eventbus_engine")

HOOK: Final = 0
EVENT: Final = 1
ENVELOPE: Final = 2
"""What a handler is called with: `(state, logger)`, `(event, state, logger)` or `(envelope)`."""


class Owner(Protocol):
    """Who a handler belongs to, and who hears how it went."""

    def succeeded(self) -> None:
        """It ran to its end."""

    def settle(self, error: Exception, event: EventName) -> bool:
        """It failed: True if the event fails for it, False if its owner has seen to that."""
        ...


class Handler:
    """Something to call on an event.

    Args:
        name: for spans, notes and log records.
        call: the bound function.
        takes: HOOK, EVENT or ENVELOPE.
        is_async: whether it is known to be a coroutine function. A plain one that returns an awaitable after all is
            awaited all the same.
        timeout: seconds for what is awaited, None for no limit.
        owner: who decides about its failures; None: the event fails.
    """

    __slots__ = ("call", "is_async", "name", "owner", "takes", "templates", "timeout")

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        takes: int,
        *,
        is_async: bool,
        timeout: float | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.name: str = name
        self.call: Callable[..., Any] = call
        self.takes: int = takes
        self.is_async: bool = is_async
        self.timeout: float | None = timeout
        self.owner: Any = owner
        self.templates: dict[EventName, Template] = {}


class Occasion:
    """One event as its handlers see it."""

    __slots__ = ("arguments", "context", "copies", "dispatch", "event", "progress", "tracer")

    def __init__(
        self,
        envelope: Any,
        state: Any,
        logger: Any,
        dispatch: Dispatch | None,
        tracer: EngineTracer | None = None,
        context: Context | None = None,
    ) -> None:
        self.event: EventName = envelope.event
        self.progress: Progress = Progress(self.event)
        self.arguments: tuple[tuple[Any, Any], tuple[EventName, Any, Any], tuple[Any]] = (
            (state, logger),
            (self.event, state, logger),
            (envelope,),
        )
        self.dispatch: Dispatch | None = dispatch
        self.tracer: EngineTracer | None = tracer
        self.context: Context | None = context
        self.copies: dict[str, Any] = {}

    def untraced(self) -> Occasion:
        """The same without spans."""
        copy = Occasion(self.arguments[ENVELOPE][0], *self.arguments[HOOK], self.dispatch, None, self.context)
        copy.progress = self.progress
        return copy

    async def enter_task(self) -> None:
        """Get ready for something asynchronous."""
        if self.dispatch is not None:
            await self.dispatch.enter_task()
        else:
            await need_loop()


Rest: TypeAlias = Callable[[], Awaitable[None]]
"""What runs beside the handlers in the caller's own task and context, from when the last of them has started."""


async def run_fanout(
    handlers: Sequence[Handler], occasion: Occasion, rest: Rest | None = None
) -> list[tuple[Handler, Exception]]:
    """Run handlers, all of them whatever the others do, and return what failed, in the order given.

    Plain functions run in the caller's task and context, at their place in the order; every async one runs in a task
    of its own, whose context is a copy of the one at fan-out. Cancellation reaches all of them, and is waited for.
    """
    return await _FanOut(handlers, occasion, rest).run()


def raise_failures(
    failures: Sequence[tuple[Handler, Exception]], event: EventName, others: Sequence[Exception] = ()
) -> None:
    """Raise the failures that count, once their owners have seen them.

    Args:
        failures: in registration order.
        event: for the notes.
        others: further ones that have been settled elsewhere.

    Raises:
        CallbackErrors: in the order given.
    """
    counted: list[Exception] = []
    for handler, error in failures:
        add_note(error, f"in callback {handler.name} on {event.name}")
        if handler.owner is None or handler.owner.settle(error, event):
            counted.append(error)
    counted += others
    if counted:
        names = "1 callback" if len(counted) == 1 else f"{len(counted)} callbacks"
        raise CallbackErrors(f"{names} failed on {event.name}", counted)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless its class is frozen."""
    with suppress(AttributeError, TypeError):
        error.add_note(note)


def outcome_of(error: BaseException | None) -> Outcome:
    """How an execution ended, by what it raised."""
    if error is None:
        return "ok"
    if isinstance(error, HandlerTimeoutError):
        return "timed_out"
    return "failed" if isinstance(error, Exception) and not isinstance(error, HandlerCancelledError) else "cancelled"


Begun: TypeAlias = "tuple[Awaitable[Any], Activity | None]"
"""What a plain function returned that has to be awaited, and its span."""


class _FanOut:
    def __init__(self, handlers: Sequence[Handler], occasion: Occasion, rest: Rest | None) -> None:
        self.handlers = handlers
        self.occasion = occasion
        self.rest = rest
        self.errors: dict[int, Exception] = {}
        self.base: Context
        self.group: TaskGroup

    async def run(self) -> list[tuple[Handler, Exception]]:
        self.base = self.occasion.context or copy_context()
        i, begun = 0, None
        self.occasion.progress.begin_callbacks()
        while i < len(self.handlers) and not self.handlers[i].is_async and begun is None:
            begun = self.call_plain(i)
            i += begun is None
        if i < len(self.handlers):
            await self.run_tasks(i, begun)
        elif self.rest is not None:
            await self.rest()
        return [(self.handlers[i], self.errors[i]) for i in sorted(self.errors)]

    async def run_tasks(self, i: int, begun: Begun | None) -> None:
        """Run what is left from `i` on, which has `begun` already if that is not None."""
        await self.occasion.enter_task()
        fatal: BaseException | None = None
        try:
            async with anyio.create_task_group() as self.group:
                while i < len(self.handlers):
                    if begun is None and not self.handlers[i].is_async:
                        begun = self.call_plain(i)
                        i += begun is None
                    else:
                        i, begun = await self.start_tasks(i, begun), None
                if self.rest is not None:
                    await self.rest()
            # Whether a task group that was cancelled while it waited raises that is up to the event loop.
            await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException as error:
            # What handlers raise is kept, not raised. So a group wraps what is no Exception, a KeyboardInterrupt, say.
            fatal = _fatal(error)
            for i, failure in sorted(self.errors.items()):
                name, event = self.handlers[i].name, self.occasion.event.name
                log.error("callback %s failed on %s, which was cancelled", name, event, exc_info=failure)
        if fatal is not None:
            raise fatal

    async def start_tasks(self, i: int, begun: Begun | None) -> int:
        """Start the async handlers from `i` on; returns where they end."""
        end, total = i + 1, len(self.handlers)
        while begun is None and end < total and self.handlers[end].is_async:
            end += 1
        # What follows in this task has to start after them.
        started = anyio.Event() if end < total or self.rest is not None else None
        self.start(i, end, begun, started)
        if started is not None:
            await started.wait()
        return end

    def start(self, i: int, end: int, begun: Begun | None, started: anyio.Event | None) -> None:
        """Start handler `i` in a task; it starts the next one, up to `end`, as soon as it first suspends.

        Starting them all at once would leave the order to the event loop, and trio shuffles on purpose.
        """
        _ = self.base.copy().run(self.group.start_soon, self.run_task, i, end, begun, started)

    def call_plain(self, i: int) -> Begun | None:
        """Call a plain function here and now; returns what it returned if that has to be awaited."""
        handler, progress = self.handlers[i], self.occasion.progress
        progress.span = span = self.open_span(handler)
        progress.now = handler.name
        error: BaseException | None = None
        try:
            result = handler.call(*self.occasion.arguments[handler.takes])
            if result is not None and isinstance(result, Awaitable):
                begun, span = (result, span), None
                if begun[1] is not None:
                    begun[1].leave()
                return begun
            succeeded(handler)
            return None
        except Exception as raised:
            error = self.errors[i] = raised
            return None
        except BaseException as raised:
            error = raised
            raise
        finally:
            progress.now = progress.span = None
            if span is not None:
                span.end(outcome_of(error), error)

    async def run_task(self, i: int, end: int, begun: Begun | None, started: anyio.Event | None) -> None:
        """Run an async handler in a task of its own; the next one starts when it first suspends, or ends."""
        handler = self.handlers[i]
        baton = _Baton(self, i + 1, end, started)
        if begun is None:
            awaitable, span = None, self.open_span(handler)
        else:
            awaitable, span = begun
            if span is not None:
                span.enter()
        error: BaseException | None = None
        self.occasion.progress.begin_task(baton, handler.name, span)
        try:
            await self.call_async(handler, awaitable, baton)
            succeeded(handler)
        except BaseException as raised:
            error, outward = self.judge(handler, raised)
            if isinstance(error, Exception):
                self.errors[i] = error
            if outward is not None:
                raise outward  # noqa: B904 -- it is what was raised, or a part of it
        finally:
            self.occasion.progress.end_task(baton)
            if span is not None:
                span.end(outcome_of(error), error)
        baton.hand_on()

    async def call_async(self, handler: Handler, awaitable: Awaitable[Any] | None, baton: _Baton) -> None:
        what = f"callback {handler.name} did not finish {self.occasion.event.name}"
        with nullcontext() if handler.timeout is None else time_limit(handler.timeout, what):
            steps = handler.call(*self.occasion.arguments[handler.takes]) if awaitable is None else awaitable
            await FirstStep(steps, baton.hand_on)

    def judge(self, handler: Handler, raised: BaseException) -> tuple[BaseException, BaseException | None]:
        """What a handler has failed with, and what goes on from there to all the others: a cancellation, say."""
        if isinstance(raised, Exception):
            return raised, None
        cancelled = anyio.get_cancelled_exc_class()
        if isinstance(raised, BaseExceptionGroup):
            # A task group of the handler's own that was cancelled, and in which something failed at that.
            cancellation, failure = raised.split(cancelled)
            if cancellation is not None and isinstance(failure, Exception):
                return failure, cancellation
        if not isinstance(raised, cancelled) or _cancelled_from_outside():
            return raised, raised
        error = HandlerCancelledError(f"callback {handler.name} cancelled itself on {self.occasion.event.name}")
        error.__cause__ = raised
        return error, None

    def open_span(self, handler: Handler) -> Activity | None:
        tracer = self.occasion.tracer
        if tracer is None:
            return None
        event = self.occasion.event
        template = handler.templates.get(event)
        if template is None:
            # Only background delivery has an occasion with a context of its own.
            background = self.occasion.context is not None
            template = handler_template("callback", handler.name, event, handler.call, background=background)
            handler.templates[event] = template
        return tracer.open(template)


def succeeded(handler: Handler) -> None:
    """Tell the owner, if there is one."""
    if handler.owner is not None:
        handler.owner.succeeded()


def _fatal(error: BaseException) -> BaseException:
    """What ended it all: in a group, the first that is neither an Exception nor a cancellation, if there is one."""
    harmless = (Exception, BaseExceptionGroup, anyio.get_cancelled_exc_class())
    while isinstance(error, BaseExceptionGroup):
        error = (error.subgroup(lambda each: not isinstance(each, harmless)) or error).exceptions[0]
    return error


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


class _Baton:
    """Starts the next handler of a run of async ones, once."""

    __slots__ = ("end", "fan", "following", "started")

    def __init__(self, fan: _FanOut, following: int, end: int, started: anyio.Event | None) -> None:
        self.fan = fan
        self.following = following
        self.end = end
        self.started = started

    def hand_on(self) -> None:
        following, self.following = self.following, -1
        if following < 0:
            return
        if following < self.end:
            self.fan.start(following, self.end, None, self.started)
        elif self.started is not None:
            self.started.set()


def _cancelled_from_outside() -> bool:
    """Whether a scope around this task is cancelled. A handler that only cancelled itself is in no such scope."""
    return anyio.current_effective_deadline() == -math.inf
