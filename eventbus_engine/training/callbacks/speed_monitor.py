"""Throughput: how fast a run trains."""

from __future__ import annotations

from collections import deque

from eventbus_engine.callback import Callback
from eventbus_engine.logger import Logger
from eventbus_engine.time import Timestamp
from eventbus_engine.training.callbacks._common import check_count
from eventbus_engine.training.state import State

__all__ = ["SpeedMonitor"]


class SpeedMonitor(Callback[State]):
    """Log how many batches, samples and tokens are trained per second, over the latest batches.

    The time is the timestamp's: the wall clock from the end of one optimizer step to that of the next, with loading,
    algorithms, callbacks and checkpoints, without evaluation. Nothing waits for the device on its account: the step has
    been waited for when the timestamp counts the batch.

    On BATCH_END it logs `throughput/batches_per_sec`, `throughput/samples_per_sec` and, where there are tokens to
    count, `throughput/tokens_per_sec`. The first batch of a fit, which warms up, is not measured; until the window is
    full, the rates are of the batches there are. There is nothing to save in a checkpoint.

    Args:
        window_size: over how many batches. Default 100.

    Raises:
        ConfigurationError: the window is not 1 or more.
    """

    def __init__(self, window_size: int = 100) -> None:
        super().__init__()
        self.window_size: int = check_count("SpeedMonitor", "window_size", window_size, 1)
        # So many batches lie between one more ends of them.
        self._ends: deque[Timestamp] = deque(maxlen=window_size + 1)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin anew: the timestamp may have been put back meanwhile."""
        self._ends.clear()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the rates between the oldest end of a batch in the window and this one."""
        now = state.timestamp
        self._ends.append(now)
        first = self._ends[0]
        seconds = (now.total_wct - first.total_wct).total_seconds()
        if seconds <= 0:  # there is one end only, or the clock is too coarse to tell them apart
            return
        rates = {
            "throughput/batches_per_sec": (int(now.batch) - int(first.batch)) / seconds,
            "throughput/samples_per_sec": (int(now.sample) - int(first.sample)) / seconds,
        }
        tokens = int(now.token) - int(first.token)
        if tokens:
            rates["throughput/tokens_per_sec"] = tokens / seconds
        logger.log_metrics(rates)
