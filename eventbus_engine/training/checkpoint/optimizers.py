"""Optimizers in a checkpoint: by the names of their parameters, so that the order in their groups may be another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventbus_engine.errors import CheckpointError
from eventbus_engine.training.checkpoint.manifest import TensorInfo
from eventbus_engine.training.data import move

__all__ = ["OptimizerPlan", "describe_optimizer", "listed", "optimizer_tensors", "parameter_names"]


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """What the optimizer's parameters are called: as in the model, or by their place in the optimizer."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = enumerate(optimizer.param_groups)
    members = ((f"{g}/{p}", parameter) for g, group in groups for p, parameter in enumerate(group["params"]))
    return {parameter: names.get(parameter, place) for place, parameter in members}


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """What it keeps of each parameter: `layer.weight.exp_avg`."""
    for parameter, name in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}", value


def describe_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """All the rest of it, as plain values: groups with their options, and which tensors there are.

    Tensors that are kept on the processor beside a parameter that is not, as Adam's `step` on CUDA, are noted.
    """
    kept = {name: optimizer.state[parameter] for parameter, name in names.items() if parameter in optimizer.state}
    devices = {name: parameter.device for parameter, name in names.items()}
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {
                "params": [names[parameter] for parameter in group["params"]],
                "options": {key: value for key, value in group.items() if key != "params"},
            }
            for group in optimizer.param_groups
        ],
        "state": {
            name: {
                "tensors": {
                    key: value.device == devices[name] for key, value in slots.items() if isinstance(value, Tensor)
                },
                "values": {key: value for key, value in slots.items() if not isinstance(value, Tensor)},
            }
            for name, slots in kept.items()
        },
    }


@dataclass
class OptimizerPlan:
    """An optimizer, and what of a checkpoint goes into it: made and checked first, then read into, then carried out.

    Attributes:
        optimizer: as it is.
        label: what its tensors are called by in the checkpoint: `optimizers.0`.
        saved: what `describe_optimizer` returned.
        known: its parameters by their names.
        state: what it will keep of each parameter, with tensors to be read into.
        tensors: those, by their names in the checkpoint.
        fresh: the parameters that the checkpoint does not know, and that stay as they are.
    """

    optimizer: Optimizer
    label: str
    saved: Mapping[str, Any]
    known: Mapping[str, Tensor]
    state: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fresh: set[Tensor] = field(default_factory=set)

    def check(self, frozen: Sequence[str], strict: bool) -> None:
        """Refuse what does not fit.

        Args:
            frozen: the parameters that the run had frozen, which may have left their groups.
            strict: whether the parameters have to be the same otherwise.

        Raises:
            CheckpointError: naming what does not.
            TypeError, ValueError, LookupError: it is not what `describe_optimizer` returns.
        """
        for group in self.saved["groups"]:
            _ = dict(group["options"])
        groups, kind = self.optimizer.param_groups, type(self.optimizer).__name__
        if len(self.saved["groups"]) != len(groups):
            raise CheckpointError(
                f"{self.label}, {kind}, has {len(groups)} groups of parameters, and in the checkpoint it has "
                f"{len(self.saved['groups'])}; make the optimizer as it was, or give load_weights_only=True"
            )
        saved = [name for group in self.saved["groups"] for name in group["params"]]
        strange = [name for name in saved if name not in self.known]
        fresh = [name for name in self.known if name not in saved and name not in frozen]
        if strict and (strange or fresh):
            raise CheckpointError(
                f"{self.label}, {kind}, steps other parameters than in the checkpoint: "
                f"{listed('it lacks', strange)}{listed('it has besides', fresh)}make the optimizer as it was, or "
                f"give load_strict=False or load_weights_only=True"
            )
        self.fresh = {self.known[name] for name in fresh}

    def allot(self, there: Mapping[str, TensorInfo]) -> None:
        """Make room for the tensors, with their sizes and types as in the checkpoint.

        Raises:
            CheckpointError: it lacks one that it says it has.
        """
        options = {name: group["options"] for group in self.saved["groups"] for name in group["params"]}
        for name, slots in self.saved["state"].items():
            parameter = self.known.get(name)
            if parameter is None or name not in options:
                continue
            values = move(dict(slots["values"]), parameter.device)
            for key, beside in slots["tensors"].items():
                info = there.get(f"{self.label}.{name}.{key}")
                if info is None:
                    raise CheckpointError(f"the checkpoint has no {self.label}.{name}.{key}, which it says it has")
                # As torch has it: counters are on the processor, unless a kernel is to read them.
                apart = not beside or (key == "step" and not _reads_on_device(options[name]))
                values[key] = self.tensors[f"{self.label}.{name}.{key}"] = _room(info, parameter, apart)
            self.state[parameter] = values

    def carry_out(self) -> None:
        """Exchange groups and state. Nothing here fails."""
        for group, saved in zip(self.optimizer.param_groups, self.saved["groups"], strict=True):
            members = [self.known[name] for name in saved["params"] if name in self.known]
            # In place: LBFGS keeps a reference to the list.
            group["params"][:] = [*members, *(parameter for parameter in group["params"] if parameter in self.fresh)]
            for key, value in saved["options"].items():
                _set_option(group, key, value)
        for parameter in self.known.values():
            if parameter not in self.fresh:
                self.optimizer.state.pop(parameter, None)
        self.optimizer.state.update(self.state)


def listed(what: str, names: Sequence[str]) -> str:
    """A part of a message, empty without names: `it lacks a, b; `."""
    return f"{what} {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}; " if names else ""


def _reads_on_device(options: Mapping[str, Any]) -> bool:
    return bool(options.get("capturable") or options.get("fused"))


def _room(info: TensorInfo, parameter: Tensor, apart: bool) -> Tensor:
    if info.shape == parameter.shape and not apart:
        return torch.empty_like(parameter, dtype=info.dtype, requires_grad=False)  # of a sharded one, a shard
    return torch.empty(info.shape, dtype=info.dtype, device="cpu" if apart else parameter.device)


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    there = group.get(key)
    if isinstance(there, Tensor) and isinstance(value, Tensor) and there.shape == value.shape:
        there.copy_(value)  # a compiled step goes on reading this very tensor
    else:
        group[key] = value
