"""Closing: the order, the deadline, the report, and who may still publish."""

from __future__ import annotations

import gc
import logging
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    CallbackInUseError,
    CloseReport,
    Engine,
    EngineClosedError,
    EventName,
    LoggerDestination,
)

pytestmark = pytest.mark.anyio


async def settle() -> None:
    """Let every task go on until it waits for something."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


class Job(EventName):
    """A vocabulary."""

    RUN = "run"
    SUB = "sub"


class Life(Callback[Any]):
    """Notes every station of its life; fails or hangs where it is told to."""

    def __init__(self, name: str, log: list[str], **actions: Any) -> None:
        self.name = name
        self.log = log
        self.actions = actions

    async def act(self, station: str) -> None:
        """Note, then raise or await what the station has."""
        self.log.append(f"{self.name} {station}")
        action = self.actions.get(station)
        if isinstance(action, BaseException):
            raise action
        if action is not None:
            await action()

    async def open(self, state: Any, logger: Any) -> None:
        """Open."""
        await self.act("open")

    async def run(self, state: Any, logger: Any) -> None:
        """Run."""
        await self.act("run")

    async def close(self, state: Any, logger: Any) -> None:
        """Close."""
        await self.act("close")

    async def post_close(self) -> None:
        """Clean up."""
        await self.act("post_close")


class PlainLife(Callback[Any]):
    """The same with plain functions, and without `open`."""

    def __init__(self, name: str, log: list[str], error: Exception | None = None) -> None:
        self.name = name
        self.log = log
        self.error = error

    def run(self, state: Any, logger: Any) -> None:
        """Run."""
        self.log.append(f"{self.name} run")

    def close(self, state: Any, logger: Any) -> None:
        """Close."""
        self.log.append(f"{self.name} close")
        if self.error is not None:
            raise self.error

    def post_close(self) -> None:
        """Clean up."""
        self.log.append(f"{self.name} post_close")


class OutLife(PlainLife, LoggerDestination):
    """A destination with a life."""


async def test_rule_5_6_close_then_post_close() -> None:
    """Every callback closes, then the destinations, then `post_close` for all."""
    log: list[str] = []
    engine = Engine(events=Job, callbacks=[OutLife("out", log), Life("a", log), PlainLife("b", log)])

    async with engine:
        await engine.run_event(Job.RUN)
        log.clear()
    report = await engine.close()

    assert log == ["a close", "b close", "out close", "out post_close", "a post_close", "b post_close"]
    assert report == CloseReport(closed=["out", "a", "b"])
    assert report.ok


async def test_rule_5_6_close_gets_state_and_logger() -> None:
    """The logger still works: what is logged while closing arrives."""
    seen: list[Any] = []

    class Says(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            seen.append(state)
            logger.log_metrics({"last": 1.0})

    class Out(LoggerDestination):
        async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append(metrics)

        def close(self, state: Any, logger: Any) -> None:
            seen.append("closed")

    engine = Engine("state", events=Job, callbacks=[Out(), Says()])

    report = await engine.close()

    assert seen == ["state", {"last": 1.0}, "closed"]
    assert report.ok


async def test_rule_5_6_exceptions_are_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    """One that fails keeps nobody back; its `post_close` is left out; the report has the exception itself."""
    log: list[str] = []
    close_error, post_error = ValueError("close"), KeyError("post_close")
    engine = Engine(
        events=Job,
        callbacks=[
            Life("a", log, close=close_error),
            PlainLife("b", log, TypeError("plain")),
            Life("c", log, post_close=post_error),
            Life("d", log),
        ],
    )
    await engine.run_event(Job.RUN)
    log.clear()

    report = await engine.close()

    assert log == ["a close", "b close", "c close", "d close", "c post_close", "d post_close"]
    assert report.closed == ["d"]
    assert {name: type(error) for name, error in report.failed.items()} == {
        "a": ValueError,
        "b": TypeError,
        "c": KeyError,
    }
    assert report.failed["a"] is close_error
    assert not report.ok
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, "callback a failed in close"),
        (logging.ERROR, "callback b failed in close"),
        (logging.ERROR, "callback c failed in post_close"),
    ]


async def test_rule_5_6_the_deadline_holds(caplog: pytest.LogCaptureFixture) -> None:
    """A `close` that hangs is cancelled, named, and its `post_close` left out; the others are closed."""
    log: list[str] = []

    class Sly(Callback[Any]):
        """A plain `close` that returns something to await."""

        def close(self, state: Any, logger: Any) -> Any:
            return anyio.sleep_forever()

    engine = Engine(
        events=Job,
        callbacks=[
            Life("a", log, close=anyio.sleep_forever),
            Life("b", log),
            Life("c", log, post_close=anyio.sleep_forever),
            Sly(),
        ],
    )
    await engine.run_event(Job.RUN)
    log.clear()

    with anyio.fail_after(5):
        report = await engine.close(timeout=0.02)

    assert log == ["a close", "b close", "c close", "b post_close", "c post_close"]
    assert (report.closed, report.timed_out) == (["b"], ["a", "sly", "c"])
    assert "callback a did not finish close by the deadline" in caplog.text


async def test_rule_5_6_close_waits_for_what_runs() -> None:
    """Events under way are handled to their end, nested ones included; new ones are refused meanwhile."""
    log: list[str] = []
    inside, go = anyio.Event(), anyio.Event()

    async def run() -> None:
        inside.set()
        await go.wait()
        await engine.run_event(Job.SUB)
        log.append("nested was admitted")

    engine = Engine(events=Job, callbacks=[Life("a", log, run=run)])

    before: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Job.RUN)
        await inside.wait()
        group.start_soon(engine.close)
        await settle()
        with pytest.raises(
            EngineClosedError, match="RUN was published, but the engine is closing; publish before close"
        ):
            await engine.run_event(Job.RUN)
        before = list(log)
        go.set()

    assert before == ["a open", "a run"]
    assert log == ["a open", "a run", "nested was admitted", "a close", "a post_close"]


async def test_rule_5_6_what_runs_beyond_the_deadline_is_reported() -> None:
    """The callbacks are closed all the same, stay closed, and what the event still nests is refused."""
    log: list[str] = []
    go = anyio.Event()
    errors: list[BaseException] = []

    class Wait(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            await go.wait()
            try:
                await engine.run_event(Job.SUB)
            except EngineClosedError as error:
                errors.append(error)

    engine = Engine(events=Job, algorithms=[Wait()], callbacks=[Life("a", log)])

    report = CloseReport()
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Job.RUN)
        await settle()
        report = await engine.close(timeout=0.01)
        go.set()

    assert report.in_flight == ("RUN",)
    assert not report.ok
    assert log == ["a open", "a close", "a post_close"]
    assert [str(error) for error in errors] == [
        "SUB was published, but the engine is closed; publish before close(), or make a new Engine"
    ]


async def test_rule_5_6_a_closed_engine_refuses_events() -> None:
    """By `run_event` and by its bus; the error says what to do."""
    engine = Engine(events=Job)
    await engine.close()

    message = r"the engine is closed; publish before close\(\), or make a new Engine"
    with pytest.raises(EngineClosedError, match=message):
        await engine.run_event(Job.RUN)
    with pytest.raises(EngineClosedError, match=message):
        await engine.bus.publish(Job.RUN)

    assert engine.closed


async def test_rule_5_6_another_engine_on_the_bus_goes_on() -> None:
    """Events of the other's vocabulary still pass through the closed one."""

    class Other(EventName):
        RUN = "run"

    log: list[str] = []
    closed = Engine(events=Job)
    other = Engine(events=Other, bus=closed.bus, callbacks=[PlainLife("other", log)])
    await closed.close()

    await other.run_event(Other.RUN)

    assert log == ["other run"]


async def test_rule_5_6_closing_twice_is_no_error() -> None:
    """The second time brings the same report, and closes nothing again."""
    log: list[str] = []
    engine = Engine(events=Job, callbacks=[PlainLife("a", log)])

    reports = [await engine.close(), await engine.close()]

    assert reports[0] is reports[1]
    assert log == ["a close", "a post_close"]


async def test_rule_5_6_closing_concurrently() -> None:
    """Whoever comes second waits for the first, and gets the same, finished report."""
    log: list[str] = []
    go = anyio.Event()
    reports: list[CloseReport] = []

    async def close() -> None:
        reports.append(await engine.close())

    engine = Engine(events=Job, callbacks=[Life("a", log, close=go.wait)])
    await engine.run_event(Job.RUN)

    before: list[CloseReport] = []
    async with anyio.create_task_group() as group:
        group.start_soon(close)
        group.start_soon(close)
        await settle()
        before = list(reports)
        go.set()

    assert before == []
    assert reports[0] is reports[1]
    assert reports[0].closed == ["a"]
    assert log == ["a open", "a run", "a close", "a post_close"]


@pytest.mark.parametrize("where", ["algorithm", "callback", "plain task"])
async def test_rule_5_6_close_from_inside_a_handler(where: str) -> None:
    """It marks the closing and returns; the closing happens once that event has been handled."""
    log: list[str] = []
    reports: list[CloseReport] = []

    async def close() -> None:
        reports.append(await engine.close())
        log.append("close returned")

    async def close_in_a_task() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(close)

    class Closes(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return where == "algorithm"

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            await close()

    actions = {"algorithm": {}, "callback": {"run": close}, "plain task": {"run": close_in_a_task}}[where]
    engine = Engine(events=Job, algorithms=[Closes()], callbacks=[Life("a", log, **actions)])

    await engine.run_event(Job.RUN)
    with pytest.raises(EngineClosedError):
        await engine.run_event(Job.RUN)

    assert reports == [CloseReport(pending=True)]
    assert not reports[0].ok
    assert sorted(log[:3]) == ["a open", "a run", "close returned"]
    assert log[3:] == ["a close", "a post_close"]
    assert (await engine.close()).closed == ["a"]


async def test_rule_5_6_close_from_inside_waits_for_other_lanes() -> None:
    """The last event under way brings the closing about, whoever asked for it."""
    log: list[str] = []
    go = anyio.Event()

    async def run() -> None:
        if len(log) == 3:
            await engine.close()
        else:
            await go.wait()

    engine = Engine(events=Job, callbacks=[Life("a", log, run=run)])

    before: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Job.RUN, object())
        await settle()
        group.start_soon(engine.run_event, Job.RUN, object())
        await settle()
        before = list(log)
        go.set()

    assert before == ["a open", "a run", "a run"]
    assert log == ["a open", "a run", "a run", "a close", "a post_close"]


async def test_rule_5_6_close_from_inside_although_the_event_fails() -> None:
    """The failure comes out, and the engine is closed."""
    log: list[str] = []

    async def run() -> None:
        await engine.close()
        raise ValueError

    engine = Engine(events=Job, callbacks=[Life("a", log, run=run)])

    with pytest.raises(CallbackErrors):
        await engine.run_event(Job.RUN)

    assert log == ["a open", "a run", "a close", "a post_close"]


async def test_rule_5_6_close_from_inside_a_close() -> None:
    """A `close` that asks the engine to close does not wait for itself."""
    log: list[str] = []
    reports: list[CloseReport] = []

    async def close() -> None:
        reports.append(await engine.close())

    engine = Engine(events=Job, callbacks=[Life("a", log, close=close)])
    await engine.run_event(Job.RUN)

    with anyio.fail_after(5):
        report = await engine.close()

    assert [each.pending for each in reports] == [True]
    assert report.ok


async def test_rule_5_6_publishing_from_a_close_is_refused() -> None:
    """It is that callback's failure."""
    engine: Engine[Any] = Engine(events=Job, callbacks=[Life("a", [], close=lambda: engine.run_event(Job.RUN))])
    await engine.run_event(Job.RUN)

    report = await engine.close()

    assert [type(error) for error in report.failed.values()] == [EngineClosedError]


async def test_rule_5_6_closing_holds_under_cancellation() -> None:
    """In a cancelled scope, a `finally` included, everything is closed before the cancellation goes on."""
    log: list[str] = []
    engine = Engine(events=Job, callbacks=[Life("a", log, close=anyio.lowlevel.checkpoint)])
    other = Engine(events=Job, callbacks=[Life("b", log, close=anyio.lowlevel.checkpoint)])

    with anyio.CancelScope() as scope:
        try:
            async with other:
                await engine.run_event(Job.RUN)
                await other.run_event(Job.RUN)
                scope.cancel()
                await anyio.sleep_forever()
        finally:
            await engine.close()

    assert scope.cancelled_caught
    assert log[4:] == ["b close", "b post_close", "a close", "a post_close"]


async def test_rule_5_6_the_context_manager_closes_when_the_block_fails() -> None:
    """And the block's exception comes out."""
    log: list[str] = []

    with pytest.raises(LookupError):  # noqa: PT012
        async with Engine(events=Job, callbacks=[PlainLife("a", log)]) as engine:
            await engine.run_event(Job.RUN)
            raise LookupError

    assert log == ["a run", "a close", "a post_close"]


async def test_rule_5_6_a_callback_that_never_opened_is_left_alone() -> None:
    """No event came, or its `open` failed: there is nothing to close. One without `open` is closed in any case."""
    log: list[str] = []
    unused = Engine(events=Job, callbacks=[Life("a", log), PlainLife("b", log)])
    failed = Engine(events=Job, callbacks=[Life("c", log, open=ConnectionError())])
    with pytest.raises(CallbackErrors):
        await failed.run_event(Job.RUN)

    reports = [await unused.close(), await failed.close()]

    assert log == ["c open", "b close", "b post_close"]
    assert [report.closed for report in reports] == [["b"], []]


async def test_rule_5_6_a_callback_that_left_the_run_is_closed_with_it() -> None:
    """It was opened, so it is closed, though the state's list no longer has it."""
    log: list[str] = []

    class Holder:
        callbacks: ClassVar[list[Any]] = [Life("a", log), Life("b", log)]

    engine = Engine(Holder(), events=Job)
    await engine.run_event(Job.RUN)
    del Holder.callbacks[0]
    await engine.run_event(Job.RUN)
    log.clear()

    report = await engine.close()

    assert sorted(log) == ["a close", "a post_close", "b close", "b post_close"]
    assert sorted(report.closed) == ["a", "b"]


async def test_rule_5_6_a_callback_in_two_engines() -> None:
    """Open in one, it is refused by the other, named and with the cure; closed there, it may open here."""
    log: list[str] = []
    shared = Life("shared", log)
    first, second = Engine(events=Job, callbacks=[shared]), Engine(events=Job, callbacks=[shared])
    await first.run_event(Job.RUN)

    with pytest.raises(CallbackInUseError, match="callback shared is open in another engine; close that one first"):
        await second.run_event(Job.RUN)
    await first.close()
    await second.run_event(Job.RUN)

    assert log == ["shared open", "shared run", "shared close", "shared post_close", "shared open", "shared run"]


async def test_rule_5_6_an_engine_closes_no_callback_of_another() -> None:
    """Closing an engine that never got to use a shared callback leaves it open where it is open."""
    log: list[str] = []
    shared = PlainLife("shared", log)
    first, second = Engine(events=Job, callbacks=[shared]), Engine(events=Job, callbacks=[shared])
    await first.run_event(Job.RUN)

    report = await second.close()
    with pytest.raises(CallbackInUseError):
        await Engine(events=Job, callbacks=[shared]).run_event(Job.RUN)
    await first.close()

    assert report.closed == []
    assert log == ["shared run", "shared close", "shared post_close"]


async def test_rule_5_6_an_engine_that_is_gone_holds_nothing() -> None:
    """Its callbacks may be used elsewhere, though it was never closed."""
    log: list[str] = []
    shared = PlainLife("shared", log)
    engine = Engine(events=Job, callbacks=[shared])
    await engine.run_event(Job.RUN)
    del engine
    gc.collect()

    await Engine(events=Job, callbacks=[shared]).run_event(Job.RUN)

    assert log == ["shared run", "shared run"]


async def test_rule_5_6_a_callback_without_a_life_may_be_shared() -> None:
    """It holds nothing between events."""

    class Plain(Callback[Any]):
        def __init__(self) -> None:
            self.count = 0

        def run(self, state: Any, logger: Any) -> None:
            self.count += 1

    shared = Plain()
    for _ in range(2):
        await Engine(events=Job, callbacks=[shared]).run_event(Job.RUN)

    assert shared.count == 2


async def test_rule_5_6_undelivered_records_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Those the deadline leaves, the one under way included, and those a destination failed on."""

    class Slow(LoggerDestination):
        async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            await anyio.sleep_forever()

    class Fails(LoggerDestination):
        async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if metrics["n"] != 1:
                raise ConnectionError("down")

    class Late(Callback[Any]):
        def post_close(self) -> None:
            engine.logger.log_metrics({"n": 1})

    engine = Engine(events=Job, callbacks=[Slow(), Fails(), Late()])
    for n in range(3):
        engine.logger.log_metrics({"n": n})

    with anyio.fail_after(5):
        report = await engine.close(timeout=0.02)

    assert report.undelivered == {"slow": 4, "fails": 3}
    assert not report.ok
    assert "destination slow was closed with 4 records undelivered" in caplog.text
    assert "destination fails failed while closing" in caplog.text


async def test_rule_5_6_a_logger_that_is_not_ours() -> None:
    """Anything may be the logger; there is nothing to deliver then."""

    class Mine:
        destinations = ()

    engine = Engine(logger=Mine(), events=Job, callbacks=[PlainLife("a", [])])

    report = await engine.close()

    assert report.closed == ["a"]


async def test_rule_5_6_a_closed_engine_cannot_be_entered_again() -> None:
    """It would take no event; the place to say so is the first line that tries."""
    engine = Engine()
    await engine.close()

    with pytest.raises(EngineClosedError, match="cannot be entered again; make a new Engine"):
        await engine.__aenter__()
