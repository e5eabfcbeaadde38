"""What becomes of log values: plain Python, whatever library they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from eventbus_engine.loggers.plain import plain


class Colour(Enum):
    """An enumeration that is no string."""

    RED = "red"


@dataclass
class Point:
    """A record with a tensor in it."""

    x: Any
    at: Path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (np.bool_(True), True),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (torch.tensor(0.25, requires_grad=True), 0.25),
        (torch.tensor(3, dtype=torch.int8), 3),
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), [1.5, 2.5]),
        (Colour.RED, "red"),
        ({Colour.RED: (1, {2})}, {"red": [1, [2]]}),
        ({1: {"b", "a"}}, {"1": ["a", "b"]}),
        (Point(torch.tensor(1), Path("a/b")), {"x": 1, "at": "a/b"}),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00+00:00"),
        (ValueError("no"), "ValueError: no"),
        (Fraction(1, 3), "1/3"),
        (Point, str(Point)),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    """Scalars out of tensors, lists out of arrays, strings out of the rest."""
    actual = plain(value)

    assert actual == expected
    assert type(actual) is type(expected)


def test_floats_that_json_lacks_stay_floats() -> None:
    """How to write them is the writer's business."""
    nan, infinity = plain([torch.tensor(math.nan), np.inf])

    assert math.isnan(nan)
    assert infinity == math.inf


def test_a_mock_is_not_taken_for_an_array() -> None:
    """It has every method, `tolist` included, and returns itself for ever."""
    mock = Mock()

    assert plain(mock) == str(mock)


def test_the_result_shares_nothing_with_the_value() -> None:
    """What is logged is what was logged, whatever the caller does afterwards."""
    value = {"nested": [1]}
    kept = plain(value)
    value["nested"].append(2)

    assert kept == {"nested": [1]}
