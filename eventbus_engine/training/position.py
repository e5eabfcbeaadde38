"""Where in its data a run is, and how another run gets there: by the loader's own state, or by a counted skip.

A skip goes through the epoch again, with the generators as they were when it began, and leaves them as they are now. So
the rest of the epoch is what it would have been, whatever the loader, its sampler or its data set have drawn.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from eventbus_engine.errors import CheckpointError
from eventbus_engine.training.data import count_samples
from eventbus_engine.training.generators import check_generators, kept_generators, read_generators, set_generators
from eventbus_engine.training.loader_state import (
    has_state,
    has_warm_workers,
    is_torchdata,
    own_generators,
    read_own_generators,
    set_epoch,
    set_own_generators,
)

__all__ = ["EXHAUSTED", "Position", "Way"]


class _Exhausted:
    def __repr__(self) -> str:
        return "EXHAUSTED"


EXHAUSTED: Final = _Exhausted()
"""What stands for a batch at the end of an epoch."""


@dataclass
class Way:
    """The batches of an epoch that have been trained on, to be passed by: so many, or of so many samples.

    Attributes:
        batches: how many; None where the samples decide.
        samples: of all ranks.
        ranks: how many there are now.
        passed: the batches that are behind.
    """

    batches: int | None
    samples: int
    ranks: int
    passed: int = 0
    _counted: int = 0
    _ended: bool = False

    @property
    def over(self) -> bool:
        """Whether the next batch is to be trained on."""
        if self.batches is None:
            return self._ended or self._counted * self.ranks >= self.samples
        return self.passed >= self.batches

    def pass_by(self, batch: Any) -> None:
        """Count a batch.

        Raises:
            CheckpointError: there is none, where training has got further.
        """
        if batch is not EXHAUSTED:
            self.passed += 1
            if self.batches is None:
                self._counted += count_samples(batch)
        elif self.batches is None:
            self._ended = True
        else:
            raise CheckpointError(
                f"train_dataloader has ended after {self.passed} batches of an epoch in which the checkpoint is at "
                f"{self.batches}; give the data that the run was saved with, or take its weights alone with "
                f"load_weights_only=True"
            )


@dataclass(frozen=True)
class _Resume:
    """What is left to do before the first batch: `saved` is from a rank like this one, if there was one."""

    saved: Mapping[str, Any]
    way: Way


class Position:
    """Keeps count of the batches that a loader has given.

    Args:
        loader: whose they are.

    Attributes:
        epoch: the number of the epoch, for what shuffles by it; None to leave that alone.
    """

    def __init__(self, loader: Any) -> None:
        self.epoch: int | None = None
        self._loader = loader
        self._is_ahead = isinstance(loader, AsyncIterable)  # by a batch, of the one that is trained on
        self._batches = 0
        self._is_held = False  # a batch besides, which the loader has given
        self._start: dict[str, Any] | None = None  # of the epoch in progress
        self._has_iterated = False
        self._resume: _Resume | None = None

    def count(self) -> None:
        """A batch has been given."""
        self._batches, self._is_held = self._batches + 1, False

    def hold(self) -> None:
        """The batch that has just been given waits to be trained on; it is counted again then."""
        self._batches, self._is_held = self._batches - 1, True

    def end(self) -> None:
        """The epoch is over, or given up."""
        self._batches, self._is_held, self._start, self._resume = 0, False, None, None

    def begin(self, device: torch.device) -> Way | None:
        """Before the loader is iterated: note the generators, or say what there is to pass by on the way back."""
        if self.epoch is not None:
            set_epoch(self._loader, self.epoch)
        if self._resume is None:
            self._note_start()
            return None
        if self._resume.saved.get("start") is not None or self._resume.way.samples:
            return self._resume.way
        self._return_between_epochs(self._resume.saved, self._resume.way.batches, device)
        self._resume = None
        self._note_start()
        return None

    @contextmanager
    def returning(self, device: torch.device) -> Iterator[bool]:
        """Around the way back: the generators are meanwhile as they were when the epoch began.

        Yields whether the loader finds the way by itself, so that nothing has to be passed by.
        """
        assert self._resume is not None  # noqa: S101 -- `begin` has said so
        saved, way, loader = self._resume.saved, self._resume.way, self._loader
        with kept_generators(device):
            itself: bool = way.batches is not None and saved.get("loader") is not None and has_state(loader)
            if itself:
                loader.load_state_dict(saved["loader"])
            elif saved.get("warm"):
                self._warm_up()
            if saved.get("start") is not None:
                set_generators(saved["start"]["global"], device)
                set_own_generators(loader, saved["start"]["own"])
            self._note_start()
            yield itself
        if way.batches is not None and not self._is_ahead:
            set_own_generators(loader, saved["own"])
        self._batches, self._resume = way.passed if way.batches is None else way.batches, None

    def state_dict(self) -> dict[str, Any]:
        """Where it is, in plain values and tensors; what `load_state_dict` takes."""
        if self._resume is not None:
            batches = self._resume.way.batches
            return {**self._resume.saved, "batches": batches, "batch_size": _batch_size(self._loader)}
        # Asked before its first iteration, torchdata's would make one, and draw.
        with_state = has_state(self._loader) and self._has_iterated and not (self._is_ahead or self._is_held)
        return {
            "batches": self._batches,
            "batch_size": _batch_size(self._loader),
            "start": self._start,
            "own": read_own_generators(self._loader),
            "warm": self._start["warm"] if self._start is not None else self._is_warm(),
            "loader": self._loader.state_dict() if with_state else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any] | None, samples: int, *, ranks: int, others: bool) -> None:
        """Go there before the next batch.

        Where the batches are not what they were, by their size or by how many ranks share the data, samples are counted
        instead.

        Args:
            saved: what `state_dict` returned, None for a rank that there was not.
            samples: of all ranks, in the epoch in progress.
            ranks: how many there are now.
            others: whether that is not how many there were.
        """
        known = saved or {}
        alike = saved is not None and not others and saved["batch_size"] == _batch_size(self._loader)
        batches = known["batches"] if alike else None
        self.end()
        self._resume = _Resume(known, Way(batches, samples, ranks))

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse what `state_dict` has not returned.

        Raises:
            LookupError, TypeError, ValueError, RuntimeError, AttributeError: from whoever noticed.
        """
        if not (saved["batches"] is None or (type(saved["batches"]) is int and saved["batches"] >= 0)):
            raise ValueError(f"{saved['batches']!r} batches")
        start, scratch = saved["start"], torch.Generator()
        states = [*saved["own"].values(), *(() if start is None else start["own"].values())]
        for state in states if own_generators(self._loader) else ():
            scratch.set_state(state)
        if start is not None:
            check_generators(start["global"])

    def _return_between_epochs(self, saved: Mapping[str, Any], batches: int | None, device: torch.device) -> None:
        loader = self._loader
        with kept_generators(device):
            own = saved.get("loader")
            if own is not None and batches is not None and has_state(loader):
                loader.load_state_dict(own)
                if is_torchdata(loader):
                    self._warm_up()  # with the epoch that was over: the next one is to draw what it would have
            elif saved.get("warm"):
                self._warm_up()
            set_own_generators(loader, saved.get("own", {}))

    def _warm_up(self) -> None:
        """Iterate once for nothing: what follows must not draw what only a first iteration does."""
        iter(self._loader)
        self._has_iterated = True

    def _note_start(self) -> None:
        self._batches = 0
        own = read_own_generators(self._loader)
        self._start = {"global": read_generators(), "own": own, "warm": self._is_warm()}
        self._has_iterated = True

    def _is_warm(self) -> bool:
        return self._has_iterated and has_warm_workers(self._loader)


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None
