"""Log records as OpenTelemetry metrics and logs: `OtelLogger`."""

from __future__ import annotations

import math
import re
import threading
import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

# The underscore says that the signature may still change, not that the package is private: it is the documented Logs
# API, and the only one there is.
from opentelemetry._logs import LogRecord, SeverityNumber, get_logger
from opentelemetry.metrics import get_meter

from eventbus_engine.loggers.plain import plain
from eventbus_engine.loggers.records import RecordDestination

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import MeterProvider

__all__ = ["OtelLogger"]

_SCOPE = "eventbus_engine"
_STEP = "eventbus.step"
_LONGEST = 255
_NOT_ALLOWED = re.compile(r"[^-_./a-zA-Z0-9]")


class OtelLogger(RecordDestination):
    """Send metrics as OpenTelemetry gauges, everything else as OpenTelemetry log records.

    * A metric sets the gauge of its name: `loss/train/total`. Characters that instrument names cannot have become
      underscores, and a name that does not begin with a letter gets `m_` in front. If that makes two names equal
      (case does not count), the later one also gets a checksum. The gauge `eventbus.step` holds the step.
      The step is no attribute: each would make another time series of every metric, and backends bill by the series.
    * Hyperparameters, tables, images, traces if asked for, and metrics that are no finite number are log records with
      the event name `eventbus.hyperparameters`, `eventbus.traces` and so on. The body has the fields of
      `RecordDestination` as plain values, the attribute `eventbus.step` the step, and trace and span are those of the
      event being handled.

    A gauge keeps its last value until the reader collects it: what is logged in between is not exported. For every
    single value use another destination as well. Calls only the OpenTelemetry API: without an SDK it does nothing.
    Readers, exporters and their flushing belong to the providers, and so to whoever made them.

    Args:
        meter_provider: where the gauges are made; the global one by default.
        logger_provider: where the log records go; the global one by default.
        log_traces: whether to emit the traces, too: a log record for each event.
        **options: the options of `Callback`.

    Raises:
        HandlerTypeError: an option that callbacks do not have.
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        logger_provider: LoggerProvider | None = None,
        *,
        log_traces: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(log_traces=log_traces, **options)
        self._meter = get_meter(_SCOPE, meter_provider=meter_provider)
        self._logger = get_logger(_SCOPE, logger_provider=logger_provider)
        self._lock = threading.Lock()
        self._gauges: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._step = self._gauge(_STEP)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Set the gauges; what is no finite number goes into a log record."""
        if step is not None:
            self._step.set(step)
        others: dict[str, Any] = {}
        for name, value in plain(metrics).items():
            # The SDK drops NaN and the infinities, and these are what one wants to hear of.
            if isinstance(value, int | float) and math.isfinite(value):
                self._gauge(name).set(value)
            else:
                others[name] = value
        if others:
            self.write("metrics", step, metrics=others)

    def write(self, kind: str, step: int | None, **fields: Any) -> None:
        """Emit one log record."""
        self._logger.emit(
            LogRecord(
                timestamp=time.time_ns(),
                severity_text="INFO",
                severity_number=SeverityNumber.INFO,
                body=plain(fields),
                attributes=None if step is None else {_STEP: step},
                event_name=f"eventbus.{kind}",
            )
        )

    def _gauge(self, metric: str) -> Any:
        with self._lock:
            if metric not in self._gauges:
                name = _instrument_name(metric)
                if name.lower() in self._taken:
                    name = f"{name[: _LONGEST - 9]}_{zlib.crc32(metric.encode('utf-8', 'replace')):08x}"
                self._taken.add(name.lower())
                self._gauges[metric] = self._meter.create_gauge(name)
            return self._gauges[metric]


def _instrument_name(metric: str) -> str:
    """The nearest name that the specification allows: a letter, then up to 254 letters, digits and `_.-/`."""
    name = _NOT_ALLOWED.sub("_", metric)
    return (name if name[:1].isalpha() else f"m_{name}")[:_LONGEST]
