"""The global generators of a run: seeded, kept, put back, and not put into what is no state."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from eventbus_engine.training.generators import (
    check_generators,
    kept_generators,
    read_generators,
    seed_generators,
    set_generators,
)


def draw() -> tuple[float, ...]:
    """The next number of each."""
    return random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002


def test_generators_go_on_from_what_was_read() -> None:
    """All of them, Python's with half of a pair of normal numbers in it."""
    random.gauss(0, 1)
    states = read_generators()
    check_generators(states)
    expected = random.gauss(0, 1), draw()
    seed_generators(3)
    set_generators(states)

    assert (random.gauss(0, 1), draw()) == expected


def test_what_happens_inside_leaves_them_as_they_were() -> None:
    """Also where it fails."""
    seed_generators(3)
    expected = draw()
    seed_generators(3)
    with contextlib.suppress(RuntimeError), kept_generators():
        draw()
        raise RuntimeError

    assert draw() == expected


def test_numpy_is_left_alone_where_nobody_has_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of it, from a run that had, is passed over."""
    states = read_generators()
    monkeypatch.delitem(sys.modules, "numpy")
    seed_generators(3)
    set_generators(states)
    check_generators(states)

    assert "numpy" not in read_generators()


def test_the_seed_that_a_run_without_one_goes_by_is_part_of_the_state() -> None:
    """Private generators are derived from `torch.initial_seed()` there."""
    torch.manual_seed(41)
    states = read_generators()
    torch.manual_seed(42)
    set_generators(states)

    assert torch.initial_seed() == 41


def _numpy_at(position: int) -> dict[str, Any]:
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002
    return state | {"state": state["state"] | {"pos": position}}


@pytest.mark.parametrize(
    "damage",
    [
        {"python": (3, torch.zeros(625, dtype=torch.int64) + 700, None)},
        {"python": "random"},
        {"torch": torch.zeros(16, dtype=torch.uint8)},
        {"numpy": {"bit_generator": "PCG64", "state": {}}},
        {"numpy": _numpy_at(700)},
        {"numpy": _numpy_at(-1)},
        {"cuda": torch.zeros(16)},
    ],
)
def test_what_is_no_state_is_refused_before_it_is_set(damage: dict[str, Any]) -> None:
    """A position behind its numbers, which numpy would read, included."""
    with pytest.raises((ValueError, TypeError, LookupError, RuntimeError, AttributeError)):
        check_generators(read_generators() | damage)
