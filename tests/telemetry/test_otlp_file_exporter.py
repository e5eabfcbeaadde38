"""The file exporter: lines of OTLP JSON, and honest counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.exporters import OtlpJsonFileExporter
from eventbus_engine.telemetry.otlp import encode_spans

MakeSpans = Callable[[int], list[ReadableSpan]]


def test_each_batch_is_one_line_and_there_when_export_returns(tmp_path: Path, make_spans: MakeSpans) -> None:
    """No buffer stands between a crash and what was exported; parent directories are made."""
    path = tmp_path / "runs" / "one" / "spans.jsonl"
    exporter = OtlpJsonFileExporter(path)
    batches = [make_spans(2), make_spans(1)]
    results = [exporter.export(batch) for batch in batches]
    lines = path.read_text(encoding="utf-8").splitlines()
    exporter.shutdown()

    assert results == [SpanExportResult.SUCCESS] * 2
    assert [json.loads(line) for line in lines] == [encode_spans(batch) for batch in batches]
    assert (exporter.exported, exporter.failed, exporter.dropped) == (3, 0, 0)


def test_an_existing_file_is_continued(tmp_path: Path, make_spans: MakeSpans) -> None:
    """A run that is resumed does not lose the spans of its first half."""
    path = tmp_path / "spans.jsonl"
    for _ in range(2):
        exporter = OtlpJsonFileExporter(path)
        exporter.export(make_spans(1))
        exporter.shutdown()

    assert len(path.read_text().splitlines()) == 2


def test_a_line_that_a_killed_process_left_unfinished_costs_no_other(tmp_path: Path, make_spans: MakeSpans) -> None:
    """What comes next starts on a line of its own."""
    path = tmp_path / "spans.jsonl"
    path.write_text('{"resourceSpans":[]}\n{"resourceSp')
    exporter = OtlpJsonFileExporter(path)
    batches = [make_spans(1), make_spans(1)]
    for batch in batches:
        exporter.export(batch)
    exporter.shutdown()
    lines = path.read_text().splitlines()

    assert lines[1] == '{"resourceSp'
    assert [json.loads(line) for line in lines[2:]] == [encode_spans(batch) for batch in batches]


def test_shutting_down_twice_is_safe_and_later_spans_are_counted_as_dropped(
    tmp_path: Path, make_spans: MakeSpans
) -> None:
    """Nothing raises, nothing is written, nothing is forgotten."""
    exporter = OtlpJsonFileExporter(tmp_path / "spans.jsonl")
    exporter.shutdown()
    exporter.shutdown()
    result = exporter.export(make_spans(2))

    assert result is SpanExportResult.FAILURE
    assert (exporter.exported, exporter.failed, exporter.dropped) == (0, 0, 2)
    assert (tmp_path / "spans.jsonl").read_text() == ""
    assert exporter.force_flush()


def test_a_full_disk_is_counted_and_logged_once(
    tmp_path: Path, make_spans: MakeSpans, caplog: pytest.LogCaptureFixture
) -> None:
    """A destination that goes on failing is news once; /dev/full fails every write."""
    exporter = OtlpJsonFileExporter("/dev/full")
    results = [exporter.export(make_spans(1)) for _ in range(3)]
    exporter.shutdown()

    assert results == [SpanExportResult.FAILURE] * 3
    assert (exporter.exported, exporter.failed) == (0, 3)
    assert [record.getMessage().split(": ")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "1 spans were not delivered to /dev/full"
    ]


def test_a_lone_surrogate_does_not_cost_the_batch(tmp_path: Path) -> None:
    """File names read from a disk may hold what UTF-8 cannot."""
    span = TracerProvider(resource=Resource({}), shutdown_on_exit=False).get_tracer("x").start_span("a\udc80b")
    assert isinstance(span, ReadableSpan)
    exporter = OtlpJsonFileExporter(tmp_path / "spans.jsonl")
    exporter.export([span])
    exporter.shutdown()
    request = json.loads((tmp_path / "spans.jsonl").read_bytes())

    assert request["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] == "a?b"


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Before the run, and by name."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigurationError, match=r"cannot write spans to .*file/spans.jsonl"):
        OtlpJsonFileExporter(tmp_path / "file" / "spans.jsonl")
