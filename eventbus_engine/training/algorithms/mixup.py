"""MixUp: train on convex combinations of pairs of samples."""

from __future__ import annotations

import random

import torch

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import BatchStream, check_range, dense_targets, single_tensor
from eventbus_engine.training.data import BatchKey, set_item
from eventbus_engine.training.model import compute_loss
from eventbus_engine.training.state import State

__all__ = ["MixUp", "mixup_batch"]


def mixup_batch(
    input: torch.Tensor,
    target: torch.Tensor,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mix every sample with a partner from the same batch: `(1 - mixing) * input + mixing * input[indices]`.

    Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization" (https://arxiv.org/abs/1710.09412). The targets are
    not mixed here, since class indices cannot be; mix them, or the two losses, with the coefficient that is returned.

    Args:
        input: `(N, ...)`, one sample per row.
        target: `(N, ...)`.
        mixing: the partner's weight in `[0, 1]`, one for the whole batch. Default: drawn, `min(z, 1 - z)` for
            `z ~ Beta(alpha, alpha)`. Pairing being symmetric, folding loses nothing, and keeps each sample's own label
            the heavier one, so that the training accuracy still means something.
        alpha: concentration of that Beta distribution, at least 0: the larger, the more even the mixture; 0 mixes
            nothing. Ignored where `mixing` is given. Default 0.2.
        indices: `(N,)`, the partner of each sample. Default: a permutation, drawn.
        generator: a CPU generator to draw from. Default: torch's global one.

    Returns:
        The mixed inputs, in the shape of `input`; the partners' targets, in the shape of `target`; the weight used.

    Raises:
        ConfigurationError: `mixing`, `alpha` or `indices` does not fit.
        BatchError: `input` and `target` hold different numbers of samples.
    """
    if input.ndim == 0 or target.ndim == 0 or len(input) != len(target):
        raise BatchError(
            f"mixup_batch needs as many targets as inputs, got {tuple(target.shape)} and {tuple(input.shape)}"
        )
    if mixing is None:
        mixing = _draw_mixing(alpha, generator)
    check_range("mixup_batch", "mixing", mixing, 0, 1)
    if indices is None:
        indices = torch.randperm(len(input), generator=generator)
    if tuple(indices.shape) != (len(input),):
        raise ConfigurationError(
            f"mixup_batch: indices has to have the shape ({len(input)},), not {tuple(indices.shape)}"
        )
    partner = input[indices.to(input.device)]
    return (1 - mixing) * input + mixing * partner, target[indices.to(target.device)], mixing


class MixUp(Algorithm[State, Event]):
    """Train on mixtures of pairs of samples and of their targets (Zhang et al. 2018, https://arxiv.org/abs/1710.09412).

    Works on one microbatch at a time, since the targets become dense only once the outputs tell the number of classes:
    BEFORE_FORWARD mixes the inputs. BEFORE_LOSS puts the mixed dense targets into the batch and AFTER_LOSS puts the
    targets back that it found. With `interpolate_loss=True`, BEFORE_BACKWARD mixes the two losses instead.

    Coefficients and pairs come from a private generator, seeded by the run's seed and the number of the batch.

    Do not combine it with CutMix, which would mix the mixtures again, nor with another algorithm that interpolates the
    loss. With `interpolate_loss=True`, `LabelSmoothing` reaches the own half of the loss only.

    Args:
        alpha: concentration of the `Beta(alpha, alpha)` distribution of the coefficient, at least 0. Default 0.2.
        interpolate_loss: mix the losses instead of the targets, for a loss that takes class indices only. The same
            thing where the loss is linear in the targets (as cross-entropy is), wrong where it is not. Default False.
        input_key: where the inputs lie in the batch: an index, a name, or a pair `(get, set)`. Default 0.
        target_key: the same for the targets. Default 1.

    Raises:
        ConfigurationError: `alpha` is out of range.
    """

    name = "mixup"
    conflicts_with = ("CutMix",)

    def __init__(
        self,
        alpha: float = 0.2,
        interpolate_loss: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        check_range("MixUp", "alpha", alpha, 0)
        self.alpha = alpha
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self.mixing = 0.0
        """The partners' weight in the microbatch in progress."""
        self.indices = torch.arange(0)
        """The partner of each of its samples, `(N,)`."""
        self._found: torch.Tensor | None = None
        self._stream = BatchStream("mixup")

    def match(self, event: Event, state: State) -> bool:
        """Run on BEFORE_FORWARD, BEFORE_LOSS and AFTER_LOSS; or on BEFORE_FORWARD and BEFORE_BACKWARD."""
        if self.interpolate_loss:
            return event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
        return event in (Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Mix the inputs, the targets or the loss of the microbatch, or put its targets back.

        Raises:
            BatchError: inputs, targets or outputs are not single tensors, or do not fit each other.
        """
        target = single_tensor(state.batch_get_item(self.target_key), "MixUp", "the target")
        if event == Event.BEFORE_FORWARD:
            self._mix_inputs(state, target)
        elif event == Event.BEFORE_LOSS:
            self._mix_targets(state, target)
        elif event == Event.BEFORE_BACKWARD:
            self._mix_loss(state, target)
        elif self._found is not None:
            state.batch_set_item(self.target_key, self._found)
            self._found = None

    def _mix_inputs(self, state: State, target: torch.Tensor) -> None:
        inputs = single_tensor(state.batch_get_item(self.input_key), "MixUp", "the input")
        generator = self._stream.of(state)
        self.mixing = _draw_mixing(self.alpha, generator)
        self.indices = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        mixed, _, _ = mixup_batch(inputs, target, mixing=self.mixing, indices=self.indices)
        state.batch_set_item(self.input_key, mixed)

    def _mix_targets(self, state: State, target: torch.Tensor) -> None:
        outputs = single_tensor(state.outputs, "MixUp", "the model's output")
        own = dense_targets(outputs, target)
        # The partners are taken from the targets as they are now, so labels that were smoothed first stay smoothed.
        state.batch_set_item(self.target_key, (1 - self.mixing) * own + self.mixing * own[self.indices])
        self._found = target

    def _mix_loss(self, state: State, target: torch.Tensor) -> None:
        own = single_tensor(state.loss, "MixUp", "the loss")
        batch = set_item(state.batch, self.target_key, target[self.indices])
        with torch.enable_grad(), state.precision_context():
            partners = compute_loss(state.model, state.outputs, batch, state.loss_fn)
            state.loss = (1 - self.mixing) * own + self.mixing * partners


def _draw_mixing(alpha: float, generator: torch.Generator | None) -> float:
    """`min(z, 1 - z)` for `z ~ Beta(alpha, alpha)`, in `[0, 0.5]`."""
    check_range("MixUp", "alpha", alpha, 0)
    if alpha == 0:
        return 0.0
    # torch's Beta distribution takes no generator; the standard library's sampler does, in the form of its seed.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    z = random.Random(seed).betavariate(alpha, alpha)
    return min(z, 1.0 - z)
