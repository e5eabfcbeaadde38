"""`eventbus-engine checkpoint inspect`: what a checkpoint holds, and whether it is as it was written."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eventbus_engine import cli
from eventbus_engine.time import Timestamp
from eventbus_engine.training.checkpoint import Contents, link_latest, take_snapshot, write_snapshot


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a small run, with the newline that a stranger may have put into a name."""
    path = tmp_path / "ep1-ba3"
    values: dict[str, Any] = {
        "timestamp": Timestamp(epoch=1, batch=3, sample=18),
        "algorithms": {"ema": {"required": False, "state": {}}, "blurpool": {"required": True, "state": None}},
        "callbacks": {"early\n\x1b[31m_stopper": {"required": False, "state": {}}},
    }
    tensors = {"model.weight": torch.ones(20, 30), "model.bias": torch.ones(3, dtype=torch.bfloat16)}
    contents = Contents(tensors, values, measured={"metrics/eval/accuracy": 0.75})
    write_snapshot(take_snapshot(contents), path)
    return path


def test_it_tells_what_a_checkpoint_holds(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a link as well; a name cannot give orders to the terminal."""
    link_latest(checkpoint.parent / "latest", checkpoint)
    code = cli.main(["checkpoint", "inspect", str(checkpoint.parent / "latest")])
    lines = capsys.readouterr().out.splitlines()
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}

    assert code == 0
    assert lines == [
        f"checkpoint  {checkpoint.parent / 'latest'}",
        "format      1",
        "written by  1 rank",
        "how far     epoch 1, batch 3, sample 18, token 0",
        "measured    metrics/eval/accuracy = 0.75",
        f"file        rank0.json  {sizes['rank0.json']} B  as written",
        f"file        rank0.safetensors  {sizes['rank0.safetensors'] / 1024:.4g} KiB  as written",
        f"file        values.json  {sizes['values.json']} B  as written",
        "algorithm   ema",
        "algorithm   blurpool  required on load",
        "callback    early\\x0a\\x1b[31m_stopper",
        "tensors     2, 2.35 KiB",
    ]


def test_it_lists_the_tensors_on_request(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Type, shape and size."""
    code = cli.main(["checkpoint", "inspect", "--tensors", str(checkpoint)])

    assert code == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  model.weight  float32 [20, 30]  2.344 KiB",
        "  model.bias  bfloat16 [3]  6 B",
    ]


def test_a_damaged_file_is_shown_among_the_others(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And makes the command fail, with the error's own words."""
    file = checkpoint / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    code = cli.main(["checkpoint", "inspect", str(checkpoint)])
    printed = capsys.readouterr()

    assert code == 1
    assert [line.rpartition("  ")[2] for line in printed.out.splitlines() if line.startswith("file")] == [
        "as written",
        "DAMAGED",
        "as written",
    ]
    assert printed.err == f"eventbus-engine: {file} is not as it was written: its hash is another\n"


def test_what_does_not_fit_its_manifest_is_told(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal that lacks letters, too."""
    values = {"algorithms": {"é": {}}, "more": [1]}
    write_snapshot(take_snapshot(Contents({"weight": torch.ones(2)}, values)), checkpoint)
    shown = io.BytesIO()
    out = io.TextIOWrapper(shown, encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert cli.main(["checkpoint", "inspect", str(checkpoint)]) == 0
        out.flush()

    assert b"algorithm   \\xe9\n" in shown.getvalue()
    assert capsys.readouterr().err == ""


def test_what_is_no_checkpoint_is_an_error_that_names_those_in_it(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of a run is easily given instead."""
    code = cli.main(["checkpoint", "inspect", str(checkpoint.parent)])

    assert code == 1
    error = capsys.readouterr().err
    assert "manifest.json cannot be read: No such file or directory" in error
    assert error.endswith("; there are ep1-ba3 in it\n")


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line comes without the extra."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "safetensors" else found(name, *more)
    )

    assert cli.main(["checkpoint", "inspect", "anywhere"]) == 2
    assert 'needs safetensors; install what is missing with pip install "eventbus-engine[train]"' in (
        capsys.readouterr().err
    )
