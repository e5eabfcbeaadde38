"""Saving checkpoints in the course of training, by a thread beside it."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import anyio
import anyio.to_thread
import torch.distributed as dist

from eventbus_engine.callback import Callback
from eventbus_engine.errors import CheckpointError, ConfigurationError
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training.arguments import INTERVAL_UNITS, check_duration
from eventbus_engine.training.callbacks._common import check_count, less_is_better
from eventbus_engine.training.checkpoint.contents import collect
from eventbus_engine.training.checkpoint.manifest import Manifest
from eventbus_engine.training.checkpoint.participants import apart, describe_participants
from eventbus_engine.training.checkpoint.snapshot import Snapshot, take_snapshot
from eventbus_engine.training.checkpoint.storage import (
    clear_leftovers,
    delete_checkpoint,
    find_checkpoints,
    link_latest,
    write_snapshot,
)
from eventbus_engine.training.evaluator import is_due
from eventbus_engine.training.state import State

__all__ = ["CheckpointSaver"]

log: logging.Logger = logging.getLogger("eventbus_engine")

Mode: TypeAlias = Literal["min", "max"]

_COUNTERS: Final = ("iteration", "epoch", "batch", "sample", "token")


class CheckpointSaver(Callback[State]):
    """Save the run to a folder, every so often and at the end of `fit`.

    The run waits for a copy to memory. A thread writes it, and the checkpoint appears when all of it is on the disk:
    whatever ends the process leaves whole checkpoints only. One is written at a time; a save that is due while the one
    before is being written waits for that. A write that fails is raised at the next save, which is begun all the same,
    or at the end of `fit`.

    In a job of several ranks each writes its own part, to a folder that all of them see.

    Args:
        folder: where the checkpoints go; made if it is not there. It is to hold those of one run.
        interval: how often: `"1ep"` (default), `"500ba"`, `"30m"`, or any other duration, `"0.1dur"` for a tenth of the
            run.
        filename: what a checkpoint is called, with `{iteration}`, `{epoch}`, `{batch}`, `{sample}`, `{token}` in it.
            One that comes by again is replaced.
        keep: how many of the newest to keep, 1 or more; None (default) for all.
        keep_best: how many of the best to keep besides; 0 by default.
        metric: what the best are told by, as it is called in `state.metrics`: `"metrics/eval/accuracy"`. A checkpoint
            counts if an evaluation has measured it just before it was saved.
        mode: `"min"` if less is better, `"max"` if more is. By default less is if there is `loss`, `error` or
            `perplexity` in the name of the metric.
        latest: the name of a symbolic link to the newest checkpoint; None for none.

    Attributes:
        folder: where the checkpoints go.

    Raises:
        ConfigurationError: an argument does not fit.
        TimeFormatError: the interval does not parse.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        interval: str | int | Time = "1ep",
        *,
        filename: str = "ep{epoch}-ba{batch}",
        keep: int | None = None,
        keep_best: int = 0,
        metric: str | None = None,
        mode: Mode | None = None,
        latest: str | None = "latest",
    ) -> None:
        super().__init__()
        self.folder: Path = Path(folder)
        self.interval: Time = check_duration("CheckpointSaver: interval", interval, INTERVAL_UNITS)
        self.filename: str = filename
        self.metric: str | None = metric
        self.latest: str | None = latest
        _check_names(filename, latest)
        if keep is not None:
            check_count("CheckpointSaver", "keep", keep, 1)
        if check_count("CheckpointSaver", "keep_best", keep_best, 0) and not metric:
            raise ConfigurationError(
                f"CheckpointSaver: keep_best={keep_best} needs a metric to tell the best by; give metric=, such as "
                f"'metrics/eval/loss'"
            )
        if mode not in (None, "min", "max"):
            raise ConfigurationError(f"CheckpointSaver: mode={mode!r} has to be 'min' or 'max'")
        sign = 1 if mode == "min" or (mode is None and less_is_better(metric or "")) else -1
        self._retention = _Retention(keep, keep_best, sign)
        self._measured: tuple[Time[int], dict[str, float]] = (Time(-1, "ba"), {})
        self._ready = False
        self._seen = Timestamp()  # the last moment at which it was asked whether to save
        self._saved_at: tuple[Time[int], Time[int]] | None = None
        self._write: _Write | None = None
        self._spent: Snapshot | None = None

    async def fit_start(self, state: State, logger: Logger) -> None:
        """Clear what a killed run has left, and take over the checkpoints of the run that this one goes on from.

        Raises:
            CheckpointError: the folder cannot be used.
        """
        self._seen = state.timestamp
        if not self._ready and (not dist.is_initialized() or dist.get_rank() == 0):
            await anyio.to_thread.run_sync(self._prepare, state.timestamp)
        self._ready = True

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Note what has been measured, and when."""
        measured = {name: float(value) for name, value in state.metrics.items()}
        self._measured = state.timestamp.batch, measured

    def batch_checkpoint(self, state: State, logger: Logger) -> Awaitable[None] | None:
        """Save if it is time to.

        Raises:
            CheckpointError: the write before has failed, or the state of the run cannot be kept.
        """
        before, self._seen = self._seen, state.timestamp
        return self._save(state) if is_due(self.interval, before, state.timestamp, state.max_duration) else None

    def epoch_checkpoint(self, state: State, logger: Logger) -> Awaitable[None] | None:
        """Save if it is time to.

        Raises:
            CheckpointError: the write before has failed, or the state of the run cannot be kept.
        """
        return self.batch_checkpoint(state, logger)

    async def fit_end(self, state: State, logger: Logger) -> None:
        """Save the end of the run, and wait until it is on the disk.

        Raises:
            CheckpointError: a write has failed, or the state of the run cannot be kept.
            ConfigurationError: no checkpoint has been saved just after the metric was measured.
        """
        if self._saved_at != _place(state):
            await self._save(state)
        await self._finish()
        if self._retention.lacks_metric:
            measured = ", ".join(sorted(self._measured[1])) or "nothing has been measured"
            raise ConfigurationError(
                f"CheckpointSaver: {self.metric} was not measured just before any checkpoint was saved; give an "
                f"interval= at which there is an evaluation, and as metric= what that measures: {measured}"
            )

    async def close(self, state: State, logger: Logger) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._spent = None
        await self._finish()

    async def _save(self, state: State) -> None:
        failure = await self._written()
        at, metrics = self._measured
        measured = metrics if at == state.timestamp.batch else {}
        callbacks = apart(describe_participants(state.callbacks))  # here, where they run
        snapshot = await state.compute(self._take, state, callbacks, measured)
        self._saved_at = _place(state)
        self._retention.lacks_metric &= self.metric not in measured
        path = self.folder / _name(self.filename, state.timestamp)
        self._write = _Write(lambda: self._keep(snapshot, path))
        self._spent = snapshot  # not before it is written: the next save waits for that first
        if failure is not None:
            raise failure

    def _take(self, state: State, callbacks: dict[str, Any], measured: dict[str, float]) -> Snapshot:
        contents = collect(state, state._source, callbacks)
        return take_snapshot(replace(contents, measured=measured), self._spent)

    async def _written(self) -> Exception | None:
        """Wait until nothing is being written; what the last write has failed of."""
        if self._write is None:
            return None
        failure = await self._write.wait()
        self._write = None
        return failure

    async def _finish(self) -> None:
        if (failure := await self._written()) is not None:
            raise failure

    # ------------------------------------------------------------------------------------------- beside the training

    def _prepare(self, now: Timestamp) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be saved to {self.folder}: {error}") from error
        clear_leftovers(self.folder)
        saved = [(path, Manifest.read(path)) for path in find_checkpoints(self.folder)]
        # It goes on from one of them. Without that they are others', whatever they are called.
        ahead = [path.name for path, manifest in saved if manifest.position > _position(now.state_dict())]
        if ahead:
            log.warning(
                "%s has checkpoints of a run that got further, %s: autoresume would go on from them; move them away",
                self.folder,
                ", ".join(ahead),
            )
        begun = next((manifest for _, manifest in saved if manifest.timestamp == now.state_dict()), None)
        if begun is not None:
            for path, manifest in saved:
                if manifest.position <= begun.position:
                    self._retention.add(_Saved(path, manifest.position, manifest.measured.get(self.metric or "")))

    def _keep(self, snapshot: Snapshot, path: Path) -> None:
        write_snapshot(snapshot, path)
        if snapshot.rank:
            return
        log.info("saved the checkpoint %s", path)
        if self.latest is not None:
            link_latest(self.folder / self.latest, path)
        self._retention.add(_Saved(path, _position(snapshot.timestamp), snapshot.measured.get(self.metric or "")))
        for doomed in self._retention.drop():
            if doomed.exists():  # else somebody has tidied up
                delete_checkpoint(doomed)


def _place(state: State) -> tuple[Time[int], Time[int]]:
    return state.timestamp.batch, state.timestamp.epoch


def _position(timestamp: Mapping[str, int | float]) -> tuple[int | float, ...]:
    return tuple(timestamp[counter] for counter in ("batch", "epoch", "iteration"))


def _name(filename: str, timestamp: Timestamp) -> str:
    return filename.format(**{counter: int(getattr(timestamp, counter)) for counter in _COUNTERS})


def _check_names(filename: str, latest: str | None) -> None:
    try:
        name = _name(filename, Timestamp())
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"CheckpointSaver: filename={filename!r} has something else in braces than {', '.join(_COUNTERS)}"
        ) from error
    for argument, value in (("filename", name), ("latest", latest)):
        if value is not None and (not value or value != Path(value).name or value.startswith(".")):
            raise ConfigurationError(
                f"CheckpointSaver: {argument}={value!r} has to be a plain name in the folder, without a path or a dot "
                f"before it; give another folder= instead"
            )
    if name == latest:
        raise ConfigurationError(f"CheckpointSaver: filename and latest are both {name!r}; give one another name")


class _Write:
    """A thread that writes one checkpoint.

    It is no daemon: a process that comes to its end waits until this one is on the disk.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: Exception | None = None
        self._left = False
        self._thread = threading.Thread(target=self._run, name="eventbus-engine-checkpoint", daemon=False)
        self._thread.start()

    async def wait(self) -> Exception | None:
        """What it has failed of, once it is over. Whoever is cancelled leaves it to its work."""
        try:
            if self._thread.is_alive():
                await anyio.to_thread.run_sync(self._thread.join, abandon_on_cancel=True)
        except BaseException:
            self._left = True
            raise
        self._left = False
        return self._failure

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._failure = error
            if self._left:
                log.error("a checkpoint could not be saved", exc_info=error)


@dataclass(frozen=True)
class _Saved:
    """A checkpoint of the run, how far it is, and what was measured there."""

    path: Path
    position: tuple[int | float, ...]
    value: float | None


class _Retention:
    """Which checkpoints to keep.

    Attributes:
        lacks_metric: whether the best are wanted and none has had the metric yet.
    """

    def __init__(self, keep: int | None, keep_best: int, sign: int) -> None:
        self._keep = keep
        self._keep_best = keep_best
        self._sign = sign
        self._saved: list[_Saved] = []
        self.lacks_metric: bool = bool(keep_best)

    def add(self, saved: _Saved) -> None:
        """Another one, instead of any of that name."""
        self._saved = [*(other for other in self._saved if other.path != saved.path), saved]

    def drop(self) -> list[Path]:
        """Those that are too many, forgotten here."""
        if self._keep is None:
            return []
        newest = sorted(self._saved, key=lambda saved: saved.position)[-self._keep :]
        # Of equals the earlier one is the better: it took less.
        ranked = sorted(
            (self._sign * saved.value, saved.position, saved.path)
            for saved in self._saved
            if saved.value is not None and math.isfinite(saved.value)
        )
        kept = {saved.path for saved in newest} | {path for _, _, path in ranked[: self._keep_best]}
        dropped = [saved.path for saved in self._saved if saved.path not in kept]
        self._saved = [saved for saved in self._saved if saved.path in kept]
        return dropped
