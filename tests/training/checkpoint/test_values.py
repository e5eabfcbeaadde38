"""Values as typed JSON: what comes back is what went in, of the same types, and nothing else is taken."""

from __future__ import annotations

import contextlib
import json
import math
from collections import OrderedDict, deque
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training.checkpoint.values import decode, encode, parse


def go_round(value: Any) -> Any:
    """Encode, write, parse and decode."""
    kept: dict[str, Tensor] = {}

    def keep(tensor: Tensor) -> str:
        kept[str(len(kept))] = tensor
        return str(len(kept) - 1)

    text = json.dumps(encode(value, "value", keep), allow_nan=False).encode()
    return decode(parse(text, "text"), "value", kept.__getitem__)


KEYS = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False) | st.binary(max_size=3)
)
LEAVES = KEYS | st.complex_numbers(allow_nan=False) | st.timedeltas() | st.datetimes()
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS | st.just("$tuple"), inner, max_size=4)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 9))
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    """Types included, at any depth; a tuple stays a tuple, a key like one of the marks a key."""
    back = go_round(value)

    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple | deque)


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        -0.0,
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        Time(5, "ep"),
        Time(0.25, "dur"),
        Timestamp(epoch=2, batch=7, total_wct=timedelta(seconds=3)),
        datetime(2020, 1, 2, tzinfo=UTC),
        np.float32(0.1),
        np.int64(3),
        np.bool_(True),
    ],
    ids=repr,
)
def test_a_value_keeps_its_type(value: Any) -> None:
    """Of the libraries that training is made with."""
    back = go_round(value)

    assert (type(back), back) == (type(value), value)
    assert str(back) == str(value)


def test_nan_comes_back() -> None:
    """JSON has no word for it."""
    assert math.isnan(go_round(math.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_tensors_are_kept_apart(dtype: torch.dtype) -> None:
    """Wherever they are in a value."""
    tensor = torch.tensor([[0, 1], [1, 1]], dtype=dtype)
    back = go_round({"a": [tensor, (tensor.sum(),)]})

    assert back["a"][0].equal(tensor)
    assert back["a"][1][0].equal(tensor.sum())


@pytest.mark.parametrize("dtype", ["float64", "uint32", "int8", "bool", "complex64"])
def test_arrays_stay_arrays(dtype: str) -> None:
    """As numpy's generators keep their state in."""
    array = np.arange(4).astype(dtype).reshape(2, 2)
    back = go_round(array)

    assert (type(back), back.dtype) == (np.ndarray, array.dtype)
    assert np.array_equal(back, array)


def test_of_a_subclass_its_base_is_kept() -> None:
    """Nothing in a checkpoint names a class."""

    class Name(StrEnum):
        HERE = "here"

    assert go_round([Name.HERE, OrderedDict(a=1)]) == ["here", {"a": 1}]


@pytest.mark.parametrize("value", [object(), lambda: None, int, np.array([object()]), np.array(["a"])])
def test_any_other_type_is_refused_by_its_place(value: Any) -> None:
    """And so is what an array holds."""
    with pytest.raises(CheckpointError, match=r"algorithms\.ema\.things\[1\] is a.*let state_dict\(\) return"):
        encode({"ema": {"things": [0, value]}}, "algorithms", lambda tensor: "")


def test_what_holds_itself_is_refused() -> None:
    """By a typed error."""
    value: list[Any] = []
    value.append(value)

    with pytest.raises(CheckpointError, match="metrics holds itself"):
        encode(value, "metrics", lambda tensor: "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["$tuple", "$time", "$tensor", "$timestamp", "$dtype", "$device", "$dict", "$deque", "$bytes",
                         "$complex", "$datetime", "$timedelta", "$set", "$size", "$number", "$eval", "a"]),
        inner,
        max_size=2,
    ),
    max_leaves=10,
)  # fmt: skip


@given(JSON)
def test_whatever_a_file_says_is_decoded_or_refused(content: Any) -> None:
    """By the one error for it."""
    with contextlib.suppress(CheckpointError):
        decode(content, "values", {"": torch.zeros(1)}.__getitem__)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000], ids=["empty", "cut", "no text", "deep", "long"]
)
def test_what_is_no_json_is_refused(text: bytes) -> None:
    """Nested too deeply, or a number of too many digits, included."""
    with pytest.raises(CheckpointError, match=r"manifest is no JSON"):
        parse(text, "manifest")
