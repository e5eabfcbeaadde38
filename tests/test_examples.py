"""Every example runs as it stands."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))

# Composer has an environment of its own, with a torchvision; `make test` runs these there.
PEERS = {"composer_trainer": "torchvision"}


def test_there_are_examples() -> None:
    """An empty folder would pass everything below."""
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_without_arguments_and_without_warnings(example: Path, tmp_path: Path) -> None:
    """It exits with 0, says something, and nothing complains on standard error."""
    if example.stem in PEERS and importlib.util.find_spec(PEERS[example.stem]) is None:
        pytest.skip("Composer has its own environment")
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout
