"""Does training hold up the event loop? Train with steps of 200 ms beside a task that beats every 5 ms.

Forward, backward and optimizer run on a thread of their own, and so does SelectiveBackprop's extra forward pass, while
the loop goes on serving whatever else lives on it. Each beat notes how much later than planned it came.
"""

from __future__ import annotations

import math
import statistics
import time

import anyio
import torch
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine import Callback
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import MixUp, SelectiveBackprop

STEP = 0.2  # seconds
BEAT = 0.005
BATCHES = 16


class StepTimer(Callback[State]):
    """Times the batches, from BATCH_START to BATCH_END."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start."""
        self._started = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self._started)


def make_model() -> nn.Module:
    """A perceptron with three wide layers: much to compute, little memory to move."""
    return nn.Sequential(
        nn.Linear(64, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def make_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Noise will do: only the time it takes matters here."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 64, generator=generator), torch.randint(0, 10, (samples,), generator=generator)


def samples_for(seconds: float) -> int:
    """How many samples make a step of this length on this machine."""
    model, (inputs, labels) = make_model(), make_batch(256)
    timings: list[float] = []
    for _ in range(6):
        started = time.perf_counter()
        functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        timings.append(time.perf_counter() - started)
    return math.ceil(256 * seconds / min(timings))


async def beat(lags: list[float]) -> None:
    """Beat until cancelled."""
    while True:
        due = time.perf_counter() + BEAT
        await anyio.sleep(BEAT)
        lags.append(time.perf_counter() - due)


async def train(trainer: Trainer, lags: list[float]) -> None:
    """Train, the heart beating on the same event loop."""
    async with anyio.create_task_group() as group:
        group.start_soon(beat, lags)
        await trainer.fit()
        group.cancel_scope.cancel()


def measure() -> tuple[list[float], list[float]]:
    """Train.

    Returns:
        How long the steps took and how late the beats were, in seconds.
    """
    torch.set_num_threads(1)  # or the step would take every core, and the loop would wait for one
    model, timer, lags = make_model(), StepTimer(), list[float]()
    trainer = Trainer(
        model,
        [make_batch(2 * samples_for(STEP))] * BATCHES,  # of which half are left
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        max_duration="1ep",
        algorithms=[MixUp(), SelectiveBackprop(start=0.0, end=1.0, interrupt=0)],  # which prunes every batch
        callbacks=timer,
        seed=1,
    )
    anyio.run(train, trainer, lags)
    return timer.seconds, lags


def main() -> None:
    """Print how long the steps took and how late the beats were."""
    steps, lags = measure()
    cuts = statistics.quantiles(lags, n=100, method="inclusive")
    print(f"step: median {statistics.median(steps) * 1000:.0f} ms, longest {max(steps) * 1000:.0f} ms")
    print(f"event loop lag: p50 {cuts[49] * 1000:.2f} ms, p99 {cuts[98] * 1000:.2f} ms, {len(lags)} beats")


if __name__ == "__main__":
    main()
