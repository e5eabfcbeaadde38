"""What Composer needs to be imported, two of torchvision's operators, declared; and what its tests train.

torchvision comes as a CUDA wheel only. Beside a torch without CUDA its library does not load, and its import then fails
as it says what these operators do. Nothing here calls them.
"""

from __future__ import annotations

import importlib.util
import itertools
import types
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]

if torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None:
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

BATCHES = 3
"""In an epoch."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Composer warns of much that is nobody's business here: of its dependencies, of its own age, of missing GPUs."""
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.filterwarnings("ignore:::(composer|torchmetrics|torch)"))


def images() -> DataLoader[Any]:
    """Batches of four 8 x 8 images of three kinds."""
    pixels = torch.rand(4 * BATCHES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(pixels, torch.arange(4 * BATCHES) % 3), batch_size=4)


def network() -> nn.Module:
    """A convolutional network with something for every kind of surgery."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    )


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to have Composer's Trainer go by a clock that starts now and ticks a second a look."""
    trainer = importlib.import_module("composer.trainer.trainer")

    def start() -> None:
        seconds = itertools.count()
        clock = types.SimpleNamespace(now=lambda: datetime.fromtimestamp(next(seconds), UTC))
        monkeypatch.setattr(trainer, "datetime", types.SimpleNamespace(datetime=clock, timedelta=timedelta))

    return start


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., Any]]:
    """Make a Trainer of Composer's for the network and the images; all are closed in the end."""
    composer = importlib.import_module("composer")
    trainers: list[Any] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(**arguments: Any) -> Any:
        model = composer.models.ComposerClassifier(network(), num_classes=3)
        options: dict[str, Any] = {
            "model": model,
            "train_dataloader": images(),
            "max_duration": "1ep",
            "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
            "progress_bar": False,
            "device": "cpu",
            "seed": 1,
            "run_name": "run",
        }
        trainer = composer.Trainer(**options | arguments)
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()
    torch.set_num_threads(threads)
