"""ignite's trainer, bare and with `eventbus_adapters.ignite`, for `bench_adapters.py`."""

from __future__ import annotations

from typing import Any

from loops import Job
from torch import nn

from eventbus_adapters.ignite import use_engine
from eventbus_engine import Engine

from ignite.engine import create_supervised_trainer  # isort: skip

__all__ = ["TITLE", "train"]

TITLE = "ignite"


def train(job: Job, engine: Engine[Any] | None) -> None:
    """`create_supervised_trainer`, run for an epoch."""
    loss = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(job.model, job.optimizer, loss)
    if engine is not None:
        use_engine(trainer, engine, job.model, job.optimizer, loss)
    trainer.run(job)
