"""The step and the log line of every trace of a real run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from eventbus_engine import Algorithm, Event, LoggerDestination, Trace
from eventbus_engine.trace import format_trace
from eventbus_engine.training import State, Trainer

pytestmark = pytest.mark.anyio


class Everywhere(Algorithm[State, Event]):
    """Runs on all events but the last."""

    def match(self, event: Event, state: State) -> bool:
        return event is not Event.FIT_END

    def apply(self, event: Event, state: State, logger: Any) -> None: ...


class Lines(LoggerDestination):
    """Keeps the log lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log_traces(self, traces: Mapping[str, Trace], step: int | None = None) -> None:
        self.lines += [format_trace(key, trace, step) for key, trace in traces.items()]


def batch(step: int) -> list[tuple[str, int]]:
    """What a batch logs, in order."""
    names = """
        BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS
        AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
    """.split()
    return [(name, step) for name in names]


def epoch(first: int) -> list[tuple[str, int]]:
    """What an epoch of three batches logs, in order, `first` being the step of its first."""
    names = """
        EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
        EVAL_AFTER_ALL EPOCH_CHECKPOINT
    """.split()
    last = first + 2
    batches = [line for step in (first, first + 1, last) for line in batch(step)]
    end = [("BEFORE_DATALOADER", last + 1), ("EPOCH_END", last), *((name, last) for name in names)]
    return [("EPOCH_START", first), *batches, *end]


async def test_rule_7_9_the_log_lines_of_two_epochs_of_three_batches(
    make_trainer: Callable[..., Trainer], make_batches: Callable[..., list[tuple[Tensor, Tensor]]]
) -> None:
    """STEP is 0 at INIT, then the batch in progress counted from 1; `=0` only where the algorithm did not run."""
    lines = Lines()
    trainer = make_trainer(algorithms=[Everywhere()], loggers=[lines], eval_dataloader=make_batches(1))

    await trainer.fit()

    steps = [("INIT", 0), ("BEFORE_LOAD", 1), ("AFTER_LOAD", 1), ("FIT_START", 1), ("ITERATION_START", 1)]
    steps += [*epoch(1), *epoch(4), ("ITERATION_END", 6), ("ITERATION_CHECKPOINT", 6)]
    expected = [f"[STEP={step}][everywhere/{name}=1]" for name, step in steps]

    assert lines.lines == [*expected, "[STEP=6][everywhere/FIT_END=0]"]
