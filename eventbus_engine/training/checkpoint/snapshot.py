"""Snapshots: a run at one point of it, copied to memory on the training thread, so that training may go on.

torch.distributed.checkpoint plans which rank writes which part of which tensor. Planning and fresh memory cost more
than the copy itself, so a snapshot takes over both from an earlier one of the same run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Timestamp
from eventbus_engine.training.checkpoint.contents import Contents
from eventbus_engine.training.checkpoint.manifest import MOST_JSON, Part, TensorInfo, dump
from eventbus_engine.training.checkpoint.values import check_tensor, encode

__all__ = ["Snapshot", "take_snapshot"]

Layout: TypeAlias = list[tuple[Any, ...]]
"""What a plan depends on: of each tensor the name, the shape, the type, and how it is spread over the ranks."""


@dataclass(frozen=True)
class Plan:
    """Who writes what.

    Attributes:
        layout: what it is for.
        mine: what this rank writes.
        tensors: all tensors, and which rank's file has which part of them.
    """

    layout: Layout
    mine: Sequence[WriteItem]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Snapshot:
    """A run at one point of it, in memory of its own: training may go on.

    Attributes:
        rank: whose part it is, of `world_size` ranks.
        nonce: the same on all ranks, of this one snapshot.
        timestamp: how far the training was, as `Timestamp.state_dict` gives it.
        measured: the metrics that were measured at this point.
        parts: what this rank writes of the tensors, on the processor, by their keys in its file.
        plan: all tensors, and who writes which part of them.
        values: what is the same on all ranks, as JSON.
        rank_values: what is this rank's own, as JSON.
    """

    rank: int
    world_size: int
    nonce: str
    timestamp: Mapping[str, int | float]
    measured: Mapping[str, float]
    parts: Mapping[str, Tensor]
    plan: Plan
    values: bytes
    rank_values: bytes


def take_snapshot(contents: Contents, spent: Snapshot | None = None) -> Snapshot:
    """Copy the parts of a run to memory. In a job of several ranks all of them call it, on their training threads.

    Args:
        contents: of the run.
        spent: an earlier snapshot of it, which has been written: its memory is used again, and it is of no use any
            more. Copying to memory that the process has already is several times as fast as to fresh memory.

    Raises:
        CheckpointError: a value that a checkpoint cannot hold; names it.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kept: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    values = _to_bytes(contents.values, "values", _keep_in(kept, "values/"))
    rank_values = _to_bytes(contents.rank_values, f"values of rank {rank}", _keep_in(own, "own/"))
    tensors = {**contents.tensors, **kept}
    nonce, plan = _plan(tensors, rank, world_size, None if spent is None else spent.plan)
    mine = _resolve(plan.mine, tensors)
    timestamp = contents.values.get("timestamp")
    return Snapshot(
        rank,
        world_size,
        nonce,
        timestamp.state_dict() if isinstance(timestamp, Timestamp) else {},
        dict(contents.measured),
        _copy({**mine, **own}, {} if spent is None else spent.parts),
        plan,
        values,
        rank_values,
    )


def _keep_in(kept: dict[str, Tensor], prefix: str) -> Callable[[Tensor], str]:
    def keep(tensor: Tensor) -> str:
        name = f"{prefix}{len(kept)}"
        kept[name] = tensor
        return name

    return keep


def _to_bytes(values: Mapping[str, Any], what: str, keep: Callable[[Tensor], str]) -> bytes:
    content = {name: encode(value, str(name), keep) for name, value in values.items()}
    text = dump(content)
    if len(text) > MOST_JSON:
        raise CheckpointError(
            f"the {what} take {len(text)} bytes as JSON, and a checkpoint holds {MOST_JSON}; let state_dict() return "
            f"tensors or arrays for what is long"
        )
    return text


# -------------------------------------------------------------------------------------------------------- planning


def _plan(tensors: Mapping[str, Tensor], rank: int, world_size: int, before: Plan | None) -> tuple[str, Plan]:
    """What the ranks' temporary names have in common, and who writes what: as before, if that holds on every rank."""
    layout = [_layout(name, tensor) for name, tensor in tensors.items()]
    known = before is not None and before.layout == layout
    said = _gather((os.urandom(6).hex(), known), world_size)
    if before is not None and all(known for _, known in said):
        return said[0][0], before
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
    # What every rank holds is rank 0's, as elsewhere: the others' running statistics, say, are not the same.
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    plans: list[SavePlan] = _gather(planner.create_local_plan(), world_size)
    plans, _ = planner.create_global_plan(plans)
    return said[0][0], Plan(layout, planner.finish_plan(plans[rank]).items, _locate(plans))


def _layout(name: str, tensor: Tensor) -> tuple[Any, ...]:
    spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return name, tensor.shape, tensor.dtype, spread


def _gather(mine: Any, world_size: int) -> list[Any]:
    """What each rank has, on every rank."""
    if world_size == 1:
        return [mine]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, mine)
    return gathered


def _key(item: WriteItem) -> str:
    offset = item.index.offset
    return item.index.fqn if not offset or not any(offset) else f"{item.index.fqn}@{','.join(map(str, offset))}"


def _locate(plans: Sequence[SavePlan]) -> dict[str, TensorInfo]:
    """Which rank's file has which part of which tensor."""
    located: dict[str, TensorInfo] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None  # noqa: S101 -- nothing but tensors is planned
            part = Part(tuple(data.chunk.offsets), tuple(data.chunk.sizes), f"rank{rank}.safetensors", _key(item))
            known = located.get(item.index.fqn)
            parts = (part,) if known is None else (*known.parts, part)
            located[item.index.fqn] = TensorInfo(data.properties.dtype, data.size, parts)
    return located


# --------------------------------------------------------------------------------------------------------- copying


def _resolve(items: Sequence[WriteItem], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a tensor that each item is about, by its key."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    found: dict[str, Tensor] = {}
    for item in items:
        tensor = tensors[item.index.fqn]
        part: Any = planner.resolve_data(item) if isinstance(tensor, DTensor) else tensor
        found[_key(item)] = part
    return found


def _copy(tensors: Mapping[str, Tensor], memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the processor, laid out as safetensors wants them, in this memory as far as it fits."""
    copies: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    with torch.no_grad():
        for key, tensor in tensors.items():
            copy = memory.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            copies[key] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
    for device in devices:  # once, and not for each of many small tensors
        torch.cuda.synchronize(device)
    return copies
