"""The data and the model: 1,797 handwritten digits of 8x8 pixels, and a CNN that learns them in seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["make_loaders", "make_model"]

HELD_OUT = 0.2
BATCH_SIZE = 64


def make_loaders(seed: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """The training loader, shuffled anew in each epoch, and the loader of the 20 % that are held out.

    The images are the optical recognition test set of Alpaydin and Kaynak (1998, UCI), which comes with scikit-learn.
    Split and shuffling draw from private generators: the same seed gives the same batches, whatever else is random.

    Returns:
        Loaders of `(images, labels)`: float32 `(N, 1, 8, 8)` in `[-1, 1]`, int64 `(N,)` in `0..9`.
    """
    pixels, digits = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels.astype(np.float32)).reshape(-1, 1, 8, 8) / 8.0 - 1.0  # they come as 0 to 16
    labels = torch.from_numpy(digits.astype(np.int64))
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = round(HELD_OUT * len(labels))
    train, test = shuffled[held_out:], shuffled[:held_out]
    return (
        DataLoader(
            TensorDataset(images[train], labels[train]),
            batch_size=BATCH_SIZE,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
        ),
        DataLoader(
            TensorDataset(images[test], labels[test]),
            batch_size=4 * BATCH_SIZE,
            # Even a loader that does not shuffle draws a seed for its workers, from the global generator by default.
            generator=torch.Generator().manual_seed(seed),
        ),
    )


def make_model(seed: int) -> nn.Sequential:
    """Three convolutions and a linear layer, 98,000 parameters: `(N, 1, 8, 8)` to logits `(N, 10)`."""
    layers: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU,
        lambda: nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU,
        lambda: nn.MaxPool2d(2),
        lambda: nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU,
        lambda: nn.MaxPool2d(2),
        nn.Flatten,
        lambda: nn.Linear(512, 10),
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # torch initialises layers from its global generator only
        return nn.Sequential(*(layer() for layer in layers))
