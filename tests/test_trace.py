"""Traces: their blank record, the step of an event, and the log line."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from eventbus_engine import Event, EventName, Timestamp, Trace
from eventbus_engine.trace import batches_done, format_trace, step_of, write_trace

ONE_BATCH = re.findall(
    r"\w+",
    """
    AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS
    BEFORE_BACKWARD AFTER_BACKWARD AFTER_TRAIN_BATCH
""",
)

ONE_EVALUATION = re.findall(
    r"\w+",
    """
    EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
    EVAL_AFTER_ALL
""",
)


class Ingest(EventName):
    WRITE = "write"


def run_of_two_epochs_of_three_batches() -> list[tuple[str, int]]:
    """The events in the training loop's order, each with the step that its log line has to show."""
    expected = [("INIT", 0), ("BEFORE_LOAD", 1), ("AFTER_LOAD", 1), ("FIT_START", 1), ("ITERATION_START", 1)]
    for first in (1, 4):
        expected.append(("EPOCH_START", first))
        for step in (first, first + 1, first + 2):
            expected += [("BEFORE_DATALOADER", step), *((name, step) for name in ONE_BATCH)]
            expected += [("BATCH_END", step), ("BATCH_CHECKPOINT", step)]
        expected += [("BEFORE_DATALOADER", first + 3), ("EPOCH_END", first + 2)]
        expected += [*((name, first + 2) for name in ONE_EVALUATION), ("EPOCH_CHECKPOINT", first + 2)]
    expected += [("ITERATION_END", 6), ("ITERATION_CHECKPOINT", 6), ("FIT_END", 6)]
    return [*expected, ("EVAL_STANDALONE_START", 6), ("EVAL_STANDALONE_END", 6), ("PREDICT_START", 6)]


def test_rule_7_9_the_step_of_every_event_of_two_epochs_of_three_batches() -> None:
    """0 at INIT, then the batch in progress counted from 1: the loop counts a batch just before its BATCH_END."""
    state = SimpleNamespace(timestamp=Timestamp())
    actual = []
    for name, _ in run_of_two_epochs_of_three_batches():
        if name == "BATCH_END":
            state.timestamp = state.timestamp.to_next_batch(6)
        elif name == "EPOCH_END":
            state.timestamp = state.timestamp.to_next_epoch()
        elif name == "ITERATION_END":
            state.timestamp = state.timestamp.to_next_iteration()
        actual.append((name, step_of(Event[name], state)))

    assert actual == run_of_two_epochs_of_three_batches()


def test_rule_7_9_the_log_line_of_a_trace() -> None:
    """`=1` where the algorithm ran, `=0` where it did not, no step where the state has none."""
    key = "layer_freezing/EPOCH_END"

    assert format_trace(key, Trace(run=True), 3) == "[STEP=3][layer_freezing/EPOCH_END=1]"
    assert format_trace(key, Trace(run=False), 3) == "[STEP=3][layer_freezing/EPOCH_END=0]"
    assert format_trace(key, Trace(run=True), 0) == "[STEP=0][layer_freezing/EPOCH_END=1]"
    assert format_trace(key, Trace(run=True), None) == "[layer_freezing/EPOCH_END=1]"


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"timestamp": 1},
        SimpleNamespace(timestamp=1700000000.5),
        SimpleNamespace(timestamp=SimpleNamespace(batch=None)),
        SimpleNamespace(timestamp=SimpleNamespace(batch="first")),
        Mock(),
    ],
)
def test_a_state_without_a_count_of_batches_has_no_step(state: object) -> None:
    """A record of a pipeline may have a `timestamp` that is something else; a Mock has one that cannot be read."""
    assert batches_done(state) is None
    assert step_of(Event.INIT, state) is None
    assert step_of(Ingest.WRITE, state) is None


def test_a_vocabulary_of_ones_own_counts_from_one() -> None:
    """Its events are about the batch in progress, whatever they are called."""
    assert step_of(Ingest.WRITE, SimpleNamespace(timestamp=Timestamp(batch=2))) == 3


def test_a_blank_trace_is_one_that_was_skipped() -> None:
    """The defaults, in the order of the fields."""
    actual = dataclasses.asdict(Trace())

    assert actual == {
        "name": "",
        "event": None,
        "exit_code": None,
        "order": None,
        "run": False,
        "outcome": "skipped",
        "reason": "",
        "error": None,
        "start_ns": 0,
        "duration_ns": 0,
    }


def test_a_trace_is_frozen() -> None:
    """It may be that of other events too; a changed copy is another one."""
    trace = Trace("mixup", Event.INIT, reason="not matched")

    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.run = True  # type: ignore[misc]

    assert dataclasses.replace(trace, run=True) == Trace("mixup", Event.INIT, run=True, reason="not matched")
    assert trace == Trace("mixup", Event.INIT, reason="not matched")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda trace: pickle.loads(pickle.dumps(trace))])
def test_a_trace_that_ran_can_be_copied(again: Callable[[Trace], Trace]) -> None:
    """It is written by another way than one that is made by hand, and is the same."""
    trace = write_trace("mixup", Event.INIT, 1, 0, "ok", None, 5, 7)

    assert again(trace) == Trace("mixup", Event.INIT, 1, 0, True, "ok", "", None, 5, 7)
    assert type(trace) is Trace
