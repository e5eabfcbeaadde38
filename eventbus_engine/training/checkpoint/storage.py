"""Checkpoints on the disk: folders that appear whole, by a rename, and go the same way."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import save_file

from eventbus_engine.errors import CheckpointError
from eventbus_engine.training.checkpoint.manifest import (
    MANIFEST,
    VALUES,
    FileInfo,
    Manifest,
    being_replaced,
    describe_file,
    dump,
    passing,
    read_json,
)
from eventbus_engine.training.checkpoint.snapshot import Snapshot

__all__ = ["clear_leftovers", "delete_checkpoint", "find_checkpoints", "link_latest", "write_snapshot"]

log: logging.Logger = logging.getLogger("eventbus_engine")

PATIENCE: Final = 600.0
"""Seconds that rank 0 waits for the other ranks' parts of a checkpoint, which they write at the same time."""

_PASSING: Final = re.compile(r"\.(?P<name>.+)\.(?:[0-9a-f]{12}\.(?:writing|deleted|link)|replaced)")
"""The names of what is not a checkpoint yet, or any more."""


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
    folder = passing(path, f"{snapshot.nonce}.writing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _told_by(folder / f"rank{snapshot.rank}"):
            files = _write_files(snapshot, folder)
            if snapshot.rank:
                told = dump({name: asdict(info) for name, info in files.items()})
                return _write(folder / f"rank{snapshot.rank}.part", told)
        for rank in range(1, snapshot.world_size):
            files |= _wait_for(folder, rank, patience)
        manifest = Manifest(
            snapshot.world_size, snapshot.timestamp, files, snapshot.plan.tensors, measured=snapshot.measured
        )
        _write(folder / MANIFEST, dump(manifest.to_json()))
        _flush(folder)
        _give_name(folder, path)
    except Exception as error:
        if not snapshot.rank:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | ValueError | SafetensorError):
            raise CheckpointError(
                f"the checkpoint {path} cannot be written: {error}; the ones before it are as they were"
            ) from error
        raise


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
        if not threading.main_thread().is_alive():
            raise CheckpointError(f"the process ends before rank {rank} has written its part of the checkpoint")
        time.sleep(0.01)
    files = {name: FileInfo(**info) for name, info in read_json(part).items()}
    part.unlink()
    return files


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
    replaced = being_replaced(path)
    if os.path.lexists(path):
        if not _is_checkpoint(path):
            raise CheckpointError(f"{path} is there already, and is no checkpoint; move it away, or save elsewhere")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    folder.rename(path)
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and (path / MANIFEST).is_file()


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint: at once as far as `find_checkpoints` is concerned, whenever the process ends.

    Raises:
        CheckpointError: it is no checkpoint, or cannot be deleted.
    """
    if not _is_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint, and is not deleted")
    doomed = passing(path, f"{os.urandom(6).hex()}.deleted")
    try:
        path.rename(doomed)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be deleted: {error}") from error
    shutil.rmtree(doomed, ignore_errors=True)


def link_latest(link: Path, path: Path) -> None:
    """Have a symbolic link lead to a checkpoint beside it; it leads to one, or the one before, at any time.

    Raises:
        CheckpointError: it cannot be made: there is something else of that name, or the disk has no links.
    """
    made = passing(link, f"{os.urandom(6).hex()}.link")
    try:
        made.symlink_to(path.name)
        made.replace(link)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise CheckpointError(
            f"the link {link} to the checkpoint {path.name} cannot be made: {error}; leave it out by latest=None"
        ) from error


def clear_leftovers(folder: Path) -> None:
    """Remove what killed processes have left of checkpoints in a folder, and put back what was being replaced.

    Not while another process saves there.

    Raises:
        CheckpointError: what was being replaced cannot be put back.
    """
    for entry in sorted(folder.glob(".*")):
        leftover = _PASSING.fullmatch(entry.name)
        if leftover is None:
            continue
        if entry.is_symlink():
            entry.unlink(missing_ok=True)
        elif _is_only_one(entry):
            try:
                entry.rename(folder / leftover["name"])
            except OSError as error:
                raise CheckpointError(f"{entry} cannot be made the checkpoint that it was: {error}") from error
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _is_only_one(entry: Path) -> bool:
    """Whether it was being replaced, and what was to replace it has not got its name."""
    name = entry.name.removeprefix(".").removesuffix(".replaced")
    return entry.suffix == ".replaced" and not os.path.lexists(entry.with_name(name))


def find_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the one of the least batches first. Links and others' folders are left out.

    Whole by their names and sizes, which is what a killed process could leave otherwise; a disk that has lost some of
    their bytes is found out by `open_checkpoint`. What is left out though it has a manifest is logged. One that was
    being replaced when its process was killed is still there, under a name that `clear_leftovers` takes back.
    """
    found: list[tuple[tuple[int | float, ...], Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _is_checkpoint(path) or (path.name.startswith(".") and not _is_only_one(path)):
            continue
        try:
            manifest = Manifest.read(path)
            whole = all((path / name).lstat().st_size == info.size for name, info in manifest.files.items())
        except (CheckpointError, OSError) as error:
            log.warning("%s is left out: %s", path, error)  # of a newer format, damaged, or just being deleted
            continue
        if whole:
            found.append((manifest.position, path))
        else:
            log.warning("%s is left out: one of its files has another size than it was written with", path)
    return [path for _, path in sorted(found)]
