"""Evaluation: what it measures, where the metrics go, and that it leaves training as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.callback import Callback
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.training import Evaluator, State, Trainer
from eventbus_engine.training.evaluator import make_evaluators
from eventbus_engine.training.metrics import Measures

pytestmark = pytest.mark.anyio

Batches = list[tuple[Tensor, Tensor]]
MakeBatches = Callable[..., Batches]
MakeTrainer = Callable[..., Trainer]


class Memory(LoggerDestination):
    """Keeps the metrics that were logged, with their steps."""

    def __init__(self) -> None:
        self.records: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Keep a copy."""
        self.records.append((step, dict(metrics)))


async def test_loss_and_accuracy_are_those_of_the_whole_data_set(
    make_model: Callable[..., nn.Module], make_batches: MakeBatches, make_trainer: MakeTrainer
) -> None:
    """A mean over samples, not over batches: the last batch is smaller, as it is in every real loader."""
    uneven = [*make_batches(2), *make_batches(1, size=2, seed=1)]
    actual = await make_trainer(eval_dataloader=uneven).eval()

    inputs, targets = torch.cat([batch[0] for batch in uneven]), torch.cat([batch[1] for batch in uneven])
    with torch.no_grad():
        outputs = make_model()(inputs)
    expected = {
        "metrics/eval/loss": pytest.approx(functional.cross_entropy(outputs, targets).item(), rel=1e-6),
        "metrics/eval/accuracy": (outputs.argmax(1) == targets).sum().item() / 14,
    }

    assert actual == expected


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(3, 1), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(3, 2)),
        (torch.zeros(3, 2, 4), torch.zeros(3, 4, dtype=torch.long)),
        ({"logits": torch.zeros(3, 2)}, torch.zeros(3, dtype=torch.long)),
        (torch.zeros(3, 2), None),
    ],
    ids=["regression", "soft targets", "segmentation", "mapping", "no targets"],
)
async def test_there_is_no_accuracy_where_there_is_no_classification(outputs: Any, targets: Any) -> None:
    """A number that means nothing is worse than none."""
    metrics = Measures()
    metrics.update(torch.tensor(2.0), outputs, targets, samples=3)
    actual = metrics.compute()

    assert actual == {"loss": 2.0}


async def test_metrics_are_logged_and_in_the_state_before_eval_end(
    make_trainer: MakeTrainer, make_batches: MakeBatches
) -> None:
    """A callback on EVAL_END is the natural place to act on them."""
    memory, seen = Memory(), dict[str, float]()

    class Look(Callback[State]):
        def eval_end(self, state: State, logger: Any) -> None:
            seen.update(state.metrics)

    trainer = make_trainer(max_duration="1ep", eval_dataloader=make_batches(2), loggers=memory, callbacks=Look())
    await trainer.fit()
    step, logged = memory.records[-1]

    assert (step, set(logged)) == (3, {"metrics/eval/accuracy", "metrics/eval/loss"})
    assert seen == trainer.state.metrics == logged


async def test_each_evaluator_logs_under_its_label(make_trainer: MakeTrainer, make_batches: MakeBatches) -> None:
    """And `eval_timestamp` starts anew for each."""
    counted: list[tuple[int, int]] = []

    class Count(Callback[State]):
        def eval_end(self, state: State, logger: Any) -> None:
            counted.append((int(state.eval_timestamp.batch), int(state.eval_timestamp.sample)))

    evaluators = [Evaluator(make_batches(2), "near"), Evaluator(make_batches(1, size=4), "far")]
    actual = await make_trainer(eval_dataloader=evaluators, callbacks=[Count()]).eval()

    assert {name.split("/")[1] for name in actual} == {"near", "far"}
    assert counted == [(2, 12), (1, 4)]


async def test_training_goes_on_as_it_was(make_trainer: MakeTrainer, make_batches: MakeBatches) -> None:
    """Batch, outputs, loss and the mode of every module, one that is kept frozen included."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    frozen = model[2]
    seen: dict[str, tuple[Any, ...]] = {}

    class Look(Callback[State]):
        def fit_start(self, state: State, logger: Any) -> None:
            frozen.eval()

        def epoch_start(self, state: State, logger: Any) -> None:
            frozen.eval()

        def _note(self, name: str, state: State) -> None:
            modes = tuple(module.training for module in state.model.modules())
            seen[name] = (state.batch, state.outputs, state.loss, *modes)

        def batch_end(self, state: State, logger: Any) -> None:
            self._note("before", state)

        def eval_batch_end(self, state: State, logger: Any) -> None:
            self._note("during", state)

        def batch_checkpoint(self, state: State, logger: Any) -> None:
            self._note("after", state)

    trainer = make_trainer(
        model=model,
        max_duration="1ba",
        eval_dataloader=make_batches(1, seed=1),
        eval_interval="1ba",
        callbacks=[Look()],
    )
    await trainer.fit()

    assert all(before is after for before, after in zip(seen["before"], seen["after"], strict=True))
    assert seen["before"][3:] == (True, True, True, False)
    assert seen["during"][3:] == (False, False, False, False)
    assert not seen["during"][1].requires_grad


async def test_evaluation_leaves_the_gradients_alone(make_trainer: MakeTrainer, make_batches: MakeBatches) -> None:
    """It runs without a graph, so it can neither clear nor add to them."""
    trainer = make_trainer(eval_dataloader=make_batches(1))
    await trainer.eval()

    assert all(parameter.grad is None for parameter in trainer.state.model.parameters())


async def test_a_model_that_reads_its_batches_itself_is_measured_by_its_loss(make_trainer: MakeTrainer) -> None:
    """Nobody else knows which part of the batch the targets are."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["signal"] * self.scale

        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return (outputs - batch["signal"]).mean()

    trainer = make_trainer(model=Doubling(), loss=None, eval_dataloader=[{"signal": torch.ones(2, 3)}])
    actual = await trainer.eval()

    assert actual == {"metrics/eval/loss": 1.0}


async def test_a_loader_without_batches_is_refused(make_trainer: MakeTrainer, make_batches: MakeBatches) -> None:
    """An iterator is spent after the first evaluation: say so, instead of measuring nothing."""
    trainer = make_trainer(max_duration="2ep", eval_dataloader=iter(make_batches(1)))
    with pytest.raises(BatchError, match="evaluator 'eval' yielded no batch; give a loader that can be iterated again"):
        await trainer.fit()


async def test_evaluating_without_a_loader_is_refused(make_trainer: MakeTrainer) -> None:
    """Before anything is opened."""
    with pytest.raises(ConfigurationError, match="nothing to evaluate on: give the Trainer eval_dataloader="):
        await make_trainer().eval()


@pytest.mark.parametrize(
    ("evaluators", "message"),
    [
        ([Evaluator([], "a"), Evaluator([], "a")], "2 evaluators with the labels a, a; give .* a label of its own"),
        ([Evaluator([], "a"), []], "give Evaluators only"),
        (5, "the dataloader of evaluator 'eval' is a int, which cannot be iterated"),
    ],
)
async def test_evaluators_that_do_not_fit_are_refused(evaluators: Any, message: str) -> None:
    """At construction of the trainer."""
    with pytest.raises(ConfigurationError, match=message):
        make_evaluators(evaluators)


async def test_an_evaluator_needs_a_label() -> None:
    """Its metrics are named by it."""
    with pytest.raises(ConfigurationError, match="label is ''; give a name"):
        Evaluator([], "")


async def test_a_list_of_batches_is_one_loader(make_batches: MakeBatches) -> None:
    """Only a list of Evaluators is several."""
    evaluators = make_evaluators(make_batches(2))

    assert [evaluator.label for evaluator in evaluators] == ["eval"]
    assert make_evaluators(None) == []
