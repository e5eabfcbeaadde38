"""However a process ends while it saves, what is found afterwards is whole, and nothing that was saved is lost."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from eventbus_engine.training.checkpoint import find_checkpoints, open_checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fork and SIGKILL of POSIX")

Start = Callable[..., subprocess.Popen[str]]

EVERY_STEP = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from eventbus_engine.time import Timestamp
from eventbus_engine.training.checkpoint import *

torch.set_num_threads(1)
root = Path(sys.argv[1])
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}

def snapshot(batch, value):
    return take_snapshot(Contents({"weight": torch.full((1000,), value)}, {"timestamp": Timestamp(batch=batch)}))

SNAPSHOTS = {value: snapshot(batch, value) for batch, value in [(1, 1.0), (2, 2.0), (2, 2.5), (3, 3.0)]}

def begin(folder):
    write_snapshot(SNAPSHOTS[1.0], folder / "one")
    write_snapshot(SNAPSHOTS[2.0], folder / "two")
    link_latest(folder / "latest", folder / "two")

def save(folder, scenario):
    if scenario == "new":
        write_snapshot(SNAPSHOTS[3.0], folder / "three")
        link_latest(folder / "latest", folder / "three")
    elif scenario == "replace":
        write_snapshot(SNAPSHOTS[2.5], folder / "two")
    elif scenario == "delete":
        delete_checkpoint(folder / "one")
    else:  # as the next run begins, after one that was killed while it replaced and deleted
        (folder / "two").rename(folder / ".two.replaced")
        (folder / "one").rename(folder / ".one.0123456789ab.deleted")
        clear_leftovers(folder)

def die_at(step):
    left = step
    def watch(event, arguments):
        nonlocal left
        if event in STEPS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

def look(folder):
    found = {}
    for path in find_checkpoints(folder):
        weight = torch.zeros(1000)
        open_checkpoint(path).read({"weight": weight})
        assert len(set(weight.tolist())) == 1
        found[path.name.removeprefix(".").removesuffix(".replaced")] = weight[0].item()
    return found

def kill(step, scenario):
    folder = root / f"{scenario}{step}"
    folder.mkdir()
    begin(folder)
    child = os.fork()
    if not child:
        die_at(step)
        save(folder, scenario)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    found = look(folder)
    latest = (folder / "latest").exists()
    clear_leftovers(folder)
    assert look(folder) == found, (look(folder), found)
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    print(json.dumps({"scenario": scenario, "found": found, "killed": killed, "latest": latest, "left": left}))
    shutil.rmtree(folder)
    return killed

for scenario in sys.argv[2:]:
    step = 0
    while kill(step, scenario):
        step += 1
"""

BEFORE = {"one": 1.0, "two": 2.0}
AFTER = {
    "new": {"one": 1.0, "two": 2.0, "three": 3.0},
    "replace": {"one": 1.0, "two": 2.5},
    "delete": {"two": 2.0},
    "clear": {"two": 2.0},
}


def test_a_process_killed_at_any_step_leaves_what_was_there_or_what_was_to_be(start: Start, tmp_path: Path) -> None:
    """Before each call that changes the disk, one after another: nothing half, nothing lost, nothing left behind."""
    process = start(EVERY_STEP, tmp_path, *AFTER)
    printed, logged = process.communicate(timeout=120)
    assert process.returncode == 0, logged
    lines: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]

    for scenario, after in AFTER.items():
        steps = [line for line in lines if line["scenario"] == scenario]
        assert len(steps) > 5
        assert [step["killed"] for step in steps] == [True] * (len(steps) - 1) + [False]
        found = [step["found"] for step in steps]
        changed = found.index(after)
        assert found == [BEFORE] * changed + [after] * (len(found) - changed)
        assert {tuple(step["left"]) for step in steps} == {()}
        assert all(step["latest"] for step in steps) or scenario in ("replace", "clear")


SAVING = """
import logging, os, signal, sys
import anyio, torch
from torch import nn
from torch.nn.functional import mse_loss
from eventbus_engine import Callback
from eventbus_engine.training import Trainer
from eventbus_engine.training.callbacks import CheckpointSaver

folder = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
data = [(torch.rand(2, 100), torch.rand(2, 100)) for _ in range(4)]

class Tell(logging.Handler):
    def emit(self, record):
        if record.msg.startswith("saved"):
            os.write(1, f"saved {record.args[0].name}\\n".encode())

class Start(Callback):
    def fit_start(self, state, logger):
        os.write(1, f"started {int(state.timestamp.batch)}\\n".encode())

def train(filename, keep):
    logging.getLogger("eventbus_engine").setLevel(logging.INFO)
    logging.getLogger("eventbus_engine").addHandler(Tell())
    model = nn.Linear(100, 100)
    saver = CheckpointSaver(folder, "1ba", filename=filename, keep=keep)
    trainer = Trainer(
        model, data, loss=mse_loss, optimizers=torch.optim.Adam(model.parameters()), max_duration="100000ba",
        callbacks=[saver, Start()], autoresume=True, seed=1,
    )
    anyio.run(trainer.fit)

# Loading torch takes longer than all the rest: a child for each kill has it already.
for line in sys.stdin:
    filename, keep = line.split()
    child = os.fork()
    if not child:
        train(filename, int(keep))
    os.write(1, f"process {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"killed\\n")
"""


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_a_run_killed_again_and_again_goes_on_from_what_was_saved_last(
    kills: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    """It saves all the time, under new names and under the same one, and deletes what is old."""
    draw = random.Random(kills)
    process = subprocess.Popen(
        [sys.executable, "-c", SAVING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment,
        start_new_session=True,  # so that its children can be killed with it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    newest = 0
    try:
        for number in range(kills):
            filename = ("ba{batch}", "run")[number % 2]
            process.stdin.write(f"{filename} {draw.choice([1, 3])}\n")
            saved = kill_after(draw.randrange(8), draw.random() * 0.03, process.stdout)
            assert saved[0] == newest
            newest = check_all(tmp_path, saved[-1])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def kill_after(saves: int, seconds: float, lines: Any) -> list[int]:
    """Kill a run some time after so many saves; the batch that it began with, and those that it said it has saved."""
    pid, batches = 0, list[int]()
    for line in lines:
        what, _, which = line.strip().partition(" ")
        if what == "killed":
            return batches
        if what == "process":
            pid = int(which)
        elif what == "started":
            batches.append(int(which))
        elif which != "run":
            batches.append(int(which.removeprefix("ba")))
        else:
            batches.append(batches[-1] + 1)
        if pid and len(batches) > saves:
            select.select([], [], [], seconds)  # any moment of the next save
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pid = 0
    raise AssertionError("the program has ended")


def check_all(folder: Path, acknowledged: int) -> int:
    """All that is found is whole, and nothing is missing that was said to be there; the newest batch."""
    checkpoints = [open_checkpoint(path) for path in find_checkpoints(folder)]
    if not checkpoints:
        assert acknowledged == 0
        return 0
    for checkpoint in checkpoints:
        checkpoint.read({"model.weight": torch.zeros(100, 100)})
    newest = int(checkpoints[-1].values["timestamp"].batch)
    assert newest in (acknowledged, acknowledged + 1)
    return newest
