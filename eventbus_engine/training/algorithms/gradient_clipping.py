"""Gradient clipping: bound the step that a batch can make the optimizer take."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_range
from eventbus_engine.training.state import State

__all__ = ["ClippingType", "GradientClipping", "apply_gradient_clipping"]

ClippingType: TypeAlias = Literal["norm", "value", "adaptive"]
"""`norm`: of all gradients together. `value`: of each element. `adaptive`: of each unit, by its weights' norm."""

_SMALLEST_WEIGHT_NORM = 1e-3
"""Adaptive clipping takes weights for no smaller than this, or those that begin at zero would never leave it."""


def apply_gradient_clipping(
    model: nn.Module, clipping_type: ClippingType, clipping_threshold: float
) -> torch.Tensor | None:
    """Clip the gradients of a model in place.

    * `"norm"` (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063): scale all gradients by one factor, so that their
      L2 norm, taken together, is at most the threshold.
    * `"value"`: cut each element off at plus and minus the threshold. This changes the direction of the step.
    * `"adaptive"` (Brock et al. 2021, https://arxiv.org/abs/2102.06171): scale the gradient of each unit so that its
      norm is at most the threshold times the norm of the unit's weights, taken as 0.001 at least. A unit is what leads
      to one output: a row of a matrix `(out, in)`, a filter of a kernel `(out, in, ...)`; a vector (a bias, a gain) is
      one unit as a whole.

    Parameters without a gradient are left alone. Norms of gradients in half precision are taken in float32. Nothing
    here waits for the device.

    Args:
        model: the module whose `.grad` are clipped.
        clipping_type: one of the three.
        clipping_threshold: more than 0. The papers use 1.0 and less for `"norm"`, 0.01 to 0.16 for `"adaptive"`.

    Returns:
        For `"norm"` the norm before clipping, a tensor `()` on the device of the gradients; None for the others.

    Raises:
        ConfigurationError: an argument does not fit, or a gradient is sparse.
    """
    _check("apply_gradient_clipping", clipping_type, clipping_threshold)
    parameters = _with_gradients(model)
    if clipping_type == "norm":
        return _clip_norm(parameters, clipping_threshold)
    with torch.no_grad():
        for parameter, gradient in parameters:
            if clipping_type == "value":
                gradient.clamp_(-clipping_threshold, clipping_threshold)
            else:
                _clip_units(parameter, gradient, clipping_threshold)
    return None


def _with_gradients(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    pairs = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            raise ConfigurationError(
                f"apply_gradient_clipping: the gradient of {name} is sparse and cannot be clipped; build its layer "
                f"with sparse=False"
            )
        pairs.append((parameter, parameter.grad))
    return pairs


def _clip_norm(parameters: list[tuple[nn.Parameter, Tensor]], threshold: float) -> Tensor:
    with torch.no_grad():
        # The norm of norms is the norm of all. One in half precision would be infinite from 65504 on.
        total = nn.utils.get_total_norm(
            [gradient if gradient.dtype.itemsize > 2 else _norm(gradient) for _, gradient in parameters]
        )
        nn.utils.clip_grads_with_norm_([parameter for parameter, _ in parameters], threshold, total)
    return total


def _clip_units(parameter: nn.Parameter, gradient: Tensor, threshold: float) -> None:
    largest = threshold * _unit_norms(parameter).clamp(min=_SMALLEST_WEIGHT_NORM)
    norms = _unit_norms(gradient)
    factors = torch.where(norms > largest, largest / norms, 1.0)
    # The product is rounded once: a factor in bfloat16 would be off in its third digit.
    gradient.copy_(gradient * factors)


def _unit_norms(tensor: Tensor) -> Tensor:
    """One norm per unit, in a shape that broadcasts with the tensor."""
    return _norm(tensor) if tensor.ndim < 2 else _norm(tensor, dim=tuple(range(1, tensor.ndim)))


def _norm(tensor: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dim=dim, keepdim=dim is not None, dtype=dtype)
    return norm


def _check(owner: str, clipping_type: ClippingType, clipping_threshold: float) -> None:
    if clipping_type not in get_args(ClippingType):
        raise ConfigurationError(f"{owner}: clipping_type={clipping_type!r} is not one of {get_args(ClippingType)}")
    check_range(owner, "clipping_threshold", clipping_threshold, 0, open_low=True)


class GradientClipping(Algorithm[State, Event]):
    """Clip the gradients of the whole batch before the optimizer uses them; see `apply_gradient_clipping`.

    By norm (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063), by value, or adaptively (Brock et al. 2021,
    https://arxiv.org/abs/2102.06171). Runs on AFTER_TRAIN_BATCH, where the gradients of all microbatches are added up,
    and of a scaled loss are unscaled again; and last there, after whatever else changes gradients, so that the bound
    holds for what the optimizer gets. What backpropagates once more (SAM) has to run before it.

    With `"norm"` it logs `gradient_clipping/norm`, the norm before clipping, on BATCH_END: by then the loop has read
    the loss of the batch and so waited for the device, and reading the norm does not make it wait again. The other two
    know no norm of all gradients, and log nothing.

    Do not combine it with a second one, nor with a callback or an optimizer that clips too: the stricter bound of the
    two would hold. The paper leaves the last linear layer out of adaptive clipping; here it is clipped like the others.

    Args:
        clipping_type: `"norm"`, `"value"` or `"adaptive"`.
        clipping_threshold: more than 0: the largest norm, the largest element, or the largest ratio of a unit's
            gradient to its weights.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    pin: Literal["first", "last"] | None = "last"

    def __init__(self, clipping_type: ClippingType, clipping_threshold: float) -> None:
        _check("GradientClipping", clipping_type, clipping_threshold)
        self.clipping_type: ClippingType = clipping_type
        self.clipping_threshold: float = clipping_threshold
        self._norm: Tensor | None = None

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_TRAIN_BATCH, and on BATCH_END where there is a norm to log."""
        return event == Event.AFTER_TRAIN_BATCH or (event == Event.BATCH_END and self._norm is not None)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Clip, or log the norm that the gradients had before.

        Raises:
            ConfigurationError: a gradient is sparse.
        """
        if event == Event.AFTER_TRAIN_BATCH:
            self._norm = apply_gradient_clipping(state.model, self.clipping_type, self.clipping_threshold)
        elif self._norm is not None:
            logger.log_metrics({"gradient_clipping/norm": self._norm.item()})
            self._norm = None
