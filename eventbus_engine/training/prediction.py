"""Prediction: run the model over a loader and keep what it says."""

from __future__ import annotations

from typing import Any

import torch

from eventbus_engine.engine import Engine
from eventbus_engine.event import Event
from eventbus_engine.time import Timestamp
from eventbus_engine.training.data import count_samples, count_tokens, move
from eventbus_engine.training.evaluator import eval_mode, next_batch, share_buffers
from eventbus_engine.training.generators import kept_generators
from eventbus_engine.training.model import forward
from eventbus_engine.training.source import EXHAUSTED, BatchSource
from eventbus_engine.training.state import State

__all__ = ["predict"]


async def predict(state: State, engine: Engine[State], source: BatchSource, most: int | None, keep: bool) -> list[Any]:
    """Run the model over a source, with the events of a prediction.

    The batch, outputs and loss in the state, the training mode of every module and the global generators are
    afterwards what they were.

    Args:
        state: of the run.
        engine: publishes the events.
        source: the batches, with or without targets.
        most: so many batches at most; None for all.
        keep: whether to return the outputs.

    Returns:
        The outputs for each batch, on the CPU, as they are at PREDICT_BATCH_END; nothing without `keep`.
    """
    kept = state.batch, state.outputs, state.loss
    predictions: list[Any] = []
    state.eval_timestamp = Timestamp()
    try:
        with eval_mode(state.model), kept_generators():
            await share_buffers(state)
            async with engine.pair(Event.PREDICT_START):
                while (batch := await next_batch(source, state, most)) is not EXHAUSTED:
                    async with engine.pair(Event.PREDICT_BATCH_START):
                        async with engine.pair(Event.PREDICT_BEFORE_FORWARD):
                            state.outputs = await state.compute(_forward, state)
                        state.eval_timestamp = state.eval_timestamp.to_next_batch(
                            samples=count_samples(batch), tokens=count_tokens(batch)
                        )
                    if keep:
                        predictions.append(await state.compute(move, state.outputs, torch.device("cpu")))
    finally:
        state.batch, state.outputs, state.loss = kept
    return predictions


def _forward(state: State) -> Any:
    with torch.no_grad(), state.precision_context():
        return forward(state.model, state.batch, state.loss_fn, targets=False, runner=state.local_runner)
