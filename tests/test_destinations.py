"""Destinations: what is logged gets to them in order, and no failure of theirs gets anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    Engine,
    EventName,
    Logger,
    LoggerDestination,
    Traces,
    background,
)
from eventbus_engine.errors import TelemetryError
from eventbus_engine.loggers import InMemoryLogger, JsonlLogger

pytestmark = pytest.mark.anyio


async def settle() -> None:
    """Let every task go on until it waits for something."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


class Job(EventName):
    """A vocabulary."""

    RUN = "run"
    SUB = "sub"


class Remote(LoggerDestination):
    """An async destination; fails on, or waits for, what it is told to."""

    def __init__(self, log: list[Any], **actions: Any) -> None:
        self.log = log
        self.actions = actions

    async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Deliver."""
        await anyio.lowlevel.checkpoint()
        action = self.actions.get(str(metrics["n"]))
        if isinstance(action, BaseException):
            raise action
        if action is not None:
            await action()
        self.log.append(metrics["n"])


class Opened(Remote):
    """One that has to be opened, and may refuse."""

    async def open(self, state: Any, logger: Any) -> None:
        """Open, unless told to raise."""
        self.log.append("open")
        if "open" in self.actions:
            raise self.actions["open"]

    async def close(self, state: Any, logger: Any) -> None:
        """Close."""
        self.log.append("close")


async def test_what_is_logged_without_any_event_is_delivered_by_close() -> None:
    """There was no event to open its destination, so closing does. One that nothing was logged for is left alone."""
    log, silent = list[Any](), list[Any]()
    async with Engine(callbacks=[Opened(log)]) as engine:
        engine.logger.log_metrics({"n": 1})
        other = Engine(callbacks=[Opened(silent)])
        reports = await engine.close(), await other.close()

    assert (log, silent) == (["open", 1, "close"], [])
    assert [report.closed for report in reports] == [["opened"], []]
    assert all(report.ok for report in reports)


class Buffered(LoggerDestination):
    """A plain one, which keeps what it gets until it is closed."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.kept: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Keep it."""
        self.kept.append(metrics["n"])

    def open(self, state: Any, logger: Any) -> None:
        """Open."""
        self.log.append("open")

    def close(self, state: Any, logger: Any) -> None:
        """Write it."""
        self.log += self.kept


async def test_a_plain_destination_that_was_logged_to_without_any_event_is_closed() -> None:
    """It may have kept something for then. One that nothing was logged for is left alone here, too."""
    log, silent = list[Any](), list[Any]()
    engine = Engine(callbacks=[Buffered(log)])
    engine.logger.log_metrics({"n": 1})
    reports = await engine.close(), await Engine(callbacks=[Buffered(silent)]).close()

    assert (log, silent) == (["open", 1], [])
    assert [report.closed for report in reports] == [["buffered"], []]


async def test_a_file_that_was_logged_to_without_any_event_is_closed(tmp_path: Path) -> None:
    """And so refuses the next record, as it does after any other run."""
    destination = JsonlLogger(tmp_path / "metrics.jsonl")
    async with Engine(callbacks=[destination]) as engine:
        engine.logger.log_hyperparameters({"lr": 0.1})

    with pytest.raises(TelemetryError, match="is closed"):
        destination.log_metrics({"n": 1})
    assert len(destination.path.read_text().splitlines()) == 1


@pytest.mark.parametrize("kind", [Buffered, Opened])
async def test_what_only_a_close_logs_is_not_lost(kind: Callable[[list[Any]], LoggerDestination]) -> None:
    """Its destination is opened for it, at the last moment."""
    log: list[Any] = []

    class Summary(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"n": 1})

    report = await Engine(callbacks=[kind(log), Summary()]).close()

    assert log[:2] == ["open", 1]
    assert report.ok


async def test_a_destination_that_another_engine_has_open_is_left_to_that_one() -> None:
    """Closing does not fail for it, and the other engine still writes what was logged here."""
    log: list[Any] = []
    shared = Buffered(log)
    first, second = Engine(events=Job, callbacks=[shared]), Engine(events=Job, callbacks=[shared])
    await first.run_event(Job.RUN)
    second.logger.log_metrics({"n": 1})

    reports = await second.close(), await first.close()

    assert [report.closed for report in reports] == [[], ["buffered"]]
    assert log == ["open", 1]


async def test_a_worker_that_could_not_open_a_destination_is_not_helped_by_closing() -> None:
    """What was logged for it is lost already, and counted."""
    log: list[Any] = []
    refusing = Opened(log, open=ConnectionError("down"))
    async with Engine(events=Job, callbacks=[background(refusing)]) as engine:
        engine.logger.log_metrics({"n": 1})
        await engine.run_event(Job.RUN)
        report = await engine.close()

    assert (log, report.undelivered) == (["open"], {"opened": 1})


async def test_a_destination_that_hangs_in_opening_does_not_hold_up_the_close(caplog: pytest.LogCaptureFixture) -> None:
    """Its records are reported as lost at the deadline."""
    engine = Engine(callbacks=[hanging := Opened([])])
    hanging.open = hang  # type: ignore[method-assign]
    engine.logger.log_metrics({"n": 1})
    with anyio.fail_after(5):
        report = await engine.close(timeout=0.01)

    assert report.undelivered == {"opened": 1}
    assert "destination opened could not be opened" in caplog.messages


async def hang(state: Any, logger: Any) -> None:
    """An `open` whose far side never answers."""
    await anyio.sleep_forever()


async def test_what_a_destination_that_will_not_open_never_gets_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost in silence."""
    log = list[Any]()
    engine = Engine(callbacks=[Opened(log, open=ConnectionError("down"))])
    engine.logger.log_metrics({"n": 1})
    report = await engine.close()

    assert (log, report.undelivered, report.ok) == (["open"], {"opened": 1}, False)
    assert "destination opened could not be opened" in caplog.messages


async def test_a_destination_that_will_not_open_gets_no_event() -> None:
    """Nor what was logged, which waits for an event before which it opens."""
    log = list[Any]()
    opened = Opened(log, open=ConnectionError("down"))
    async with Engine(callbacks=[opened]) as engine:
        engine.logger.log_metrics({"n": 1})
        await engine.run_event("fit_start")
        assert log == ["open"]
        del opened.actions["open"]
        await engine.run_event("epoch_start")

        assert log == ["open", "open", 1]


class Says(Algorithm[Any, Any]):
    """Logs numbers while it runs."""

    def __init__(self, *numbers: int, event: Job = Job.RUN) -> None:
        self.numbers = numbers
        self.event = event

    def match(self, event: EventName, state: Any) -> bool:
        """On its event."""
        return event is self.event

    async def apply(self, event: EventName, state: Any, logger: Any) -> None:
        """Log."""
        for n in self.numbers:
            logger.log_metrics({"n": n})
            await anyio.lowlevel.checkpoint()


async def test_rule_5_7_logging_is_a_plain_call_that_returns_at_once() -> None:
    """An async destination gets its records at its stage: after the callbacks, in order, before its own hook."""
    log: list[Any] = []

    class Hooked(Remote):
        async def run(self, state: Any, logger: Any) -> None:
            self.log.append("hook")

    class Talks(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            result = logger.log_metrics({"n": 3})
            log.append(("callback", result))

    engine = Engine(events=Job, algorithms=[Says(1, 2)], callbacks=[Hooked(log), Talks()])

    await engine.run_event(Job.RUN)

    assert log == [("callback", None), 1, 2, 3, "hook"]


async def test_rule_5_7_a_plain_hook_comes_after_the_records_too() -> None:
    """Whatever kind of function it is."""
    log: list[Any] = []

    class Hooked(Remote):
        def run(self, state: Any, logger: Any) -> None:
            self.log.append("hook")

    engine = Engine(events=Job, algorithms=[Says(1, 2)], callbacks=[Hooked(log)])

    await engine.run_event(Job.RUN)

    assert log == [1, 2, "hook"]


async def test_rule_5_7_a_plain_method_that_returns_an_awaitable() -> None:
    """What it returns is awaited at the destination stage."""
    log: list[Any] = []

    class Sly(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
            log.append("called")
            return deliver(metrics["n"])

    async def deliver(n: int) -> None:
        await anyio.lowlevel.checkpoint()
        log.append(n)

    engine = Engine(events=Job, algorithms=[Says(1, 2)], callbacks=[Sly()])

    await engine.run_event(Job.RUN)

    assert log == ["called", "called", 1, 2]


async def test_rule_5_2_a_destination_in_quarantine_gets_no_more_records() -> None:
    """They are counted as undelivered, and do not pile up."""
    log: list[Any] = []
    remote = Remote(log, **{"1": OSError("net")})
    remote.on_error, remote.quarantine_after = "quarantine", 1
    says = Says(1)
    engine = Engine(events=Job, algorithms=[says], callbacks=[remote])

    await engine.run_event(Job.RUN)
    says.numbers = (2, 3)
    await engine.run_event(Job.RUN)
    waiting = len(engine.logger.pending(remote) or ())
    await engine.run_event(Job.SUB)
    report = await engine.close()

    assert (log, waiting) == ([], 0)
    assert report.undelivered == {"remote": 3}


async def test_rule_5_7_a_record_is_what_was_logged() -> None:
    """What the caller does to its dict afterwards does not show."""
    log: list[Any] = []

    class Reuses(Callback[Any]):
        def run(self, state: Any, logger: Any) -> None:
            metrics = {"n": 1}
            logger.log_metrics(metrics)
            metrics["n"] = 2

    engine = Engine(events=Job, callbacks=[Remote(log), Reuses()])

    await engine.run_event(Job.RUN)

    assert log == [1]


async def test_rule_5_7_without_records_only_the_hook_runs() -> None:
    """Plain or async; a destination without one is not called."""
    log: list[Any] = []

    class Hooked(Remote):
        def run(self, state: Any, logger: Any) -> None:
            self.log.append("hook")

    engine = Engine(events=Job, callbacks=[Hooked(log), Remote(log)])

    await engine.run_event(Job.RUN)

    assert log == ["hook"]


async def test_rule_5_7_a_failing_destination_never_reaches_the_algorithm(caplog: pytest.LogCaptureFixture) -> None:
    """Nor the other destinations, nor the records behind; plain destinations fail just as quietly."""
    log: list[Any] = []

    class Plain(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise OSError("disk")

    memory = InMemoryLogger()
    engine = Engine(
        events=Job, algorithms=[Says(1, 2, 3)], callbacks=[Plain(), Remote(log, **{"2": OSError("net")}), memory]
    )

    traces = await engine.run_event(Job.RUN)

    assert traces["says/RUN"].outcome == "ok"
    assert log == [1, 3]
    assert [value for _, value in memory.data["n"]] == [1, 2, 3]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "destination plain failed on RUN",
        "destination remote failed on RUN",
    ]


async def test_rule_5_7_a_destination_that_wants_to_be_heard() -> None:
    """`on_error = "raise"` makes the event fail with all its failures: records and hook, one group for several."""
    log: list[Any] = []

    class Loud(Remote):
        on_error = "raise"

        def run(self, state: Any, logger: Any) -> None:
            raise ValueError("hook")

    engine = Engine(events=Job, algorithms=[Says(1, 2)], callbacks=[Loud(log, **{"1": OSError("net")})])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    (group,) = caught.value.exceptions
    assert isinstance(group, ExceptionGroup)
    assert group.message == "2 failures of destination loud"
    assert [str(error) for error in group.exceptions] == ["net", "hook"]
    assert log == [2]


async def test_rule_5_7_a_destination_that_hangs_is_cut_off_by_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on; the records behind come with the next event; the one cut off is counted as lost."""
    log: list[Any] = []
    remote = Remote(log, **{"1": anyio.sleep_forever})
    remote.timeout = 0.01
    says = Says(1, 2)
    engine = Engine(events=Job, algorithms=[says], callbacks=[remote])

    await engine.run_event(Job.RUN)
    says.numbers = ()
    await engine.run_event(Job.RUN)
    report = await engine.close()

    assert log == [2]
    assert report.undelivered == {"remote": 1}
    assert caplog.messages[0] == "destination remote failed on RUN"


async def test_rule_5_7_records_stay_in_order_across_lanes() -> None:
    """While one event delivers, another's destination stage waits: no record overtakes another, and none is left."""
    log: list[Any] = []
    go = anyio.Event()

    class Talks(Callback[Any]):
        def run(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"n": state})

    engine = Engine(events=Job, callbacks=[Remote(log, **{"1": go.wait}), Talks()])

    async def run(n: int) -> None:
        await engine.run_event(Job.RUN, n)
        log.append(f"event {n}")

    before: list[Any] = []
    async with anyio.create_task_group() as group:
        for n in (1, 2, 3):
            group.start_soon(run, n)
            await settle()
        before = list(log)
        go.set()

    assert before == []
    assert [entry for entry in log if isinstance(entry, int)] == [1, 2, 3]
    assert log.index(3) < log.index("event 3")
    assert log.index(2) < log.index("event 2")


async def test_rule_5_7_a_destination_may_publish() -> None:
    """While it delivers: the nested event's destination stage does not wait for itself, and its records come next."""
    log: list[Any] = []

    async def publish() -> None:
        await engine.run_event(Job.SUB, "state")
        log.append("published")

    engine = Engine(
        events=Job, algorithms=[Says(1, 2), Says(7, event=Job.SUB)], callbacks=[Remote(log, **{"1": publish})]
    )

    with anyio.fail_after(5):
        await engine.run_event(Job.RUN, "state")

    assert log == ["published", 1, 2, 7]


async def test_rule_5_7_what_is_logged_in_a_failed_event_comes_with_the_next() -> None:
    """An algorithm logs, then fails: its records are not lost."""
    log: list[Any] = []

    class Breaks(Says):
        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            await super().apply(event, state, logger)
            raise LookupError

    engine = Engine(events=Job, algorithms=[Breaks(1)], callbacks=[Remote(log)])

    with pytest.raises(LookupError):
        await engine.run_event(Job.RUN)
    before = list(log)
    await engine.run_event(Job.SUB)

    assert (before, log) == ([], [1])


async def test_rule_5_7_destinations_of_the_logger() -> None:
    """A logger of the user's brings its destinations, once each; they get hooks, traces, and are closed."""
    log: list[Any] = []

    class Hooked(Remote):
        async def run(self, state: Any, logger: Any) -> None:
            self.log.append("hook")

        async def log_traces(self, traces: Traces, step: int | None = None) -> None:
            self.log.append([*traces])

        async def close(self, state: Any, logger: Any) -> None:
            self.log.append("close")

    hooked = Hooked(log)
    engine = Engine(logger=Logger(None, [hooked]), events=Job, algorithms=[Says(1)], callbacks=[hooked])

    async with engine:
        await engine.run_event(Job.RUN)

    assert log == [1, ["says/RUN"], "hook", "close"]
