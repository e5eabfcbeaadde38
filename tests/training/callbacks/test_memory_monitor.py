"""Memory: what the allocator says on CUDA, what the process takes elsewhere, and a word where neither is known."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import Logger
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.callbacks import MemoryMonitor, memory_monitor

MakeTrainer = Callable[..., Trainer]

HUNDRED_MB = 100_000_000

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc to compare with")


def process_status(name: str) -> float:
    """A figure of /proc/self/status, in GB: the kernel's own count, in another file."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise LookupError(name)


@needs_proc
@pytest.mark.anyio
async def test_the_process_is_measured_after_every_batch(make_trainer: MakeTrainer) -> None:
    """100 MB more, touched in the second of three batches, are 0.1 GB more in the log."""
    held: list[bytearray] = []

    class Hold(Callback[State]):
        def batch_start(self, state: State, logger: Any) -> None:
            if int(state.timestamp.batch) == 1:
                held.append(bytearray(b"x") * HUNDRED_MB)

    records = InMemoryLogger()
    await make_trainer(callbacks=[Hold(), MemoryMonitor()], loggers=records, max_duration="3ba").fit()
    steps = records.get_timeseries("memory/current_resident_mem")
    first, second, third = steps["memory/current_resident_mem"]

    assert steps["step"] == [1, 2, 3]
    assert second - first == pytest.approx(0.1, abs=0.02)
    assert third == pytest.approx(process_status("VmRSS"), rel=0.1)
    assert records.most_recent_values["memory/peak_resident_mem"] == pytest.approx(process_status("VmHWM"), rel=0.1)
    assert {name for name in records.data if name.startswith("memory/")} == {
        "memory/current_resident_mem",
        "memory/peak_resident_mem",
    }


@pytest.mark.anyio
async def test_where_nothing_is_known_it_says_so_once(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As on Windows, without /proc and without getrusage; the run goes on."""
    monkeypatch.setattr(memory_monitor, "_STATM", str(tmp_path / "statm"))
    monkeypatch.setitem(sys.modules, "resource", None)
    records = InMemoryLogger()
    with caplog.at_level(logging.WARNING, "eventbus_engine"):
        await make_trainer(callbacks=[MemoryMonitor()], loggers=records).fit()

    assert [record.getMessage() for record in caplog.records] == [
        f"MemoryMonitor logs nothing: there is no memory to ask for on {sys.platform}, device cpu"
    ]
    assert set(records.data) == {"loss/train/total"}


def test_the_peak_is_in_bytes_on_macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elsewhere it is in KiB, by a tradition that only macOS left; and there is no /proc there."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(memory_monitor, "_STATM", str(tmp_path / "statm"))
    monkeypatch.setattr(resource, "getrusage", lambda who: resource.struct_rusage([0.0, 0.0, 3_000_000, *[0] * 13]))
    measured: list[float] = []
    for platform in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        records = InMemoryLogger()
        MemoryMonitor().batch_end(State(nn.Identity()), Logger(None, [records]))
        measured.append(records.most_recent_values["memory/peak_resident_mem"])

    assert measured == [3.072, 0.003]


# ------------------------------------------------------------------------------------------------------- on CUDA


def figures_of(monkeypatch: pytest.MonkeyPatch, stats: dict[str, int], monitor: MemoryMonitor) -> dict[str, Any]:
    """What the monitor logs of an allocator with these figures."""
    records = InMemoryLogger()
    state = State(nn.Identity(), device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "memory_stats", {state.device: stats}.__getitem__)
    monitor.batch_end(state, Logger(state, [records]))
    return records.most_recent_values


def test_bytes_are_logged_in_gigabytes_and_counts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Composer's names, for the device of the run."""
    kinds = ("allocated", "active", "inactive_split", "reserved")
    names = [(f"{kind}_bytes.all.{when}", when) for kind in kinds for when in ("current", "peak")]
    stats = {key: (index + 1) * 500_000_000 for index, (key, _) in enumerate(names)}
    actual = figures_of(monkeypatch, {**stats, "num_alloc_retries": 3, "num_ooms": 1}, MemoryMonitor())

    assert actual == {
        "memory/current_allocated_mem": 0.5,
        "memory/peak_allocated_mem": 1.0,
        "memory/current_active_mem": 1.5,
        "memory/peak_active_mem": 2.0,
        "memory/current_inactive_mem": 2.5,
        "memory/peak_inactive_mem": 3.0,
        "memory/current_reserved_mem": 3.5,
        "memory/peak_reserved_mem": 4.0,
        "memory/alloc_retries": 3,
    }


def test_the_keys_choose_and_name_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those, and no others."""
    stats = {"num_ooms": 2, "reserved_bytes.all.peak": 1_000_000_000}
    actual = figures_of(monkeypatch, stats, MemoryMonitor({"num_ooms": "out_of_memory"}))

    assert actual == {"memory/out_of_memory": 2}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("allocated_byte.all.peak", r"give allocated_bytes\.all\.peak"),
        ("x", r"give what is in torch\.cuda\.memory_stats\(\)"),
    ],
)
def test_a_figure_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, key: str, hint: str) -> None:
    """With the nearest one, if any is near."""
    with pytest.raises(ConfigurationError, match=f"the CUDA allocator has no figure '{key}'; {hint}"):
        figures_of(monkeypatch, {"allocated_bytes.all.peak": 1}, MemoryMonitor({key: "peak"}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.anyio
async def test_a_run_on_cuda_logs_what_the_allocator_counts(make_trainer: MakeTrainer) -> None:
    """All figures by default; the peak is torch's own."""
    records = InMemoryLogger()
    await make_trainer(device="cuda", callbacks=[MemoryMonitor()], loggers=records).fit()
    values = {name: value for name, value in records.most_recent_values.items() if name.startswith("memory/")}

    assert set(values) == {f"memory/{name}" for name in memory_monitor.MEMORY_KEYS.values()}
    assert values["memory/peak_allocated_mem"] == torch.cuda.max_memory_allocated() / 1e9


@pytest.mark.parametrize("keys", [{}, {"num_ooms": 3}, {3: "ooms"}, {"": "ooms"}, ["num_ooms"], "num_ooms"])
def test_keys_that_are_no_names_are_refused(keys: Any) -> None:
    """At construction, on every platform."""
    with pytest.raises(ConfigurationError, match=r"MemoryMonitor: memory_keys=.* has to map names"):
        MemoryMonitor(keys)
