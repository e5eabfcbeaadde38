"""MixUp: train on convex combinations of pairs of samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from eventbus_engine.algorithm import Algorithm, AlgorithmRef
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import batch_generator, check_range, dense_targets, single_tensor
from eventbus_engine.training.data import BatchKey, describe, set_item, split
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

    AFTER_DATALOADER mixes the inputs: there the batch is still whole, so that every sample can meet every other one
    however many microbatches follow, and there the engine runs `SelectiveBackprop` first, which has to rank the samples
    as they were. The targets have to wait until the outputs tell the number of classes: BEFORE_LOSS puts mixed, dense
    targets into the microbatch, and AFTER_LOSS puts those back that it found. With `interpolate_loss=True`,
    BEFORE_BACKWARD mixes the two losses instead.

    Coefficients and pairs come from a private generator, seeded by the run's seed and the number of the batch.

    The engine has it enclose `LabelSmoothing` in either order of registration, so that the mixture as a whole is
    smoothed. An algorithm that drops or reorders samples has to run before it on AFTER_DATALOADER. Do not combine it
    with CutMix, which would mix the mixtures again, nor with another algorithm that interpolates the loss. With
    `interpolate_loss=True`, `LabelSmoothing` reaches the own half of the loss only.

    Args:
        alpha: concentration of the `Beta(alpha, alpha)` distribution of the coefficient, at least 0. Default 0.2.
        interpolate_loss: mix the losses instead of the targets, for a loss that takes class indices only. The same
            thing where the loss is linear in the targets (as cross-entropy is), wrong where it is not. Default False.
        input_key: where the inputs lie in the batch: an index, a name, or a pair `(get, set)`. Default 0.
        target_key: the same for the targets. Default 1.

    Raises:
        ConfigurationError: `alpha` is out of range.
    """

    name: str | None = "mixup"
    around: Sequence[AlgorithmRef] = ("LabelSmoothing",)
    conflicts_with: Sequence[AlgorithmRef] = ("CutMix",)

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
        self.mixing: float = 0.0
        """The partners' weight in the batch in progress."""
        self.indices: torch.Tensor = torch.arange(0)
        """The partner of each of its samples, `(N,)`, on the CPU."""
        self._partners: Iterator[torch.Tensor] | None = None
        self._found: torch.Tensor | None = None

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_DATALOADER, BEFORE_LOSS and AFTER_LOSS; or on AFTER_DATALOADER and BEFORE_BACKWARD."""
        if self.interpolate_loss:
            return event in (Event.AFTER_DATALOADER, Event.BEFORE_BACKWARD)
        return event in (Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Mix the inputs of the batch, the targets or the loss of the microbatch, or put its targets back.

        Raises:
            BatchError: inputs, targets or outputs are not single tensors, or do not fit each other; or the microbatch
                does not fit the batch whose inputs were mixed.
        """
        if event == Event.AFTER_DATALOADER:
            self._mix_inputs(state)
        elif event == Event.AFTER_LOSS:
            self._restore_targets(state)
        elif self._partners is not None:  # else the inputs were not mixed, as when it joined in the middle of a batch
            target = single_tensor(state.batch_get_item(self.target_key), "MixUp", "the target")
            partners = _next_microbatch(self._partners, target)
            if event == Event.BEFORE_LOSS:
                self._mix_targets(state, target, partners)
            else:
                self._mix_loss(state, partners)

    def _mix_inputs(self, state: State) -> None:
        self._partners = self._found = None  # a batch that failed midway has left its own
        inputs = single_tensor(state.batch_get_item(self.input_key), "MixUp", "the input")
        target = single_tensor(state.batch_get_item(self.target_key), "MixUp", "the target")
        generator = batch_generator(state, "mixup")
        self.indices = torch.randperm(inputs.shape[:1].numel(), generator=generator)
        mixed, partners, self.mixing = mixup_batch(
            inputs, target, alpha=self.alpha, indices=self.indices, generator=generator
        )
        state.batch_set_item(self.input_key, mixed)
        self._partners = _in_microbatches(partners, state)

    def _mix_targets(self, state: State, target: torch.Tensor, partners: torch.Tensor) -> None:
        outputs = single_tensor(state.outputs, "MixUp", "the model's output")
        own, other = dense_targets(outputs, target), dense_targets(outputs, partners)
        state.batch_set_item(self.target_key, (1 - self.mixing) * own + self.mixing * other)
        self._found = target

    def _restore_targets(self, state: State) -> None:
        if self._found is not None:
            state.batch_set_item(self.target_key, self._found)
            self._found = None

    def _mix_loss(self, state: State, partners: torch.Tensor) -> None:
        own = single_tensor(state.loss, "MixUp", "the loss")
        batch = set_item(state.batch, self.target_key, partners)
        with torch.enable_grad(), state.precision_context():
            other = compute_loss(state.model, state.outputs, batch, state.loss_fn)
            state.loss = (1 - self.mixing) * own + self.mixing * other


def _in_microbatches(targets: torch.Tensor, state: State) -> Iterator[torch.Tensor]:
    """The targets of one microbatch after another, cut as the loop cuts the batch, and not before it does."""
    yield from split(targets, state.microbatches)


def _next_microbatch(partners: Iterator[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    part = next(partners, None)
    if part is None or part.shape != target.shape:
        raise BatchError(
            f"the microbatch's target is {describe(target)}, but of the batch that MixUp has mixed "
            f"{'nothing' if part is None else describe(part)} is left for it; let what drops samples run before MixUp "
            f"on AFTER_DATALOADER, and what makes targets dense after MixUp on BEFORE_LOSS"
        )
    return part


def _draw_mixing(alpha: float, generator: torch.Generator | None) -> float:
    """`min(z, 1 - z)` for `z ~ Beta(alpha, alpha)`, in `[0, 0.5]`."""
    check_range("MixUp", "alpha", alpha, 0)
    if alpha == 0:
        return 0.0
    # torch's Beta distribution takes no generator; the standard library's sampler does, in the form of its seed.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    z = random.Random(seed).betavariate(alpha, alpha)
    return min(z, 1.0 - z)
