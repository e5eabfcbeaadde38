"""Log records for people: `ConsoleLogger`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from eventbus_engine.logger import LoggerDestination
from eventbus_engine.loggers.plain import plain
from eventbus_engine.loggers.records import key_values
from eventbus_engine.trace import format_trace

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces

__all__ = ["ConsoleLogger"]


class ConsoleLogger(LoggerDestination):
    """Print metrics, hyperparameters, tables and, if asked to, traces, one line each.

    Written through a structlog logger of its own, whatever `structlog.configure` says. A trace is the line
    `[STEP=3][layer_freezing/EPOCH_END=1]`, `=0` where the algorithm did not run.

    Args:
        log_traces: whether to print traces: a line for each algorithm on each event.
        stream: where to; standard error by default. In colour if it is a terminal.
    """

    def __init__(self, log_traces: bool = False, stream: TextIO | None = None) -> None:
        output: TextIO = sys.stderr if stream is None else stream
        self._wants_traces = log_traces
        self._log = structlog.wrap_logger(
            structlog.PrintLogger(output),
            processors=[structlog.dev.ConsoleRenderer(colors=output.isatty(), pad_event_to=0, sort_keys=False)],
            wrapper_class=structlog.BoundLogger,
            context_class=dict,
        )

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Print the metrics in one line; floats with six significant digits."""
        self._print("metrics", metrics, step)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Print the hyperparameters in one line."""
        self._print("hyperparameters", hyperparameters, None)

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """Print a line for each trace, in their order, if the logger was made with `log_traces=True`."""
        if self._wants_traces:
            for key, trace in traces.items():
                self._log.info(format_trace(key, trace, step))

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Print a line for each row."""
        for row in rows:
            self._print(name, dict(zip(columns, row, strict=True)), step)

    def _print(self, title: str, values: Mapping[str, Any], step: int | None) -> None:
        prefix = "" if step is None else f"[STEP={step}] "
        shown = key_values({key: _readable(value) for key, value in values.items()})
        self._log.info(prefix + title, **shown)


def _readable(value: Any) -> Any:
    value = plain(value)
    return f"{value:.6g}" if isinstance(value, float) else value
