"""The file of JSON lines: one record per call, on the disk when the call returns."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eventbus_engine.engine import Engine
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
    destination = JsonlLogger(path, log_traces=True)
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


def steps(path: Path) -> list[int]:
    """The steps of a file's records."""
    return [record["step"] for record in read(path)]


def test_full_file_is_set_aside_and_no_record_is_split_or_lost(tmp_path: Path) -> None:
    """The files together hold every record once and in order, and none is larger than the limit."""
    path = tmp_path / "metrics.jsonl"
    destination = JsonlLogger(path, max_bytes=1000, backups=100)
    for step in range(100):
        destination.log_metrics({"loss": 0.5}, step)
    destination.post_close()
    older = sorted(tmp_path.glob("metrics.jsonl.*"), key=lambda file: -int(file.suffix[1:]))

    assert len(older) > 3
    assert [step for file in [*older, path] for step in steps(file)] == list(range(100))
    assert max(file.stat().st_size for file in [*older, path]) <= 1000


def test_only_so_many_older_files_are_kept(tmp_path: Path) -> None:
    """The newest has the number 1, and what is older than the last is gone."""
    path = tmp_path / "metrics.jsonl"
    destination = JsonlLogger(path, max_bytes=1, backups=2)
    for step in range(5):
        destination.log_metrics({"loss": 0.5}, step)
    destination.post_close()

    assert {file.name: steps(file) for file in tmp_path.iterdir()} == {
        "metrics.jsonl": [4],
        "metrics.jsonl.1": [3],
        "metrics.jsonl.2": [2],
    }


def test_record_that_fits_to_the_byte_does_not_rotate(tmp_path: Path) -> None:
    """The limit is the largest size, not one short of it."""
    first = JsonlLogger(tmp_path / "measure.jsonl")
    first.log_metrics({"loss": 1}, 1)
    first.post_close()
    size = (tmp_path / "measure.jsonl").stat().st_size
    destination = JsonlLogger(tmp_path / "metrics.jsonl", max_bytes=2 * size)
    for step in (1, 2, 3):
        destination.log_metrics({"loss": 1}, step)
    destination.post_close()

    assert (steps(tmp_path / "metrics.jsonl.1"), steps(tmp_path / "metrics.jsonl")) == ([1, 2], [3])


def test_rotation_cut_short_by_a_crash_loses_nothing(tmp_path: Path) -> None:
    """A number that the crash left free is filled; the files above it stay."""
    path = tmp_path / "metrics.jsonl"
    for name, step in (("metrics.jsonl", 3), ("metrics.jsonl.2", 2), ("metrics.jsonl.3", 1)):
        (tmp_path / name).write_text(json.dumps({"step": step}) + "\n")
    destination = JsonlLogger(path, max_bytes=1, backups=3)
    destination.log_metrics({"loss": 1}, 4)
    destination.post_close()

    assert [steps(tmp_path / f"metrics.jsonl{end}") for end in ("", ".1", ".2", ".3")] == [[4], [3], [2], [1]]


def test_file_that_was_removed_meanwhile_is_made_anew(tmp_path: Path) -> None:
    """Whoever tidies up the directory does not stop the rotation."""
    path = tmp_path / "metrics.jsonl"
    destination = JsonlLogger(path, max_bytes=1)
    destination.log_metrics({"loss": 1}, 1)
    path.unlink()
    destination.log_metrics({"loss": 1}, 2)
    destination.post_close()

    assert {file.name: steps(file) for file in tmp_path.iterdir()} == {"metrics.jsonl": [2]}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_killed_writer_leaves_at_most_half_a_line_and_the_next_run_starts_a_new_one(tmp_path: Path) -> None:
    """What the killed process had logged is on the disk, and the records of the next are whole lines."""
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, signal, sys\n"
        "from eventbus_engine.loggers import JsonlLogger\n"
        f"destination = JsonlLogger({str(path)!r})\n"
        "destination.log_metrics({'loss': 1}, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    kept = steps(path)
    with path.open("a") as file:
        file.write('{"step": 2, "ki')
    for step in (3, 4):
        destination = JsonlLogger(path)
        destination.log_metrics({"loss": 1}, step)
        destination.post_close()
    lines = path.read_text().splitlines()

    assert (killed.returncode, kept) == (-signal.SIGKILL, [1])
    assert lines[1] == '{"step": 2, "ki'
    assert [json.loads(line)["step"] for line in (lines[0], *lines[2:])] == [1, 3, 4]


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file of this process may grow larger: a write stops short there, and the next fails."""
    resource = pytest.importorskip("resource")
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_raises_once_counts_the_rest_and_ends_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No half line stays behind, what is written later is whole, and the next outage raises again."""
    path = tmp_path / "metrics.jsonl"
    destination = JsonlLogger(path)
    destination.log_metrics({"loss": 1}, 1)
    with files_limited_to(path.stat().st_size + 10):
        with pytest.raises(TelemetryError, match=r"cannot write to .*metrics.jsonl: .*; make room there"):
            destination.log_metrics({"loss": 1}, 2)
        destination.log_metrics({"loss": 1}, 3)
    destination.log_metrics({"loss": 1}, 4)
    with files_limited_to(path.stat().st_size + 10), pytest.raises(TelemetryError, match="make room"):
        destination.log_metrics({"loss": 1}, 5)
    with caplog.at_level(logging.WARNING, "eventbus_engine"):
        destination.post_close()
        destination.post_close()

    assert steps(path) == [1, 4]
    assert destination.lost == 3
    assert caplog.messages == [f"{path}: 3 records could not be written and are lost"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.anyio
async def test_run_survives_a_full_disk_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged with the first event, and not with every one."""
    destination = JsonlLogger("/dev/full")
    engine = Engine(callbacks=[destination])
    with caplog.at_level(logging.WARNING, "eventbus_engine"):
        async with engine:
            for step in range(3):
                engine.logger.log_metrics({"loss": 1}, step)
                await engine.run_event(Event.BATCH_END)

    assert destination.lost == 3
    assert caplog.messages == [
        "destination jsonl_logger failed on BATCH_END",
        "/dev/full: 3 records could not be written and are lost",
        "destination jsonl_logger was closed with 1 records undelivered",
    ]


def test_rotation_that_fails_keeps_the_records_and_goes_on_when_it_can(tmp_path: Path) -> None:
    """Nothing can be moved where a directory is in the way; the file before it stays as it is."""
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "metrics.jsonl.1" / "inside").mkdir(parents=True)
    destination = JsonlLogger(path, max_bytes=1, backups=1)
    destination.log_metrics({"loss": 1}, 1)
    with pytest.raises(TelemetryError, match="cannot write"):
        destination.log_metrics({"loss": 1}, 2)
    (tmp_path / "metrics.jsonl.1" / "inside").rmdir()
    (tmp_path / "metrics.jsonl.1").rmdir()
    destination.log_metrics({"loss": 1}, 3)
    destination.post_close()

    assert (steps(tmp_path / "metrics.jsonl.1"), steps(path), destination.lost) == ([1], [3], 1)


def test_new_file_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    """The directory may come back, as a network mount does."""
    directory = tmp_path / "run"
    destination = JsonlLogger(directory / "metrics.jsonl", max_bytes=1)
    destination.log_metrics({"loss": 1}, 1)
    (directory / "metrics.jsonl").unlink()
    directory.rmdir()
    directory.write_text("in the way")
    with pytest.raises(TelemetryError, match="cannot write"):
        destination.log_metrics({"loss": 1}, 2)
    destination.log_metrics({"loss": 1}, 3)
    directory.unlink()
    destination.log_metrics({"loss": 1}, 4)
    destination.post_close()

    assert (steps(directory / "metrics.jsonl"), destination.lost) == ([4], 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"max_bytes": 0}, "max_bytes=0"), ({"max_bytes": 1.5}, "max_bytes=1.5"), ({"backups": 0}, "backups=0")],
)
def test_limit_that_is_none_is_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    """Before a file is made."""
    with pytest.raises(ConfigurationError, match=f"{named} is no limit"):
        JsonlLogger(tmp_path / "metrics.jsonl", **options)

    assert list(tmp_path.iterdir()) == []
