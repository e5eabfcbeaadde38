"""Small real tasks to train on, each within seconds on one core: handwritten digits, and English by characters.

A task is a function of a seed: the initial weights, the training samples, their order and their noise follow from it,
so that the same seed gives the same run, bit for bit, and two arms of a comparison start from the same place.
"""

from __future__ import annotations

import functools
import itertools
import math
import pydoc_data.topics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, nn

__all__ = ["Setup", "Task", "digits", "large_digits", "shifted_digits", "text"]

LENGTH = 64


@dataclass(frozen=True)
class Setup:
    """What to train, on what, and how to judge the outcome.

    Attributes:
        model: freshly initialised.
        optimizer: makes the optimizer of it.
        train: batches, iterated once an epoch.
        held_out: batches to evaluate on.
        steps: batches to train on.
        judge: the figures that tell how well the trained model does, by the heads of their columns, the most important
            one first: from the metrics of the evaluation and the model itself.
        decay: whether the learning rate falls to nothing along a cosine; else it stays what it is.
    """

    model: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    train: Batches
    held_out: list[Any]
    steps: int
    judge: Callable[[Mapping[str, float], nn.Module], dict[str, float]]
    decay: bool = True

    def shorter(self, part: float) -> Setup:
        """The same for a part of the steps, more than the whole included."""
        return replace(self, steps=max(2, round(self.steps * part)))


Task = Callable[[int], Setup]


class Batches:
    """Batches of rows of tensors, in a new order each epoch; a last one that is too small is left out."""

    def __init__(self, make: Callable[[Tensor], Any], samples: int, size: int, seed: int) -> None:
        self.make = make
        self.samples = samples
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.samples // self.size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.samples, generator=self.generator)
        for start in range(0, len(self) * self.size, self.size):
            yield self.make(order[start : start + self.size])


# -------------------------------------------------------------------------------------------------------------- digits


@functools.cache
def load() -> tuple[Tensor, Tensor]:
    """All 1797 of scikit-learn's digits, (N, 1, 8, 8) from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)


def convolutions(*channels: int, norm: bool = True, places: int = 4) -> nn.Sequential:
    """Convolutions, each on half the size of the one before, and a linear layer on what is pooled: any size will do.

    Args:
        channels: of each.
        norm: with BatchNorm.
        places: to pool into, in each direction; with 1 it does not matter where something is.
    """
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((1, *channels)):
        layers += [nn.MaxPool2d(2)] if layers else []
        layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(places), nn.Flatten(), nn.Linear(places**2 * channels[-1], 10))


def accuracy(metrics: Mapping[str, float], model: nn.Module) -> dict[str, float]:
    """In percent."""
    return {"accuracy, %": 100 * metrics["metrics/eval/accuracy"]}


def digits(
    seed: int,
    *,
    samples: int = 400,
    noise: float = 0.0,
    epochs: int = 20,
    rate: float = 0.05,
    decay: bool = True,
    channels: Sequence[int] = (16, 32),
    norm: bool = True,
    places: int = 4,
    upscale: int = 1,
    margin: int = 0,
) -> Setup:
    """Classify digits with a small CNN, trained on a few of them and judged by all the others.

    Args:
        seed: of everything.
        samples: to train on, drawn anew by each seed.
        noise: the part of the training labels that is replaced by random ones.
        epochs: of batches of 32.
        rate: of SGD with momentum 0.9.
        decay: the rate falls to nothing along a cosine.
        channels: of the convolutions.
        norm: with BatchNorm.
        places: that the model pools into, in each direction.
        upscale: factor of the size.
        margin: empty pixels around it.
    """
    generator = torch.Generator().manual_seed(seed)
    images, labels = load()
    if upscale != 1:
        images = F.interpolate(images, scale_factor=upscale, mode="bilinear")
    images = F.pad(images, [margin] * 4)
    order = torch.randperm(len(labels), generator=generator)
    chosen, rest = order[:samples], order[samples:]
    inputs, targets = images[chosen], labels[chosen]
    wrong = torch.rand(samples, generator=generator) < noise
    targets = torch.where(wrong, torch.randint(10, (samples,), generator=generator), targets)
    torch.manual_seed(seed)
    train = Batches(lambda rows: (inputs[rows], targets[rows]), samples, 32, seed)
    return Setup(
        convolutions(*channels, norm=norm, places=places),
        lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        train,
        [(images[part], labels[part]) for part in _parts(rest, 512)],
        epochs * len(train),
        accuracy,
        decay,
    )


def _parts(rows: Tensor, size: int) -> list[Tensor]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def large_digits(seed: int) -> Setup:
    """The digits at four times their size, 32 by 32, for fewer epochs."""
    return digits(seed, upscale=4, epochs=12, channels=(8, 16, 32))


SHIFTS = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]


def shifted_digits(seed: int) -> Setup:
    """Digits in the middle of a field of 16 by 16, trained on as they are and judged by what shifting them changes.

    Besides the accuracy over all shifts by up to 2 pixels there is the consistency: how often two shifts that lie one
    pixel apart get the same prediction.
    """

    def consistency(metrics: Mapping[str, float], model: nn.Module) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            predicted = {shift: model(images.roll(shift, (2, 3))).argmax(1) for shift in SHIFTS}
        right = sum(float((guess == labels).float().mean()) for guess in predicted.values())
        same = [
            float((predicted[down, to] == predicted[next_down, next_to]).float().mean())
            for down, to in SHIFTS
            for next_down, next_to in ((down + 1, to), (down, to + 1))
            if (next_down, next_to) in predicted
        ]
        return {
            "accuracy when shifted, %": 100 * right / len(SHIFTS),
            "consistency, %": 100 * sum(same) / len(same),
            **accuracy(metrics, model),
        }

    setup = digits(seed, epochs=12, channels=(16, 32, 64), places=1, margin=4)
    images = torch.cat([inputs for inputs, _ in setup.held_out])[:500]
    labels = torch.cat([targets for _, targets in setup.held_out])[:500]
    return replace(setup, held_out=[(images, labels)], judge=consistency)


# ---------------------------------------------------------------------------------------------------------------- text


@functools.cache
def pieces() -> tuple[Tensor, int]:
    """The language reference that `help()` shows, as numbers, (N, LENGTH + 1), and how many characters there are."""
    told = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(told)))}
    numbers = torch.tensor([alphabet[character] for character in told])
    return numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1), len(alphabet)


class Block(nn.Module):
    """Attention to what came before, then a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, length, width) to the same shape."""
        heads = self.attention(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return changed


class GPT(nn.Module):
    """The logits of the next character at every place."""

    def __init__(self, characters: int, width: int = 48, heads: int = 4, hidden: int = 192) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(N, length) to (N, characters, length)."""
        x = self.characters(input_ids) + self.places.weight[: input_ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x))).transpose(1, 2)
        return logits


def text(seed: int, *, hidden: int = 192, rate: float = 6e-3, steps: int = 300) -> Setup:
    """Predict the next character of an English text with a GPT of two blocks, judged by a tenth that is held out.

    Args:
        seed: of everything.
        hidden: the width of the feed-forward networks.
        rate: of AdamW; it falls to nothing along a cosine.
        steps: batches of 8 pieces of 64 characters.
    """
    rows, characters = pieces()
    train, held_out = rows[: -len(rows) // 10], rows[-len(rows) // 10 :]
    torch.manual_seed(seed)
    return Setup(
        GPT(characters, hidden=hidden),
        lambda model: torch.optim.AdamW(model.parameters(), lr=rate),
        Batches(lambda chosen: _batch(train[chosen]), len(train), 8, seed),
        [_batch(part) for part in _parts(held_out, 128)],
        steps,
        lambda metrics, model: {"bits per character": metrics["metrics/eval/loss"] / math.log(2)},
    )


def _batch(rows: Tensor) -> dict[str, Tensor]:
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
