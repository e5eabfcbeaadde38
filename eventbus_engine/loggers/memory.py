"""Log records for the program itself, and for tests: `InMemoryLogger`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.loggers.plain import plain

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces

__all__ = ["InMemoryLogger"]


class InMemoryLogger(LoggerDestination):
    """Keep what is logged, in the order of logging.

    Metrics, hyperparameters and tables are kept as plain Python values (a 0-dimensional tensor as a float), so that
    nothing holds on to a computation graph; images and traces as they came.

    Args:
        log_traces: whether to keep the traces, too: an entry for each event.

    Attributes:
        data: metric to `(step, value)` pairs.
        hyperparameters: name to value; a later value replaces an earlier one.
        traces: `(step, traces)` pairs, one for each event, if asked for.
        tables: name to `(step, columns, rows)`.
        images: name to `(step, images)`.
    """

    def __init__(self, *, log_traces: bool = False) -> None:
        super().__init__()
        self._wants_traces = log_traces
        self.data: dict[str, list[tuple[int | None, Any]]] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.traces: list[tuple[int | None, Traces]] = []
        self.tables: dict[str, list[tuple[int | None, list[str], list[list[Any]]]]] = {}
        self.images: dict[str, list[tuple[int | None, Any]]] = {}

    @property
    def most_recent_values(self) -> dict[str, Any]:
        """The last value of each metric."""
        return {name: pairs[-1][1] for name, pairs in self.data.items()}

    def get_timeseries(self, metric: str) -> dict[str, list[Any]]:
        """The history of a metric as two lists of one length: `{"step": [...], metric: [...]}`.

        Raises:
            ConfigurationError: it was never logged; names the nearest ones.
        """
        if metric not in self.data:
            nearest = ", ".join(difflib.get_close_matches(metric, self.data)) or ", ".join(self.data) or "nothing"
            raise ConfigurationError(f"the metric {metric!r} was never logged; logged were: {nearest}")
        pairs = self.data[metric]
        return {"step": [step for step, _ in pairs], metric: [value for _, value in pairs]}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append to the metrics' histories."""
        for name, value in metrics.items():
            self.data.setdefault(name, []).append((step, plain(value)))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Add to the hyperparameters."""
        self.hyperparameters.update({name: plain(value) for name, value in hyperparameters.items()})

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """Append the traces of one event, if made with `log_traces=True`."""
        if self._wants_traces:
            self.traces.append((step, dict(traces)))

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Append a table."""
        self.tables.setdefault(name, []).append((step, list(columns), [[plain(cell) for cell in row] for row in rows]))

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Append images, as they came."""
        self.images.setdefault(name, []).append((step, images))
