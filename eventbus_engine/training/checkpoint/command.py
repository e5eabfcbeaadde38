"""What `eventbus-engine checkpoint …` does."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eventbus_engine.errors import CheckpointError
from eventbus_engine.training.checkpoint.manifest import FileInfo, Manifest, TensorInfo
from eventbus_engine.training.checkpoint.reading import Checkpoint, check_file, read_checked
from eventbus_engine.training.checkpoint.storage import find_checkpoints

__all__ = ["inspect"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def inspect(path: Path, *, tensors: bool = False) -> int:
    """Print what a checkpoint is made of, and whether it is as it was written; returns the exit code.

    Args:
        path: its folder, or a link to it.
        tensors: list them.
    """
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return _fail(f"{error}{_near(path)}")
    _print(_head(path, manifest))
    found = [_print_file(path, name, info) for name, info in manifest.files.items()]
    if damaged := [wrong for wrong in found if wrong is not None]:
        return _fail(str(damaged[0]))
    try:
        checkpoint = read_checked(path, manifest)
    except CheckpointError as error:
        return _fail(str(error))
    _print(_participants(checkpoint.values))
    _print(_tensors(checkpoint, listed=tensors))
    return 0


def _near(path: Path) -> str:
    """The checkpoints in a folder that is none."""
    found = [found.name for found in find_checkpoints(path)]
    return f"; there are {', '.join(found)} in it" if found else ""


def _head(path: Path, manifest: Manifest) -> Iterator[str]:
    yield f"checkpoint  {path}"
    yield f"format      {manifest.format}"
    yield f"written by  {manifest.world_size} rank{'s' * (manifest.world_size != 1)}"
    if manifest.timestamp:
        yield "how far     " + ", ".join(
            f"{counter} {manifest.timestamp.get(counter, 0)}" for counter in ("epoch", "batch", "sample", "token")
        )
    for name, value in manifest.measured.items():
        yield f"measured    {name} = {value:g}"


def _print_file(path: Path, name: str, info: FileInfo) -> CheckpointError | None:
    """A line about a file; what is wrong with it."""
    try:
        check_file(path / name, info)
    except CheckpointError as error:
        _print([f"file        {name}  {_size(info.size)}  DAMAGED"])
        return error
    _print([f"file        {name}  {_size(info.size)}  as written"])
    return None


def _participants(values: Mapping[str, Any]) -> Iterator[str]:
    for kind, title in (("algorithms", "algorithm   "), ("callbacks", "callback    ")):
        kept = values.get(kind)
        for name, about in kept.items() if isinstance(kept, dict) else ():
            required = isinstance(about, dict) and about.get("required") is True
            yield f"{title}{name}{'  required on load' if required else ''}"


def _tensors(checkpoint: Checkpoint, *, listed: bool) -> Iterator[str]:
    tensors = checkpoint.manifest.tensors
    yield f"tensors     {len(tensors)}, {_size(sum(map(_bytes, tensors.values())))}"
    for name, info in tensors.items() if listed else ():
        parts = f"  in {len(info.parts)} parts" if len(info.parts) > 1 else ""
        yield f"  {name}  {str(info.dtype).removeprefix('torch.')} {list(info.shape)}  {_size(_bytes(info))}{parts}"


def _bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _size(number: float) -> str:
    unit = 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.4g} {_UNITS[unit]}"


def _print(lines: Iterator[str] | list[str]) -> None:
    # A name is what whoever made the checkpoint has called it: nothing in it is to reach the terminal as a command.
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        shown = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in line)
        sys.stdout.write(shown.encode(encoding, errors="backslashreplace").decode(encoding) + "\n")


def _fail(message: str) -> int:
    sys.stderr.write(f"eventbus-engine: {message}\n")
    return 1
