"""`eventbus_engine.testing`: what a user's own tests stand on has to be right itself."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import Algorithm, Callback, ConfigurationError, Engine, Event, EventName, algorithm
from eventbus_engine.testing import (
    FakeAlgorithm,
    FakeCallback,
    FakeClock,
    Record,
    Recorder,
    assert_order,
    backend_options,
    run_with_fake_clock,
)


class Ingest(EventName):
    """A vocabulary of a user's own."""

    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"


class MixUp(Algorithm[Any, Any]):
    """An algorithm that names itself."""

    name: str | None = "mixup"

    def match(self, event: EventName, state: Any, /) -> bool:
        """On every event."""
        return True

    def apply(self, event: EventName, state: Any, logger: Any, /) -> None:
        """Do nothing."""


class LayerFreezing(MixUp):
    """One that is named by its class."""

    name = None


# ------------------------------------------------------------------------------------------------------------- recorder


@pytest.mark.anyio
async def test_recorder_keeps_every_event_in_order() -> None:
    """Members, values and the states themselves."""
    recorder, record = Recorder(), SimpleNamespace()
    engine = Engine(record, events=Ingest, callbacks=[recorder])
    async with engine.pair(Ingest.BEFORE_WRITE):
        pass

    assert recorder.events == [Ingest.BEFORE_WRITE, Ingest.AFTER_WRITE]
    assert recorder.names == ["before_write", "after_write"]
    assert recorder.records[0] == Record(Ingest.BEFORE_WRITE, record, None)
    assert recorder.records[0].state is record


@pytest.mark.anyio
async def test_recorder_looks_at_the_state_as_it_is_then() -> None:
    """The state goes on changing; what `look` made of it does not."""
    recorder = Recorder("after_write", look=lambda record: record.row)
    record = SimpleNamespace(row="raw")
    engine = Engine(record, events=Ingest, callbacks=[recorder])
    await engine.run_event("before_write")
    await engine.run_event("after_write")
    record.row = "changed"
    await engine.run_event("after_write")

    assert (recorder.names, recorder.seen) == (["after_write", "after_write"], ["raw", "changed"])
    recorder.clear()
    assert recorder.records == []


@pytest.mark.anyio
async def test_recorder_can_be_waited_for() -> None:
    """An event that is in counts at once; one that is not is waited for, however many others come first."""
    recorder, found = Recorder(), list[Any]()
    engine = Engine(events=Ingest, callbacks=[recorder])

    async def wait(count: int) -> None:
        found.append(await recorder.wait_for(Ingest.AFTER_WRITE, count))

    async with anyio.create_task_group() as group:
        group.start_soon(wait, 2)
        for event in (Ingest.AFTER_WRITE, Ingest.BEFORE_WRITE, Ingest.AFTER_WRITE):
            await anyio.wait_all_tasks_blocked()
            assert not found
            await engine.run_event(event, SimpleNamespace(number=event))
    await wait(1)

    assert found == [recorder.records[2], recorder.records[0]]


@pytest.mark.anyio
async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    """A recorder is not slowed by whoever gave up."""
    recorder = Recorder()
    with anyio.move_on_after(0):
        await recorder.wait_for("init")

    assert recorder._arrived == []


@pytest.mark.anyio
async def test_fakes_take_the_options_of_what_they_stand_for() -> None:
    """They are what the engine goes by."""
    callback = FakeCallback(name="remote", hook=_fail, on_error="quarantine", quarantine_after=1)
    engine = Engine(algorithms=[FakeAlgorithm("a"), FakeAlgorithm("b", pin="first")], callbacks=[callback])
    traces = await engine.run_event("init")
    await engine.run_event("fit_start")

    assert_order(traces, "b", "a")
    assert callback.names == ["init"]


def _fail(event: EventName, state: Any, logger: Any) -> None:
    raise ValueError("asked for")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FakeAlgorithm(pim="first"), "FakeAlgorithm has no option 'pim'; it takes name, run_before, run_after"),
        (lambda: FakeCallback(snapsot=()), "FakeCallback has no option 'snapsot'; it takes name, on_error"),
        (lambda: Recorder(hook=_fail), "Recorder has no option 'hook'; it takes name, on_error"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(make: Any, message: str) -> None:
    """A typo in a test would pass unnoticed otherwise."""
    with pytest.raises(ConfigurationError, match=message):
        make()


# ---------------------------------------------------------------------------------------------------------------- fakes


@pytest.mark.anyio
async def test_fake_callback_records_does_as_told_and_counts_its_lifetime() -> None:
    """Plain or async; opened once, closed once."""
    done: list[str] = []

    def plain(event: EventName, state: Any, logger: Any) -> None:
        done.append(f"plain {event.value}")

    async def asynchronous(event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        done.append(f"async {event.value}")

    callbacks = [
        FakeCallback("init", name="plain", hook=plain),
        FakeCallback("init", name="async", hook=asynchronous, timeout=5.0),
        FakeCallback(name="idle"),
    ]
    async with Engine(callbacks=callbacks) as engine:
        await engine.run_event("init")
        await engine.run_event("fit_start")

    assert done == ["plain init", "async init"]
    assert [callback.names for callback in callbacks] == [["init"], ["init"], ["init", "fit_start"]]
    assert [(c.opened, c.closed, c.post_closed) for c in callbacks] == [(1, 1, 1)] * 3


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("match", "expected"),
    [
        (True, ["init", "fit_start"]),
        (False, []),
        (Event.INIT, ["init"]),
        ("fit_start", ["fit_start"]),
        ({Event.INIT, Event.FIT_END}, ["init"]),
        ((), []),
        (lambda event, state: event == "fit_start" and state.ready, ["fit_start"]),
    ],
)
async def test_fake_algorithm_runs_where_it_is_told_to(match: Any, expected: list[str]) -> None:
    """Always, never, on events, or where a function says so."""
    fake = FakeAlgorithm(match=match)
    engine = Engine(SimpleNamespace(ready=True), algorithms=[fake])
    await engine.run_event(Event.INIT)
    await engine.run_event(Event.FIT_START)

    assert [record.event.value for record in fake.records] == expected


@pytest.mark.anyio
async def test_fake_algorithm_returns_what_it_is_told_to() -> None:
    """`apply`'s own result, else the exit code; an async one may have a timeout."""

    async def asynchronous(event: EventName, state: Any, logger: Any) -> int | None:
        await anyio.lowlevel.checkpoint()
        return 7 if state else None

    fakes = [
        FakeAlgorithm("plain", exit_code=3),
        FakeAlgorithm("own", apply=lambda *_: 5, exit_code=3),
        FakeAlgorithm("async", apply=asynchronous, exit_code=3, timeout=5.0),
    ]
    engine = Engine(algorithms=fakes)
    with_result = await engine.run_event("init", "with a result")
    without = await engine.run_event("fit_start")

    assert [trace.exit_code for trace in with_result.values()] == [3, 5, 7]
    assert [trace.exit_code for trace in without.values()] == [3, 5, 3]
    assert [len(fake.records) for fake in fakes] == [2, 2, 2]


# --------------------------------------------------------------------------------------------------------- assert_order


@pytest.mark.anyio
async def test_order_is_checked_by_name_class_and_object() -> None:
    """Others may have run in between; two of a kind are told apart by their names."""
    third = FakeAlgorithm("third")
    engine = Engine(algorithms=[MixUp(), LayerFreezing(), third, MixUp()])
    traces = await engine.run_event("init")

    assert_order(traces)
    assert_order(traces, MixUp, third)
    assert_order(traces, "mixup", LayerFreezing, "third", "mixup#2")


@pytest.mark.anyio
async def test_a_wrong_order_is_shown_with_the_actual_one() -> None:
    """The message is the whole story: what was expected, what ran, and why the rest did not."""
    engine = Engine(algorithms=[MixUp(), FakeAlgorithm("late"), FakeAlgorithm("never", match=False)])
    traces = await engine.run_event("init")

    with pytest.raises(AssertionError) as wrong:
        assert_order(traces, "late", MixUp)
    with pytest.raises(AssertionError, match="expected order: never"):
        assert_order(traces, "never")
    with pytest.raises(AssertionError, match=r"actual order: nothing ran\n *did not run: none"):
        assert_order({}, "never")

    assert str(wrong.value) == (
        "expected order: late, mixup\n  actual order: mixup, late\n   did not run: never (not matched)"
    )


# ---------------------------------------------------------------------------------------------------------------- clock


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_fake_clock_jumps_over_hours_in_no_time(backend: str) -> None:
    """Timeouts and sleeps come in their order, and measure what they would have taken."""
    log: list[tuple[str, float]] = []

    async def sleep(name: str, hours: float) -> None:
        start = anyio.current_time()
        await anyio.sleep(hours * 3600)
        log.append((name, anyio.current_time() - start))

    async def main(*hours: float) -> str:
        async with anyio.create_task_group() as group:
            for number in hours:
                group.start_soon(sleep, f"{number} h", number)
        with anyio.move_on_after(7 * 24 * 3600) as week:
            await anyio.sleep_forever()
        return f"{week.cancelled_caught}"

    began = time.monotonic()

    assert run_with_fake_clock(main, 2, 1, 48, backend=backend) == "True"
    assert [(name, round(seconds / 3600, 6)) for name, seconds in log] == [("1 h", 1), ("2 h", 2), ("48 h", 48)]
    assert time.monotonic() - began < 5


def test_fake_clock_does_not_jump_while_a_socket_is_ready() -> None:
    """What can go on goes on first; then time passes."""

    async def main() -> float:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"ready")
            with anyio.move_on_after(10):
                await anyio.wait_readable(ours)
        return anyio.current_time()

    assert run_with_fake_clock(main) == 0


def test_fake_clock_waits_for_a_thread_where_no_timer_is_set() -> None:
    """Only timers are jumped to; what has none is waited for as ever."""

    async def main() -> int:
        return await anyio.to_thread.run_sync(lambda: 7)

    assert run_with_fake_clock(main) == 7


def test_engine_timeouts_run_on_the_fake_clock() -> None:
    """The use it is made for."""

    async def slow(event: EventName, state: Any, logger: Any) -> None:
        await anyio.sleep(59)

    engine = Engine(algorithms=[FakeAlgorithm(apply=slow, timeout=60.0)])
    traces = run_with_fake_clock(engine.run_event, "init")

    assert traces["fake/INIT"].outcome == "ok"


def test_backend_options_fit_the_pytest_plugin_of_anyio(tmp_path: Any) -> None:
    """The fixture of the docstring, in a test file of a user's own."""
    (tmp_path / "test_clock.py").write_text(
        "import anyio, pytest\n"
        "from eventbus_engine.testing import backend_options\n"
        "pytestmark = pytest.mark.anyio\n"
        "@pytest.fixture(params=['asyncio', 'trio'])\n"
        "def anyio_backend(request):\n"
        "    return request.param, backend_options(request.param)\n"
        "async def test_a_day_is_over_at_once():\n"
        "    start = anyio.current_time()\n"
        "    await anyio.sleep(86400)\n"
        "    assert anyio.current_time() - start == pytest.approx(86400)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_clock.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert "2 passed" in done.stdout


def test_another_backend_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(ConfigurationError, match="no fake clock for backend 'curio'; use 'asyncio' or 'trio'"):
        backend_options("curio")
    assert backend_options("asyncio") == {"loop_factory": FakeClock}


@pytest.mark.parametrize("module", ["pytest", "torch", "trio"])
def test_importing_it_needs_no_test_runner_and_no_extras(module: str) -> None:
    """A user's test run decides what is loaded."""
    program = f"import sys, eventbus_engine.testing; sys.exit({module!r} in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_fakes_are_what_the_engine_takes_for_algorithms_and_callbacks() -> None:
    """Subclasses, so that a type checker is content as well."""

    @algorithm("init")
    def function(event: EventName, state: Any, logger: Any) -> None: ...

    assert isinstance(FakeAlgorithm(), Algorithm)
    assert isinstance(FakeCallback(), Callback)
    assert isinstance(function, Algorithm)
