"""Evaluation: run the model over a loader without training it, and measure loss and accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eventbus_engine.engine import Engine
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.time import Timestamp
from eventbus_engine.training.data import EXHAUSTED, BatchSource, count_samples, count_tokens
from eventbus_engine.training.model import compute_loss, forward, inputs_and_targets
from eventbus_engine.training.state import State

__all__ = ["Evaluator", "Metrics", "evaluate", "make_evaluators"]


class Evaluator:
    """A loader to evaluate on, and the label that its metrics are logged under: `metrics/<label>/accuracy`.

    Args:
        dataloader: yields batches of the same form as the training loader's.
        label: tells several evaluators apart.

    Raises:
        ConfigurationError: the loader cannot be iterated, or the label is empty.
    """

    def __init__(self, dataloader: Any, label: str = "eval") -> None:
        if not label:
            raise ConfigurationError(f"an evaluator's label is {label!r}; give a name, for example 'eval'")
        self.label = label
        self.dataloader = dataloader
        self.source: BatchSource = BatchSource(dataloader, f"the dataloader of evaluator {label!r}")


def make_evaluators(eval_dataloader: Any) -> list[Evaluator]:
    """The evaluators of a trainer's `eval_dataloader`: one of a loader, or the ones given.

    Raises:
        ConfigurationError: it cannot be iterated, or two evaluators have the same label.
    """
    if eval_dataloader is None:
        return []
    given = eval_dataloader if isinstance(eval_dataloader, list | tuple) else [eval_dataloader]
    evaluators = [item for item in given if isinstance(item, Evaluator)]
    if not evaluators:
        return [Evaluator(eval_dataloader)]  # a list, then, is one of batches
    labels = [evaluator.label for evaluator in evaluators]
    if len(set(labels)) < len(given):
        raise ConfigurationError(
            f"eval_dataloader holds {len(given)} evaluators with the labels {', '.join(labels)}; give Evaluators only, "
            f"each with a label of its own"
        )
    return evaluators


class Metrics:
    """The mean loss over all samples and, for classification, the accuracy.

    Outputs count as classification where they are logits of shape (N, classes) and the targets class indices of
    shape (N,). The sums stay on the device until `compute`, so that no batch waits for the device.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._loss: Tensor | None = None
        self._classified = 0
        self._correct: Tensor | None = None

    def update(self, loss: Tensor, outputs: Any, targets: Any, samples: int) -> None:
        """Add a batch: its mean loss, a tensor of one element, and what it was the loss of."""
        self._samples += samples
        total = loss.detach().to(torch.promote_types(loss.dtype, torch.float32)) * samples
        self._loss = total if self._loss is None else self._loss + total
        if _is_classification(outputs, targets):
            correct = (outputs.detach().argmax(dim=1) == targets).sum()
            self._classified += targets.shape[0]
            self._correct = correct if self._correct is None else self._correct + correct

    def compute(self) -> dict[str, float]:
        """`loss`, and `accuracy` (0.0 to 1.0) if there was any classification."""
        values: dict[str, float] = {}
        if self._correct is not None:
            values["accuracy"] = self._correct.item() / self._classified
        if self._loss is not None:
            values["loss"] = self._loss.item() / self._samples
        return values


def _is_classification(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and (outputs.ndim, targets.ndim) == (2, 1)
        and outputs.shape[0] == targets.shape[0] > 0
        and not (targets.is_floating_point() or targets.dtype == torch.bool)
    )


async def evaluate(state: State, engine: Engine[State], evaluators: Sequence[Evaluator]) -> None:
    """Run every evaluator, with its events, and leave the metrics in `state.metrics` and with the logger.

    The batch, outputs and loss in the state, and the training mode of every module, are afterwards what they were.

    Raises:
        BatchError: a loader yielded no batch.
    """
    kept = state.batch, state.outputs, state.loss
    try:
        with _eval_mode(state.model):
            state.metrics = {}
            for evaluator in evaluators:
                async with engine.pair(Event.EVAL_START):
                    measured = await _run_evaluator(evaluator, state, engine)
                    named = {f"metrics/{evaluator.label}/{name}": value for name, value in measured.items()}
                    state.metrics.update(named)
                    engine.logger.log_metrics(named)
    finally:
        state.batch, state.outputs, state.loss = kept


async def _run_evaluator(evaluator: Evaluator, state: State, engine: Engine[State]) -> dict[str, float]:
    metrics = Metrics()
    state.eval_timestamp = Timestamp()
    while (batch := await evaluator.source.fetch(state.compute, state.device)) is not EXHAUSTED:
        state.batch = batch
        samples = count_samples(batch)
        async with engine.pair(Event.EVAL_BATCH_START):
            async with engine.pair(Event.EVAL_BEFORE_FORWARD):
                state.outputs = await state.compute(_forward, state)
            await state.compute(_measure, state, metrics, samples)
            state.eval_timestamp = state.eval_timestamp.to_next_batch(samples=samples, tokens=count_tokens(batch))
    if state.eval_timestamp.batch == 0:
        raise BatchError(
            f"the dataloader of evaluator {evaluator.label!r} yielded no batch; give a loader that can be iterated "
            f"again for every evaluation, not an iterator"
        )
    return await state.compute(metrics.compute)


def _forward(state: State) -> Any:
    with torch.no_grad(), state.precision_context():
        return forward(state.model, state.batch, state.loss_fn)


def _measure(state: State, metrics: Metrics, samples: int) -> None:
    with torch.no_grad(), state.precision_context():
        loss = compute_loss(state.model, state.outputs, state.batch, state.loss_fn)
        try:
            targets = inputs_and_targets(state.batch)[1]
        except BatchError:  # a model that reads its batches itself: its loss is all there is to measure
            targets = None
        metrics.update(loss, state.outputs, targets, samples)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and back in its own: some may be meant to stay frozen while training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
