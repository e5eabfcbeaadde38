"""Spools, records, and programs that run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventbus_engine.spool import Record

REPOSITORY = Path(__file__).parents[2]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the spool is."""
    return tmp_path / "logger.spool"


@pytest.fixture
def make() -> Callable[..., list[Record]]:
    """Make so many records of some size; the first has that number in its id and data."""

    def records(count: int, first: int = 0, size: int = 20) -> list[Record]:
        return [Record(f"id{n}", 1000 + n, str(n).encode().ljust(size, b".")) for n in range(first, first + count)]

    return records


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program: its text and its arguments. Whatever still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_program(program: str, *arguments: object) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        started.append(process)
        return process

    yield start_program
    for process in started:
        process.kill()
        process.communicate()
