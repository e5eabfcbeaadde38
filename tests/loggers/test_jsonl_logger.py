"""The file of JSON lines: one record per call, on the disk when the call returns."""

from __future__ import annotations

import json
import math
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eventbus_engine.errors import ConfigurationError, TelemetryError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.loggers import JsonlLogger
from eventbus_engine.trace import Trace


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, which has to be strict JSON."""

    def no_constants(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=no_constants) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_call_is_one_record_and_written_when_it_returns(tmp_path: Path) -> None:
    """Its kind, its step, its content, and a time in UTC; the directories are made."""
    path = tmp_path / "runs" / "one" / "metrics.jsonl"
    destination = JsonlLogger(path)
    logger = Logger(None, [destination])
    error = ValueError("broken")
    logger.log_hyperparameters({"lr": 0.1, "betas": (0.9, 0.99)})
    logger.log_metrics({"loss": torch.tensor(0.5), "accuracy": np.float32(0.25)}, step=3)
    logger.log_traces({"a/INIT": Trace("a", Event.INIT, 7, 0, True, "failed", "", error, 1, 2)}, step=0)
    logger.log_table(["x", "y"], [[1, "ü"], [np.int64(2), None]], name="table", step=4)
    logger.log_images(torch.zeros(2, 3, 4, 4), name="digits")
    records = read(path)
    destination.post_close()

    assert [{key: value for key, value in record.items() if key != "time"} for record in records] == [
        {"kind": "hyperparameters", "step": None, "hyperparameters": {"lr": 0.1, "betas": [0.9, 0.99]}},
        {"kind": "metrics", "step": 3, "metrics": {"loss": 0.5, "accuracy": 0.25}},
        {
            "kind": "traces",
            "step": 0,
            "traces": {
                "a/INIT": {
                    "name": "a",
                    "event": "init",
                    "exit_code": 7,
                    "order": 0,
                    "run": True,
                    "outcome": "failed",
                    "reason": "",
                    "error": "ValueError: broken",
                    "start_ns": 1,
                    "duration_ns": 2,
                }
            },
        },
        {"kind": "table", "step": 4, "name": "table", "columns": ["x", "y"], "rows": [[1, "ü"], [2, None]]},
        {"kind": "images", "step": None, "name": "digits", "shape": [2, 3, 4, 4], "channels_last": False},
    ]
    assert {datetime.fromisoformat(record["time"]).utcoffset() for record in records} == {timedelta(0)}


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.floats(), max_size=5))
def test_floats_that_json_lacks_are_strings_that_float_reads_back(metrics: dict[str, float]) -> None:
    """NaN and the infinities are written, not lost, and every line is strict JSON."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        destination = JsonlLogger(path)
        destination.log_metrics(metrics)
        destination.post_close()
        (record,) = read(path)

    for name, value in metrics.items():
        written = record["metrics"][name]

        assert isinstance(written, str) is not math.isfinite(value)
        assert float(written) == value or (math.isnan(float(written)) and math.isnan(value))


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    """A resumed run does not lose the records of its first half."""
    for step in (1, 2):
        destination = JsonlLogger(tmp_path / "metrics.jsonl")
        destination.log_metrics({"loss": 1}, step)
        destination.post_close()

    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_record_after_the_end_is_a_typed_error_and_opening_again_continues(tmp_path: Path) -> None:
    """Closing twice is safe; another engine's `open` makes it usable again."""
    destination = JsonlLogger(tmp_path / "metrics.jsonl")
    destination.post_close()
    destination.post_close()
    with pytest.raises(TelemetryError, match=r"metrics.jsonl is closed.*'metrics'"):
        destination.log_metrics({"loss": 1})
    destination.open(None, None)
    destination.open(None, None)
    destination.log_metrics({"loss": 1})
    destination.post_close()

    assert len(read(tmp_path / "metrics.jsonl")) == 1


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    """The training thread and the event loop log at the same time."""
    destination = JsonlLogger(tmp_path / "metrics.jsonl")
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait()
        for step in range(100):
            destination.log_metrics({"worker": number, "padding": "x" * 2000}, step)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    destination.post_close()
    records = read(tmp_path / "metrics.jsonl")
    by_worker = [[r["step"] for r in records if r["metrics"]["worker"] == number] for number in range(4)]

    assert by_worker == [list(range(100))] * 4


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Before the run, and by name."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigurationError, match=r"cannot write records to .*file/metrics.jsonl"):
        JsonlLogger(tmp_path / "file" / "metrics.jsonl")
