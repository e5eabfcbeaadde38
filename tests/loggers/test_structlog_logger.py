"""The program's structlog: each record is one event of it, and its configuration is left alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import structlog
import torch
from structlog.testing import LogCapture

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.loggers import StructlogLogger
from eventbus_engine.loggers.records import RecordDestination
from eventbus_engine.trace import Trace


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What arrives at the end of the configured processors."""
    capture = LogCapture()
    structlog.configure(processors=[capture])
    yield capture.entries
    structlog.reset_defaults()


def test_each_record_is_one_event_with_time_and_step(events: list[Any]) -> None:
    """Metrics and hyperparameters flat, tables, images and traces as plain values."""
    logger = Logger(None, [StructlogLogger(log_traces=True)])
    logger.log_metrics({"loss": torch.tensor(0.5), "seen": 64}, step=3)
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_traces({"a/INIT": Trace("a", Event.INIT, order=0, run=True, outcome="ok")}, step=0)
    logger.log_table(["x"], [[1], [2]], name="confusion", step=4)
    logger.log_images(torch.zeros(3, 4, 4), name="digits")
    times = [datetime.fromisoformat(event.pop("time")) for event in events]

    assert {time.utcoffset() for time in times} == {timedelta(0)}
    assert events[0] == {"event": "metrics", "log_level": "info", "step": 3, "loss": 0.5, "seen": 64}
    assert events[1] == {"event": "hyperparameters", "log_level": "info", "lr": 0.1}
    assert (events[2]["event"], events[2]["step"]) == ("traces", 0)
    assert events[2]["traces"]["a/INIT"]["event"] == "init"
    assert events[3] == {
        "event": "table",
        "log_level": "info",
        "step": 4,
        "table": "confusion",
        "columns": ["x"],
        "rows": [[1], [2]],
    }
    assert events[4] == {
        "event": "images",
        "log_level": "info",
        "images": "digits",
        "shape": [3, 4, 4],
        "channels_last": False,
    }


@pytest.mark.parametrize("name", ["event", "self", "method_name", "level", "step", "time", "exc_info"])
def test_a_metric_may_have_a_name_that_is_taken(events: list[Any], name: str) -> None:
    """It is there, with an underscore."""
    StructlogLogger().log_metrics({name: 1}, step=2)

    assert events[0][f"{name}_"] == 1
    assert events[0]["step"] == 2


def test_the_programs_configuration_is_used_and_not_changed() -> None:
    """Also one that is made after the destination; the level is the one asked for."""
    destination = StructlogLogger(level="warning")
    lines: list[str] = []

    def keep(logger: Any, method: str, event: Any) -> Any:
        lines.append(event)
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer(), keep])
    try:
        before = structlog.get_config()
        destination.log_metrics({"loss": 1}, 1)
        after = structlog.get_config()
    finally:
        structlog.reset_defaults()

    assert before == after
    assert {key: value for key, value in json.loads(lines[0]).items() if key != "time"} == {
        "event": "metrics",
        "level": "warning",
        "step": 1,
        "loss": 1,
    }


def test_what_is_bound_to_a_given_logger_is_in_every_event(events: list[Any]) -> None:
    """That is how the events of one run are found again."""
    StructlogLogger(structlog.get_logger().bind(run="one")).log_metrics({"loss": 1})

    assert events[0]["run"] == "one"


@pytest.mark.asyncio
async def test_an_asynchronous_logger_is_awaited() -> None:
    """What it returns is handed on, for the destination stage to await."""
    capture = LogCapture()
    logger = structlog.wrap_logger(None, processors=[capture], wrapper_class=structlog.stdlib.AsyncBoundLogger)

    await StructlogLogger(logger).log_metrics({"loss": 1})

    assert capture.entries[0]["loss"] == 1


def test_unknown_level_is_refused() -> None:
    """By name, with those there are."""
    with pytest.raises(ConfigurationError, match=r"level='loud' is no level.*debug, info"):
        StructlogLogger(level="loud")


def test_a_destination_of_records_has_to_write_them() -> None:
    """The base writes nothing silently."""
    with pytest.raises(NotImplementedError):
        RecordDestination().log_metrics({"loss": 1})
