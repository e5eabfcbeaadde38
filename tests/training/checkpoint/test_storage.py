"""Storage of checkpoints: copied at once, written whole or not at all, read as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Timestamp
from eventbus_engine.training.checkpoint import (
    Contents,
    clear_leftovers,
    find_checkpoints,
    open_checkpoint,
    take_snapshot,
    write_snapshot,
)


def contents(batch: int = 3, **tensors: torch.Tensor) -> Contents:
    """A small run."""
    values: dict[str, Any] = {"timestamp": Timestamp(batch=batch), "algorithms": {"ema": {"average": torch.ones(2)}}}
    return Contents(
        tensors or {"model.weight": torch.arange(6.0).reshape(2, 3)}, values, {"generator": torch.get_rng_state()}
    )


def test_what_is_read_is_what_was_kept(tmp_path: Path) -> None:
    """Tensors, values and the rank's own."""
    kept = contents(
        weight=torch.rand(3, 4), scalar=torch.tensor(2.5), none=torch.empty(0, 3), half=torch.ones(2).bfloat16()
    )
    write_snapshot(take_snapshot(kept), tmp_path / "one")
    checkpoint = open_checkpoint(tmp_path / "one")
    into = {name: torch.zeros_like(tensor) for name, tensor in kept.tensors.items()}
    checkpoint.read(into)

    assert {name: tensor.tolist() for name, tensor in into.items()} == {
        name: tensor.tolist() for name, tensor in kept.tensors.items()
    }
    assert checkpoint.values["timestamp"] == kept.values["timestamp"]
    assert checkpoint.values["algorithms"]["ema"]["average"].tolist() == [1.0, 1.0]
    own = checkpoint.rank_values(0)
    assert own is not None
    assert own["generator"].equal(torch.get_rng_state())
    assert checkpoint.rank_values(1) is None


def test_a_snapshot_is_not_touched_by_what_comes_after(tmp_path: Path) -> None:
    """The tensors, those in the values, and the values themselves."""
    model, average = nn.Linear(2, 2), torch.zeros(2)
    before = model.weight.detach().clone()
    snapshot = take_snapshot(Contents(dict(model.named_parameters()), {"average": average, "list": (inner := [1])}))
    with torch.no_grad():
        model.weight += 1
    average += 1
    inner.append(2)
    write_snapshot(snapshot, tmp_path / "one")
    checkpoint = open_checkpoint(tmp_path / "one")
    weight = torch.empty(2, 2)
    checkpoint.read({"weight": weight})

    assert weight.equal(before)
    assert (checkpoint.values["average"].tolist(), checkpoint.values["list"]) == ([0.0, 0.0], [1])


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    """A run that has gone back to an earlier one comes by again."""
    for value in (1.0, 2.0):
        write_snapshot(take_snapshot(contents(weight=torch.full((2,), value))), tmp_path / "one")
    weight = torch.empty(2)
    open_checkpoint(tmp_path / "one").read({"weight": weight})

    assert weight.tolist() == [2.0, 2.0]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_whole_ones_of_a_folder_are_found_by_how_far_they_are(tmp_path: Path) -> None:
    """Not by their names or the clock; links and others' folders are left out."""
    for batch, name in ((10, "b"), (9, "c"), (11, "a")):
        write_snapshot(take_snapshot(contents(batch)), tmp_path / name)
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "other").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")

    assert [path.name for path in find_checkpoints(tmp_path)] == ["c", "b", "a"]
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_what_a_killed_process_has_left_is_removed_and_what_it_was_replacing_comes_back(tmp_path: Path) -> None:
    """Others' files are not touched."""
    write_snapshot(take_snapshot(contents()), tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / ".one.replaced")
    (tmp_path / ".two.012345abcdef.writing").mkdir()
    (tmp_path / ".gitignore").write_text("*")
    clear_leftovers(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".gitignore", "one"]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["one"]


def test_one_that_was_being_replaced_is_opened_by_its_name(tmp_path: Path) -> None:
    """Whoever is killed in between leaves the one before usable, by the link to it as well."""
    write_snapshot(take_snapshot(contents(3)), tmp_path / "one")
    (tmp_path / "latest").symlink_to("one")
    (tmp_path / "one").rename(tmp_path / ".one.replaced")

    for name in ("one", "latest"):
        assert open_checkpoint(tmp_path / name).path == tmp_path / ".one.replaced"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """And nothing is left of the attempt."""
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match="file/one cannot be written"):
        write_snapshot(take_snapshot(contents()), tmp_path / "file" / "one")


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"other": torch.zeros(2)}, "has no tensor other"),
        ({"model.weight": torch.zeros(3, 2)}, r"model.weight has the shape \[3, 2\], and in .* it has \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(
    tmp_path: Path, into: dict[str, torch.Tensor], message: str
) -> None:
    """By its name and both shapes."""
    write_snapshot(take_snapshot(contents()), tmp_path / "one")
    fits = torch.zeros(2, 3)

    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "one").read({"model.weight": fits, **into})

    assert not fits.any()
