"""Run the benchmarks: `python tests/benchmarks/run.py [NAME ...]`.

A benchmark is a file `bench_<name>.py` beside this one with a function `measure()` that yields rows of a name, a value,
its unit, and the limit that the value should not exceed, None where there is none. Timings belong here and not into
tests: whether one holds depends on the machine and on what else runs on it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("anyio", "eventbus-engine", "opentelemetry-sdk", "structlog", "torch")

Row = tuple[str, float, str, float | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print a table and write the figures down.

    Returns:
        The exit code: 0, or 1 with `--strict` if a limit was exceeded.
    """
    parser = argparse.ArgumentParser(description="Run the benchmarks.", formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(discover())}")
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"), help="where to write the figures")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a limit is exceeded")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(discover())):
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(discover())}")
    results: list[dict[str, Any]] = []
    for name in options.names or discover():
        started = time.perf_counter()
        for row in load(name):
            results.append(dict(zip(("name", "value", "unit", "limit"), row, strict=True)) | {"benchmark": name})
            print(format_row(row), flush=True)
        print(f"    ({name}: {time.perf_counter() - started:.0f} s)")
    options.json.write_text(json.dumps({**machine(), "results": results}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.json}")
    exceeded = any(result["limit"] is not None and result["value"] > result["limit"] for result in results)
    return 1 if options.strict and exceeded else 0


def discover() -> list[str]:
    """The names of the benchmarks there are."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def load(name: str) -> Iterator[Row]:
    """The rows of a benchmark, measured one by one."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HERE / f"bench_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield from module.measure()


def format_row(row: Row) -> str:
    """A line of the table."""
    name, value, unit, limit = row
    verdict = "" if limit is None else f"  limit {limit:g} {unit}: {'ok' if value <= limit else 'EXCEEDED'}"
    return f"{name:<60}{value:>10.3f} {unit:<8}{verdict}".rstrip()


def machine() -> dict[str, Any]:
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
        "processors": os.cpu_count(),
        "packages": versions,
    }


if __name__ == "__main__":
    sys.exit(main())
