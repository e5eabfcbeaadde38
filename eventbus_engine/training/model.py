"""What a model has to be, and how the loop gets outputs and a loss out of one.

Either any `torch.nn.Module` with a loss function beside it, trained on batches of inputs and targets; or a
`BatchModel`, which reads the batch itself and so takes batches of any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.training.data import describe

__all__ = [
    "BatchModel",
    "LossFunction",
    "TARGET_KEYS",
    "check_model",
    "compute_loss",
    "forward",
    "inputs_and_targets",
    "inputs_of",
]

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""`(outputs, targets) -> loss`, the mean over the samples, a tensor of one element."""

TARGET_KEYS = ("labels", "label", "targets", "target")
"""Where a batch that is a mapping keeps its targets."""


@runtime_checkable
class BatchModel(Protocol):
    """A module that is called with whole batches and brings its own loss, as Composer's models do."""

    def forward(self, batch: Any) -> Any:
        """The outputs for a batch."""
        ...

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """The mean loss of the outputs over the samples of the batch, a tensor of one element."""
        ...


def check_model(model: Any, loss: LossFunction | None) -> None:
    """Refuse a model that the loop could not train.

    Raises:
        ConfigurationError: it is no module, or there is no loss.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {_type_name(model)}; give a torch.nn.Module, an instance of it")
    # Looked up on the class: a submodule that is called `loss` takes targets, not a batch.
    if loss is None and not callable(getattr(type(model), "loss", None)):
        raise ConfigurationError(
            f"there is no loss: give loss=, a function (outputs, targets) such as torch.nn.functional.cross_entropy, "
            f"or give {type(model).__name__} a method loss(outputs, batch)"
        )
    if loss is not None and not callable(loss):
        raise ConfigurationError(f"loss is a {_type_name(loss)}; give a function (outputs, targets)")


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Take a batch apart: a pair is (inputs, targets); a mapping has its targets under one of `TARGET_KEYS`.

    Raises:
        BatchError: the batch is neither.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return {name: value for name, value in batch.items() if name != key}, batch[key]
    raise BatchError(
        f"the batch is {describe(batch)}, which the model cannot be fed with: yield pairs (inputs, targets), or "
        f"mappings with the targets under {', '.join(map(repr, TARGET_KEYS))}, or train a model that reads its "
        f"batches itself, with forward(batch) and loss(outputs, batch), and leave loss= out"
    )


def inputs_of(batch: Any) -> Any:
    """What a model is called with for a batch that may have targets, as `inputs_and_targets` finds them, or not."""
    try:
        return inputs_and_targets(batch)[0]
    except BatchError:
        return batch


def forward(
    model: nn.Module,
    batch: Any,
    loss: LossFunction | None,
    *,
    targets: bool = True,
    runner: Callable[..., Any] | None = None,
) -> Any:
    """The outputs of the model for a batch. Inputs that are a mapping are passed by name.

    Args:
        model: the model.
        batch: inputs and targets; or, without `loss`, what the model reads itself.
        loss: the loss function beside the model, if there is one.
        targets: whether the batch has to have targets; if not, one that has none is inputs as a whole.
        runner: what to call in place of the model: the compiled one, say.

    Raises:
        BatchError: the batch is no inputs and targets, and the model does not read batches itself; or the model cannot
            take it. The error of the model is its cause.
    """
    run = model if runner is None else runner
    if loss is None:
        inputs = batch
    else:
        inputs = inputs_and_targets(batch)[0] if targets else inputs_of(batch)
    try:
        return run(**inputs) if isinstance(inputs, Mapping) and loss is not None else run(inputs)
    except Exception as error:
        # What torch raises for shapes, types and indices that do not fit; a class of one's own means something else.
        if type(error) not in (RuntimeError, TypeError, ValueError, IndexError):
            raise
        raise BatchError(
            f"{type(model).__name__} failed on the batch, {describe(batch)}: {error}; make the loader yield what its "
            f"forward() takes"
        ) from error


def compute_loss(model: nn.Module, outputs: Any, batch: Any, loss: LossFunction | None) -> Tensor:
    """The loss of the outputs for a batch, a tensor of one element.

    Raises:
        BatchError: the batch is no inputs and targets, and the model does not read batches itself.
        ConfigurationError: the loss is not one number.
    """
    value: Any
    if loss is None:
        value = model.loss(outputs, batch)  # type: ignore[operator]
    else:
        value = loss(outputs, inputs_and_targets(batch)[1])
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigurationError(
            f"the loss is {describe(value)}; it has to return one tensor with one element, the mean over the samples "
            f"(reduction='mean')"
        )
    return value


def _type_name(value: object) -> str:
    return f"class, {value.__name__}" if isinstance(value, type) else type(value).__name__
