"""A clock that is set by hand, and a model that measures what a test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Clock:
    """Stands in for `time.perf_counter`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the training loop and its callbacks; it moves when a test says so."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Scripted(nn.Module):
    """Reads its batches itself; its loss in evaluation, one batch of ten samples, is the next of `values`.

    Its accuracy there is the value as well, as far as that is a number of tenths. What takes time is told to `clock`.
    """

    def __init__(
        self,
        values: Sequence[float] = (),
        clock: Clock | None = None,
        seconds: Sequence[float] = (),
        evaluation_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._values = iter(values)
        self._value = 0.0
        self._clock = clock
        self._seconds = iter(seconds)
        self._evaluation_seconds = evaluation_seconds

    def forward(self, batch: Any) -> Tensor:
        """Ten rows of two logits, of which so many tenths are right, if the targets are all 0."""
        if self._clock is not None:
            self._clock.advance(next(self._seconds) if self.training else self._evaluation_seconds)
        if self.training:
            return self.weight.sum() * torch.ones(10, 2)
        self._value = next(self._values, 0.0)
        right = torch.arange(10) < self._value * 10 - 0.5
        return torch.stack([right.float(), 1 - right.float()], dim=1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """What the script says."""
        return outputs.mean() if self.training else torch.tensor(self._value, dtype=torch.float64)


@pytest.fixture
def scripted() -> Callable[..., nn.Module]:
    """Builds scripted models."""
    return Scripted
