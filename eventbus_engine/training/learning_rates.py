"""What sets the optimizers' learning rates: torch's schedulers, which are stepped, and functions of the state."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias

import torch

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.state import State

__all__ = ["Schedule", "is_number", "set_learning_rates", "step_schedulers"]

Schedule: TypeAlias = Callable[[State], float]
"""`(state) -> factor` of the initial learning rates, 0 or more, at `state.timestamp`."""

_UNSCALED = "unscaled_lr"
"""Where a group keeps the rate that torch's schedulers gave it, while timed ones scale it."""


def set_learning_rates(state: State) -> None:
    """Set every learning rate for the batch in progress: its initial one times the factors of all timed schedulers.

    An optimizer that one of torch's schedulers steps has, instead of the initial rate, the one that scheduler gives it.
    Groups that have joined an optimizer meanwhile take part, from the rate they came with.

    Raises:
        ConfigurationError: a schedule does not know its time, or did not return a factor.
    """
    timed = [scheduler for scheduler in state.schedulers if not _is_stepped(scheduler)]
    if not timed:
        return
    factor = math.prod(_checked_factor(scheduler, state) for scheduler in timed)
    stepped = [scheduler for scheduler in state.schedulers if _is_stepped(scheduler)]
    for optimizer in state.optimizers:
        shared = any(getattr(scheduler, "optimizer", optimizer) is optimizer for scheduler in stepped)
        for group in optimizer.param_groups:
            # In the group it is saved and loaded with the optimizer, under torch's own name for it where that is true.
            initial = group.setdefault(_UNSCALED if shared else "initial_lr", _copied(group["lr"]))
            _set_rate(group, initial * factor)


def step_schedulers(state: State) -> None:
    """Step torch's schedulers. They find the rates as they left them, and the timed ones scale the new ones at once."""
    shared = [group for optimizer in state.optimizers for group in optimizer.param_groups if _UNSCALED in group]
    for group in shared:
        _set_rate(group, group[_UNSCALED])
    for scheduler in state.schedulers:
        if _is_stepped(scheduler):
            scheduler.step()
    for group in shared:
        group[_UNSCALED] = _copied(group["lr"])
    set_learning_rates(state)


def _is_stepped(scheduler: Any) -> bool:
    return callable(getattr(scheduler, "step", None))


def _checked_factor(schedule: Schedule, state: State) -> float:
    factor = schedule(state)
    if not is_number(factor):
        raise ConfigurationError(
            f"the scheduler {schedule!r} returned {factor!r}; it has to return the factor of the initial learning "
            f"rates, a number in [0, inf)"
        )
    return float(factor)


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)  # in place: a compiled or captured step goes on reading this very tensor
    else:
        group["lr"] = float(rate)


def is_number(value: Any, at_least: float = 0.0) -> bool:
    """Whether it is a finite real number in `[at_least, inf)`."""
    return isinstance(value, Real) and at_least <= float(value) < math.inf
