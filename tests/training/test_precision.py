"""`amp_fp16`: the loss is scaled for the backward pass, and nobody after it notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]
Batches = list[tuple[Tensor, Tensor]]


def train_by_hand(model: nn.Module, batches: Batches, epochs: int) -> torch.amp.GradScaler:
    """The loop of torch's documentation."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for inputs, targets in batches * epochs:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler


async def test_training_under_amp_fp16_is_the_loop_of_torchs_documentation(
    make_trainer: MakeTrainer, make_model: Callable[..., nn.Module], batches: Batches
) -> None:
    """Bit for bit, the scale included."""
    trainer = make_trainer(precision="amp_fp16", max_duration="2ep")
    await trainer.fit()
    reference = make_model()
    scaler = train_by_hand(reference, batches, epochs=2)

    assert trainer.state.scaler is not None
    assert trainer.state.scaler.get_scale() == scaler.get_scale()
    for actual, expected in zip(trainer.state.model.parameters(), reference.parameters(), strict=True):
        assert actual.equal(expected)


async def test_gradients_are_scaled_after_backward_and_not_after_the_batch(make_trainer: MakeTrainer) -> None:
    """Who clips or watches them on AFTER_TRAIN_BATCH finds them as without a scaler."""
    norms: dict[str, float] = {}

    class Look(Callback[State]):
        def run_event(self, event: Any, state: State, logger: Any) -> None:
            if event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH):
                gradients = [p.grad.flatten() for p in state.model.parameters() if p.grad is not None]
                norms[event.name] = float(torch.cat(gradients).norm())

    trainer = make_trainer(precision="amp_fp16", max_duration="1ba", callbacks=[Look()])
    await trainer.fit()

    assert norms["AFTER_BACKWARD"] == pytest.approx(norms["AFTER_TRAIN_BATCH"] * 65536, rel=1e-6)


async def test_a_step_whose_gradients_are_not_finite_is_left_out(make_trainer: MakeTrainer) -> None:
    """The parameters stay, and the scale goes down."""

    class Overflow(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event == Event.AFTER_BACKWARD

        def apply(self, event: Event, state: State, logger: Any) -> None:
            next(state.model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]

    trainer = make_trainer(precision="amp_fp16", max_duration="1ba", algorithms=[Overflow()])
    before = [parameter.detach().clone() for parameter in trainer.state.model.parameters()]
    await trainer.fit()

    assert trainer.state.scaler is not None
    assert trainer.state.scaler.get_scale() == 32768
    assert all(map(torch.equal, trainer.state.model.parameters(), before))


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
async def test_other_precisions_have_no_scaler(make_trainer: MakeTrainer, precision: str) -> None:
    """They do not need one."""
    actual = make_trainer(precision=precision).state.scaler

    assert actual is None


@pytest.mark.parametrize("alone", [False, True], ids=["one of two", "alone"])
async def test_an_optimizer_of_frozen_parameters_goes_with_amp_fp16(
    make_model: Callable[..., nn.Module], batches: Batches, alone: bool
) -> None:
    """Its parameters stay, and the others are trained, as in the other precisions."""
    model = make_model()
    frozen, trained = model[0], model[2]  # type: ignore[index]
    frozen.requires_grad_(False)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in ((frozen,) if alone else (frozen, trained))]
    before = [part.weight.detach().clone() for part in (frozen, trained)]
    trainer = Trainer(
        model, batches, loss=functional.cross_entropy, optimizers=optimizers, max_duration="1ba", precision="amp_fp16"
    )
    await trainer.fit()

    assert [part.weight.equal(was) for part, was in zip((frozen, trained), before, strict=True)] == [True, alone]
