"""Model surgery: replace modules inside a model, and keep the optimizers right about it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.arguments import check_optimizers

__all__ = ["NoEffectWarning", "Replacement", "replace_modules", "replace_or_warn"]

Replacement: TypeAlias = Callable[[Any, str], nn.Module | None]
"""`(module, qualified name)` to the module to put in its place; None leaves it and goes on inside it, the module itself
leaves it together with everything inside it."""


class NoEffectWarning(UserWarning):
    """An algorithm found nothing in the model that it could change."""


def replace_modules(
    model: nn.Module,
    replacements: Mapping[type[nn.Module], Replacement],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> dict[nn.Module, nn.Module]:
    """Replace modules of some classes inside a model, in place, everything or nothing.

    The tree is walked from the model down, each module once: one that is used in several places is replaced by one
    and the same new module in all of them. Where several classes fit a module, the nearest in its MRO decides. What
    lies inside a module that is replaced, or inside what replaces it, is not looked at.

    A new module takes over the training mode, the device and the floating-point type of what it replaces, or, where
    that has no tensors, the model's. Parameters, buffers and submodules that it has from the old one stay as they are.
    Hooks stay with the module that they are registered on: they go on working where the new module holds that one, and
    are an error where it would be lost.

    Optimizers: a parameter that is nowhere in the model any more leaves its group, together with its state; one that
    still is somewhere (carried over, or tied to another layer) stays where it is and keeps its state. A new parameter
    joins the group of those it stands for, in their place in the order. It stands for the old module's parameter of
    the same name; else for those of the innermost submodule around it that the old module had too, of the same last
    name (`weight`, `bias`) where there are any. So weights and biases in groups of their own stay apart. Where those
    are in no group, or are frozen, so is the new one. A new parameter that stands for none joins the only group there
    is.

    Args:
        model: the model, changed in place. If it is itself of one of the classes, nothing holds it that could be
            changed: go on with `replaced.get(model, model)`.
        replacements: for each class a function `(module, qualified name)` that returns the new module, None to leave
            the module and go on inside it, or the module itself to leave it with everything inside it. The function
            must not change the old module. The model's own qualified name is the empty string.
        optimizers: one or several that hold the model's parameters, changed in place. Default: none exist yet.

    Returns:
        Each module that was replaced and the new one, in the order of the walk.

    Raises:
        ConfigurationError: an argument does not fit, a function returned no module, hooks would be lost, or a new
            parameter cannot be told a group. The model and the optimizers are as they were before.
    """
    _check_replacements(model, replacements)
    plan = _Plan(replacements)
    plan.visit(model, "")
    for old, new in plan.replaced.items():
        _refuse_lost_hooks(old, new, plan.names[old])
    before = set(model.parameters())
    updates = [_GroupUpdate(group, owner) for owner in check_optimizers(optimizers) for group in owner.param_groups]
    before.update(p for update in updates for p in update.members)
    _assign_new_parameters(plan, before, updates)
    # Nothing has been changed up to here, and nothing below fails.
    like = _first_floating_tensor(model)
    for old, new in plan.replaced.items():
        _settle(new, old, like)
    gone = {p for old in plan.replaced for p in old.parameters()} - plan.remaining
    for update in updates:
        update.carry_out(gone)
    for parent, name, old in plan.places:
        setattr(parent, name, plan.replaced[old])
    return plan.replaced


def replace_or_warn(
    owner: str,
    needs: str,
    model: nn.Module,
    replacements: Mapping[type[nn.Module], Replacement],
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> nn.Module:
    """The surgery of an algorithm: replace the modules, or give a `NoEffectWarning` that there were none.

    Args:
        owner: the algorithm's name, for the warning.
        needs: what it replaces, for the warning.
        model: as for `replace_modules`.
        replacements: as for `replace_modules`.
        optimizers: as for `replace_modules`.

    Returns:
        The model, or what has replaced it.
    """
    replaced = replace_modules(model, replacements, optimizers)
    if not replaced:
        warnings.warn(
            f"{owner} changed nothing: {type(model).__name__} has no {needs}; leave it out for this model",
            NoEffectWarning,
            stacklevel=3,
        )
    return replaced.get(model, model)


@dataclass
class _Plan:
    """What the walk over a model has found.

    Attributes:
        replacements: what to replace, by class.
        replaced: the old modules and the new ones.
        names: the qualified name of each module, the one it was reached by first.
        places: (parent, name of the child, old child) where a new module is to be put.
        remaining: every parameter that the model has after the surgery.
    """

    replacements: Mapping[type[nn.Module], Replacement]
    replaced: dict[nn.Module, nn.Module] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    places: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    remaining: set[nn.Parameter] = field(default_factory=set)

    def visit(self, module: nn.Module, name: str) -> None:
        if module in self.names:
            return
        self.names[module] = name
        new = self._ask(module, name)
        if new is not None:
            if new is not module:
                self.replaced[module] = new
            self.remaining.update(new.parameters())
            return
        self.remaining.update(module.parameters(recurse=False))
        # named_children() would leave out a child that the same parent holds under a second name.
        for child_name, child in module._modules.items():
            if child is not None:
                self.visit(child, f"{name}.{child_name}" if name else child_name)
                if child in self.replaced:
                    self.places.append((module, child_name, child))

    def _ask(self, module: nn.Module, name: str) -> nn.Module | None:
        replace = next((self.replacements[cls] for cls in type(module).__mro__ if cls in self.replacements), None)
        new = None if replace is None else replace(module, name)
        if new is not None and not isinstance(new, nn.Module):
            raise ConfigurationError(
                f"the replacement for {_title(module, name)} is {new!r}; the function has to return a module, or None "
                f"to leave this one as it is"
            )
        return new


@dataclass
class _GroupUpdate:
    """One parameter group of an optimizer, and what is to join it."""

    group: dict[str, Any]
    optimizer: Optimizer
    members: set[nn.Parameter] = field(init=False)
    arrivals: list[tuple[nn.Parameter, str, nn.Parameter | None]] = field(default_factory=list)
    """A new parameter, its qualified name, and the member to stand behind; None for the front of an empty group."""

    def __post_init__(self) -> None:
        self.members = set(self.group["params"])

    def admit(self, parameter: nn.Parameter, name: str, kin: Iterable[nn.Parameter]) -> None:
        kin = set(kin)
        anchors = [p for p in self.group["params"] if not kin or p in kin]
        self.arrivals.append((parameter, name, anchors[-1] if anchors else None))

    def carry_out(self, gone: set[nn.Parameter]) -> None:
        names: list[str] = self.group.get("param_names", [""] * len(self.group["params"]))
        entries = [(p, name) for p, name, anchor in self.arrivals if anchor is None]
        for parameter, name in zip(self.group["params"], names, strict=True):
            if parameter in gone:
                # State of a parameter that is in no group makes optimizer.state_dict() fail.
                self.optimizer.state.pop(parameter, None)
            else:
                entries.append((parameter, name))
            entries += [(p, new_name) for p, new_name, anchor in self.arrivals if anchor is parameter]
        # In place: LBFGS keeps a reference to the list.
        self.group["params"][:] = [p for p, _ in entries]
        if "param_names" in self.group:
            self.group["param_names"] = [name for _, name in entries]
        if self.arrivals and isinstance(self.optimizer, torch.optim.Adagrad):
            # It sets up its state when it is made, all others when they first see a gradient.
            options = {key: value for key, value in self.group.items() if key not in ("params", "param_names")}
            fresh = torch.optim.Adagrad([{**options, "params": [p for p, _, _ in self.arrivals]}])
            self.optimizer.state.update(fresh.state)


def _assign_new_parameters(plan: _Plan, before: set[nn.Parameter], updates: list[_GroupUpdate]) -> None:
    """Find out which group each new parameter joins, and freeze those that stand for frozen ones."""
    assigned: set[nn.Parameter] = set()
    for old, new in plan.replaced.items():
        old_parameters = dict(old.named_parameters(remove_duplicate=False))
        for name, parameter in new.named_parameters():
            if parameter in before or parameter in assigned:
                continue
            assigned.add(parameter)
            kin = _kin(name, old_parameters)
            if kin and not any(p.requires_grad for p in kin):
                parameter.requires_grad_(False)
            fitting = [update for update in updates if not kin or not update.members.isdisjoint(kin)]
            full_name = f"{plan.names[old]}.{name}".removeprefix(".")
            if len(fitting) > 1:
                raise ConfigurationError(
                    f"the new parameter {full_name} could join any of {len(fitting)} groups of the optimizers: what it "
                    f"stands for in {_title(old, plan.names[old])} "
                    f"{'is in all of them' if kin else 'is no parameter'}; change the model first and make the "
                    f"optimizers after that"
                )
            if fitting:
                fitting[0].admit(parameter, full_name, kin)


def _kin(name: str, old: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """The old parameters that a new one of this name stands for."""
    if name in old:
        return [old[name]]
    path, _, last = name.rpartition(".")
    while path and not any(other.startswith(f"{path}.") for other in old):
        path = path.rpartition(".")[0]
    near = {other: p for other, p in old.items() if not path or other.startswith(f"{path}.")}
    return [p for other, p in near.items() if other.rpartition(".")[2] == last] or list(near.values())


def _settle(new: nn.Module, old: nn.Module, like: torch.Tensor | None) -> None:
    """Give what is new in a module the mode, the device and the floating-point type of what it replaces."""
    carried = {*old.parameters(), *old.buffers()}
    like = _first_floating_tensor(old, like)
    for module in set(new.modules()).difference(old.modules()):
        module.training = old.training
        for tensor in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if like is not None and tensor not in carried:
                _move(tensor, like)


def _move(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Move a tensor in place; unlike assigning to `.data`, swapping also reaches the meta device."""
    moved = tensor.detach().to(like.device, like.dtype if tensor.is_floating_point() else None)
    if (moved.device, moved.dtype) != (tensor.device, tensor.dtype):
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]


def _first_floating_tensor(module: nn.Module, default: torch.Tensor | None = None) -> torch.Tensor | None:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), default)


_HOOKS = [kind for kind in vars(nn.Module()) if kind.endswith("_hooks")]


def _refuse_lost_hooks(old: nn.Module, new: nn.Module, name: str) -> None:
    kept = set(new.modules())
    for inner_name, module in old.named_modules(prefix=name):
        hooks = [kind.strip("_").replace("_", " ") for kind in _HOOKS if getattr(module, kind)]
        if hooks and module not in kept:
            raise ConfigurationError(
                f"{_title(module, inner_name)} is to be replaced, which would lose its {', '.join(hooks)}; register "
                f"them after that, which means after INIT where an algorithm does it"
            )


def _check_replacements(model: Any, replacements: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model={model!r} is no torch.nn.Module; give an instance of one")
    if not isinstance(replacements, Mapping):
        raise ConfigurationError(f"replacements={replacements!r}; give a mapping of module classes to functions")
    for cls, replace in replacements.items():
        if not isinstance(cls, type) or not issubclass(cls, nn.Module):
            raise ConfigurationError(f"replacements: {cls!r} is no module class; give classes such as torch.nn.Linear")
        if not callable(replace):
            raise ConfigurationError(
                f"replacements: {replace!r}, for {cls.__name__}, cannot be called; give functions of a module and its "
                f"qualified name"
            )


def _title(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__} {name!r}" if name else f"the model, {type(module).__name__},"
