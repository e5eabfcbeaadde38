"""Fused layer norm: one kernel with exact statistics, and an output in autocast's own type."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.state import State
from eventbus_engine.training.surgery import replace_or_warn

_LIGER_VERSION = [0, 8, 5]
"""Versions before it round the mean and the deviation to the input's type for the backward pass."""

_LIGER_WIDTH = 65536

__all__ = ["AutocastLayerNorm", "FusedLayerNorm", "apply_fused_layernorm"]


class AutocastLayerNorm(nn.LayerNorm):
    """A layer norm whose output has autocast's type, computed in float32 and rounded once.

    Ba et al. 2016, "Layer Normalization" (https://arxiv.org/abs/1607.06450). torch's own returns float32 under autocast
    on CUDA, of which every linear layer behind it makes a copy in half precision, and whatever type its input has on
    the CPU. This one returns autocast's type everywhere. Its mean and variance are those of its input as it is: an
    input in float32 is not rounded first.

    Without autocast it is torch's, except that input and parameters may differ in type: the wider one computes, and the
    output has the input's.

    It runs as one fused kernel: torch's native one, or, on CUDA and for a norm over the last dimension with weight and
    bias, that of Liger (https://arxiv.org/abs/2410.10989) where `liger_kernel` 0.8.5 or later is installed. Liger's
    cannot be differentiated twice.

    Args:
        norm: the layer norm to stand for; its parameters are used, not copied.

    Shape:
        `(*, *normalized_shape)`, in and out.
    """

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__(list(norm.normalized_shape), norm.eps, elementwise_affine=False)
        self.elementwise_affine: bool = norm.elementwise_affine
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self._liger: Any = _find_liger()

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `(*, *normalized_shape)`."""
        device = input.device.type
        normalized = self._normalize(input)
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        # Autocast leaves float64 alone, so this does too.
        dtype = torch.get_autocast_dtype(device) if autocast and input.dtype != torch.float64 else input.dtype
        return normalized.to(dtype)

    def _normalize(self, input: Tensor) -> Tensor:
        if self._liger is not None and input.is_cuda and self._suits_liger(input):
            # It computes in float32 whatever the types are.
            return self._liger.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]
        parameters = [parameter for parameter in (self.weight, self.bias) if parameter is not None]
        dtype = input.dtype
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        # torch's kernel accumulates in float32 at least.
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        return functional.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)

    def _suits_liger(self, input: Tensor) -> bool:
        affine = self.weight is not None and self.bias is not None
        narrow = len(self.normalized_shape) == 1 and self.normalized_shape[0] <= _LIGER_WIDTH
        return affine and narrow and input.dtype != torch.float64 and input.numel() > 0


def apply_fused_layernorm(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> nn.Module:
    """Replace every `torch.nn.LayerNorm` of a model by an `AutocastLayerNorm`, in place.

    The parameters are carried over, under the same names: checkpoints fit both ways and optimizers keep their state.
    Left alone are subclasses with a `forward` of their own (torchvision's `LayerNorm2d`), and norms whose parameters
    are computed (`torch.nn.utils.parametrize`).

    Args:
        model: the model, changed in place.
        optimizers: one or several that hold the model's parameters. Default: none exist yet.

    Returns:
        The model; or what has replaced it, if it is a layer norm itself.

    Raises:
        ConfigurationError: an argument does not fit, or hooks would be lost (see `replace_modules`).

    Warns:
        NoEffectWarning: there is nothing to replace.
    """

    def fuse(norm: nn.LayerNorm, name: str) -> nn.Module | None:
        plain = all(isinstance(tensor, nn.Parameter | None) for tensor in (norm.weight, norm.bias))
        return AutocastLayerNorm(norm) if plain and type(norm).forward is nn.LayerNorm.forward else None

    return replace_or_warn(
        "FusedLayerNorm", "torch.nn.LayerNorm left to replace", model, {nn.LayerNorm: fuse}, optimizers
    )


class FusedLayerNorm(Algorithm[State, Event]):
    """Replace every layer norm by an `AutocastLayerNorm`; see there and `apply_fused_layernorm`.

    Runs on INIT, after everything else, wherever it is registered, so that it also gets the layer norms that other
    algorithms put in; and logs the hyperparameter `fused_layernorm/num_layers`. It matters with `precision="amp_bf16"`;
    in fp32 the model computes what it did before. A checkpoint fits with and without it.

    Do not combine it with an algorithm that differentiates gradients (`backwards_create_graph`) where `liger_kernel` is
    installed, nor with hooks on the layer norms that are registered before INIT is over.
    """

    name: str | None = "fused_layernorm"

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT."""
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layer norms, and log how many there are now.

        Raises:
            ConfigurationError: hooks would be lost.
        """
        state.model = apply_fused_layernorm(state.model, state.optimizers)
        layers = sum(isinstance(module, AutocastLayerNorm) for module in state.model.modules())
        logger.log_hyperparameters({"fused_layernorm/num_layers": layers})


def _find_liger() -> Any:
    """Liger's layer norm, a `torch.autograd.Function`; None where it is not installed, or too old."""
    try:
        version = importlib.metadata.version("liger_kernel")
        if [int(part) for part in re.findall(r"\d+", version)] < _LIGER_VERSION:
            return None
        return importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    except ImportError:  # PackageNotFoundError is one, too
        return None
