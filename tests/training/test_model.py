"""What a model may be, and how outputs and a loss come out of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.training.model import BatchModel, check_model, compute_loss, forward, inputs_and_targets

INPUTS, TARGETS = torch.ones(2, 4), torch.tensor([0, 1])


class TwoInputs(nn.Module):
    """Takes its inputs by name."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Some combination."""
        return left - right


class ReadsBatches(nn.Module):
    """Reads the batch itself and brings its own loss."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Some outputs."""
        return batch["signal"] * 2

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Some loss."""
        return (outputs - batch["signal"]).mean()


@pytest.mark.parametrize(
    "batch",
    [
        (INPUTS, TARGETS),
        [INPUTS, TARGETS],
        *({"x": INPUTS, key: TARGETS} for key in ("labels", "label", "targets", "target")),
    ],
)
def test_a_batch_is_taken_apart_into_inputs_and_targets(batch: Any) -> None:
    """A pair by position, a mapping by the name of its targets."""
    inputs, targets = inputs_and_targets(batch)

    assert targets is TARGETS
    assert inputs is INPUTS or inputs == {"x": INPUTS}


@pytest.mark.parametrize("batch", [INPUTS, (INPUTS, TARGETS, TARGETS), {"x": INPUTS}, "text"])
def test_any_other_batch_is_refused_by_its_type_with_the_cures(batch: Any) -> None:
    """Naming the shapes that fit, and the model that takes any."""
    with pytest.raises(
        BatchError, match=rf"the batch is {type(batch).__name__}.*\(inputs, targets\).*forward\(batch\)"
    ):
        forward(nn.Linear(4, 2), batch, functional.cross_entropy)


def test_inputs_that_are_a_mapping_are_passed_by_name() -> None:
    """As tokenisers give them."""
    batch = {"left": INPUTS * 3, "right": INPUTS, "labels": TARGETS}
    actual = forward(TwoInputs(), batch, functional.cross_entropy)

    assert actual.equal(INPUTS * 2)


def test_the_loss_function_gets_outputs_and_targets() -> None:
    """In torch's own order."""
    outputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    actual = compute_loss(nn.Identity(), outputs, (INPUTS, TARGETS), functional.cross_entropy)

    assert actual.equal(functional.cross_entropy(outputs, TARGETS))


def test_a_model_with_its_own_loss_gets_the_whole_batch() -> None:
    """Whatever that batch is."""
    model, batch = ReadsBatches(), {"signal": INPUTS}
    check_model(model, None)
    outputs = forward(model, batch, None)

    assert isinstance(model, BatchModel)
    assert compute_loss(model, outputs, batch, None).item() == 1.0


@pytest.mark.parametrize("loss", [functional.cross_entropy(torch.zeros(2, 2), TARGETS, reduction="none"), (1.0,), 0.5])
def test_a_loss_that_is_not_one_number_is_refused(loss: Any) -> None:
    """Most often a forgotten reduction."""
    with pytest.raises(ConfigurationError, match=r"the loss is .*reduction='mean'"):
        compute_loss(nn.Identity(), INPUTS, (INPUTS, TARGETS), lambda outputs, targets: loss)


class LossIsASubmodule(nn.Module):
    """Its `loss` takes targets, not a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (nn.Linear, None, "model is a class, Linear; give a torch.nn.Module"),
        (lambda inputs: inputs, None, "model is a function; give a torch.nn.Module"),
        (nn.Linear(1, 1), None, r"there is no loss: .* give Linear a method loss\(outputs, batch\)"),
        (LossIsASubmodule(), None, "there is no loss"),
        (nn.Linear(1, 1), "mse", "loss is a str; give a function"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_construction(model: Any, loss: Any, message: str) -> None:
    """With the argument that would have fitted."""
    with pytest.raises(ConfigurationError, match=message):
        check_model(model, loss)
