"""The metrics of `telemetry.configure`: a provider of the SDK's, and an exporter that keeps deadlines.

The SDK's own OTLP exporter draws the jitter of its retries from the global `random`. And since a histogram cannot be
handed to the SDK, the durations of engines are added here, behind it: recording each of them would cost more than to
measure it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider, MetricsTimeoutError
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource

from eventbus_engine.errors import ConfigurationError, TelemetryError
from eventbus_engine.telemetry.durations import BOUNDARIES, Durations, Histogram
from eventbus_engine.telemetry.endpoint import endpoint_in_environment, export_wanted
from eventbus_engine.telemetry.metrics import HISTOGRAMS, EngineMetrics
from eventbus_engine.telemetry.otlp_metrics import encode_metrics
from eventbus_engine.telemetry.sending import HttpSender, LineFile, NotDeliveredError
from eventbus_engine.telemetry.spans import SCOPE

__all__ = ["Destination", "MetricPipeline", "make_destinations", "resolve_interval"]

_logger = logging.getLogger("eventbus_engine")

_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"


class Destination(Protocol):
    """Takes metrics."""

    name: str

    def send(self, data: MetricsData) -> None:
        """Deliver them; raises whatever goes wrong."""

    def interrupt(self) -> None:
        """End what is being sent, at once, and take no more."""

    def close(self) -> None:
        """Release what is held. Not while something is being sent."""


class _File:
    """A file of OTLP JSON lines: one `ExportMetricsServiceRequest` per collection."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self._lines = LineFile(path)

    def send(self, data: MetricsData) -> None:
        self._lines.append(json.dumps(encode_metrics(data), ensure_ascii=False, separators=(",", ":")))

    def interrupt(self) -> None:
        """Nothing: the operating system takes a line at once."""

    def close(self) -> None:
        self._lines.close()


class _Collector:
    """An OTLP/HTTP endpoint."""

    def __init__(
        self,
        endpoint: str | None,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        compression: str | None,
    ) -> None:
        self._sender = HttpSender("metrics", endpoint, headers, timeout, compression)
        self._encode, self._read_response = _load_protobuf()
        self.name = self._sender.url

    def send(self, data: MetricsData) -> None:
        answer = self._sender.send(self._encode(data).SerializeToString())
        try:
            partial = self._read_response(answer).partial_success
        except Exception:
            return  # Not every server answers in protobuf; the status has said that it took them.
        if partial.rejected_data_points or partial.error_message:
            raise NotDeliveredError(f"{partial.rejected_data_points} data points rejected: {partial.error_message}")

    def interrupt(self) -> None:
        self._sender.interrupt()

    def close(self) -> None:
        self._sender.release()


def make_destinations(
    endpoint: str | None,
    path: str | os.PathLike[str] | None,
    headers: Mapping[str, str] | None,
    timeout: float | None,
    compression: str | None,
) -> list[Destination]:
    """Where the arguments of `configure` and the environment want metrics to go; files first, as they do not wait.

    Raises:
        ConfigurationError: one of them cannot be used.
        TelemetryError: the encoder, of the extra `otlp`, is not installed.
    """
    destinations: list[Destination] = []
    wanted = endpoint is not None and export_wanted("metrics")
    if wanted or (endpoint is None and endpoint_in_environment("metrics")):
        try:
            destinations.append(_Collector(endpoint, headers, timeout, compression))
        except TelemetryError as exc:
            if endpoint is not None:
                raise
            # A variable set for the whole machine must not stop a program that never asked for an export.
            _logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s", exc)
    if path is not None:
        destinations.insert(0, _File(path))
    return destinations


def _load_protobuf() -> tuple[Callable[[MetricsData], Any], Callable[[bytes], Any]]:
    """The encoder of requests and the decoder of answers. Imported on use: protobuf belongs to an extra."""
    try:
        from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics as encode
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    except ImportError as exc:
        raise TelemetryError(
            'sending metrics by OTLP/HTTP needs the extra "otlp": pip install "eventbus-engine[otlp]"; '
            "without it, telemetry.configure(path=...) writes them to a file"
        ) from exc
    return encode, ExportMetricsServiceResponse.FromString


class _Reader(MetricReader):
    """Hands what is collected on."""

    def __init__(self, receive: Callable[[MetricsData], None]) -> None:
        super().__init__()
        self._receive = receive

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any) -> None:
        self._receive(metrics_data)

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        """Nothing: `MetricPipeline.close` ends what has to end."""


class _Totals:
    """The durations of engines since the start, as the SDK would have them."""

    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self._started = time.time_ns()
        self._totals: dict[str, list[tuple[dict[str, str], Histogram]]] = {}
        self._places: dict[int, Histogram] = {}

    def metrics(self) -> Iterator[Metric]:
        """The histograms, as metrics of the SDK's."""
        for kind, series in self._durations.by_kind():
            new = series.take()
            if new is None:
                continue
            known = self._places.get(id(series))
            if known is None:
                # Series live as long as the durations they are of, so that no two have the same id.
                self._places[id(series)] = new
                self._totals.setdefault(kind, []).append((series.attributes, new))
            else:
                known.add(new)
        now = time.time_ns()
        for kind, totals in self._totals.items():
            name, description = HISTOGRAMS[kind]
            points = [self._point(attributes, histogram, now) for attributes, histogram in totals]
            yield Metric(name, description, "s", HistogramData(points, AggregationTemporality.CUMULATIVE))

    def _point(self, attributes: dict[str, str], histogram: Histogram, now: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=self._started,
            time_unix_nano=now,
            count=sum(histogram.counts),
            sum=sum(histogram.sums) / 1e9,
            bucket_counts=list(histogram.counts),
            explicit_bounds=BOUNDARIES,
            min=histogram.low / 1e9,
            max=histogram.high / 1e9,
        )


class MetricPipeline:
    """A provider whose metrics go to some destinations from time to time, from a thread of its own.

    A forked child sends nothing: what it has counted goes on from what its parent had.

    Args:
        destinations: where to.
        resource: what the metrics are of.
        interval: seconds between two collections.

    Attributes:
        provider: for instruments of the program's own.
        engines: the metrics of engines.
    """

    def __init__(self, destinations: list[Destination], resource: Resource, interval: float) -> None:
        self._interval = interval
        self._destinations = destinations
        self._failing: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._reader = _Reader(self._deliver)
        self.provider: MeterProvider = MeterProvider(
            [self._reader],
            resource,
            # Those that keep examples pick them by the global `random`.
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
        )
        self.engines: EngineMetrics = EngineMetrics(self.provider, replay=False)
        self._totals = _Totals(self.engines.durations)
        self._thread = threading.Thread(target=self._run, name="export metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(self._interval):
            self._collect()
        self._collect()

    def _collect(self) -> None:
        try:
            self._reader.collect()
        except MetricsTimeoutError as exc:
            # An instrument of the program's own took too long to answer; the next time it may not.
            _logger.warning("metrics were not collected: %s", exc)

    def _deliver(self, data: MetricsData) -> None:
        if os.getpid() != self._pid:
            return
        # The program may flush while the thread is at it.
        with self._lock:
            resources = [replace(r, scope_metrics=[*map(self._add, r.scope_metrics)]) for r in data.resource_metrics]
            self._send(replace(data, resource_metrics=resources))

    def _send(self, complete: MetricsData) -> None:
        for destination in self._destinations:
            try:
                destination.send(complete)
            # Whatever it is, the run goes on; the next time brings the same numbers, and newer ones.
            except Exception as exc:
                self._complain(destination, exc)
            else:
                self._failing.discard(destination.name)

    def _add(self, scope: Any) -> Any:
        if scope.scope.name != SCOPE:
            return scope
        return replace(scope, metrics=[*scope.metrics, *self._totals.metrics()])

    def _complain(self, destination: Destination, exc: Exception) -> None:
        level = logging.DEBUG if destination.name in self._failing else logging.WARNING
        self._failing.add(destination.name)
        reason = str(exc) if isinstance(exc, NotDeliveredError) else f"{type(exc).__name__}: {exc}"
        _logger.log(level, "metrics were not delivered to %s: %s", destination.name, reason)

    def close(self, timeout: float) -> None:
        """Send what there is a last time, and end, within so many seconds."""
        reserve = min(0.2, timeout / 5)
        self._ending.set()
        self._thread.join(max(timeout - reserve, 0))
        for destination in self._destinations:
            destination.interrupt()
        self._thread.join(reserve)
        if not self._thread.is_alive():
            for destination in self._destinations:
                destination.close()
        self.provider.shutdown()


def resolve_interval() -> float:
    """Seconds between two collections: the environment's, else 60.

    Raises:
        ConfigurationError: `OTEL_METRIC_EXPORT_INTERVAL` is no positive number of milliseconds.
    """
    text = os.environ.get(_INTERVAL, "").strip()
    try:
        seconds = float(text) / 1000 if text else 60.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{_INTERVAL}={text!r} must be a positive number of milliseconds; unset it for 60000")
    return min(seconds, threading.TIMEOUT_MAX)
