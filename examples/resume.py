"""Train, be cut short, and go on: the numbers are those of the run that was not.

A run trains to its end. Another one like it is cut short in the middle of an epoch; it has saved a checkpoint every
five batches. Started again, it goes on from the newest one. Every loss that it then has, and every weight that it ends
with, is the uninterrupted run's, bit for bit, although the loader shuffles, the model drops out, and the batches are
blended at random.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventbus_engine import Callback
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import EMA, MixUp
from eventbus_engine.training.callbacks import CheckpointSaver
from eventbus_engine.training.checkpoint import find_checkpoints


class PowerCutError(Exception):
    """What ends the second run."""


class Losses(Callback[State]):
    """Keeps the loss of each batch, and cuts the run short after so many."""

    def __init__(self, cut_after: int | None = None) -> None:
        super().__init__()
        self.cut_after = cut_after
        self.seen: dict[int, float] = {}

    def batch_end(self, state: State, logger: Logger) -> None:
        """The timestamp counts the batch already."""
        batch = int(state.timestamp.batch)
        assert state.loss is not None
        self.seen[batch] = float(state.loss)
        if batch == self.cut_after:
            raise PowerCutError


def make_trainer(folder: Path, losses: Losses) -> Trainer:
    """The same program each time: what differs is what it finds in the folder."""
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
    torch.manual_seed(1)  # for the initial weights; what comes after is seeded by the trainer
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    return Trainer(
        model,
        DataLoader(data, batch_size=128, shuffle=True),
        loss=F.cross_entropy,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration="4ep",
        algorithms=[MixUp(), EMA()],
        callbacks=[losses, CheckpointSaver(folder, "5ba", keep=2)],
        autoresume=True,
        seed=1,
    )


def main() -> None:
    """Three runs."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Losses()
        uninterrupted = make_trainer(Path(folder) / "whole", whole)
        anyio.run(uninterrupted.fit)
        print(f"uninterrupted: {len(whole.seen)} batches, loss {whole.seen[max(whole.seen)]!r}")

        first = Losses(cut_after=38)
        try:
            anyio.run(make_trainer(Path(folder) / "cut", first).fit)
        except* PowerCutError:
            newest = find_checkpoints(Path(folder) / "cut")[-1]
            print(f"cut short:     after batch {max(first.seen)}; the newest checkpoint is {newest.name}")

        second = Losses()
        resumed = make_trainer(Path(folder) / "cut", second)
        anyio.run(resumed.fit)
        print(f"resumed:       from batch {min(second.seen)}, loss {second.seen[max(second.seen)]!r}")

    losses = all(whole.seen[batch] == loss for batch, loss in second.seen.items())
    before, after = uninterrupted.state.model.state_dict(), resumed.state.model.state_dict()
    weights = all(torch.equal(before[name], after[name]) for name in before)
    print(f"the same losses: {losses}; the same weights: {weights}")
    if not (losses and weights):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
