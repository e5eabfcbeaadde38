"""Train on handwritten digits with as many ranks as there are, and see that they come to what one comes to.

Started by itself, it trains on one rank. Started by torchrun, it trains on several:

    torchrun --standalone --nproc-per-node=2 examples/distributed.py
    torchrun --standalone --nproc-per-node=2 examples/distributed.py fsdp

Each rank has its share of the digits and a batch that is so much smaller; the gradients are averaged, so the losses are
those of one rank, to rounding. With `fsdp` the model itself is cut up among the ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from eventbus_engine import Callback
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer, ranks
from eventbus_engine.training.algorithms import LabelSmoothing, LayerFreezing

BATCH = 64
"""Samples in a batch of all ranks together."""


class Progress(Callback[State]):
    """Prints a line after each evaluation. Callbacks run on every rank, so rank 0 speaks for all."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """The trainer has just put the metrics, which are those of all ranks, into the state."""
        if state.rank == 0:
            loss, accuracy = state.metrics["metrics/eval/loss"], state.metrics["metrics/eval/accuracy"]
            print(f"epoch {int(state.timestamp.epoch)}: held-out loss {loss:.4f}, accuracy {accuracy:.1%}")


def make_loaders(world_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of images (N, 64) and labels (N,), a fifth of the digits held out, each rank's own share of both."""
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
    train, held_out = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(1))
    return (
        DataLoader(train, batch_size=BATCH // world_size, sampler=ranks.sampler(train, seed=1)),
        DataLoader(held_out, batch_size=512, sampler=ranks.sampler(held_out, shuffle=False)),
    )


def main() -> None:
    """Train for five epochs."""
    torch.manual_seed(1)
    job = ranks.find_job() or ranks.Job()
    train_loader, eval_loader = make_loaders(job.world_size)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = Trainer(
        model,
        train_loader,
        eval_loader,
        loss=F.cross_entropy,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.003),
        max_duration="5ep",
        algorithms=[LabelSmoothing(), LayerFreezing()],
        callbacks=[Progress()],
        parallelism="fsdp" if "fsdp" in sys.argv else None,
        seed=1,
    )
    anyio.run(trainer.fit)
    if job.rank == 0:
        print(f"trained on {job.world_size} rank(s), {int(trainer.state.timestamp.sample)} samples in all")
        if job.world_size == 1:
            print("for more: torchrun --standalone --nproc-per-node=2 examples/distributed.py")


if __name__ == "__main__":
    main()
