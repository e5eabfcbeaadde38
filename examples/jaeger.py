"""A hand-written PyTorch loop, its traces in Jaeger.

The spans go where OTEL_EXPORTER_OTLP_ENDPOINT says; without it to a collector on this machine, if one listens on port
4318 (`docker compose up -d` starts Jaeger there); without that to a file, as OTLP JSON lines.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventbus_adapters.torch_loop import instrument
from eventbus_engine import Engine, telemetry
from eventbus_engine.training.algorithms import LabelSmoothing, MixUp

LOCAL = ("127.0.0.1", 4318)
SPANS = Path("runs/examples/jaeger-spans.jsonl")
INTERFACE = "http://localhost:16686"


def main() -> None:
    """Train for two epochs of a few batches."""
    endpoint, path = destination()
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:512], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits[:512])), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    engine = Engine(algorithms=[MixUp(), LabelSmoothing()])
    with telemetry.configure(service_name="digits", endpoint=endpoint, path=path):
        with instrument(engine, model, optimizer, loader, F.cross_entropy, max_duration="2ep") as loop:
            for epoch in range(2):
                for inputs, targets in loop:
                    optimizer.zero_grad()
                    loss = loop.loss(model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                print(f"epoch {epoch}: loss {float(loop.state.loss):.3f}")
        engine.sync.close()

    if path is None:
        where = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or endpoint
        print(f"spans: sent to {where}; in Jaeger ({INTERFACE} here): service digits, operation batch")
    else:
        print(f"spans: nobody listens on port {LOCAL[1]}, so they are in {path}; eventbus-engine trace show {path}")


def destination() -> tuple[str | None, Path | None]:
    """The endpoint and the file to give to `configure`, which reads the environment by itself."""
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return None, None
    try:
        socket.create_connection(LOCAL, timeout=1).close()
    except OSError:
        return None, SPANS
    return f"http://{LOCAL[0]}:{LOCAL[1]}", None


if __name__ == "__main__":
    main()
