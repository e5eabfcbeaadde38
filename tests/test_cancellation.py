"""Cancellation: it reaches what an event runs, is waited for, and hits nobody else."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskStatus

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    Engine,
    Envelope,
    EventBus,
    EventName,
    LoggerDestination,
)
from eventbus_engine.trace import Traces

pytestmark = pytest.mark.anyio


@pytest.fixture(
    params=[("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})], ids=["asyncio", "uvloop", "trio"]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Each loop cancels its own way."""
    return request.param


class Job(EventName):
    """A vocabulary."""

    RUN = "run"
    SUB = "sub"


class Hang(Algorithm[Any, Any]):
    """Says that it has started, waits for ever, takes its time to clean up."""

    def __init__(self, log: list[str], started: anyio.Event) -> None:
        self.log = log
        self.started = started

    def match(self, event: EventName, state: Any) -> bool:
        """Run always."""
        return True

    async def apply(self, event: EventName, state: Any, logger: Any) -> None:
        """Hang."""
        await hang("algorithm", self.log, self.started)


class HangingCallback(Callback[Any]):
    """The same as a callback."""

    def __init__(self, name: str, log: list[str], started: anyio.Event) -> None:
        self.name = name
        self.log = log
        self.started = started

    async def run(self, state: Any, logger: Any) -> None:
        """Hang."""
        await hang(self.name or "", self.log, self.started)


async def hang(name: str, log: list[str], started: anyio.Event) -> None:
    """Wait for ever; the clean-up suspends, too."""
    started.set()
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
        log.append(f"{name} cleaned up")


async def cancel_once_started(engine: Engine[Any], *started: anyio.Event, log: list[str]) -> bool:
    """Run the event in a scope, cancel it once everything is under way; whether the cancellation came out."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                for event in started:
                    await event.wait()
                scope.cancel()

            group.start_soon(cancel)
            try:
                await engine.run_event(Job.RUN, object())
            finally:
                log.append("run_event returned")
    return scope.cancelled_caught


async def test_rule_5_4_cancelling_reaches_an_algorithm_and_waits_for_it() -> None:
    """`run_event` comes back once the algorithm has cleaned up; what follows does not run; its trace says so."""
    log: list[str] = []
    kept: list[Traces] = []
    started = anyio.Event()

    class Keep(LoggerDestination):
        def log_traces(self, traces: Traces, step: int | None = None) -> None:
            kept.append(traces)

    engine = Engine(
        events=Job,
        algorithms=[Hang(log, started), Hang(log, started)],
        callbacks=[HangingCallback("callback", log, started), Keep()],
    )

    cancelled = await cancel_once_started(engine, started, log=log)

    assert cancelled
    assert log == ["algorithm cleaned up", "run_event returned"]
    assert [(trace.outcome, trace.reason) for trace in kept[0].values()] == [
        ("cancelled", ""),
        ("skipped", "not reached"),
    ]
    assert (len(engine._active), len(engine.bus._lanes)) == (0, 0)


async def test_rule_5_4_cancelling_reaches_every_callback_and_waits_for_all() -> None:
    """Callbacks, subscribers and the rest of the chain: nothing is orphaned."""
    log: list[str] = []
    events = [anyio.Event() for _ in range(4)]

    async def middleware(envelope: Envelope, call_next: Any) -> Any:
        await hang("middleware", log, events[2])

    async def subscriber(envelope: Envelope) -> None:
        await hang("subscriber", log, events[3])

    engine = Engine(events=Job, callbacks=[HangingCallback(str(i), log, events[i]) for i in range(2)])
    engine.bus.use(middleware)
    cancelled = [await cancel_once_started(engine, *events[:3], log=log)]
    plain = Engine(events=Job, callbacks=[HangingCallback("3", log, anyio.Event())])
    plain.bus.subscribe(subscriber)
    cancelled.append(await cancel_once_started(plain, events[3], log=log))

    assert cancelled == [True, True]
    assert sorted(log[:3]) == ["0 cleaned up", "1 cleaned up", "middleware cleaned up"]
    assert sorted(log[4:6]) == ["3 cleaned up", "subscriber cleaned up"]
    assert log[3] == log[6] == "run_event returned"


async def test_rule_5_4_a_shield_inside_a_handler_holds() -> None:
    """What is shielded goes on to its end, be it of a callback, an algorithm or a destination; then it is cancelled."""
    log: list[str] = []

    async def shielded(name: str, started: anyio.Event) -> None:
        with anyio.CancelScope(shield=True):
            started.set()
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            log.append(f"{name} finished")
        await anyio.lowlevel.checkpoint()
        log.append(f"{name} went on")

    for kind in ("algorithm", "callback", "destination"):
        started = anyio.Event()

        class Shielded(Algorithm[Any, Any]):
            def match(self, event: EventName, state: Any) -> bool:
                return True

            async def apply(self, event: EventName, state: Any, logger: Any, started: anyio.Event = started) -> None:
                await shielded("algorithm", started)

        class ShieldedCallback(Callback[Any]):
            async def run(self, state: Any, logger: Any, started: anyio.Event = started) -> None:
                await shielded("callback", started)

        class ShieldedOut(LoggerDestination):
            async def run(self, state: Any, logger: Any, started: anyio.Event = started) -> None:
                await shielded("destination", started)

        callbacks: list[Any] = {
            "algorithm": list[Any](),
            "callback": [ShieldedCallback()],
            "destination": [ShieldedOut()],
        }[kind]
        engine = Engine(events=Job, algorithms=[Shielded()] if kind == "algorithm" else [], callbacks=callbacks)
        log.clear()

        cancelled = await cancel_once_started(engine, started, log=log)

        assert cancelled
        assert log == [f"{kind} finished", "run_event returned"]


async def test_rule_5_4_cancelled_before_it_starts() -> None:
    """An event published in a cancelled scope ends at its first suspension; those not started yet never start."""
    log: list[str] = []

    class Note(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            log.append("started")
            await anyio.lowlevel.checkpoint()
            log.append("went on")

    engine = Engine(events=Job, callbacks=[Note(), Note()])

    with anyio.CancelScope() as scope:
        scope.cancel()
        await engine.run_event(Job.RUN)

    assert scope.cancelled_caught
    assert "went on" not in log


async def test_rule_5_4_a_scope_inside_a_handler_hits_only_it() -> None:
    """`move_on_after`, `fail_after` and `CancelScope.cancel` of a handler's own stop at its edge."""
    log: list[str] = []

    class Own(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            with anyio.move_on_after(0.001):
                await anyio.sleep_forever()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anyio.sleep_forever()
            log.append("moved on")

    class Fails(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            with anyio.fail_after(0.001):
                await anyio.sleep_forever()

    class Bystander(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            while "moved on" not in log:
                await anyio.lowlevel.checkpoint()
            log.append("bystander")

    engine = Engine(events=Job, callbacks=[Own(), Fails(), Bystander()])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    assert [type(error) for error in caught.value.exceptions] == [TimeoutError]
    assert log == ["moved on", "bystander"]


async def test_rule_5_4_a_scope_inside_an_algorithm_hits_only_it() -> None:
    """The next algorithm and the callbacks run as if nothing had been."""

    class Own(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> int:
            with anyio.move_on_after(0.001):
                await anyio.sleep_forever()
            return 5

    engine = Engine(events=Job, algorithms=[Own(), Own()])

    traces = await engine.run_event(Job.RUN)

    assert [trace.exit_code for trace in traces.values()] == [5, 5]


async def test_rule_5_4_cancelling_a_nested_event_hits_only_that() -> None:
    """A handler gives up on an event it published; the outer one goes on."""
    log: list[str] = []

    class Outer(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            with anyio.move_on_after(0.001) as scope:
                await engine.run_event(Job.SUB, state)
            log.append(f"gave up: {scope.cancelled_caught}")
            await anyio.lowlevel.checkpoint()

        async def sub(self, state: Any, logger: Any) -> None:
            await hang("nested", log, anyio.Event())

    engine = Engine(events=Job, callbacks=[Outer()])

    await engine.run_event(Job.RUN, object())

    assert log == ["nested cleaned up", "gave up: True"]


async def test_rule_5_4_a_failure_while_cleaning_up_is_not_swallowed(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that raises when it is cancelled: the cancellation comes out, and the failure is logged."""
    started = anyio.Event()

    class Clumsy(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                raise ValueError("while cleaning up")

    log: list[str] = []
    engine = Engine(events=Job, callbacks=[Clumsy()])

    cancelled = await cancel_once_started(engine, started, log=log)

    assert cancelled
    assert [record.getMessage() for record in caplog.records] == ["callback clumsy failed on RUN, which was cancelled"]
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize("waits", [False, True], ids=["for the task", "by itself"])
async def test_rule_5_4_a_task_of_a_callback_fails_while_cleaning_up(
    waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own task group joins failure and cancellation: the cancellation comes out, the failure is logged."""
    started = anyio.Event()

    async def clumsy() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("while cleaning up")

    class Groups(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(clumsy)
                await anyio.lowlevel.checkpoint()
                started.set()
                if waits:
                    await anyio.sleep_forever()

    log: list[str] = []
    engine = Engine(events=Job, callbacks=[Groups()])

    cancelled = await cancel_once_started(engine, started, log=log)

    assert cancelled
    assert caplog.messages == ["callback groups failed on RUN, which was cancelled"]


async def test_rule_5_4_a_callback_that_ignores_the_cancellation() -> None:
    """It returns as if nothing had been: the event is cancelled all the same, before the destinations."""
    started = anyio.Event()
    log: list[str] = []

    class Stubborn(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            started.set()
            with anyio.CancelScope(shield=True):
                for _ in range(10):
                    await anyio.lowlevel.checkpoint()
            log.append("done")

    class Out(LoggerDestination):
        def run(self, state: Any, logger: Any) -> None:
            log.append("destination")

    engine = Engine(events=Job, callbacks=[Stubborn(), Out()])

    cancelled = await cancel_once_started(engine, started, log=log)

    assert cancelled
    assert log == ["done", "run_event returned"]


async def test_rule_5_4_a_task_a_handler_started_elsewhere_goes_on() -> None:
    """It is not the event's: cancelling the event leaves it alone."""
    log: list[str] = []
    started, over = anyio.Event(), anyio.Event()

    async def elsewhere(*, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await over.wait()
        log.append("elsewhere finished")

    async with anyio.create_task_group() as group:

        class Spawns(Callback[Any]):
            async def run(self, state: Any, logger: Any) -> None:
                await group.start(elsewhere)
                await hang("callback", log, started)

        engine = Engine(events=Job, callbacks=[Spawns()])
        await cancel_once_started(engine, started, log=log)
        over.set()

    assert log == ["callback cleaned up", "run_event returned", "elsewhere finished"]


async def test_rule_5_4_cancelling_between_the_halves_of_a_pair() -> None:
    """The second half is not published."""

    class Loop(EventName):
        STEP_START = "step_start"
        STEP_END = "step_end"

    seen: list[EventName] = []
    bus = EventBus()
    bus.subscribe(lambda envelope: seen.append(envelope.event))
    engine = Engine(events=Loop, bus=bus)

    with anyio.move_on_after(0.001) as scope:
        async with engine.pair(Loop.STEP_START):
            await anyio.sleep_forever()

    assert scope.cancelled_caught
    assert seen == [Loop.STEP_START]
