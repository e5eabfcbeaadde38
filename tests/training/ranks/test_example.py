"""The example of distributed training, under torchrun."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "distributed.py"


def test_the_example_trains_on_two_ranks_of_which_one_speaks(
    start_job: Callable[..., subprocess.Popen[str]],
) -> None:
    """By itself, on one rank, the examples' own test runs it."""
    process = start_job(EXAMPLE)
    output, _ = process.communicate(timeout=120)

    assert process.returncode == 0, output
    assert re.findall(r"^epoch (\d)", output, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "trained on 2 rank(s), 7190 samples in all" in output
