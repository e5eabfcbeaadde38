"""Clients that block: on a thread of their own they hold up nobody, and on the event loop they are reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from eventbus_engine import (
    Callback,
    CallbackErrors,
    ConfigurationError,
    Engine,
    Event,
    HandlerTimeoutError,
    LoggerDestination,
    Record,
    current_envelope,
)
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.testing import FakeAlgorithm, FakeCallback

pytestmark = pytest.mark.anyio

request: ContextVar[str] = ContextVar("request", default="none")


class Blocking(Callback[Any]):
    """A callback with a client that blocks, which notes on which threads it ran, and in which order."""

    run_blocking = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.release = threading.Event()
        self.entered = threading.Event()

    def note(self, what: str) -> None:
        """Note it."""
        self.threads.add(threading.get_ident())
        self.log.append(what)

    def open(self, state: Any, logger: Any) -> None:
        """Connect."""
        self.note("open")

    def batch_end(self, state: Any, logger: Any) -> None:
        """Block until released."""
        self.entered.set()
        self.release.wait(10)
        self.note("batch_end")

    def epoch_end(self, state: Any, logger: Any) -> None:
        """See what a hook sees."""
        envelope = current_envelope()
        self.note(f"{envelope and envelope.event.value} {request.get()}")
        request.set("by the hook")

    def close(self, state: Any, logger: Any) -> None:
        """Disconnect."""
        self.note("close")

    def post_close(self) -> None:
        """Clean up."""
        self.note("post_close")


async def wait_for(event: threading.Event) -> None:
    """Wait for a thread without holding up the loop."""
    assert await anyio.to_thread.run_sync(event.wait, 10)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the engine logged."""
    return [record.getMessage() for record in caplog.records if record.name == "eventbus_engine"]


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("delivery", ["inline", "background"])
async def test_all_that_a_blocking_callback_does_runs_on_one_thread_in_order(delivery: Any) -> None:
    """The thread is its own, it ends with the engine, and the context is that of the event."""
    blocking = Blocking(delivery=delivery)
    blocking.release.set()
    async with Engine(callbacks=[blocking]) as engine:
        request.set("mine")
        await engine.run_event("epoch_end", object())
        for _ in range(3):
            await engine.run_event("batch_end", object())

    assert blocking.log == ["open", "epoch_end mine", *["batch_end"] * 3, "close", "post_close"]
    assert len(blocking.threads) == 1
    assert threading.get_ident() not in blocking.threads
    assert request.get() == "mine"
    for thread in threading.enumerate():
        if thread.name == "eventbus-engine-blocking":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("delivery", ["inline", "background"])
async def test_a_hook_that_blocks_does_not_hold_up_the_event_loop(delivery: Any) -> None:
    """Others run meanwhile, and it is not reported for it."""
    blocking = Blocking(delivery=delivery)
    async with Engine(callbacks=[blocking]) as engine, anyio.create_task_group() as group:
        group.start_soon(engine.run_event, "batch_end", object())
        await wait_for(blocking.entered)
        await engine.run_event("fit_start", object())
        blocking.release.set()

    assert blocking.log == ["open", "batch_end", "close", "post_close"]


async def test_events_of_many_lanes_take_turns() -> None:
    """One hook of a callback at a time, in the order of the calls."""
    running, overlaps, order = 0, 0, list[int]()

    class Turns(Callback[Any]):
        run_blocking = True

        def batch_end(self, state: Any, logger: Any) -> None:
            nonlocal running, overlaps
            overlaps += running
            running += 1
            time.sleep(0.001)
            order.append(state)
            running -= 1

    async with Engine(callbacks=[Turns()]) as engine, anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(engine.run_event, "batch_end", number)

    assert (overlaps, sorted(order)) == (0, list(range(20)))


@pytest.mark.parametrize("delivery", ["inline", "background"])
async def test_a_hook_that_hangs_is_abandoned_counted_and_named(
    delivery: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can interrupt a thread. `close` keeps its deadline all the same, and says whose thread is left behind."""
    blocking = Blocking(delivery=delivery, timeout=0.01)
    async with Engine(callbacks=[blocking]) as engine:
        if delivery == "inline":
            with pytest.raises(CallbackErrors) as caught:
                await engine.run_event("batch_end", object())
            assert isinstance(caught.value.exceptions[0], HandlerTimeoutError)
        else:
            await engine.run_event("batch_end", object())
        await wait_for(blocking.entered)
        report = await engine.close(timeout=0.1)
    blocking.release.set()

    assert (report.abandoned, report.timed_out, report.ok) == (["blocking"], ["blocking"], False)
    assert any("callback blocking has a hook on its thread that has not come back" in line for line in logged(caplog))
    if delivery == "background":
        assert report.deliveries["blocking"].timed_out == 1


async def test_in_the_background_waiting_for_the_thread_takes_nothing_of_the_timeout() -> None:
    """What is behind a hook that hangs has not begun: it waits, and then it is delivered."""
    blocking = Blocking(delivery="background", timeout=0.02)

    async def second_failure() -> None:
        while engine.deliveries()["blocking"].timed_out < 2:  # noqa: ASYNC110 -- there is no event for it
            await anyio.sleep(0.001)

    async with Engine(callbacks=[blocking]) as engine:
        await engine.run_event("batch_end", object())
        await wait_for(blocking.entered)
        for _ in range(3):
            await engine.run_event("epoch_end", object())
        with anyio.move_on_after(0.15) as waited:
            await second_failure()
        assert engine.deliveries()["blocking"].waiting == 3
        blocking.release.set()
        report = await engine.close()

    assert waited.cancelled_caught
    assert blocking.log == ["open", "batch_end", *["epoch_end none"] * 3, "close", "post_close"]
    counts = report.deliveries["blocking"]
    assert (counts.delivered, counts.failed, counts.timed_out) == (3, 1, 1)


async def test_what_waits_for_the_thread_is_reported_at_the_deadline_of_close() -> None:
    """It keeps nobody longer than that."""
    blocking = Blocking(delivery="background", timeout=0.02)
    async with Engine(callbacks=[blocking]) as engine:
        await engine.run_event("batch_end", object())
        await wait_for(blocking.entered)
        await engine.run_event("epoch_end", object())
        report = await engine.close(timeout=0.2)
    blocking.release.set()

    assert (report.undelivered, report.abandoned) == ({"blocking": 1}, ["blocking"])


async def test_what_had_not_begun_when_it_was_given_up_on_is_not_called() -> None:
    """And the next event finds the thread free."""
    blocking = Blocking()
    scope = anyio.CancelScope()
    async with Engine(callbacks=[blocking]) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run_event, "batch_end", object())
            await wait_for(blocking.entered)
            with scope:
                scope.deadline = anyio.current_time() + 0.01
                await engine.run_event("epoch_end", object())
            blocking.release.set()
        await engine.run_event("batch_end", object())

    assert scope.cancelled_caught
    assert blocking.log == ["open", "batch_end", "batch_end", "close", "post_close"]


async def test_what_it_raises_and_returns_arrives() -> None:
    """An exception as itself; an awaitable is awaited, on the event loop."""
    seen: list[bool] = []
    loop_thread = threading.get_ident()

    async def later() -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(threading.get_ident() == loop_thread)

    def hook(event: Event, state: Any, logger: Any) -> Awaitable[None]:
        if event is Event.INIT:
            raise KeyError("bad")
        return later()

    callback = FakeCallback(hook=hook, run_blocking=True)
    async with Engine(callbacks=[callback]) as engine:
        with pytest.raises(CallbackErrors) as caught:
            await engine.run_event("init")
        await engine.run_event("fit_start")

    assert (seen, [type(error) for error in caught.value.exceptions]) == ([True], [KeyError])


async def test_async_hooks_of_a_blocking_callback_stay_on_the_loop() -> None:
    """They do not block."""
    threads: list[int] = []

    async def hook(event: Event, state: Any, logger: Any) -> None:
        threads.append(threading.get_ident())

    async with Engine(callbacks=[FakeCallback(hook=hook, run_blocking=True)]) as engine:
        await engine.run_event("init")

    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("delivery", ["inline", "background"])
async def test_a_blocking_destination_takes_its_records_on_its_thread(delivery: Any) -> None:
    """So that logging does not block whoever logs; before its hook, in order."""
    log: list[Any] = []
    threads: set[int] = set()

    class Blocks(LoggerDestination):
        run_blocking = True

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            threads.add(threading.get_ident())
            log.append(metrics["number"])

        def fit_end(self, state: Any, logger: Any) -> None:
            threads.add(threading.get_ident())
            log.append("fit_end")

    def apply(event: Any, state: Any, logger: Any) -> None:
        for number in range(3):
            logger.log_metrics({"number": number})

    callbacks = [Blocks(delivery=delivery)]
    async with Engine(algorithms=[FakeAlgorithm(apply=apply)], callbacks=callbacks) as engine:
        await engine.run_event("fit_end", object())

    assert log == [0, 1, 2, "fit_end"]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_batch_may_be_sent_by_a_client_that_blocks() -> None:
    """Its records are made on the thread as well."""
    threads: set[int] = set()
    sent: list[Any] = []

    class Sends(Callback[Any]):
        delivery, run_blocking, timeout = "background", True, 10.0

        def batch_end(self, state: Any, logger: Any) -> int:
            threads.add(threading.get_ident())
            return 7

        def send_records(self, records: Any, logger: Any) -> None:
            threads.add(threading.get_ident())
            sent.extend(record.value for record in records)

    async with Engine(callbacks=[Sends()]) as engine:
        await engine.run_event("batch_end")

    assert (sent, len(threads)) == ([7], 1)
    assert threading.get_ident() not in threads


def test_it_works_without_an_event_loop() -> None:
    """`engine.sync` gives it one."""
    blocking = Blocking()
    blocking.release.set()
    engine = Engine(callbacks=[blocking])
    engine.sync.run_event("batch_end")

    assert engine.sync.close().ok
    assert blocking.log == ["open", "batch_end", "close", "post_close"]


async def test_a_thread_that_nobody_needs_is_not_started() -> None:
    """Not for an engine that had no event."""
    blocking = Blocking()
    before = threading.active_count()
    async with Engine(callbacks=[blocking]) as engine:
        report = await engine.close()

    assert (blocking.log, report.closed, threading.active_count()) == ([], [], before)


def test_a_timeout_on_a_plain_hook_takes_a_thread() -> None:
    """On the event loop nothing could interrupt it."""
    with pytest.raises(ConfigurationError, match="callback blocking has a timeout, but"):
        Engine(callbacks=[Blocking(run_blocking=False, timeout=1.0)])

    assert Engine(callbacks=[Blocking(timeout=1.0)])


# ------------------------------------------------------------------------------------------------- blocking the loop


class Clock:
    """The clock by which blocking is measured, so that a busy machine is not taken for a blocking hook."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def block(self) -> None:
        """Hold up whoever calls it, as far as the clock can tell."""
        self.now += 0.25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the engine looks at."""
    clock = Clock()
    for module in ("fanout", "limits", "relay", "_steps"):
        monkeypatch.setattr(f"eventbus_engine.{module}.perf_counter", clock)
    return clock


@pytest.mark.parametrize("delivery", ["inline", "background"])
@pytest.mark.parametrize("where", ["plain", "first step", "later step", "failing", "failing plain"])
@pytest.mark.parametrize("traced", [False, True])
async def test_a_hook_that_holds_up_the_event_loop_is_reported_once(
    where: str, delivery: Any, traced: bool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name, with the cure; those before and after it are not taken for it."""

    def plain(event: Event, state: Any, logger: Any) -> None:
        clock.block()
        if where == "failing plain":
            raise ValueError("bad")

    async def asynchronous(event: Event, state: Any, logger: Any) -> None:
        if where == "later step":
            await anyio.lowlevel.checkpoint()
        clock.block()
        if where == "failing":
            raise ValueError("bad")
        await anyio.lowlevel.checkpoint()

    hook = plain if "plain" in where else asynchronous
    innocents = [FakeCallback(name=f"innocent {i}") for i in range(2)]
    culprit = FakeCallback(name="culprit", hook=hook, delivery=delivery, on_error="log")
    provider = RecordingProvider([]) if traced else None
    async with Engine(callbacks=[innocents[0], culprit, innocents[1]], tracer_provider=provider) as engine:
        for event in ("init", "fit_start", "epoch_start"):
            await engine.run_event(event, object())

    assert [line for line in logged(caplog) if "failed on" not in line] == [
        (
            "callback culprit held up the event loop for 0.25 s on INIT, and everything else with it; await what it "
            "waits for (an async client), or have its plain methods run on a thread of their own: run_blocking=True"
        )
    ]


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_hook_that_holds_up_the_event_loop_later_on_is_reported_then(
    kind: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It was quick so far, and did not suspend."""
    calls = 0

    def plain(event: Event, state: Any, logger: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            clock.block()

    async def asynchronous(event: Event, state: Any, logger: Any) -> None:
        plain(event, state, logger)

    culprit = FakeCallback(name="culprit", hook=plain if kind == "plain" else asynchronous)
    async with Engine(callbacks=[culprit]) as engine:
        for _ in range(4):
            await engine.run_event("epoch_start", object())

    (line,) = logged(caplog)
    assert line.startswith("callback culprit held up the event loop for 0.25 s on EPOCH_START")


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_of_many_hooks_the_one_that_does_so_again_is_reported(
    kind: str, anyio_backend: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once they have been quick, they are timed together; from when that was long, each by itself for good."""
    calls = 0

    def block() -> None:
        nonlocal calls
        calls += 1
        if calls in {3, 6}:
            clock.block()

    def plain(event: Event, state: Any, logger: Any) -> None:
        block()

    async def asynchronous(event: Event, state: Any, logger: Any) -> None:
        block()

    async def nothing(event: Event, state: Any, logger: Any) -> None: ...

    others = [FakeCallback(hook=nothing if kind == "async" else None) for _ in range(2)]
    culprit = FakeCallback(name="culprit", hook=plain if kind == "plain" else asynchronous)
    async with Engine(callbacks=[others[0], culprit, others[1]]) as engine:
        lines: list[int] = []
        for _ in range(7):
            await engine.run_event("epoch_start", object())
            lines.append(len(logged(caplog)))

    (line,) = logged(caplog)
    assert line.startswith("callback culprit held up the event loop for 0.25 s on EPOCH_START")
    # In a task group, each has a task of its own, and is timed in it.
    first = 3 if (kind, anyio_backend) == ("async", "trio") else 6
    assert lines == [int(number >= first) for number in range(1, 8)]


async def test_waiting_is_not_blocking(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """However long; and a plain hook is not to blame for the async ones that started before it."""

    async def wait(event: Event, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()

    async def block(event: Event, state: Any, logger: Any) -> None:
        clock.block()
        await anyio.lowlevel.checkpoint()

    allowed = FakeCallback(name="allowed", hook=block, blocks_after=1)
    callbacks = [FakeCallback(name="waits", hook=wait), allowed, FakeCallback(name="plain")]
    async with Engine(callbacks=callbacks) as engine:
        await engine.run_event("init")

    assert logged(caplog) == []


async def test_open_may_take_its_time(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """It runs once, before anything has begun: a client of the usual kind reads its certificates there."""

    class Opens(Callback[Any]):
        def open(self, state: Any, logger: Any) -> None:
            clock.block()

        def init(self, state: Any, logger: Any) -> None: ...

    async with Engine(callbacks=[Opens()]) as engine:
        await engine.run_event("init")

    assert logged(caplog) == []


def test_without_an_event_loop_there_is_none_to_hold_up(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A plain script may block as it likes."""
    engine = Engine(callbacks=[FakeCallback(hook=lambda *_: clock.block())])
    engine.sync.run_event("init")
    engine.sync.close()

    assert logged(caplog) == []


@pytest.mark.parametrize("run_blocking", [False, True])
async def test_what_a_destination_is_to_send_is_made_where_it_is_logged(run_blocking: bool) -> None:
    """Of the values as they are then, and never on its thread, which is for what takes its time."""
    threads: dict[str, str] = {}
    sent: list[Any] = []

    class Rows(LoggerDestination):
        delivery = "background"

        def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
            threads["made"] = threading.current_thread().name
            return list(metrics["n"])

        def send_records(self, records: list[Record], logger: Any) -> None:
            threads["sent"] = threading.current_thread().name
            sent.extend(record.value for record in records)

    numbers, here = [1], threading.current_thread().name
    async with Engine(callbacks=[Rows(run_blocking=run_blocking)]) as engine:
        engine.logger.log_metrics({"n": numbers})
        numbers.append(2)
        await engine.run_event("batch_end")

    assert threads == {"made": here, "sent": "eventbus-engine-rows" if run_blocking else here}
    assert sent == [[1]]
