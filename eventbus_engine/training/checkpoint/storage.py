"""Checkpoints on the disk: taken on the training thread, written by any other, read after they have been checked.

torch.distributed.checkpoint plans which rank writes and reads which part of which tensor. What is here is the storage:
safetensors for the tensors, JSON for the rest, and a rename that makes a whole checkpoint of it at once.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Timestamp
from eventbus_engine.training.checkpoint.contents import Contents
from eventbus_engine.training.checkpoint.manifest import (
    MANIFEST,
    MOST_JSON,
    VALUES,
    FileInfo,
    Manifest,
    Part,
    TensorInfo,
    describe_file,
)
from eventbus_engine.training.checkpoint.values import encode, parse

__all__ = ["Snapshot", "clear_leftovers", "delete_checkpoint", "find_checkpoints", "take_snapshot", "write_snapshot"]

PATIENCE: Final = 600.0
"""Seconds that rank 0 waits for the other ranks' parts of a checkpoint, which they write at the same time."""

_WRITING, _REPLACED, _DELETED = ".writing", ".replaced", ".deleted"


@dataclass(frozen=True)
class Snapshot:
    """A run at one point of it, in memory of its own: training may go on.

    Attributes:
        rank: whose part it is, of `world_size` ranks.
        nonce: the same on all ranks, of this one snapshot.
        timestamp: how far the training was, as `Timestamp.state_dict` gives it.
        parts: what this rank writes of the tensors, on the processor, by their keys in its file.
        tensors: all tensors, and who writes which part of them; the same on all ranks.
        values: what is the same on all ranks, as JSON.
        rank_values: what is this rank's own, as JSON.
    """

    rank: int
    world_size: int
    nonce: str
    timestamp: Mapping[str, int | float]
    parts: Mapping[str, Tensor]
    tensors: Mapping[str, TensorInfo]
    values: bytes
    rank_values: bytes


def take_snapshot(contents: Contents) -> Snapshot:
    """Copy the parts of a run to memory. In a job of several ranks all of them call it, on their training threads.

    Raises:
        CheckpointError: a value that a checkpoint cannot hold; names it.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kept: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    values = _to_bytes(contents.values, "values", _keep_in(kept, "values/"))
    rank_values = _to_bytes(contents.rank_values, f"values of rank {rank}", _keep_in(own, "own/"))
    tensors = {**contents.tensors, **kept}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    plans, nonce = _exchange(planner.create_local_plan(), world_size)
    plans, _ = planner.create_global_plan(plans)
    plan = planner.finish_plan(plans[rank])
    parts = {_key(item): _copy(planner.resolve_data(item)) for item in plan.items}
    timestamp = contents.values.get("timestamp")
    return Snapshot(
        rank,
        world_size,
        nonce,
        timestamp.state_dict() if isinstance(timestamp, Timestamp) else {},
        {**parts, **{name: _copy(tensor) for name, tensor in own.items()}},
        _locate(plans),
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
    text = json.dumps(content, separators=(",", ":")).encode()
    if len(text) > MOST_JSON:
        raise CheckpointError(
            f"the {what} take {len(text)} bytes as JSON, and a checkpoint holds {MOST_JSON}; let state_dict() return "
            f"tensors or arrays for what is long"
        )
    return text


def _exchange(plan: SavePlan, world_size: int) -> tuple[list[SavePlan], str]:
    """The plans of all ranks, and what their temporary names have in common."""
    nonce = os.urandom(6).hex()
    if world_size == 1:
        return [plan], nonce
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (plan, nonce))
    return [plan for plan, _ in gathered], gathered[0][1]


def _key(item: Any) -> str:
    offset = item.index.offset
    return item.index.fqn if not offset or not any(offset) else f"{item.index.fqn}@{','.join(map(str, offset))}"


def _copy(data: Any) -> Tensor:
    """A tensor of its own on the processor, laid out as safetensors wants it."""
    tensor: Tensor = data.detach()
    copied = tensor.to("cpu", memory_format=torch.contiguous_format)
    return copied.clone() if copied.data_ptr() == tensor.data_ptr() else copied


def _locate(plans: Sequence[SavePlan]) -> dict[str, TensorInfo]:
    """Which rank's file has which part of which tensor."""
    located: dict[str, TensorInfo] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None  # noqa: S101 -- only tensors are planned
            part = Part(tuple(data.chunk.offsets), tuple(data.chunk.sizes), f"rank{rank}.safetensors", _key(item))
            known = located.get(item.index.fqn)
            parts = (part,) if known is None else (*known.parts, part)
            located[item.index.fqn] = TensorInfo(data.properties.dtype, data.size, parts)
    return located


# --------------------------------------------------------------------------------------------------------- writing


def write_snapshot(snapshot: Snapshot, path: Path, *, patience: float = PATIENCE) -> None:
    """Write this rank's part of a checkpoint; it is there, whole, once rank 0 returns. Blocks; needs no event loop.

    It is flushed to the disk before it gets its name, so that whatever ends the process, or the machine, leaves either
    no checkpoint of that name or a whole one. One that has the name already is replaced.

    Args:
        snapshot: from `take_snapshot`.
        path: of the checkpoint, a folder in one that all ranks see.
        patience: seconds that rank 0 waits for the others.

    Raises:
        CheckpointError: it cannot be written, or another rank has failed to.
    """
    folder = path.with_name(f".{path.name}.{snapshot.nonce}{_WRITING}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _told_by(folder / f"rank{snapshot.rank}"):
            files = _write_files(snapshot, folder)
            if snapshot.rank:
                _write(
                    folder / f"rank{snapshot.rank}.part", _dump({name: asdict(info) for name, info in files.items()})
                )
                return
        for rank in range(1, snapshot.world_size):
            files |= _wait_for(folder, rank, patience)
        manifest = Manifest(snapshot.world_size, snapshot.timestamp, files, snapshot.tensors)
        _write(folder / MANIFEST, _dump(manifest.to_json()))
        _flush(folder)
        _give_name(folder, path)
    except (OSError, ValueError, CheckpointError) as error:
        if not snapshot.rank:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint {path} cannot be written: {error}") from error


def _write_files(snapshot: Snapshot, folder: Path) -> dict[str, FileInfo]:
    rank = snapshot.rank
    _write(folder / f"rank{rank}.json", snapshot.rank_values)
    names = [f"rank{rank}.json", f"rank{rank}.safetensors"]
    tensors = folder / names[1]
    save_file(dict(snapshot.parts), tensors)
    with open(tensors, "rb") as file:
        os.fsync(file.fileno())
    if not rank:
        _write(folder / VALUES, snapshot.values)
        names.append(VALUES)
    return {name: describe_file(folder / name) for name in names}


@contextmanager
def _told_by(mark: Path) -> Iterator[None]:
    """Leave a mark of a failure for rank 0, which would wait."""
    try:
        yield
    except Exception as error:
        try:
            _write(mark.with_suffix(".failed"), str(error).encode())
        except OSError as again:
            error.add_note(f"nor could this be said to rank 0: {again}")
        raise


def _wait_for(folder: Path, rank: int, patience: float) -> dict[str, FileInfo]:
    """The files of another rank, once they are there. What two processes have in common here is the folder only."""
    part, failed = folder / f"rank{rank}.part", folder / f"rank{rank}.failed"
    end = time.monotonic() + patience
    while not part.exists():
        if failed.exists():
            raise CheckpointError(f"rank {rank} cannot write its part of the checkpoint: {failed.read_text()}")
        if time.monotonic() > end:
            raise CheckpointError(
                f"rank {rank} has not written its part of the checkpoint to {folder.parent} within {patience:g} s; "
                f"all ranks have to see the same folder there"
            )
        time.sleep(0.01)
    files = {name: FileInfo(**info) for name, info in parse(part.read_bytes(), str(part)).items()}
    part.unlink()
    return files


def _dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _write(path: Path, content: bytes) -> None:
    """At once or not at all, and on the disk."""
    started = path.with_name(f"{path.name}~")
    with open(started, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    started.rename(path)


def _flush(folder: Path) -> None:
    """Have the disk know the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_name(folder: Path, path: Path) -> None:
    """Make it the checkpoint of that name; one that it replaces is not gone before it is there."""
    replaced = path.with_name(f".{path.name}{_REPLACED}")
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    folder.rename(path)
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint: at once as far as `find_checkpoints` is concerned, whenever the process ends."""
    doomed = path.with_name(f".{path.name}.{os.urandom(6).hex()}{_DELETED}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed processes have left of checkpoints in a folder, and put back what was being replaced."""
    for entry in folder.glob(".*"):
        if entry.suffix == _REPLACED:
            path = folder / entry.name.removeprefix(".").removesuffix(_REPLACED)
            if not path.exists():
                entry.rename(path)
        if entry.suffix in (_WRITING, _REPLACED, _DELETED):
            shutil.rmtree(entry, ignore_errors=True)


def find_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the one of the least batches first. Links and others' folders are left out."""
    found: list[tuple[int | float, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() or path.name.startswith(".") or not (path / MANIFEST).is_file():
            continue
        try:
            found.append((Manifest.read(path).timestamp.get("batch", 0), path))
        except CheckpointError:
            continue  # not by this format, or damaged: nothing to go on from
    return [path for _, path in sorted(found)]
