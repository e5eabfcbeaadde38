"""Early stopping: end a run that gets no better any more."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training.algorithms._common import check_range
from eventbus_engine.training.arguments import DURATION_UNITS, check_duration
from eventbus_engine.training.callbacks._common import batch_loss, check_count, check_saved, less_is_better
from eventbus_engine.training.state import State

__all__ = ["EarlyStopper"]

log: logging.Logger = logging.getLogger("eventbus_engine")

Comparison: TypeAlias = Callable[[Any, Any], Any]

_SAVED = ("best", "best_at", "stale", "total", "batches")


class EarlyStopper(Callback[State]):
    """End the training when a metric has not improved for too long (Prechelt 1998, *Early Stopping, But When?*).

    It looks at `state.metrics["metrics/<dataloader_label>/<monitor>"]` after each evaluation in the course of training
    that measured it, and at the training loss, the mean over the batches of an epoch, at the end of the epoch. A value
    improves on the best one so far if `comp` says so and it is further than `min_delta` away from it; NaN never does.
    The run ends by `state.stop_training()` once it has gone on for longer than `patience` since the best value.

    Args:
        monitor: the name of the metric: `"accuracy"`, `"loss"`.
        dataloader_label: the label of the evaluator that measures it, `"eval"` (default) where the trainer was given a
            plain loader; or `"train"`, with `monitor="loss"`, for the training loss.
        comp: `(value, best) -> bool`, whether a value is better, from two floats. By default the lower one is if there
            is `loss`, `error` or `perplexity` in the name of the metric, otherwise the higher one.
        min_delta: how far from the best value a better one has to be, 0 or more. Default 0.0.
        patience: how long to go on without an improvement: a number of evaluations (epochs, for the training loss), or
            a time such as `"500ba"`, `"2ep"`, `"1h"`. Default 1: the second evaluation in a row that does not improve
            on the best one ends the run.

    Attributes:
        best: the best value so far, None before there is any.

    Raises:
        ConfigurationError: an argument does not fit.
        TimeFormatError: the patience does not parse.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str = "eval",
        comp: Comparison | None = None,
        min_delta: float = 0.0,
        patience: int | str | Time = 1,
    ) -> None:
        super().__init__()
        for argument, value in (("monitor", monitor), ("dataloader_label", dataloader_label)):
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"EarlyStopper: {argument}={value!r} has to be a name, such as 'loss'")
        self._watches_training = dataloader_label == "train"
        if self._watches_training and monitor != "loss":
            raise ConfigurationError(
                f"EarlyStopper: monitor={monitor!r} is not measured in training; give monitor='loss' with "
                f"dataloader_label='train', or the label of an Evaluator that measures it, which 'train' cannot be"
            )
        if comp is not None and not callable(comp):
            raise ConfigurationError(f"EarlyStopper: comp={comp!r} has to be a function (value, best) -> bool")
        check_range("EarlyStopper", "min_delta", min_delta, 0)
        self.monitor: str = monitor
        self.dataloader_label: str = dataloader_label
        self.comp: Comparison = _default_comparison(monitor) if comp is None else _on_numbers(comp)
        self.min_delta: float = min_delta
        self.patience: int | Time = (
            check_duration("EarlyStopper: patience", patience, DURATION_UNITS)
            if isinstance(patience, str | Time)
            else check_count("EarlyStopper", "patience", patience, 0)
        )
        self.best: float | None = None
        self._best_at: Timestamp | None = None
        self._stale = 0
        self._total = 0.0
        self._batches = 0
        self._measured: list[str] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Add to the mean training loss."""
        if self._watches_training:
            self._total += batch_loss(state)
            self._batches += 1

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Look at the mean training loss."""
        if self._watches_training and self._batches:
            mean, self._total, self._batches = self._total / self._batches, 0.0, 0
            self._look(mean, state)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Look at the metric.

        Raises:
            ConfigurationError: the evaluator does not measure it.
        """
        if self._watches_training:
            return
        label = f"metrics/{self.dataloader_label}/"
        value = state.metrics.get(label + self.monitor)
        if value is not None:
            self._look(float(value), state)
        else:
            self._measured = sorted(state.metrics)
            if any(name.startswith(label) for name in self._measured):
                raise self._no_metric()
            # Else the evaluator may have an interval of its own, and its turn be yet to come.

    def fit_end(self, state: State, logger: Logger) -> None:
        """Say so if there have been evaluations, but none of the one to watch.

        Raises:
            ConfigurationError: no evaluator has the label.
        """
        if self._best_at is None and self._measured:
            raise self._no_metric()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on waiting where this one is: plain values, ready for JSON."""
        best_at = None if self._best_at is None else self._best_at.state_dict()
        return dict(zip(_SAVED, (self.best, best_at, self._stale, self._total, self._batches), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ConfigurationError: it is something else.
            TimeFormatError: its timestamp does not fit.
        """
        check_saved("EarlyStopper", state, _SAVED)
        best_at: Timestamp | None = None
        if (saved := state["best_at"]) is not None:
            best_at = Timestamp()
            best_at.load_state_dict(saved)
        self._best_at = best_at
        self.best, self._stale = state["best"], state["stale"]
        self._total, self._batches = state["total"], state["batches"]

    def _look(self, value: float, state: State) -> None:
        if self._improves(value):
            self.best, self._best_at, self._stale = value, state.timestamp, 0
            return
        if self._best_at is None:  # waiting begins with the first value, even if that is no number
            self._best_at = state.timestamp
            return
        self._stale += 1
        if isinstance(self.patience, int):
            waited: int | Time = self._stale
        else:
            unit = self.patience.unit
            waited = state.timestamp.get(unit) - self._best_at.get(unit)
        if waited > self.patience:
            log.info("%s/%s is no better than %s any more", self.dataloader_label, self.monitor, self.best)
            state.stop_training()

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best is None or (bool(self.comp(value, self.best)) and abs(value - self.best) > self.min_delta)

    def _no_metric(self) -> ConfigurationError:
        return ConfigurationError(
            f"EarlyStopper: there is no metric 'metrics/{self.dataloader_label}/{self.monitor}'; give, as "
            f"dataloader_label= and monitor=, the label and the name in one of {', '.join(self._measured)}"
        )


def _default_comparison(monitor: str) -> Comparison:
    return operator.lt if less_is_better(monitor) else operator.gt


def _on_numbers(comp: Comparison) -> Comparison:
    """Torch's own comparisons, which Composer's recipes give, take nothing but tensors."""
    if comp in (torch.less, torch.lt):
        return operator.lt
    return operator.gt if comp in (torch.greater, torch.gt) else comp
