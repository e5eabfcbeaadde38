"""The benchmarks run as they stand, whichever of the peers are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

RUN = Path(__file__).parent / "benchmarks" / "run.py"


def measure(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The rows of a benchmark's own table, measured as briefly as can be."""
    file = folder / "b.json"
    done = subprocess.run(
        [sys.executable, str(RUN), name, "--rounds", "2", "--sample-ms", "0.01", "--json", str(file), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["tables"][name]["rows"]
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
