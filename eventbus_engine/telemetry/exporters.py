"""Where spans go: `OtlpJsonFileExporter`, a file of JSON lines, and `OtlpHttpExporter`, a collector or Jaeger.

Neither touches the global random generators, neither raises into the program it watches, and both count what became
of every span they were given.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from eventbus_engine.errors import TelemetryError
from eventbus_engine.telemetry.otlp import encode_spans
from eventbus_engine.telemetry.sending import HttpSender, LineFile, NotDeliveredError
from eventbus_engine.telemetry.wire import Records

__all__ = ["OtlpExporter", "OtlpHttpExporter", "OtlpJsonFileExporter"]

_logger = logging.getLogger("eventbus_engine")

_REQUEST = '{"resourceSpans":[', "]}"


class OtlpExporter(SpanExporter):
    """What the exporters share: counting, and never raising.

    Attributes:
        destination: where the spans go, for messages.
        exported: spans delivered.
        failed: spans refused by the destination, or not delivered in time.
        dropped: spans that came after the shutdown, or whose delivery it interrupted.
    """

    def __init__(self, destination: str) -> None:
        self.destination = destination
        self.exported: int = 0
        self.failed: int = 0
        self.dropped: int = 0
        self._closed = threading.Event()
        self._failing = False
        self._own_process()

    def export(self, spans: Sequence[ReadableSpan], records: Records | None = None) -> SpanExportResult:
        """Deliver a batch: spans of the SDK's, and records of the engine's.

        Never raises: what goes wrong is counted, and logged once per series of failures.
        """
        if os.getpid() != self._pid:
            self._own_process()
        with self._lock:
            delivered = self._try_deliver(spans, records)
        if self._closed.is_set():
            self._release_if_idle()
        return SpanExportResult.SUCCESS if delivered else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """True: `export` returns when the batch is delivered or lost, so nothing is ever buffered here."""
        return True

    def shutdown(self) -> None:
        """Take no more spans, interrupt what is in progress, and release what is held. Safe to call again.

        Never waits: a delivery that cannot be interrupted releases what it holds when it is through.
        """
        self._closed.set()
        self._interrupt()
        self._release_if_idle()

    @abstractmethod
    def _deliver(self, spans: Sequence[ReadableSpan], records: Records | None) -> int:
        """Deliver the batch and return how many of it were refused; raise if none arrived."""

    @abstractmethod
    def _release(self) -> None:
        """Close what is open. Called with the lock held, possibly more than once."""

    def _interrupt(self) -> None:
        """Wake a delivery that waits for something else than `_closed`."""

    def _release_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._lock.release()

    def _try_deliver(self, spans: Sequence[ReadableSpan], records: Records | None) -> bool:
        count = len(spans) + (len(records) if records is not None else 0)
        if self._closed.is_set():
            self.dropped += count
            return False
        try:
            refused = self._deliver(spans, records)
        # Whatever it is, it must not reach the SDK's worker or, from a simple processor, the program itself.
        except Exception as exc:
            if self._closed.is_set():
                self.dropped += count
            else:
                self.failed += count
                self._complain(count, exc)
            return False
        self.failed += refused
        self.exported += count - refused
        self._recover()
        return True

    def _own_process(self) -> None:
        # After a fork the lock may be held by a thread that only the parent has.
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _complain(self, count: int, exc: Exception) -> None:
        # A dead destination fails once per batch, for the whole run: the first time is news, the others are not.
        level = logging.DEBUG if self._failing else logging.WARNING
        self._failing = True
        reason = str(exc) if isinstance(exc, NotDeliveredError) else f"{type(exc).__name__}: {exc}"
        _logger.log(level, "%d spans were not delivered to %s: %s", count, self.destination, reason)

    def _recover(self) -> None:
        if self._failing:
            self._failing = False
            _logger.warning("%s takes spans again; %d were lost so far", self.destination, self.failed)


class OtlpJsonFileExporter(OtlpExporter):
    """Append spans to a file: one OTLP `ExportTraceServiceRequest` in JSON per batch, one batch per line.

    The format is that of the OpenTelemetry file exporter, which collectors read back. Parent directories are made,
    an existing file is continued. Every batch is in the hands of the operating system when `export` returns.

    Args:
        path: the file; `.jsonl` is the usual extension.

    Raises:
        ConfigurationError: the file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path))
        self._lines = LineFile(path)

    def _deliver(self, spans: Sequence[ReadableSpan], records: Records | None) -> int:
        resources: list[str] = []
        if spans:
            line = json.dumps(encode_spans(spans), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            resources.append(line.removeprefix(_REQUEST[0]).removesuffix(_REQUEST[1]))
        if records is not None:
            resources.append(records.to_json())
        self._lines.append(",".join(resources).join(_REQUEST))
        return 0

    def _release(self) -> None:
        self._lines.close()


class OtlpHttpExporter(OtlpExporter):
    """Send spans by OTLP/HTTP, in protobuf, over a connection that is kept.

    A connection error, and the status 429, 502, 503 or 504, are tried again with exponential backoff and a jitter
    from a private generator (or after what `Retry-After` says), until `timeout` is over; `shutdown` ends the waiting
    at once. Arguments that are None come from the standard `OTEL_EXPORTER_OTLP_TRACES_*` variables, else from
    `OTEL_EXPORTER_OTLP_*`. Proxies are not consulted. Nothing here is traced: `http.client` is below every
    instrumentation library, so an export never produces spans.

    Args:
        endpoint: a URL; one without a path gets `/v1/traces`, any other is used as it is. Default
            `http://localhost:4318/v1/traces`.
        headers: additional HTTP headers, for example an API key. They replace those of the environment.
        timeout: seconds for a batch, retries included; 10 by default. The variables count in seconds too, as all of
            OpenTelemetry Python does, whereas other languages and the specification count in milliseconds.
        compression: `"none"` (default) or `"gzip"`.

    Raises:
        ConfigurationError: an argument, or the endpoint in the environment, cannot be used.
        TelemetryError: the encoder, of the extra `otlp`, is not installed.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        compression: str | None = None,
    ) -> None:
        self._sender = HttpSender("traces", endpoint, headers, timeout, compression)
        self._encode, self._read_response = _load_protobuf()
        super().__init__(self._sender.url)

    def _interrupt(self) -> None:
        self._sender.interrupt()

    def _release(self) -> None:
        self._sender.release()

    def _own_process(self) -> None:
        super()._own_process()
        self._sender.own_process()

    def _deliver(self, spans: Sequence[ReadableSpan], records: Records | None) -> int:
        body: bytes = self._encode(spans).SerializeToString() if spans else b""
        if records is not None:
            # One request after another is their union, as protobuf merges them.
            body += records.to_protobuf()
        return self._refused(self._sender.send(body))

    def _refused(self, answer: bytes) -> int:
        """How many spans a successful answer reports as rejected (OTLP's partial success, never to be retried)."""
        try:
            partial = self._read_response(answer).partial_success
        except Exception:
            # Not every server answers in protobuf; the status has said that it took the spans.
            return 0
        if partial.rejected_spans or partial.error_message:
            _logger.warning("%s rejected %d spans: %s", self.destination, partial.rejected_spans, partial.error_message)
        return int(partial.rejected_spans)


def _load_protobuf() -> tuple[Callable[[Sequence[ReadableSpan]], Any], Callable[[bytes], Any]]:
    """The encoder of requests and the decoder of answers. Imported on use: protobuf belongs to an extra."""
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
    except ImportError as exc:
        raise TelemetryError(
            'sending spans by OTLP/HTTP needs the extra "otlp": pip install "eventbus-engine[otlp]"; '
            "without it, telemetry.configure(path=...) writes them to a file"
        ) from exc
    return encode, ExportTraceServiceResponse.FromString
