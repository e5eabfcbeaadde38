"""Log records for programs: `JsonlLogger`, one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from eventbus_engine.errors import ConfigurationError, TelemetryError
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.loggers.plain import plain

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces

__all__ = ["JsonlLogger"]


class JsonlLogger(LoggerDestination):
    """Append records to a file of JSON lines (https://jsonlines.org), one per call, each written through at once.

    Every record has `time` (ISO 8601, UTC), `kind` and `step` (null where there is none), then:

    * `metrics`: `metrics`, name to value;
    * `hyperparameters`: `hyperparameters`, name to value;
    * `traces`: `traces`, key to the fields of the `Trace`, in order;
    * `table`: `name`, `columns`, `rows`;
    * `images`: `name`, `shape`, `channels_last`. The pixels stay out: JSON is no place for them.

    Tensors and arrays become numbers or lists. JSON has no NaN and no infinities: they are the strings `"NaN"`,
    `"Infinity"` and `"-Infinity"`, as in protobuf's JSON, which `float()` reads back.

    The file stays open until the engine has closed all callbacks (`post_close`), so what they log while closing is in
    it. Another engine opens it again and continues it. Safe to use from several threads.

    Args:
        path: the file. Parent directories are made, an existing file is continued.

    Raises:
        ConfigurationError: the file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._lock = threading.Lock()
        self._file = self._open_file()

    def open(self, state: Any, logger: Any) -> None:
        """Open the file again if it is closed."""
        with self._lock:
            if self._file.closed:
                self._file = self._open_file()

    def post_close(self) -> None:
        """Close the file. Safe to call again."""
        with self._lock:
            self._file.close()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a record of kind `metrics`."""
        self._write("metrics", step, metrics=metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write a record of kind `hyperparameters`."""
        self._write("hyperparameters", None, hyperparameters=hyperparameters)

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """Write a record of kind `traces`, one for all the algorithms of an event."""
        self._write("traces", step, traces=traces)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Write a record of kind `table`."""
        self._write("table", step, name=name, columns=list(columns), rows=[list(row) for row in rows])

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
        """Write a record of kind `images`: that they were logged, and their shape; null for a list without one."""
        shape = getattr(images, "shape", None)
        self._write(
            "images", step, name=name, shape=None if shape is None else list(shape), channels_last=channels_last
        )

    def _write(self, kind: str, step: int | None, **fields: Any) -> None:
        record = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), "kind": kind, "step": step}
        line = json.dumps(_json(plain({**record, **fields})), allow_nan=False, separators=(",", ":"))
        with self._lock:
            if self._file.closed:
                raise TelemetryError(
                    f"{self.path} is closed, and so cannot take this record of kind {kind!r}; log before the engine "
                    "is closed, or make another JsonlLogger, which continues the file"
                )
            self._file.write(line + "\n")

    def _open_file(self) -> TextIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return open(self.path, "a", buffering=1, encoding="utf-8", newline="\n")
        except OSError as exc:
            raise ConfigurationError(
                f"cannot write records to {str(self.path)!r}: {exc}; give a path in a directory you may write to"
            ) from exc


def _json(value: Any) -> Any:
    """A plain value with strings for the floats that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    return value
