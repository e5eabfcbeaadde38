"""`Engine.run_event`: what an event does from end to end. The order of algorithms has tests of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from eventbus_engine import (
    Algorithm,
    Callback,
    ConfigurationError,
    Engine,
    EngineClosedError,
    Envelope,
    Event,
    EventName,
    Logger,
    LoggerDestination,
    Traces,
    UnknownEventError,
    algorithm,
    callback,
    current_envelope,
)

pytestmark = pytest.mark.anyio


class Ingest(EventName):
    """A vocabulary."""

    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"


class Record:
    """A state."""

    def __init__(self) -> None:
        self.row: list[str] = []


async def test_rule_3_run_event_takes_a_member_a_value_or_a_name() -> None:
    """All three mean the same; what means nothing gets the nearest names."""
    seen: list[EventName] = []
    engine = Engine()
    engine.bus.subscribe(lambda envelope: seen.append(envelope.event))

    for event in (Event.BEFORE_LOSS, "before_loss", "BEFORE_LOSS"):
        await engine.run_event(event)
    with pytest.raises(UnknownEventError, match="did you mean BEFORE_LOSS"):
        await engine.run_event("before_los")
    with pytest.raises(UnknownEventError, match="INIT"):
        await engine.run_event("training_start")
    with pytest.raises(UnknownEventError, match=r"Ingest\.BEFORE_WRITE is no event of Event"):
        await engine.run_event(Ingest.BEFORE_WRITE)

    assert seen == [Event.BEFORE_LOSS] * 3


@pytest.mark.parametrize("events", [None, "Ingest", dict, Ingest.BEFORE_WRITE])
def test_rule_3_events_has_to_be_a_vocabulary(events: Any) -> None:
    """A subclass of EventName, not a member of one."""
    with pytest.raises(ConfigurationError, match="is no vocabulary; subclass EventName and pass the class"):
        Engine(events=events)


async def test_rule_3_an_engine_of_nothing() -> None:
    """Without participants and subscribers an event does nothing, and says so."""
    engine = Engine(events=Ingest)

    traces = await engine.run_event(Ingest.BEFORE_WRITE)

    assert traces == {}


async def test_rule_3_handlers_get_event_state_and_logger() -> None:
    """Functions and methods alike, in a vocabulary of one's own; nobody sees None for the logger."""
    seen: list[tuple[str, Any, Any]] = []

    @algorithm(Ingest.BEFORE_WRITE)
    async def clean(event: EventName, record: Record, logger: Any) -> int:
        seen.append((event.value, record, type(logger)))
        return 2

    @callback(Ingest.BEFORE_WRITE)
    async def watch(event: EventName, record: Record, logger: Any) -> None:
        seen.append((event.value, record, type(logger)))

    class Audit(Callback[Record]):
        def before_write(self, state: Record, logger: Any) -> None:
            seen.append(("hook", state, type(logger)))

    record = Record()
    engine = Engine(events=Ingest, algorithms=[clean], callbacks=[watch, Audit()])

    traces = await engine.run_event(Ingest.BEFORE_WRITE, record)
    await engine.run_event(Ingest.AFTER_WRITE, record)

    assert seen == [("before_write", record, Logger), ("before_write", record, Logger), ("hook", record, Logger)]
    assert traces["clean/BEFORE_WRITE"].exit_code == 2


async def test_rule_3_mocks_take_part() -> None:
    """Anything of the right shape is accepted, and called as it would be."""
    plain = Mock(match=Mock(return_value=True), apply=Mock(return_value=1))
    awaited = Mock(match=Mock(return_value=True), apply=AsyncMock(return_value=2))
    hooks = Mock()
    async_hooks = AsyncMock()
    engine = Engine("state", logger=Mock(), algorithms=[plain, awaited], callbacks=[hooks, async_hooks])

    traces = await engine.run_event(Event.EPOCH_START)

    assert [(key, trace.exit_code) for key, trace in traces.items()] == [
        ("mock/EPOCH_START", 1),
        ("mock#2/EPOCH_START", 2),
    ]
    plain.apply.assert_called_once_with(Event.EPOCH_START, "state", engine.logger)
    awaited.apply.assert_awaited_once_with(Event.EPOCH_START, "state", engine.logger)
    hooks.run_event.assert_called_once_with(Event.EPOCH_START, "state", engine.logger)
    async_hooks.run_event.assert_awaited_once_with(Event.EPOCH_START, "state", engine.logger)


async def test_rule_3_the_state_is_changed_in_place() -> None:
    """The record is the state: each algorithm finds what the one before has left, the callbacks what all have."""
    seen: list[list[str]] = []

    def appending(name: str) -> Any:
        @algorithm(Ingest.BEFORE_WRITE, name=name)
        async def append(event: EventName, record: Record, logger: Any) -> None:
            record.row = [*record.row, name]

        return append

    class Audit(Callback[Record]):
        async def before_write(self, state: Record, logger: Any) -> None:
            seen.append(state.row)

    engine = Engine(events=Ingest, algorithms=[appending("a"), appending("b")], callbacks=[Audit()])

    await engine.run_event(Ingest.BEFORE_WRITE, Record())

    assert seen == [["a", "b"]]


async def test_rule_3_the_training_vocabularys_hooks_have_the_names_of_its_values() -> None:
    """One callback with a hook for each of the 40 events gets each of them, once."""
    seen: list[str] = []
    hooks = {event.value: lambda self, state, logger, value=event.value: seen.append(value) for event in Event}
    everything: Any = type("Everything", (Callback,), hooks)()
    engine = Engine(callbacks=[everything])

    for event in Event:
        await engine.run_event(event)

    assert seen == [event.value for event in Event]
    assert len(seen) == 40


# ------------------------------------------------------------------------------------------------------------- offload


async def test_rule_6_3_plain_algorithms_can_run_off_the_loop() -> None:
    """With `offload` set, plain ones run where it runs them, async ones on the loop, in their order; callbacks here."""
    here = threading.get_ident()
    log: list[tuple[str, bool]] = []

    def noting(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            log.append((name, threading.get_ident() == here))

        return note

    class Plain(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        def apply(self, event: EventName, state: Any, logger: Any) -> Any:
            noting("plain")()

    class Async(Plain):
        async def apply(self, event: EventName, state: Any, logger: Any) -> Any:
            noting("async")()

    class Watch(Callback[Any]):
        init = staticmethod(noting("callback"))

    async def offload(function: Callable[[], Any]) -> Any:
        return await anyio.to_thread.run_sync(function)

    engine = Engine(algorithms=[Plain(), Async(), Plain()], callbacks=[Watch()])
    engine.offload = offload

    await engine.run_event(Event.EPOCH_END)
    await engine.run_event(Event.INIT)

    assert log == [
        *[("plain", False), ("async", True), ("plain", False)],
        *[("callback", True), ("plain", False), ("async", True), ("plain", False)],
    ]


async def test_rule_6_3_what_fails_off_the_loop_propagates_as_itself() -> None:
    """With the note and the traces."""

    @algorithm()
    def breaks(event: EventName, state: Any, logger: Any) -> None:
        raise LookupError("off the loop")

    async def offload(function: Callable[[], Any]) -> Any:
        return await anyio.to_thread.run_sync(function)

    engine = Engine(algorithms=[breaks])
    engine.offload = offload

    with pytest.raises(LookupError) as caught:
        await engine.run_event(Event.INIT)

    assert caught.value.__notes__ == ["in algorithm breaks on INIT"]
    assert caught.value.traces["breaks/INIT"].outcome == "failed"  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------- participants, live


async def test_rule_3_participants_that_change_while_an_event_runs() -> None:
    """The event under way keeps those it began with; the next one has the new."""
    log: list[str] = []
    inside, go = anyio.Event(), anyio.Event()

    class Holder:
        def __init__(self) -> None:
            self.callbacks: list[Any] = [Named("old")]
            self.algorithms: list[Any] = [Waits()]

    class Named(Callback[Any]):
        def __init__(self, name: str) -> None:
            self.name = name

        def epoch_end(self, state: Any, logger: Any) -> None:
            log.append(self.name or "")

    class Waits(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            inside.set()
            await go.wait()

    holder = Holder()
    engine = Engine(holder)

    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Event.EPOCH_END)
        await inside.wait()
        holder.callbacks[:] = [Named("new")]
        group.start_soon(engine.run_event, Event.EPOCH_END, object())
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        go.set()

    assert sorted(log) == ["new", "old"]


async def test_rule_3_a_handler_may_change_the_participants() -> None:
    """A callback that takes itself off the state's list is done with this event, and not there at the next."""
    log: list[str] = []

    class Holder:
        callbacks: ClassVar[list[Any]] = []

    class Once(Callback[Any]):
        async def init(self, state: Any, logger: Any) -> None:
            state.callbacks.remove(self)
            await anyio.lowlevel.checkpoint()
            log.append("once")

    class Always(Callback[Any]):
        def init(self, state: Any, logger: Any) -> None:
            log.append("always")

    Holder.callbacks[:] = [Once(), Always()]
    engine = Engine(Holder())

    await engine.run_event(Event.INIT)
    await engine.run_event(Event.INIT)

    assert sorted(log[:2]) == ["always", "once"]
    assert log[2:] == ["always"]


async def test_rule_3_bad_participants_that_come_late_are_refused_on_the_event() -> None:
    """With the same error as at construction; once they are gone, the engine goes on."""

    class Holder:
        algorithms: ClassVar[list[Any]] = []

    holder = Holder()
    engine = Engine(holder)
    holder.algorithms.append(object())

    with pytest.raises(ConfigurationError, match="is no algorithm: it has no callable match"):
        await engine.run_event(Event.INIT)
    holder.algorithms.clear()
    traces = await engine.run_event(Event.INIT)

    assert traces == {}


# ------------------------------------------------------------------------------------------------------------- traces


async def test_rule_4_7_the_traces_are_logged_whatever_happens() -> None:
    """Destinations get them after success and failure alike, and nothing where there is no algorithm."""
    kept: list[Traces] = []

    class Keep(LoggerDestination):
        def log_traces(self, traces: Traces, step: int | None = None) -> None:
            kept.append(traces)

    @algorithm(Event.INIT, Event.FIT_END)
    def sometimes(event: EventName, state: Any, logger: Any) -> None:
        if event is Event.FIT_END:
            raise LookupError

    engine = Engine(algorithms=[sometimes], callbacks=[Keep()])
    silent = Engine(callbacks=[Keep()])

    traces = await engine.run_event(Event.INIT)
    with pytest.raises(LookupError) as caught:
        await engine.run_event(Event.FIT_END)
    await silent.run_event(Event.INIT)

    assert kept == [traces, caught.value.traces]  # type: ignore[attr-defined]


async def test_rule_5_4_many_events_on_many_lanes() -> None:
    """Five hundred records in flight: each one's events in order, algorithms before callbacks, nothing left behind."""
    seen: dict[int, list[str]] = {}

    class Rec:
        def __init__(self, n: int) -> None:
            self.n = n
            seen[n] = []

    @algorithm()
    async def change(event: EventName, record: Rec, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        seen[record.n].append(f"algorithm {event.value}")

    class Watch(Callback[Rec]):
        async def run_event(self, event: EventName, state: Rec, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            assert current_envelope() is not None
            seen[state.n].append(f"callback {event.value}")

    engine = Engine(events=Ingest, algorithms=[change], callbacks=[Watch(), Watch()])

    async def flow(n: int) -> None:
        record = Rec(n)
        async with engine.pair(Ingest.BEFORE_WRITE, record):
            await anyio.lowlevel.checkpoint()

    async with engine, anyio.create_task_group() as group:
        for n in range(500):
            group.start_soon(flow, n)

    one = [f"{kind} {event.value}" for event in Ingest for kind in ("algorithm", "callback", "callback")]
    assert len(seen) == 500
    assert all(log == one for log in seen.values())
    assert (len(engine._active), len(engine.bus._lanes)) == (0, 0)


async def test_rule_1_the_pipeline_program() -> None:
    """The first of the three programs the package is made for, as it stands."""
    log: list[Any] = []

    async def scrub(row: str) -> str:
        await anyio.lowlevel.checkpoint()
        return row.strip()

    class Database:
        async def write(self, row: str) -> None:
            log.append(row)

    class Audit(Callback[Any]):
        async def after_write(self, state: Any, logger: Any) -> None:
            log.append("audited")

    class Rec:
        row = "  dirty "

    @algorithm(Ingest.BEFORE_WRITE)
    async def clean(event: EventName, record: Any, logger: Any) -> None:
        record.row = await scrub(record.row)

    db, rec = Database(), Rec()
    async with Engine(events=Ingest, algorithms=[clean], callbacks=[Audit()]) as engine:  # noqa: SIM117
        async with engine.pair(Ingest.BEFORE_WRITE, rec):
            await db.write(rec.row)

    assert log == ["dirty", "audited"]
    with pytest.raises(EngineClosedError):
        await engine.run_event(Ingest.BEFORE_WRITE, rec)


async def test_rule_6_1_a_coroutine_that_is_dropped_leaves_its_lane() -> None:
    """An event given up without a cancellation, its coroutine closed, frees the lane for the next."""
    engine = Engine(events=Ingest)
    record = Record()

    class Forever:
        def __await__(self) -> Any:
            yield "never sent on"

    async def hang(envelope: Envelope, call_next: Any) -> Traces:
        await Forever()
        return {}

    engine.bus.use(hang)
    coroutine = engine.run_event(Ingest.BEFORE_WRITE, record)
    coroutine.send(None)
    coroutine.close()

    assert (len(engine.bus._lanes), len(engine._active)) == (0, 0)


async def test_participants_that_another_thread_has_looked_at_meanwhile_stay() -> None:
    """Two entries of one callback would each open it."""
    engine: Engine[Any] = Engine(callbacks=[Callback()])
    before = engine._roster.latest

    assert engine._roster._renew() is before
