"""Records for the program itself."""

from __future__ import annotations

import pytest
import torch

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.trace import Trace


def test_everything_is_kept_in_the_order_of_logging() -> None:
    """Metrics with their steps, the last hyperparameters, traces, tables, images."""
    memory = InMemoryLogger(log_traces=True)
    logger = Logger(None, [memory])
    traces = {"mixup/INIT": Trace("mixup", Event.INIT, run=True)}
    images = torch.zeros(3, 4, 4)
    logger.log_metrics({"loss": torch.tensor(2.0, requires_grad=True), "seen": 64}, step=1)
    logger.log_metrics({"loss": 1.0}, step=2)
    logger.log_metrics({"loss": 0.5})
    logger.log_hyperparameters({"lr": 1.0, "seed": 0})
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_traces(traces, step=0)
    logger.log_table(["x"], [(1,)], step=3)
    logger.log_images(images, name="digits", step=3)

    assert memory.data == {"loss": [(1, 2.0), (2, 1.0), (None, 0.5)], "seen": [(1, 64)]}
    assert type(memory.data["loss"][0][1]) is float
    assert memory.hyperparameters == {"lr": 0.1, "seed": 0}
    assert memory.traces == [(0, traces)]
    assert memory.tables == {"Table": [(3, ["x"], [[1]])]}
    assert memory.images == {"digits": [(3, images)]}
    assert memory.most_recent_values == {"loss": 0.5, "seen": 64}


def test_a_time_series_is_two_lists_of_one_length() -> None:
    """Ready to be plotted."""
    memory = InMemoryLogger()
    for step in (1, 2):
        memory.log_metrics({"loss": 1 / step}, step)

    assert memory.get_timeseries("loss") == {"step": [1, 2], "loss": [1.0, 0.5]}


def test_an_unknown_metric_is_refused_with_the_nearest_names() -> None:
    """A typo is easier to see beside what there is."""
    memory = InMemoryLogger()

    with pytest.raises(ConfigurationError, match="'loss' was never logged; logged were: nothing"):
        memory.get_timeseries("loss")

    memory.log_metrics({"train/loss": 1, "lr": 1})

    with pytest.raises(ConfigurationError, match=r"logged were: train/loss$"):
        memory.get_timeseries("train/los")


def test_kept_traces_do_not_follow_the_callers_dict() -> None:
    """The caller may go on using it."""
    memory = InMemoryLogger(log_traces=True)
    traces = {"mixup/INIT": Trace("mixup")}
    memory.log_traces(traces)
    traces.clear()

    assert memory.traces == [(None, {"mixup/INIT": Trace("mixup")})]
