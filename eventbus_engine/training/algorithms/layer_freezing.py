"""Layer freezing: stop training the early layers while the later ones go on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_range, elapsed_fraction
from eventbus_engine.training.state import State

__all__ = ["LayerFreezing", "freeze_layers"]


def freeze_layers(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze the first layers of a model in place: the longer the training has gone on, the more of them.

    A layer is a module without children that has parameters; layers count in the order of their definition, and the
    last one is never frozen. The share that is frozen is 0 until `freeze_start` and grows linearly to `freeze_level`
    at the end of training; the number of layers is rounded down.

    The schedule is in the manner of FreezeOut (Brock et al. 2017, https://arxiv.org/abs/1706.04983) and of Freeze
    Training (Raghu et al. 2017, https://arxiv.org/abs/1706.05806).

    A frozen parameter gets no gradient any more, gives up the one it has, and leaves the optimizers together with its
    state: momentum and weight decay would move it even without a gradient. Parameters that a layer shares with one that
    still trains (tied weights) stay trainable. A frozen BatchNorm still updates its running statistics.

    Args:
        model: the model, changed in place.
        optimizers: one or more optimizers, changed in place.
        current_duration: the fraction of training that is over, in `[0, 1]`.
        freeze_start: the fraction of training before freezing begins, in `[0, 1]`. Default 0.5.
        freeze_level: the largest fraction of the layers to freeze, in `[0, 1]`. Default 1.0.

    Returns:
        The number of layers that are frozen now, and the scheduled share of the layers it was rounded from.

    Raises:
        ConfigurationError: one of the fractions is out of range.
    """
    check_range("freeze_layers", "current_duration", current_duration, 0, 1)
    _check_schedule("freeze_layers", freeze_start, freeze_level)
    layers = [module for module in model.modules() if _is_layer(module)]
    share = 0.0
    if current_duration > freeze_start:
        share = freeze_level * (current_duration - freeze_start) / (1.0 - freeze_start)
    depth = int(share * (len(layers) - 1)) if layers else 0
    training = {p for layer in layers[depth:] for p in layer.parameters()}
    frozen = {p for layer in layers[:depth] for p in layer.parameters()} - training
    for parameter in frozen:
        parameter.requires_grad = False
        # A gradient left behind would still count in the norm that gradient clipping takes.
        parameter.grad = None
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        _drop_parameters(optimizer, frozen)
    return depth, share


def _is_layer(module: nn.Module) -> bool:
    return next(module.children(), None) is None and next(module.parameters(), None) is not None


def _drop_parameters(optimizer: Optimizer, parameters: set[nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in parameters]
    for parameter in parameters:
        # State of a parameter that is in no group makes optimizer.state_dict() fail.
        optimizer.state.pop(parameter, None)


def _check_schedule(owner: str, freeze_start: float, freeze_level: float) -> None:
    check_range(owner, "freeze_start", freeze_start, 0, 1)
    check_range(owner, "freeze_level", freeze_level, 0, 1)


class LayerFreezing(Algorithm[State, Event]):
    """Freeze more and more of the model's early layers as the training goes on; see `freeze_layers`.

    Runs at the end of every epoch, and logs `layer_freezing/layers_frozen` and `layer_freezing/percentage_frozen` (a
    fraction in `[0, 1]`).

    Do not combine it with an algorithm or a schedule that unfreezes layers, nor with one that adds parameters to the
    optimizers later on. Data-parallel wrappers are told, through `find_unused_parameters`, that parameters will miss
    their gradients.

    Args:
        freeze_start: the fraction of training before freezing begins, in `[0, 1]`. Default 0.5.
        freeze_level: the largest fraction of the layers to freeze, in `[0, 1]`. Default 1.0: all but the last.

    Raises:
        ConfigurationError: one of the fractions is out of range.
    """

    find_unused_parameters = True

    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0) -> None:
        _check_schedule("LayerFreezing", freeze_start, freeze_level)
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level

    def match(self, event: Event, state: State) -> bool:
        """Run on EPOCH_END."""
        return event == Event.EPOCH_END

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Freeze the layers that are due by now, and log how many that are.

        Raises:
            ConfigurationError: the run has no `max_duration`.
        """
        # A run may go past its max_duration by the rest of an epoch that was counted in batches or samples.
        elapsed = min(elapsed_fraction(state, "LayerFreezing"), 1.0)
        layers, share = freeze_layers(state.model, state.optimizers, elapsed, self.freeze_start, self.freeze_level)
        logger.log_metrics({"layer_freezing/layers_frozen": layers, "layer_freezing/percentage_frozen": share})
