"""What can be told from the spans a run left in its files, without a backend: numbers, trees, and other formats."""

from __future__ import annotations

from eventbus_engine.telemetry.reports.chrome import write_chrome
from eventbus_engine.telemetry.reports.jaeger import write_jaeger
from eventbus_engine.telemetry.reports.model import RecordedSpan, RecordedTrace
from eventbus_engine.telemetry.reports.otlp import write_otlp
from eventbus_engine.telemetry.reports.reader import Recording
from eventbus_engine.telemetry.reports.summary import format_summary, summarize
from eventbus_engine.telemetry.reports.tree import format_trace

__all__ = [
    "RecordedSpan",
    "RecordedTrace",
    "Recording",
    "format_summary",
    "format_trace",
    "summarize",
    "write_chrome",
    "write_jaeger",
    "write_otlp",
]
