"""Events as bytes and back: what is kept, what is refused, and what no random number is drawn for."""

from __future__ import annotations

import enum
import json
import math
import random
import time
import uuid
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eventbus_engine import Event, SpoolCorruptError, SpoolRecordError, Time, Timestamp
from eventbus_engine.spool import Array, Record, SpooledEvent, decode_event, encode_event, new_id

arrays = st.builds(
    lambda shape: Array("<f4", tuple(shape), bytes(4 * math.prod(shape))), st.lists(st.integers(0, 3), max_size=3)
)
times = st.builds(Time, st.integers(0, 2**60), st.sampled_from(["ep", "ba", "sp", "tok"]))
timestamps = st.builds(
    lambda batch, wct: Timestamp(batch=batch, total_wct=wct),
    st.integers(0, 2**60),
    st.timedeltas(timedelta(0), timedelta(days=365)),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    arrays,
    times,
    timestamps,
)
marks = st.sampled_from(["$bytes", "$dict", "$time", "$array", "$timestamp", "$"])
keys = st.one_of(st.text(), marks)
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=12)


@given(
    event=st.text(min_size=1),
    values=st.dictionaries(keys, values, max_size=4),
    step=st.none() | st.integers(0),
    at=st.integers(0, 2**62),
)
def test_what_is_encoded_decodes_to_the_same(event: str, values: dict[str, Any], step: int | None, at: int) -> None:
    """Everything that can be kept, nested at will, the keys that look like our own marks included."""
    spooled = SpooledEvent(event, values, step, at)

    record = encode_event(spooled)

    assert decode_event(record) == spooled
    assert (record.id, record.time) == (spooled.id, at)
    json.loads(record.data)


def test_what_looks_like_something_plainer_becomes_that() -> None:
    """Tuples, enumerations, subclasses of numbers and strings, tensors of a single number."""

    class Colour(enum.IntEnum):
        RED = 3

    spooled = SpooledEvent(
        Event.BATCH_END,
        {
            "tuple": (1, (2,)),
            "enumeration": Colour.RED,
            "string": Event.INIT,
            "numpy": np.float64(0.5),
            "numpy32": np.float32(0.5),
            "loss": torch.tensor(2.5, requires_grad=True),
            "count": torch.tensor(7),
            "half": torch.tensor(1.5, dtype=torch.bfloat16),
            "flag": torch.tensor(True),
        },
    )

    decoded = decode_event(encode_event(spooled))

    assert decoded.event == "batch_end"
    assert {name: (type(value), value) for name, value in decoded.values.items()} == {
        "tuple": (list, [1, [2]]),
        "enumeration": (int, 3),
        "string": (str, "init"),
        "numpy": (float, 0.5),
        "numpy32": (float, 0.5),
        "loss": (float, 2.5),
        "count": (int, 7),
        "half": (float, 1.5),
        "flag": (bool, True),
    }


def test_nan_and_the_infinities_stay_what_they_are() -> None:
    """A diverged run is when somebody reads the log."""
    decoded = decode_event(encode_event(SpooledEvent("e", {"x": [math.nan, math.inf, -math.inf]}))).values["x"]

    assert math.isnan(decoded[0])
    assert decoded[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=dtype).reshape(2, 3)
        for dtype in ("i1", "u1", "<i2", ">i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", ">f8")
    ]
    + [np.array([[True, False]]), np.zeros((0, 2), "f4"), np.zeros((2, 0), "f4"), np.arange(6.0).reshape(2, 3).T],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_arrays_keep_their_numbers_their_type_and_their_shape(array: Any) -> None:
    """For any library, and without one; in the byte order of the file, whatever the machine's."""
    decoded = decode_event(encode_event(SpooledEvent("e", {"x": array}))).values["x"]

    assert isinstance(decoded, Array)
    assert decoded.tolist() == array.tolist()
    back = np.asarray(decoded)
    assert (back.dtype, back.shape) == (array.dtype.newbyteorder("<"), array.shape)
    assert np.array_equal(back, array)


def test_tensors_come_back_as_arrays() -> None:
    """Off their device and their graph."""
    tensor = torch.arange(6.0).reshape(2, 3).requires_grad_()

    decoded = decode_event(encode_event(SpooledEvent("e", {"x": [tensor]}))).values["x"][0]

    assert torch.equal(torch.as_tensor(np.array(decoded)), tensor.detach())


class Odd:
    """Of no kind that anybody knows."""


class Mocking:
    """Has a shape, and is no array after all."""

    shape = (2,)
    dtype = "odd"

    def __array__(self) -> Any:
        raise ValueError("not really")


def circle() -> list[Any]:
    """A list that holds itself."""
    items: list[Any] = []
    items.append(items)
    return items


class Lost:
    """A tensor that cannot be read any more."""

    def detach(self) -> Any:
        """Fails."""
        raise RuntimeError("device lost")

    cpu = detach


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Odd(), r"metrics is a Odd, which a spool cannot keep; put numbers, .*, or leave it out of the snapshot"),
        ([1, {"a": Odd()}], r"metrics\[1\]\['a'\] is a Odd"),
        ({"a": {1: 2}}, r"metrics\['a'\] has the key 1, and only strings can be keys"),
        ({1, 2}, "metrics is a set"),
        (torch.zeros(2, dtype=torch.bfloat16), r"metrics has the type torch.bfloat16: .*put metrics.float\(\) into"),
        (np.array(["a", "b"]), "metrics is an array of <U1"),
        (np.zeros(2, "c8"), "metrics is an array of <c8"),
        (np.array(1j), "metrics is a complex"),
        (Mocking(), "metrics has the type odd: not really"),
        (np.array(1.5, np.longdouble)[()], r"metrics is a longdouble, .*; put float\(metrics\) into the state"),
        (circle(), "a value of metrics cannot be kept in a spool: RecursionError"),
        ([10**5000], "a value of metrics cannot be kept in a spool: ValueError"),
        (Lost(), "a value of metrics cannot be kept in a spool: RuntimeError: device lost; put numbers, strings"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, message: str) -> None:
    """By the attribute of the state it is in, down to the item, with what to do."""
    with pytest.raises(SpoolRecordError, match=message):
        encode_event(SpooledEvent("batch_end", {"metrics": value}))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"{",
        b"[]",
        b"{}",
        b'{"event":"e","step":null,"values":[]}',
        b'{"event":"e","step":null,"values":{"x":{"$time":[1,"fortnights"]}}}',
        b'{"event":"e","step":null,"values":{"x":{"$timestamp":{}}}}',
        b'{"event":"e","step":null,"values":{"x":{"$bytes":"a"}}}',
    ],
)
def test_bytes_that_are_no_event_are_an_error(data: bytes) -> None:
    """That names the record."""
    with pytest.raises(SpoolCorruptError, match="record id7 of the spool is no event: "):
        decode_event(Record("id7", 0, data))


def generators() -> list[Any]:
    """The states of the global generators."""
    position = np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002 -- the global one is the point
    return [random.getstate(), position, torch.get_rng_state().tolist()]


def test_ids_are_unique_sorted_by_time_and_drawn_privately() -> None:
    """UUIDs of version 7; the program's own random numbers stay what they were."""
    states = generators()
    before = time.time_ns() // 1_000_000

    ids = [uuid.UUID(new_id()) for _ in range(10_000)]

    after = time.time_ns() // 1_000_000
    milliseconds = [identifier.int >> 80 for identifier in ids]
    assert len(set(ids)) == 10_000
    assert {(identifier.version, identifier.variant) for identifier in ids} == {(7, uuid.RFC_4122)}
    assert before <= milliseconds[0]
    assert milliseconds == sorted(milliseconds)
    assert milliseconds[-1] <= after
    assert len({identifier.int & 2**62 - 1 for identifier in ids}) == 10_000
    assert states == generators()
