"""MixUp: train on convex combinations of pairs of samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eventbus_engine.algorithm import AlgorithmRef
from eventbus_engine.training.algorithms._common import check_range
from eventbus_engine.training.algorithms._mixing import BatchMixing, check_pairs, choose_partners, draw_beta
from eventbus_engine.training.data import BatchKey

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
    check_pairs("mixup_batch", input, target)
    if mixing is None:
        z = draw_beta("mixup_batch", alpha, generator)
        mixing = min(z, 1.0 - z)
    check_range("mixup_batch", "mixing", mixing, 0, 1)
    indices = choose_partners("mixup_batch", len(input), indices, generator)
    partner = input[indices.to(input.device)]
    return (1 - mixing) * input + mixing * partner, target[indices.to(target.device)], mixing


class MixUp(BatchMixing):
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
    conflicts_with: Sequence[AlgorithmRef] = ("CutMix",)

    def __init__(
        self,
        alpha: float = 0.2,
        interpolate_loss: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        check_range("MixUp", "alpha", alpha, 0)
        super().__init__(interpolate_loss, input_key, target_key)
        self.alpha: float = alpha

    def _mix(
        self, inputs: torch.Tensor, target: torch.Tensor, indices: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        return mixup_batch(inputs, target, alpha=self.alpha, indices=indices, generator=generator)
