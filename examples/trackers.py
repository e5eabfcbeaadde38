"""Train on digits and log to three trackers at once; then ask each of the local ones what it has kept.

Needs the extras `train`, `tensorboard`, `wandb` and `mlflow`, and scikit-learn for the digits.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

# The clients' own, read when they are loaded: report to nobody, and keep quiet.
os.environ.update(WANDB_ERROR_REPORTING="false", WANDB_SILENT="true", MLFLOW_DISABLE_TELEMETRY="true")

import anyio
import torch
from mlflow import MlflowClient
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eventbus_adapters.mlflow import MLflowLogger
from eventbus_adapters.tensorboard import TensorBoardLogger
from eventbus_adapters.wandb import WandbLogger
from eventbus_engine.training import Trainer
from eventbus_engine.training.callbacks import LRMonitor


def make_trainer(trackers: list[TensorBoardLogger | WandbLogger | MLflowLogger]) -> Trainer:
    """A linear model of 8x8 digits, for two epochs."""
    digits: Any = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    model = torch.nn.Linear(64, 10)
    return Trainer(
        model,
        DataLoader(dataset, batch_size=128, shuffle=True),
        loss=functional.cross_entropy,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration="2ep",
        callbacks=[LRMonitor()],
        loggers=trackers,
        seed=7,
    )


def main() -> None:
    """Train, and read."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        board = TensorBoardLogger(folder / "board")
        offline = WandbLogger("digits", directory=folder)
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        # Makes the database, which takes longer than this whole training.
        client = MlflowClient(uri)
        client.create_experiment("digits", str(folder / "artifacts"))
        database = MLflowLogger(uri, experiment="digits")
        trainer = make_trainer([board, offline, database])
        anyio.run(trainer.fit)

        events = EventAccumulator(str(board.directory), {"scalars": 0}).Reload()
        tags: Any = events.Tags()["scalars"]
        for tag in tags:
            scalars = events.Scalars(tag)
            print(f"TensorBoard: {tag}, steps {scalars[0].step} to {scalars[-1].step}, last {scalars[-1].value:.3f}")
        assert database.run_id is not None
        for tag, value in client.get_run(database.run_id).data.metrics.items():
            print(f"MLflow: {tag}, last {value:.3f}")
        print(f"W&B: {sum(1 for _ in folder.glob('wandb/offline-run-*/run-*.wandb'))} run to sync")


if __name__ == "__main__":
    main()
