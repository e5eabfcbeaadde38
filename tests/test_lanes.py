"""Lanes: what shares a state or a key is handled one at a time, in the order of its publishing; nothing else waits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from eventbus_engine import Callback, CallbackErrors, DeadlockError, Engine, Envelope, EventBus, EventName, algorithm
from eventbus_engine._steps import without_loop
from eventbus_engine.envelope import current
from eventbus_engine.lanes import Dispatch

pytestmark = pytest.mark.anyio


@pytest.fixture(
    params=[("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})], ids=["asyncio", "uvloop", "trio"]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Lanes are all about who is woken when, so uvloop takes part."""
    return request.param


async def settle() -> None:
    """Let every task go on until it waits for something; anyio's own way takes a tenth of a second."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


class Flow(EventName):
    """A vocabulary."""

    STEP = "step"
    NOTE = "note"


class Record:
    """A state."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Gate:
    """A handler that notes who comes in, waits until it is let through, and notes who goes out."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: dict[Any, anyio.Event] = {}

    async def __call__(self, envelope: Envelope) -> None:
        """Take one envelope."""
        self.log.append(f"{envelope.payload} in")
        if envelope.payload in self.open:
            await self.open[envelope.payload].wait()
        self.log.append(f"{envelope.payload} out")


class Paired(EventName):
    """A vocabulary with a pair."""

    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"


class Through(Callback[Any]):
    """Sends every first half through a gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    async def before_write(self, state: Any, logger: Any) -> None:
        """Wait there."""
        await self.gate(Envelope(Paired.BEFORE_WRITE, state))


async def publish_in_order(
    group: TaskGroup, publish: Callable[..., Awaitable[Any]], *payloads: Any, **where: Any
) -> None:
    """Publish each in a task of its own, one after another, whether they get through or not."""

    async def one(payload: Any) -> None:
        await publish(Flow.STEP, payload, **where)

    for payload in payloads:
        group.start_soon(one, payload)
        await settle()


def failing_with(publish: Callable[[Envelope], Awaitable[Any]], errors: list[BaseException]) -> Any:
    """A handler that keeps what `publish` raises."""

    async def handler(envelope: Envelope) -> None:
        try:
            await publish(envelope)
        except DeadlockError as error:
            errors.append(error)
            raise

    return handler


@pytest.mark.parametrize("where", [{"state": Record()}, {"key": "k"}, {"state": Record(), "key": 7}])
async def test_rule_4_9_one_at_a_time_in_the_order_of_publishing(where: dict[str, Any]) -> None:
    """Events of one state, or of one key, wait for each other."""
    bus, gate = EventBus(), Gate()
    bus.subscribe(gate)
    gate.open[1] = anyio.Event()

    before: list[str] = []
    async with anyio.create_task_group() as group:
        await publish_in_order(group, bus.publish, 1, 2, 3, 4, **where)
        before = list(gate.log)
        gate.open[1].set()

    assert before == ["1 in"]
    assert gate.log == ["1 in", "1 out", "2 in", "2 out", "3 in", "3 out", "4 in", "4 out"]


@pytest.mark.parametrize("how", ["run_event", "pair"])
async def test_rule_4_9_an_engine_takes_keys(how: str) -> None:
    """Two records that are one small number are of one lane, unless each has a key; two that share a key wait."""
    gate = Gate()
    engine = Engine(events=Paired, callbacks=[Through(gate)])

    async def handle(number: int, key: str | None) -> None:
        if how == "run_event":
            await engine.run_event(Paired.BEFORE_WRITE, number, key=key)
        else:
            async with engine.pair(Paired.BEFORE_WRITE, number, key=key):
                pass

    counts: list[int] = []
    for one, other in ((None, None), ("a", "b"), ("a", "a")):
        gate.log.clear()
        gate.open[7] = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(handle, 7, one)
            await settle()
            group.start_soon(handle, 7, other)
            await settle()
            counts.append(len(gate.log))
            gate.open[7].set()

    assert counts == [1, 2, 1]


async def test_rule_4_9_both_halves_of_a_pair_are_of_its_key() -> None:
    """The second too: nothing of the same key gets in between its handlers."""
    keys: list[Any] = []
    engine = Engine(events=Paired)
    engine.bus.subscribe(lambda envelope: keys.append((envelope.event, envelope.key)))

    async with engine.pair(Paired.BEFORE_WRITE, key="a"):
        pass

    assert keys == [(Paired.BEFORE_WRITE, "a"), (Paired.AFTER_WRITE, "a")]


async def test_rule_4_9_different_lanes_run_concurrently() -> None:
    """All of them are in before the first is out, equal states included: what counts is identity."""
    bus, gate = EventBus(), Gate()
    bus.subscribe(gate)
    states = [Record(), Record(), [], []]
    for i in range(len(states)):
        gate.open[i] = anyio.Event()

    inside = lanes = -1
    async with anyio.create_task_group() as group:
        for i, state in enumerate(states):
            await publish_in_order(group, bus.publish, i, state=state)
        inside, lanes = len(gate.log), len(bus._lanes)
        for event in gate.open.values():
            event.set()

    assert (inside, lanes) == (4, 4)


async def test_rule_4_9_a_key_beats_the_state() -> None:
    """Two states under one key wait for each other; one state under two keys does not; equal keys are one."""
    bus, gate = EventBus(), Gate()
    bus.subscribe(gate)
    one, other = Record(), Record()
    for i in range(3):
        gate.open[i] = anyio.Event()

    before: list[str] = []
    async with anyio.create_task_group() as group:
        await publish_in_order(group, bus.publish, 0, state=one, key=("a", 1))
        await publish_in_order(group, bus.publish, 1, state=other, key=("a", 1))
        await publish_in_order(group, bus.publish, 2, state=one, key=("b", 1))
        before = list(gate.log)
        for event in gate.open.values():
            event.set()

    assert before == ["0 in", "2 in"]


async def test_rule_4_9_neither_state_nor_key_is_no_lane() -> None:
    """Such events wait for nobody, and take no lane."""
    bus, gate = EventBus(), Gate()
    bus.subscribe(gate)
    gate.open[1] = anyio.Event()

    before, lanes = list[str](), -1
    async with anyio.create_task_group() as group:
        await publish_in_order(group, bus.publish, 1, 2)
        before, lanes = list(gate.log), len(bus._lanes)
        gate.open[1].set()

    assert before == ["1 in", "2 in", "2 out"]
    assert lanes == 0


async def test_rule_4_9_lanes_vanish_when_idle() -> None:
    """After success, failure and cancellation no lane is left, and nothing keeps the state."""
    bus = EventBus()

    async def handler(envelope: Envelope) -> None:
        if envelope.payload == "fail":
            raise ValueError
        if envelope.payload == "hang":
            await anyio.sleep_forever()

    bus.subscribe(handler)
    state = Record()
    reference = weakref.ref(state)

    await bus.publish(Flow.STEP, state=state)
    with pytest.raises(CallbackErrors):
        await bus.publish(Flow.STEP, "fail", state=state)
    async with anyio.create_task_group() as group:
        await publish_in_order(group, bus.publish, "hang", "waits", state=state)
        group.cancel_scope.cancel()
    del state
    gc.collect()

    assert len(bus._lanes) == 0
    assert reference() is None


async def test_rule_4_9_a_thousand_states_leave_nothing() -> None:
    """Each in its own lane, all at once."""
    bus = EventBus()
    count = 0

    async def handler(envelope: Envelope) -> None:
        nonlocal count
        await anyio.lowlevel.checkpoint()
        count += 1

    bus.subscribe(handler)
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(lambda: bus.publish(Flow.STEP, state=Record()))

    assert (count, len(bus._lanes)) == (1000, 0)


# ------------------------------------------------------------------------------------------------------------- nesting


async def test_rule_4_9_nested_events_run_at_once() -> None:
    """Published from a handler of the same lane they do not wait, however deep, nor for those in the queue."""
    bus = EventBus()
    log: list[Any] = []
    state = Record()

    async def handler(envelope: Envelope) -> None:
        log.append(envelope.payload)
        if envelope.payload == 0:
            await queued.wait()
        if envelope.payload < 3:
            await bus.publish(Flow.STEP, envelope.payload + 1, state=state)

    bus.subscribe(handler)
    queued = anyio.Event()

    async with anyio.create_task_group() as group:
        await publish_in_order(group, bus.publish, 0, 10, state=state)
        queued.set()

    assert log == [0, 1, 2, 3, 10]


async def test_rule_4_9_nested_through_another_lane() -> None:
    """A handler of A publishes on B, whose handler publishes on A again: it descends from A, so it runs at once."""
    bus = EventBus()
    a, b = Record("a"), Record("b")
    log: list[Any] = []

    async def handler(envelope: Envelope) -> None:
        log.append((envelope.payload, envelope.state))
        if envelope.payload < 2:
            await bus.publish(Flow.STEP, envelope.payload + 1, state=b if envelope.state is a else a)

    bus.subscribe(handler)
    with anyio.fail_after(5):
        await bus.publish(Flow.STEP, 0, state=a)

    assert log == [(0, a), (1, b), (2, a)]


async def test_rule_4_9_nested_through_another_bus() -> None:
    """Two buses have lanes of their own, and what nests on one does not on the other."""
    outer, inner = EventBus(), EventBus()
    state = Record()
    log: list[str] = []

    async def on_outer(envelope: Envelope) -> None:
        log.append("outer")
        if envelope.payload is None:
            await inner.publish(Flow.STEP, state=state)

    async def on_inner(envelope: Envelope) -> None:
        log.append("inner")
        await outer.publish(Flow.STEP, "nested", state=state)

    outer.subscribe(on_outer)
    inner.subscribe(on_inner)
    with anyio.fail_after(5):
        await outer.publish(Flow.STEP, state=state)

    assert log == ["outer", "inner", "outer"]


async def test_rule_4_9_a_task_that_outlives_its_event_queues() -> None:
    """While the event runs, what the task publishes nests; afterwards it waits behind the others."""
    bus, gate = EventBus(), Gate()
    state = Record()
    over, published = anyio.Event(), anyio.Event()

    async def task() -> None:
        await bus.publish(Flow.NOTE, "while it runs", state=state)
        published.set()
        await over.wait()
        await bus.publish(Flow.NOTE, "afterwards", state=state)

    before: list[str] = []
    async with anyio.create_task_group() as group:

        async def spawn(envelope: Envelope) -> None:
            group.start_soon(task)
            await published.wait()

        bus.subscribe(spawn, Flow.STEP, once=True)
        bus.subscribe(gate)
        gate.open["second"] = anyio.Event()
        with anyio.fail_after(5):
            await bus.publish(Flow.STEP, "first", state=state)
        await publish_in_order(group, bus.publish, "second", state=state)
        over.set()
        await settle()
        before = list(gate.log)
        gate.open["second"].set()

    assert before[-1] == "second in"
    assert gate.log[-3:] == ["second out", "afterwards in", "afterwards out"]


async def test_rule_4_9_a_nested_event_that_outlives_its_parent_keeps_the_lane() -> None:
    """The next in the queue waits for it, too: one at a time holds whoever published what."""
    bus, gate = EventBus(), Gate()
    state = Record()
    gate.open["nested"] = anyio.Event()

    before: list[str] = []
    async with anyio.create_task_group() as group:

        async def spawn(envelope: Envelope) -> None:
            await publish_in_order(group, bus.publish, "nested", state=state)

        bus.subscribe(spawn, Flow.NOTE)
        bus.subscribe(gate, Flow.STEP)
        await bus.publish(Flow.NOTE, state=state)
        await publish_in_order(group, bus.publish, "next", state=state)
        before = list(gate.log)
        gate.open["nested"].set()

    assert before == ["nested in"]
    assert gate.log == ["nested in", "nested out", "next in", "next out"]
    assert len(bus._lanes) == 0


async def test_rule_4_9_a_chain_of_tasks_keeps_nothing() -> None:
    """A task that publishes from a task that published from a task: what is done is forgotten, and found fast."""
    bus = EventBus()
    states: list[weakref.ref[Record]] = []

    async with anyio.create_task_group() as group:

        async def handler(envelope: Envelope) -> None:
            await anyio.lowlevel.checkpoint()
            state = Record()
            states.append(weakref.ref(state))
            if envelope.payload:
                group.start_soon(lambda: bus.publish(Flow.STEP, envelope.payload - 1, state=state))

        bus.subscribe(handler)
        await bus.publish(Flow.STEP, 200)

        async def look() -> None:
            gc.collect()

        group.start_soon(look)

    alive = [reference for reference in states if reference() is not None]
    assert len(states) == 201
    assert len(alive) <= 2


# -------------------------------------------------------------------------------------------------------- cancellation


async def test_rule_4_9_a_cancelled_waiter_leaves_the_lane_in_order() -> None:
    """The second of three gives up in the queue: the third comes after the first, and nothing is left behind."""
    bus, gate = EventBus(), Gate()
    bus.subscribe(gate)
    state = Record()
    gate.open[1] = anyio.Event()
    scope = anyio.CancelScope()

    async def give_up() -> None:
        with scope:
            await bus.publish(Flow.STEP, 2, state=state)

    async with anyio.create_task_group() as group:
        await publish_in_order(group, bus.publish, 1, state=state)
        group.start_soon(give_up)
        await settle()
        await publish_in_order(group, bus.publish, 3, state=state)
        scope.cancel()
        await settle()
        gate.open[1].set()

    assert gate.log == ["1 in", "1 out", "3 in", "3 out"]
    assert len(bus._lanes) == 0


async def test_rule_4_9_a_waiter_cancelled_as_its_turn_comes_hands_it_on() -> None:
    """The lane is granted, and the waiter cancelled before it has woken up: the next one gets the lane all the same."""
    bus, gate = EventBus(), Gate()
    bus.subscribe(gate)
    state = Record()
    scope = anyio.CancelScope()
    gate.open = {1: anyio.Event(), 2: anyio.Event()}

    async def first() -> None:
        await bus.publish(Flow.STEP, 1, state=state)
        scope.cancel()  # the lane has just been granted to the second

    async def second() -> None:
        with scope:
            await bus.publish(Flow.STEP, 2, state=state)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(first)
            await settle()
            group.start_soon(second)
            await settle()
            await publish_in_order(group, bus.publish, 3, state=state)
            gate.open[1].set()

    assert gate.log == ["1 in", "1 out", "2 in", "3 in", "3 out"]
    assert len(bus._lanes) == 0


# ----------------------------------------------------------------------------------------------------------- deadlocks


def crossing(bus: EventBus, ring: list[Record], via_group: bool, errors: list[BaseException]) -> None:
    """Let the handler of each state publish on the next one in the ring, all of them at once."""
    inside = {id(state): anyio.Event() for state in ring}

    async def cross(envelope: Envelope) -> None:
        if envelope.event is Flow.NOTE:
            return
        inside[id(envelope.state)].set()
        for event in inside.values():
            await event.wait()
        following = ring[(ring.index(envelope.state) + 1) % len(ring)]
        if not via_group:
            await bus.publish(Flow.NOTE, state=following)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: bus.publish(Flow.NOTE, state=following))

    async def handler(envelope: Envelope) -> None:
        try:
            await cross(envelope)
        except DeadlockError as error:
            errors.append(error)
            raise
        except ExceptionGroup as group:
            errors.extend(group.exceptions)
            raise

    bus.subscribe(handler)


@pytest.mark.parametrize("via_group", [False, True], ids=["own task", "task group"])
@pytest.mark.parametrize("size", [2, 3])
async def test_rule_4_9_a_deadlock_names_its_chain(size: int, via_group: bool) -> None:
    """Two, or three, that wait for each other: whoever closes the circle gets the error, and the others go on."""
    bus = EventBus()
    ring = [Record(name) for name in "abc"[:size]]
    errors: list[BaseException] = []
    outcomes: list[str] = []
    crossing(bus, ring, via_group, errors)

    async def run(state: Record) -> None:
        try:
            await bus.publish(Flow.STEP, state=state)
            outcomes.append("ok")
        except CallbackErrors:
            outcomes.append("failed")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for state in ring:
                group.start_soon(run, state)

    assert sorted(outcomes) == ["failed"] + ["ok"] * (size - 1)
    (error,) = errors
    assert isinstance(error, DeadlockError)
    assert len(error.chain) == size
    assert all(f"STEP of Record at {id(state):#x}" in " ".join(error.chain) for state in ring)
    assert all(" waits for " in step and step in str(error) for step in error.chain)
    assert "would never end" in str(error)
    assert len(bus._lanes) == 0


async def test_rule_4_9_a_deadlock_in_algorithms() -> None:
    """The same with two engines' algorithms, by key: the error comes out of `run_event` as itself."""
    inside = {"a": anyio.Event(), "b": anyio.Event()}
    bus = EventBus()

    @algorithm(Flow.STEP)
    async def cross(event: EventName, state: Any, logger: Any) -> None:
        inside[state].set()
        for each in inside.values():
            await each.wait()
        await bus.publish(Flow.NOTE, key="b" if state == "a" else "a")

    Engine(events=Flow, bus=bus, algorithms=[cross])
    outcomes: list[Any] = []

    async def run(name: str) -> None:
        try:
            await bus.publish(Flow.STEP, state=name, key=name)
            outcomes.append("ok")
        except DeadlockError as error:
            outcomes.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run, "a")
            group.start_soon(run, "b")

    (error,) = [outcome for outcome in outcomes if outcome != "ok"]
    assert len(outcomes) == 2
    assert len(error.chain) == 2
    assert "NOTE of key 'a'" in str(error)
    assert "STEP of key 'b'" in str(error)
    assert [*error.traces] == ["cross/STEP"]


async def test_rule_4_9_a_deadlock_of_middleware() -> None:
    """A middleware that publishes across counts like a handler."""
    inside = {"a": anyio.Event(), "b": anyio.Event()}
    errors: list[DeadlockError] = []

    async def cross(envelope: Envelope, call_next: Any) -> Any:
        if envelope.event is Flow.STEP:
            inside[str(envelope.key)].set()
            for each in inside.values():
                await each.wait()
            await bus.publish(Flow.NOTE, key="b" if envelope.key == "a" else "a")
        return await call_next(envelope)

    bus = EventBus([cross])

    async def run(name: str) -> None:
        try:
            await bus.publish(Flow.STEP, key=name)
        except DeadlockError as error:
            errors.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run, "a")
            group.start_soon(run, "b")

    assert [len(error.chain) for error in errors] == [2]


async def test_rule_4_9_a_deadlock_of_callbacks_that_are_engines_own() -> None:
    """Async callbacks run in tasks of their own; they hold up their event all the same."""
    inside = {"a": anyio.Event(), "b": anyio.Event()}

    class Cross(Callback[Any]):
        async def step(self, state: Any, logger: Any) -> None:
            inside[state.name].set()
            for each in inside.values():
                await each.wait()
            await engine.run_event(Flow.NOTE, b if state is a else a)

        async def note(self, state: Any, logger: Any) -> None: ...

    a, b = Record("a"), Record("b")
    engine = Engine(events=Flow, callbacks=[Cross()])
    errors: list[BaseException] = []

    async def run(state: Record) -> None:
        try:
            await engine.run_event(Flow.STEP, state)
        except CallbackErrors as group:
            errors.extend(group.exceptions)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run, a)
            group.start_soon(run, b)

    assert [type(error) for error in errors] == [DeadlockError]


async def test_rule_4_9_a_nested_event_takes_part_in_a_deadlock() -> None:
    """The event that closes the circle is nested twice; the chain leads through the outer ones all the same."""
    bus = EventBus()
    a, b, c = Record("a"), Record("b"), Record("c")
    b_runs, a_waits = anyio.Event(), anyio.Event()
    errors: list[BaseException] = []

    async def handler(envelope: Envelope) -> None:
        if envelope.payload == "outer":
            await b_runs.wait()
            await bus.publish(Flow.STEP, "inner", state=c)
        elif envelope.payload == "inner":
            a_waits.set()
            await bus.publish(Flow.NOTE, state=b)
        elif envelope.payload == "b":
            b_runs.set()
            await a_waits.wait()
            await settle()
            await bus.publish(Flow.NOTE, state=a)

    bus.subscribe(failing_with(handler, errors))

    async def run(payload: str, state: Record) -> None:
        try:
            await bus.publish(Flow.STEP, payload, state=state)
        except CallbackErrors:
            pass

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run, "outer", a)
            group.start_soon(run, "b", b)

    assert [type(error) for error in errors] == [DeadlockError]


async def test_rule_4_9_publishing_across_without_waiting_is_no_deadlock() -> None:
    """Actors: each handler sends the other a message by a task of an outer group, and is done."""
    bus = EventBus()
    a, b = Record("a"), Record("b")
    log: list[tuple[str, int]] = []
    inside = {id(a): anyio.Event(), id(b): anyio.Event()}

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:

            async def handler(envelope: Envelope) -> None:
                log.append((envelope.state.name, envelope.payload))
                inside[id(envelope.state)].set()
                for each in inside.values():
                    await each.wait()
                if envelope.payload < 3:
                    other = b if envelope.state is a else a
                    group.start_soon(lambda: bus.publish(Flow.STEP, envelope.payload + 1, state=other))
                    await settle()

            bus.subscribe(handler)
            group.start_soon(lambda: bus.publish(Flow.STEP, 0, state=a))
            group.start_soon(lambda: bus.publish(Flow.STEP, 0, state=b))

    assert sorted(log) == [(name, n) for name in "ab" for n in range(4)]
    assert len(bus._lanes) == 0


async def test_rule_4_9_waiting_for_a_busy_lane_is_no_deadlock() -> None:
    """A hundred states, each waiting for the next one's lane, the last one free: they all get through."""
    bus = EventBus()
    states = [Record(str(i)) for i in range(100)]
    inside = [anyio.Event() for _ in states]
    log: list[int] = []

    async def handler(envelope: Envelope) -> None:
        i = envelope.payload
        inside[i].set()
        for each in inside:
            await each.wait()
        if i + 1 < len(states):
            await bus.publish(Flow.NOTE, state=states[i + 1])
        log.append(i)

    bus.subscribe(handler, Flow.STEP)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for i, state in enumerate(states):
                await publish_in_order(group, bus.publish, i, state=state)

    assert log == list(range(99, -1, -1))


async def test_rule_4_9_two_handlers_waiting_for_one_lane_is_no_deadlock() -> None:
    """Who waits is found more than once on the way, by two callbacks of one event, and leads nowhere."""
    bus = EventBus()
    a, b, c = Record("a"), Record("b"), Record("c")
    b_runs, go = anyio.Event(), anyio.Event()
    log: list[str] = []

    async def handler(envelope: Envelope) -> None:
        if envelope.payload == "b":
            b_runs.set()
            await go.wait()
        elif envelope.payload in ("a", "c"):
            await b_runs.wait()
            async with anyio.create_task_group() as group:
                target = b if envelope.payload == "a" else a
                for _ in range(2):
                    group.start_soon(lambda: bus.publish(Flow.NOTE, state=target))
        log.append(f"{envelope.payload} of {envelope.state}")

    bus.subscribe(handler)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            await publish_in_order(group, bus.publish, "b", state=b)
            await publish_in_order(group, bus.publish, "a", state=a)
            await publish_in_order(group, bus.publish, "c", state=c)
            go.set()

    assert log == ["b of b", "None of b", "None of b", "a of a", "None of a", "None of a", "c of c"]


async def test_a_lane_is_held_for_more_than_one_event() -> None:
    """Behind who has it, and before who comes; the events of who holds it nest."""
    bus, record, gate = EventBus(), Record(), Gate()
    bus.subscribe(gate)
    gate.open["first"] = anyio.Event()
    log = gate.log

    async def holder() -> None:
        dispatch = Dispatch.about(Envelope(Flow.STEP, state=record), id(record), bus._lanes)
        await bus._lanes.hold(dispatch)
        log.append("held")
        current.set(dispatch)
        await bus.publish(Flow.STEP, "nested", state=record)
        await settle()
        log.append("left")
        dispatch.running = False
        bus._lanes.leave(dispatch)

    async with anyio.create_task_group() as group:
        for task in (lambda: bus.publish(Flow.STEP, "first", state=record), holder):
            group.start_soon(task)
            await settle()
        group.start_soon(lambda: bus.publish(Flow.STEP, "last", state=record))
        gate.open["first"].set()

    assert log == ["first in", "first out", "held", "nested in", "nested out", "left", "last in", "last out"]
    assert len(bus._lanes) == 0


async def test_who_is_driven_on_a_thread_waits_for_a_lane_on_the_event_loop() -> None:
    """There it may wait; to have to wait is no error, as there is a loop to go back to."""
    bus, record, gate = EventBus(), Record(), Gate()
    bus.subscribe(gate)
    gate.open["first"] = anyio.Event()
    steps = bus.publish(Flow.STEP, "driven", state=record).__await__()

    async def rest() -> None:
        class Rest:
            def __await__(self) -> Any:
                return (yield from steps)

        await Rest()

    def drive() -> None:
        without_loop.around, without_loop.driven = None, True
        steps.send(None)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: bus.publish(Flow.STEP, "first", state=record))
        await settle()
        await anyio.to_thread.run_sync(copy_context().run, drive)
        group.start_soon(rest)
        await settle()
        gate.open["first"].set()

    assert gate.log == ["first in", "first out", "driven in", "driven out"]
