"""Evaluation: run the model over loaders without training it, and measure it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from eventbus_engine.engine import Engine
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.time import Time, Timestamp, TimeUnit
from eventbus_engine.training.arguments import INTERVAL_UNITS, check_duration, check_subset
from eventbus_engine.training.data import count_samples, count_tokens
from eventbus_engine.training.generators import kept_generators
from eventbus_engine.training.metrics import Measures, Metric, name_metrics
from eventbus_engine.training.model import compute_loss, forward, inputs_and_targets
from eventbus_engine.training.source import EXHAUSTED, BatchSource
from eventbus_engine.training.state import State

__all__ = ["Evaluator", "eval_mode", "evaluate", "is_due", "make_evaluators", "next_batch", "share_buffers"]


class Evaluator:
    """A loader to evaluate on, and the label that its metrics are logged under: `metrics/<label>/accuracy`.

    Args:
        dataloader: yields batches of the same form as the training loader's.
        label: tells several evaluators apart.
        metrics: what to measure besides the loss, instead of the accuracy: metrics of torchmetrics, or anything with
            `update(outputs, targets)`, `compute()` and `reset()`; one, several, which go by the names of their classes,
            or a mapping from names to them. They move to the run's device.
        interval: how often to evaluate on it in `fit`, as the trainer's `eval_interval`, which is the default.
        subset_num_batches: use so many batches of the loader and no more; all of them by default.

    Raises:
        ConfigurationError: the loader cannot be iterated, the label is empty, or another argument does not fit.
        TimeFormatError: the interval does not parse.
    """

    def __init__(
        self,
        dataloader: Any,
        label: str = "eval",
        *,
        metrics: Any = None,
        interval: str | int | Time | None = None,
        subset_num_batches: int | None = None,
    ) -> None:
        if not label:
            raise ConfigurationError(f"an evaluator's label is {label!r}; give a name, for example 'eval'")
        self.label = label
        self.dataloader = dataloader
        self.source: BatchSource = BatchSource(dataloader, f"the dataloader of evaluator {label!r}")
        self.metrics: dict[str, Metric] | None = None if metrics is None else name_metrics(metrics, label)
        self.interval: Time | None = None
        if interval is not None:
            self.interval = check_duration(f"interval of evaluator {label!r}", interval, INTERVAL_UNITS)
        self.subset_num_batches: int | None = check_subset(subset_num_batches)


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


def is_due(interval: Time, before: Timestamp, now: Timestamp, max_duration: Time | None) -> bool:
    """Whether an interval has come round between two moments of a run.

    Args:
        interval: in any unit; one in DURATION is a fraction of `max_duration`, in whose unit it is counted.
        before: the earlier moment.
        now: the later one.
        max_duration: of the run.
    """
    unit, every = interval.unit, float(interval.value)
    if unit is TimeUnit.DURATION:
        if max_duration is None:
            return False
        unit, every = max_duration.unit, every * max_duration.value
        if not every:  # stopped in the first batch, and so at its end
            return True
    # A little more than nothing, or 0.3 of 10 batches would fall after the third, by rounding.
    rounds_before, rounds_now = (math.floor(float(moment.get(unit).value) / every + 1e-9) for moment in (before, now))
    return rounds_now > rounds_before


async def next_batch(source: BatchSource, state: State, most: int | None) -> Any:
    """Fetch the next batch of an evaluation or a prediction into the state; `EXHAUSTED` at the end, or after `most`."""
    done = int(state.eval_timestamp.batch)
    if done == 0:
        await source.aclose()  # one that failed halfway has left its place
    if done == most:
        await source.aclose()
        return EXHAUSTED
    batch = await source.fetch(state.compute, state.device)
    if state._ranks.in_step:
        while await state.compute(state._ranks.any, batch is not EXHAUSTED) and batch is EXHAUSTED:
            # The model is in parts, and the others cannot use theirs alone.
            await state.compute(_accompany, state)
    if batch is not EXHAUSTED:
        state.batch = batch
    return batch


def _accompany(state: State) -> None:
    """Run the model on the latest batch once more, for the sake of the other ranks."""
    if state.batch is None:
        raise BatchError(
            f"rank {state.rank} has no batch to evaluate, but others have, and a model that is cut up runs on all "
            f"ranks at once; give every rank a batch"
        )
    with torch.no_grad(), state.precision_context():
        forward(state.model, state.batch, state.loss_fn, targets=False, runner=state.local_runner)


async def share_buffers(state: State) -> None:
    """Evaluate the same model on every rank, with the running statistics of rank 0."""
    if state._ranks.together:
        await state.compute(state._ranks.share_buffers, state.model)


async def evaluate(state: State, engine: Engine[State], evaluators: Sequence[Evaluator]) -> None:
    """Run every evaluator, with its events, and leave the metrics in `state.metrics` and with the logger.

    The batch, outputs and loss in the state, the training mode of every module and the global generators are
    afterwards what they were.

    Raises:
        BatchError: a loader yielded no batch.
    """
    kept = state.batch, state.outputs, state.loss
    try:
        with eval_mode(state.model), kept_generators():
            await share_buffers(state)
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
    measures = await state.compute(Measures, evaluator.metrics, state.device)
    state.eval_timestamp = Timestamp()
    while (batch := await next_batch(evaluator.source, state, evaluator.subset_num_batches)) is not EXHAUSTED:
        samples = count_samples(batch)
        async with engine.pair(Event.EVAL_BATCH_START):
            async with engine.pair(Event.EVAL_BEFORE_FORWARD):
                state.outputs = await state.compute(_forward, state)
            await state.compute(_measure, state, measures, samples)
            state.eval_timestamp = state.eval_timestamp.to_next_batch(samples=samples, tokens=count_tokens(batch))
    if state.eval_timestamp.batch == 0:
        raise BatchError(
            f"the dataloader of evaluator {evaluator.label!r} yielded no batch; give a loader that can be iterated "
            f"again for every evaluation, not an iterator"
        )
    return await state.compute(measures.compute, state._ranks.sum if state._ranks.together else None)


def _forward(state: State) -> Any:
    with torch.no_grad(), state.precision_context():
        return forward(state.model, state.batch, state.loss_fn, runner=state.local_runner)


def _measure(state: State, measures: Measures, samples: int) -> None:
    with torch.no_grad(), state.precision_context():
        loss = compute_loss(state.model, state.outputs, state.batch, state.loss_fn)
        try:
            targets = inputs_and_targets(state.batch)[1]
        except BatchError:
            if measures.metrics:
                raise
            targets = None  # a model that reads its batches itself: its loss is all there is to measure
        measures.update(loss, state.outputs, targets, samples)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and back in its own: some may be meant to stay frozen while training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
