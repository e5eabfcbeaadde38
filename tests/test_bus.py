"""The bus: middleware, subscriptions, envelopes, and engines on it."""

from __future__ import annotations

from functools import partial
from time import time_ns
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    CallNext,
    ConfigurationError,
    Engine,
    Envelope,
    Event,
    EventBus,
    EventName,
    HandlerTypeError,
    Traces,
    UnknownEventError,
    current_envelope,
)
from eventbus_engine.telemetry import PrivateIdGenerator

pytestmark = pytest.mark.anyio


class Shop(EventName):
    """A vocabulary with a value that `Till` has, too."""

    ORDER = "order"
    BEFORE_PAY = "before_pay"
    AFTER_PAY = "after_pay"


class Till(EventName):
    """Another vocabulary."""

    ORDER = "order"
    OPENED = "opened"


class Record:
    """A state."""


class Noting(Algorithm[Any, Any]):
    """Notes that it ran."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def match(self, event: EventName, state: Any) -> bool:
        """Run always."""
        return True

    def apply(self, event: EventName, state: Any, logger: Any) -> int:
        """Note the name."""
        self.log.append(f"{self.name}")
        return 0


class Watching(Callback[Any]):
    """Notes the events it sees."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def run_event(self, event: EventName, state: Any, logger: Any) -> None:
        """Note the name."""
        self.log.append(f"{self.name}")


def wrapping(name: str, log: list[str]) -> Any:
    """A middleware that notes when it is entered and left."""

    async def middleware(envelope: Envelope, call_next: CallNext) -> Traces:
        log.append(f"{name} in")
        traces = await call_next(envelope)
        log.append(f"{name} out")
        return traces

    return middleware


# ------------------------------------------------------------------------------------------------------- middleware


async def test_rule_3_middleware_in_order_of_use() -> None:
    """The first that is used is the outermost, those of the constructor before all."""
    log: list[str] = []
    bus = EventBus(middleware=[wrapping("a", log)])
    bus.use(wrapping("b", log))
    bus.subscribe(lambda _: log.append("handler"))

    await bus.publish(Shop.ORDER)

    assert log == ["a in", "b in", "handler", "b out", "a out"]


async def test_rule_3_subscribers_behind_a_middleware() -> None:
    """They are awaited, and one that fails does so through the middleware."""
    log: list[str] = []

    async def asynchronous(envelope: Envelope) -> None:
        await anyio.lowlevel.checkpoint()
        log.append("asynchronous")

    def failing(envelope: Envelope) -> None:
        raise ValueError("no")

    bus = EventBus(middleware=[wrapping("a", log)])
    bus.subscribe(asynchronous)
    assert await bus.publish(Shop.ORDER) == {}
    assert log == ["a in", "asynchronous", "a out"]
    bus.subscribe(failing)
    with pytest.raises(CallbackErrors, match="1 callback failed on ORDER"):
        await bus.publish(Shop.ORDER)


async def test_rule_3_middleware_may_stop_an_event() -> None:
    """A middleware that does not call the rest decides what comes back."""
    log: list[str] = []

    async def stop(envelope: Envelope, call_next: CallNext) -> Traces:
        return {}

    bus = EventBus(middleware=(stop,))
    bus.subscribe(lambda _: log.append("handler"))

    traces = await bus.publish(Shop.ORDER)

    assert (traces, log) == ({}, [])


async def test_rule_3_middleware_has_to_return_the_traces() -> None:
    """One that forgets its return is named, be it before an engine or behind one."""

    async def forgetful(envelope: Envelope, call_next: CallNext) -> None:
        await call_next(envelope)

    bus = EventBus(middleware=[forgetful])  # type: ignore[list-item]
    behind = EventBus()
    behind.use(Engine(events=Shop))
    behind.use(forgetful)  # type: ignore[arg-type]

    for each in (bus, behind):
        with pytest.raises(HandlerTypeError, match=r"middleware forgetful returned NoneType.*return the Traces"):
            await each.publish(Shop.ORDER)


async def test_rule_3_middleware_has_to_be_async() -> None:
    """A plain function is told so when it is called, as its signature does not tell."""

    def plain(envelope: Envelope, call_next: CallNext) -> None:
        pass

    bus = EventBus(middleware=[plain])  # type: ignore[list-item]

    with pytest.raises(HandlerTypeError, match="middleware plain returned NoneType; make it async"):
        await bus.publish(Shop.ORDER)


async def test_rule_3_middleware_that_raises_propagates() -> None:
    """What a middleware raises is nobody's callback failure, behind an engine neither; the callbacks finish."""
    log: list[str] = []

    async def refuse(envelope: Envelope, call_next: CallNext) -> Traces:
        raise LookupError("no")

    engine = Engine(events=Shop, algorithms=[Noting("algorithm", log)], callbacks=[Watching("callback", log)])
    engine.bus.use(refuse)

    with pytest.raises(LookupError) as caught:
        await engine.run_event(Shop.ORDER)

    assert log == ["algorithm", "callback"]
    assert [*caught.value.traces] == ["algorithm/ORDER"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("middleware", [None, 3, lambda envelope: None])
def test_rule_3_use_refuses_what_is_no_middleware(middleware: Any) -> None:
    """It has to take an envelope and the rest of the chain."""
    with pytest.raises(HandlerTypeError, match="is no middleware; it has to be async"):
        EventBus().use(middleware)


def test_rule_3_use_refuses_a_middleware_twice() -> None:
    """The same engine would run everything twice."""
    engine = Engine()
    bus = EventBus()
    bus.use(engine)

    with pytest.raises(ConfigurationError, match="in use on this bus already"):
        bus.use(engine)


async def test_rule_3_mock_as_middleware() -> None:
    """The attributes a Mock makes up are not taken for an engine's."""
    middleware = AsyncMock(return_value={})
    bus = EventBus(middleware=[middleware])

    traces = await bus.publish(Shop.ORDER)

    assert traces == {}
    middleware.assert_awaited_once()
    middleware._attach.assert_not_called()


# --------------------------------------------------------------------------------------------------- engines on a bus


async def test_rule_3_engine_is_a_middleware() -> None:
    """Given by `use` or by `bus=`, it runs what is published on the bus, and `run_event` publishes there."""
    log: list[str] = []
    first, second = EventBus(), EventBus()
    used, given = Engine(events=Shop, algorithms=[Noting("used", log)]), Engine(events=Shop, bus=second)
    first.use(used)
    seen: list[EventName] = []
    second.subscribe(lambda envelope: seen.append(envelope.event))

    traces = await first.publish(Shop.ORDER, state=Record())
    await given.run_event("order")

    assert [*traces] == ["used/ORDER"]
    assert seen == [Shop.ORDER]
    assert (used.bus, given.bus) == (first, second)


async def test_rule_3_engine_makes_its_own_bus() -> None:
    """Without a bus it makes one, once."""
    engine = Engine(events=Shop)
    seen: list[Envelope] = []
    engine.bus.subscribe(seen.append, "before_pay")

    await engine.run_event(Shop.BEFORE_PAY)

    assert [envelope.event for envelope in seen] == [Shop.BEFORE_PAY]


async def test_rule_3_engine_keeps_the_first_bus() -> None:
    """`engine.bus` is the first it was used on; it serves another all the same."""
    log: list[str] = []
    engine = Engine(events=Shop, algorithms=[Noting("it", log)])
    first, second = EventBus([engine]), EventBus([engine])

    await first.publish(Shop.ORDER)
    await second.publish(Shop.ORDER)

    assert engine.bus is first
    assert log == ["it", "it"]


async def test_rule_3_state_defaults_to_the_engines() -> None:
    """`run_event(e)` is about the engine's own state, `run_event(e, s)` about another, which may be falsy."""
    own: list[int] = [1]
    other: list[int] = []
    seen: list[Any] = []

    class See(Callback[Any]):
        def order(self, state: Any, logger: Any) -> None:
            seen.append(state)

    engine = Engine(own, events=Shop, callbacks=[See()])

    await engine.run_event(Shop.ORDER)
    await engine.run_event(Shop.ORDER, other)
    await engine.bus.publish(Shop.ORDER)

    assert [state is own for state in seen] == [True, False, True]
    assert seen[1] is other


async def test_rule_3_engines_of_different_vocabularies() -> None:
    """Each takes the events of its own and lets the others pass, even where two share a value."""
    log: list[str] = []
    bus = EventBus()
    shop = Engine(events=Shop, bus=bus, algorithms=[Noting("shop", log)])
    till = Engine(events=Till, bus=bus, algorithms=[Noting("till", log)])
    bus.subscribe(lambda _: log.append("subscriber"), Till.ORDER)

    await bus.publish(Shop.ORDER)
    await bus.publish(Till.ORDER)
    await bus.publish("opened")

    assert log == ["shop", "till", "subscriber", "till"]
    assert (shop.bus, till.bus) == (bus, bus)


async def test_rule_3_engines_of_the_same_vocabulary() -> None:
    """Both run; the second beside the first's callbacks. Their traces are together: what ran first, no key twice."""
    log: list[str] = []
    bus = EventBus()
    never = Mock(match=Mock(return_value=False))
    never.name = "never"
    Engine(events=Shop, bus=bus, algorithms=[Noting("it", log), never], callbacks=[Watching("first", log)])
    Engine(events=Shop, bus=bus, algorithms=[Noting("it", log), Noting("it", log)], callbacks=[Watching("second", log)])

    traces = await bus.publish(Shop.ORDER)

    assert log == ["it", "first", "it", "it", "second"]
    assert [*traces] == ["it/ORDER", "it#2/ORDER", "it#3/ORDER", "never/ORDER"]
    assert [trace.run for trace in traces.values()] == [True, True, True, False]


async def test_rule_3_failures_of_two_engines_are_raised_together() -> None:
    """The callbacks of both fail: one group, the first engine's before the second's, each naming its callback."""

    class Fails(Callback[Any]):
        def order(self, state: Any, logger: Any) -> None:
            raise ValueError(self.name)

    bus = EventBus()
    first, second = Fails(), Fails()
    first.name, second.name = "first", "second"
    Engine(events=Shop, bus=bus, callbacks=[first])
    Engine(events=Shop, bus=bus, callbacks=[second])

    with pytest.raises(CallbackErrors) as caught:
        await bus.publish(Shop.ORDER)

    assert [str(error) for error in caught.value.exceptions] == ["first", "second"]
    assert caught.value.exceptions[1].__notes__ == ["in callback second on ORDER"]


async def test_rule_3_algorithm_of_a_second_engine_fails(caplog: pytest.LogCaptureFixture) -> None:
    """It propagates as itself; what failed beside it in the first engine is logged, not lost."""

    class Fails(Callback[Any]):
        def order(self, state: Any, logger: Any) -> None:
            raise ValueError("callback")

    failing = Mock(match=Mock(return_value=True), apply=Mock(side_effect=KeyError("algorithm")))
    bus = EventBus()
    Engine(events=Shop, bus=bus, callbacks=[Fails()])
    Engine(events=Shop, bus=bus, algorithms=[failing])

    with pytest.raises(KeyError):
        await bus.publish(Shop.ORDER)

    assert [r.getMessage() for r in caplog.records] == ["1 callback failed on ORDER, besides an error that propagates"]


async def test_rule_3_engine_between_other_middleware() -> None:
    """What comes before it wraps it; what comes after it runs beside its callbacks, behind its algorithms."""
    log: list[str] = []
    bus = EventBus([wrapping("outer", log)])
    Engine(events=Shop, bus=bus, algorithms=[Noting("algorithm", log)], callbacks=[Watching("callback", log)])
    bus.use(wrapping("inner", log))
    bus.subscribe(lambda _: log.append("subscriber"))

    traces = await bus.publish(Shop.ORDER)

    assert log == ["outer in", "algorithm", "callback", "inner in", "subscriber", "inner out", "outer out"]
    assert [*traces] == ["algorithm/ORDER"]


async def test_rule_3_rest_of_the_chain_runs_beside_async_callbacks() -> None:
    """A callback and a middleware behind the engine can wait for each other."""
    middle, callback = anyio.Event(), anyio.Event()

    class Meets(Callback[Any]):
        async def order(self, state: Any, logger: Any) -> None:
            callback.set()
            await middle.wait()

    async def meets(envelope: Envelope, call_next: CallNext) -> Traces:
        middle.set()
        await callback.wait()
        return await call_next(envelope)

    engine = Engine(events=Shop, callbacks=[Meets()])
    engine.bus.use(meets)

    with anyio.fail_after(5):
        await engine.run_event(Shop.ORDER)

    assert (middle.is_set(), callback.is_set()) == (True, True)


async def test_rule_3_participants_live_from_the_state() -> None:
    """They are the state's own lists, read anew on every event."""
    log: list[str] = []

    class Holder:
        algorithms: ClassVar[list[Any]] = [Noting("a", log)]
        callbacks: ClassVar[list[Any]] = [Watching("c", log)]

    holder = Holder()
    engine = Engine(holder, events=Shop)

    await engine.run_event(Shop.ORDER)
    holder.algorithms.append(Noting("b", log))
    holder.callbacks.clear()
    await engine.run_event(Shop.ORDER)
    holder.algorithms[:] = [Noting("d", log)]
    await engine.run_event(Shop.ORDER)

    assert log == ["a", "c", "a", "b", "d"]


async def test_rule_3_participants_twice_is_an_error() -> None:
    """From the state and from the arguments at once is a ConfigurationError, whichever kind, even if it comes late."""

    class Holder:
        algorithms: ClassVar[list[Any]] = []
        callbacks: ClassVar[list[Any]] = []

    with pytest.raises(ConfigurationError, match="algorithms were given to the engine, and its state has algorithms"):
        Engine(Holder(), algorithms=[Noting("a", [])])
    with pytest.raises(ConfigurationError, match=r"callbacks were given .* pass them in one place"):
        Engine(Holder(), callbacks=[Watching("c", [])])

    late: Engine[Any] = Engine(Record(), events=Shop, algorithms=[Noting("a", [])])
    late.state = Holder()
    with pytest.raises(ConfigurationError, match="algorithms were given"):
        await late.run_event(Shop.ORDER)


async def test_rule_3_a_record_brings_no_participants() -> None:
    """The state passed to one event may have lists of those names; they are its own affair."""
    log: list[str] = []

    class Rec:
        callbacks = ("not", "ours")
        algorithms = ("nor", "these")

    engine = Engine(events=Shop, algorithms=[Noting("a", log)])

    await engine.run_event(Shop.ORDER, Rec())

    assert log == ["a"]


# ------------------------------------------------------------------------------------------------------ subscriptions


async def test_rule_3_subscribers_are_called_with_one_envelope() -> None:
    """Plain and async ones, with everything that was published."""
    state, got = Record(), list[Envelope]()
    bus = EventBus()

    async def later(envelope: Envelope) -> None:
        await anyio.lowlevel.checkpoint()
        got.append(envelope)

    bus.subscribe(got.append, Shop.ORDER)
    bus.subscribe(later, Shop.ORDER)

    await bus.publish(Shop.ORDER, {"n": 1}, state=state, key="k")

    assert got[0] is got[1]
    assert (got[0].event, got[0].payload, got[0].state, got[0].key) == (Shop.ORDER, {"n": 1}, state, "k")


async def test_rule_3_a_plain_subscriber_may_return_an_awaitable() -> None:
    """Which is awaited, whatever the one before it has raised and the ones after it do."""
    log: list[str] = []
    bus = EventBus()

    async def later() -> None:
        await anyio.lowlevel.checkpoint()
        log.append("awaited")

    def fail(envelope: Envelope) -> None:
        raise KeyError("bad")

    bus.subscribe(lambda _: later(), Shop.ORDER)
    bus.subscribe(lambda _: log.append("plain"), Shop.ORDER)
    await bus.publish(Shop.ORDER)
    first = bus.subscribe(fail, Till.ORDER)
    bus.subscribe(lambda _: later(), Till.ORDER)
    with pytest.raises(CallbackErrors) as caught:
        await bus.publish(Till.ORDER)
    first.cancel()
    await bus.publish(Till.ORDER)

    assert [type(error) for error in caught.value.exceptions] == [KeyError]
    assert sorted(log) == ["awaited", "awaited", "awaited", "plain"]


async def test_rule_3_no_events_means_all_of_them() -> None:
    """Otherwise those named only, a member or a name of a vocabulary on the bus; members are told by identity."""
    every, some = list[EventName](), list[EventName]()
    bus = EventBus()
    Engine(events=Till, bus=bus)
    Engine(events=Shop, bus=bus)
    bus.subscribe(lambda envelope: every.append(envelope.event))
    bus.subscribe(lambda envelope: some.append(envelope.event), "before_pay", Till.ORDER, "OPENED")

    for event in (Shop.ORDER, Till.ORDER, Shop.BEFORE_PAY, Shop.AFTER_PAY, Till.OPENED):
        await bus.publish(event)

    assert every == [Shop.ORDER, Till.ORDER, Shop.BEFORE_PAY, Shop.AFTER_PAY, Till.OPENED]
    assert some == [Till.ORDER, Shop.BEFORE_PAY, Till.OPENED]


async def test_rule_3_a_subscriber_that_raises_counts_as_a_callback() -> None:
    """It comes in the same group, after the engine's callbacks, and keeps nobody back. Without an engine, too."""
    log: list[str] = []

    class Fails(Callback[Any]):
        async def order(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            raise ValueError("callback")

    def fails(envelope: Envelope) -> None:
        raise KeyError("subscriber")

    engine = Engine(events=Shop, callbacks=[Fails()])
    alone = EventBus()
    for bus in (engine.bus, alone):
        bus.subscribe(fails)
        bus.subscribe(lambda _: log.append("next"))

    with pytest.raises(CallbackErrors) as beside:
        await engine.run_event(Shop.ORDER)
    with pytest.raises(CallbackErrors) as by_itself:
        await alone.publish(Shop.ORDER)

    assert [type(error) for error in beside.value.exceptions] == [ValueError, KeyError]
    assert [error.__notes__ for error in by_itself.value.exceptions] == [["in callback fails on ORDER"]]
    assert log == ["next", "next"]


async def test_rule_3_once() -> None:
    """The subscription is dropped as its first event comes, so that a nested one does not see it either."""
    seen: list[EventName] = []
    bus = EventBus()

    async def nested(envelope: Envelope) -> None:
        seen.append(envelope.event)
        await bus.publish(Shop.ORDER, state=envelope.state)

    bus.subscribe(nested, Shop.ORDER, once=True)

    await bus.publish(Shop.AFTER_PAY, state=1)
    await bus.publish(Shop.ORDER, state=1)
    await bus.publish(Shop.ORDER, state=1)

    assert seen == [Shop.ORDER]


async def test_rule_3_when() -> None:
    """A predicate that is false skips the event and keeps a `once` waiting for its own."""
    seen: list[int] = []
    bus = EventBus()
    bus.subscribe(lambda envelope: seen.append(envelope.payload), when=lambda envelope: envelope.payload > 1, once=True)

    for payload in range(4):
        await bus.publish(Shop.ORDER, payload)

    assert seen == [2]


async def test_rule_3_when_that_raises_is_the_subscribers_failure() -> None:
    """It counts like the handler's own, and keeps neither callbacks nor other subscribers back."""
    log: list[str] = []
    engine = Engine(events=Shop, callbacks=[Watching("callback", log)])
    engine.bus.subscribe(lambda _: log.append("never"), when=lambda envelope: bool(1 // envelope.payload))
    engine.bus.subscribe(lambda _: log.append("other"))

    with pytest.raises(CallbackErrors) as caught:
        await engine.bus.publish(Shop.ORDER, 0)

    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    assert log == ["callback", "other"]


async def test_rule_3_subscribing_during_dispatch() -> None:
    """Who subscribes or cancels inside a handler changes the next event, not the one under way."""
    log: list[str] = []
    bus = EventBus()

    def first(envelope: Envelope) -> None:
        log.append("first")
        second.cancel()
        second.cancel()
        bus.subscribe(lambda _: log.append("third"), once=True)

    bus.subscribe(first, once=True)
    second = bus.subscribe(lambda _: log.append("second"))

    await bus.publish(Shop.ORDER)
    await bus.publish(Shop.ORDER)

    assert log == ["first", "second", "third"]


async def test_rule_3_subscription_as_context_manager() -> None:
    """It ends with the block."""
    seen: list[Envelope] = []
    bus = EventBus()

    with bus.subscribe(seen.append) as subscription:
        await bus.publish(Shop.ORDER)
    await bus.publish(Shop.ORDER)

    assert len(seen) == 1
    assert subscription.events == ()


@pytest.mark.parametrize("handler", [None, "print", Record, lambda: None, lambda a, b: None])
def test_rule_3_subscribe_refuses_what_is_no_handler(handler: Any) -> None:
    """It has to be a function of one argument."""
    with pytest.raises(HandlerTypeError, match="is no handler; it has to be a function of one Envelope"):
        EventBus().subscribe(handler)


@pytest.mark.parametrize("when", [True, lambda: True, AsyncMock()])
def test_rule_3_subscribe_refuses_what_is_no_predicate(when: Any) -> None:
    """It has to be a plain function of one argument."""
    with pytest.raises(HandlerTypeError, match=r"when=.* has to be a plain function \(envelope\) -> bool"):
        EventBus().subscribe(print, when=when)


def test_rule_3_names_of_events_need_a_vocabulary() -> None:
    """A name is looked up in the engines of the bus; the nearest are named, and where nobody can tell, the cure."""
    bus = EventBus([wrapping("no engine", [])])
    with pytest.raises(UnknownEventError, match="no engine whose vocabulary could tell what it means"):
        bus.subscribe(print, "order")

    Engine(events=Shop, bus=bus)
    Engine(events=Till, bus=bus)
    with pytest.raises(UnknownEventError, match="did you mean ORDER") as caught:
        bus.subscribe(print, "ordr")

    assert caught.value.nearest == ("ORDER",)


@pytest.mark.parametrize("event", [None, 3, Shop])
async def test_rule_3_publish_refuses_what_is_no_event(event: Any) -> None:
    """It has to be a member, or a name."""
    with pytest.raises(UnknownEventError, match="is no event; publish a member of an EventName subclass"):
        await EventBus().publish(event)


async def test_rule_3_a_key_has_to_be_hashable() -> None:
    """A list cannot name a lane."""
    with pytest.raises(ConfigurationError, match=r"key=\[1\] cannot name a lane"):
        await EventBus().publish(Shop.ORDER, key=[1])  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- expect


async def test_rule_3_expect() -> None:
    """It returns the next such event, and leaves no subscription behind."""
    bus = EventBus()
    Engine(events=Shop, bus=bus)
    caught: list[Envelope] = []

    async def wait() -> None:
        caught.append(await bus.expect("order", timeout=5))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await bus.publish(Shop.AFTER_PAY, 1)
        await bus.publish(Shop.ORDER, 2)
        await bus.publish(Shop.ORDER, 3)

    assert [envelope.payload for envelope in caught] == [2]
    assert bus._subscriptions == ()


async def test_rule_3_expect_times_out() -> None:
    """It says what it waited for, and leaves no subscription behind."""
    bus = EventBus()

    with pytest.raises(TimeoutError, match=r"ORDER was not published within 0\.01 s"):
        await bus.expect(Shop.ORDER, timeout=0.01)

    assert bus._subscriptions == ()


# ----------------------------------------------------------------------------------------------------------- envelopes


async def test_rule_3_envelope_is_frozen() -> None:
    """Nothing of it can be set or deleted."""
    envelope = Envelope(Shop.ORDER, payload=1)

    with pytest.raises(AttributeError, match="is frozen; publish another event instead of setting 'payload'"):
        envelope.payload = 2
    with pytest.raises(AttributeError, match="an Envelope is frozen; 'payload' cannot be deleted"):
        del envelope.payload

    assert envelope.payload == 1
    assert repr(envelope) == "<Envelope Shop.ORDER>"


async def test_rule_3_envelope_has_id_time_and_source() -> None:
    """The id is made once and is its own; the time is aware; the source is None for what is published here."""
    one, other = Envelope(Shop.ORDER), Envelope(Shop.ORDER, source="queue://orders")

    assert one.id == one.id != other.id
    assert len(bytes.fromhex(one.id)) == 16
    assert one.time.tzinfo is not None
    assert (one.source, other.source) == (None, "queue://orders")


async def test_rule_3_envelope_carries_the_traceparent() -> None:
    """In a trace it is the W3C header of the span it is read under; outside any it is None."""
    provider = TracerProvider(id_generator=PrivateIdGenerator())
    engine = Engine(events=Shop, tracer_provider=provider)
    seen: list[str | None] = []
    engine.bus.subscribe(lambda envelope: seen.append(envelope.traceparent))
    outside = Envelope(Shop.ORDER)

    with provider.get_tracer("test").start_as_current_span("caller") as span:
        await engine.run_event(Shop.ORDER)

    assert outside.traceparent is None
    assert seen[0] is not None
    version, trace_id, _, flags = seen[0].split("-")
    assert (version, int(trace_id, 16), int(flags, 16) & 1) == ("00", span.get_span_context().trace_id, 1)


async def test_rule_3_current_envelope() -> None:
    """Whatever runs inside a handler can ask for it; a nested event has its own; a task that outlives both has none."""
    bus = EventBus()
    seen: list[Any] = []
    done = anyio.Event()

    async def outlive() -> None:
        await done.wait()
        seen.append(current_envelope())

    async with anyio.create_task_group() as group:

        async def handler(envelope: Envelope) -> None:
            seen.append(current_envelope() is envelope)
            if envelope.event is Shop.ORDER:
                await bus.publish(Shop.AFTER_PAY)
                seen.append(current_envelope() is envelope)
                group.start_soon(outlive)

        bus.subscribe(handler)
        await bus.publish(Shop.ORDER)
        seen.append(current_envelope())
        done.set()

    assert seen == [True, True, True, None, None]


@pytest.mark.parametrize("behind", [False, True])
async def test_rule_3_the_envelope_is_one_and_says_what_was_published(behind: bool) -> None:
    """Whoever asks gets the same, with the time of the publishing; the engine's own state is not the event's."""
    seen: list[Envelope | None] = []
    states: list[Any] = []

    async def middleware(envelope: Envelope, call_next: CallNext) -> Traces:
        return await call_next(envelope)

    class Asking(Callback[Any]):
        def order(self, state: Any, logger: Any) -> None:
            seen.append(current_envelope())
            states.append(state)

    bus = EventBus([middleware] if behind else [])
    record = Record()
    bus.use(Engine(record, callbacks=[Asking(), Asking()], events=Shop))
    bus.subscribe(seen.append)
    before = time_ns()

    await bus.publish(Shop.ORDER, 7)

    first = seen[0]
    assert first is not None
    assert all(envelope is first for envelope in seen)
    assert len(seen) == 3
    assert states == [record, record]
    assert (first.event, first.payload, first.state, first.key) == (Shop.ORDER, 7, None, None)
    assert before <= first.time_ns <= time_ns()


async def test_rule_3_handlers_of_many_shapes() -> None:
    """Partials, callable objects, sync and async mocks are called by what they are."""

    class AsyncCallable:
        async def __call__(self, envelope: Envelope) -> None:
            seen.append("async object")

    seen: list[str] = []
    bus = EventBus()
    bus.subscribe(partial(lambda text, envelope: seen.append(text), "partial"))
    bus.subscribe(AsyncCallable())
    mock, async_mock = Mock(), AsyncMock()
    bus.subscribe(mock)
    bus.subscribe(async_mock)

    await bus.publish(Shop.ORDER)

    assert seen == ["partial", "async object"]
    mock.assert_called_once()
    async_mock.assert_awaited_once()


async def test_rule_3_event_of_the_training_vocabulary() -> None:
    """The bus knows no vocabulary of its own: `Event` is one like any other."""
    seen: list[Envelope] = []
    bus = EventBus()
    bus.subscribe(seen.append, Event.INIT)

    await bus.publish(Event.INIT)

    assert [envelope.event for envelope in seen] == [Event.INIT]


async def test_rule_3_an_envelope_keeps_the_traceparent_it_was_first_read_under() -> None:
    """Whoever sends it on later, from another span, still names the one it belongs to."""
    tracer = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False).get_tracer("test")
    envelope = Envelope(Event.INIT)
    with tracer.start_as_current_span("first"):
        first = envelope.traceparent

    with tracer.start_as_current_span("second"):
        assert envelope.traceparent == first
    assert first is not None


async def test_who_subscribes_while_another_thread_looks_for_subscribers_is_heard() -> None:
    """A trainer's events are handled on its own thread: what that looks up must not outlive what it was made from."""
    bus, log = EventBus(), list[str]()

    class LookedAt(tuple[EventName, ...]):
        __slots__ = ()

        def __iter__(self) -> Any:
            if not log:
                log.append("looked at")
                bus.subscribe(lambda _: log.append("second"), Shop.ORDER)
            return super().__iter__()

    first = bus.subscribe(lambda _: log.append("first"), Shop.ORDER)
    first.events = LookedAt(first.events)
    for _ in range(2):
        await bus.publish(Shop.ORDER)

    assert log == ["looked at", "first", "first", "second"]
