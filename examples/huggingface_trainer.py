"""A transformers Trainer with ordered algorithms.

    python examples/huggingface_trainer.py

A tiny BERT, made from a config, learns which of three tokens there are most of.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

from eventbus_adapters.huggingface import use_engine
from eventbus_engine import Callback, Engine, Event
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop


class Watch(Callback[Any]):
    """Prints what each evaluation has found."""

    def eval_after_all(self, state: Any, logger: Any) -> None:
        """After an epoch."""
        print(f"epoch {state.timestamp.epoch}: accuracy {state.metrics['metrics/eval/accuracy']:.2f}")


def make_data(samples: int, seed: int) -> list[dict[str, Any]]:
    """Rows of seven tokens of three kinds, and the kind that there are most of."""
    rows = torch.randint(0, 3, (samples, 7), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(torch.bincount(row, minlength=3).argmax())} for row in rows]


def accuracy(prediction: Any) -> dict[str, float]:
    """What the Trainer adds to the metrics of an evaluation."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    """Train for four epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=3,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
    )
    config.num_labels = 3
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir=str(Path(tempfile.gettempdir()) / "huggingface_trainer"),
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model, arguments, train_dataset=make_data(256, 0), eval_dataset=make_data(256, 1), compute_metrics=accuracy
    )
    trainer.remove_callback(PrinterCallback)
    pick = SelectiveBackprop(start=0.5, end=0.9, input_key="input_ids", target_key="labels")
    engine: Engine[Any] = Engine(algorithms=[LabelSmoothing(0.1, target_key="labels"), pick], callbacks=[Watch()])
    use_engine(trainer, engine, loss=F.cross_entropy)

    trainer.train()

    print(engine.explain(Event.BEFORE_LOSS))
    engine.sync.close()


if __name__ == "__main__":
    main()
