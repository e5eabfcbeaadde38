"""A run put where a checkpoint was: everything is checked before anything is touched."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Timestamp
from eventbus_engine.training.arguments import check_seed
from eventbus_engine.training.checkpoint.contents import model_parts
from eventbus_engine.training.checkpoint.optimizers import OptimizerPlan, listed, parameter_names
from eventbus_engine.training.checkpoint.participants import check_required, load_participants
from eventbus_engine.training.checkpoint.reading import Checkpoint
from eventbus_engine.training.generators import check_generators, set_generators
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.state import State

__all__ = ["restore"]

log: logging.Logger = logging.getLogger("eventbus_engine")


def restore(
    state: State, source: BatchSource | None, checkpoint: Checkpoint, *, strict: bool, weights_only: bool
) -> None:
    """Put a run where a checkpoint was, all but its callbacks. On the training thread, after INIT.

    Args:
        state: of the run.
        source: of its training batches.
        checkpoint: open.
        strict: whether everything has to fit; else what fits is loaded, and the rest stays as it is.
        weights_only: load the model's parameters and buffers, and nothing else.

    Raises:
        CheckpointError: something does not fit; names it. Nothing of the run has been changed then.
    """
    with state._ranks.loading(), _damaged(checkpoint):
        if strict or not weights_only:
            check_required(checkpoint.values["algorithms"], state.algorithms)
        model = _ModelPlan.make(state.model, checkpoint, strict)
        rest = None if weights_only else _RestPlan.make(state, source, checkpoint, strict)
    tensors = {**model.tensors, **({} if rest is None else rest.tensors)}
    checkpoint.read(tensors)
    with _damaged(checkpoint):  # by what a module, a scheduler or an algorithm makes of its state
        model.carry_out(state.model)
        if rest is not None:
            rest.carry_out(state, source)
    log.info("loaded %s, batch %d of its run", checkpoint.path, int(checkpoint.manifest.timestamp.get("batch", 0)))


@contextmanager
def _damaged(checkpoint: Checkpoint) -> Iterator[None]:
    """What is not as `collect` makes it is no checkpoint of a run."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit this run: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{checkpoint.path} holds no run: {type(error).__name__}: {error}; it is damaged, or from another program"
        ) from error


@dataclass
class _ModelPlan:
    tensors: dict[str, Tensor]
    extra: dict[str, Any]

    @staticmethod
    def make(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> _ModelPlan:
        here, extra = model_parts(model)
        there = [name.removeprefix("model.") for name in checkpoint.tensors if name.startswith("model.")]
        saved = checkpoint.values["model"]["extra"]
        lacks = [name for name in [*here, *extra] if name not in there and name not in saved]
        besides = [name for name in [*there, *saved] if name not in here and name not in extra]
        if strict and (lacks or besides):
            raise CheckpointError(
                f"{type(model).__name__} is another model: {listed('the checkpoint lacks its', lacks)}"
                f"{listed('it lacks the', besides)}build it as it was, with the same algorithms, or load what fits "
                f"with load_strict=False"
            )
        if lacks or besides:
            log.warning("not loaded into %s: %s", type(model).__name__, ", ".join([*lacks, *besides]))
        tensors = {f"model.{name}": tensor for name, tensor in here.items() if name in there}
        _check_shapes(tensors, checkpoint)
        return _ModelPlan(tensors, {name: saved[name] for name in extra if name in saved})

    def carry_out(self, model: nn.Module) -> None:
        """The tensors have been read in place, or into copies; both and all else is for the modules to take."""
        loaded = model.state_dict()
        loaded.update({name.removeprefix("model."): tensor for name, tensor in self.tensors.items()})
        loaded.update(self.extra)
        model.load_state_dict(loaded)


def _check_shapes(tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    for name, tensor in tensors.items():
        saved = checkpoint.tensors[name].shape
        if saved != tensor.shape:
            raise CheckpointError(
                f"{name} has the shape {list(tensor.shape)}, and in the checkpoint {list(saved)}; build the model as "
                f"it was"
            )


@dataclass
class _RestPlan:
    """All but the model, checked."""

    values: Mapping[str, Any]
    own: Mapping[str, Any] | None
    seed: int | None
    timestamp: Timestamp
    optimizers: list[OptimizerPlan]
    schedulers: list[tuple[Any, Any]]
    ranks: int
    others: bool

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for plan in self.optimizers for name, tensor in plan.tensors.items()}

    @staticmethod
    def make(state: State, source: BatchSource | None, checkpoint: Checkpoint, strict: bool) -> _RestPlan:
        values = checkpoint.values
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own = checkpoint.rank_values(rank)
        _check_values(values)
        known: Any = own or checkpoint.rank_values(0)
        seed = check_seed(known["seed"])
        if own is not None:
            check_generators(own["generators"])
            if source is not None and own["data"] is not None:
                source.position.check(own["data"])
        optimizers = _plan_optimizers(state, checkpoint, strict)
        schedulers = _match_schedulers(state.schedulers, values["schedulers"], strict)
        others = ranks != checkpoint.manifest.world_size
        return _RestPlan(values, own, seed, values["timestamp"], optimizers, schedulers, ranks, others)

    def carry_out(self, state: State, source: BatchSource | None) -> None:
        trained = self.values["model"]["trained"]
        for name, parameter in state.model.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        for plan in self.optimizers:
            plan.carry_out()
        for scheduler, saved in self.schedulers:
            scheduler.load_state_dict(saved)
        if state.scaler is not None and self.values["scaler"]:
            state.scaler.load_state_dict(self.values["scaler"])
        state.timestamp, state.metrics = self.timestamp, dict(self.values["metrics"])
        load_participants(self.values["algorithms"], state.algorithms)
        self._go_to_the_data(source)
        # Of a rank that there was not, too: what algorithms draw by it has to be the same on all.
        state.seed = self.seed
        # Last: nothing that draws comes between them and the first batch.
        if self.own is not None:
            set_generators(self.own["generators"], state.device)

    def _go_to_the_data(self, source: BatchSource | None) -> None:
        if source is not None:
            samples = int(self.timestamp.sample_in_epoch)
            data = None if self.own is None else self.own["data"]
            source.position.load_state_dict(data, samples, ranks=self.ranks, others=self.others)


def _check_values(values: Mapping[str, Any]) -> None:
    if not isinstance(values["timestamp"], Timestamp):
        raise TypeError(f"its timestamp is a {type(values['timestamp']).__name__}")
    kinds: dict[str, tuple[type, ...]] = {
        "metrics": (dict,),
        "algorithms": (dict,),
        "callbacks": (dict,),
        "scaler": (dict, NoneType),
    }
    for name, kind in kinds.items():
        if not isinstance(values[name], kind):
            raise TypeError(f"its {name} are a {type(values[name]).__name__}")
    if not all(isinstance(trained, bool) for trained in values["model"]["trained"].values()):
        raise TypeError("a parameter is neither trained nor frozen")


def _plan_optimizers(state: State, checkpoint: Checkpoint, strict: bool) -> list[OptimizerPlan]:
    saved = checkpoint.values["optimizers"]
    _refuse_others("optimizers", [type(one).__name__ for one in state.optimizers], saved)
    frozen = [name for name, trained in checkpoint.values["model"]["trained"].items() if not trained]
    plans: list[OptimizerPlan] = []
    for index, optimizer in enumerate(state.optimizers):
        known = {name: parameter for parameter, name in parameter_names(state.model, optimizer).items()}
        plan = OptimizerPlan(optimizer, f"optimizers.{index}", saved[index], known)
        plan.check(frozen, strict)
        plan.allot(checkpoint.tensors)
        plans.append(plan)
    return plans


def _match_schedulers(schedulers: Sequence[Any], saved: Any, strict: bool) -> list[tuple[Any, Any]]:
    if strict:
        _refuse_others("schedulers", [type(one).__name__ for one in schedulers], saved)
    pairs = zip(schedulers, saved, strict=False)
    return [(one, entry["state"]) for one, entry in pairs if _fits(one, entry)]


def _fits(scheduler: Any, entry: Mapping[str, Any]) -> bool:
    return (
        entry["state"] is not None
        and type(scheduler).__name__ == entry["class"]
        and callable(getattr(scheduler, "load_state_dict", None))
    )


def _refuse_others(what: str, here: list[str], saved: Any) -> None:
    there = [entry["class"] for entry in saved]
    if here != there:
        raise CheckpointError(
            f"the run has the {what} {', '.join(here) or 'none'}, and the checkpoint {', '.join(there) or 'none'}; "
            f"give those that it was saved with, or take the weights alone with load_weights_only=True"
        )
