"""`state.backpropagate()`: the batch in progress once more; and gradients with a graph."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of them."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


class Again(Algorithm[State, Event]):
    """Runs the batch once more, from nothing, and keeps what it finds."""

    def __init__(self) -> None:
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.losses: list[Tensor] = []

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_TRAIN_BATCH."""
        return event == Event.AFTER_TRAIN_BATCH

    async def apply(self, event: Event, state: State, logger: Any) -> None:
        """The second pass."""
        assert state.loss is not None
        self.first = gradients(state.model)
        state.model.zero_grad()
        whole, loss = state.batch, state.loss
        self.losses = [loss, await state.backpropagate()]
        self.second = gradients(state.model)
        assert state.batch is whole
        assert state.loss is loss


@pytest.mark.parametrize("offload", [True, False], ids=["offloaded", "inline"])
@pytest.mark.parametrize("microbatches", [1, 3])
async def test_a_second_pass_gives_the_same_gradients_again(
    make_trainer: MakeTrainer, microbatches: int, offload: bool
) -> None:
    """And the same loss; batch and loss in the state stay."""
    again = Again()
    trainer = make_trainer(max_duration="1ba", microbatches=microbatches, algorithms=[again], offload=offload)
    await trainer.fit()

    assert all(map(torch.equal, again.first, again.second))
    assert again.losses[0] == again.losses[1]


async def test_a_second_pass_has_the_events_of_its_microbatches(make_trainer: MakeTrainer) -> None:
    """Nested in the one that asked for it, so that what mixes targets or smooths labels does it again."""
    events: list[str] = []

    class Record(Callback[State]):
        def run_event(self, event: Any, state: State, logger: Any) -> None:
            events.append(event.name)

    await make_trainer(max_duration="1ba", microbatches=2, algorithms=[Again()], callbacks=[Record()]).fit()
    microbatch = ["BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS", "BEFORE_BACKWARD", "AFTER_BACKWARD"]
    start = events.index("BEFORE_TRAIN_BATCH")

    assert events[start:][: 2 + 4 * 6] == ["BEFORE_TRAIN_BATCH", *microbatch * 4, "AFTER_TRAIN_BATCH"]


async def test_a_second_pass_is_refused_where_there_is_no_batch(make_trainer: MakeTrainer) -> None:
    """Before the first, between two, and without a trainer."""

    class Early(Callback[State]):
        async def batch_end(self, state: State, logger: Any) -> None:
            with pytest.raises(ConfigurationError, match="no batch to backpropagate once more"):
                await state.backpropagate()

    await make_trainer(max_duration="1ba", callbacks=[Early()]).fit()
    with pytest.raises(ConfigurationError, match="async apply on AFTER_TRAIN_BATCH"):
        await State(nn.Linear(1, 1)).backpropagate()


async def test_a_second_pass_does_not_go_with_a_scaler(make_trainer: MakeTrainer) -> None:
    """Whose look at the gradients is over by then."""
    with pytest.raises(ConfigurationError, match="does not go with precision='amp_fp16'"):
        await make_trainer(max_duration="1ba", precision="amp_fp16", algorithms=[Again()]).fit()


class Graphs(Algorithm[State, Event]):
    """Asks for gradients with a graph, and penalises their squared norm."""

    backwards_create_graph = True

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_BACKWARD."""
        return event == Event.AFTER_BACKWARD

    def apply(self, event: Event, state: State, logger: Any) -> None:
        """Differentiate the gradients."""
        found = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in found]).sum()
        torch.autograd.grad(norm, list(state.model.parameters()), allow_unused=True)
        self.norms.append(norm.detach())


@pytest.mark.parametrize("microbatches", [1, 3])
async def test_gradients_with_a_graph_are_the_same_gradients(make_trainer: MakeTrainer, microbatches: int) -> None:
    """They can be differentiated on AFTER_BACKWARD, have no graph after it, and nobody is warned."""
    left: list[bool] = []

    class Look(Callback[State]):
        def after_train_batch(self, state: State, logger: Any) -> None:
            left.extend(p.grad is not None and p.grad.requires_grad for p in state.model.parameters())

    plain = make_trainer(max_duration="1ep", microbatches=microbatches)
    await plain.fit()
    algorithm = Graphs()
    trainer = make_trainer(max_duration="1ep", microbatches=microbatches, algorithms=[algorithm], callbacks=[Look()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await trainer.fit()

    assert len(algorithm.norms) == 3 * microbatches
    assert not any(left)
    for actual, expected in zip(trainer.state.model.parameters(), plain.state.model.parameters(), strict=True):
        assert torch.allclose(actual, expected)


async def test_graphs_of_gradients_leave_no_circles_behind(make_trainer: MakeTrainer) -> None:
    """A model goes when its run goes, without the help of the garbage collector's search for circles."""
    trainer = make_trainer(max_duration="1ep", algorithms=[Graphs()])
    await trainer.fit()
    gradient = next(trainer.state.model.parameters()).grad
    assert gradient is not None
    seen = weakref.ref(gradient)
    gc.disable()
    try:
        next(trainer.state.model.parameters()).grad = None
        del gradient

        assert seen() is None
    finally:
        gc.enable()
