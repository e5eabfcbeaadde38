"""The manifest of a checkpoint: its version, the files it consists of, and where each part of each tensor is.

It is read before anything else and believed in nothing: it has to be as it was written itself, names are from a closed
set, sizes and hashes are compared with the files, shapes with what the files' own headers say.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch

from eventbus_engine.errors import CheckpointError
from eventbus_engine.training.checkpoint.values import DTYPES, parse

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MIGRATIONS",
    "MOST_JSON",
    "VALUES",
    "FileInfo",
    "Manifest",
    "Migration",
    "Part",
    "TensorInfo",
    "being_replaced",
    "describe_file",
    "dump",
    "open_file",
    "passing",
    "read_json",
]

FORMAT: Final = 1
"""The version of the format that is written, and the newest that is read."""

MANIFEST: Final = "manifest.json"
"""Its file in the checkpoint's folder."""

VALUES: Final = "values.json"
"""The file of what is the same on every rank."""

MOST_JSON: Final = 64 * 2**20
"""Bytes of a JSON file, at most: what is larger is no checkpoint's, and would fill the memory as it is parsed."""


def _as_it_is(content: dict[str, Any]) -> dict[str, Any]:
    return content


@dataclass(frozen=True)
class Migration:
    """Turns what a checkpoint of one version of the format says, as parsed JSON, into what the next version says.

    Attributes:
        manifest: of the manifest.
        values: of what is the same on every rank.
        rank_values: of what is a rank's own.
    """

    manifest: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
    values: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
    rank_values: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is


MIGRATIONS: dict[int, Migration] = {}
"""By the version that they begin with."""

_FILE_NAME = re.compile(r"values\.json|rank\d{1,6}\.(json|safetensors)")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as it was written: its size in bytes, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor: where it begins and how long it is in each dimension, and where it is kept."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        world_size: of the job that wrote it.
        timestamp: how far the training was, as `Timestamp.state_dict` gives it; empty if it is not a run's.
        files: by name.
        tensors: by name.
        measured: the metrics that were measured at this point of the run.
        format: the version of the format that the checkpoint was written in.
    """

    world_size: int
    timestamp: Mapping[str, int | float]
    files: Mapping[str, FileInfo]
    tensors: Mapping[str, TensorInfo]
    measured: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """As parsed JSON, signed with its own hash."""
        tensors = {
            name: {
                "dtype": str(info.dtype),
                "shape": list(info.shape),
                "parts": [[list(part.offsets), list(part.sizes), part.file, part.key] for part in info.parts],
            }
            for name, info in self.tensors.items()
        }
        content = {
            "format": FORMAT,
            "world_size": self.world_size,
            "timestamp": dict(self.timestamp),
            "measured": {name: number for name, number in self.measured.items() if math.isfinite(number)},
            "files": {name: asdict(info) for name, info in self.files.items()},
            "tensors": tensors,
        }
        return content | {"sha256": _hash_of(content)}

    @property
    def position(self) -> tuple[int | float, ...]:
        """How far the run was, to put checkpoints in order by."""
        return tuple(self.timestamp.get(counter, 0) for counter in ("batch", "epoch", "iteration"))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read and check the manifest of a checkpoint; its files are not looked at yet.

        Raises:
            CheckpointError: there is none, it is of a newer format, or it is not what a manifest is.
        """
        path = folder / MANIFEST
        content = read_json(path)
        if not isinstance(content, dict) or type(version := content.get("format")) is not int:
            raise CheckpointError(f"{path} does not say of which format it is; it is damaged, or from another program")
        try:
            return _from_json(_migrate(content, version, path), version)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is no manifest of a checkpoint: {type(error).__name__}: {error}; it is damaged, or from "
                f"another program"
            ) from error


def _migrate(content: dict[str, Any], version: int, path: Path) -> dict[str, Any]:
    if version > FORMAT:
        raise CheckpointError(
            f"{path} is of format {version}, and this release reads up to {FORMAT}; use the release that has written "
            f"it, or a newer one"
        )
    if content.pop("sha256") != _hash_of(content):
        raise CheckpointError(f"{path} is not as it was written: its hash is another")
    for step in range(version, FORMAT):
        if step not in MIGRATIONS:
            raise CheckpointError(f"{path} is of format {version}, which this release does not read any more")
        content = MIGRATIONS[step].manifest(content)
    return content


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(dump(content)).hexdigest()


def _from_json(content: dict[str, Any], version: int) -> Manifest:
    files = {
        _matching(_FILE_NAME, name): FileInfo(_count(info["size"]), _matching(_HASH, info["sha256"]))
        for name, info in content["files"].items()
    }
    timestamp, measured = (
        {name: number for name, number in content[numbers].items() if _is_number(number)}
        for numbers in ("timestamp", "measured")
    )
    tensors = {name: _tensor(info, files) for name, info in content["tensors"].items()}
    return Manifest(_count(content["world_size"]), timestamp, files, tensors, measured, version)


def _tensor(info: dict[str, Any], files: Mapping[str, FileInfo]) -> TensorInfo:
    shape = torch.Size(_counts(info["shape"]))
    parts = tuple(
        Part(_counts(offsets), _counts(sizes), _one_of(files, file), str(key))
        for offsets, sizes, file, key in info["parts"]
    )
    if not _make_up(shape, parts):
        raise ValueError(f"the parts do not make up {list(shape)}")
    return TensorInfo(DTYPES[info["dtype"]], shape, parts)


def _make_up(shape: torch.Size, parts: tuple[Part, ...]) -> bool:
    """Whether parts are the cells of a grid over the whole tensor: nothing is left out, and nothing is there twice."""
    solid = [part for part in parts if math.prod(part.sizes)]  # a rank that has none of it has an empty part
    if any(len(part.offsets) != len(shape) or len(part.sizes) != len(shape) for part in parts):
        return False
    cells = 1
    for dimension, size in enumerate(shape):
        cuts = sorted({(part.offsets[dimension], part.sizes[dimension]) for part in solid})
        ends = [0, *(start + length for start, length in cuts)]
        if math.prod(shape) and ([start for start, _ in cuts] != ends[:-1] or ends[-1] != size):
            return False
        cells *= len(cuts)
    return len(solid) == len({part.offsets for part in solid}) == (cells if math.prod(shape) else 0)


def _counts(numbers: Any) -> tuple[int, ...]:
    return tuple(_count(number) for number in numbers)


def _count(number: Any) -> int:
    if type(number) is int and 0 <= number < 2**48:
        return number
    raise ValueError(f"{str(number)[:40]!r} is no size")


def _is_number(number: Any) -> bool:
    if type(number) in (int, float):
        return True
    raise ValueError(f"{str(number)[:40]!r} is no number")


def _matching(pattern: re.Pattern[str], text: str) -> str:
    if pattern.fullmatch(text):
        return text
    raise ValueError(f"{text[:80]!r} is not what belongs there")


def _one_of(files: Mapping[str, FileInfo], name: str) -> str:
    if name in files:
        return name
    raise ValueError(f"{str(name)[:80]!r} is no file of the checkpoint")


def dump(content: Any) -> bytes:
    """As JSON, in the one way that there is for it here."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def read_json(path: Path) -> Any:
    """Parse a file of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, is larger than `MOST_JSON`, or is no JSON.
    """
    with open_file(path) as file:
        text = file.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise CheckpointError(f"{path} is larger than any checkpoint has it, {MOST_JSON} bytes; it is damaged")
    return parse(text, str(path))


def open_file(path: Path) -> BufferedReader:
    """Open a file of a checkpoint to read it: a file, no link to elsewhere, no pipe that nobody ever writes to.

    Raises:
        CheckpointError: it is not there, or is no such file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; name the folder of a checkpoint, which holds its files itself"
        ) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise CheckpointError(f"{path} is no file; name the folder of a checkpoint, which holds its files itself")


def passing(path: Path, why: str) -> Path:
    """A name beside a checkpoint that is no checkpoint's."""
    return path.with_name(f".{path.name}.{why}")


def being_replaced(path: Path) -> Path:
    """Where a checkpoint is while another takes its name; still, if the process ended in between."""
    return passing(path, "replaced")


def describe_file(path: Path) -> FileInfo:
    """Size and hash of a file of a checkpoint, as they are."""
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileInfo(file.tell(), digest)
