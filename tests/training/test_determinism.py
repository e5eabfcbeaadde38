"""The same seed gives the same losses, bit for bit, whoever watches and wherever the work runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eventbus_engine.callback import Callback
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import LabelSmoothing, LayerFreezing, MixUp, SelectiveBackprop

pytestmark = pytest.mark.anyio

MakeBatches = Callable[..., list[tuple[Tensor, Tensor]]]


class Losses(Callback[State]):
    """Keeps the loss of every batch, exactly."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def batch_end(self, state: State, logger: Any) -> None:
        """The whole batch's loss is a detached tensor here."""
        assert state.loss is not None
        self.values.append(state.loss.item())


class Busy(Callback[State]):
    """Suspends on every event, as a remote logger does."""

    async def run_event(self, event: Any, state: State, logger: Any) -> None:
        """Give the other callbacks a turn, and log."""
        await anyio.lowlevel.checkpoint()
        logger.log_metrics({"event": event.value})


class Remote(LoggerDestination):
    """An async destination."""

    async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Deliver somewhere else."""
        await anyio.lowlevel.checkpoint()


@pytest.fixture
def losses_of(make_batches: MakeBatches) -> Callable[..., Any]:
    """Trains a model with dropout on shuffled data, and returns the losses of six batches."""
    inputs, targets = make_batches(1, size=24)[0]

    async def run(**arguments: Any) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
        losses = Losses()
        defaults: dict[str, Any] = {
            "loss": functional.cross_entropy,
            "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
            "max_duration": "2ep",
            "seed": 7,
        }
        callbacks = [losses, *arguments.pop("callbacks", ())]
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
        await Trainer(model, loader, callbacks=callbacks, **defaults | arguments).fit()
        return losses.values

    return run


async def test_the_same_seed_gives_the_same_losses(losses_of: Callable[..., Any]) -> None:
    """Data order and dropout included; another seed gives others."""
    first, second, other = await losses_of(), await losses_of(), await losses_of(seed=8)

    assert (first == second, first == other, len(first)) == (True, False, 6)


async def test_offloading_changes_nothing(losses_of: Callable[..., Any]) -> None:
    """The worker thread does what the event loop's thread would."""
    offloaded, inline = await losses_of(offload=True), await losses_of(offload=False)

    assert offloaded == inline


async def test_callbacks_loggers_and_tracing_change_nothing(losses_of: Callable[..., Any]) -> None:
    """Watching a run must not falsify it."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    watched = await losses_of(callbacks=[Busy(), Busy()], loggers=[Remote()], tracer_provider=provider)
    provider.shutdown()

    assert watched == await losses_of()
    assert len(exporter.get_finished_spans()) > 0


@pytest.mark.parametrize("microbatches", [1, 2])
async def test_the_algorithms_draw_the_same_whoever_watches(losses_of: Callable[..., Any], microbatches: int) -> None:
    """All four of them, with and without callbacks, on the worker and inline."""

    def algorithms() -> list[Any]:
        return [MixUp(), LayerFreezing(), LabelSmoothing(), SelectiveBackprop(start=0.0, end=1.0, interrupt=0)]

    plain = await losses_of(algorithms=algorithms(), microbatches=microbatches)
    watched = await losses_of(algorithms=algorithms(), microbatches=microbatches, callbacks=[Busy()], offload=False)

    assert (watched == plain, plain == await losses_of()) == (True, False)


async def test_evaluation_in_between_changes_nothing(losses_of: Callable[..., Any], make_batches: MakeBatches) -> None:
    """It draws nothing, and leaves no trace in batch norm or dropout."""
    evaluated = await losses_of(eval_dataloader=make_batches(2), eval_interval="1ba")

    assert evaluated == await losses_of()


@pytest.mark.parametrize("shuffle", [False, True])
async def test_a_data_loader_of_an_evaluation_shifts_nobodys_numbers(
    losses_of: Callable[..., Any], make_batches: MakeBatches, shuffle: bool
) -> None:
    """Torch's draws from the global generator whenever it is iterated, to seed its workers."""
    [(features, targets)] = make_batches(1)
    loader = DataLoader(TensorDataset(features, targets), batch_size=2, shuffle=shuffle)

    assert await losses_of(eval_dataloader=loader, eval_interval="1ba") == await losses_of()


async def test_the_seed_seeds_every_generator_that_training_may_draw_from(losses_of: Callable[..., Any]) -> None:
    """A data set may draw from `random` or numpy."""
    drawn: list[tuple[float, float]] = []

    class Draw(Callback[State]):
        def fit_start(self, state: State, logger: Any) -> None:
            drawn.append((random.random(), np.random.random()))  # noqa: NPY002 -- what a data set would do

    await losses_of(callbacks=[Draw()])
    await losses_of(callbacks=[Draw()])

    assert drawn[0] == drawn[1]


async def test_without_a_seed_the_generators_go_on_from_where_they_are(losses_of: Callable[..., Any]) -> None:
    """Who seeds by hand is not overruled."""
    torch.manual_seed(3)
    first = await losses_of(seed=None)
    torch.manual_seed(3)
    second = await losses_of(seed=None)
    third = await losses_of(seed=None)

    assert (first == second, second == third) == (True, False)
