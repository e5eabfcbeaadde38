"""The learning rates of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from eventbus_engine.callback import Callback
from eventbus_engine.logger import Logger
from eventbus_engine.training.state import State

__all__ = ["LRMonitor"]


class LRMonitor(Callback[State]):
    """Log the learning rate of every parameter group: the one that the batch is trained with.

    It is taken on AFTER_TRAIN_BATCH, right before the optimizer step: on BATCH_END, schedulers that step with the batch
    have set the next one already. It is logged on BATCH_END, beside the batch's loss, when reading a rate that an
    optimizer keeps in a tensor on the device waits for nothing.

    The name is `lr-<class of the optimizer>/group<number>`, for example `lr-AdamW/group0`; a second optimizer of a
    class has `#2` behind it: `lr-AdamW#2/group0`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[str, Any] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Take the rates."""
        seen: Counter[str] = Counter()
        self._rates = {}
        for optimizer in state.optimizers:
            name = type(optimizer).__name__
            seen[name] += 1
            label = name if seen[name] == 1 else f"{name}#{seen[name]}"
            for index, group in enumerate(optimizer.param_groups):
                rate = group["lr"]
                # A scheduler changes a tensor in place.
                self._rates[f"lr-{label}/group{index}"] = rate.clone() if isinstance(rate, Tensor) else rate

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log them."""
        logger.log_metrics({name: float(rate) for name, rate in self._rates.items()})
