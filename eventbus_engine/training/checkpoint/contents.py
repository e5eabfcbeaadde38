"""What a checkpoint holds, whoever stores it, and what it holds of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from eventbus_engine.training.checkpoint.optimizers import describe_optimizer, optimizer_tensors, parameter_names
from eventbus_engine.training.checkpoint.participants import describe_participants
from eventbus_engine.training.generators import read_generators
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.state import State

__all__ = ["Contents", "collect", "model_parts"]


@dataclass(frozen=True)
class Contents:
    """The parts of a run that a checkpoint keeps.

    Attributes:
        tensors: by dotted names; on any device, of a rank's own shard or the whole: `model.fc.weight`.
        values: what is the same on every rank, in the types that `values.encode` keeps; tensors anywhere in it are
            kept with the others.
        rank_values: what is this rank's own.
        measured: metrics that were measured at this very point, to tell the best checkpoints by.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    rank_values: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)


def collect(state: State, source: BatchSource | None, callbacks: Mapping[str, Any] | None = None) -> Contents:
    """What a run is made of, without a copy of any tensor. On the training thread, between two batches.

    Args:
        state: of the run.
        source: of its training batches.
        callbacks: what `describe_participants` has said of them on the event loop, where they run; None to ask them
            here, where nothing runs beside.

    Raises:
        CheckpointError: an algorithm or a callback cannot say what it is made of.
    """
    model, extra = model_parts(state.model)
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    optimizers = []
    for index, optimizer in enumerate(state.optimizers):
        names = parameter_names(state.model, optimizer)
        tensors |= {f"optimizers.{index}.{name}": tensor for name, tensor in optimizer_tensors(optimizer, names)}
        optimizers.append(describe_optimizer(optimizer, names))
    values = {
        "run_name": state.run_name,
        "timestamp": state.timestamp,
        "metrics": dict(state.metrics),
        "model": {"extra": extra, "trained": {n: p.requires_grad for n, p in state.model.named_parameters()}},
        "optimizers": optimizers,
        "schedulers": [_describe_scheduler(scheduler) for scheduler in state.schedulers],
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "algorithms": describe_participants(state.algorithms),
        # Last: a rank may have fewer of them, and the tensors in what comes before have to be numbered alike.
        "callbacks": describe_participants(state.callbacks) if callbacks is None else callbacks,
    }
    own = {
        "seed": state.seed,
        "generators": read_generators(state.device),
        "data": None if source is None else source.position.state_dict(),
    }
    return Contents(tensors, values, own)


def model_parts(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and persistent buffers, each once by its first name; and what else modules keep."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            extra[name] = value
        elif id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors, extra


def _describe_scheduler(scheduler: Any) -> dict[str, Any]:
    """A schedule that is a function of the time has nothing to keep."""
    state_dict = getattr(scheduler, "state_dict", None)
    return {"class": type(scheduler).__name__, "state": state_dict() if callable(state_dict) else None}
