"""The benchmarks run as they stand, whichever of the peers are installed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from eventbus_engine.training.algorithms import MixUp

RUN = Path(__file__).parent / "benchmarks" / "run.py"


def measure(name: str, folder: Path, *options: str, table: str | None = None) -> dict[str, Any]:
    """The rows of a benchmark's own table, or of another of its tables, measured as briefly as can be."""
    file = folder / "b.json"
    done = subprocess.run(
        [sys.executable, str(RUN), name, "--rounds", "2", "--sample-ms", "0.01", "--json", str(file), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["tables"][table or name]["rows"]
    return rows


def test_dispatch_is_measured_beside_whichever_peers_there_are(tmp_path: Path) -> None:
    """A peer has figures or is said to be missing; the chart can be read aloud; the page gets the tables."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table dispatch -->\nold\n<!-- /table -->\nafter\n", encoding="utf-8")
    rows = measure("dispatch", tmp_path, "--svg", str(tmp_path / "b.svg"), "--page", str(page))
    figures = [cell for row in rows.values() for cell in row.values()]
    assert all("median" in cell or cell["missing"] == "not installed" for cell in figures), rows
    assert rows["eventbus-engine, async callbacks"]["8"]["median"] > 0
    chart = ET.parse(tmp_path / "b.svg").getroot()
    assert [child.tag.partition("}")[2] for child in chart if child.get("id")] == ["title", "desc"]
    filled = page.read_text(encoding="utf-8")
    assert "| asyncio.TaskGroup |" in filled
    assert "old" not in filled
    assert filled.startswith("before\n<!-- table dispatch -->\n")
    assert filled.endswith("\n<!-- /table -->\nafter\n")


def test_the_prototypes_are_measured_beside_their_events(tmp_path: Path) -> None:
    """They run, each beside the event that it is a part of."""
    rows = measure("prototypes", tmp_path)

    assert len(rows) == 10
    assert all(figures["median"] > 0 for figures in rows.values())


def test_an_effect_is_measured_by_seeds(tmp_path: Path) -> None:
    """Each arm has an outcome for each seed; the page of the algorithm, in a folder of them, gets the table."""
    page = tmp_path / "pages" / "mixup.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- table effect-mixup -->\n<!-- /table -->\nafter\n", encoding="utf-8")
    options = ["--only", "mixup", "--seeds", "2", "--length", "0.02", "--page", str(page.parent)]
    arms = measure("effects", tmp_path, *options, table="effect-mixup")["arms"]

    assert {len(runs) for runs in arms.values()} == {2}
    assert all(0 < run["quality"]["accuracy, %"] < 100 for runs in arms.values() for run in runs)
    filled = page.read_text(encoding="utf-8")
    assert "| with |" in filled
    assert filled.endswith("\n<!-- /table -->\nafter\n")


def test_a_seed_of_an_effect_gives_the_same_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And another seed, or the algorithm, another one."""
    monkeypatch.syspath_prepend(RUN.parent)
    bench, tasks = importlib.import_module("bench_effects"), importlib.import_module("tasks")

    def loss(seed: int, *algorithms: object) -> float:
        setup = tasks.digits(seed).shorter(0.02)
        judge = replace(setup, judge=lambda metrics, model: dict(metrics))
        outcome: float = bench.train(judge, algorithms, seed).quality["metrics/eval/loss"]
        return outcome

    once = loss(1)

    assert loss(1) == once
    assert once not in (loss(2), loss(1, MixUp()))


def test_a_step_is_measured_beside_a_loop_by_hand_and_whichever_peers_there_are(tmp_path: Path) -> None:
    """A way to train has figures for the lengths of a step that were asked for, or is said to be missing."""
    rows = measure("training", tmp_path, "--step-ms", "0.3")
    figures = [cell for row in rows.values() for cell in row.values()]

    assert all("median" in cell or cell["missing"] == "not installed" for cell in figures), rows
    assert all(cell["median"] > 0 for cell in rows["eventbus-engine"].values())
    assert {tuple(row) for row in rows.values()} == {("0.3 ms",)}


def test_a_save_is_measured_beside_other_ways_to_save(tmp_path: Path) -> None:
    """Each has figures for how long the loop waits, and for how much longer it takes."""
    rows = measure("checkpoints", tmp_path)

    assert len(rows) == 5
    assert all(len(row["turns"]) == 2 and min(map(min, row["turns"])) > 0 for row in rows.values())
