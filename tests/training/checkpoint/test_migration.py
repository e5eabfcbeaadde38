"""A checkpoint of an older format is read by way of the formats since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Timestamp
from eventbus_engine.training.checkpoint import (
    Contents,
    find_checkpoints,
    open_checkpoint,
    reading,
    take_snapshot,
    write_snapshot,
)
from eventbus_engine.training.checkpoint import manifest as manifests
from eventbus_engine.training.checkpoint.manifest import Migration


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """As this release writes it, which is as the later ones below will have been."""
    contents = Contents({"net.weight": torch.ones(2)}, {"timestamp": Timestamp(batch=5), "lr": 1}, {"seed": 3})
    write_snapshot(take_snapshot(contents), tmp_path / "older")
    return tmp_path / "older"


def rename_tensors(content: dict[str, Any]) -> dict[str, Any]:
    """From one format to the next."""
    tensors = {name.replace("net.", "model."): info for name, info in content["tensors"].items()}
    return content | {"tensors": tensors}


def test_all_of_it_goes_through_every_step(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tensors, values, and those of a rank; the files stay as they are."""
    monkeypatch.setattr(manifests, "FORMAT", 3)
    monkeypatch.setattr(reading, "FORMAT", 3)
    monkeypatch.setitem(
        manifests.MIGRATIONS, 1, Migration(manifest=rename_tensors, values=lambda v: v | {"lr": [v["lr"]]})
    )
    monkeypatch.setitem(
        manifests.MIGRATIONS,
        2,
        Migration(values=lambda v: v | {"rates": v["lr"]}, rank_values=lambda v: {"seeds": [v["seed"]]}),
    )
    before = {path.name: path.read_bytes() for path in older.iterdir()}
    checkpoint = open_checkpoint(older)
    weight = torch.zeros(2)
    checkpoint.read({"model.weight": weight})

    assert weight.tolist() == [1.0, 1.0]
    assert (checkpoint.values["rates"], checkpoint.rank_values(0)) == ([1], {"seeds": [3]})
    assert checkpoint.manifest.format == 1
    assert find_checkpoints(older.parent) == [older]
    assert {path.name: path.read_bytes() for path in older.iterdir()} == before


def test_a_format_that_is_left_behind_is_named(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a way from it to this release's."""
    monkeypatch.setattr(manifests, "FORMAT", 2)

    with pytest.raises(CheckpointError, match="of format 1, which this release does not read any more"):
        open_checkpoint(older)
