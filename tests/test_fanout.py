"""Fan-out: callbacks start in order, overlap, and each has a context of its own; algorithms come one after another."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import Algorithm, Callback, CallbackErrors, Engine, Envelope, Event, EventName, LoggerDestination
from eventbus_engine._steps import FirstStep

pytestmark = pytest.mark.anyio


@pytest.fixture(
    params=[("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})], ids=["asyncio", "uvloop", "trio"]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Each loop schedules tasks its own way."""
    return request.param


async def settle() -> None:
    """Let every task go on until it waits for something."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


class Tick(EventName):
    """A vocabulary."""

    TICK = "tick"


class Started(Callback[Any]):
    """An async callback that notes its start, then waits a little."""

    def __init__(self, name: str, log: list[str], checkpoints: int = 1) -> None:
        self.name = name
        self.log = log
        self.checkpoints = checkpoints

    async def tick(self, state: Any, logger: Any) -> None:
        """Note the start."""
        self.log.append(f"{self.name}")
        for _ in range(self.checkpoints):
            await anyio.lowlevel.checkpoint()


class PlainStarted(Started):
    """The same, as a plain function."""

    def tick(self, state: Any, logger: Any) -> None:  # type: ignore[override]
        """Note the start."""
        self.log.append(f"{self.name}")


class Surprise(Started):
    """A plain function that returns an awaitable."""

    def tick(self, state: Any, logger: Any) -> Awaitable[None]:  # type: ignore[override]
        """Note the start."""
        self.log.append(f"{self.name}")
        return anyio.lowlevel.checkpoint()


# --------------------------------------------------------------------------------------------------------- start order


@pytest.mark.parametrize(
    "kinds",
    [
        [Started] * 8,
        [PlainStarted, Started] * 4,
        [Started, Started, PlainStarted, Surprise, Surprise, Started, PlainStarted, Started],
        [Surprise, Started, PlainStarted],
        [PlainStarted, PlainStarted, Surprise, PlainStarted],
        [Surprise],
    ],
    ids=["async", "mixed", "all kinds", "surprise first", "surprise among plain", "surprise"],
)
async def test_rule_4_8_callbacks_start_in_registration_order(kinds: list[type[Started]]) -> None:
    """However they are mixed, and a hundred times over, because trio shuffles the tasks that are ready."""
    log: list[str] = []
    names = [str(i) for i in range(len(kinds))]
    engine = Engine(
        events=Tick, callbacks=[kind(name, log, i % 3) for i, (kind, name) in enumerate(zip(kinds, names, strict=True))]
    )

    for _ in range(100):
        log.clear()
        await engine.run_event(Tick.TICK)
        assert log == names


async def test_rule_4_8_subscribers_start_after_the_callbacks() -> None:
    """They were registered elsewhere; among themselves they keep the order of their subscribing."""
    log: list[str] = []
    engine = Engine(events=Tick, callbacks=[Started("0", log), PlainStarted("1", log)])

    async def later(envelope: Envelope) -> None:
        log.append("2")
        await anyio.lowlevel.checkpoint()

    engine.bus.subscribe(later)
    engine.bus.subscribe(lambda _: log.append("3"))

    for _ in range(50):
        log.clear()
        await engine.run_event(Tick.TICK)
        assert log == ["0", "1", "2", "3"]


async def test_rule_4_8_destinations_start_in_registration_order() -> None:
    """After every callback is done, and all at once."""
    log: list[str] = []

    class Out(LoggerDestination):
        def __init__(self, name: str) -> None:
            self.name = name

        async def tick(self, state: Any, logger: Any) -> None:
            log.append(self.name or "")
            await anyio.lowlevel.checkpoint()

    engine = Engine(events=Tick, callbacks=[Out("2"), Started("0", log, 5), Out("3"), Started("1", log, 1), Out("4")])

    for _ in range(50):
        log.clear()
        await engine.run_event(Tick.TICK)
        assert log == ["0", "1", "2", "3", "4"]


async def test_rule_4_8_init_runs_destinations_callbacks_algorithms() -> None:
    """INIT is the other way round, so that whoever logs at INIT is heard."""
    log: list[str] = []

    class Out(LoggerDestination):
        async def init(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            log.append("destination")

        async def epoch_end(self, state: Any, logger: Any) -> None:
            log.append("destination")

    class Watch(Callback[Any]):
        async def init(self, state: Any, logger: Any) -> None:
            log.append("callback")
            await anyio.lowlevel.checkpoint()

        def epoch_end(self, state: Any, logger: Any) -> None:
            log.append("callback")

    class Change(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            log.append("algorithm")

    engine = Engine(algorithms=[Change()], callbacks=[Watch(), Out()])
    engine.bus.subscribe(lambda _: log.append("subscriber"))

    await engine.run_event(Event.INIT)
    await engine.run_event(Event.EPOCH_END)

    assert log[:4] == ["destination", "callback", "subscriber", "algorithm"]
    assert log[4:] == ["algorithm", "callback", "subscriber", "destination"]


async def test_rule_4_8_no_hook_no_cost() -> None:
    """A callback without a hook for the event is not called, and nothing asynchronous is set up for it."""
    log: list[str] = []

    class Other(Callback[Any]):
        async def fit_end(self, state: Any, logger: Any) -> None:
            log.append("fit_end")

    engine = Engine(callbacks=[Other()])
    coroutine = engine.run_event(Event.INIT)
    with pytest.raises(StopIteration):
        coroutine.send(None)  # it ends without ever suspending

    assert log == []


# ------------------------------------------------------------------------------------------------------------- overlap


async def test_rule_4_8_eight_callbacks_overlap() -> None:
    """Each waits until all eight are inside: one after another they would wait for ever."""
    inside = 0
    everybody = anyio.Event()

    class Meet(Callback[Any]):
        async def tick(self, state: Any, logger: Any) -> None:
            nonlocal inside
            inside += 1
            if inside == 8:
                everybody.set()
            await everybody.wait()

    engine = Engine(events=Tick, callbacks=[Meet() for _ in range(8)])

    with anyio.fail_after(5):
        await engine.run_event(Tick.TICK)

    assert inside == 8


async def test_rule_4_1_eight_algorithms_are_strictly_sequential() -> None:
    """None starts before the one before has returned, however often that one suspends."""
    log: list[str] = []
    inside: set[str] = set()

    class Alone(Algorithm[Any, Any]):
        def __init__(self, name: str) -> None:
            self.name = name

        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            assert not inside
            inside.add(self.name or "")
            for _ in range(3):
                await settle()
            inside.clear()
            log.append(self.name or "")

    engine = Engine(events=Tick, algorithms=[Alone(str(i)) for i in range(8)])

    traces = await engine.run_event(Tick.TICK)

    assert log == [str(i) for i in range(8)]
    assert [trace.order for trace in traces.values()] == list(range(8))


async def test_rule_4_8_callbacks_wait_for_the_algorithms() -> None:
    """The first callback starts when the last algorithm has returned, and the event waits for the last callback."""
    log: list[str] = []

    class Slow(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            await settle()
            log.append("algorithm")

    engine = Engine(events=Tick, algorithms=[Slow()], callbacks=[Started("callback", log, 3)])
    await engine.run_event(Tick.TICK)
    log.append("event")

    assert log == ["algorithm", "callback", "event"]


# ---------------------------------------------------------------------------------------------------------------- open


async def test_rule_4_8_open_once_before_the_first_event() -> None:
    """All callbacks open at once before anything of the first event runs; events of other lanes wait for that."""
    log: list[str] = []
    both = [anyio.Event(), anyio.Event()]

    class Opens(Callback[Any]):
        def __init__(self, i: int) -> None:
            self.i = i

        async def open(self, state: Any, logger: Any) -> None:
            both[self.i].set()
            await both[1 - self.i].wait()
            await settle()
            log.append("open")

        def tick(self, state: Any, logger: Any) -> None:
            log.append("tick")

    class Change(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            log.append("match")
            return False

    engine = Engine(events=Tick, callbacks=[Opens(0), Opens(1)], algorithms=[Change()])

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(engine.run_event, Tick.TICK, object())

    assert log[:2] == ["open", "open"]
    assert sorted(log[2:]) == ["match"] * 3 + ["tick"] * 6


async def test_rule_4_8_a_callback_added_later_opens_before_its_first_event() -> None:
    """Once, however often it leaves and comes back."""
    log: list[str] = []

    class Opens(Callback[Any]):
        def open(self, state: Any, logger: Any) -> None:
            log.append("open")

        def tick(self, state: Any, logger: Any) -> None:
            log.append("tick")

    class Holder:
        callbacks: ClassVar[list[Any]] = []

    late = Opens()
    engine = Engine(Holder(), events=Tick)

    for there in (False, True, False, True):
        Holder.callbacks[:] = [late] if there else []
        await engine.run_event(Tick.TICK)

    assert log == ["open", "tick", "tick"]


async def test_rule_4_8_open_that_fails_is_tried_again() -> None:
    """The callback gets no event unopened: the first fails for it, the second opens it."""
    log: list[str] = []

    class Opens(Callback[Any]):
        async def open(self, state: Any, logger: Any) -> None:
            log.append("open")
            if len(log) == 1:
                raise ConnectionError("not yet")

        def tick(self, state: Any, logger: Any) -> None:
            log.append("tick")

    class Fine(Callback[Any]):
        def open(self, state: Any, logger: Any) -> None:
            log.append("fine")

    engine = Engine(events=Tick, callbacks=[Opens(), Fine()])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Tick.TICK)
    await engine.run_event(Tick.TICK)
    await engine.run_event(Tick.TICK)

    assert [str(error) for error in caught.value.exceptions] == ["not yet"]
    assert log == ["open", "fine", "open", "tick", "tick"]


async def test_rule_4_8_a_cancelled_open_keeps_what_is_open() -> None:
    """The first event is cancelled while one callback still opens: the next event opens only that one again."""
    log: list[str] = []
    slow = anyio.Event()

    class Quick(Callback[Any]):
        async def open(self, state: Any, logger: Any) -> None:
            log.append("quick")

    class Slow(Callback[Any]):
        async def open(self, state: Any, logger: Any) -> None:
            log.append("slow")
            await slow.wait()

    engine = Engine(events=Tick, callbacks=[Quick(), Slow()])

    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Tick.TICK)
        await settle()
        group.cancel_scope.cancel()
    slow.set()
    with anyio.fail_after(5):
        await engine.run_event(Tick.TICK)

    assert log == ["quick", "slow", "slow"]


async def test_rule_4_8_open_may_publish() -> None:
    """What it publishes does not wait for itself: it is handled by who is open already."""
    log: list[str] = []

    class Opens(Callback[Any]):
        async def open(self, state: Any, logger: Any) -> None:
            await engine.run_event(Tick.TICK, "nested")
            log.append("open")

        def tick(self, state: Any, logger: Any) -> None:
            log.append(f"tick {state}")

    class Plain(Callback[Any]):
        def tick(self, state: Any, logger: Any) -> None:
            log.append(f"plain {state}")

    engine = Engine(events=Tick, callbacks=[Opens(), Plain()])

    with anyio.fail_after(5):
        await engine.run_event(Tick.TICK, "outer")

    assert log == ["plain nested", "open", "tick outer", "plain outer"]


# ---------------------------------------------------------------------------------------------------- waiting, stepwise


async def test_rule_5_4_a_shielded_first_step() -> None:
    """Handing on the baton at the first suspension loses neither results nor exceptions, shield included."""
    log: list[str] = []

    class Waits(Callback[Any]):
        async def tick(self, state: Any, logger: Any) -> None:
            with anyio.CancelScope(shield=True):
                await settle()
            log.append("first")
            raise ValueError("late")

    engine = Engine(events=Tick, callbacks=[Waits(), Started("second", log)])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Tick.TICK)

    assert log == ["second", "first"]
    assert [str(error) for error in caught.value.exceptions] == ["late"]


async def test_rule_4_8_first_step_of_any_awaitable() -> None:
    """It says so when something first suspends, once, and not at all if nothing does; the result comes through."""
    told: list[str] = []

    async def at_once() -> int:
        return 1

    async def twice() -> int:
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        return 2

    class Bare:
        """An awaitable whose iterator is no generator."""

        def __await__(self) -> Generator[Any, Any, int]:
            return iter(())  # type: ignore[return-value]

    def tell() -> None:
        told.append("suspended")

    results = [await FirstStep(at_once(), tell), await FirstStep(twice(), tell), await FirstStep(Bare(), tell)]

    assert results == [1, 2, None]
    assert told == ["suspended"]
