"""What a loader is made of that draws or counts: its generators, its samplers' epoch, a state of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "has_state",
    "has_warm_workers",
    "is_torchdata",
    "own_generators",
    "read_own_generators",
    "set_epoch",
    "set_own_generators",
]

_PARTS = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    for path in _PARTS:
        part = loader
        for name in filter(None, path.split(".")):
            part = getattr(part, name, None)
        if part is not None:
            yield path, part


def own_generators(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a loader was given, as its own `generator` or that of its sampler or data set; by where."""
    found: dict[str, torch.Generator] = {}
    for path, part in _parts(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found.values():  # it hands its own on
            found[path] = generator
    return found


def read_own_generators(loader: Any) -> dict[str, Tensor]:
    """Their states, copied."""
    return {path: generator.get_state() for path, generator in own_generators(loader).items()}


def set_own_generators(loader: Any, states: Mapping[str, Tensor]) -> None:
    """Put them into states that were read; one that has none stays as it is."""
    for path, generator in own_generators(loader).items():
        if path in states:
            generator.set_state(states[path])


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the number of the epoch to whatever shuffles by it: a distributed sampler, a streamed data set."""
    for _, part in _parts(loader):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


def has_state(loader: Any) -> bool:
    """Whether the loader can say where it is, and go on from there, by itself."""
    return all(callable(getattr(loader, method, None)) for method in ("state_dict", "load_state_dict"))


def has_warm_workers(loader: Any) -> bool:
    """Whether the loader keeps its worker processes from epoch to epoch; only the first one then draws their seed."""
    return bool(getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0))


def is_torchdata(loader: Any) -> bool:
    """Whether it is torchdata's StatefulDataLoader."""
    module: Any = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)
