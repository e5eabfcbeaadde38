"""Small models and data for the training tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.training import Trainer

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and results stay comparable across machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_model(seed: int = 0) -> nn.Module:
    """A tiny classifier of 4 features into 3 classes, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def new_batches(count: int = 3, size: int = 6, seed: int = 0) -> Batches:
    """Batches of `size` samples with 4 features and one of 3 classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    """Builds the tiny classifier."""
    return new_model


@pytest.fixture
def make_batches() -> Callable[..., Batches]:
    """Builds batches for it."""
    return new_batches


@pytest.fixture
def batches() -> Batches:
    """An epoch of three batches of six samples."""
    return new_batches()


@pytest.fixture
def make_trainer(batches: Batches) -> Callable[..., Trainer]:
    """Builds a trainer of the tiny classifier on `batches`; keyword arguments replace the defaults."""

    def make(**arguments: Any) -> Trainer:
        model = arguments.pop("model", None) or new_model()
        defaults: dict[str, Any] = {
            "train_dataloader": batches,
            "loss": functional.cross_entropy,
            "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
            "max_duration": "2ep",
        }
        return Trainer(model, **defaults | arguments)

    return make
