"""A loop written against MosaicML Composer's core, on this engine: the two imports below are all that was changed.

Replace `eventbus_adapters.composer_api` by `composer`, and "cpu" by `composer.devices.DeviceCPU()`, and it runs on
Composer. There the last line shows that SelectiveBackprop has run last on AFTER_DATALOADER, where it has to be first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from eventbus_adapters.composer_api.core import Algorithm, Callback, Engine, Event, State, Time
from eventbus_adapters.composer_api.loggers import Logger, LoggerDestination


class AddNoise(Algorithm):
    """Adds noise to the inputs."""

    def match(self, event: Event, state: State) -> bool:
        """Run once the batch is loaded."""
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the inputs in place of the old ones."""
        state.batch_set_item(0, state.batch_get_item(0) + 0.1 * torch.randn(8, 4))


class SelectiveBackprop(AddNoise):
    """Keeps the half of the samples with the highest loss. The passes know it by its name."""

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Judge the samples as they were loaded, so before there is noise in them."""
        inputs, targets = state.batch
        with torch.no_grad():
            losses = cross_entropy(state.model(inputs), targets, reduction="none")
        keep = losses.argsort(descending=True)[: len(losses) // 2]
        weights = torch.zeros(len(losses)).index_fill(0, keep, 2.0)
        state.batch = (inputs, targets, weights)


class LogLoss(Callback):
    """Logs the loss of every batch."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log it."""
        assert isinstance(state.loss, torch.Tensor)
        logger.log_metrics({"loss": round(state.loss.item(), 3)})


class Print(LoggerDestination):
    """Prints what is logged."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Print it."""
        print(f"batch {step}: {dict(metrics)}")


torch.manual_seed(0)
batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(3)]
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
printer = Print()
state = State(model, 0, "example", "cpu", "1ep", algorithms=[SelectiveBackprop(), AddNoise()])
state.callbacks = [printer, LogLoss()]
state.set_dataloader(batches, "train")
engine = Engine(state, Logger(state, printer))
engine.run_event(Event.INIT)
traces = {}
while state.timestamp < Time.from_batch(len(batches)):
    state.batch = batches[int(state.timestamp.batch)]
    traces = engine.run_event(Event.AFTER_DATALOADER)
    inputs, targets, weights = state.batch
    state.loss = loss = (cross_entropy(model(inputs), targets, reduction="none") * weights).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.timestamp = state.timestamp.to_next_batch(samples=len(inputs))
    engine.run_event(Event.BATCH_END)
engine.close()
print("on AFTER_DATALOADER:", ", ".join(trace.name for trace in traces.values()))
