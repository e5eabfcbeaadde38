"""Checkpoints: what a run is made of, on the disk, with nothing in it that could run."""

from eventbus_engine.training.checkpoint.contents import Contents
from eventbus_engine.training.checkpoint.manifest import Manifest
from eventbus_engine.training.checkpoint.reading import Checkpoint, open_checkpoint
from eventbus_engine.training.checkpoint.snapshot import Snapshot, take_snapshot
from eventbus_engine.training.checkpoint.storage import (
    clear_leftovers,
    delete_checkpoint,
    find_checkpoints,
    link_latest,
    write_snapshot,
)

__all__ = [
    "Checkpoint",
    "Contents",
    "Manifest",
    "Snapshot",
    "clear_leftovers",
    "delete_checkpoint",
    "find_checkpoints",
    "link_latest",
    "open_checkpoint",
    "take_snapshot",
    "write_snapshot",
]
