"""CutMix: train on images with a box of another image pasted in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from eventbus_engine.algorithm import AlgorithmRef
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.training.algorithms._common import check_range
from eventbus_engine.training.algorithms._mixing import BatchMixing, check_pairs, choose_partners, draw_beta
from eventbus_engine.training.data import BatchKey

__all__ = ["BoundingBox", "CutMix", "cutmix_batch"]

BoundingBox: TypeAlias = tuple[int, int, int, int]
"""`(top, left, bottom, right)` in pixels: rows `top..bottom-1` and columns `left..right-1`."""


def cutmix_batch(
    input: torch.Tensor,
    target: torch.Tensor,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: BoundingBox | None = None,
    indices: torch.Tensor | None = None,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float, BoundingBox]:
    """Replace a box of every image by the same box of a partner from the same batch.

    Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features"
    (https://arxiv.org/abs/1905.04899). One box for the whole batch: its sides are `sqrt(1 - lambda)` of the image's for
    `lambda ~ Beta(alpha, alpha)`, its centre is drawn uniformly, and what sticks out of the image is cut off. The
    targets are not mixed here, since class indices cannot be; mix them, or the two losses, with the area that is
    returned, which is that of the box as it was pasted.

    Args:
        input: `(N, ..., H, W)`, images with any dimensions between the sample and the rows.
        target: `(N, ...)`.
        length: the sides of the box as a fraction in `[0, 1]` of the image's. Default: drawn, as above.
        alpha: concentration of that Beta distribution, at least 0; 1 makes it uniform, 0 pastes nothing. Ignored where
            `length` or `bbox` is given. Default 1.0.
        bbox: the box itself, `(top, left, bottom, right)` within the image. Default: drawn.
        indices: `(N,)`, the partner of each image. Default: a permutation, drawn.
        uniform_sampling: place the box so that every pixel is equally likely to be in it. Without, as in the paper,
            pixels at the edge are in it less often than those in the middle. Default False.
        generator: a CPU generator to draw from. Default: torch's global one.

    Returns:
        The mixed images, in the shape of `input`; the partners' targets, in the shape of `target`; the area that is
        left of the own image, as a fraction in `[0, 1]`; the box.

    Raises:
        ConfigurationError: `length`, `alpha`, `bbox` or `indices` does not fit.
        BatchError: the inputs are no images, or there are not as many targets as inputs.
    """
    check_pairs("cutmix_batch", input, target)
    if input.ndim < 3 or not input.shape[-2:].numel():
        raise BatchError(f"cutmix_batch needs images of shape (N, ..., H, W), got {tuple(input.shape)}")
    height, width = input.shape[-2:]
    if bbox is None:
        if length is None:
            length = math.sqrt(draw_beta("cutmix_batch", alpha, generator))  # 1 - lambda has lambda's distribution
        check_range("cutmix_batch", "length", length, 0, 1)
        (top, bottom), (left, right) = (_place(length, size, uniform_sampling, generator) for size in (height, width))
        bbox = top, left, bottom, right
    _check_box(bbox, height, width)
    top, left, bottom, right = bbox
    indices = choose_partners("cutmix_batch", len(input), indices, generator)
    mixed = input.clone()
    mixed[..., top:bottom, left:right] = input[..., top:bottom, left:right][indices.to(input.device)]
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, target[indices.to(target.device)], kept, bbox


def _place(length: float, size: int, uniform: bool, generator: torch.Generator | None) -> tuple[int, int]:
    """Where the box begins and ends along one side of the image, cut off at its edges."""
    extent = round(length * size)
    # Uniform over all places that touch the image, every pixel is in `extent` of them, the outermost included.
    low, places = (1 - extent, size + extent - 1) if uniform and extent else (-(extent // 2), size)
    start = low + int(torch.randint(places, (), generator=generator))
    return max(start, 0), min(start + extent, size)


def _check_box(bbox: BoundingBox, height: int, width: int) -> None:
    whole = isinstance(bbox, Sequence) and len(bbox) == 4 and all(isinstance(edge, int) for edge in bbox)
    if not (whole and 0 <= bbox[0] <= bbox[2] <= height and 0 <= bbox[1] <= bbox[3] <= width):
        raise ConfigurationError(
            f"cutmix_batch: bbox={bbox!r} has to be (top, left, bottom, right), whole numbers within an image of "
            f"{height} x {width}"
        )


class CutMix(BatchMixing):
    """Train on images with a box of another image in them (Yun et al. 2019, https://arxiv.org/abs/1905.04899).

    AFTER_DATALOADER pastes the boxes into inputs `(N, ..., H, W)`: there the batch is still whole, so that every image
    can meet every other one however many microbatches follow, and there the engine runs `SelectiveBackprop` first,
    which has to rank the images as they were. The targets, class indices `(N,)` or dense `(N, C)`, are mixed by the
    area of the box once the outputs tell the number of classes: BEFORE_LOSS puts mixed, dense targets into the
    microbatch, and AFTER_LOSS puts those back that it found. With `interpolate_loss=True`, BEFORE_BACKWARD mixes the
    two losses instead.

    Boxes and pairs come from a private generator, seeded by the run's seed and the number of the batch.

    The engine has it enclose `LabelSmoothing` in either order of registration, so that the mixture as a whole is
    smoothed. An algorithm that drops or reorders samples, or crops images, has to run before it on AFTER_DATALOADER. Do
    not combine it with MixUp, which would mix the mixtures again (the engine warns), nor with another algorithm that
    interpolates the loss. With `interpolate_loss=True`, `LabelSmoothing` reaches the own part of the loss only.

    Args:
        alpha: concentration of the `Beta(alpha, alpha)` distribution of the area, at least 0; 1 makes it uniform.
            Default 1.0.
        uniform_sampling: place the box so that every pixel is equally likely to be in it. Default False.
        interpolate_loss: mix the losses instead of the targets, for a loss that takes class indices only. The same
            thing where the loss is linear in the targets (as cross-entropy is), wrong where it is not. Default False.
        input_key: where the inputs lie in the batch: an index, a name, or a pair `(get, set)`. Default 0.
        target_key: the same for the targets. Default 1.

    Raises:
        ConfigurationError: `alpha` is out of range.
    """

    name: str | None = "cutmix"
    conflicts_with: Sequence[AlgorithmRef] = ("MixUp",)

    def __init__(
        self,
        alpha: float = 1.0,
        uniform_sampling: bool = False,
        interpolate_loss: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        check_range("CutMix", "alpha", alpha, 0)
        super().__init__(interpolate_loss, input_key, target_key)
        self.alpha: float = alpha
        self.uniform_sampling: bool = uniform_sampling
        self.bbox: BoundingBox = (0, 0, 0, 0)
        """The box of the batch in progress, `(top, left, bottom, right)`."""

    def _mix(
        self, inputs: torch.Tensor, target: torch.Tensor, indices: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        mixed, partners, kept, self.bbox = cutmix_batch(
            inputs,
            target,
            alpha=self.alpha,
            indices=indices,
            uniform_sampling=self.uniform_sampling,
            generator=generator,
        )
        return mixed, partners, 1 - kept
