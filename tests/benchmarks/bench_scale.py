"""How cost and memory grow: subscribers, events, lanes in flight and passes.

Each figure is the fastest of a few tries, per unit, so that a straight line shows as the same figure in every row.
Memory is what Python has allocated, by tracemalloc, once the garbage is collected.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import anyio
from ours import algorithms
from tables import Table, cell

from eventbus_engine import Engine, Event, EventBus

Row = tuple[str, float, str, float | None]

EVENT = Event.BATCH_START
TRIES = 5

IN_FLIGHT = "lanes in flight at once"
IN_GROUPS = "as many task groups of anyio"


class Record:
    """A state: its identity is its lane."""


class Ignored:
    """A callback with a hook that does nothing."""

    async def batch_start(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class Turn:
    """A callback that lets the event loop turn once."""

    async def batch_start(self, state: Any, logger: Any) -> None:
        """Let others go on."""
        await anyio.lowlevel.checkpoint()


class Gate:
    """A callback that holds every event until it opens."""

    def __init__(self) -> None:
        self.waiting = 0
        self.opened = anyio.Event()

    async def batch_start(self, state: Any, logger: Any) -> None:
        """Wait."""
        self.waiting += 1
        await self.opened.wait()


def measure(*, full: bool = False) -> Iterator[Row | Table]:
    """The tables, then what is held to a limit.

    Args:
        full: a million events rather than a hundred thousand.
    """
    rows: list[tuple[str, int, float]] = []
    for what, function, sizes in (
        ("subscribers of one event", subscribers, (1, 10, 100, 1000, 10_000)),
        ("callbacks of one event", callbacks, (1, 10, 100, 1000, 10_000)),
        ("events, a lane each", events, (1, 100, 10_000, 1_000_000 if full else 100_000)),
        ("events, 10,000 lanes at once", on_many_lanes, (10_000, 20_000, 50_000)),
        (IN_FLIGHT, in_flight, (1, 10, 100, 1000, 10_000)),
        (IN_GROUPS, in_groups, (1000, 10_000)),
        (f"{IN_FLIGHT}, no collector", without_collector(in_flight), (1000, 10_000)),
        (f"{IN_GROUPS}, no collector", without_collector(in_groups), (1000, 10_000)),
        ("passes over 8 algorithms", passes, (0, 1, 4, 16, 64)),
    ):
        rows += [(what, size, anyio.run(function, size)) for size in sizes]
    yield Table(
        "scale",
        "Cost as it grows",
        ("", "how many", "µs in all", "µs each"),
        [(what, f"{size:,}", cell(taken), cell(taken / max(size, 1))) for what, size, taken in rows],
        {f"{what}: {size}": {"microseconds": taken} for what, size, taken in rows},
    )
    for what in dict.fromkeys(what for what, _, _ in rows):
        *_, (_, some, before), (_, most, after) = [row for row in rows if row[0] == what]
        # A full collection walks all that lives, so that its share grows with the tasks, whoever has made them.
        limit = None if what in {IN_FLIGHT, IN_GROUPS} else 2.0
        yield f"{what}: cost of each, {most:,} over {some:,}", (after / most) / (before / some), "times", limit
    taken = {(what, size): microseconds for what, size, microseconds in rows}
    over = taken[IN_FLIGHT, 10_000] / taken[IN_GROUPS, 10_000]
    yield f"{IN_FLIGHT} over {IN_GROUPS}, 10,000", over, "times", 1.5
    yield from memory()


def tries_for(count: int) -> int:
    """More of what is short, until the interpreter has warmed to it."""
    return max(TRIES, 1000 // count)


async def fastest(function: Callable[[], Awaitable[Any]], tries: int) -> float:
    """Microseconds of the fastest try."""
    best = float("inf")
    gc.collect()
    # What is there already is not walked again for each try's garbage, however much else has been measured before.
    gc.freeze()
    for _ in range(tries):
        started = perf_counter_ns()
        await function()
        best = min(best, (perf_counter_ns() - started) / 1000)
    gc.unfreeze()
    return best


async def subscribers(count: int) -> float:
    """One event to so many plain subscribers."""
    bus = EventBus()
    for _ in range(count):
        bus.subscribe(lambda envelope: None, EVENT)
    return await fastest(partial(bus.publish, EVENT), tries_for(count))


async def callbacks(count: int) -> float:
    """One event to so many async callbacks."""
    engine: Engine[Any] = Engine(Record(), callbacks=[Ignored() for _ in range(count)])
    return await fastest(partial(engine.run_event, EVENT), tries_for(count))


async def events(count: int) -> float:
    """So many events one after another, on up to 10,000 lanes in turn, with a callback and an algorithm."""
    engine: Engine[Any] = Engine(callbacks=[Ignored()], algorithms=algorithms(1))
    states = [Record() for _ in range(min(count, 10_000))]

    async def run() -> None:
        for number in range(count):
            await engine.run_event(EVENT, states[number % len(states)])

    return await fastest(run, 1 if count > 10_000 else tries_for(count))


async def in_flight(count: int) -> float:
    """So many lanes, all inside their handlers before the first may go on."""
    gate = Gate()
    engine: Engine[Any] = Engine(callbacks=[gate])
    states = [Record() for _ in range(count)]

    async def run() -> None:
        gate.waiting, gate.opened = 0, anyio.Event()
        async with anyio.create_task_group() as group:
            for state in states:
                group.start_soon(engine.run_event, EVENT, state)
            while gate.waiting < count:
                await anyio.lowlevel.checkpoint()
            gate.opened.set()

    return await fastest(run, min(tries_for(count), 100) if count < 10_000 else 2)


async def in_groups(count: int) -> float:
    """The same without an engine: so many tasks, each of which waits for one of its own."""
    waiting, opened = 0, anyio.Event()

    async def wait() -> None:
        nonlocal waiting
        waiting += 1
        await opened.wait()

    async def publish() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(wait)

    async def run() -> None:
        nonlocal waiting, opened
        waiting, opened = 0, anyio.Event()
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(publish)
            while waiting < count:
                await anyio.lowlevel.checkpoint()
            opened.set()

    return await fastest(run, min(tries_for(count), 100) if count < 10_000 else 2)


def without_collector(function: Callable[[int], Awaitable[float]]) -> Callable[[int], Awaitable[float]]:
    """The same while nothing collects garbage."""

    async def run(count: int) -> float:
        gc.disable()
        try:
            return await function(count)
        finally:
            gc.enable()

    return run


async def on_many_lanes(count: int) -> float:
    """So many events on 10,000 lanes, each lane with its own publisher, a callback that suspends once."""
    engine: Engine[Any] = Engine(callbacks=[Turn()])
    states = [Record() for _ in range(10_000)]

    async def publish(state: Record) -> None:
        for _ in range(count // len(states)):
            await engine.run_event(EVENT, state)

    async def run() -> None:
        async with anyio.create_task_group() as group:
            for state in states:
                group.start_soon(publish, state)

    return await fastest(run, 1)


async def passes(count: int) -> float:
    """One event with 8 matching algorithms, and so many passes that run on every event besides the built-in ones."""

    def unchanged(found: Sequence[Any], event: Any) -> Sequence[Any]:
        return found

    engine: Engine[Any] = Engine(Record(), [], [partial(unchanged) for _ in range(count)], algorithms=algorithms(8))
    await engine.run_event(EVENT)
    return await fastest(partial(engine.run_event, EVENT), 50)


# ----------------------------------------------------------------------------------------------------------- memory


def memory() -> Iterator[Row]:
    """Bytes per subscription, per lane in flight, and per event and lane once it is done."""
    yield "memory of a subscription", anyio.run(_of_subscriptions, 10_000), "bytes", None
    yield "memory of a lane in flight, its task with it", anyio.run(_of_lanes_in_flight, 1000), "bytes", None
    idle, done = anyio.run(_of_what_is_done, 10_000)
    yield "memory of an idle lane", idle, "bytes", 0
    yield "memory of an event that is done", done, "bytes", 0


def allocated() -> int:
    """Bytes, without garbage."""
    gc.collect()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _of_subscriptions(count: int) -> float:
    bus = EventBus()

    def handler(envelope: Any) -> None: ...

    tracemalloc.start()
    before = allocated()
    for _ in range(count):
        bus.subscribe(handler, EVENT)
    taken = allocated() - before
    tracemalloc.stop()
    return taken / count


async def _of_lanes_in_flight(count: int) -> float:
    gate = Gate()
    engine: Engine[Any] = Engine(callbacks=[gate])
    states = [Record() for _ in range(count)]
    tracemalloc.start()
    before, taken = allocated(), 0
    async with anyio.create_task_group() as group:
        for state in states:
            group.start_soon(engine.run_event, EVENT, state)
        while gate.waiting < count:
            await anyio.lowlevel.checkpoint()
        taken = allocated() - before
        gate.opened.set()
    tracemalloc.stop()
    return taken / count


async def _of_what_is_done(count: int) -> tuple[float, float]:
    """Per lane that has had an event, and per event on one lane, rounded to whole bytes: a few caches are filled."""
    engine: Engine[Any] = Engine(callbacks=[Ignored()], algorithms=algorithms(8))
    states = [Record() for _ in range(count)]
    await engine.run_event(EVENT, states[0])
    tracemalloc.start()
    before = allocated()
    for state in states:
        await engine.run_event(EVENT, state)
    idle = allocated() - before
    before = allocated()
    for _ in range(count):
        await engine.run_event(EVENT, states[0])
    done = allocated() - before
    tracemalloc.stop()
    return max(0, round(idle / count)), max(0, round(done / count))


if __name__ == "__main__":
    for row in measure():
        print(row.text() if isinstance(row, Table) else row)
