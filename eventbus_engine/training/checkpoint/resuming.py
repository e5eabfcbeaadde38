"""Which checkpoint a run goes on from, by what its trainer was told."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventbus_engine.errors import CheckpointError, ConfigurationError
from eventbus_engine.training.checkpoint.manifest import MANIFEST
from eventbus_engine.training.checkpoint.participants import load_participants
from eventbus_engine.training.checkpoint.reading import Checkpoint, open_checkpoint
from eventbus_engine.training.checkpoint.restoring import restore
from eventbus_engine.training.checkpoint.storage import find_checkpoints
from eventbus_engine.training.ranks import Ranks
from eventbus_engine.training.state import State

__all__ = ["Resuming"]

log: logging.Logger = logging.getLogger("eventbus_engine")


@dataclass(frozen=True)
class Resuming:
    """Where a run begins, if not at the beginning.

    Attributes:
        path: the checkpoint to load; None to begin anew.
        strict: whether all of it has to fit.
        weights_only: whether to load the model's weights, and to begin anew with them.
        folder: where the run's own checkpoints are, which come first if there is one.
    """

    path: Path | None
    strict: bool
    weights_only: bool
    folder: Path | None

    @staticmethod
    def check(path: Any, strict: Any, weights_only: Any, autoresume: Any, callbacks: Sequence[Any]) -> Resuming:
        """From the trainer's arguments.

        Raises:
            ConfigurationError: one of them does not fit.
        """
        flags = {"load_strict": strict, "load_weights_only": weights_only, "autoresume": autoresume}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name}={value!r}; give True or False")
        if not isinstance(path, str | os.PathLike | None):
            raise ConfigurationError(f"load_path={path!r}; give the folder of a checkpoint, or None to begin anew")
        folder = _folder_of(callbacks) if autoresume else None
        return Resuming(None if path is None else Path(path), strict, weights_only, folder)

    async def load(self, state: State) -> bool:
        """Load the checkpoint to go on from, if there is one; whether it was the run's own.

        Raises:
            CheckpointError: it is damaged, or does not fit the run.
        """
        own = None if self.folder is None else await state.compute(_open_own, state._ranks, self.folder)
        if own is not None:
            await _load(state, own, strict=True, weights_only=False)
        elif self.path is not None:
            checkpoint = await state.compute(_open, state._ranks, self.path)
            await _load(state, checkpoint, strict=self.strict, weights_only=self.weights_only)
        return own is not None


async def _load(state: State, checkpoint: Checkpoint, *, strict: bool, weights_only: bool) -> None:
    # Callbacks live on the event loop, and everything else on the training thread.
    await state.compute(restore, state, state._source, checkpoint, strict=strict, weights_only=weights_only)
    if not weights_only:
        load_participants(checkpoint.values["callbacks"], state.callbacks)


def _open(ranks: Ranks, path: Path) -> Checkpoint:
    with ranks.loading():
        return open_checkpoint(path)


def _open_own(ranks: Ranks, folder: Path) -> Checkpoint | None:
    """One of the run's own. Rank 0 chooses, so that all ranks go on from the same."""
    if not ranks.together:
        return _open_newest(folder)
    with ranks.loading():
        newest = _open_newest(folder) if ranks.leads else None
    told = ranks.hand_down({} if newest is None else {"path": str(newest.path)})
    return _open(ranks, Path(told["path"])) if told else None


def _open_newest(folder: Path) -> Checkpoint | None:
    """The newest that is whole. One that the disk has spoilt since it was written is passed over, and logged.

    Raises:
        CheckpointError: there are some, and none of them can be read: a run that began anew would replace them.
    """
    for path in reversed(find_checkpoints(folder)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            log.error("cannot go on from %s, trying the one before it: %s", path, error)
    spoilt = sorted(found.parent.name for found in folder.glob(f"[!.]*/{MANIFEST}") if not found.parent.is_symlink())
    if spoilt:
        raise CheckpointError(
            f"none of the checkpoints in {folder} can be read: {', '.join(spoilt)}; the log says why; use the release "
            f"that has written them, or move them away to begin anew"
        )
    return None


def _folder_of(callbacks: Sequence[Any]) -> Path:
    """Where the run's CheckpointSaver puts them. Known by its name, so that the two need not import each other."""
    for callback in callbacks:
        if any(cls.__name__ == "CheckpointSaver" for cls in type(callback).__mro__):
            return Path(callback.folder)
    raise ConfigurationError(
        "autoresume=True goes on from the run's own checkpoints, and it writes none; add CheckpointSaver(folder) to "
        "callbacks=, or name a checkpoint with load_path="
    )
