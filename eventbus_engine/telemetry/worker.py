"""From a bounded queue to an exporter, on a thread of its own: `ExportWorker`.

One queue for the engine's records and for the SDK's own spans, so that one count and one deadline hold for both. It
stands where the SDK's BatchSpanProcessor would, which drops without counting and takes no deadline.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.exporters import OtlpExporter
from eventbus_engine.telemetry.records import RecordedSpan
from eventbus_engine.telemetry.wire import Records

__all__ = ["ExportReport", "ExportWorker", "QueueSettings"]

Item: TypeAlias = RecordedSpan | ReadableSpan


@dataclass(frozen=True)
class QueueSettings:
    """The bounds of a queue.

    Attributes:
        max_queue_size: spans; beyond, the oldest are dropped, a 64th of them at once.
            `OTEL_BSP_MAX_QUEUE_SIZE`, default 16,384.
        max_batch_size: spans for one export. `OTEL_BSP_MAX_EXPORT_BATCH_SIZE`, default 512.
        delay: seconds until what is queued is exported, if a batch does not fill before. `OTEL_BSP_SCHEDULE_DELAY`,
            which counts in milliseconds, default 1000.
    """

    max_queue_size: int
    max_batch_size: int
    delay: float

    @classmethod
    def from_environment(cls) -> QueueSettings:
        """The settings that the standard variables ask for.

        Raises:
            ConfigurationError: one of them is no positive number, or the batch is larger than the queue.
        """
        size = _positive("OTEL_BSP_MAX_QUEUE_SIZE", 16_384)
        batch = _positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(512, size))
        if batch > size:
            raise ConfigurationError(
                f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE={batch} is more than OTEL_BSP_MAX_QUEUE_SIZE={size}"
            )
        return cls(size, batch, _positive("OTEL_BSP_SCHEDULE_DELAY", 1000) / 1000)


def _positive(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    try:
        value = int(text) if text else default
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigurationError(f"{name}={text!r} must be a positive whole number; unset it for {default}")
    return value


@dataclass(frozen=True)
class ExportReport:
    """What became of the spans for one destination: `recorded == delivered + failed + dropped + pending`, always.

    Attributes:
        destination: a URL or a path.
        recorded: all that were to be exported.
        delivered: what the destination took.
        failed: what it refused, or what did not reach it in time.
        dropped: what a full queue pushed out, and what was left when the time was over.
        pending: what is on its way.
    """

    destination: str
    recorded: int
    delivered: int
    failed: int
    dropped: int
    pending: int


class ExportWorker(SpanProcessor):
    """Queues spans and exports them in batches.

    Args:
        exporter: takes the batches.
        resource: returns that of the provider, now.
        limits: of the provider.
        settings: the bounds.
    """

    def __init__(
        self, exporter: OtlpExporter, resource: Callable[[], Resource], limits: SpanLimits, settings: QueueSettings
    ) -> None:
        self.exporter = exporter
        self._resource = resource
        self._limits = limits
        self._settings = settings
        self._reset()
        self._start()
        if hasattr(os, "register_at_fork"):
            # The child has neither the thread nor any business with what its parent has queued. Weak: nothing
            # unregisters a hook.
            reset = weakref.WeakMethod(self._reset)
            os.register_at_fork(after_in_child=lambda: (call := reset()) and call())

    def _reset(self) -> None:
        self._queue: deque[Item] = deque()
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._taken = self._finished = self._pushed_out = 0
        self._closing = False
        self._counted_before = self._counts()
        self._thread: threading.Thread | None = None
        # The first span brings the thread up, so that a fork that traces nothing has none.
        self._hurry_at = 1

    def _start(self) -> None:
        self._hurry_at = self._settings.max_batch_size
        self._thread = threading.Thread(target=self._run, name=f"export to {self.exporter.destination}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue a span. Never waits, and costs a fraction of a microsecond."""
        queue = self._queue
        queue.append(item)
        if len(queue) >= self._hurry_at:
            self._hurry()

    def _hurry(self) -> None:
        """Wake the thread for a full batch; then stay out of the way until the queue is full, and make room."""
        queue, settings = self._queue, self._settings
        with self._progress:
            if self._thread is None:
                self._start()
            if len(queue) > settings.max_queue_size:
                # Some at once: this is the hot path, and behind a dead endpoint it comes by with every span.
                room = max(1, settings.max_queue_size // 64)
                for _ in range(room):
                    queue.popleft()
                self._pushed_out += room
            if len(queue) >= settings.max_batch_size:
                self._hurry_at = settings.max_queue_size + 1
                self._wake.set()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span of the SDK's, if it is sampled."""
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled:
            self.put(span)

    @property
    def report(self) -> ExportReport:
        """What has become of everything so far."""
        with self._progress:
            recorded = self._taken + len(self._queue) + self._pushed_out
            delivered, failed, dropped = (
                now - before for now, before in zip(self._counts(), self._counted_before, strict=True)
            )
            dropped += self._pushed_out
        pending = recorded - delivered - failed - dropped
        if self._closing and not self._running:
            dropped, pending = dropped + pending, 0
        return ExportReport(self.exporter.destination, recorded, delivered, failed, dropped, pending)

    @property
    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _counts(self) -> tuple[int, int, int]:
        return self.exporter.exported, self.exporter.failed, self.exporter.dropped

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export what is queued now.

        Returns:
            Whether all of it was delivered within the timeout.
        """
        with self._progress:
            lost = self._lost()
            due = self._taken + len(self._queue) + self._pushed_out
            self._wake.set()
            done = self._progress.wait_for(
                lambda: self._finished + self._pushed_out >= due or not self._running, timeout_millis / 1000
            )
            return done and self._finished + self._pushed_out >= due and self._lost() == lost

    def _lost(self) -> int:
        return self.exporter.failed + self.exporter.dropped + self._pushed_out

    def shutdown(self) -> None:
        """Export what is queued and end, however long that takes. Safe to call again."""
        self.finish()
        self.join(None)
        self.exporter.shutdown()

    def finish(self) -> None:
        """Have the thread export what is queued, and end."""
        self._closing = True
        self._wake.set()

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end; whether it has."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self._running

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._settings.delay)
            self._wake.clear()
            self._hurry_at = self._settings.max_batch_size
            # What comes meanwhile waits for its own batch to fill.
            for _ in range(-(-len(self._queue) // self._settings.max_batch_size)):
                self._export()
        while self._queue:
            self._export()

    def _export(self) -> None:
        records: list[RecordedSpan] = []
        spans: list[ReadableSpan] = []
        with self._progress:
            # The hot path drops the oldest under the same lock.
            for _ in range(min(self._settings.max_batch_size, len(self._queue))):
                item = self._queue.popleft()
                if isinstance(item, RecordedSpan):
                    records.append(item)
                else:
                    spans.append(item)
            self._taken += len(records) + len(spans)
        self.exporter.export(spans, Records(records, self._resource(), self._limits) if records else None)
        with self._progress:
            self._finished += len(records) + len(spans)
            self._progress.notify_all()
