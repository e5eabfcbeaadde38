"""The state: where computations run, how the batch is read, and how far the run is."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn

from eventbus_engine.errors import BatchError
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training import State
from eventbus_engine.training.worker import ComputeWorker


@pytest.fixture
def state() -> State:
    """A state that no trainer has."""
    return State(nn.Linear(2, 2))


def test_it_has_at_most_twenty_fields_all_documented() -> None:
    """A blackboard that everybody writes on has to stay small."""
    names = [field.name for field in dataclasses.fields(State)]
    undocumented = [name for name in names if f"        {name}: " not in (State.__doc__ or "")]

    assert (len(names) <= 20, undocumented) == (True, [])


def test_states_compare_and_hash_by_identity(state: State) -> None:
    """Events of one state are kept in order by who it is, not by what it holds."""
    twin = State(state.model)

    assert (state == state, state == twin, len({state, twin})) == (True, False, 2)


@pytest.mark.anyio
async def test_compute_runs_inline_without_a_trainer(state: State) -> None:
    """So that an algorithm can be tried out on a state alone."""

    def place(*, note: str) -> tuple[int, str]:
        return threading.get_ident(), note

    actual = await state.compute(place, note="here")

    assert actual == (threading.get_ident(), "here")


@pytest.mark.anyio
async def test_compute_runs_on_the_worker_it_was_given() -> None:
    """In torch's default modes there, whatever the caller's thread is in."""
    worker = ComputeWorker()
    state = State(nn.Linear(2, 2), worker=worker)

    def look() -> tuple[bool, bool, bool]:
        return threading.get_ident() != loop_thread, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    loop_thread = threading.get_ident()
    actual = await state.compute(look)
    worker.close()

    assert actual == (True, True, False)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16)])
def test_the_precision_context_is_autocast_or_nothing(state: State, precision: Any, expected: torch.dtype) -> None:
    """The parameters keep their type either way."""
    state.precision = precision
    with state.precision_context():
        actual = state.model(torch.ones(1, 2)).dtype

    assert (actual, state.model.weight.dtype) == (expected, torch.float32)


def test_an_item_of_the_batch_is_read_and_replaced(state: State) -> None:
    """The container that the loader yielded stays as it was."""
    yielded = [1, 2]
    state.batch = yielded
    state.batch_set_item(1, 3)

    assert (state.batch_get_item(0), state.batch_get_item(1), yielded) == (1, 3, [1, 2])


def test_a_missing_item_is_a_batch_error(state: State) -> None:
    """Not a bare KeyError from the middle of a training run."""
    state.batch = {"image": 1}
    with pytest.raises(BatchError, match=r"dict\(image: int\), has no item 'label'"):
        state.batch_get_item("label")


@pytest.mark.parametrize(
    ("max_duration", "timestamp", "expected"),
    [
        (None, Timestamp(batch=3), None),
        ("4ep", Timestamp(epoch=1), Time(0.25, "dur")),
        ("500ba", Timestamp(epoch=1, batch=500), Time(1.0, "dur")),
        ("0ba", Timestamp(), Time(1.0, "dur")),
    ],
)
def test_the_elapsed_duration_is_a_fraction(
    state: State, max_duration: str | None, timestamp: Timestamp, expected: Time | None
) -> None:
    """Of whatever `max_duration` counts in."""
    state.max_duration = None if max_duration is None else Time.from_timestring(max_duration)
    state.timestamp = timestamp
    actual = state.get_elapsed_duration()

    assert actual == expected


def test_stop_training_is_reaching_the_end(state: State) -> None:
    """The batch in progress is the last."""
    state.max_duration = Time.from_timestring("10ep")
    state.timestamp = Timestamp(epoch=1, batch=7)
    state.stop_training()

    assert (state.max_duration, state.get_elapsed_duration()) == (Time(7, "ba"), Time(1.0, "dur"))
