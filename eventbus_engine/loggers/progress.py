"""A progress bar for training runs and pipelines: `ProgressBar`."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.loggers.plain import plain
from eventbus_engine.time import TimeUnit
from eventbus_engine.trace import batches_done

__all__ = ["ProgressBar"]


class ProgressBar(LoggerDestination):
    """Draw a progress bar on a terminal: epoch, how many of how many, loss, the latest metrics, the time left.

    It counts the events of one kind. Of the state it reads, where it has them, `timestamp`, `loss` and `max_duration`;
    the record of a pipeline needs none of them. The metrics are those that are logged, by the last part of their names.

    It prints nothing at all where the stream is no terminal that can redraw a line: a log file is no place for a bar,
    and `ConsoleLogger` writes lines. It has no thread. A step costs it a comparison; every `interval` seconds one also
    redraws the line, and only then are loss and metrics read, which on an accelerator waits for them. While it is open,
    what is printed to standard output and error appears above it. The terminal gets its cursor back when the engine
    closes, or at the latest when the program ends. A terminal that goes away ends the drawing, and nothing else.

    Args:
        total: how many events there will be. By default what `max_duration` says, if that is in batches, or in epochs
            of a `train_dataloader` that has a length; otherwise the bar has no end.
        event: the event that counts, by its value. With `batch_end`, a state's own count of batches goes before.
        label: what stands before the bar where there is no epoch.
        metrics: the names of the logged metrics to show; by default the last four that were logged, without `loss/...`.
        interval: seconds between two redraws.
        stream: where to; standard error by default.
        enabled: False draws nothing anywhere. Where several ranks share a terminal, let one of them draw.
        **options: the options of `Callback`.

    Raises:
        ConfigurationError: `total` or `interval` is negative, or `event` cannot be an event.
        HandlerTypeError: an option that callbacks do not have.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        event: str = "batch_end",
        label: str = "progress",
        metrics: Sequence[str] | None = None,
        interval: float = 0.1,
        stream: TextIO | None = None,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        if interval < 0 or (total is not None and total < 0):
            raise ConfigurationError(f"total={total!r} and interval={interval!r} must not be negative")
        if hasattr(self, event):
            raise ConfigurationError(f"event={event!r} is a method of ProgressBar; give the value of an event")
        super().__init__(**options)
        self._total = total
        self._counts_batches = event == "batch_end"
        self._label = label
        self._wanted = metrics
        self._interval = interval
        self._stream = stream
        self._enabled = enabled
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._metrics: dict[str, Any] = {}
        self._done = 0
        self._drawn = 0.0
        # Only this event is a hook, so that the others cost nothing; a vocabulary names it as it likes.
        setattr(self, str(event), self._advance)

    def open(self, state: Any, logger: Any) -> None:
        """Show the bar, if there is a terminal to show it on."""
        stream = sys.stderr if self._stream is None else self._stream
        # Asked of the stream: rich takes a pipe for a terminal where FORCE_COLOR is set.
        if not (self._enabled and stream.isatty()):
            return
        console = Console(file=stream)
        if console.is_dumb_terminal:
            return
        self._done = 0
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task(_description(state, self._label), total=self._total, values="")
        # Where nobody closes the engine, the cursor would stay hidden after the program has ended.
        atexit.register(self._stop)
        self._progress.start()
        self._draw(state)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep the values for the next redraw."""
        if self._progress is None:
            return
        for name, value in metrics.items():
            if name in self._wanted if self._wanted is not None else not name.startswith("loss/"):
                self._metrics.pop(name, None)  # the latest comes last
                # With its graph, a tensor would keep the whole step in memory.
                self._metrics[name] = value.detach() if hasattr(value, "detach") else value

    def close(self, state: Any, logger: Any) -> None:
        """Draw how it ended, leave that on the screen and give the terminal back."""
        self._draw(state)
        self._stop()

    def _advance(self, state: Any, logger: Any) -> None:
        self._done += 1
        if self._progress is not None and time.monotonic() - self._drawn >= self._interval:
            self._draw(state)

    def _draw(self, state: Any) -> None:
        if self._progress is None:
            return
        names = list(self._metrics)[-4:] if self._wanted is None else self._wanted
        values = {"loss": getattr(state, "loss", None)}
        values |= {name.rpartition("/")[2]: self._metrics[name] for name in names if name in self._metrics}
        batches = batches_done(state) if self._counts_batches else None
        self._progress.update(
            self._task,
            description=_description(state, self._label),
            completed=self._done if batches is None else batches,
            total=_total(state) if self._total is None else self._total,
            values=_readable(values),
        )
        self._progress.refresh()
        self._drawn = time.monotonic()

    def _stop(self) -> None:
        progress, self._progress = self._progress, None
        atexit.unregister(self._stop)
        if progress is not None:
            # Rich draws nothing on a terminal that has gone away, but tries to leave the last drawing there.
            with suppress(OSError, ValueError):
                progress.stop()


def _description(state: Any, label: str) -> str:
    """The epoch, counted from 1, that the last batch belonged to."""
    timestamp = getattr(state, "timestamp", None)
    epoch, within = getattr(timestamp, "epoch", None), getattr(timestamp, "batch_in_epoch", None)
    if epoch is None or within is None:
        return label
    return f"epoch {int(epoch) + bool(int(within) or not int(epoch))}"


def _total(state: Any) -> int | None:
    duration = getattr(state, "max_duration", None)
    unit = getattr(duration, "unit", None)
    if duration is None or unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
        return None
    if unit is TimeUnit.BATCH:
        return int(duration.value)
    try:
        return int(duration.value) * len(state.train_dataloader)
    except (AttributeError, TypeError):  # it has no length, or a background snapshot has no loader
        return None


def _readable(values: Mapping[str, Any]) -> str:
    """The values in one line: floats with four digits, and nothing for what is no single value."""
    shown = {name: plain(value) for name, value in values.items()}
    return " ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown.items()
        if isinstance(value, bool | int | float | str)
    )
