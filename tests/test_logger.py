"""The logger that handlers call, and the destinations it hands its records to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import anyio.lowlevel
import pytest

from eventbus_engine import (
    CallbackErrors,
    Engine,
    Event,
    EventName,
    Logger,
    LoggerDestination,
    Timestamp,
    Trace,
    algorithm,
    background,
    callback,
)
from eventbus_engine.logger import is_destination

pytestmark = pytest.mark.anyio

METHODS = ["log_metrics", "log_hyperparameters", "log_traces", "log_table", "log_images", "upload_file"]


class Plain(LoggerDestination):
    def __init__(self, **options: Any) -> None:
        self.records: list[Any] = []
        for option, value in options.items():
            setattr(self, option, value)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> Any:
        self.records.append((dict(metrics), step))


class Async(Plain):
    async def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        await anyio.lowlevel.checkpoint()
        self.records.append((dict(metrics), step))


class Broken(Plain):
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        raise OSError(f"no room for {metrics}")


class AsyncBroken(Plain):
    async def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        await anyio.lowlevel.checkpoint()
        raise OSError(f"no room for {metrics}")


def state_at(batch: int) -> Any:
    """A state so many batches into its training."""
    return SimpleNamespace(timestamp=Timestamp(batch=batch))


def call_all(logger: Logger) -> None:
    """One record of each kind."""
    logger.log_metrics({"loss": 1.0})
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_traces({"a/INIT": Trace()})
    logger.log_table(["x"], [[1]])
    logger.log_images([[0]], masks={"m": 1})
    logger.upload_file("remote", Path("local"))


# -------------------------------------------------------------------------------------------------------------- calls


def test_every_method_reaches_a_destination_with_its_arguments() -> None:
    """As given, defaults filled in."""
    mock = Mock()
    state = state_at(4)

    call_all(Logger(state, [mock]))

    mock.log_metrics.assert_called_once_with({"loss": 1.0}, step=4)
    mock.log_hyperparameters.assert_called_once_with({"lr": 0.1})
    mock.log_traces.assert_called_once_with({"a/INIT": Trace()}, step=4)
    mock.log_table.assert_called_once_with(["x"], [[1]], "Table", step=4)
    mock.log_images.assert_called_once_with(
        [[0]], "Images", False, step=4, masks={"m": 1}, mask_class_labels=None, use_table=True
    )
    mock.upload_file.assert_called_once_with(state, "remote", Path("local"), overwrite=False)


def test_a_logger_without_destinations_takes_everything_and_does_nothing() -> None:
    """Handlers need not ask whether anybody listens."""
    call_all(Logger())

    assert not any(Logger().takes(method) for method in METHODS)


def test_a_destination_overrides_what_it_cares_for() -> None:
    """The base's methods do nothing, and the logger does not even call them."""
    one, on_instance = Plain(), LoggerDestination()
    on_instance.log_table = Mock()  # type: ignore[method-assign]
    logger = Logger(None, [one, on_instance])

    call_all(logger)

    assert one.records == [({"loss": 1.0}, None)]
    assert [method for method in METHODS if logger.takes(method)] == ["log_metrics", "log_table"]
    call_all(Logger(None, [LoggerDestination()]))
    base = LoggerDestination()
    returned = [base.log_metrics({}), base.log_hyperparameters({}), base.log_traces({}), base.log_table([], [])]
    assert [*returned, base.log_images([]), base.upload_file(None, "", "")] == [None] * 6


@pytest.mark.parametrize("default", [0, 3])
def test_rule_3_the_step_defaults_to_the_states_batch(default: int) -> None:
    """Read at the call; a step of 0 is a step; a state without batches has none."""
    one, state = Plain(), state_at(default)
    logger = Logger(state, [one])
    logger.log_metrics({"a": 1})
    state.timestamp = state.timestamp.to_next_batch()
    logger.log_metrics({"a": 2})
    logger.log_metrics({"a": 3}, step=0)
    Logger(SimpleNamespace(), [one]).log_metrics({"a": 4})

    assert [step for _, step in one.records] == [default, default + 1, 0, None]


def test_a_bound_logger_takes_its_step_from_another_state() -> None:
    """And shares the destinations, those added later too."""
    one, later = Plain(), Plain()
    logger = Logger(state_at(9), [one])
    bound = logger.bound_to(state_at(2))
    logger.add_destination(later)
    bound.log_metrics({"a": 1})
    logger.log_metrics({"a": 2})

    assert one.records == later.records == [({"a": 1}, 2), ({"a": 2}, 9)]
    assert bound.destinations is logger.destinations


def test_a_destination_is_added_once() -> None:
    """However often it is given."""
    one = Plain()
    logger = Logger(None, [one, one])
    logger.add_destination(one)
    logger.log_metrics({"a": 1})

    assert logger.destinations == [one]
    assert len(one.records) == 1


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (LoggerDestination(), True),
        (background(Plain()), True),
        (SimpleNamespace(log_metrics=print), True),
        (type("Shaped", (), {"upload_file": print})(), True),
        (SimpleNamespace(batch_end=print), False),
        (Mock(), False),
    ],
)
def test_what_has_a_log_method_is_a_destination(candidate: Any, expected: bool) -> None:
    """Really has one: a Mock only makes them up."""
    assert is_destination(candidate) is expected


# ----------------------------------------------------------------------------------------------------------- delivery


async def test_rule_5_7_a_log_call_returns_at_once_and_async_records_arrive_in_order_at_the_destinations() -> None:
    """Plain destinations have the record at once; async ones after the callbacks of the event, before their hook."""
    log: list[str] = []

    class Remote(LoggerDestination):
        async def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            await anyio.lowlevel.checkpoint()
            log.append(f"remote {metrics['a']}")

        def log_table(self, *arguments: Any, **named: Any) -> Any:
            return self.table()

        async def table(self) -> None:
            log.append("remote table")

        async def batch_end(self, state: Any, logger: Any) -> None:
            log.append("remote hook")

    class Local(LoggerDestination):
        def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            log.append(f"local {metrics['a']}")

    @algorithm()
    def first(event: EventName, state: Any, logger: Logger) -> None:
        logger.log_metrics({"a": 1})
        logger.log_table([], [])
        logger.log_metrics({"a": 2})
        log.append("algorithm done")

    @callback()
    async def second(event: EventName, state: Any, logger: Logger) -> None:
        logger.log_metrics({"a": 3})
        log.append("callback done")

    engine = Engine(algorithms=[first], callbacks=[Remote(), second, Local()])
    await engine.run_event(Event.BATCH_END)

    assert log == [
        "local 1",
        "local 2",
        "algorithm done",
        "local 3",
        "callback done",
        "remote 1",
        "remote table",
        "remote 2",
        "remote 3",
        "remote hook",
    ]


async def test_rule_5_7_an_async_destination_gets_what_was_logged_not_what_became_of_it() -> None:
    """Dicts, other mappings and lists are copied at the call."""
    got: list[Any] = []

    class Remote(LoggerDestination):
        async def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            got.append(metrics)

        async def log_table(self, columns: Any, rows: Any, name: str = "Table", step: int | None = None) -> None:
            got.append((columns, rows, name))

    metrics, rows = {"a": 1}, [[1]]

    @algorithm()
    def changing(event: EventName, state: Any, logger: Logger) -> None:
        logger.log_metrics(metrics)
        logger.log_metrics(MappingProxyType(metrics))
        logger.log_table(("x",), rows)
        metrics["a"] = 2
        rows.append([2])

    await Engine(algorithms=[changing], callbacks=[Remote()]).run_event(Event.BATCH_END)

    assert (metrics, rows) == ({"a": 2}, [[1], [2]])
    assert got == [{"a": 1}, {"a": 1}, (("x",), [[1]], "Table")]


@pytest.mark.parametrize("destination", [Broken, AsyncBroken])
async def test_rule_5_7_a_failing_destination_never_reaches_who_logged(
    destination: type[Plain], caplog: pytest.LogCaptureFixture
) -> None:
    """The event succeeds, the other destinations get the record, and the failure is logged with its evidence."""
    reached: list[str] = []

    @algorithm()
    def logging_one(event: EventName, state: Any, logger: Logger) -> None:
        logger.log_metrics({"a": 1})
        reached.append("the next line")

    good = Plain()
    engine = Engine(algorithms=[logging_one], callbacks=[destination(), good])
    with caplog.at_level(logging.ERROR, logger="eventbus_engine"):
        await engine.run_event(Event.BATCH_END)

    assert reached == ["the next line"]
    assert good.records == [({"a": 1}, None)]
    (record,) = caplog.records
    assert record.getMessage().endswith("broken failed on BATCH_END")
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no room for {'a': 1}"


async def test_rule_5_7_a_destination_may_want_its_failures_raised() -> None:
    """At its stage, all of them, after every record has been tried."""

    @algorithm()
    def logging_one(event: EventName, state: Any, logger: Logger) -> None:
        logger.log_metrics({"a": 1})
        logger.log_metrics({"a": 2})

    engine = Engine(algorithms=[logging_one], callbacks=[Broken(on_error="raise")])

    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event(Event.BATCH_END)

    (group,) = caught.value.exceptions
    assert isinstance(group, ExceptionGroup)
    assert [str(error) for error in group.exceptions] == ["no room for {'a': 1}", "no room for {'a': 2}"]
    assert group.exceptions[0].__notes__ == ["in destination broken, log_metrics"]


async def test_destinations_among_the_callbacks_make_the_logger() -> None:
    """`logger=None` builds one from them, so that handlers never see None."""
    seen: list[Any] = []
    one = Plain()

    @callback("batch_end")
    def look(event: EventName, state: Any, logger: Any) -> None:
        seen.append(logger)

    engine = Engine(callbacks=[look, one])
    await engine.run_event(Event.BATCH_END)

    assert isinstance(engine.logger, Logger)
    assert engine.logger.destinations == [one]
    assert seen == [engine.logger]


@pytest.mark.parametrize("own", [True, False])
async def test_a_destination_added_to_the_logger_later_gets_its_records(own: bool) -> None:
    """Async records too, whether the logger is the engine's own or was given to it."""
    engine = Engine(None, None if own else Logger())
    remote = Async()
    engine.logger.add_destination(remote)
    engine.logger.log_metrics({"a": 1}, step=1)

    await engine.run_event(Event.BATCH_END)

    assert remote.records == [({"a": 1}, 1)]


async def test_a_destination_that_leaves_the_callbacks_gets_no_more_records() -> None:
    """The engine's own logger follows the live participants."""
    one, other = Plain(), Plain()
    state = SimpleNamespace(callbacks=[one, other])
    engine = Engine(state)
    await engine.run_event(Event.INIT)
    state.callbacks.remove(one)
    await engine.run_event(Event.FIT_START)
    engine.logger.log_metrics({"a": 1})

    assert (one.records, other.records) == ([], [({"a": 1}, None)])


async def test_the_engine_logs_its_traces_with_the_step() -> None:
    """To destinations that take traces, on every event with algorithms."""
    got: list[Any] = []

    class Traced(LoggerDestination):
        def log_traces(self, traces: Mapping[str, Trace], step: int | None = None) -> None:
            got.append((list(traces), step))

    @algorithm("batch_end")
    def some(event: EventName, state: Any, logger: Any) -> None: ...

    engine = Engine(state_at(2), algorithms=[some], callbacks=[Traced()])
    for event in (Event.INIT, Event.BATCH_START, Event.BATCH_END):
        await engine.run_event(event)

    assert got == [(["some/INIT"], 0), (["some/BATCH_START"], 3), (["some/BATCH_END"], 2)]


async def test_a_mock_of_a_state_does_not_upset_the_log() -> None:
    """Its made-up timestamp is no number."""
    one = Plain()
    engine = Engine(Mock(), callbacks=[one], algorithms=[Mock()])
    await engine.run_event(Event.BATCH_END)
    engine.logger.log_metrics({"a": 1})

    assert one.records == [({"a": 1}, None)]


async def test_what_was_logged_last_is_delivered_by_close() -> None:
    """Records after the last event, and those for a destination that has left meanwhile."""
    staying, leaving = Async(), Async()
    state = SimpleNamespace(callbacks=[staying, leaving])
    engine = Engine(state)
    await engine.run_event(Event.INIT)
    engine.logger.log_metrics({"a": 1}, step=1)
    state.callbacks.remove(leaving)
    engine.logger.follow(state.callbacks, [staying, leaving])
    engine.logger.log_metrics({"a": 2}, step=2)
    report = await engine.close()

    assert report.ok
    assert staying.records == [({"a": 1}, 1), ({"a": 2}, 2)]
    assert leaving.records == [({"a": 1}, 1)]


async def test_a_destination_in_the_background_gets_its_records_there() -> None:
    """Its own mailbox takes them along with the event, in order."""
    remote = Async()
    async with Engine(callbacks=[background(remote)]) as engine:
        for number in (1, 2):
            engine.logger.log_metrics({"a": number}, step=number)
            await engine.run_event(Event.BATCH_END)

    assert remote.records == [({"a": 1}, 1), ({"a": 2}, 2)]


def test_a_logger_without_an_engine_says_at_once_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    """There is no destination stage that would."""

    class Failing(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise ValueError("no")

    logger = Logger(None, [Failing()])
    logger.log_metrics({"loss": 1})

    assert [record.getMessage() for record in caplog.records] == ["destination failing failed in log_metrics"]
    engine = Engine(logger=logger)
    engine.logger.log_metrics({"loss": 1})
    assert len(caplog.records) == 1
