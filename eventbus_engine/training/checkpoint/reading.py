"""A checkpoint as it is read: checked as a whole first, then copied into tensors that are there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

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
    FORMAT,
    MIGRATIONS,
    VALUES,
    FileInfo,
    Manifest,
    Part,
    TensorInfo,
    being_replaced,
    open_file,
    read_json,
)
from eventbus_engine.training.checkpoint.values import KEPT, decode

__all__ = ["Checkpoint", "check_file", "open_checkpoint", "read_checked"]


T = TypeVar("T")


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
        if rank not in range(self.manifest.world_size):
            return None
        with _TensorFiles(self.path) as files:
            file = f"rank{rank}.safetensors"
            # A copy: what is read is mapped from a file that may be replaced.
            return _read_values(self.path, f"rank{rank}.json", self.manifest, lambda key: files.read(file, key).clone())

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy tensors of the checkpoint into these, each of the shape that it has there.

        The type is converted, as far as nothing but precision is lost.

        Of a DTensor this rank's part is read, however many ranks there were and are.

        Args:
            into: by the names of the checkpoint; those that are not asked for are left out.

        Raises:
            CheckpointError: one that it does not have, of another shape, or of a type that does not go into the other;
                nothing has been copied then.
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
            if not torch.can_cast(info.dtype, tensor.dtype):
                raise CheckpointError(f"{name} is of {tensor.dtype}, and in {self.path} it is of {info.dtype}")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), _metadata(self.manifest, into), is_coordinator=False)
        parts = {(name, part.offsets): part for name in into for part in self.manifest.tensors[name].parts}
        plan = planner.finish_plan(planner.create_local_plan())
        with torch.no_grad(), _TensorFiles(self.path) as files:
            for item in plan.items:
                part = parts[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                block = files.read(part.file, part.key, _within(part, item.storage_offsets, item.lengths))
                planner.resolve_tensor(item).detach().copy_(block)


def open_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint, all of it, and read its values.

    Raises:
        CheckpointError: it is not there, not whole, not as it was written, of a newer format, or no checkpoint.
    """
    path = Path(os.path.realpath(path))  # a link to the latest one may be set to another meanwhile
    if not path.exists() and being_replaced(path).exists():
        path = being_replaced(path)
    manifest = Manifest.read(path)
    for name, info in manifest.files.items():
        check_file(path / name, info)
    return read_checked(path, manifest)


def check_file(path: Path, info: FileInfo) -> None:
    """Compare a file of a checkpoint with what its manifest says of it.

    Raises:
        CheckpointError: it is not there, or not as it was written.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != info.size:  # before it is read: it may be of any size
            raise CheckpointError(f"{path} has {size} bytes, and had {info.size} when it was written")
        if hashlib.file_digest(file, "sha256").hexdigest() != info.sha256:
            raise CheckpointError(f"{path} is not as it was written: its hash is another")


def read_checked(path: Path, manifest: Manifest) -> Checkpoint:
    """The checkpoint, its files being as they were written: what they say themselves has to fit the manifest, too.

    Raises:
        CheckpointError: it does not.
    """
    _check_names(path, manifest)
    with _TensorFiles(path) as files:
        _check_tensors(files, manifest)
        return Checkpoint(
            path, manifest, _read_values(path, VALUES, manifest, lambda key: _whole(files, manifest, key))
        )


def _check_names(path: Path, manifest: Manifest) -> None:
    # By their number first: of how many ranks it speaks is the file's own claim.
    if len(manifest.files) == 2 * manifest.world_size + 1:
        ranks = range(manifest.world_size)
        expected = {VALUES, *(f"rank{rank}.{kind}" for rank in ranks for kind in ("json", "safetensors"))}
        if manifest.files.keys() == expected:
            return
    raise CheckpointError(
        f"{path} has not the files of {manifest.world_size} ranks, but {', '.join(sorted(manifest.files)[:9])}; it is "
        f"damaged, or from another program"
    )


def _check_tensors(files: _TensorFiles, manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            kind, shape = files.header(part.file, part.key)
            if KEPT.get(kind) != tensor.dtype or shape != part.sizes:
                raise CheckpointError(
                    f"{name} in {files.folder / part.file} is of {kind} {list(shape)}, and its manifest says "
                    f"{tensor.dtype} {list(part.sizes)}"
                )


class _TensorFiles:
    """The files of tensors of a checkpoint, each opened once.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def header(self, name: str, key: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape of a tensor, as the file has it."""
        header = self._from(name, lambda file: file.get_slice(key))
        return header.get_dtype(), tuple(header.get_shape())

    def read(self, name: str, key: str, where: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or this part of it, mapped from the file."""
        tensor: Tensor = self._from(name, lambda file: file.get_slice(key)[where] if where else file.get_tensor(key))
        return tensor

    def _from(self, name: str, take: Callable[[Any], T]) -> T:
        path = self.folder / name
        try:
            if name not in self._opened:
                open_file(path).close()
                self._opened[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            return take(self._opened[name])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not as it should be: {error}; it is damaged") from error


def _within(part: Part, offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    """Which stretch of a part; nothing for the whole of it."""
    if tuple(lengths) == part.sizes:
        return ()
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def _whole(files: _TensorFiles, manifest: Manifest, name: str) -> Tensor:
    """A tensor of the values, put together from its parts."""
    info = manifest.tensors[name]
    whole = torch.empty(info.shape, dtype=info.dtype)
    for part in info.parts:
        where = tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.sizes, strict=True))
        whole[where] = files.read(part.file, part.key)
    return whole


def _read_values(path: Path, name: str, manifest: Manifest, find: Callable[[str], Tensor]) -> Mapping[str, Any]:
    taken: set[str] = set()

    def find_once(key: str) -> Tensor:
        # Each has been kept once; to name one a million times would fill the memory from a small file.
        if key in taken:
            raise ValueError(f"{key!r} is there twice")
        taken.add(key)
        return find(key)

    values: Any = decode(read_json(path / name), str(path / name), find_once)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{path / name} holds no values by their names; it is damaged, or from another program")
    for step in range(manifest.format, FORMAT):
        migration = MIGRATIONS[step]
        values = migration.values(values) if name == VALUES else migration.rank_values(values)
    return dict(values)


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
