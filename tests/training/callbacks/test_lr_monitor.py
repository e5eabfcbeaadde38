"""Learning rates: those that the batch was trained with, under names of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import Trainer
from eventbus_engine.training.callbacks import LRMonitor

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]


async def rates_of(make_trainer: MakeTrainer, **arguments: Any) -> dict[str, list[tuple[int | None, float]]]:
    """What is logged of the learning rates in two epochs of three batches, by name."""
    records = InMemoryLogger()
    await make_trainer(callbacks=[LRMonitor()], loggers=records, **arguments).fit()
    return {name: pairs for name, pairs in records.data.items() if name.startswith("lr-")}


@pytest.mark.parametrize("every_batch", [True, False])
async def test_the_rate_is_the_one_that_the_batch_was_trained_with(
    make_trainer: MakeTrainer, make_model: Callable[..., nn.Module], every_batch: bool
) -> None:
    """Whenever schedulers step: the first batch has the first rate, at the step of its loss."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    actual = await rates_of(
        make_trainer,
        model=model,
        optimizers=optimizer,
        schedulers=ExponentialLR(optimizer, gamma=0.5),
        step_schedulers_every_batch=every_batch,
    )

    assert actual == {
        "lr-SGD/group0": [(batch + 1, 0.5 ** (batch if every_batch else batch // 3)) for batch in range(6)]
    }


async def test_every_group_of_every_optimizer_has_a_name(
    make_trainer: MakeTrainer, make_model: Callable[..., nn.Module]
) -> None:
    """Also where two optimizers are of one class."""
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizers = [
        torch.optim.SGD([{"params": parameters["0.weight"], "lr": 0.1}, {"params": parameters["0.bias"], "lr": 0.2}]),
        torch.optim.SGD([parameters["2.weight"]], lr=0.3),
        torch.optim.AdamW([parameters["2.bias"]], lr=0.4),
    ]
    actual = await rates_of(make_trainer, model=model, optimizers=optimizers, max_duration="1ba")

    assert actual == {
        "lr-SGD/group0": [(1, 0.1)],
        "lr-SGD/group1": [(1, 0.2)],
        "lr-SGD#2/group0": [(1, 0.3)],
        "lr-AdamW/group0": [(1, 0.4)],
    }


async def test_a_rate_in_a_tensor_is_the_one_from_before_the_scheduler(
    make_trainer: MakeTrainer, make_model: Callable[..., nn.Module]
) -> None:
    """Schedulers change it in place."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1.0), foreach=False)
    actual = await rates_of(
        make_trainer,
        model=model,
        optimizers=optimizer,
        schedulers=ExponentialLR(optimizer, gamma=0.5),
        step_schedulers_every_batch=True,
        max_duration="1ep",
    )

    assert actual == {"lr-Adam/group0": [(1, 1.0), (2, 0.5), (3, 0.25)]}
