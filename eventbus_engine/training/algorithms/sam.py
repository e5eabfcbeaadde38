"""Sharpness-aware minimization: step by the gradient of the worst place nearby."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from eventbus_engine.algorithm import Algorithm, AlgorithmRef
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_range, gradient_norm, trained_parameters
from eventbus_engine.training.state import State

__all__ = ["SAM", "Kept", "perturb", "restore"]

Kept: TypeAlias = list[tuple[Tensor, Tensor]]
"""Tensors that change in place, each with the value to put back."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What torch's normalizations count, and those that are modelled on them."""


def perturb(parameters: Iterable[Tensor], rho: float = 0.05, epsilon: float = 1.0e-12) -> Kept:
    """Climb in place from the weights `w` to `w + rho * g / (|g| + epsilon)`, where `g` is in their `.grad`.

    Foret et al. 2020, "Sharpness-Aware Minimization for Efficiently Improving Generalization"
    (https://arxiv.org/abs/2010.01412), equation 2 with `p = 2`. The norm is that of all gradients together, taken in
    float32 at least. Parameters without a gradient stay where they are.

    Args:
        parameters: the weights.
        rho: the length of the way, 0 or more, in units of the weights. Default 0.05.
        epsilon: keeps a gradient of zero from dividing by zero; more than 0. Default 1e-12.

    Returns:
        What `restore` needs to go back: the weights that have moved, with copies of what they were.

    Raises:
        ConfigurationError: `rho` or `epsilon` is out of range.
    """
    _check("perturb", rho, epsilon)
    with torch.no_grad():
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        kept = [(parameter, parameter.detach().clone()) for parameter, _ in gradients]
        if not kept:
            return kept
        scale = rho / (gradient_norm(gradient for _, gradient in gradients) + epsilon)
        try:
            for parameter, gradient in gradients:
                # In the wide type of the norm: for a small gradient the scale is infinite in half precision.
                parameter.copy_(parameter + gradient.to(scale.dtype) * scale.to(gradient.device))
        except BaseException:  # out of memory, most likely
            restore(kept)
            raise
    return kept


def restore(kept: Kept) -> None:
    """Put every value back where it was, bit for bit."""
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


class SAM(Algorithm[State, Event]):
    """Minimize the loss and its sharpness at once (Foret et al. 2020, https://arxiv.org/abs/2010.01412).

    On AFTER_TRAIN_BATCH, every `interval`-th batch, it climbs by `rho` along the gradient of the whole batch, has the
    batch backpropagated once more from there, microbatch by microbatch and with all their events, and goes back,
    exactly. What the optimizers then step by is the gradient of the second pass. `state.loss` and `state.outputs` stay
    the first one's, and the statistics of batch normalizations count the first one only. Should the second pass fail or
    be cancelled, the weights are put back.

    It costs a second forward and backward pass for these batches, and a copy of the weights meanwhile. The second pass
    draws dropout masks of its own. `GradientClipping` comes after it, and clips what the optimizers step by.

    Do not combine it with `GradientPenalty`, which is after the same flatness and would be paid for twice. It does not
    run with `precision="amp_fp16"`, whose gradients a second backward pass cannot scale by the same number.

    Args:
        rho: how far to climb, 0 or more, in units of the weights; 0 turns the algorithm off. Default 0.05.
        epsilon: added to the norm of the gradient; more than 0. Default 1e-12.
        interval: on every how many batches to do so; the others train as usual. Default 1.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    run_before: Sequence[AlgorithmRef] = ("GradientClipping",)
    conflicts_with: Sequence[AlgorithmRef] = ("GradientPenalty",)

    def __init__(self, rho: float = 0.05, epsilon: float = 1.0e-12, interval: int = 1) -> None:
        _check("SAM", rho, epsilon)
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ConfigurationError(f"SAM: interval={interval!r} has to be a whole number of batches, 1 or more")
        self.rho: float = rho
        self.epsilon: float = epsilon
        self.interval: int = interval

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_TRAIN_BATCH, on every `interval`-th batch."""
        return (
            event == Event.AFTER_TRAIN_BATCH
            and self.rho > 0
            and (int(state.timestamp.batch) + 1) % self.interval == 0  # the batch in progress does not count as done
        )

    async def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the gradients of the batch by those from nearby.

        Raises:
            ConfigurationError: the run's precision is `amp_fp16`.
        """
        loss, outputs = state.loss, state.outputs
        kept: Kept = []
        try:
            await state.compute(self._climb, state, kept)
            await state.backpropagate()
            await state.compute(restore, kept)
        except BaseException:
            # Not on the worker: it may refuse somebody who is cancelled. It is idle, as it ends what it has begun.
            restore(kept)
            raise
        finally:
            state.loss, state.outputs = loss, outputs

    def _climb(self, state: State, kept: Kept) -> None:
        """Fills a list instead of returning one: who is cancelled meanwhile gets nothing returned."""
        buffers = state.model.named_buffers()
        kept += [(buffer, buffer.clone()) for name, buffer in buffers if name.rpartition(".")[2] in _STATISTICS]
        kept += perturb(trained_parameters(state), self.rho, self.epsilon)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)


def _check(owner: str, rho: Any, epsilon: Any) -> None:
    check_range(owner, "rho", rho, 0)
    check_range(owner, "epsilon", epsilon, 0, open_low=True)
