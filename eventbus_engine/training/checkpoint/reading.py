"""A checkpoint as it is read: checked as a whole first, then copied into tensors that are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from eventbus_engine.errors import CheckpointError
from eventbus_engine.training.checkpoint.manifest import (
    MOST_JSON,
    VALUES,
    Manifest,
    Part,
    TensorInfo,
    describe_file,
    open_file,
)
from eventbus_engine.training.checkpoint.values import decode, parse

__all__ = ["Checkpoint", "open_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole: its files are those that were written, and its manifest fits them.

    Attributes:
        path: its folder.
        manifest: what it consists of.
        values: what was the same on every rank.
    """

    path: Path
    manifest: Manifest
    values: Mapping[str, Any]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type and shape of the tensors that were kept by a name, without those in the values."""
        return {name: info for name, info in self.manifest.tensors.items() if not name.startswith("values/")}

    def rank_values(self, rank: int) -> Mapping[str, Any] | None:
        """What was a rank's own; None for a rank that the job did not have.

        Raises:
            CheckpointError: it has a value that no checkpoint holds.
        """
        name = f"rank{rank}.json"
        if name not in self.manifest.files:
            return None
        with _opened(self.path / f"rank{rank}.safetensors") as tensors:
            return _read_values(self.path / name, lambda key: _clone(tensors.get_tensor(key)))

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy tensors of the checkpoint into these, each of the shape that it has there, converting the type.

        Of a DTensor this rank's part is read, however many ranks there were and are.

        Args:
            into: by the names of the checkpoint; those that are not asked for are left out.

        Raises:
            CheckpointError: one that it does not have, or of another shape; nothing has been copied then.
        """
        for name, tensor in into.items():
            info = self.tensors.get(name)
            if info is None:
                raise CheckpointError(f"{self.path} has no tensor {name}; it has {len(self.tensors)} others")
            if info.shape != tensor.shape:
                raise CheckpointError(
                    f"{name} has the shape {list(tensor.shape)}, and in {self.path} it has {list(info.shape)}; load it "
                    f"into the model that it was saved from"
                )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), _metadata(self.manifest, into), is_coordinator=False)
        parts = {(name, part.offsets): part for name in into for part in self.manifest.tensors[name].parts}
        plan = planner.finish_plan(planner.create_local_plan())
        with torch.no_grad():
            for item in plan.items:
                part = parts[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                with _opened(self.path / part.file) as tensors:
                    block = _slice(tensors, part, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).detach().copy_(block)


def open_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint, all of it, and read its values.

    Raises:
        CheckpointError: it is not there, not whole, not as it was written, of a newer format, or no checkpoint.
    """
    manifest = Manifest.read(path)
    _check_files(path, manifest)
    return Checkpoint(path, manifest, _read_values(path / VALUES, lambda key: _read_whole(path, manifest, key)))


def _check_files(path: Path, manifest: Manifest) -> None:
    """Compare the files with the manifest, and the manifest with what the files of tensors say themselves."""
    expected = {
        VALUES,
        *(f"rank{rank}.{kind}" for rank in range(manifest.world_size) for kind in ("json", "safetensors")),
    }
    if missing := sorted(expected - manifest.files.keys()):
        raise CheckpointError(f"{path} has no {missing[0]}; it is damaged, or from another program")
    for name, info in manifest.files.items():
        found = describe_file(path / name)
        if found.size != info.size:
            raise CheckpointError(f"{path / name} has {found.size} bytes, and had {info.size} when it was written")
        if found.sha256 != info.sha256:
            raise CheckpointError(f"{path / name} is not as it was written: its hash is another")
    by_file: dict[str, dict[str, tuple[torch.dtype, Part]]] = {}
    for tensor in manifest.tensors.values():
        for part in tensor.parts:
            by_file.setdefault(part.file, {})[part.key] = tensor.dtype, part
    for file, parts in by_file.items():
        _check_parts(path / file, parts)


def _check_parts(path: Path, parts: Mapping[str, tuple[torch.dtype, Part]]) -> None:
    with _opened(path) as tensors:
        there = set(tensors.keys())
        for key, (dtype, part) in parts.items():
            if key not in there:
                raise CheckpointError(f"{path} has no tensor {key}, which its manifest says it has")
            header = tensors.get_slice(key)
            if tuple(header.get_shape()) != part.sizes or _NAMES.get(header.get_dtype()) != dtype:
                raise CheckpointError(
                    f"{key} in {path} is of {header.get_dtype()} {header.get_shape()}, and its manifest says "
                    f"{dtype} {list(part.sizes)}"
                )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of tensors."""
    open_file(path).close()
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} holds no tensors: {error}; it is damaged, or from another program") from error


def _slice(tensors: Any, part: Part, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    if not part.sizes or tuple(lengths) == part.sizes:
        return tensors.get_tensor(part.key)  # type: ignore[no-any-return]
    where = tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
    return tensors.get_slice(part.key)[where]  # type: ignore[no-any-return]


def _read_whole(path: Path, manifest: Manifest, name: str) -> Tensor:
    """A tensor of the values, put together from its parts."""
    info = manifest.tensors[name]
    whole = torch.zeros(info.shape, dtype=info.dtype)
    for part in info.parts:
        with _opened(path / part.file) as tensors:
            where = tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.sizes, strict=True))
            whole[where] = tensors.get_tensor(part.key)
    return whole


def _read_values(path: Path, find: Any) -> Mapping[str, Any]:
    with open_file(path) as file:
        text = file.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise CheckpointError(f"{path} is larger than the values of any checkpoint, {MOST_JSON} bytes")
    values = decode(parse(text, str(path)), str(path), find)
    if isinstance(values, dict) and all(isinstance(name, str) for name in values):
        return values
    raise CheckpointError(f"{path} holds no values by their names; it is damaged, or from another program")


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone()  # not mapped from a file that may be replaced


def _metadata(manifest: Manifest, names: Mapping[str, Any]) -> Metadata:
    """The manifest as torch.distributed.checkpoint knows it, for these tensors."""
    known: dict[str, Any] = {}
    where: dict[MetadataIndex, Any] = {}
    for name in names:
        info = manifest.tensors[name]
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in info.parts]
        known[name] = TensorStorageMetadata(TensorProperties(dtype=info.dtype), info.shape, chunks)
        where |= {MetadataIndex(name, part.offsets): None for part in info.parts}
    return Metadata(state_dict_metadata=known, storage_data=where)


_NAMES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""The types of numbers, by safetensors' names for them."""
