"""Failure: what raises, who still runs, and what comes out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import (
    Algorithm,
    AsyncMatchError,
    Callback,
    CallbackErrors,
    Engine,
    Event,
    EventBusError,
    EventName,
    LoggerDestination,
    Traces,
)
from eventbus_engine.testing import FakeAlgorithm

pytestmark = pytest.mark.anyio


class Job(EventName):
    """A vocabulary."""

    RUN = "run"
    SUB = "sub"


class Work(Algorithm[Any, Any]):
    """Does what it is told on RUN."""

    def __init__(self, name: str, action: Any = None, event: Job = Job.RUN) -> None:
        self.name = name
        self.action = action
        self.event = event

    def match(self, event: EventName, state: Any) -> bool:
        """On its event."""
        return event is self.event

    async def apply(self, event: EventName, state: Any, logger: Any) -> int:
        """Raise it if it is an exception, else await it."""
        if isinstance(self.action, BaseException):
            await anyio.lowlevel.checkpoint()
            raise self.action
        if self.action is not None:
            await self.action()
        return 1


class PlainWork(Work):
    """The same as a plain function."""

    def apply(self, event: EventName, state: Any, logger: Any) -> int:  # type: ignore[override]
        """Raise it if it is an exception."""
        if isinstance(self.action, BaseException):
            raise self.action
        return 1


class Watch(Callback[Any]):
    """Notes that it ran, then raises what it is told."""

    def __init__(self, name: str, log: list[str], error: BaseException | None = None, checkpoints: int = 0) -> None:
        self.name = name
        self.log = log
        self.error = error
        self.checkpoints = checkpoints

    async def run(self, state: Any, logger: Any) -> None:
        """Note, wait, raise."""
        for _ in range(self.checkpoints):
            await anyio.lowlevel.checkpoint()
        self.log.append(self.name or "")
        if self.error is not None:
            raise self.error


class PlainWatch(Watch):
    """The same as a plain function."""

    def run(self, state: Any, logger: Any) -> None:  # type: ignore[override]
        """Note, raise."""
        self.log.append(self.name or "")
        if self.error is not None:
            raise self.error


class Out(LoggerDestination):
    """A destination with a hook."""

    def __init__(self, name: str, log: list[str], error: Exception | None = None) -> None:
        self.name = name
        self.log = log
        self.error = error

    def run(self, state: Any, logger: Any) -> None:
        """Note, raise."""
        self.log.append(self.name or "")
        if self.error is not None:
            raise self.error


class Stop(BaseException):
    """Stands for KeyboardInterrupt, which would end the test run."""


def traces_of(error: BaseException) -> Traces:
    """What ran before the failure."""
    return error.traces  # type: ignore[attr-defined, no-any-return]


# ------------------------------------------------------------------------------------------------- an algorithm raises


@pytest.mark.parametrize("kind", [Work, PlainWork])
async def test_rule_5_1_an_algorithm_that_raises_ends_the_event(kind: type[Work]) -> None:
    """The ones after it and the callbacks do not run; the exception propagates as itself, with note and traces."""
    log: list[str] = []
    error = ValueError("broken")
    engine = Engine(
        events=Job,
        algorithms=[Work("before"), kind("breaks", error), Work("after"), Work("other", event=Job.SUB)],
        callbacks=[Watch("callback", log), Out("destination", log)],
    )

    with pytest.raises(ValueError, match="broken") as caught:
        await engine.run_event(Job.RUN)

    assert caught.value is error
    assert error.__notes__ == ["in algorithm breaks on RUN"]
    assert log == []
    traces = traces_of(error)
    assert [*traces] == ["before/RUN", "breaks/RUN", "after/RUN", "other/RUN"]
    assert [trace.outcome for trace in traces.values()] == ["ok", "failed", "skipped", "skipped"]
    assert [trace.reason for trace in traces.values()] == ["", "", "not reached", "not matched"]
    assert traces["breaks/RUN"].error is error
    assert traces["breaks/RUN"].run
    assert traces["breaks/RUN"].duration_ns > 0


async def test_rule_5_1_the_engine_goes_on_after_a_failure() -> None:
    """The next event runs as if nothing had been, on the same lane."""
    log: list[str] = []
    failing = PlainWork("breaks", ValueError())
    engine = Engine(object(), events=Job, algorithms=[failing], callbacks=[Watch("callback", log)])

    with pytest.raises(ValueError):  # noqa: PT011
        await engine.run_event(Job.RUN)
    failing.action = None
    await engine.run_event(Job.RUN)

    assert log == ["callback"]


async def test_rule_5_1_the_innermost_traces_win() -> None:
    """An algorithm publishes an event in which another fails: the traces are the inner event's, the notes of both."""
    engine: Engine[Any] = Engine(
        events=Job,
        algorithms=[
            Work("outer", lambda: engine.run_event(Job.SUB)),
            PlainWork("inner", KeyError("inner"), event=Job.SUB),
        ],
    )

    with pytest.raises(KeyError) as caught:
        await engine.run_event(Job.RUN)

    assert [*traces_of(caught.value)] == ["inner/SUB", "outer/SUB"]
    assert caught.value.__notes__ == ["in algorithm inner on SUB", "in algorithm outer on RUN"]


async def test_rule_5_1_a_match_that_raises() -> None:
    """It counts as the algorithm's failure: nothing runs, and the note says where."""

    class Picky(Work):
        def match(self, event: EventName, state: Any) -> bool:
            raise LookupError("no label")

    engine = Engine(events=Job, algorithms=[Work("first"), Picky("picky")])

    with pytest.raises(LookupError) as caught:
        await engine.run_event(Job.RUN)

    assert caught.value.__notes__ == ["in match of algorithm picky on RUN"]
    assert [trace.reason for trace in traces_of(caught.value).values()] == ["not reached", "not reached"]


@pytest.mark.parametrize("result", ["coroutine", "future"])
async def test_rule_5_1_a_match_that_turns_out_to_be_async(result: str) -> None:
    """A lambda around a coroutine function would always be true: it is refused, naming the algorithm."""

    async def later() -> bool:
        return False

    class Future:
        def __await__(self) -> Any:
            yield

    class Sly(Work):
        match = staticmethod(lambda event, state: later() if result == "coroutine" else Future())  # type: ignore[assignment]

    engine = Engine(events=Job, algorithms=[Sly("sly")])

    with pytest.raises(AsyncMatchError, match=r"sly\.match is async; matching decides the order"):
        await engine.run_event(Job.RUN)


async def test_rule_5_1_a_match_may_return_anything_with_a_truth() -> None:
    """What counts is whether it is true."""

    class Loose(Work):
        def match(self, event: EventName, state: Any) -> Any:
            return state

    engine = Engine(events=Job, algorithms=[Loose("loose")])

    ran = [(await engine.run_event(Job.RUN, state))["loose/RUN"].run for state in ("x", "", [0], [])]

    assert ran == [True, False, True, False]


async def test_rule_5_1_a_pass_that_raises() -> None:
    """It is named, and the traces say that nothing was reached."""

    def broken(algorithms: Any, event: Any) -> Any:
        raise ZeroDivisionError

    engine = Engine(events=Job, algorithms=[Work("it")], algorithm_passes=broken)

    with pytest.raises(ZeroDivisionError) as caught:
        await engine.run_event(Job.RUN)

    assert caught.value.__notes__ == ["in pass broken on RUN"]
    assert [trace.reason for trace in traces_of(caught.value).values()] == ["not reached"]


async def test_rule_5_1_an_exception_that_cannot_be_noted() -> None:
    """An exception class that is frozen propagates as itself all the same, from algorithms and callbacks."""

    @dataclass(frozen=True)
    class Frozen(Exception):  # noqa: N818
        code: int

    engine = Engine(events=Job, algorithms=[PlainWork("breaks", Frozen(7))])
    other = Engine(events=Job, callbacks=[PlainWatch("watch", [], Frozen(8))])

    error: BaseException | None = None
    try:
        await engine.run_event(Job.RUN)
    except Frozen as raised:
        error = raised
    with pytest.raises(CallbackErrors) as caught:
        await other.run_event(Job.RUN)

    assert error == Frozen(7)
    assert caught.value.exceptions == (Frozen(8),)


# --------------------------------------------------------------------------------------------------- callbacks raise


async def test_rule_5_2_the_others_finish_and_destinations_run() -> None:
    """Whoever raises first: everybody runs to the end, then the failures come in registration order."""
    log: list[str] = []
    engine = Engine(
        events=Job,
        algorithms=[Work("algorithm")],
        callbacks=[
            Out("destination", log),
            Watch("slow", log, ValueError("slow"), checkpoints=5),
            PlainWatch("plain", log, KeyError("plain")),
            Watch("fine", log, checkpoints=9),
            Watch("quick", log, TypeError("quick")),
        ],
    )

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    assert sorted(log[:-1]) == ["fine", "plain", "quick", "slow"]
    assert log[-1] == "destination"
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError, TypeError]
    assert [error.__notes__ for error in caught.value.exceptions] == [
        [f"in callback {name} on RUN"] for name in ("slow", "plain", "quick")
    ]
    assert caught.value.message == "3 callbacks failed on RUN"
    assert [trace.outcome for trace in caught.value.traces.values()] == ["ok"]


async def test_rule_5_2_callback_errors_are_an_exception_group() -> None:
    """One failure is a group, too; `except*` and `split` take it apart; it is one of ours."""
    engine = Engine(
        events=Job, callbacks=[PlainWatch("it", [], ValueError("x")), PlainWatch("that", [], KeyError("y"))]
    )
    seen: list[str] = []

    try:
        await engine.run_event(Job.RUN)
    except* ValueError as group:
        seen.append(type(group).__name__)
    except* KeyError as group:
        seen.append(type(group).__name__)

    assert seen == ["CallbackErrors", "CallbackErrors"]
    assert issubclass(CallbackErrors, EventBusError)
    assert issubclass(CallbackErrors, ExceptionGroup)


async def test_rule_5_2_destinations_default_to_log(caplog: pytest.LogCaptureFixture) -> None:
    """Telemetry never kills a run; a destination that wants to be heard is, in its place among the callbacks."""
    log: list[str] = []
    loud = Out("loud", log, OSError("disk"))
    loud.on_error = "raise"
    engine = Engine(
        events=Job, callbacks=[Out("mute", log, OSError("network")), loud, Watch("it", log, ValueError("x"))]
    )

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    assert [str(error) for error in caught.value.exceptions] == ["disk", "x"]
    assert [record.getMessage() for record in caplog.records] == ["destination mute failed on RUN"]
    assert caplog.records[0].exc_info is not None


async def test_rule_5_2_on_init_a_destination_that_fails_keeps_nobody_back() -> None:
    """Destinations run first there; the callbacks run all the same, the algorithms do not, both failures come out."""
    log: list[str] = []

    class Loud(LoggerDestination):
        on_error = "raise"

        def init(self, state: Any, logger: Any) -> None:
            raise OSError("disk")

    class Fails(Callback[Any]):
        def init(self, state: Any, logger: Any) -> None:
            log.append("callback")
            raise ValueError("x")

    class Algo(Work):
        def match(self, event: EventName, state: Any) -> bool:
            log.append("match")
            return True

    engine = Engine(callbacks=[Fails(), Loud()], algorithms=[Algo("it")])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Event.INIT)

    assert [str(error) for error in caught.value.exceptions] == ["x", "disk"]
    assert log == ["callback"]


async def test_rule_5_2_on_error_log(caplog: pytest.LogCaptureFixture) -> None:
    """The event succeeds, and the failure is logged as an error with its traceback."""
    watch = Watch("careless", [], ValueError("x"))
    watch.on_error = "log"
    engine = Engine(events=Job, callbacks=[watch])

    for _ in range(5):
        await engine.run_event(Job.RUN)

    assert [record.getMessage() for record in caplog.records] == ["callback careless failed on RUN"] * 5
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert len(watch.log) == 5


async def test_rule_5_2_quarantine(caplog: pytest.LogCaptureFixture) -> None:
    """N failures in a row, and it is dropped; a success in between starts the count anew."""
    watch = Watch("flaky", [], ValueError("x"))
    watch.on_error, watch.quarantine_after = "quarantine", 2
    engine = Engine(events=Job, callbacks=[watch])

    for error in (ValueError("x"), None, ValueError("x"), None, ValueError("x"), ValueError("x"), None, None):
        watch.error = error
        await engine.run_event(Job.RUN)

    assert len(watch.log) == 6
    assert [record.getMessage() for record in caplog.records] == [
        "callback flaky failed on RUN",
        "callback flaky failed on RUN",
        "callback flaky failed on RUN",
        "callback flaky failed 2 times in a row, last on RUN, and is dropped from the run",
    ]


async def test_rule_5_2_quarantine_of_open(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that cannot open is tried N times, and no more."""
    tries: list[int] = []

    class Remote(Callback[Any]):
        on_error, quarantine_after = "quarantine", 3

        async def open(self, state: Any, logger: Any) -> None:
            tries.append(1)
            raise ConnectionError("down")

        def run(self, state: Any, logger: Any) -> None:
            tries.append(100)

    engine = Engine(events=Job, callbacks=[Remote()])

    for _ in range(6):
        await engine.run_event(Job.RUN)

    assert tries == [1, 1, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "callback remote failed in open, before RUN",
        "callback remote failed in open, before RUN",
        "callback remote failed 3 times in a row, last in open, before RUN, and is dropped from the run",
    ]


async def test_rule_5_2_an_open_that_fails_is_called_again_and_named() -> None:
    """The event it fails before does not run; the next one opens it, and does."""
    log: list[str] = []

    class Remote(Callback[Any]):
        async def open(self, state: Any, logger: Any) -> None:
            log.append("open")
            if log == ["open"]:
                raise ConnectionError("down")

        def run(self, state: Any, logger: Any) -> None:
            log.append("run")

    watched = FakeAlgorithm(apply=lambda *_: log.append("algorithm"))
    engine = Engine(events=Job, algorithms=[watched], callbacks=[Remote()])

    with pytest.raises(CallbackErrors, match="1 callback failed in open, before RUN") as caught:
        await engine.run_event(Job.RUN)
    await engine.run_event(Job.RUN)

    assert log == ["open", "open", "algorithm", "run"]
    assert caught.value.exceptions[0].__notes__ == ["in callback remote in open, before RUN"]


async def test_rule_5_2_what_a_callback_publishes_and_fails() -> None:
    """A failure in a nested event is the callback's own failure: a group within the group."""

    class Nests(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            await engine.run_event(Job.SUB)

        async def sub(self, state: Any, logger: Any) -> None:
            raise ValueError("sub")

    engine = Engine(events=Job, callbacks=[Nests()])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    (inner,) = caught.value.exceptions
    assert isinstance(inner, CallbackErrors)
    assert [str(error) for error in inner.exceptions] == ["sub"]


# ---------------------------------------------------------------------------------------------- what is no Exception


@pytest.mark.parametrize("beside", [[], [Watch], [PlainWatch], [Watch, PlainWatch]])
@pytest.mark.parametrize("kind", [Watch, PlainWatch])
async def test_rule_5_4_an_interrupt_propagates_as_itself(kind: type[Watch], beside: list[type[Watch]]) -> None:
    """What derives from BaseException alone ends the event at once, out of no group, with nothing left running."""
    log: list[str] = []
    stop = Stop()
    engine = Engine(
        object(),
        events=Job,
        callbacks=[*(other("beside", log, checkpoints=3) for other in beside), kind("it", log, stop)],
    )

    with pytest.raises(Stop) as caught:
        await engine.run_event(Job.RUN)

    assert caught.value is stop
    assert (len(engine.bus._lanes), len(engine._active)) == (0, 0)


async def test_rule_5_4_an_interrupt_of_several_callbacks() -> None:
    """The first of them comes out; cancellations it caused do not hide it."""

    class Raises(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            raise Stop

    class Cleans(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                raise Stop

    engine = Engine(events=Job, callbacks=[Cleans(), Raises(), Raises()])

    with pytest.raises(Stop):
        await engine.run_event(Job.RUN)


async def test_rule_5_4_an_interrupt_in_a_task_group_of_the_callback() -> None:
    """It comes out of all the groups around it, past what failed beside it."""

    async def fail(error: BaseException) -> None:
        raise error

    class Groups(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(fail, ValueError())
                group.start_soon(fail, Stop())

    engine = Engine(events=Job, callbacks=[Groups()])

    with pytest.raises(Stop):
        await engine.run_event(Job.RUN)


async def test_rule_5_4_an_interrupt_of_an_algorithm() -> None:
    """It propagates as itself, with a note; its trace is there for the logger."""
    seen: list[Any] = []

    class Keep(LoggerDestination):
        def log_traces(self, traces: Traces, step: int | None = None) -> None:
            seen.extend(traces.values())

    engine = Engine(events=Job, algorithms=[PlainWork("it", Stop()), Work("next")], callbacks=[Keep()])

    with pytest.raises(Stop) as caught:
        await engine.run_event(Job.RUN)

    assert caught.value.__notes__ == ["in algorithm it on RUN"]
    assert [(trace.name, trace.outcome, trace.reason) for trace in seen] == [
        ("it", "cancelled", ""),
        ("next", "skipped", "not reached"),
    ]
