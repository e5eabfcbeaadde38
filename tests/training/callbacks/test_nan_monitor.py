"""Losses that are not finite: the run ends, says where, and leaves no checkpoint of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.callback import Callback
from eventbus_engine.errors import CallbackErrors, EventBusError, TrainingError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.callbacks import NaNMonitor

pytestmark = pytest.mark.anyio

Batches = list[tuple[Tensor, Tensor]]
MakeTrainer = Callable[..., Trainer]
MakeBatches = Callable[..., Batches]


class Checkpoints(Callback[State]):
    """Keeps the batches that a checkpoint could have been written of."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def batch_checkpoint(self, state: State, logger: Any) -> None:
        """Note the batch."""
        self.batches.append(int(state.timestamp.batch))


def spoil(batches: Batches, batch: int, sample: int) -> Batches:
    """The batches with one input, counted from 0, that is not finite."""
    spoiled = [(inputs.clone(), targets) for inputs, targets in batches]
    spoiled[batch][0][sample, 0] = math.nan
    return spoiled


@pytest.mark.parametrize(("microbatches", "sample"), [(1, 0), (1, 5), (2, 0), (2, 5), (6, 3)])
@pytest.mark.parametrize("offload", [True, False])
async def test_a_loss_that_is_nan_ends_the_run_before_the_checkpoint(
    make_trainer: MakeTrainer, batches: Batches, microbatches: int, sample: int, offload: bool
) -> None:
    """Whichever microbatch it is in. The error names the batch and the loss; the log has it, too."""
    checkpoints, records = Checkpoints(), InMemoryLogger()
    trainer = make_trainer(
        train_dataloader=spoil(batches, 1, sample),
        microbatches=microbatches,
        callbacks=[NaNMonitor(), checkpoints],
        loggers=records,
        offload=offload,
    )
    with pytest.raises(CallbackErrors) as raised:
        await trainer.fit()

    (error,) = raised.value.exceptions
    assert isinstance(error, TrainingError)
    assert str(error).startswith(
        "the loss of batch 2 in epoch 1, counted from 1, is nan, and the parameters have taken"
    )
    assert checkpoints.batches == [1]
    assert [math.isnan(loss) for _, loss in records.data["loss/train/total"]] == [False, True]


@pytest.mark.parametrize("value", [math.inf, -math.inf])
async def test_an_infinite_loss_ends_the_run_too(make_trainer: MakeTrainer, value: float) -> None:
    """The next one would be NaN anyway."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets) + value

    trainer = make_trainer(loss=loss, callbacks=[NaNMonitor()])
    with pytest.raises(CallbackErrors) as raised:
        await trainer.fit()

    assert raised.group_contains(TrainingError, match=rf"batch 1 in epoch 1, counted from 1, is {value}, ")


async def test_good_losses_and_bad_evaluations_pass(make_trainer: MakeTrainer, batches: Batches) -> None:
    """It watches the training; an evaluation that is NaN harms nothing by itself."""
    records = InMemoryLogger()
    trainer = make_trainer(eval_dataloader=spoil(batches, 0, 0), callbacks=[NaNMonitor()], loggers=records)
    await trainer.fit()

    assert math.isnan(records.most_recent_values["metrics/eval/loss"])
    assert int(trainer.state.timestamp.batch) == 6


async def test_the_loss_may_have_any_shape_of_one_element(make_trainer: MakeTrainer) -> None:
    """As the loop allows it."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets).reshape(1, 1)

    trainer = make_trainer(loss=loss, callbacks=[NaNMonitor()])
    await trainer.fit()

    assert int(trainer.state.timestamp.batch) == 6


async def test_it_asks_for_the_loss_once_a_batch(
    make_trainer: MakeTrainer, make_model: Callable[..., nn.Module]
) -> None:
    """Only after the step, which has waited for it: of six batches of two microbatches each, six looks."""
    reads: list[str] = []

    class Watched(Tensor):
        def item(self) -> Any:
            reads.append("step" if self.requires_grad else "look")
            return super().item()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets).as_subclass(Watched)

    await make_trainer(loss=loss, microbatches=2).fit()
    without, reads = reads, []
    await make_trainer(loss=loss, microbatches=2, callbacks=[NaNMonitor()]).fit()

    assert (len(without), len(reads)) == (6, 12)


def test_the_error_is_one_of_the_package() -> None:
    """And of the kind that Composer raises."""
    assert issubclass(TrainingError, EventBusError)
    assert issubclass(TrainingError, RuntimeError)
