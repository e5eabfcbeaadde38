"""Traces are a record for each event: a destination takes them if it is told to, and not otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from eventbus_engine import Engine
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.loggers import InMemoryLogger, JsonlLogger, OtelLogger, StructlogLogger
from eventbus_engine.testing import FakeAlgorithm

Made = tuple[LoggerDestination, Callable[[], int]]


def memory(folder: Path, options: dict[str, Any]) -> Made:
    """A list of the program's."""
    destination = InMemoryLogger(**options)
    return destination, lambda: len(destination.traces)


def jsonl(folder: Path, options: dict[str, Any]) -> Made:
    """A file."""
    destination = JsonlLogger(folder / "metrics.jsonl", **options)
    return destination, lambda: _traces(json.loads(line)["kind"] for line in destination.path.read_text().splitlines())


def structured(folder: Path, options: dict[str, Any]) -> Made:
    """The program's structlog."""
    capture = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(None, processors=[capture])
    return StructlogLogger(logger, **options), lambda: _traces(entry["event"] for entry in capture.entries)


def otel(folder: Path, options: dict[str, Any]) -> Made:
    """Log records of OpenTelemetry."""
    exporter: Any = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    destination = OtelLogger(logger_provider=provider, **options)
    return destination, lambda: _traces(
        log.log_record.event_name.removeprefix("eventbus.") for log in exporter.get_finished_logs()
    )


def _traces(kinds: Any) -> int:
    return list(kinds).count("traces")


@pytest.mark.anyio
@pytest.mark.parametrize("make", [memory, jsonl, structured, otel])
@pytest.mark.parametrize(("options", "expected"), [({}, 0), ({"log_traces": True}, 2)])
async def test_a_destination_takes_traces_if_it_is_told_to(
    make: Callable[[Path, dict[str, Any]], Made], options: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    """Two events with an algorithm on each: two records, or none."""
    destination, count = make(tmp_path, options)

    async with Engine(algorithms=[FakeAlgorithm(match="batch_end")], callbacks=[destination]) as engine:
        await engine.run_event("batch_end")
        await engine.run_event("batch_end")

    assert count() == expected
