"""Timeouts: past its limit a handler is cancelled, and has failed."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    ConfigurationError,
    Engine,
    EventName,
    HandlerTimeoutError,
    LoggerDestination,
    algorithm,
)

pytestmark = pytest.mark.anyio


class Job(EventName):
    """A vocabulary."""

    RUN = "run"


class Hang(Algorithm[Any, Any]):
    """Never returns by itself."""

    timeout = 0.01

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def match(self, event: EventName, state: Any) -> bool:
        """Run always."""
        return True

    async def apply(self, event: EventName, state: Any, logger: Any) -> Any:
        """Wait for ever, and clean up."""
        try:
            await anyio.sleep_forever()
        finally:
            self.log.append("cleaned up")


class HangingCallback(Callback[Any]):
    """Never returns by itself."""

    timeout = 0.01

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def run(self, state: Any, logger: Any) -> None:
        """Wait for ever, and clean up."""
        try:
            await anyio.sleep_forever()
        finally:
            self.log.append("cleaned up")


async def test_rule_5_3_timeout_of_an_async_algorithm() -> None:
    """It is cancelled, its outcome is `timed_out`, and the error names it, the event and the limit."""
    log: list[str] = []
    engine = Engine(events=Job, algorithms=[Hang(log)], callbacks=[HangingCallback(log)])

    with pytest.raises(HandlerTimeoutError, match=r"algorithm hang did not finish RUN within 0\.01 s") as caught:
        await engine.run_event(Job.RUN)

    trace = caught.value.traces["hang/RUN"]
    assert log == ["cleaned up"]
    assert (trace.outcome, trace.error) == ("timed_out", caught.value)
    assert isinstance(caught.value, TimeoutError)


async def test_rule_5_3_timeout_of_an_async_callback() -> None:
    """It counts as that callback's failure, and hits nobody else."""
    log: list[str] = []

    class Slower(Callback[Any]):
        async def run(self, state: Any, logger: Any) -> None:
            while "cleaned up" not in log:
                await anyio.lowlevel.checkpoint()
            log.append("slower")

    engine = Engine(events=Job, callbacks=[HangingCallback(log), Slower()])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    assert log == ["cleaned up", "slower"]
    (error,) = caught.value.exceptions
    assert isinstance(error, HandlerTimeoutError)
    assert str(error) == "callback hanging_callback did not finish RUN within 0.01 s"


async def test_rule_5_3_timeout_is_a_failure_to_on_error(caplog: pytest.LogCaptureFixture) -> None:
    """`log` logs it, `quarantine` counts it, a destination's does not stop the run."""
    log: list[str] = []
    logs, drops = HangingCallback(log), HangingCallback(log)
    logs.on_error, drops.on_error, drops.quarantine_after = "log", "quarantine", 1

    class Out(LoggerDestination):
        timeout = 0.01

        async def run(self, state: Any, logger: Any) -> None:
            await anyio.sleep_forever()

    engine = Engine(events=Job, callbacks=[logs, drops, Out()])

    await engine.run_event(Job.RUN)

    assert [record.getMessage() for record in caplog.records] == [
        "callback hanging_callback failed on RUN",
        "callback hanging_callback#2 failed 1 times in a row, last on RUN, and is dropped from the run",
        "destination out failed on RUN",
    ]


async def test_rule_5_3_within_the_limit_nothing_happens() -> None:
    """Results and exceptions come through as they are."""

    class Quick(Hang):
        timeout = 60

        async def apply(self, event: EventName, state: Any, logger: Any) -> int:
            await anyio.lowlevel.checkpoint()
            return 3

    class QuickCallback(HangingCallback):
        timeout = 60

        async def run(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            raise TimeoutError("of its own")

    engine = Engine(events=Job, algorithms=[Quick([])], callbacks=[QuickCallback([])])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Job.RUN)

    assert caught.value.traces["quick/RUN"].exit_code == 3
    assert [type(error) for error in caught.value.exceptions] == [TimeoutError]


async def test_rule_5_3_cancellation_from_outside_is_no_timeout() -> None:
    """A limit of the caller's around a handler with a limit of its own is the caller's cancellation."""
    log: list[str] = []
    slow, slow_callback = Hang(log), HangingCallback(log)
    slow.timeout = slow_callback.timeout = 60
    outcomes: list[bool] = []

    for engine in (Engine(events=Job, algorithms=[slow]), Engine(events=Job, callbacks=[slow_callback])):
        with anyio.move_on_after(0.01) as scope:
            await engine.run_event(Job.RUN)
        outcomes.append(scope.cancelled_caught)

    assert outcomes == [True, True]
    assert log == ["cleaned up", "cleaned up"]


async def test_rule_5_3_past_its_limit_a_callback_has_timed_out_whatever_it_does() -> None:
    """One that shields itself and finishes all the same was too late: the limit is a promise to everybody else."""

    class Stubborn(HangingCallback):
        async def run(self, state: Any, logger: Any) -> None:
            with anyio.move_on_after(0.02, shield=True):
                await anyio.sleep_forever()
            self.log.append("done")

    log: list[str] = []
    engine = Engine(events=Job, callbacks=[Stubborn(log)])

    with pytest.raises(CallbackErrors) as raised:
        await engine.run_event(Job.RUN)

    assert log == ["done"]
    assert [type(error) for error in raised.value.exceptions] == [HandlerTimeoutError]


@pytest.mark.parametrize("raising", [False, True])
async def test_rule_5_3_past_its_limit_an_algorithm_has_timed_out_whatever_it_does(raising: bool) -> None:
    """One that swallows its cancellation, or raises something else while it cleans up, has not met its limit either."""

    @algorithm(Job.RUN, timeout=0.01)
    async def swallowing(event: EventName, state: Any, logger: Any) -> int:
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            if raising:
                raise ZeroDivisionError from error
        return 1

    engine = Engine(events=Job, algorithms=[swallowing])

    with pytest.raises(HandlerTimeoutError, match="algorithm swallowing did not finish RUN within") as raised:
        await engine.run_event(Job.RUN)

    assert raised.value.traces["swallowing/RUN"].outcome == "timed_out"
    assert (type(raised.value.__cause__) is ZeroDivisionError) is raising


async def test_rule_5_3_a_failure_within_the_limit_is_itself() -> None:
    """Not everything that goes wrong under a limit is a matter of time."""

    @algorithm(Job.RUN, timeout=60)
    async def failing(event: EventName, state: Any, logger: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Engine(events=Job, algorithms=[failing]).run_event(Job.RUN)


def test_rule_5_3_on_a_plain_function_it_is_an_error_at_registration() -> None:
    """It runs on the loop and cannot be interrupted: the message says so, and the cure."""

    class PlainAlgorithm(Algorithm[Any, Any]):
        timeout = 1.0

        def match(self, event: EventName, state: Any) -> bool:
            return True

        def apply(self, event: EventName, state: Any, logger: Any) -> int:
            return 0

    class PlainCallback(Callback[Any]):
        timeout = 1.0

        def run(self, state: Any, logger: Any) -> None: ...

    class PlainForAll(Callback[Any]):
        timeout = 1.0

        def run_event(self, event: EventName, state: Any, logger: Any) -> None: ...

    with pytest.raises(
        ConfigurationError, match="algorithm plain_algorithm has a timeout, but apply is a plain function"
    ):
        Engine(events=Job, algorithms=[PlainAlgorithm()])
    with pytest.raises(
        ConfigurationError, match=r"callback plain_callback .* make it `async def run`, or drop the timeout"
    ):
        Engine(events=Job, callbacks=[PlainCallback()])
    with pytest.raises(ConfigurationError, match=r"callback plain_for_all .* make it `async def run_event`"):
        Engine(events=Job, callbacks=[PlainForAll()])


@pytest.mark.parametrize("timeout", [0, -1, "1", True, float("nan")])
def test_rule_5_3_the_limit_has_to_be_a_positive_number(timeout: Any) -> None:
    """Anything else is refused, naming whose it is."""
    hang, callback = Hang([]), HangingCallback([])
    hang.timeout = callback.timeout = timeout

    with pytest.raises(ConfigurationError, match=r"algorithm hang has timeout=.*; give seconds as a positive number"):
        Engine(events=Job, algorithms=[hang])
    with pytest.raises(ConfigurationError, match="callback hanging_callback has timeout="):
        Engine(events=Job, callbacks=[callback])
