"""Train on handwritten digits, and look at what ran, when and in which order.

With OTEL_EXPORTER_OTLP_ENDPOINT set (http://localhost:4318 for a local Jaeger) the spans go there; without it they go
to a file, as OTLP JSON lines.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventbus_engine import telemetry
from eventbus_engine.training import Trainer
from eventbus_engine.training.algorithms import MixUp, SelectiveBackprop

SPANS = Path("runs/examples/training-spans.jsonl")


def main() -> None:
    """Train for three epochs."""
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
    train, held_out = torch.utils.data.random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(1))
    train_loader, eval_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=360)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    with telemetry.configure(service_name="digits", endpoint=endpoint, path=None if endpoint else SPANS):
        trainer = Trainer(
            model,
            train_loader,
            eval_loader,
            loss=F.cross_entropy,
            optimizers=opt,
            max_duration="3ep",
            algorithms=[MixUp(), SelectiveBackprop()],
        )
        anyio.run(trainer.fit)
    print(f"held-out accuracy: {trainer.state.metrics['metrics/eval/accuracy']:.1%}")
    print(f"spans: {endpoint or SPANS}")


if __name__ == "__main__":
    main()
