"""What a full disk costs a run that saves, and what the end of a process waits for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eventbus_engine.training.checkpoint import find_checkpoints, open_checkpoint

Start = Callable[..., subprocess.Popen[str]]

FULL = """
import sys
from pathlib import Path
import anyio, torch
from torch import nn
from torch.nn.functional import mse_loss
from eventbus_engine import CallbackErrors
from eventbus_engine.training import Trainer
from eventbus_engine.training.callbacks import CheckpointSaver
from eventbus_engine.training.checkpoint import find_checkpoints, open_checkpoint

folder = Path(sys.argv[1])
data = [(torch.rand(2, 100), torch.rand(2, 100))] * 100

def train(keep):
    model = nn.Linear(100, 100)  # of 40 kB
    saver = CheckpointSaver(folder, "1ba", filename="ba{batch}", keep=keep)
    trainer = Trainer(
        model, data, loss=mse_loss, optimizers=torch.optim.SGD(model.parameters()), max_duration="100ba",
        callbacks=[saver], autoresume=True,
    )
    anyio.run(trainer.fit)

try:
    train(keep=None)
except CallbackErrors as error:
    print(*error.exceptions)
found = find_checkpoints(folder)
for path in found:
    open_checkpoint(path)
assert sorted(folder.iterdir()) == sorted([*found, folder / "latest"]), list(folder.iterdir())
print(len(found), (folder / "latest").resolve() == found[-1])
for path in found[:5]:
    for file in path.iterdir():
        file.unlink()
train(keep=2)
print(find_checkpoints(folder)[-1].name)
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="needs a mount of its own")
def test_a_full_disk_is_named_and_what_was_saved_before_is_there(tmp_path: Path, environment: dict[str, str]) -> None:
    """A file system of 1 MiB: nothing half is left of the last save, and once there is room the run goes on."""
    mount = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*mount, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -W error -c "$3" "$1"'
    done = subprocess.run(
        [*mount, "sh", "-c", script, "sh", tmp_path, sys.executable, FULL],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )

    assert done.returncode == 0, done.stderr
    failed, kept, last = done.stdout.splitlines()
    assert "cannot be written: " in failed
    assert "No space left on device" in failed
    count, _, latest = kept.partition(" ")
    assert (int(count) > 10, latest) == (True, "True")
    assert last == "ba100"


LEAVE = """
import sys, threading
from pathlib import Path
import anyio, torch
from torch import nn
from torch.nn.functional import mse_loss
from eventbus_engine import Callback
from eventbus_engine.training import Trainer
from eventbus_engine.training.callbacks import CheckpointSaver, checkpoint_saver

leaving, write = threading.Event(), checkpoint_saver.write_snapshot

def write_late(snapshot, path):
    while threading.main_thread().is_alive():  # until the interpreter is on its way out
        leaving.wait(0.01)
    write(snapshot, path)

checkpoint_saver.write_snapshot = write_late

class Leave(Callback):
    def batch_start(self, state, logger):
        if state.timestamp.batch == 1:
            raise SystemExit(3)

async def main():
    model = nn.Linear(2, 2)
    trainer = Trainer(
        model, [(torch.rand(2, 2), torch.rand(2, 2))] * 3, loss=mse_loss, max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters()), callbacks=[CheckpointSaver(sys.argv[1], "1ba"), Leave()],
    )
    async with trainer:
        try:
            await trainer.fit()
        finally:
            await trainer.engine.close(timeout=0.05)

anyio.run(main)
"""


def test_a_process_ends_after_its_last_checkpoint(tmp_path: Path, start: Start) -> None:
    """One whose run was given up on while it was written: it is whole all the same, and the process ends."""
    process = start(LEAVE, tmp_path)
    _, logged = process.communicate(timeout=60)

    assert process.returncode == 3, logged
    assert [path.name for path in find_checkpoints(tmp_path)] == ["ep0-ba1"]
    open_checkpoint(tmp_path / "latest")
