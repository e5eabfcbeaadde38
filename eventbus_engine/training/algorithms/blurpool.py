"""BlurPool: low-pass filter a feature map before it is subsampled, so that small shifts of the input stay small."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_flag
from eventbus_engine.training.state import State
from eventbus_engine.training.surgery import replace_or_warn

__all__ = ["BlurConv2d", "BlurMaxPool2d", "BlurPool", "apply_blurpool", "blur_2d"]

_TAPS = (0.25, 0.5, 0.25)


def blur_2d(input: Tensor, stride: int | tuple[int, int] = 1, filter: Tensor | None = None) -> Tensor:
    """Low-pass filter every channel of a feature map, and subsample it.

    The border is continued by its own pixels, so that a constant stays that constant up to the edge.

    Args:
        input: `(N, C, H, W)` or `(C, H, W)`.
        stride: take every so many-th row and column of the result. Default 1.
        filter: `(h, w)`, both odd; its entries should add up to 1. Default: the triangle filter of the paper,
            `[1, 2, 1] / 4` in both directions.

    Returns:
        `(N, C, ceil(H / stride), ceil(W / stride))`, of the type and on the device of `input`.

    Raises:
        BatchError: `input` has other dimensions.
        ConfigurationError: `filter` or `stride` does not fit.
    """
    if input.ndim not in (3, 4):
        raise BatchError(f"blur_2d needs an input of shape (N, C, H, W) or (C, H, W), got {tuple(input.shape)}")
    kernel = _low_pass((2, 2)) if filter is None else filter
    if kernel.ndim != 2 or not all(size % 2 for size in kernel.shape):
        raise ConfigurationError(f"blur_2d: filter has to have the shape (h, w), both odd, got {tuple(kernel.shape)}")
    if min(_pair(stride)) < 1:
        raise ConfigurationError(f"blur_2d: stride={stride!r} has to be 1 or more")
    rows, columns = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = functional.pad(input, (columns, columns, rows, rows), mode="replicate")
    channels = input.shape[-3]
    # 1/16, 2/16 and 4/16 are exact in every floating-point type, so the cast loses nothing.
    weight = kernel.to(input).expand(channels, 1, -1, -1)
    return functional.conv2d(padded, weight, stride=stride, groups=channels)


class BlurConv2d(nn.Module):
    """A strided convolution that does not alias: it is blurred along the directions that it is strided in.

    Attributes:
        conv: the convolution: the one given with `blur_first`, otherwise one of stride 1 with the same parameters.
        stride: of the whole, as of the convolution given.
        blur_first: see below.

    Args:
        conv: a strided convolution; its parameters are used, not copied.
        blur_first: blur the input, then convolve with the stride, which costs little; False convolves with stride 1,
            then blurs and subsamples, as in the paper, at the cost of as many more convolutions as the stride says.
            Default True.

    Shape:
        As of `conv`.
    """

    filter: Tensor

    def __init__(self, conv: nn.Conv2d, blur_first: bool = True) -> None:
        super().__init__()
        self.stride: tuple[int, int] = (conv.stride[0], conv.stride[-1])
        self.blur_first: bool = blur_first
        if not blur_first:
            conv = copy.copy(conv)
            conv.stride = (1, 1)
        self.conv: nn.Conv2d = conv
        self.register_buffer("filter", _low_pass(self.stride), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Blur and convolve, `(N, C, H, W)` to the shape that the convolution alone would give."""
        if self.blur_first:
            return self.conv(blur_2d(input, 1, self.filter))  # type: ignore[no-any-return]
        return blur_2d(self.conv(input), self.stride, self.filter)


class BlurMaxPool2d(nn.Module):
    """Max pooling that does not alias: the dense maximum, blurred along the directions it is strided in, subsampled.

    Attributes:
        kernel_size, stride, padding, dilation: as of the pooling given, for rows and columns.
        ceil_mode: as of the pooling given.

    Args:
        pool: the pooling to stand for; it must not return indices.

    Shape:
        As of `pool`.
    """

    filter: Tensor

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.kernel_size: tuple[int, int] = _pair(pool.kernel_size)
        self.stride: tuple[int, int] = _pair(pool.stride)
        self.padding: tuple[int, int] = _pair(pool.padding)
        self.dilation: tuple[int, int] = _pair(pool.dilation)
        self.ceil_mode: bool = pool.ceil_mode
        self.register_buffer("filter", _low_pass(self.stride), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Pool, blur and subsample, `(N, C, H, W)` to the shape that the pooling alone would give."""
        extended = self._extend(input) if self.ceil_mode else input
        dense = functional.max_pool2d(extended, self.kernel_size, 1, self.padding, self.dilation)
        return blur_2d(dense, self.stride, self.filter)

    def extra_repr(self) -> str:
        """The arguments of the pooling."""
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _extend(self, input: Tensor) -> Tensor:
        """The input with as many more rows and columns as the last window needs when sizes are rounded up."""
        rows, columns = (self._missing(axis, input.shape[axis - 2]) for axis in (0, 1))
        return functional.pad(input, (0, columns, 0, rows), value=float("-inf"))

    def _missing(self, axis: int, size: int) -> int:
        stride, padding = self.stride[axis], self.padding[axis]
        dense = size + 2 * padding - self.dilation[axis] * (self.kernel_size[axis] - 1)
        last = -((1 - dense) // stride) * stride
        if last >= size + padding:  # a window has to start inside the input or the padding before it
            last -= stride
        return max(0, last + 1 - dense)


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> nn.Module:
    """Blur where a model subsamples: its strided convolutions and max poolings, in place.

    Zhang 2019, "Making Convolutional Networks Shift-Invariant Again" (https://arxiv.org/abs/1904.11486): subsampling
    without a low-pass filter aliases, so that a shift of the input by one pixel can change the output at will. Every
    `torch.nn.Conv2d` with a stride becomes a `BlurConv2d`, every `torch.nn.MaxPool2d` with one a `BlurMaxPool2d`. The
    output shapes and the parameters stay what they are; the names of the convolutions' parameters get a `conv.`.

    Left alone are subclasses with a `forward` of their own, poolings that return indices, and what has been blurred.

    Args:
        model: the model, changed in place.
        replace_convs: whether to replace strided convolutions. Default True.
        replace_maxpools: whether to replace strided max poolings. Default True.
        blur_first: for convolutions, blur the input instead of the output; see `BlurConv2d`. Default True.
        min_channels: leave convolutions of fewer input channels alone: those that see the image itself, whose fine
            detail would be lost. Default 16.
        optimizers: one or several that hold the model's parameters. Default: none exist yet.

    Returns:
        The model; or what has replaced it, if it is a single such layer itself.

    Raises:
        ConfigurationError: an argument does not fit, or hooks would be lost (see `replace_modules`).

    Warns:
        NoEffectWarning: there is nothing to replace.
    """
    _check("apply_blurpool", replace_convs, replace_maxpools, blur_first, min_channels)

    def blur_conv(conv: nn.Conv2d, name: str) -> nn.Module | None:
        fits = replace_convs and type(conv).forward is nn.Conv2d.forward and conv.in_channels >= min_channels
        return BlurConv2d(conv, blur_first) if fits and max(conv.stride) > 1 else None

    def blur_pool(pool: nn.MaxPool2d, name: str) -> nn.Module | None:
        fits = replace_maxpools and type(pool).forward is nn.MaxPool2d.forward and not pool.return_indices
        return BlurMaxPool2d(pool) if fits and max(_pair(pool.stride)) > 1 else None

    return replace_or_warn(
        "BlurPool",
        f"strided Conv2d of {min_channels} input channels or more, nor a strided MaxPool2d, that may be replaced",
        model,
        {nn.Conv2d: blur_conv, nn.MaxPool2d: blur_pool, BlurConv2d: lambda blurred, name: blurred},
        optimizers,
    )


class BlurPool(Algorithm[State, Event]):
    """Blur where the model subsamples (Zhang 2019, https://arxiv.org/abs/1904.11486); see `apply_blurpool`.

    Runs on INIT, and logs the hyperparameters `blurpool/num_blurconv_layers` and `blurpool/num_blurpool_layers`. The
    run ends with another architecture: a checkpoint written with it cannot be loaded without it.

    Do not combine it with a model that filters before it subsamples by itself, nor with hooks on the layers that are
    registered before INIT is over.

    Args:
        replace_convs: whether to replace strided convolutions. Default True.
        replace_maxpools: whether to replace strided max poolings. Default True.
        blur_first: for convolutions, blur the input instead of the output; see `BlurConv2d`. Default True.
        min_channels: leave convolutions of fewer input channels alone. Default 16.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    name: str | None = "blurpool"

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
    ) -> None:
        _check("BlurPool", replace_convs, replace_maxpools, blur_first, min_channels)
        self.replace_convs = replace_convs
        self.replace_maxpools = replace_maxpools
        self.blur_first = blur_first
        self.min_channels = min_channels

    @staticmethod
    def required_on_load() -> bool:
        """The layers it puts in belong to the model."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT."""
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers, and log how many now blur.

        Raises:
            ConfigurationError: hooks would be lost.
        """
        state.model = apply_blurpool(
            state.model,
            self.replace_convs,
            self.replace_maxpools,
            self.blur_first,
            self.min_channels,
            state.optimizers,
        )
        modules = list(state.model.modules())
        logger.log_hyperparameters(
            {
                "blurpool/num_blurconv_layers": sum(isinstance(module, BlurConv2d) for module in modules),
                "blurpool/num_blurpool_layers": sum(isinstance(module, BlurMaxPool2d) for module in modules),
            }
        )


def _low_pass(stride: tuple[int, int]) -> Tensor:
    """The filter before subsampling, `(h, w)`: nothing is lost along a direction of stride 1, so nothing is blurred."""
    rows, columns = (torch.tensor(_TAPS if step > 1 else (1.0,)) for step in stride)
    return torch.outer(rows, columns)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _check(owner: str, replace_convs: Any, replace_maxpools: Any, blur_first: Any, min_channels: Any) -> None:
    check_flag(owner, "replace_convs", replace_convs)
    check_flag(owner, "replace_maxpools", replace_maxpools)
    check_flag(owner, "blur_first", blur_first)
    if not (replace_convs or replace_maxpools):
        raise ConfigurationError(f"{owner}: with replace_convs and replace_maxpools both False there is nothing to do")
    if not isinstance(min_channels, int) or isinstance(min_channels, bool) or min_channels < 1:
        raise ConfigurationError(f"{owner}: min_channels={min_channels!r} has to be a whole number, 1 or more")
