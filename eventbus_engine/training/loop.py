"""The training loop: what happens to a model, and the event that fires at each point of it.

Every computation goes through `state.compute`, which takes it off the event loop, and enters what it needs of torch's
modes itself: they belong to a thread, so there is never an `await` inside one of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from eventbus_engine._options import read_option
from eventbus_engine.engine import Engine
from eventbus_engine.errors import BatchError
from eventbus_engine.event import Event
from eventbus_engine.time import Time, TimeUnit
from eventbus_engine.training.data import EXHAUSTED, BatchSource, count_samples, count_tokens, describe, split
from eventbus_engine.training.evaluator import Evaluator, evaluate
from eventbus_engine.training.model import compute_loss, forward
from eventbus_engine.training.state import State
from eventbus_engine.training.tracing import RunTracing

__all__ = ["TrainingLoop"]


@dataclass
class TrainingLoop:
    """Trains `state.model` on the batches of `source` until `state.max_duration`, and evaluates it at times.

    Attributes:
        state: the state of the run.
        engine: publishes the events.
        source: the training batches.
        evaluators: run every `eval_interval`.
        eval_interval: in epochs or batches.
        step_schedulers_every_batch: step the learning-rate schedulers with the batch instead of the epoch.
        tracing: opens the spans of the epochs, batches and evaluations.
    """

    state: State
    engine: Engine[State]
    source: BatchSource
    evaluators: Sequence[Evaluator]
    eval_interval: Time
    step_schedulers_every_batch: bool
    tracing: RunTracing
    _lap: float = field(default=0.0, init=False)

    async def fit(self) -> None:
        """One call of fit is one iteration, of as many epochs as `max_duration` allows."""
        state, engine = self.state, self.engine
        await engine.run_event(Event.FIT_START)
        await engine.run_event(Event.ITERATION_START)
        state.model.train()
        self._lap = time.perf_counter()
        complete = True
        while complete and not self._is_over():
            with self.tracing.unit("epoch"):
                complete = await self._run_epoch()
        self._count_iteration()
        await engine.run_event(Event.ITERATION_END)
        await engine.run_event(Event.ITERATION_CHECKPOINT)
        await engine.run_event(Event.FIT_END)

    async def _run_epoch(self) -> bool:
        """Train on what is left of the epoch; whether it saw all its data, without which it does not end."""
        state, engine = self.state, self.engine
        if state.timestamp.batch_in_epoch == 0:  # else an earlier fit has stopped inside this epoch
            await engine.run_event(Event.EPOCH_START)
        while not self._is_over():
            with self.tracing.unit("batch") as unit:
                exhausted = not await self._run_batch()
                if exhausted:
                    unit.rename("end of data")
            if exhausted:
                break
            await self._evaluate_if_due(TimeUnit.BATCH)
            with unit.resumed():
                await engine.run_event(Event.BATCH_CHECKPOINT)
        else:
            if self.source.length != int(state.timestamp.batch_in_epoch):
                return False
            await self.source.aclose()  # known to be at its end, so nobody will ask it again
        if not self.step_schedulers_every_batch:
            await state.compute(_step_schedulers, state)
        state.timestamp = state.timestamp.to_next_epoch()
        await engine.run_event(Event.EPOCH_END)
        await self._evaluate_if_due(TimeUnit.EPOCH)
        await engine.run_event(Event.EPOCH_CHECKPOINT)
        return True

    async def _run_batch(self) -> bool:
        """Fetch the next batch and train on it; False if there is none."""
        state, engine, timed = self.state, self.engine, self.tracing.timed
        async with engine.pair(Event.BEFORE_DATALOADER) as section:
            batch = await self.source.fetch(state.compute, state.device)
            if batch is EXHAUSTED:
                self._refuse_empty_epoch()
                section.abandon()  # without a batch there is no AFTER_DATALOADER
                return False
            state.batch = batch
            samples, tokens = self._count(batch)  # now: algorithms may drop samples that the run has seen

        async with engine.pair(Event.BATCH_START):
            await self._train_batch()
            with self.tracing.section("optimizer"):
                loss = await state.compute(timed("optimizer", _step), state)
            if self.step_schedulers_every_batch:
                await state.compute(_step_schedulers, state)
            state.timestamp = state.timestamp.to_next_batch(samples, tokens, duration=self._next_lap())
            engine.logger.log_metrics({"loss/train/total": loss})
        return True

    async def _train_batch(self) -> None:
        """Forward, loss and backward, a microbatch at a time; the gradients add up to the whole batch's."""
        state, engine, timed = self.state, self.engine, self.tracing.timed
        async with engine.pair(Event.BEFORE_TRAIN_BATCH):
            whole, total = state.batch, None
            microbatches = await state.compute(_begin_batch, state)
            for state.batch, weight in microbatches:
                async with engine.pair(Event.BEFORE_FORWARD):
                    state.outputs = await state.compute(timed("forward", _forward), state)
                async with engine.pair(Event.BEFORE_LOSS):
                    state.loss = await state.compute(timed("loss", _loss), state)
                async with engine.pair(Event.BEFORE_BACKWARD):
                    total = await state.compute(timed("backward", _backward), state, weight, total)
            state.batch, state.loss = whole, total

    async def _evaluate_if_due(self, unit: TimeUnit) -> None:
        done = self.state.timestamp.get(unit)
        if not self.evaluators or self.eval_interval.unit != unit or int(done) % int(self.eval_interval):
            return
        started = time.perf_counter()
        with self.tracing.unit("eval"):
            async with self.engine.pair(Event.EVAL_BEFORE_ALL):
                await evaluate(self.state, self.engine, self.evaluators)
        self._lap += time.perf_counter() - started  # evaluation is no part of the training time

    def _is_over(self) -> bool:
        # read anew each time: a handler may have called stop_training
        duration = self.state.max_duration
        return duration is not None and self.state.timestamp >= duration

    def _next_lap(self) -> timedelta:
        now = time.perf_counter()
        lap, self._lap = now - self._lap, now
        return timedelta(seconds=lap)

    def _count(self, batch: Any) -> tuple[int, int]:
        """Samples and tokens of a batch fresh from the loader."""
        samples, tokens, duration = count_samples(batch), count_tokens(batch), self.state.max_duration
        if not tokens and duration is not None and duration.unit == TimeUnit.TOKEN:
            raise BatchError(
                f"max_duration is {duration}, but the batch, {describe(batch)}, has no tokens to count; "
                f"yield mappings with 'input_ids', or give max_duration in epochs, batches or samples"
            )
        return samples, tokens

    def _refuse_empty_epoch(self) -> None:
        if self.state.timestamp.batch_in_epoch == 0:
            raise BatchError(
                f"train_dataloader yielded no batch in epoch {int(self.state.timestamp.epoch)}; give a loader with "
                f"data that can be iterated again for every epoch (a DataLoader, a list), not an iterator"
            )

    def _count_iteration(self) -> None:
        """The next iteration begins, but an epoch that was cut short goes on where it is."""
        now = self.state.timestamp
        self.state.timestamp = now.to_next_iteration().copy(
            batch_in_epoch=now.batch_in_epoch,
            sample_in_epoch=now.sample_in_epoch,
            token_in_epoch=now.token_in_epoch,
            epoch_wct=now.epoch_wct,
        )


# ------------------------------------------------------------------------------------ the computations, on the worker


def _begin_batch(state: State) -> list[tuple[Any, float]]:
    """The microbatches, each with its part of the whole batch's samples."""
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    samples = count_samples(state.batch)
    return [(part, count_samples(part) / samples) for part in split(state.batch, state.microbatches)]


def _forward(state: State) -> Any:
    with torch.enable_grad(), state.precision_context():
        return forward(state.model, state.batch, state.loss_fn)


def _loss(state: State) -> Tensor:
    with torch.enable_grad(), state.precision_context():
        return compute_loss(state.model, state.outputs, state.batch, state.loss_fn)


def _backward(state: State, weight: float, total: Tensor | None) -> Tensor:
    """Backpropagate, and add the microbatch's part to the loss of the whole batch."""
    assert state.loss is not None  # noqa: S101 -- the loss section has set it
    create_graph = any(read_option(item, "backwards_create_graph", False) is True for item in state.algorithms)
    with torch.enable_grad():
        # The loss is a mean over the microbatch: weighted by its size, the gradient is that of the whole batch's mean.
        (state.loss * weight).backward(create_graph=create_graph)  # type: ignore[no-untyped-call]
    part = state.loss.detach() * weight
    return part if total is None else total + part


def _step(state: State) -> float:
    """Step the optimizers; the loss of the batch, as a number."""
    assert state.loss is not None  # noqa: S101 -- the batch has set it
    for optimizer in state.optimizers:
        optimizer.step()
    return float(state.loss.item())  # note: a CPU-GPU sync point, on the one thread that may wait


def _step_schedulers(state: State) -> None:
    for scheduler in state.schedulers:
        scheduler.step()
