"""Handlers: what is called on an event, what it is called with, and what becomes of its failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio

from eventbus_engine._steps import need_loop
from eventbus_engine.errors import CallbackErrors, DeliveryError, HandlerCancelledError, HandlerTimeoutError
from eventbus_engine.event import EventName
from eventbus_engine.telemetry.spans import Activity, EngineTracer, Template, handler_template

if TYPE_CHECKING:
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
    "judge",
    "moment",
    "open_span",
    "outcome_of",
    "raise_failures",
    "told",
]

HOOK: Final = 0
EVENT: Final = 1
ENVELOPE: Final = 2
"""What a handler is called with: `(state, logger)`, `(event, state, logger)` or `(envelope)`."""


class Owner(Protocol):
    """Who a handler belongs to, and who hears how it went."""

    def succeeded(self) -> None:
        """It ran to its end."""

    def settle(self, error: Exception, when: str) -> bool:
        """It failed, at a `moment`: True if the event fails for it, False if its owner has seen to that."""
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
        heeded: whether the owner wants to hear of each success as well.
        blocks_after: seconds past which its owner's `blocked(seconds, event)` hears that it has held up the event loop.
        opens: whether it is a callback's `open`, which is called before an event and not for it.

    Attributes:
        suspends: whether it did the last time, has not been called yet, or is suspect: each of its steps is timed.
        suspect: whether it was among several that have held up the event loop, one of them at least.
    """

    __slots__ = (
        "blocks_after",
        "call",
        "heeded",
        "is_async",
        "name",
        "opens",
        "owner",
        "suspect",
        "suspends",
        "takes",
        "templates",
        "timeout",
    )

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        takes: int,
        *,
        is_async: bool,
        timeout: float | None = None,
        owner: Owner | None = None,
        heeded: bool = False,
        blocks_after: float = math.inf,
        opens: bool = False,
    ) -> None:
        self.name: str = name
        self.call: Callable[..., Any] = call
        self.takes: int = takes
        self.is_async: bool = is_async
        self.timeout: float | None = timeout
        self.owner: Any = owner
        self.heeded: bool = heeded
        self.blocks_after: float = blocks_after
        self.opens: bool = opens
        self.suspends: bool = True
        self.suspect: bool = False
        self.templates: dict[EventName, Template] = {}


class Named(Protocol):
    """A handler, or an algorithm."""

    @property
    def name(self) -> str:
        """Its name."""
        ...


class Occasion:
    """One event as its handlers see it.

    Attributes:
        event: the event.
        state: what handlers get for the state.
        logger: what they log to.
        time_ns: when the event was published, nanoseconds since the epoch.
        tracer: what opens their spans, if anything does.
        context: what they start from instead of the caller's: that of the event, for background delivery.
        copies: what has been copied for snapshots, by name.
        thread: the id of the thread it is handled on.
        whole: the span of all of it, if it has one.
        now: what runs at this moment in the task of the event, or of a relay; None in between.
        since: when that started, by `perf_counter_ns`; 0 for plain callbacks, which are not worth the clock.
        span: its span, if it has one.
        tasks: the async callbacks that have suspended: name, start and span.
    """

    __slots__ = (
        "_dispatch", "_envelope", "context", "copies", "event", "logger", "now", "since", "span", "state", "tasks",
        "thread", "time_ns", "tracer", "whole",
    )  # fmt: skip

    event: EventName
    state: Any
    logger: Any
    time_ns: int
    thread: int
    tracer: EngineTracer | None
    whole: Activity | None
    context: Context | None
    copies: dict[str, Any] | None
    now: Named | None
    since: int
    span: Activity | None
    tasks: dict[object, tuple[str, int, Activity | None]] | None
    _envelope: Any
    _dispatch: Dispatch | None

    @staticmethod
    def begin(
        envelope: Any, state: Any, logger: Any, dispatch: Dispatch | None, tracer: EngineTracer | None = None
    ) -> Occasion:
        """One that is no dispatch itself."""
        occasion = Occasion()
        occasion.event, occasion.time_ns, occasion._envelope = envelope.event, envelope.time_ns, envelope
        occasion.state, occasion.logger, occasion.tracer, occasion._dispatch = state, logger, tracer, dispatch
        occasion.thread, occasion.since = get_ident(), 0
        occasion.whole = occasion.context = occasion.copies = occasion.now = occasion.span = occasion.tasks = None
        return occasion

    @property
    def envelope(self) -> Any:
        """The event as plain subscribers get it."""
        return self._envelope

    @property
    def dispatch(self) -> Dispatch | None:
        """The event being handled; None when the engine closes."""
        return self._dispatch

    def arguments(self, takes: int) -> tuple[Any, ...]:
        """What a handler is called with, by what it takes."""
        if takes == HOOK:
            return self.state, self.logger
        return (self.event, self.state, self.logger) if takes == EVENT else (self.envelope,)

    def begin_task(self, key: object, name: str, since: int, span: Activity | None = None) -> None:
        """Note an async callback that has a task of its own."""
        if self.tasks is None:
            self.tasks = {}
        self.tasks[key] = name, since, span

    def end_task(self, key: object) -> None:
        """Forget it."""
        assert self.tasks is not None  # noqa: S101 -- it has been noted
        self.tasks.pop(key, None)

    def untraced(self) -> Occasion:
        """The same without spans."""
        other = Occasion.begin(self.envelope, self.state, self.logger, self.dispatch)
        other.context = self.context
        return other

    async def enter_task(self) -> None:
        """Get ready for something asynchronous."""
        dispatch = self.dispatch
        await (need_loop() if dispatch is None else dispatch.enter_task())


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
        add_note(error, f"in callback {handler.name} {moment(event, handler)}")
        if handler.owner is None or handler.owner.settle(error, moment(event, handler)):
            counted.append(error)
    counted += others
    if counted:
        names = "1 callback" if len(counted) == 1 else f"{len(counted)} callbacks"
        # What is opened together is nothing but opened, so that the first of them stands for all.
        first = failures[0][0] if failures else None
        raise CallbackErrors(f"{names} failed {moment(event, first)}", counted)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless its class is frozen."""
    with suppress(AttributeError, TypeError):
        error.add_note(note)


def moment(event: EventName | str, handler: Handler | None = None) -> str:
    """When a handler failed, in words: on an event, in opening before it, or what stands in for one says so itself."""
    if handler is not None and handler.opens:
        return f"in open, before {event.name}" if isinstance(event, EventName) else "in open"
    return f"on {event.name}" if isinstance(event, EventName) else str(event)


def told(error: Exception, *, sends: bool = False) -> tuple[str, Exception | None]:
    """What to log of a failure: what goes behind the message, and the error if its traceback is to be logged.

    A far side that is down, refuses or does not answer is nothing unforeseen: what such an error says is all there is.

    Args:
        error: the failure.
        sends: whether it is of something that sends records, so that what takes too long is a far side.
    """
    known = isinstance(error, DeliveryError) and error.retryable
    final = isinstance(error, DeliveryError) or (sends and isinstance(error, HandlerTimeoutError))
    return (f": {error}", None) if known or (final and error.__cause__ is None) else ("", error)


def lost_in(error: Exception, count: int) -> int:
    """How many of the records of a batch have not arrived: all, unless what the sending failed with says otherwise."""
    lost = error.lost if isinstance(error, DeliveryError) else None
    return count if lost is None else min(lost, count)


def outcome_of(error: BaseException | None) -> Outcome:
    """How an execution ended, by what it raised."""
    if error is None:
        return "ok"
    if isinstance(error, HandlerTimeoutError):
        return "timed_out"
    return "failed" if isinstance(error, Exception) and not isinstance(error, HandlerCancelledError) else "cancelled"


def judge(handler: Handler, event: EventName, raised: BaseException) -> tuple[BaseException, BaseException | None]:
    """What a handler has failed with, and what goes on from there to all the others: a cancellation, say."""
    if isinstance(raised, Exception):
        return raised, None
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(raised, BaseExceptionGroup):
        # A task group of the handler's own that was cancelled, and in which something failed at that.
        cancellation, failure = raised.split(cancelled)
        if cancellation is not None and isinstance(failure, Exception):
            return failure, cancellation
    # A handler that only cancelled itself is in no scope that is cancelled.
    if not isinstance(raised, cancelled) or anyio.current_effective_deadline() == -math.inf:
        return raised, raised
    error = HandlerCancelledError(f"callback {handler.name} cancelled itself {moment(event, handler)}")
    error.__cause__ = raised
    return error, None


def open_span(handler: Handler, occasion: Occasion) -> Activity | None:
    """The span of a handler, current from here on; None without a tracer."""
    tracer = occasion.tracer
    if tracer is None:
        return None
    event = occasion.event
    template = handler.templates.get(event)
    if template is None:
        # Only background delivery has an occasion with a context of its own.
        background = occasion.context is not None
        template = handler_template("callback", handler.name, event, handler.call, background=background)
        handler.templates[event] = template
    return tracer.open(template)
