"""MixUp and CutMix alike: partners that are found again in a second pass over the batch, and each other's company."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm, algorithm
from eventbus_engine.engine import Engine
from eventbus_engine.errors import BatchError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.passes import ConflictWarning
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import CutMix, MixUp
from eventbus_engine.training.data import split
from eventbus_engine.training.model import compute_loss, forward

Mixing: TypeAlias = Callable[..., MixUp | CutMix]

both = pytest.mark.parametrize("make", [MixUp, CutMix])
in_both_modes = pytest.mark.parametrize("interpolate_loss", [False, True])


class Classifier(nn.Sequential):
    """Images of 3 x 3 pixels into 4 classes, in float64; keeps the targets that its loss was given."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(nn.Flatten(), nn.Linear(9, 4, dtype=torch.float64))
        self.targets: list[torch.Tensor] = []

    def cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.targets.append(targets)
        return functional.cross_entropy(outputs, targets)


class AnotherPass(Algorithm[State, Event]):
    """Backpropagates the batch once more before the optimizers step, with the events of every microbatch."""

    def __init__(self, microbatches: int | None = None) -> None:
        self.microbatches = microbatches
        self.engine: Engine[State] | None = None
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_TRAIN_BATCH

    async def apply(self, event: Event, state: State, logger: Logger) -> None:
        assert self.engine is not None
        weight = next(state.model.parameters())
        assert weight.grad is not None
        once = weight.grad.clone()
        whole = state.batch
        for part in split(whole, self.microbatches or state.microbatches):
            state.batch = part
            async with self.engine.pair(Event.BEFORE_FORWARD):
                state.outputs = forward(state.model, state.batch, state.loss_fn)
            async with self.engine.pair(Event.BEFORE_LOSS):
                state.loss = compute_loss(state.model, state.outputs, state.batch, state.loss_fn)
            async with self.engine.pair(Event.BEFORE_BACKWARD):
                torch.autograd.backward(state.loss * len(part[0]) / len(whole[0]))
        state.batch = whole
        self.gradients.append((once, weight.grad.clone()))


def make_trainer(model: Classifier, algorithms: Sequence[Algorithm[Any, Any]], **options: Any) -> Trainer:
    """A run of two batches of seven images."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(7, 1, 3, 3, generator=generator, dtype=torch.float64),
            torch.randint(4, (7,), generator=generator),
        )
        for _ in range(2)
    ]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    defaults: dict[str, Any] = {"loss": model.cross_entropy, "max_duration": "2ba", "seed": 2}
    trainer = Trainer(model, batches, optimizers=optimizer, algorithms=algorithms, **defaults | options)
    for item in algorithms:
        if isinstance(item, AnotherPass):
            item.engine = trainer.engine
    return trainer


@pytest.mark.anyio
@both
@in_both_modes
@pytest.mark.parametrize("microbatches", [1, 3])
async def test_a_second_pass_meets_the_same_partners(make: Mixing, microbatches: int, interpolate_loss: bool) -> None:
    """The same targets, microbatch by microbatch, and so the same gradient, in every batch."""
    model, again = Classifier(), AnotherPass()
    mixing = make(alpha=1.0, interpolate_loss=interpolate_loss)
    await make_trainer(model, [mixing, again], microbatches=microbatches).fit()
    in_a_pass = microbatches * (2 if interpolate_loss else 1)
    passes = [model.targets[i : i + in_a_pass] for i in range(0, len(model.targets), in_a_pass)]

    assert len(passes) == 4  # two for each of the two batches
    for first, second in (passes[:2], passes[2:]):
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    for once, twice in again.gradients:
        torch.testing.assert_close(twice, 2 * once, rtol=1e-12, atol=1e-12)


@pytest.mark.anyio
@both
@in_both_modes
async def test_a_second_pass_that_is_cut_differently_is_noticed(make: Mixing, interpolate_loss: bool) -> None:
    """Its samples would meet the partners of others."""
    name = make.__name__
    algorithms = [make(alpha=1.0, interpolate_loss=interpolate_loss), AnotherPass(microbatches=2)]
    trainer = make_trainer(Classifier(), algorithms, microbatches=3)

    with pytest.raises(BatchError, match=rf"Tensor\[4\], but of the batch that {name} has mixed Tensor\[3\] is due"):
        await trainer.fit()


@pytest.mark.anyio
@both
async def test_the_batch_may_be_cut_anew_for_the_second_pass(make: Mixing) -> None:
    """Each pass is cut as the state says when it begins."""

    @algorithm(Event.AFTER_TRAIN_BATCH, run_before=["another_pass"])
    def one_by_one(event: Event, state: State, logger: Logger) -> None:
        state.microbatches = 7

    model, again = Classifier(), AnotherPass()
    await make_trainer(model, [make(alpha=1.0), one_by_one, again], microbatches=3, max_duration="1ba").fit()

    assert [len(targets) for targets in model.targets] == [3, 3, 1, *[1] * 7]
    torch.testing.assert_close(torch.cat(model.targets[:3]), torch.cat(model.targets[3:]))
    torch.testing.assert_close(again.gradients[0][1], 2 * again.gradients[0][0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(MixUp, CutMix), (CutMix, MixUp)])
def test_one_warns_of_the_other(order: tuple[Mixing, Mixing]) -> None:
    """Mixtures would be mixed again; one warning names both."""
    with pytest.warns(ConflictWarning, match=r"mixup.*cutmix|cutmix.*mixup") as caught:
        make_trainer(Classifier(), [make() for make in order])

    assert len(caught) == 1


@both
def test_either_alone_is_no_conflict(make: Mixing) -> None:
    """The constraint names the other one only."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = make_trainer(Classifier(), [make()])

    assert trainer.engine.explain(Event.BEFORE_LOSS).order == (make.__name__.lower(),)
