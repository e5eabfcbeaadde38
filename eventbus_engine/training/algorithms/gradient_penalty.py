"""Gradient penalty: prefer minima where the loss is flat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eventbus_engine.algorithm import Algorithm, AlgorithmRef
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_range, gradient_norm, trained_parameters
from eventbus_engine.training.state import State

__all__ = ["GradientPenalty", "gradient_penalty"]


def gradient_penalty(parameters: Sequence[Tensor], gradients: Sequence[Tensor], weight: float = 0.01) -> list[Tensor]:
    """The gradients, with respect to `parameters`, of the penalty `weight * |gradients|`.

    Zhao et al. 2022, "Penalizing Gradient Norm for Efficiently Improving Generalization in Deep Learning"
    (https://arxiv.org/abs/2202.03599), equation 2, differentiated exactly, where the paper takes a finite difference:
    `weight * H g / |g|` for the gradient `g` and the Hessian `H` of the loss. The norm is that of all gradients
    together, taken in float32 at least; where it is 0, so is the result. The graph of the gradients is used up.

    Args:
        parameters: the weights.
        gradients: the gradients of the loss, with a graph, as `torch.autograd.grad(..., create_graph=True)` or
            `loss.backward(create_graph=True)` makes them.
        weight: the weight of the penalty beside the loss, 0 or more. Default 0.01.

    Returns:
        For each parameter a tensor of its shape and type, without a graph.

    Raises:
        ConfigurationError: `weight` is out of range, or no gradient has a graph.
    """
    check_range("gradient_penalty", "weight", weight, 0)
    with torch.enable_grad():
        norm = gradient_norm(gradients) if gradients else torch.zeros(())
    if not norm.requires_grad:
        raise ConfigurationError(
            "gradient_penalty: no gradient depends on the parameters; they need a graph, from backward(create_graph="
            "True), and a loss that is more than linear in the parameters"
        )
    # The weight comes last: in half precision, cotangents scaled down by it could vanish on their way.
    found = torch.autograd.grad(norm, parameters, allow_unused=True, materialize_grads=True)
    return [weight * gradient for gradient in found]


class GradientPenalty(Algorithm[State, Event]):
    """Add the norm of the loss's gradient to the loss (Zhao et al. 2022, https://arxiv.org/abs/2202.03599).

    AFTER_BACKWARD adds the gradient of the penalty to that of the loss, by a second differentiation, see
    `gradient_penalty`; for it, the loop has backward build a graph of the gradients. The norm is each microbatch's own,
    weighted by its part of the batch: with `microbatches=1` the whole batch's, with more the mean of theirs, which is
    larger. `state.loss` stays the loss without the penalty. With `precision="amp_fp16"` loss and penalty are scaled
    alike.

    It costs two to three more backward passes, and the memory of the graph of one. Every operation of the model has to
    be twice differentiable; fused attention and cuDNN's recurrent layers are not.

    Do not combine it with `SAM`, which is after the same flatness, nor with an algorithm that differentiates the
    gradients after it: their graph is used up.

    Args:
        weight: the weight of the penalty beside the loss, 0 or more; 0 turns it off. Default 0.01.

    Raises:
        ConfigurationError: `weight` is out of range.
    """

    backwards_create_graph: bool = True
    conflicts_with: Sequence[AlgorithmRef] = ("SAM",)

    def __init__(self, weight: float = 0.01) -> None:
        check_range("GradientPenalty", "weight", weight, 0)
        self.weight: float = weight
        self.backwards_create_graph = weight > 0
        self._earlier: dict[Tensor, Tensor] = {}

    def match(self, event: Event, state: State) -> bool:
        """Run on BEFORE_BACKWARD and AFTER_BACKWARD."""
        return event in (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD) and self.weight > 0

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Put aside the gradients of earlier microbatches, or add the penalty's to this one's and to those.

        `.grad` is a sum over microbatches, but the penalty is the norm of this one's part. Taking the difference would
        lose digits, and in half precision nearly all of a late microbatch; so backward begins with no gradients.

        Raises:
            ConfigurationError: the gradients have no graph.
        """
        parameters = trained_parameters(state)
        if event == Event.BEFORE_BACKWARD:
            self._earlier = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
            for parameter in self._earlier:
                parameter.grad = None
            return
        earlier, self._earlier = self._earlier, {}
        own = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        # A norm of scaled gradients is the scaled norm, so under a loss scale the penalty is scaled like the loss.
        penalties = gradient_penalty(list(own), list(own.values()), self.weight)
        with torch.no_grad():
            for (parameter, gradient), penalty in zip(own.items(), penalties, strict=True):
                # Without its graph, which refers to the parameter and would make a circle of the two.
                parameter.grad = penalty.add_(gradient.detach())
            for parameter, gradient in earlier.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
