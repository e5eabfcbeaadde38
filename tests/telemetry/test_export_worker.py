"""The queue before an exporter: what goes in comes out, or is counted."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from eventbus_engine import Event
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.exporters import OtlpExporter, OtlpJsonFileExporter
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.telemetry.spans import event_template
from eventbus_engine.telemetry.wire import Records
from eventbus_engine.telemetry.worker import QueueSettings

TEMPLATE = event_template("dispatch", Event.BATCH_END)


class Gate(OtlpExporter):
    """Lets batches through while it is open."""

    def __init__(self) -> None:
        super().__init__("gate")
        self.sizes: list[int] = []
        self.entered, self.open = threading.Event(), threading.Event()

    def _deliver(self, spans: Sequence[ReadableSpan], records: Records | None) -> int:
        self.entered.set()
        self.open.wait(30)
        self.sizes.append(len(spans) + (len(records) if records is not None else 0))
        return 0

    def _interrupt(self) -> None:
        self.open.set()

    def _release(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Closed at first, open in the end."""
    made = Gate()
    yield made
    made.open.set()


def record(provider: RecordingProvider, count: int) -> None:
    """So many spans of an engine's."""
    for _ in range(count):
        provider.recorder.open(TEMPLATE).end("ok")


def test_recorded_is_delivered_and_failed_and_dropped(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue drops the oldest, and the sum is right while it is full and when all is over."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    provider = RecordingProvider([gate])
    record(provider, 10)
    assert gate.entered.wait(10)
    record(provider, 250)
    provider.get_tracer("user").start_span("one more").end()
    (during,) = provider.reports
    gate.open.set()
    flushed = provider.force_flush()
    (after,) = provider.close(5)

    assert (during.recorded, during.dropped, during.pending) == (261, 151, 110)
    assert flushed
    assert (after.recorded, after.delivered, after.failed, after.dropped, after.pending) == (261, 110, 0, 151, 0)
    assert max(gate.sizes) == 10


def test_force_flush_keeps_its_deadline_and_tells_the_truth(gate: Gate) -> None:
    """False when the time is over, True once everything is out, False if something was lost."""
    provider = RecordingProvider([gate])
    record(provider, 3)
    started = time.monotonic()
    first = provider.force_flush(100)
    taken = time.monotonic() - started
    gate.open.set()
    second = provider.force_flush(5000)
    gate.shutdown()
    record(provider, 1)
    third = provider.force_flush(5000)
    provider.close(1)

    assert (first, second, third) == (False, True, False)
    assert 0.09 <= taken < 0.5


def test_nothing_is_lost_from_many_threads(tmp_path: Path) -> None:
    """Each span once, from eight threads at once."""
    provider = RecordingProvider([OtlpJsonFileExporter(tmp_path / "spans.jsonl")])
    threads = [threading.Thread(target=record, args=(provider, 1000)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (report,) = provider.close(10)
    ids = ids_in(tmp_path / "spans.jsonl")

    assert (report.recorded, report.delivered) == (8000, 8000)
    assert len(ids) == len(set(ids)) == 8000


def ids_in(path: Path) -> list[str]:
    """The span ids of a file."""
    return [
        span["spanId"]
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_repeats_neither_ids_nor_spans(tmp_path: Path) -> None:
    """It exports its own, under ids of its own, in a span that was open at the fork as well; nothing twice."""
    path = tmp_path / "spans.jsonl"
    provider = RecordingProvider([OtlpJsonFileExporter(path)])
    record(provider, 5)
    outer = provider.recorder.open(TEMPLATE)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            record(provider, 7)
            status = 0 if provider.force_flush(10_000) else 2
        finally:
            os._exit(status)
    record(provider, 7)
    outer.end("ok")
    _, status = os.waitpid(child, 0)
    (report,) = provider.close(10)
    ids = ids_in(path)

    assert os.waitstatus_to_exitcode(status) == 0
    assert (report.recorded, report.delivered) == (13, 13)
    assert len(ids) == len(set(ids)) == 20


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_BSP_MAX_QUEUE_SIZE": "0"},
        {"OTEL_BSP_SCHEDULE_DELAY": "soon"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "10", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "11"},
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is set up."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigurationError, match=list(environment)[-1]):
        QueueSettings.from_environment()


def test_the_settings_come_from_the_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds there, seconds here; an empty one counts as unset."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "250")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", " ")

    assert QueueSettings.from_environment() == QueueSettings(16_384, 512, 0.25)


def test_records_and_the_users_spans_share_a_batch(collector: Any, make_spans: Callable[[int], Any]) -> None:
    """In one request over HTTP; both arrive."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from eventbus_engine.telemetry.exporters import OtlpHttpExporter

    provider = RecordingProvider([OtlpHttpExporter(collector.url)], "both")
    provider.get_tracer("user").start_span("user's").end()
    record(provider, 1)
    provider.close(5)
    (request,) = (ExportTraceServiceRequest.FromString(received.body) for received in collector.requests)

    assert sorted(
        (scope.scope.name, span.name)
        for part in request.resource_spans
        for scope in part.scope_spans
        for span in scope.spans
    ) == [("eventbus_engine", "dispatch batch_end"), ("user", "user's")]
    assert request.resource_spans[0].resource == request.resource_spans[1].resource
