"""Gated linear units: the feed-forward blocks of a transformer get a second, multiplicative path."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_flag, private_generator
from eventbus_engine.training.state import State
from eventbus_engine.training.surgery import replace_or_warn

__all__ = ["GatedLinear", "GatedLinearUnits", "apply_gated_linear_units"]

Activation = Callable[[Tensor], Tensor]
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_ACTIVATIONS = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.LeakyReLU,
    nn.Mish,
    nn.PReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)


class GatedLinear(nn.Module):
    """The first half of a gated feed-forward block: `act_fn(gated_layer(x)) * non_gated_layer(x)`.

    Attributes:
        gated_layer: the linear layer under the activation; it has the weight of the layer it is made from.
        non_gated_layer: the linear layer beside it, new.
        act_fn: elementwise.

    Args:
        linear: the linear layer that was under the activation alone; its parameters are used, not copied.
        act_fn: the activation.
        gated_layer_bias: whether the layer under the activation has a bias: that of `linear` if it has one.
        non_gated_layer_bias: whether the layer beside it has one.
        generator: a CPU generator that the new weights are drawn from, as `torch.nn.Linear` draws them. Default:
            torch's global one.

    Shape:
        `(*, linear.in_features)` to `(*, linear.out_features)`.
    """

    def __init__(
        self,
        linear: nn.Linear,
        act_fn: Activation,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.non_gated_layer: nn.Linear = _new_linear(linear, non_gated_layer_bias, generator)
        self.gated_layer: nn.Linear = linear
        if gated_layer_bias != (linear.bias is not None):
            self.gated_layer = _new_linear(linear, gated_layer_bias, generator)
            self.gated_layer.weight = linear.weight
        self.act_fn: Activation = act_fn

    def forward(self, input: Tensor) -> Tensor:
        """`(*, in_features)` to `(*, out_features)`."""
        gated: Tensor = self.act_fn(self.gated_layer(input)) * self.non_gated_layer(input)
        return gated


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    act_fn: Activation | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
    *,
    seed: int | None = None,
) -> nn.Module:
    """Gate the feed-forward blocks of a model, in place: `W2 (act(W x) * V x)` for `W2 act(W x)`.

    Dauphin et al. 2016, "Language Modeling with Gated Convolutional Networks" (https://arxiv.org/abs/1612.08083), and
    Shazeer 2020, "GLU Variants Improve Transformer" (https://arxiv.org/abs/2002.05202). What counts as such a block:

    * the feed-forward part of a `torch.nn.TransformerEncoderLayer` or `TransformerDecoderLayer`;
    * a `torch.nn.Sequential` of just Linear, activation, [Dropout], Linear, [Dropout], in which the hidden layer is
      wider than input and output; a LayerNorm or RMSNorm may stand in front.

    The first linear layer becomes a `GatedLinear` that holds its weight and the activation, and in the activation's
    place stands an Identity, so the other layers keep their names. W and W2 are carried over; V is new.

    The hidden width H stays as it is. A block of the width D so has `3 D H` weights instead of `2 D H`; to compare at
    the same size as Shazeer does, build the model with two thirds of the hidden width.

    Args:
        model: the model, changed in place.
        optimizers: one or several that hold the model's parameters. V joins the group of W. Default: none exist yet.
        act_fn: the activation of W x, elementwise: `torch.sigmoid` for GLU, `torch.nn.functional.gelu` for GEGLU.
            Default: each block's own.
        gated_layer_bias: whether W x has a bias, the block's own if it has one; without, that one is dropped.
            Default False, as in Shazeer 2020.
        non_gated_layer_bias: whether V x has a bias. Default False.
        seed: what the initial values of V are drawn by, together with the block's name; the distribution is that of
            `torch.nn.Linear`. The global generator is left alone. Default: `torch.initial_seed()`.

    Returns:
        The model; or what has replaced it, if it is such a block itself.

    Raises:
        ConfigurationError: an argument does not fit, hooks would be lost, or the new parameters cannot be told a group
            of the optimizers (see `replace_modules`).

    Warns:
        NoEffectWarning: there is nothing to replace.
    """
    _check("apply_gated_linear_units", act_fn, gated_layer_bias, non_gated_layer_bias)
    gates = _Gates(act_fn, gated_layer_bias, non_gated_layer_bias, seed)
    operated = replace_or_warn(
        "GatedLinearUnits",
        "feed-forward block of a transformer that is not gated yet",
        model,
        {
            nn.Sequential: gates.sequential,
            nn.TransformerEncoderLayer: gates.layer,
            nn.TransformerDecoderLayer: gates.layer,
        },
        optimizers,
    )
    _leave_fast_path(operated)
    return operated


class GatedLinearUnits(Algorithm[State, Event]):
    """Gate the model's feed-forward blocks (Dauphin et al. 2016, Shazeer 2020); see `apply_gated_linear_units`.

    Runs on INIT, and logs the hyperparameter `gated_linear_units/num_layers`. The initial weights are drawn from a
    private generator, seeded by the run's seed and the name of each block. The run ends with another architecture, half
    as large again in these blocks: a checkpoint written with it cannot be loaded without it.

    Do not combine it with a model whose blocks are gated by other means, nor with hooks on the blocks that are
    registered before INIT is over.

    Args:
        act_fn: the activation of the gated path, elementwise. Default: each block's own.
        gated_layer_bias: whether the layer under the activation has a bias. Default False.
        non_gated_layer_bias: whether the layer beside it has a bias. Default False.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    def __init__(
        self,
        act_fn: Activation | None = None,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
    ) -> None:
        _check("GatedLinearUnits", act_fn, gated_layer_bias, non_gated_layer_bias)
        self.act_fn = act_fn
        self.gated_layer_bias = gated_layer_bias
        self.non_gated_layer_bias = non_gated_layer_bias

    @staticmethod
    def required_on_load() -> bool:
        """The layers it puts in belong to the model."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT."""
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Gate the blocks, and log how many there are now.

        Raises:
            ConfigurationError: hooks would be lost, or the new parameters cannot be told a group of the optimizers.
        """
        state.model = apply_gated_linear_units(
            state.model,
            state.optimizers,
            self.act_fn,
            self.gated_layer_bias,
            self.non_gated_layer_bias,
            seed=state.seed,
        )
        layers = sum(isinstance(module, GatedLinear) for module in state.model.modules())
        logger.log_hyperparameters({"gated_linear_units/num_layers": layers})


@dataclass
class _Gates:
    """Makes the gated blocks, with the options of the algorithm."""

    act_fn: Activation | None
    gated_layer_bias: bool
    non_gated_layer_bias: bool
    seed: int | None

    def sequential(self, block: nn.Sequential, name: str) -> nn.Module | None:
        found = _find_feed_forward(block)
        if found is None:
            return None
        first, activation = found
        gated = self._gate(block.get_submodule(first), block.get_submodule(activation), name)
        return _with_children(block, {first: gated, activation: nn.Identity()})

    def layer(self, layer: Any, name: str) -> nn.Module | None:
        plain = next(cls for cls in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer) if isinstance(layer, cls))
        if type(layer)._ff_block is not plain._ff_block or not _is_plain_linear(layer.linear1):
            return None
        gated = self._gate(layer.linear1, layer.activation, name)
        twin: nn.Module = _with_children(layer, {"linear1": gated})
        twin.activation = nn.Identity()
        # torch's fast path for inference knows only the block as it was; the 0, of its own making, switches it off.
        vars(twin).update(activation_relu_or_gelu=0)
        return twin

    def _gate(self, linear: Any, activation: Activation, name: str) -> GatedLinear:
        return GatedLinear(
            linear,
            activation if self.act_fn is None else self.act_fn,
            self.gated_layer_bias,
            self.non_gated_layer_bias,
            private_generator(self.seed, "gated_linear_units", name),
        )


def _leave_fast_path(model: nn.Module) -> None:
    """A stack of encoder layers has a fast path of its own, which it decides on when it is made."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, GatedLinear) for m in module.modules()):
            module.use_nested_tensor = False


def _new_linear(like: nn.Linear, bias: bool, generator: torch.Generator | None) -> nn.Linear:
    """A linear layer of the same shape, initialised as torch does it, but by this generator."""
    linear: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, like.in_features, like.out_features, bias=bias
    )
    bound = 1.0 / math.sqrt(like.in_features)
    for parameter in linear.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return linear


def _find_feed_forward(block: nn.Sequential) -> tuple[str, str] | None:
    """The names of the first linear layer and of the activation, if the block is a feed-forward block."""
    if type(block).forward is not nn.Sequential.forward:
        return None
    kinds = "".join(_kind(module) for module in block)
    if not re.fullmatch("N?LAD?LD?", kinds):
        return None
    first: Any
    last: Any
    first, last = (block[index] for index in (kinds.index("L"), kinds.rindex("L")))
    if not last.in_features == first.out_features > max(first.in_features, last.out_features):
        return None
    names = list(block._modules)
    return names[kinds.index("L")], names[kinds.index("A")]


def _kind(module: nn.Module) -> str:
    if _is_plain_linear(module):
        return "L"
    classes: dict[str, tuple[type[nn.Module], ...]] = {
        "A": _ACTIVATIONS,
        "D": (nn.Dropout,),
        "N": (nn.LayerNorm, nn.RMSNorm),
    }
    return next((kind for kind, of in classes.items() if isinstance(module, of)), "?")


def _is_plain_linear(module: object) -> bool:
    """Whether it is a linear layer with a weight of its own: no subclass, and none that is computed (weight norm)."""
    return type(module) is nn.Linear and isinstance(module.weight, nn.Parameter)


def _with_children(module: ModuleT, children: dict[str, nn.Module]) -> ModuleT:
    """A module of the same class with the same parameters and children, except for some of the children."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    return twin


def _check(owner: str, act_fn: Any, gated_layer_bias: Any, non_gated_layer_bias: Any) -> None:
    check_flag(owner, "gated_layer_bias", gated_layer_bias)
    check_flag(owner, "non_gated_layer_bias", non_gated_layer_bias)
    if act_fn is not None and (isinstance(act_fn, type) or not callable(act_fn)):
        raise ConfigurationError(
            f"{owner}: act_fn={act_fn!r} is no activation; give a function of a tensor, or an instance of a module: "
            f"torch.nn.functional.gelu or torch.nn.GELU(), for example"
        )
