"""All callbacks of the room at once: they watch a run, and change nothing of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import Trainer, callbacks

pytestmark = pytest.mark.anyio


def all_callbacks() -> list[Any]:
    """One of each, looking as often as it can, and with no reason to stop the run."""
    return [
        callbacks.EarlyStopper("loss", patience=100),
        callbacks.EarlyStopper("loss", "train", patience=100),
        callbacks.LRMonitor(),
        callbacks.MemoryMonitor(),
        callbacks.NaNMonitor(),
        callbacks.OptimizerMonitor(batch_log_interval=1),
        callbacks.RuntimeEstimator(),
        callbacks.SpeedMonitor(2),
    ]


async def train(watchers: list[Any], **arguments: Any) -> tuple[InMemoryLogger, list[Tensor], list[Any]]:
    """A model with dropout on shuffled data, evaluated: what was logged, the parameters, and where generators are."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    records = InMemoryLogger()
    trainer = Trainer(
        model,
        DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True),
        [(inputs, targets)],
        loss=functional.cross_entropy,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="3ep",
        callbacks=watchers,
        loggers=records,
        seed=7,
        **arguments,
    )
    await trainer.fit()
    return records, list(model.parameters()), [random.getstate(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
async def test_a_run_with_all_of_them_is_bit_for_bit_the_run_without(offload: bool, microbatches: int) -> None:
    """Losses, metrics, parameters, and the generators that training draws from."""
    plain, parameters, generators = await train([], offload=offload, microbatches=microbatches)
    watched, same_parameters, same_generators = await train(all_callbacks(), offload=offload, microbatches=microbatches)

    assert {name: watched.data[name] for name in plain.data} == plain.data
    assert len(plain.data["loss/train/total"]) == 9
    assert all(torch.equal(one, other) for one, other in zip(parameters, same_parameters, strict=True))
    assert same_generators == generators


async def test_each_of_them_logs_under_a_prefix_of_its_own() -> None:
    """Nothing is written twice at a step."""
    records, _, _ = await train(all_callbacks())

    assert {name.partition("/")[0] for name in records.data} == {
        "loss",
        "lr-AdamW",
        "l2_norm",
        "memory",
        "metrics",
        "throughput",
        "time",
    }
    assert [name for name, pairs in records.data.items() if len(pairs) > len({step for step, _ in pairs})] == []


def test_the_public_names_are_sorted_and_all_there_are() -> None:
    """One callback for each module."""
    public = [name for name, item in vars(callbacks).items() if isinstance(item, type)]

    assert callbacks.__all__ == sorted(callbacks.__all__)
    assert set(public) == set(callbacks.__all__)
