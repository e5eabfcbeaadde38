"""A destination that keeps what is logged, in one sequence: `RecordingLogger`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from eventbus_engine.callback import OPTIONS
from eventbus_engine.loggers.memory import InMemoryLogger
from eventbus_engine.loggers.plain import plain
from eventbus_engine.testing.options import set_options

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces

__all__ = ["Logged", "RecordingLogger"]


class Logged(NamedTuple):
    """One call of a `log_*` method.

    Attributes:
        kind: `"metrics"`, `"hyperparameters"`, `"traces"`, `"table"`, `"images"` or `"file"`.
        step: of the call; None where there was none.
        content: what was logged, as plain Python values; of traces and images what came; of a table its name, columns
            and rows; of a file its remote name and its path.
        time: when, in UTC.
    """

    kind: str
    step: int | None
    content: Any
    time: datetime


class RecordingLogger(InMemoryLogger):
    """An `InMemoryLogger` that also keeps all calls, those of traces too, in one sequence, each with its time.

    Args:
        name: its name in spans and logs.
        **options: the options of `Callback`.

    Attributes:
        records: one for each call, in order, whichever thread logged.

    Raises:
        ConfigurationError: an option that callbacks do not have.
    """

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(log_traces=True)
        self.records: list[Logged] = []
        set_options(self, OPTIONS, {"name": name, **options})

    @property
    def kinds(self) -> list[str]:
        """What kinds of records there are, in order: `["hyperparameters", "metrics"]`."""
        return [record.kind for record in self.records]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep the metrics."""
        super().log_metrics(metrics, step)
        self._keep("metrics", step, plain(metrics))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Keep the hyperparameters."""
        super().log_hyperparameters(hyperparameters)
        self._keep("hyperparameters", None, plain(hyperparameters))

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """Keep the traces of one event."""
        super().log_traces(traces, step)
        self._keep("traces", step, dict(traces))

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Keep a table."""
        super().log_table(columns, rows, name, step)
        self._keep("table", step, (name, list(columns), [plain(list(row)) for row in rows]))

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
        """Keep images, as they came."""
        super().log_images(images, name, channels_last, step, masks, mask_class_labels, use_table)
        self._keep("images", step, images)

    def upload_file(
        self, state: Any, remote_file_name: str, file_path: str | PathLike[str], *, overwrite: bool = False
    ) -> None:
        """Keep the names of a file; its content stays where it is."""
        self._keep("file", None, (remote_file_name, file_path))

    def _keep(self, kind: str, step: int | None, content: Any) -> None:
        self.records.append(Logged(kind, step, content, datetime.now(UTC)))
