"""The training loop: what happens to a model, and the event that fires at each point of it.

Every computation goes through `state.compute`, which takes it off the event loop, and enters what it needs of torch's
modes itself: they belong to a thread, so there is never an `await` inside one of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eventbus_engine.engine import Engine
from eventbus_engine.errors import BatchError
from eventbus_engine.event import Event
from eventbus_engine.time import Time, Timestamp, TimeUnit
from eventbus_engine.training.data import count_samples, count_tokens, describe, split
from eventbus_engine.training.evaluator import Evaluator, evaluate, is_due
from eventbus_engine.training.learning_rates import set_learning_rates, step_schedulers
from eventbus_engine.training.model import compute_loss, forward
from eventbus_engine.training.ranks.ranks import Agreement
from eventbus_engine.training.section import Sections
from eventbus_engine.training.source import EXHAUSTED, BatchSource
from eventbus_engine.training.state import State
from eventbus_engine.training.tracing import RunTracing

__all__ = ["TrainingLoop"]

log: logging.Logger = logging.getLogger("eventbus_engine")


@dataclass
class TrainingLoop:
    """Trains `state.model` on the batches of `source` until `state.max_duration`, and evaluates it at times.

    Attributes:
        state: the state of the run.
        engine: publishes the events.
        sections: run a batch on the training thread, as far as they get.
        source: the training batches.
        evaluators: run whenever their intervals come round.
        eval_interval: of those that have none of their own.
        step_schedulers_every_batch: step the learning-rate schedulers with the batch instead of the epoch.
        tracing: opens the spans of the epochs, batches and evaluations.
    """

    state: State
    engine: Engine[State]
    sections: Sections
    source: BatchSource
    evaluators: Sequence[Evaluator]
    eval_interval: Time
    step_schedulers_every_batch: bool
    tracing: RunTracing
    _lap: float = field(default=0.0, init=False)
    _fresh: bool = field(default=False, init=False)  # the next forward pass is a batch's first
    _held: list[Any] = field(default_factory=list, init=False)  # the batch that was fetched as another rank stopped
    _share: float = field(default=1.0, init=False)  # this rank's, of the batch in progress

    async def fit(self) -> None:
        """One call of fit is one iteration, of as many epochs as `max_duration` allows."""
        state, engine = self.state, self.engine
        await engine.run_event(Event.FIT_START)
        await engine.run_event(Event.ITERATION_START)
        state.model.train()
        if state._ranks.together:
            await state.compute(state._ranks.check_lengths, self.source.length)
        self._lap = time.perf_counter()
        complete = True
        while complete and not await self._is_over_anywhere():
            with self.tracing.unit("epoch"):
                complete = await self._run_epoch()
        self._count_iteration()
        await engine.run_event(Event.ITERATION_END)
        await engine.run_event(Event.ITERATION_CHECKPOINT)
        await engine.run_event(Event.FIT_END)

    async def _run_epoch(self) -> bool:
        """Train on what is left of the epoch; whether it saw all its data, without which it does not end."""
        state, engine = self.state, self.engine
        self.source.position.epoch = int(state.timestamp.epoch)
        if state.timestamp.batch_in_epoch == 0:  # else an earlier fit has stopped inside this epoch
            await engine.run_event(Event.EPOCH_START)
        if not await self._run_batches():
            return False
        if not self.step_schedulers_every_batch:
            await state.compute(step_schedulers, state)
        before, state.timestamp = state.timestamp, state.timestamp.to_next_epoch()
        await engine.run_event(Event.EPOCH_END)
        await self._evaluate_if_due(before)
        await engine.run_event(Event.EPOCH_CHECKPOINT)
        return True

    async def _run_batches(self) -> bool:
        """Train until the data of the epoch is at its end, or the run is; whether the data is."""
        state = self.state
        while not self._is_over():
            before = state.timestamp
            with self.tracing.unit("batch") as unit:
                # An async loader may publish, so nothing is held while it is waited for.
                found = self._run_batch() if self.source.is_async else self.sections.run(self._run_batch)
                agreed = await found
                if agreed.exhausted:
                    unit.rename("end of data")
                elif agreed.over:
                    unit.rename("end of run")
            if agreed.ends:
                break
            await self._evaluate_if_due(before)
            with unit.resumed():
                await self.engine.run_event(Event.BATCH_CHECKPOINT)
        else:
            agreed = await self._agree(over=True)
        if not self._is_over() and agreed.over:
            state.stop_training()
        if not agreed.exhausted and self.source.length != int(state.timestamp.batch_in_epoch):
            return False
        self._held.clear()
        # Nobody will ask it again: it is at its end, or another rank is, or it is known to be.
        await (self.source.aclose() if agreed.exhausted else self.source.finish(state.compute))
        return True

    async def _run_batch(self) -> Agreement:
        """Fetch the next batch and train on it, if all ranks have one and none is to stop."""
        state, engine = self.state, self.engine
        async with engine.pair(Event.BEFORE_DATALOADER) as section:
            agreed = await self._fetch()
            if agreed.ends:
                section.abandon()  # without a batch there is no AFTER_DATALOADER
                return agreed

        if state.schedulers:
            await state.compute(set_learning_rates, state)
        async with engine.pair(Event.BATCH_START):
            loss = await self.sections.run(partial(self._train_and_step, agreed))
            # A run that was cancelled meanwhile ends here: the step counts, and nobody has heard of it yet.
            await self.sections.checkpoint_if_interrupted()
            engine.logger.log_metrics({"loss/train/total": loss})
        return agreed

    async def _fetch(self) -> Agreement:
        """Put the next batch into the state, if there is one for every rank."""
        state = self.state
        if self._held:
            batch = self._held.pop()
            self.source.position.count()
        else:
            batch = await self.source.fetch(state.compute, state.device)
        # Counted now: algorithms may drop samples that the run has seen.
        samples, tokens = (0, 0) if batch is EXHAUSTED else self._count(batch)
        agreed = await self._agree(exhausted=batch is EXHAUSTED, samples=samples, tokens=tokens)
        if agreed.exhausted:
            self._refuse_empty_epoch()
            if batch is not EXHAUSTED:
                epoch = int(state.timestamp.epoch)
                log.warning("rank %d has data left in epoch %d, but another rank has none", state.rank, epoch)
        elif agreed.over:
            self._held.append(batch)
            self.source.position.hold()
        else:
            state.batch, self._share = batch, agreed.share
        return agreed

    async def _agree(self, **told: Any) -> Agreement:
        """Tell the other ranks how far this one is, and hear about them."""
        ranks = self.state._ranks
        return await self.state.compute(ranks.agree, **told) if ranks.together else ranks.agree(**told)

    async def _train_and_step(self, agreed: Agreement) -> float:
        await self._train_batch()
        state = self.state
        # Together, so that nothing comes between: a step that was made is counted, whoever is cancelled meanwhile.
        step = self.tracing.timed("optimizer", _step)
        with self.tracing.section("optimizer"):
            return await state.compute(self._step_and_count, step, agreed)

    def _step_and_count(self, step: Callable[[State], float], agreed: Agreement) -> float:
        """Step optimizers and schedulers; the loss of the batch, as a number."""
        state = self.state
        loss = step(state)
        if self.step_schedulers_every_batch:
            step_schedulers(state)
        lap = self._next_lap()
        if state._ranks.together:
            # Also of the time, or what is due by the clock would be due on some ranks only.
            loss, seconds = state._ranks.mean([loss * agreed.share, lap.total_seconds()])
            assert state.loss is not None  # noqa: S101 -- the batch has set it
            state.loss, lap = torch.full_like(state.loss, loss), timedelta(seconds=seconds)
        state.timestamp = state.timestamp.to_next_batch(agreed.samples, agreed.tokens, duration=lap)
        return loss

    async def _train_batch(self) -> None:
        """The gradients of the batch, and its loss; what runs behind it may ask for them once more."""
        state = self.state
        try:
            async with self.engine.pair(Event.BEFORE_TRAIN_BATCH):
                self._fresh = True
                state.loss = await self._backpropagate()
                if state.scaler is not None:
                    await state.compute(_unscale, state)
                state._pass = self._backpropagate
        finally:
            state._pass = None

    async def _backpropagate(self) -> Tensor:
        """Forward, loss and backward, a microbatch at a time; the gradients add up to the whole batch's."""
        state, engine, timed = self.state, self.engine, self.tracing.timed
        whole, total, share = state.batch, None, self._share
        create_graph = any(getattr(item, "backwards_create_graph", False) is True for item in state.algorithms)
        parts = _microbatches(state)
        await self._check_parts(len(parts))
        for left, (state.batch, weight) in zip(reversed(range(len(parts))), parts, strict=True):
            fresh, self._fresh = self._fresh, False
            async with engine.pair(Event.BEFORE_FORWARD):
                state.outputs = await state.compute(timed("forward", _forward), state, fresh, not left)
            async with engine.pair(Event.BEFORE_LOSS):
                state.loss = await state.compute(timed("loss", _loss), state)
            async with engine.pair(Event.BEFORE_BACKWARD):
                total = await state.compute(timed("backward", _backward), state, weight, share, total, create_graph)
            if create_graph:
                await state.compute(_drop_graphs, state)
        state.batch = whole
        assert total is not None  # noqa: S101 -- a batch without samples has been refused
        return total

    async def _check_parts(self, parts: int) -> None:
        ranks, wanted = self.state._ranks, self.state.microbatches
        if ranks.in_step and wanted > 1:
            await self.state.compute(ranks.check_parts, parts)

    async def _evaluate_if_due(self, before: Timestamp) -> None:
        """Run the evaluators whose intervals have come round since."""
        state = self.state
        due = [
            evaluator
            for evaluator in self.evaluators
            if is_due(evaluator.interval or self.eval_interval, before, state.timestamp, state.max_duration)
        ]
        if not due:
            return
        started = time.perf_counter()
        with self.tracing.unit("eval"):
            async with self.engine.pair(Event.EVAL_BEFORE_ALL):
                await evaluate(state, self.engine, due)
        self._lap += time.perf_counter() - started  # evaluation is no part of the training time

    async def _is_over_anywhere(self) -> bool:
        """Whether it is over on any rank, between epochs."""
        ranks, over = self.state._ranks, self._is_over()
        return await self.state.compute(ranks.any, over) if ranks.together else over

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


def _microbatches(state: State) -> list[tuple[Any, float]]:
    """The parts of the batch, each with its share of the samples."""
    if state.microbatches == 1:
        return [(part, 1.0) for part in split(state.batch, 1)]
    samples = count_samples(state.batch)
    return [(part, count_samples(part) / samples) for part in split(state.batch, state.microbatches)]


# ------------------------------------------------------------------------------------ the computations, on the worker


def _forward(state: State, fresh: bool, last: bool) -> Any:
    """The outputs; of the first microbatch, after the gradients of the batch before have been dropped."""
    state._prepare(last=last)
    if fresh:
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
    with torch.enable_grad(), state.precision_context():
        return forward(state.model, state.batch, state.loss_fn, runner=state.runner)


def _loss(state: State) -> Tensor:
    with torch.enable_grad(), state.precision_context():
        return compute_loss(state.model, state.outputs, state.batch, state.loss_fn)


def _backward(state: State, weight: float, share: float, total: Tensor | None, create_graph: bool) -> Tensor:
    """Backpropagate, and add the microbatch's part to the loss of the whole batch."""
    assert state.loss is not None  # noqa: S101 -- the loss section has set it
    with torch.enable_grad():
        # The loss is a mean over the microbatch: weighted by its size, the gradient is that of the whole batch's mean;
        # and by this rank's share of the samples, the mean of the ranks' gradients is that of all their batches' mean.
        loss = state.loss if weight * share == 1 else state.loss * (weight * share)
        if state.scaler is not None:
            loss = state.scaler.scale(loss)
        if create_graph:
            _add_gradients_with_graph(loss, state)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
    part = state.loss.detach() if weight == 1 else state.loss.detach() * weight
    return part if total is None else total + part


def _add_gradients_with_graph(loss: Tensor, state: State) -> None:
    """As `loss.backward(create_graph=True)`, which warns of circles that `_drop_graphs` ends."""
    parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _drop_graphs(state: State) -> None:
    """Gradients with a graph hold on to their parameters, which hold on to them."""
    for parameter in state.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


def _unscale(state: State) -> None:
    assert state.scaler is not None  # noqa: S101 -- asked before
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)


def _step(state: State) -> float:
    """Step the optimizers; the loss of the batch, as a number."""
    assert state.loss is not None  # noqa: S101 -- the batch has set it
    scaled = False
    for optimizer in state.optimizers:
        if state.scaler is None or not _has_gradients(optimizer):  # the scaler refuses one that has nothing to step
            optimizer.step()
        else:
            state.scaler.step(optimizer)  # unless a gradient was not finite
            scaled = True
    if state.scaler is not None and scaled:
        state.scaler.update()
    return float(state.loss.item())  # note: a CPU-GPU sync point, on the one thread that may wait


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
