"""The global random generators that training draws from: Python's, torch's, and numpy's where it is imported."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["check_generators", "kept_generators", "read_generators", "seed_generators", "set_generators"]

_MT19937_NUMBERS = 624


def seed_generators(seed: int) -> None:
    """Seed them all: data order, dropout, initialisation at INIT then follow from it."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(seed)


def read_generators(device: torch.device | None = None) -> dict[str, Any]:
    """Their states, as copies in plain values and tensors; on CUDA the device's own is one of them.

    Args:
        device: where the training runs. Default: on the processor.
    """
    version, internal, gauss = random.getstate()
    # A tensor for the numbers: as JSON, they would take longer than all the rest.
    states: dict[str, Any] = {"python": (version, torch.tensor(internal), gauss), "torch": torch.get_rng_state()}
    if (numpy := _numpy()) is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    if device is not None and device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generators(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Put them into states that were read; one that has none, as numpy's may, stays as it is."""
    random.setstate(_python_state(states))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := _numpy()) is not None:
        numpy.random.set_state(states["numpy"])
    if "cuda" in states and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def check_generators(states: Mapping[str, Any]) -> None:
    """Refuse what are no states, by putting generators of our own into them.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError, AttributeError: from whoever noticed.
    """
    random.Random().setstate(_python_state(states))
    torch.Generator().set_state(states["torch"])
    if "numpy" in states and (numpy := _numpy()) is not None:
        numpy.random.RandomState().set_state(states["numpy"])
        if not 0 <= states["numpy"]["state"]["pos"] <= _MT19937_NUMBERS:  # numpy itself would read what is behind them
            raise ValueError(f"a position of {states['numpy']['state']['pos']} in {_MT19937_NUMBERS} numbers")
    if "cuda" in states and states["cuda"].dtype != torch.uint8:
        raise TypeError(f"a state of {states['cuda'].dtype}")


@contextmanager
def kept_generators(device: torch.device | None = None) -> Iterator[None]:
    """The global generators afterwards as before: a `DataLoader` draws from torch's whenever it is iterated.

    Training goes on with the numbers that it would have drawn without what happens inside.
    """
    kept = read_generators(device)
    try:
        yield
    finally:
        set_generators(kept, device)


def _python_state(states: Mapping[str, Any]) -> tuple[Any, ...]:
    version, internal, gauss = states["python"]
    return version, tuple(internal.tolist()), gauss


def _numpy() -> Any:
    """Where nobody has imported it, nobody draws from it."""
    return sys.modules.get("numpy")
