"""The hot path on other event loops and interpreters, as ratios to the floor of each (see `bench_dispatch.py`).

`--python PATH` names an interpreter whose environment has this project, anyio, trio and uvloop; it may be repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tables import Table, cell

Row = tuple[str, float, str, float | None]

RUN = Path(__file__).parent / "run.py"
OURS = "eventbus-engine, "
FLOOR = ("dispatch", "await loop, written by hand")
GROUP = ("suspending", "asyncio.TaskGroup")
RATIOS = {
    "nothing": ("dispatch", "plain callbacks", "0", FLOOR),
    "8 plain": ("dispatch", "plain callbacks", "8", FLOOR),
    "8 async": ("dispatch", "async callbacks", "8", FLOOR),
    "8 algorithms": ("dispatch", "matching async algorithms", "8", FLOOR),
    "8 suspending ÷ TaskGroup": ("suspending", "async callbacks", "8", GROUP),
}
"""Ours over theirs. The floor is that of eight handlers for each of them."""

LIMIT = 1.3


def measure(*, python: Sequence[str] = (), rounds: int = 31) -> Iterator[Row | Table]:
    """A table, and how much worse than on the first of them each of the others is."""
    kinds = [(sys.executable, "asyncio"), (sys.executable, "uvloop"), *((path, "asyncio") for path in python)]
    found: dict[str, list[float]] = {}
    for path, loop in kinds:
        measured = figures(path, loop, rounds)
        name = f"CPython {measured['python']}, {loop}"
        found[name] = [ratio(measured["tables"], *of) for of in RATIOS.values()]
    rows = [(name, *map(cell, ratios)) for name, ratios in found.items()]
    title = "Times the await loop written by hand for eight handlers"
    yield Table(
        "versions",
        title,
        ["", *RATIOS],
        rows,
        {name: dict(zip(RATIOS, ratios, strict=True)) for name, ratios in found.items()},
    )
    first, *others = found.items()
    for name, ratios in others:
        worst = max(one / base for one, base in zip(ratios, first[1], strict=True))
        yield f"{name}: the worst ratio over that of {first[0]}", worst, "times", LIMIT


def figures(python: str, loop: str, rounds: int) -> dict[str, Any]:
    """What the benchmark of dispatch writes down under that interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "figures.json"
        command = [python, str(RUN), "dispatch", "--loop", loop, "--rounds", str(rounds), "--json", str(written)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return found


def ratio(tables: dict[str, Any], table: str, way: str, count: str, base: tuple[str, str]) -> float:
    """One of ours over one of theirs."""
    ours = tables[table]["rows"][OURS + way][count]["median"]
    theirs = tables[base[0]]["rows"][base[1]]["8"]["median"]
    return float(ours / theirs)


if __name__ == "__main__":
    for row in measure():
        print(row.text() if isinstance(row, Table) else row)
