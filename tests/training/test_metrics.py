"""The metrics of an evaluator: torchmetrics' own, and whatever has their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.training import Evaluator, Trainer

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]
Batches = list[tuple[Tensor, Tensor]]


class Largest:
    """The largest output: a metric without torchmetrics."""

    value: float = float("-inf")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Look at a batch."""
        self.value = max(self.value, float(outputs.max()))

    def compute(self) -> float:
        """The largest."""
        return self.value

    def reset(self) -> None:
        """Forget."""
        self.value = float("-inf")


def outputs_of(model: nn.Module, batches: Batches) -> tuple[Tensor, Tensor]:
    """All outputs and all targets."""
    with torch.no_grad():
        return torch.cat([model(inputs) for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


async def test_metrics_of_torchmetrics_are_those_of_the_whole_data_set(
    make_trainer: MakeTrainer, make_model: Callable[..., nn.Module], batches: Batches
) -> None:
    """Beside the loss, under the names of their classes, and of the members of a collection; again and again."""
    metrics = [
        MulticlassAccuracy(3, average="micro"),
        MetricCollection({"f1": MulticlassF1Score(3), "recall": MulticlassAccuracy(3, average="macro")}),
        Largest(),
    ]
    evaluator = Evaluator(batches, "digits", metrics=metrics)
    async with make_trainer(eval_dataloader=[evaluator]) as trainer:
        first, second = await trainer.eval(), await trainer.eval()
    outputs, targets = outputs_of(make_model(), batches)

    assert first == second
    assert list(first) == [
        f"metrics/digits/{name}" for name in ("MulticlassAccuracy", "f1", "recall", "Largest", "loss")
    ]
    assert first["metrics/digits/MulticlassAccuracy"] == pytest.approx((outputs.argmax(1) == targets).float().mean())
    assert first["metrics/digits/f1"] == pytest.approx(float(MulticlassF1Score(3)(outputs, targets)))
    assert first["metrics/digits/Largest"] == pytest.approx(float(outputs.max()))


async def test_a_mapping_names_its_metrics(make_trainer: MakeTrainer, batches: Batches) -> None:
    """So that two of a class fit."""
    metrics = {"top1": MulticlassAccuracy(3), "top2": MulticlassAccuracy(3, top_k=2)}
    actual = await make_trainer(eval_dataloader=[Evaluator(batches, metrics=metrics)]).eval()

    assert list(actual) == ["metrics/eval/top1", "metrics/eval/top2", "metrics/eval/loss"]
    assert actual["metrics/eval/top1"] <= actual["metrics/eval/top2"]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (3, "3, of evaluator 'eval', is no metric; give an instance"),
        (MeanSquaredError, "is no metric; give an instance"),
        ({"loss": Largest()}, "a metric of evaluator 'eval' is called 'loss', which is measured anyway"),
        ([Largest(), Largest()], "two metrics of one name among Largest, Largest; give a mapping"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(batches: Batches, metrics: Any, message: str) -> None:
    """With the way out."""
    with pytest.raises(ConfigurationError, match=message):
        Evaluator(batches, metrics=metrics)


async def test_a_metric_that_is_no_number_is_named(make_trainer: MakeTrainer, batches: Batches) -> None:
    """A matrix cannot be logged under one name."""
    evaluator = Evaluator(batches, metrics=MulticlassConfusionMatrix(3))
    with pytest.raises(ConfigurationError, match=r"the metric MulticlassConfusionMatrix is Tensor\[3, 3\], and only"):
        await make_trainer(eval_dataloader=[evaluator]).eval()


async def test_metrics_need_targets(make_trainer: MakeTrainer) -> None:
    """A model that reads its batches itself is measured by its loss alone."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, batch: Any) -> Tensor:
            outputs: Tensor = self.layer(batch["x"])
            return outputs

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.mean()

    batches = [{"x": torch.ones(2, 4)}]
    arguments = {"model": Reader(), "loss": None}

    assert list(await make_trainer(**arguments, eval_dataloader=batches).eval()) == ["metrics/eval/loss"]
    with pytest.raises(BatchError, match="which the model cannot be fed with"):
        await make_trainer(**arguments, eval_dataloader=[Evaluator(batches, metrics=Largest())]).eval()


async def test_an_evaluator_may_use_a_part_of_its_loader(make_trainer: MakeTrainer, make_batches: Any) -> None:
    """The first batches, each time."""
    batches = make_batches(3)
    whole = await make_trainer(eval_dataloader=batches[:2]).eval()
    async with make_trainer(eval_dataloader=[Evaluator(batches, subset_num_batches=2)]) as trainer:
        first, second = await trainer.eval(), await trainer.eval()

    assert first == second == whole


async def test_an_evaluation_that_failed_begins_anew(make_trainer: MakeTrainer, make_batches: Any) -> None:
    """Not where it was left."""
    batches = make_batches(3)
    failing = True

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if failing and targets is batches[1][1]:
            raise OSError("gone")
        return nn.functional.cross_entropy(outputs, targets)

    async with make_trainer(eval_dataloader=batches, loss=loss) as trainer:
        with pytest.raises(OSError, match="gone"):
            await trainer.eval()
        failing = False
        await trainer.eval()

    assert trainer.state.eval_timestamp.batch == 3


async def test_eval_takes_another_loader(make_trainer: MakeTrainer, make_batches: Any) -> None:
    """For once; the trainer's own stays."""
    async with make_trainer(eval_dataloader=make_batches(1, seed=1)) as trainer:
        own = await trainer.eval()
        other = await trainer.eval([Evaluator(make_batches(1, seed=2), "other")])
        again = await trainer.eval()

    assert own == again
    assert set(other) == {"metrics/other/accuracy", "metrics/other/loss"}
