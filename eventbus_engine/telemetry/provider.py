"""The provider that `telemetry.configure` sets up: the SDK's, with a recorder for the engine's own spans."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import DEFAULT_ON

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.exporters import OtlpExporter
from eventbus_engine.telemetry.ids import PrivateIdGenerator
from eventbus_engine.telemetry.recorder import RecordedSpan, Recorder
from eventbus_engine.telemetry.spans import SCOPE, ApiTracer
from eventbus_engine.telemetry.tail import KeepReport, TailKeeper
from eventbus_engine.telemetry.worker import ExportReport, ExportWorker, QueueSettings

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.trace.sampling import Sampler

__all__ = ["RecordingProvider"]

_logger = logging.getLogger("eventbus_engine")

GROUPS = ("algorithm", "callback", "dispatch", "pair", "section")


class RecordingProvider(TracerProvider):
    """A provider of the SDK's whose engines record their spans and have them built on the exporters' threads.

    Spans of the program's own are the SDK's, go into the same queues and to the same exporters. A span processor that
    is added wants to see spans live: from then on, the engines open live spans of the SDK's as well.

    Args:
        exporters: where the spans go, each on a thread of its own.
        service_name: the resource attribute `service.name`.
        resource_attributes: further ones.
        sampler: the SDK's default if None. For spans of engines it is asked once a root.
        groups: False for kinds of the engine's spans that are not wanted.
        keep_failed: whether to keep the engine's spans of roots that the sampler refused and in which something failed.
        keep_slow: likewise of roots that took longer than this; seconds.

    Attributes:
        recorder: what engines open their spans with.
        closed: whether `close` is through.
        meter_provider: for metrics of the program's own, if `configure` sends metrics.

    Raises:
        ConfigurationError: one of the `OTEL_BSP_*` variables does not fit, there is no such group, or `keep_slow` is
            no time.
    """

    def __init__(
        self,
        exporters: Sequence[OtlpExporter],
        service_name: str | None = None,
        resource_attributes: Mapping[str, Any] | None = None,
        sampler: Sampler | None = None,
        groups: Mapping[str, bool] | None = None,
        keep_failed: bool = False,
        keep_slow: float | None = None,
    ) -> None:
        if unknown := sorted(set(groups or {}) - set(GROUPS)):
            raise ConfigurationError(f"groups has no {', '.join(unknown)}; there are {', '.join(GROUPS)}")
        off = frozenset(name for name, wanted in (groups or {}).items() if not wanted)
        keeping = keep_failed or keep_slow is not None
        self._keeper = TailKeeper(keep_failed, keep_slow, self._put) if keeping else None
        settings = QueueSettings.from_environment()
        attributes = dict(resource_attributes or {})
        if service_name is not None:
            attributes["service.name"] = service_name
        limits = SpanLimits()
        super().__init__(
            sampler=sampler,
            resource=Resource.create(attributes),
            # Its handler at exit could wait for a dead endpoint; leaving the block shuts the provider down.
            shutdown_on_exit=False,
            id_generator=PrivateIdGenerator(),
            span_limits=limits,
        )
        self._workers = [ExportWorker(exporter, lambda: self.resource, limits, settings) for exporter in exporters]
        for worker in self._workers:
            super().add_span_processor(worker)
        # What the default comes to, without the SDK's detours.
        asked = None if self.sampler is DEFAULT_ON else self.sampler
        put = self._workers[0].put if len(self._workers) == 1 else self._put
        self.closed: bool = False
        self.meter_provider: MeterProvider | None = None
        self.recorder: Recorder = Recorder(asked, put, off, self._keeper)

    def _put(self, record: RecordedSpan) -> None:
        for worker in self._workers:
            worker.put(record)

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        """Add a processor. It gets every span at its start and its end, so those of engines are live from now on."""
        super().add_span_processor(span_processor)
        self.recorder.live = ApiTracer(self.get_tracer(SCOPE))

    @property
    def reports(self) -> list[ExportReport]:
        """What has become of the spans, by destination."""
        return [worker.report for worker in self._workers]

    @property
    def kept(self) -> KeepReport | None:
        """What has become of the roots that the sampler refused; None unless some were to be kept after all."""
        return None if self._keeper is None else self._keeper.report

    def end_open_spans(self) -> None:
        """Hand on the engines' spans that have not ended, as they are now: nobody would ever see them otherwise."""
        # The innermost first, so that a root is decided about last.
        for span in sorted(self.recorder.open_spans.copy(), key=lambda span: -span.start):
            span.end_now()

    def close(self, timeout: float) -> list[ExportReport]:
        """Export what is queued and shut everything down, within `timeout` seconds.

        The SDK's shutdown waits for one processor after another, as long as they like. So the workers end side by
        side, and an exporter that is still at it near the end is interrupted. A processor that the user has added
        comes last, on a thread that is left behind if need be, with the time that is left.
        """
        deadline = time.monotonic() + timeout
        reserve = min(0.5, timeout / 5)
        if self._keeper is not None:
            self._keeper.settle()
        for worker in self._workers:
            worker.finish()
        late = [worker for worker in self._workers if not worker.join(_left(deadline - 2 * reserve))]
        for worker in late:
            worker.exporter.shutdown()
        for worker in late:
            worker.join(_left(deadline - reserve))
        rest = threading.Thread(target=self.shutdown, name="telemetry shutdown", daemon=True)
        rest.start()
        rest.join(_left(deadline))
        self.closed = True
        reports = self.reports
        for report in reports:
            _log(report)
        if self.kept is not None:
            _log_kept(self.kept)
        return reports


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _log(report: ExportReport) -> None:
    lost = report.recorded - report.delivered
    if not lost:
        _logger.info("%d spans reached %s", report.recorded, report.destination)
        return
    _logger.warning(
        "%d of %d spans did not reach %s: %d failed, %d dropped%s",
        lost,
        report.recorded,
        report.destination,
        report.failed,
        report.dropped,
        f", {report.pending} still on their way" if report.pending else "",
    )


def _log_kept(report: KeepReport) -> None:
    _logger.log(
        logging.WARNING if report.lost else logging.INFO,
        "of the traces not sampled, %d failed and %d slow ones were kept, without %d spans that were too many, and %d "
        "were discarded",
        report.failed,
        report.slow,
        report.lost,
        report.discarded,
    )
