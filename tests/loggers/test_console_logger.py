"""The console: one readable line for each record."""

from __future__ import annotations

import io
from typing import Any

import pytest
import structlog
import torch

from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.loggers import ConsoleLogger
from eventbus_engine.trace import Trace

TRACES = {
    "mixup/EPOCH_END": Trace("mixup", Event.EPOCH_END, order=0, run=True, outcome="ok"),
    "layer_freezing/EPOCH_END": Trace("layer_freezing", Event.EPOCH_END, reason="not matched"),
}


def lines(stream: io.StringIO) -> list[str]:
    """What was printed, without trailing blanks."""
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_each_record_is_a_line_that_a_person_can_read() -> None:
    """Metrics with their step and six digits, hyperparameters, the rows of a table."""
    stream = io.StringIO()
    logger = Logger(None, [ConsoleLogger(stream=stream)])
    logger.log_metrics({"loss": torch.tensor(1 / 3), "seen": 64}, step=3)
    logger.log_metrics({"loss": 2.0})
    logger.log_hyperparameters({"lr": 0.1, "optimizer": "SGD"})
    logger.log_table(["x", "y"], [[1, 2], [3, 4]], name="confusion", step=4)

    assert lines(stream) == [
        "[STEP=3] metrics loss=0.333333 seen=64",
        "metrics loss=2",
        "hyperparameters lr=0.1 optimizer=SGD",
        "[STEP=4] confusion x=1 y=2",
        "[STEP=4] confusion x=3 y=4",
    ]


@pytest.mark.parametrize(
    ("wanted", "step", "expected"),
    [
        (True, 3, ["[STEP=3][mixup/EPOCH_END=1]", "[STEP=3][layer_freezing/EPOCH_END=0]"]),
        (True, None, ["[mixup/EPOCH_END=1]", "[layer_freezing/EPOCH_END=0]"]),
        (False, 3, []),
    ],
)
def test_traces_are_printed_only_if_asked_for(wanted: bool, step: int | None, expected: list[str]) -> None:
    """One line each, in their order, zero for what did not run."""
    stream = io.StringIO()
    ConsoleLogger(log_traces=wanted, stream=stream).log_traces(TRACES, step)

    assert lines(stream) == expected


@pytest.mark.parametrize("name", ["event", "level", "timestamp", "exc_info", "logger", "self", "stack"])
def test_a_metric_may_have_a_name_that_structlog_uses(name: str) -> None:
    """It is shown, with an underscore, instead of disappearing or raising."""
    stream = io.StringIO()
    ConsoleLogger(stream=stream).log_metrics({name: 1}, step=1)

    assert lines(stream) == [f"[STEP=1] metrics {name}_=1"]


def test_the_users_structlog_configuration_is_neither_used_nor_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """A processor that would drop every record does not matter here, and stays configured."""

    def drop(logger: Any, method: str, event_dict: Any) -> Any:
        raise structlog.DropEvent

    structlog.configure(processors=[drop])
    try:
        ConsoleLogger().log_metrics({"loss": 1}, step=1)
        kept = structlog.get_config()["processors"]
    finally:
        structlog.reset_defaults()
    captured = capsys.readouterr()

    assert (captured.out, captured.err.strip()) == ("", "[STEP=1] metrics loss=1")
    assert kept == [drop]


def test_colours_are_for_terminals() -> None:
    """A file gets no escape sequences."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        ConsoleLogger(stream=stream).log_metrics({"loss": 1}, step=1)

    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in file.getvalue()
