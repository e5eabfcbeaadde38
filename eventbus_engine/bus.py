"""The event bus: publish, subscribe, and the middleware between the two, of which the Engine is one."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from time import time_ns as wall_clock_ns
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import anyio

from eventbus_engine._options import accepts, function_name, is_async_callable
from eventbus_engine.envelope import Envelope, current, current_dispatch, current_envelope, write_envelope
from eventbus_engine.errors import ConfigurationError, HandlerTypeError, SyncUsageError, UnknownEventError
from eventbus_engine.event import EventName, resolve_event
from eventbus_engine.fanout import FanOut
from eventbus_engine.handlers import ENVELOPE, Handler, Occasion, raise_failures
from eventbus_engine.lanes import Dispatch, Lanes
from eventbus_engine.trace import Traces

__all__ = ["CallNext", "Envelope", "EventBus", "Middleware", "Subscription", "Terminal", "current_envelope"]

CallNext: TypeAlias = Callable[[Envelope], Awaitable[Traces]]
"""The rest of the chain: call it with the envelope and await its Traces."""

Link: TypeAlias = Callable[[Envelope, CallNext], Awaitable[Traces]]
FirstLink: TypeAlias = Callable[[Dispatch, Occasion, CallNext], Awaitable[Traces]]


class Middleware(Protocol):
    """Anything that stands between `publish` and the subscribers. An async function of this shape will do."""

    def __call__(self, envelope: Envelope, call_next: CallNext, /) -> Awaitable[Traces]:
        """Handle the event, call the rest of the chain or not, and return what ran."""
        ...


PlainHandler: TypeAlias = Callable[[Envelope], Any]
"""A subscriber: `def` or `async def`, takes one Envelope."""


class Subscription:
    """A handler's place on a bus. `cancel()` ends it, or use it as a context manager."""

    def __init__(
        self,
        bus: EventBus,
        handler: PlainHandler,
        events: tuple[EventName, ...],
        once: bool,
        when: Callable[[Envelope], bool] | None,
    ) -> None:
        self._bus = bus
        self.events = events
        self.once = once
        self.when = when
        self.handler: Handler = Handler(function_name(handler), handler, ENVELOPE, is_async=is_async_callable(handler))

    def cancel(self) -> None:
        """Take the handler off the bus; safe from inside a handler, and more than once."""
        self._bus._drop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()


class EventBus:
    """Delivers events to subscribers, through middleware.

    Events that share a state (by identity) or a key are handled one at a time, in the order of their publishing;
    others run concurrently. An event published from inside a handler of the same lane runs at once, nested.

    Args:
        middleware: what every event passes on its way, outermost first.
    """

    def __init__(self, middleware: tuple[Middleware, ...] | list[Middleware] = ()) -> None:
        self._middleware: list[Middleware] = []
        self._subscriptions: tuple[Subscription, ...] = ()
        # By the identity of an event: what there was to choose from, for another thread may subscribe meanwhile; the
        # event, its subscriptions, and their handlers if nothing else is to be asked.
        self._wanted: dict[int, tuple[object, EventName, list[Subscription], list[Handler] | None]] = {}
        self._vocabularies: set[type] = set()
        self._lanes = Lanes()
        self._terminal = Terminal(self)
        self._rest: CallNext = self._terminal
        # A bound method: to call an object that has a `__call__` is twice as dear. None without middleware.
        self._first: FirstLink | None = None
        self._hears: Callable[[EventName], bool] = _never
        for one in middleware:
            self.use(one)

    def use(self, middleware: Middleware) -> None:
        """Put a middleware at the end of the chain, nearest to the subscribers.

        Raises:
            HandlerTypeError: if it cannot be called with `(envelope, call_next)`.
            ConfigurationError: if it is in the chain already.
        """
        if not callable(middleware) or not accepts(middleware, 2):
            raise HandlerTypeError(
                f"{middleware!r} is no middleware; it has to be async (envelope, call_next) -> Traces"
            )
        if any(known is middleware for known in self._middleware):
            raise ConfigurationError(f"{middleware!r} is in use on this bus already")
        if (attach := _attachment(middleware)) is not None:
            attach(self)
        self._middleware.append(middleware)
        self._rest = self._terminal
        for one in reversed(self._middleware[1:]):
            self._rest = partial(_follow, _link_to(one), self._rest)
        self._first = _first_link_to(self._middleware[0])
        hearers = [_always if _attachment(one) is None else one._hears for one in self._middleware]  # type: ignore[attr-defined]
        self._hears = hearers[0] if len(hearers) == 1 else lambda event: any(hears(event) for hears in hearers)

    def subscribe(
        self,
        handler: PlainHandler,
        *events: EventName | str,
        once: bool = False,
        when: Callable[[Envelope], bool] | None = None,
    ) -> Subscription:
        """Call a handler for each of these events, for every event if none is named.

        Args:
            handler: `def` or `async def`, takes one Envelope. Handlers of an event run concurrently.
            *events: members, or names in the vocabulary of an engine on this bus.
            once: drop the subscription as its first event comes.
            when: a plain predicate over the envelope; False skips the event.

        Raises:
            HandlerTypeError: a handler or predicate that cannot be called with one envelope.
            UnknownEventError: a name no vocabulary on this bus has.
        """
        if not callable(handler) or isinstance(handler, type) or not accepts(handler, 1):
            raise HandlerTypeError(
                f"{handler!r} is no handler; it has to be a function of one Envelope, def or async def"
            )
        if when is not None and (not callable(when) or is_async_callable(when) or not accepts(when, 1)):
            raise HandlerTypeError(f"when={when!r} has to be a plain function (envelope) -> bool")
        subscription = Subscription(self, handler, tuple(self.resolve(event) for event in events), once, when)
        self._subscriptions = (*self._subscriptions, subscription)
        self._wanted.clear()
        return subscription

    def resolve(self, event: EventName | str) -> EventName:
        """The member that a name means in the vocabularies of the engines on this bus.

        Raises:
            UnknownEventError: no vocabulary has it, or there is none.
        """
        if isinstance(event, EventName):
            return event
        failure: UnknownEventError | None = None
        for middleware in self._middleware:
            events = getattr(middleware, "events", None)
            if isinstance(events, type) and issubclass(events, EventName):
                try:
                    return resolve_event(event, events)
                except UnknownEventError as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        raise UnknownEventError(
            f"{event!r} is a name, and this bus has no engine whose vocabulary could tell what it means; "
            f"publish the member of your EventName subclass"
        )

    async def publish(
        self, event: EventName | str, payload: Any = None, *, state: Any = None, key: Hashable = None
    ) -> Traces:
        """Publish an event and return once it has been handled.

        Args:
            event: a member, or a name in the vocabulary of an engine on this bus.
            payload: anything, for plain handlers.
            state: what the event is about; handlers change it in place. Its identity is the lane.
            key: the lane, where another than the state's is wanted; hashable.

        Returns:
            What the algorithms did: first what ran, in its order, then what did not.

        Raises:
            CallbackErrors: callbacks or subscribers raised.
            DeadlockError: dispatches would wait for each other for ever.
            SyncUsageError: it was published by a background callback of `engine.sync`.
            Exception: whatever an algorithm raised, with the traces so far as `exc.traces`.
        """
        known: EventName = event if type(event) in self._vocabularies else self._check(event)  # type: ignore[assignment]
        lane = _lane_of(key) if key is not None else id(state) if state is not None else None
        parent = current_dispatch()
        if parent is not None and parent.apart:
            raise SyncUsageError(
                f"{known.name} was published by a background callback of engine.sync, on a thread of its own beside "
                f"the engine's events; publish it from an inline callback, or run the engine on an event loop"
            )
        lanes, hears, first = self._lanes, self._hears, self._first
        used = lanes.used
        if not self._subscriptions and lane not in used and not hears(known):
            return {}
        if first is not None:
            dispatch = Dispatch.publish(known, payload, state, key, lane, lanes)
        else:
            dispatch = Dispatch.about(write_envelope(known, payload, state, key, wall_clock_ns()), lane, lanes)
        if parent is not None:
            dispatch.nest_in(parent)
        if lane is not None and used.setdefault(lane, dispatch) is not dispatch and not lanes.join(dispatch):
            await lanes.wait(dispatch)
        current.set(dispatch)
        try:
            if first is not None:
                return await first(dispatch, dispatch, self._rest)
            if (fan := self._terminal.begin(dispatch._envelope)) is not None:
                raise_failures(await fan.finish(), known)
            return {}
        finally:
            dispatch.running = False
            if lane is not None:
                if used[lane] is dispatch:
                    del used[lane]
                else:
                    lanes.leave(dispatch)
            # Not by a token, which belongs to one Context: `engine.sync` may go on in a copy of it.
            current.set(parent)

    def _check(self, event: object) -> EventName:
        """What a name means, or a member of a vocabulary that has not been seen before."""
        if type(event) is str:
            return self.resolve(event)
        if not isinstance(event, EventName):
            raise UnknownEventError(f"{event!r} is no event; publish a member of an EventName subclass")
        self._vocabularies.add(type(event))
        return event

    async def expect(self, event: EventName | str, timeout: float = math.inf) -> Envelope:
        """Wait for the next such event, for tests.

        Args:
            event: a member, or a name as in `publish`.
            timeout: seconds; no limit by default.

        Raises:
            TimeoutError: it did not come in time.
        """
        arrived = anyio.Event()
        caught: list[Envelope] = []

        def catch(envelope: Envelope) -> None:
            caught.append(envelope)
            arrived.set()

        event = self.resolve(event)
        with self.subscribe(catch, event, once=True), anyio.move_on_after(timeout):
            await arrived.wait()
        if not caught:
            raise TimeoutError(f"{event.name} was not published within {timeout:g} s")
        return caught[0]

    def _drop(self, subscription: Subscription) -> None:
        self._subscriptions = tuple(known for known in self._subscriptions if known is not subscription)
        self._wanted.clear()

    def _handlers_for(self, envelope: Envelope) -> list[Handler]:
        """The subscribers of an event, in the order of their subscribing; drops those that wanted only one."""
        event, present = envelope.event, self._subscriptions
        wanted = self._wanted.get(id(event))
        if wanted is None or wanted[0] is not present:
            # By identity: members of two vocabularies may share a value.
            subscriptions = [one for one in present if not one.events or any(e is event for e in one.events)]
            always = all(one.when is None and not one.once for one in subscriptions)
            handlers = [one.handler for one in subscriptions] if always else None
            wanted = self._wanted[id(event)] = present, event, subscriptions, handlers
        _, _, subscriptions, handlers = wanted
        return self._choose(subscriptions, envelope) if handlers is None else handlers

    def _choose(self, subscriptions: Iterable[Subscription], envelope: Envelope) -> list[Handler]:
        found: list[Handler] = []
        for subscription in subscriptions:
            try:
                if subscription.when is not None and not subscription.when(envelope):
                    continue
            except Exception as error:
                # The subscriber's own failure, to be raised at its place in the order.
                found.append(Handler(subscription.handler.name, partial(_raise, error), ENVELOPE, is_async=False))
                continue
            if subscription.once:
                subscription.cancel()
            found.append(subscription.handler)
        return found


def _lane_of(key: Hashable) -> Hashable:
    try:
        hash(key)
    except TypeError as error:
        raise ConfigurationError(
            f"key={key!r} cannot name a lane: it is not hashable; use a string or a number"
        ) from error
    return ("key", key)


def _always(_: EventName) -> bool:
    return True


def _never(_: EventName) -> bool:
    return False


def _raise(error: Exception, _: Envelope) -> None:
    raise error


def _attachment(middleware: Middleware) -> Callable[[EventBus], None] | None:
    """How to tell a middleware of ours, an Engine, where it stands. Asked of the class: a Mock would make one up."""
    return middleware._attach if hasattr(type(middleware), "_attach") else None  # type: ignore[attr-defined]


def _link_to(middleware: Middleware) -> Link:
    return partial(_call_foreign, middleware) if _attachment(middleware) is None else middleware.__call__


def _first_link_to(middleware: Middleware) -> FirstLink:
    """How to call the outermost one. An Engine takes the dispatch for its own, so that most events need no envelope."""
    if _attachment(middleware) is not None:
        return middleware._handle  # type: ignore[attr-defined, no-any-return]
    return lambda dispatch, _, call_next: _call_foreign(middleware, dispatch.envelope, call_next)


def _follow(link: Link, call_next: CallNext, envelope: Envelope) -> Awaitable[Traces]:
    return link(envelope, call_next)


async def _call_foreign(middleware: Middleware, envelope: Envelope, call_next: CallNext) -> Traces:
    """Call a middleware that is none of ours: it may await anything, and forget to return."""
    dispatch = current_dispatch()
    assert dispatch is not None  # noqa: S101 -- only `publish` calls the chain
    await dispatch.enter_task()
    result = middleware(envelope, call_next)
    traces = await result if isinstance(result, Awaitable) else result
    if not isinstance(traces, dict):
        raise HandlerTypeError(
            f"middleware {function_name(middleware)} returned {type(traces).__name__}; make it async and let it return "
            f"the Traces that call_next gave it, or {{}} if it did not call it"
        )
    return traces


class Terminal:
    """The end of the chain: the plain subscribers. An engine in front of it runs them among its callbacks."""

    __slots__ = ("bus",)

    def __init__(self, bus: EventBus) -> None:
        self.bus: EventBus = bus

    def handlers_for(self, envelope: Envelope) -> list[Handler]:
        """The subscribers of an event, for whoever stands in front of the end of the chain."""
        return self.bus._handlers_for(envelope) if self.bus._subscriptions else []

    async def __call__(self, envelope: Envelope) -> Traces:
        """Run the subscribers."""
        if (fan := self.begin(envelope)) is not None:
            raise_failures(await fan.finish(), envelope.event)
        return {}

    def begin(self, envelope: Envelope) -> FanOut | None:
        """Call the plain subscribers that come first; None if that was all there is, and none of them failed."""
        bus = self.bus
        handlers = bus._handlers_for(envelope) if bus._subscriptions else ()
        begun: Awaitable[Any] | None = None
        failure: Exception | None = None
        for handler in handlers:
            if handler.is_async:
                break
            try:
                result = handler.call(envelope)
            except Exception as error:
                failure = error
                break
            if result is not None and isinstance(result, Awaitable):
                begun = result
                break
        else:
            return None
        # Only what has to be awaited, or has failed, takes more than that.
        occasion = Occasion.begin(envelope, envelope.state, None, current_dispatch())
        fan = FanOut(handlers, occasion, at=handlers.index(handler))
        if begun is not None:
            fan.begun = begun, None
        if failure is not None:
            fan.fail(fan.at, failure)
            fan.at += 1
        return fan
