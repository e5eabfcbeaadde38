"""Lightning's Trainer, bare and with our `EngineCallback`."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytorch_lightning as pl
from loops import Job
from torch import nn

from eventbus_adapters.lightning import EngineCallback
from eventbus_engine import Engine

__all__ = ["TITLE", "train"]

TITLE = "Lightning's Trainer"


class Module(pl.LightningModule):
    """The job's model and a loss that is known by its name."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.model
        self.criterion = nn.CrossEntropyLoss()
        self.configure_optimizers = lambda: job.optimizer  # type: ignore[method-assign]

    def forward(self, inputs: Any) -> Any:
        """The outputs."""
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss."""
        return self.criterion(self(batch[0]), batch[1])


def train(job: Job, engine: Engine[Any] | None) -> None:
    """Train without logger, progress bar and checkpoints."""
    for name in ("pytorch_lightning", "lightning_fabric", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=job.steps,
            callbacks=[] if engine is None else [EngineCallback(engine, loss="criterion")],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(job), job)
