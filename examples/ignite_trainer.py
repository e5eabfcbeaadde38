"""An ignite trainer and evaluator with ordered algorithms.

    python examples/ignite_trainer.py

A small network learns real handwritten digits.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventbus_adapters.ignite import use_engine  # before ignite, which torch would warn of
from eventbus_engine import Callback, Engine, Event
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop

from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer  # isort: skip
from ignite.metrics import Accuracy  # isort: skip


class Watch(Callback[Any]):
    """Prints what each evaluation has found."""

    def eval_after_all(self, state: Any, logger: Any) -> None:
        """After an epoch."""
        print(f"epoch {state.timestamp.epoch}: accuracy {state.metrics['metrics/test/accuracy']:.2f}")


def main() -> None:
    """Train for five epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits: Any = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(dataset, [1500, len(dataset) - 1500])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, loss)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
    engine: Engine[Any] = Engine(algorithms=[LabelSmoothing(0.1), SelectiveBackprop()], callbacks=[Watch()])
    use_engine(trainer, engine, model, optimizer, loss, evaluators={"test": evaluator})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(DataLoader(test, batch_size=128)))

    trainer.run(DataLoader(train, batch_size=64, shuffle=True), max_epochs=5)

    print(engine.explain(Event.BEFORE_LOSS))
    engine.sync.close()


if __name__ == "__main__":
    main()
