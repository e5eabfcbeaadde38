"""Cancellation as asyncio itself does it: tasks that are cancelled, or cancel themselves, and asyncio's timeouts."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    Engine,
    Envelope,
    EventBus,
    EventName,
    HandlerCancelledError,
)

pytestmark = pytest.mark.asyncio


class Job(EventName):
    """A vocabulary."""

    RUN = "run"


class Hang(Callback[Any]):
    """Waits for ever and takes its time to clean up."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.started = asyncio.Event()

    async def run(self, state: Any, logger: Any) -> None:
        """Hang."""
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            # anyio cancels at every await until the task is done, unless it is shielded.
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0)
            self.log.append("cleaned up")


class HangingAlgorithm(Algorithm[Any, Any]):
    """The same as an algorithm."""

    def __init__(self, log: list[str]) -> None:
        self.hang = Hang(log)

    def match(self, event: EventName, state: Any) -> bool:
        """Run always."""
        return True

    async def apply(self, event: EventName, state: Any, logger: Any) -> None:
        """Hang."""
        await self.hang.run(state, logger)


class Bystander(Callback[Any]):
    """Finishes in its own time."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def run(self, state: Any, logger: Any) -> None:
        """Take some steps."""
        for _ in range(10):
            await asyncio.sleep(0)
        self.log.append("bystander")


@pytest.fixture(params=["algorithm", "callback"])
def hanging(request: pytest.FixtureRequest) -> tuple[Engine[Any], Hang, list[str]]:
    """An engine with something that hangs."""
    log: list[str] = []
    if request.param == "algorithm":
        algorithm = HangingAlgorithm(log)
        return Engine(object(), events=Job, algorithms=[algorithm]), algorithm.hang, log
    callback = Hang(log)
    return Engine(object(), events=Job, callbacks=[callback, Hang(log)]), callback, log


async def test_rule_5_4_task_cancel(hanging: tuple[Engine[Any], Hang, list[str]]) -> None:
    """`task.cancel()` on the task that awaits `run_event`: everything has cleaned up when the task is done."""
    engine, hang, log = hanging
    task = asyncio.create_task(engine.run_event(Job.RUN))
    await hang.started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert set(log) == {"cleaned up"}
    assert task.cancelled()
    assert (len(engine._active), len(engine.bus._lanes)) == (0, 0)


async def test_rule_5_4_wait_for(hanging: tuple[Engine[Any], Hang, list[str]]) -> None:
    """`asyncio.wait_for` around `run_event` times out, and nothing is left running."""
    engine, _, log = hanging

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.run_event(Job.RUN), 0.01)

    assert set(log) == {"cleaned up"}
    assert not engine._active


async def test_rule_5_4_asyncio_timeout_around(hanging: tuple[Engine[Any], Hang, list[str]]) -> None:
    """`asyncio.timeout` around `run_event`: the block ends with TimeoutError, and the task goes on uncancelled."""
    engine, _, log = hanging

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.run_event(Job.RUN)

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert set(log) == {"cleaned up"}


async def test_rule_5_4_asyncio_task_group_around(hanging: tuple[Engine[Any], Hang, list[str]]) -> None:
    """A sibling that fails cancels the event, and both are done when the group is."""
    engine, hang, log = hanging

    async def fail() -> None:
        await hang.started.wait()
        raise ValueError("sibling")

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run_event(Job.RUN))
            group.create_task(fail())

    assert [str(error) for error in caught.value.exceptions] == ["sibling"]
    assert set(log) == {"cleaned up"}


@pytest.mark.parametrize("awaits", [True, False], ids=["at its next await", "by raising"])
async def test_rule_5_4_a_handler_that_cancels_itself_hits_nobody_else(awaits: bool) -> None:
    """The others finish; it counts as that callback's failure, and the caller is not cancelled."""
    log: list[str] = []

    class Suicidal(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            if not awaits:
                raise asyncio.CancelledError
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    engine = Engine(events=Job, callbacks=[Bystander(log), Suicidal(), Bystander(log)])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    (error,) = caught.value.exceptions
    assert isinstance(error, HandlerCancelledError)
    assert str(error) == "callback suicidal cancelled itself on RUN"
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert log == ["bystander", "bystander"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_rule_5_4_a_handler_that_awaits_a_cancelled_task() -> None:
    """The CancelledError of somebody else's task comes out of an `await`; it is the callback's failure, no more."""
    log: list[str] = []

    class Unlucky(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            other = asyncio.create_task(asyncio.sleep(60))
            other.cancel()
            await other

    engine = Engine(events=Job, callbacks=[Unlucky(), Bystander(log)])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    assert [type(error) for error in caught.value.exceptions] == [HandlerCancelledError]
    assert log == ["bystander"]


async def test_rule_5_4_asyncio_timeouts_inside_a_handler_hit_only_it() -> None:
    """`asyncio.timeout` and `asyncio.wait_for` inside a callback or an algorithm stop at its edge."""
    log: list[str] = []

    class Own(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
            except TimeoutError:
                log.append("timeout")
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)

    class OwnAlgorithm(HangingAlgorithm):
        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
            except TimeoutError:
                log.append("algorithm")

    engine = Engine(events=Job, algorithms=[OwnAlgorithm(log)], callbacks=[Own(), Bystander(log)])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    assert [type(error) for error in caught.value.exceptions] == [TimeoutError]
    assert log[0] == "algorithm"
    assert sorted(log[1:]) == ["bystander", "timeout"]


async def test_rule_5_4_the_callers_cancellation_is_told_from_the_handlers_own() -> None:
    """A callback that is cancelling itself as the caller is cancelled: the caller's is what comes out."""
    started = asyncio.Event()

    class Suicidal(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()

    engine = Engine(events=Job, callbacks=[Suicidal()])
    task = asyncio.create_task(engine.run_event(Job.RUN))
    await started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert task.cancelled()


async def test_rule_4_9_a_waiter_cancelled_after_the_lane_was_granted_hands_it_on() -> None:
    """Natively cancelled between the grant and its waking up: it never runs, and the next one gets the lane."""
    bus = EventBus()
    log: list[Any] = []
    release = asyncio.Event()
    state = object()

    async def handler(envelope: Envelope) -> None:
        log.append(envelope.payload)
        if envelope.payload == 1:
            await release.wait()

    bus.subscribe(handler)

    async def first() -> None:
        await bus.publish(Job.RUN, 1, state=state)
        second.cancel()

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(first())]
    await asyncio.sleep(0)
    second = asyncio.create_task(bus.publish(Job.RUN, 2, state=state))
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(bus.publish(Job.RUN, 3, state=state)))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks)

    assert log == [1, 3]
    assert second.cancelled()
    assert len(bus._lanes) == 0


async def test_rule_5_4_every_task_of_the_loop_cancelled() -> None:
    """As when a program shuts down: the tasks of callbacks are cancelled along with the caller's, which comes out."""
    log: list[str] = []
    hangs = [Hang(log), Hang(log)]
    engine = Engine(events=Job, callbacks=hangs)
    task = asyncio.create_task(engine.run_event(Job.RUN))
    for hang in hangs:
        await hang.started.wait()
    here = asyncio.current_task()
    for each in asyncio.all_tasks():
        if each is not here:
            each.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert log == ["cleaned up", "cleaned up"]


async def test_rule_5_6_closing_that_is_cancelled_by_asyncio_itself() -> None:
    """That no scope can hold off: the report says what was not closed, and the callback may be used elsewhere."""
    log: list[str] = []
    closing = asyncio.Event()

    class Slow(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            log.append("run")

        async def close(self, state: Any, logger: Any) -> None:
            closing.set()
            await asyncio.Event().wait()

    slow = Slow()
    engine = Engine(events=Job, callbacks=[slow])
    await engine.run_event(Job.RUN)
    task = asyncio.create_task(engine.close(60))
    await closing.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    report = await engine.close()
    await Engine(events=Job, callbacks=[slow]).run_event(Job.RUN)

    assert (report.closed, report.timed_out) == ([], ["slow"])
    assert log == ["run", "run"]


async def test_rule_5_6_a_closer_cancelled_by_asyncio_leaves_the_closing_to_the_last_event() -> None:
    """It waited for an event under way; when that is done, the engine is closed all the same."""
    log: list[str] = []
    inside, go = asyncio.Event(), asyncio.Event()

    class Watch(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            inside.set()
            await go.wait()

        async def close(self, state: Any, logger: Any) -> None:
            log.append("close")

    engine = Engine(events=Job, callbacks=[Watch()])
    event = asyncio.create_task(engine.run_event(Job.RUN))
    await inside.wait()
    closer = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    closer.cancel()
    await asyncio.wait([closer])
    before = list(log)
    go.set()
    await event

    assert closer.cancelled()
    assert (before, log) == ([], ["close"])


async def test_rule_4_9_a_cross_publish_in_a_task_of_asyncio_is_no_deadlock() -> None:
    """A plain asyncio task belongs to no task group, so that it holds nobody up as far as can be told."""
    bus = EventBus()
    a, b = object(), object()
    tasks: list[asyncio.Task[Any]] = []
    both = asyncio.Event()
    log: list[str] = []

    async def handler(envelope: Envelope) -> None:
        log.append(f"{envelope.payload} in")
        if envelope.payload in "ab":
            other = b if envelope.state is a else a
            tasks.append(asyncio.create_task(bus.publish(Job.RUN, "sent", state=other)))
            if len(tasks) == 2:
                both.set()
            await both.wait()
            await asyncio.sleep(0)

    bus.subscribe(handler)
    async with asyncio.timeout(5):
        await asyncio.gather(bus.publish(Job.RUN, "a", state=a), bus.publish(Job.RUN, "b", state=b))
        await asyncio.gather(*tasks)

    assert log == ["a in", "b in", "sent in", "sent in"]
