"""A seeded training run is the same, bit for bit, whether and wherever its traces go."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TRAINING = """
import contextlib, hashlib, json, random, sys
import anyio, numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from eventbus_engine import Callback, telemetry
from eventbus_engine.training import Trainer
from eventbus_engine.training.algorithms import LabelSmoothing, MixUp

way, where = sys.argv[1:]
torch.set_num_threads(1)
random.seed(42), numpy.random.seed(42), torch.manual_seed(42)

class Losses(Callback):
    values = []
    def batch_end(self, state, logger):
        self.values.append(state.loss.item().hex())
        random.random(), numpy.random.random()  # an augmentation's draws

def stock():
    # The SDK's way, whose ids come from the global random.
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    return contextlib.nullcontext()

tracing = {
    "off": contextlib.nullcontext,
    "stock": stock,
    "file": lambda: telemetry.configure(path=where),
    "export": lambda: telemetry.configure(endpoint=where, shutdown_timeout=1),
}[way]
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
trainer = Trainer(
    model, DataLoader(data, batch_size=8, shuffle=True), loss=nn.functional.cross_entropy,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration="4ep",
    algorithms=[MixUp(), LabelSmoothing()], callbacks=[Losses()],
)
with tracing():
    anyio.run(trainer.fit)

def digest(state):
    return hashlib.sha256(state).hexdigest()

print(json.dumps({
    "losses": Losses.values,
    "weights": [digest(weights.detach().numpy().tobytes()) for weights in model.parameters()],
    "random": digest(repr(random.getstate()).encode()),
    "numpy": digest(repr(numpy.random.get_state(legacy=False)["state"]["pos"]).encode()
                    + numpy.random.get_state(legacy=False)["state"]["key"].tobytes()),
    "torch": digest(torch.get_rng_state().numpy().tobytes()),
}))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def train(start: Start) -> Callable[..., subprocess.Popen[str]]:
    """Start the training with its traces going some way."""
    # Exports begin while the training goes on, so that retries and their jitter fall into it.
    return lambda *arguments: start(TRAINING, *arguments, OTEL_BSP_SCHEDULE_DELAY="5")


def result_of(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """What the training printed, and what it logged."""
    printed, logged = process.communicate(timeout=100)
    assert process.returncode == 0, logged
    return json.loads(printed), logged


def test_the_generators_and_the_losses_are_those_of_the_run_without_tracing(
    train: Start, endpoints: dict[str, Any], tmp_path: Path
) -> None:
    """Into a file, to a live collector, to a refusing port, to one that never answers, to one that answers 503.

    The SDK's own set-up, whose ids come from the global `random`, shows that the comparison can tell.
    """
    path = tmp_path / "spans.jsonl"
    ways: dict[str, tuple[object, ...]] = {"off": ("off", ""), "file": ("file", path)}
    ways["stock"] = ("stock", "")
    ways |= {name: ("export", endpoint.url) for name, endpoint in endpoints.items()}
    with ThreadPoolExecutor(2) as runs:
        results = dict(zip(ways, runs.map(lambda way: result_of(train(*way)), ways.values()), strict=True))
    expected, _ = results["off"]
    stock, _ = results.pop("stock")

    assert len(expected["losses"]) == 32
    assert {name: result for name, (result, _) in results.items()} == dict.fromkeys(results, expected)
    assert path.stat().st_size > 0
    assert all(endpoints[name].visits for name in ("live", "overloaded", "black hole"))
    lost = {name for name, (_, logged) in results.items() if "did not reach" in logged}
    assert lost == {"overloaded", "refusing", "black hole"}
    assert {part for part in expected if stock[part] != expected[part]} == {"random"}
