"""Batches of every shape: read, changed, counted, moved and split."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eventbus_engine.errors import BatchError
from eventbus_engine.training.data import (
    count_samples,
    count_tokens,
    describe,
    get_item,
    move,
    set_item,
    split,
)

CPU = torch.device("cpu")


class Pair(NamedTuple):
    """A named tuple, as some data sets yield."""

    image: Tensor
    label: Tensor


@dataclass
class Sample:
    """A batch with attributes."""

    image: Tensor
    label: Tensor


IMAGES, LABELS = torch.arange(12.0).reshape(6, 2), torch.arange(6)

CONTAINERS: dict[str, tuple[Any, Any]] = {
    "tuple": ((IMAGES, LABELS), 1),
    "list": ([IMAGES, LABELS], 1),
    "named tuple": (Pair(IMAGES, LABELS), 1),
    "dict": ({"image": IMAGES, "label": LABELS}, "label"),
    "mapping of a framework": (OrderedDict(image=IMAGES, label=LABELS), "label"),
    "named tuple by name": (Pair(IMAGES, LABELS), "label"),
    "dataclass": (Sample(IMAGES, LABELS), "label"),
}


@pytest.mark.parametrize(("batch", "key"), CONTAINERS.values(), ids=CONTAINERS)
def test_an_item_is_read_and_replaced_without_touching_the_data_set(batch: Any, key: int | str) -> None:
    """The batch may be the data set's own object: what is replaced is replaced in a copy, of the same type."""
    before = get_item(batch, key)
    changed = set_item(batch, key, "new")
    actual = type(changed), get_item(changed, key), get_item(batch, key) is before is LABELS

    assert actual == (type(batch), "new", True)


def test_a_row_of_a_tensor_is_replaced_in_a_copy() -> None:
    """A copied tensor shares its memory, so it takes a clone."""
    batch = torch.zeros(2, 2)
    changed = set_item(batch, 0, 1.0)

    assert (changed.tolist(), batch.tolist()) == ([[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]])


def test_functions_read_and_replace_what_no_key_reaches() -> None:
    """One function, or a pair of them; one that returns nothing has changed the batch itself."""
    batch = {"inner": {"label": 1}}

    def read(batch: Any) -> Any:
        return batch["inner"]["label"]

    def replace(batch: Any, value: Any) -> Any:
        return {"inner": {"label": value}}

    def write(batch: Any, value: Any) -> None:
        batch["inner"]["label"] = value

    pair = (read, replace)
    replaced = set_item(batch, replace, 2)
    by_pair = set_item(batch, pair, 3)
    written = set_item(batch, write, 4)

    assert (get_item(batch, read), get_item(batch, pair)) == (4, 4)
    assert (read(replaced), read(by_pair), written is batch) == (2, 3, True)


@pytest.mark.parametrize(("batch", "key"), [((IMAGES,), 1), ({"image": IMAGES}, "label"), ((IMAGES,), "label")])
def test_a_missing_item_is_named_with_the_batch(batch: Any, key: int | str) -> None:
    """The error shows what the batch holds, so that the right key can be picked."""
    with pytest.raises(BatchError, match=rf"has no item {key!r}") as caught:
        get_item(batch, key)

    assert "Tensor[6, 2]" in str(caught.value)


@pytest.mark.parametrize(("batch", "key"), [((IMAGES,), 1), ((IMAGES,), "label"), ([IMAGES], 3), ("text", 0)])
def test_an_item_that_cannot_be_set_is_named_with_the_cure(batch: Any, key: int | str) -> None:
    """A pair of functions always works."""
    with pytest.raises(BatchError, match=r"cannot be set; use .* a pair of functions"):
        set_item(batch, key, LABELS)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IMAGES, 6),
        ((IMAGES, LABELS), 6),
        ({"meta": "x", "scale": torch.tensor(2.0), "nested": {"ids": LABELS}}, 6),
        (range(0), BatchError),
        ("text", BatchError),
        ((), BatchError),
        ((torch.tensor(1.0), 3), BatchError),
        (17, BatchError),
        (Sample(IMAGES, LABELS), 6),
        ({1, 2}, 2),
    ],
)
def test_samples_are_counted_by_the_first_tensor_with_a_first_dimension(batch: Any, expected: Any) -> None:
    """A batch of another kind counts by its length; one without anything to count is refused by its type."""
    if expected is BatchError:
        with pytest.raises(BatchError, match=f"yielded {type(batch).__name__}.*DataLoader does"):
            count_samples(batch)
    else:
        actual = count_samples(batch)

        assert actual == expected


def test_tokens_are_the_elements_of_input_ids() -> None:
    """Any other batch has none."""
    actual = [count_tokens(batch) for batch in ({"input_ids": torch.zeros(2, 5)}, {"ids": LABELS}, (IMAGES, LABELS))]

    assert actual == [10, 0, 0]


def test_every_tensor_moves_and_the_containers_stay_what_they_were() -> None:
    """Moved to `meta`, where no data is, it shows on any machine."""

    class Movable:
        def __init__(self, device: torch.device = CPU) -> None:
            self.device = device

        def to(self, device: torch.device) -> Movable:
            return Movable(device)

    meta = torch.device("meta")
    batch = {"pair": Pair(IMAGES, LABELS), "sample": Sample(IMAGES, LABELS), "list": [Movable()], "name": "x"}
    moved = move(batch, meta)
    tensors = [moved["pair"].image, moved["pair"].label, moved["sample"].image, moved["list"][0]]

    assert (type(moved["pair"]), type(moved["sample"]), moved["name"]) == (Pair, Sample, "x")
    assert {tensor.device for tensor in tensors} == {meta}


@given(samples=st.integers(1, 40), parts=st.integers(1, 12))
def test_microbatches_are_the_batch_in_order(samples: int, parts: int) -> None:
    """No sample is lost or doubled, there are no more parts than asked for, and all but the last are equal."""
    batch: dict[str, Any] = {
        "x": torch.arange(samples),
        "y": (torch.arange(samples) * 2, "same"),
        "names": [f"n{i}" for i in range(samples)],
    }
    cut = split(batch, parts)
    sizes = [len(part["x"]) for part in cut]

    assert torch.cat([part["x"] for part in cut]).equal(batch["x"])
    assert torch.cat([part["y"][0] for part in cut]).equal(torch.arange(samples) * 2)
    assert [name for part in cut for name in part["names"]] == batch["names"]
    assert {part["y"][1] for part in cut} == {"same"}
    assert len(cut) <= parts
    assert len(set(sizes[:-1])) <= 1
    assert 0 < sizes[-1] <= sizes[0]


def test_an_empty_batch_is_refused() -> None:
    """An algorithm that drops all samples would make the mean loss NaN."""
    with pytest.raises(BatchError, match=r"Tensor\[0, 2\], has no samples left to train on"):
        split(IMAGES[:0], 1)


@pytest.mark.parametrize(
    ("batch", "offender"),
    [((IMAGES, LABELS[:4]), r"tensor of shape \(4,\)"), ((IMAGES, {1, 2}), "a set in the batch")],
)
def test_what_cannot_be_split_is_named(batch: Any, offender: str) -> None:
    """Guessing which rows belong together would falsify the training."""
    with pytest.raises(BatchError, match=f"{offender}.*microbatches=1"):
        split(batch, 2)


def test_a_scalar_tensor_goes_into_every_part() -> None:
    """It belongs to no sample."""
    actual = [part[1].item() for part in split((IMAGES, torch.tensor(0.5)), 3)]

    assert actual == [0.5, 0.5, 0.5]


def test_a_description_is_short() -> None:
    """It goes into error messages."""
    actual = describe([(IMAGES, LABELS), {"a": 1}, "x", None, 5, 6])

    assert actual == "list(tuple(Tensor[6, 2], Tensor[6]), dict(a: int), str, NoneType, ...)"
