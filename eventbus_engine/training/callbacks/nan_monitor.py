"""Losses that are no number: end a run that has gone wrong for good."""

from __future__ import annotations

import math

from eventbus_engine.callback import Callback
from eventbus_engine.errors import TrainingError
from eventbus_engine.logger import Logger
from eventbus_engine.training.callbacks._common import batch_loss
from eventbus_engine.training.state import State

__all__ = ["NaNMonitor"]


class NaNMonitor(Callback[State]):
    """End the run with an error when the loss of a batch is NaN or infinite.

    It looks on BATCH_END, not on AFTER_LOSS. There the device would have to be waited for in every microbatch, between
    forward and backward, in every good run, to spare one that ends anyway its last step. On BATCH_END the step has been
    waited for and the look is free; it comes before BATCH_CHECKPOINT, so that no checkpoint of the batch is written.
    One microbatch that is not finite is enough to make the loss of the batch, their weighted sum, not finite either.

    The event raises `CallbackErrors` with a `TrainingError` in it. The parameters have taken the batch's step by then:
    go on from a checkpoint, not from what is in memory.
    """

    def batch_end(self, state: State, logger: Logger) -> None:
        """Look at the loss of the batch.

        Raises:
            TrainingError: it is not finite.
        """
        loss = batch_loss(state)
        if not math.isfinite(loss):
            batch, epoch = int(state.timestamp.batch), int(state.timestamp.epoch) + 1
            raise TrainingError(
                f"the loss of batch {batch} in epoch {epoch}, counted from 1, is {loss}, and the parameters have taken "
                f"its step; go on from a checkpoint before it, with a lower learning rate, clipped gradients or "
                f"precision='amp_bf16', or look for what is not finite in the batch itself"
            )
