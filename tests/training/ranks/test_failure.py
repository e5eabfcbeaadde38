"""When a rank fails, all end, soon, and with the cause named."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAILING = Path(__file__).parent / "failing.py"
WAYS = ("raise", "kill")


@pytest.fixture(scope="module")
def failed(start_job: Callable[..., subprocess.Popen[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How jobs ended, by the way that their rank 1 failed: they run at once."""
    folders = {way: tmp_path_factory.mktemp(way) for way in WAYS}
    processes = {way: start_job(FAILING, str(folder), way) for way, folder in folders.items()}
    facts: dict[str, Any] = {}
    for way, process in processes.items():
        output, _ = process.communicate(timeout=120)
        ended = time.time()
        failed, heard = (json.loads((folders[way] / f"{name}.json").read_text()) for name in ("failed", "heard"))
        facts[way] = {"code": process.returncode, "output": output, "seconds": ended - failed, "heard": heard}
    return facts


@pytest.mark.parametrize("way", WAYS)
def test_the_job_ends_within_30_seconds(failed: dict[str, Any], way: str) -> None:
    """None hangs in a collective that will never come about."""
    assert failed[way]["code"] != 0
    assert failed[way]["seconds"] < 30


@pytest.mark.parametrize(("way", "cause"), [("raise", "the cause of it all"), ("kill", "Signal 9 (SIGKILL) received")])
def test_torchruns_report_names_the_cause(failed: dict[str, Any], way: str, cause: str) -> None:
    """That is where one looks, with the output of many ranks mixed up above it."""
    report = failed[way]["output"].partition("ChildFailedError:")[2]

    assert cause in report
    assert "rank      : 1 (local_rank: 1)" in report


@pytest.mark.parametrize("way", WAYS)
def test_the_survivor_gets_a_typed_error_with_its_rank(failed: dict[str, Any], way: str) -> None:
    """It says that the cause is elsewhere, and where to find it."""
    heard = failed[way]["heard"]

    assert (heard["rank"], heard["world_size"]) == (0, 2)
    assert heard["text"].startswith("rank 0 of 2 has lost the others: a collective failed (")
    assert "torchrun's report" in heard["text"]
