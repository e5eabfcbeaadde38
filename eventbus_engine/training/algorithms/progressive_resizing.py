"""Progressive resizing: begin the training with small images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm, AlgorithmRef
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import batch_generator, check_range, elapsed_fraction, single_tensor
from eventbus_engine.training.data import BatchKey
from eventbus_engine.training.state import State

__all__ = ["ProgressiveResizing", "ResizingMode", "resize_batch"]

ResizingMode: TypeAlias = Literal["resize", "crop"]
"""`resize`: shrink the images. `crop`: cut a part out of them."""


def resize_batch(
    input: torch.Tensor,
    target: torch.Tensor,
    scale_factor: float,
    mode: ResizingMode = "resize",
    resize_targets: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the images of a batch smaller.

    Args:
        input: `(N, C, H, W)`; floating-point, or uint8.
        target: anything; maps `(N, ..., H, W)` with `resize_targets`.
        scale_factor: factor in `(0, 1]` for both sides, which are rounded to whole pixels, one at least.
        mode: `"resize"` interpolates bilinearly; `"crop"` cuts out a part of that size, in one place for the whole
            batch, drawn uniformly. Default `"resize"`.
        resize_targets: treat the targets, as maps of pixels, like the inputs. Resized maps take the value of the
            nearest pixel, so that no label appears which was not there. Default False.
        generator: a CPU generator to draw the place of a crop from. Default: torch's global one.

    Returns:
        The smaller inputs, and the targets.

    Raises:
        ConfigurationError: `scale_factor` or `mode` does not fit.
        BatchError: the inputs are no images, or the targets no maps of their size.
    """
    check_range("resize_batch", "scale_factor", scale_factor, 0, 1, open_low=True)
    _check_mode("resize_batch", mode)
    _check_images(input, target if resize_targets else None)
    height, width = (max(1, round(scale_factor * side)) for side in input.shape[-2:])
    return _resize(input, target, (height, width), mode, resize_targets, generator)


def _resize(
    input: Tensor,
    target: Tensor,
    size: tuple[int, int],
    mode: ResizingMode,
    resize_targets: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    if size == tuple(input.shape[-2:]):
        return input, target
    if mode == "resize":
        resized = functional.interpolate(input, size, mode="bilinear", align_corners=False)
        return resized, _nearest(target, size) if resize_targets else target
    top, left = (
        int(torch.randint(side - part + 1, (), generator=generator))
        for side, part in zip(input.shape[-2:], size, strict=True)
    )
    rows, columns = slice(top, top + size[0]), slice(left, left + size[1])
    return input[..., rows, columns], target[..., rows, columns] if resize_targets else target


def _nearest(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """The values nearest to the centres of the new pixels; torch's own interpolation takes no integers."""
    for dim, part in zip((-2, -1), size, strict=True):
        # Whole numbers, so that no centre which lies on an edge is rounded to the other side of it.
        centres = (2 * torch.arange(part, device=maps.device) + 1) * maps.shape[dim] // (2 * part)
        maps = maps.index_select(dim, centres)
    return maps


def _check_mode(owner: str, mode: ResizingMode) -> None:
    if mode not in get_args(ResizingMode):
        raise ConfigurationError(f"{owner}: mode={mode!r} is not one of {get_args(ResizingMode)}")


def _check_images(input: Tensor, maps: Tensor | None) -> None:
    if input.ndim != 4 or not (input.is_floating_point() or input.dtype == torch.uint8):
        raise BatchError(
            f"resize_batch needs images (N, C, H, W), floating-point or uint8, got {tuple(input.shape)} {input.dtype}"
        )
    if maps is not None and (maps.ndim < 3 or maps.shape[-2:] != input.shape[-2:]):
        raise BatchError(
            f"resize_batch: targets of shape {tuple(maps.shape)} are no maps of images {tuple(input.shape)}; give "
            f"(N, ..., H, W), or leave resize_targets out"
        )


class ProgressiveResizing(Algorithm[State, Event]):
    """Train on small images first, and on larger ones as the training goes on, which saves most of their cost.

    In the manner of fast.ai's entry to DAWNBench (Howard et al. 2018) and of EfficientNetV2 (Tan & Le 2021,
    https://arxiv.org/abs/2104.00298). Runs on AFTER_DATALOADER, on inputs `(N, C, H, W)`. The scale is `initial_scale`
    until `delay_fraction` of training is over, grows linearly from there, and is 1 for the last `finetune_fraction`.
    Both sides are rounded to a multiple of `size_increment`, and no side gets longer than it was. Evaluation sees whole
    images. Logs `progressive_resizing/scale_factor`, `/height` and `/width`.

    Where to crop is drawn from a private generator, seeded by the run's seed and the number of the batch.

    The model has to take images of any size: one that flattens its last feature map does not. The engine resizes before
    `CutMix` and `MixUp`, whose boxes have to stay whole, and after `SelectiveBackprop`. Do not combine it with another
    algorithm that changes the size of the inputs.

    Args:
        mode: `"resize"` or `"crop"`; see `resize_batch`. Default `"resize"`.
        initial_scale: the scale to begin with, in `(0, 1]`. Default 0.5.
        finetune_fraction: the fraction of training at its end that sees whole images, in `[0, 1]`. Default 0.2.
        delay_fraction: the fraction of training at its beginning that stays at `initial_scale`, in `[0, 1]`; with
            `finetune_fraction` no more than 1. Default 0.5.
        size_increment: of what, in pixels, the sides are a multiple. Default 4.
        resize_targets: treat the targets, as maps of pixels, like the inputs. Default False.
        input_key: where the inputs lie in the batch: an index, a name, or a pair `(get, set)`. Default 0.
        target_key: the same for the targets; read with `resize_targets` only. Default 1.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    run_before: Sequence[AlgorithmRef] = ("CutMix", "MixUp")

    def __init__(
        self,
        mode: ResizingMode = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        _check_mode("ProgressiveResizing", mode)
        check_range("ProgressiveResizing", "initial_scale", initial_scale, 0, 1, open_low=True)
        check_range("ProgressiveResizing", "finetune_fraction", finetune_fraction, 0, 1)
        check_range("ProgressiveResizing", "delay_fraction", delay_fraction, 0, 1)
        if delay_fraction + finetune_fraction > 1:
            raise ConfigurationError(
                f"ProgressiveResizing: delay_fraction={delay_fraction!r} and finetune_fraction={finetune_fraction!r} "
                f"are together more than the whole training; let their sum be 1 at most"
            )
        if not isinstance(size_increment, int) or size_increment < 1:
            raise ConfigurationError(
                f"ProgressiveResizing: size_increment={size_increment!r} has to be a whole number of pixels, 1 or more"
            )
        self.mode: ResizingMode = mode
        self.initial_scale: float = initial_scale
        self.finetune_fraction: float = finetune_fraction
        self.delay_fraction: float = delay_fraction
        self.size_increment: int = size_increment
        self.resize_targets: bool = resize_targets
        self.input_key: BatchKey = input_key
        self.target_key: BatchKey = target_key

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_DATALOADER."""
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Resize the batch to what is due by now.

        Raises:
            ConfigurationError: the run has no `max_duration`.
            BatchError: the inputs are no images, or the targets no maps of their size.
        """
        inputs = single_tensor(state.batch_get_item(self.input_key), "ProgressiveResizing", "the input")
        maps = inputs
        if self.resize_targets:
            maps = single_tensor(state.batch_get_item(self.target_key), "ProgressiveResizing", "the target")
        _check_images(inputs, maps if self.resize_targets else None)
        scale = self._scale(elapsed_fraction(state, "ProgressiveResizing"))
        height, width = (self._side(side, scale) for side in inputs.shape[-2:])
        generator = batch_generator(state, "progressive_resizing")
        inputs, maps = _resize(inputs, maps, (height, width), self.mode, self.resize_targets, generator)
        state.batch_set_item(self.input_key, inputs)
        if self.resize_targets:
            state.batch_set_item(self.target_key, maps)
        logger.log_metrics(
            {
                "progressive_resizing/scale_factor": scale,
                "progressive_resizing/height": height,
                "progressive_resizing/width": width,
            }
        )

    def _scale(self, elapsed: float) -> float:
        if elapsed >= 1 - self.finetune_fraction:
            return 1.0
        if elapsed <= self.delay_fraction:
            return self.initial_scale
        progress = (elapsed - self.delay_fraction) / (1 - self.finetune_fraction - self.delay_fraction)
        return self.initial_scale + (1 - self.initial_scale) * progress

    def _side(self, side: int, scale: float) -> int:
        steps = max(1, round(scale * side / self.size_increment))
        return side if scale == 1 else min(side, steps * self.size_increment)
