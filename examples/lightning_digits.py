"""A Lightning program with ordered algorithms: the Trainer and the module stay as they are, and one callback is added.

SelectiveBackprop picks the half of each batch that is worth learning from, LabelSmoothing smooths what is left of it
around the loss. Lightning has no hook that could change a batch or a loss; the engine gets both to the module.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from eventbus_adapters.lightning import EngineCallback
from eventbus_engine import Callback, Engine
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Digits(pl.LightningModule):
    """A small classifier, written as for Lightning alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss."""
        images, labels = batch
        return self.criterion(self(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class Report(Callback[Any]):
    """Says how it goes. The batch is what SelectiveBackprop has left of it."""

    def epoch_end(self, state: Any, logger: Any) -> None:
        """Lightning has validated by then."""
        accuracy = state.metrics["metrics/eval/accuracy"]
        print(f"epoch {int(state.timestamp.epoch)}: {len(state.batch[0])} of 128 samples, accuracy {accuracy:.2f}")


def load(first: int, last: int) -> DataLoader[Any]:
    """A part of the 1,797 digits of 8 by 8 pixels."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels[first:last] / 16, dtype=torch.float32)
    return DataLoader(TensorDataset(images, torch.tensor(digits[first:last])), batch_size=128)


def main() -> None:
    """Train for three epochs."""
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.manual_seed(0)

    engine = Engine(
        algorithms=[LabelSmoothing(0.1), SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)],
        callbacks=[Report()],
    )
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", callbacks=[EngineCallback(engine, loss="criterion")], **QUIET)
    trainer.fit(Digits(), load(0, 1408), load(1408, 1797))
    engine.sync.close()


if __name__ == "__main__":
    main()
