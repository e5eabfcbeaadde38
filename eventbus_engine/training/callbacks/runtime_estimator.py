"""The time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time, TimeUnit
from eventbus_engine.training.callbacks._common import check_count, check_saved
from eventbus_engine.training.state import State

__all__ = ["RuntimeEstimator"]

_SECONDS = {"seconds": 1, "minutes": 60, "hours": 60 * 60, "days": 24 * 60 * 60}


@dataclass
class _Pace:
    """What has been measured. Progress is in the unit of `max_duration`, with fractions of epochs.

    Attributes:
        unit: that unit; with another one, all this means nothing.
        skipped: batches passed over.
        progress: from where on training is measured.
        seconds: what training had taken until there.
        began: from where on evaluations are counted.
        evaluations: how many there have been.
        evaluated: where the last one was.
        evaluating: seconds that they took together.
    """

    unit: str = ""
    skipped: int = 0
    progress: float = 0.0
    seconds: float = 0.0
    began: float = 0.0
    evaluations: int = 0
    evaluated: float = 0.0
    evaluating: float = 0.0


class RuntimeEstimator(Callback[State]):
    """Log on every BATCH_END how long the run is still going to take, as `time/remaining_estimate`.

    Training and evaluation each have a rate of their own. What is left of training takes as long, for each of its
    parts, as what is over took since the batches that were skipped. Evaluations take as long as those before did on
    average, and keep the distance that they had until now: so the estimate has no steps where one ends. It knows of
    none before the first one.

    Where `max_duration` is in epochs, the part of an epoch that is over is known from the length of the loader, or else
    from the epochs before; of a first epoch of unknown length there is no estimate. `init` logs the unit as the
    hyperparameter `time/remaining_estimate_unit`.

    Args:
        skip_batches: how many batches to pass over first, as they are slow: caches fill, kernels are compiled.
            Default 1.
        time_unit: `"seconds"`, `"minutes"`, `"hours"` (default) or `"days"`.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    def __init__(self, skip_batches: int = 1, time_unit: str = "hours") -> None:
        super().__init__()
        if time_unit not in _SECONDS:
            raise ConfigurationError(f"RuntimeEstimator: time_unit={time_unit!r} has to be {' or '.join(_SECONDS)}")
        self.skip_batches: int = check_count("RuntimeEstimator", "skip_batches", skip_batches, 0)
        self.time_unit: str = time_unit
        self._pace = _Pace()
        self._evaluation_began = 0.0

    def init(self, state: State, logger: Logger) -> None:
        """Log the unit."""
        logger.log_hyperparameters({"time/remaining_estimate_unit": self.time_unit})

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin to measure, or go on: a run that resumes, or trains on in the same unit, has its pace already."""
        duration = state.max_duration
        if duration is not None and duration.unit != self._pace.unit:
            progress = _progress(state, duration) or 0.0
            self._pace = _Pace(duration.unit.value, 0, progress, _training_seconds(state), progress)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the estimate."""
        pace, duration = self._pace, state.max_duration
        if duration is None or duration.unit != pace.unit:  # another callback has stopped the training
            return
        progress = _progress(state, duration)
        if progress is None:
            return
        if pace.skipped < self.skip_batches:
            pace.skipped += 1
            pace.progress, pace.seconds = progress, _training_seconds(state)
        elif progress > pace.progress:
            rate = (_training_seconds(state) - pace.seconds) / (progress - pace.progress)
            total = float(duration.value)
            seconds = rate * max(total - progress, 0.0) + self._evaluations_left(total)
            logger.log_metrics({"time/remaining_estimate": seconds / _SECONDS[self.time_unit]})

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Note the time."""
        self._evaluation_began = time.perf_counter()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Count the evaluation."""
        pace, duration = self._pace, state.max_duration
        if duration is not None and duration.unit == pace.unit:
            pace.evaluations += 1
            pace.evaluating += time.perf_counter() - self._evaluation_began
            progress = _progress(state, duration)
            if progress is not None:
                pace.evaluated = progress

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to estimate from its first batch on: plain values, ready for JSON."""
        return asdict(self._pace)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ConfigurationError: it is something else.
        """
        check_saved("RuntimeEstimator", state, [field.name for field in fields(_Pace)])
        self._pace = _Pace(**state)

    def _evaluations_left(self, total: float) -> float:
        """The seconds that the evaluations to come will take."""
        pace = self._pace
        if pace.evaluated <= pace.began:
            return 0.0
        distance = (pace.evaluated - pace.began) / pace.evaluations
        # A whole number of them; what is a rounding error short of one is one.
        left = math.floor(max(total - pace.evaluated, 0.0) / distance + 1e-6)
        return left * pace.evaluating / pace.evaluations


def _training_seconds(state: State) -> float:
    return state.timestamp.total_wct.total_seconds()


def _progress(state: State, duration: Time) -> float | None:
    """How far training is, in the unit of `duration`, with the part of the epoch or second that is over.

    None within an epoch whose length nobody knows.
    """
    now = state.timestamp
    if duration.unit is TimeUnit.SECOND:
        return _training_seconds(state)
    if duration.unit is not TimeUnit.EPOCH:
        return float(now.get(duration.unit))
    if not now.batch_in_epoch:
        return float(now.epoch)
    batches = _batches_per_epoch(state)
    return int(now.epoch) + min(int(now.batch_in_epoch) / batches, 1.0) if batches else None


def _batches_per_epoch(state: State) -> float:
    """By the loader, by the epochs that are over, or 0 where nobody knows."""
    now = state.timestamp
    try:
        return float(len(state.train_dataloader))
    except TypeError:
        return int(now.batch - now.batch_in_epoch) / int(now.epoch) if now.epoch else 0.0
