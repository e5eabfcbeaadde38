"""Train a small CNN on handwritten digits with several algorithms, and look at what ran, when and in which order.

The algorithms are registered in no particular order: the engine puts them into the one in which they work, and says
so before the training starts. What ran ends up as spans. With OTEL_EXPORTER_OTLP_ENDPOINT set (http://localhost:4318
for a local Jaeger) they go there; without it they go to a file, as OTLP JSON lines.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from eventbus_engine import Callback, Event, telemetry
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import LabelSmoothing, MixUp, SelectiveBackprop

SPANS = Path("runs/examples/train-digits-spans.jsonl")


class Progress(Callback[State]):
    """Prints a line after each evaluation."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """The trainer has just put the metrics into the state."""
        loss, accuracy = state.metrics["metrics/eval/loss"], state.metrics["metrics/eval/accuracy"]
        print(f"epoch {int(state.timestamp.epoch)}: held-out loss {loss:.3f}, accuracy {accuracy:.1%}")


def make_loaders() -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    """Batches of images (32, 1, 8, 8) and labels (32,), a fifth of the digits held out."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(digits))
    train, held_out = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(1))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=512)


def make_model() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    """Train for six epochs."""
    torch.manual_seed(1)  # for the initial weights; what comes after is seeded by the trainer
    model, (train_loader, eval_loader) = make_model(), make_loaders()
    trainer = Trainer(
        model,
        train_loader,
        eval_loader,
        loss=F.cross_entropy,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.003),
        max_duration="6ep",
        algorithms=[LabelSmoothing(), MixUp(), SelectiveBackprop()],
        callbacks=[Progress()],
        seed=1,
    )
    # Labels are smoothed once they are mixed, whichever is registered first. In the second half of the training
    # SelectiveBackprop joins, on AFTER_DATALOADER, ahead of MixUp.
    print(trainer.engine.explain(Event.BEFORE_LOSS))

    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    with telemetry.configure(service_name="digits", endpoint=endpoint, path=None if endpoint else SPANS):
        anyio.run(trainer.fit)

    print(f"held-out accuracy: {trainer.state.metrics['metrics/eval/accuracy']:.1%}")
    print(f"spans: {endpoint or SPANS}; to look at a file: eventbus-engine trace summary {SPANS}")


if __name__ == "__main__":
    main()
