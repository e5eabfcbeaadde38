"""`trainer.predict`: outputs for every batch, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]
Batches = list[tuple[Tensor, Tensor]]


class Named(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.layer(features)
        return logits


async def test_outputs_are_the_models_in_evaluation_mode(make_trainer: MakeTrainer, batches: Batches) -> None:
    """One for each batch, without a graph; the mode of every module is put back."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[0].eval()
    actual = await make_trainer(model=model).predict(batches)
    modes = [module.training for module in model.modules()]
    model.eval()
    expected = [model(inputs) for inputs, _ in batches]

    assert all(map(torch.equal, actual, expected))
    assert not any(outputs.requires_grad for outputs in actual)
    assert modes == [True, False, True, True]


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Linear(4, 3), torch.ones(2, 4)),
        (nn.Linear(4, 3), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long))),
        (Named(), {"features": torch.ones(2, 4)}),
        (Named(), {"features": torch.ones(2, 4), "labels": torch.zeros(2, dtype=torch.long)}),
    ],
    ids=["inputs", "pair", "by name", "by name with labels"],
)
async def test_targets_may_be_there_and_may_not(make_trainer: MakeTrainer, model: nn.Module, batch: Any) -> None:
    """Whoever predicts often has none."""
    [actual] = await make_trainer(model=model).predict([batch])

    assert actual.shape == (2, 3)


async def test_a_model_that_reads_its_batches_itself_predicts(make_trainer: MakeTrainer) -> None:
    """It gets the batch as it is."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, batch: Any) -> Tensor:
            outputs: Tensor = self.layer(batch["x"])
            return outputs

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.mean()

    [actual] = await make_trainer(model=Reader(), loss=None).predict([{"x": torch.ones(2, 4)}])

    assert actual.shape == (2, 3)


async def test_algorithms_may_change_what_is_predicted(make_trainer: MakeTrainer, batches: Batches) -> None:
    """On PREDICT_AFTER_FORWARD, as what they put into the state is what is returned."""

    class Classes(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event == Event.PREDICT_AFTER_FORWARD

        def apply(self, event: Event, state: State, logger: Any) -> None:
            state.outputs = state.outputs.argmax(dim=1)

    actual = await make_trainer(algorithms=[Classes()]).predict(batches)

    assert [tuple(outputs.shape) for outputs in actual] == [(6,)] * 3


async def test_callbacks_may_take_the_outputs_as_they_come(make_trainer: MakeTrainer, batches: Batches) -> None:
    """Then nothing piles up; so many batches and no more, each time from the first."""
    seen: list[tuple[int, int]] = []

    class Take(Callback[State]):
        def predict_batch_end(self, state: State, logger: Any) -> None:
            seen.append((int(state.eval_timestamp.batch), int(state.eval_timestamp.sample)))

    async with make_trainer(callbacks=[Take()]) as trainer:
        for _ in range(2):
            assert await trainer.predict(batches, subset_num_batches=2, return_outputs=False) == []

    assert seen == [(1, 6), (2, 12)] * 2


async def test_training_goes_on_as_it_was(make_trainer: MakeTrainer, batches: Batches) -> None:
    """Batch, outputs and loss in the state are what they were."""
    async with make_trainer() as trainer:
        await trainer.fit("1ba")
        before = trainer.state.batch, trainer.state.outputs, trainer.state.loss
        await trainer.predict(batches)
        after = trainer.state.batch, trainer.state.outputs, trainer.state.loss

    assert all(a is b for a, b in zip(after, before, strict=True))


async def test_what_cannot_be_predicted_on_is_refused(make_trainer: MakeTrainer) -> None:
    """By name."""
    with pytest.raises(ConfigurationError, match="dataloader is a int, which cannot be iterated"):
        await make_trainer().predict(3)
    with pytest.raises(ConfigurationError, match="subset_num_batches=0; give how many"):
        await make_trainer().predict([], subset_num_batches=0)
