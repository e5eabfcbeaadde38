"""transformers' `Trainer`, bare and with `eventbus_adapters.huggingface`, for `bench_adapters.py`."""

from __future__ import annotations

import tempfile
from typing import Any

import torch.nn.functional as F  # noqa: N812 -- its usual name
from loops import Job
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from eventbus_adapters.huggingface import use_engine
from eventbus_engine import Engine

__all__ = ["TITLE", "train"]

TITLE = "transformers"


class Model(nn.Module):
    """A model as transformers has them: called by name, with the loss among its outputs."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The logits, and their loss."""
        logits = self.layers(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Loop(Trainer):
    """A Trainer that gets its batches from the job, which takes the time when it is asked."""

    job: Job

    def get_train_dataloader(self) -> Any:
        """The job's loader, whose batches have names."""
        return Batches(self.job)


class Batches:
    """The batches of a job as mappings."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __len__(self) -> int:
        return len(self._job)

    def __iter__(self) -> Any:
        return ({"inputs": inputs, "labels": labels} for inputs, labels in self._job)


def train(job: Job, engine: Engine[Any] | None) -> None:
    """`Trainer.train` for as many steps, without logs, clipping and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=job.steps,
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Loop(Model(job.model), arguments, train_dataset=[0], optimizers=(job.optimizer, None))
        trainer.job = job
        trainer.remove_callback(PrinterCallback)
        if engine is not None:
            use_engine(trainer, engine)
        trainer.train()
