"""Run the benchmarks: `python tests/benchmarks/run.py [NAME ...]`.

A benchmark is a file `bench_<name>.py` beside this one with a function `measure()` that yields rows of a name, a value,
its unit, and the limit that the value should not exceed, None where there is none; and tables (`tables.py`). It gets
those of the options that it has parameters for. Timings belong here and not into tests:
whether one holds depends on the machine and on what else runs on it.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tables import Table

HERE = Path(__file__).parent
PACKAGES = (
    "aiosignal anyio blinker bubus eventbus-engine mosaicml opentelemetry-sdk pluggy pyee pytorch-ignite "
    "pytorch-lightning structlog torch transformers trio uvloop"
).split()

LONG = ("effects",)
"""They take many minutes, and run when they are named."""

Row = tuple[str, float, str, float | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print the tables and write the figures down.

    Returns:
        The exit code: 0, or 1 with `--strict` if a limit was exceeded.
    """
    options = read_options(arguments)
    about = machine(options.loop)
    note = describe(about)
    print(note)
    results: list[dict[str, Any]] = []
    tables: list[Table] = []
    for name in options.names or [name for name in discover() if name not in LONG]:
        started = time.perf_counter()
        for item in load(name, vars(options) | {"note": note}):
            if isinstance(item, Table):
                tables.append(item)
                print(item.text(), end="\n\n", flush=True)
                continue
            results.append(dict(zip(("name", "value", "unit", "limit"), item, strict=True)) | {"benchmark": name})
            print(format_row(item), flush=True)
        print(f"    ({name}: {time.perf_counter() - started:.0f} s)")
    figures = {table.name: {"title": table.title, "rows": table.figures} for table in tables}
    document = json.dumps({**about, "results": results, "tables": figures}, indent=2) + "\n"
    charts = [table.chart.svg() for table in tables if table.chart is not None]
    options.json.write_text(document, encoding="utf-8")
    print(f"written to {options.json}")
    if options.svg is not None and charts:
        options.svg.write_text(charts[0], encoding="utf-8")
    for page in pages(options.page):
        page.write_text(fill_in(page.read_text(encoding="utf-8"), tables, note), encoding="utf-8")
    exceeded = any(result["limit"] is not None and result["value"] > result["limit"] for result in results)
    return 1 if options.strict and exceeded else 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Run the benchmarks.", formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"all by default but {', '.join(LONG)}: {', '.join(discover())}"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"), help="where to write the figures")
    parser.add_argument("--svg", type=Path, help="where to draw the chart of the first table that has one")
    parser.add_argument(
        "--page",
        type=Path,
        help="a page of Markdown, or a folder of them, to fill the tables in that it has places for",
    )
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio", help="what asyncio code runs on")
    parser.add_argument("--rounds", type=int, default=31, help="samples for each figure of dispatch, 31 by default")
    parser.add_argument("--sample-ms", type=float, default=3.0, help="milliseconds for each of them, 3 by default")
    parser.add_argument("--python", action="append", default=[], help="another interpreter for the benchmark versions")
    parser.add_argument("--step-ms", action="append", type=float, default=[], help="a length of the steps of training")
    parser.add_argument("--only", action="append", default=[], help="an algorithm for the benchmark effects")
    parser.add_argument("--seeds", type=int, default=5, help="runs for each figure of effects, 5 by default")
    parser.add_argument("--length", type=float, default=1.0, help="how long effects trains, as a part of the whole")
    parser.add_argument("--full", action="store_true", help="up to the sizes that take minutes")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a limit is exceeded")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(discover())):
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(discover())}")
    return options


def discover() -> list[str]:
    """The names of the benchmarks there are."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def load(name: str, options: dict[str, Any]) -> Iterator[Row | Table]:
    """The rows and tables of a benchmark, measured one by one."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HERE / f"bench_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wanted = inspect.signature(module.measure).parameters
    yield from module.measure(**{key: value for key, value in options.items() if key in wanted})


def format_row(row: Row) -> str:
    """A line of the table."""
    name, value, unit, limit = row
    verdict = "" if limit is None else f"  limit {limit:g} {unit}: {'ok' if value <= limit else 'EXCEEDED'}"
    return f"{name:<60}{value:>10.3f} {unit:<8}{verdict}".rstrip()


def machine(loop: str) -> dict[str, Any]:
    """What the figures depend on."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "processors": os.cpu_count(),
        "loop": loop,
        "command": shlex.join(
            [
                "python",
                "tests/benchmarks/run.py",
                *(Path(one).name if Path(one).is_absolute() else one for one in sys.argv[1:]),
            ]
        ),
        "packages": versions,
    }


def processor() -> str:
    """The model, where the system tells it."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", told, re.MULTILINE)
    return found[1] if found else platform.machine()


def describe(about: dict[str, Any]) -> str:
    """The machine and the command, in a line."""
    return (
        f"{about['processor']}, {about['processors']} processors, Python {about['python']}, {about['loop']}, "
        f"{about['time'][:10]}: {about['command']}"
    )


def pages(path: Path | None) -> list[Path]:
    """The page itself, or those in the folder."""
    if path is None:
        return []
    return sorted(path.glob("*.md")) if path.is_dir() else [path]


def fill_in(page: str, tables: Sequence[Table], note: str) -> str:
    """A page with the tables between the comments that name them: `<!-- table NAME -->` and `<!-- /table -->`."""
    for table in tables:
        start, end = f"<!-- table {table.name} -->", "<!-- /table -->"
        before, found, rest = page.partition(start)
        if found:
            after = rest.partition(end)[2]
            page = f"{before}{start}\n\n{table.markdown()}\n\n{note}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    sys.exit(main())
