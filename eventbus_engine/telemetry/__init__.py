"""Tracing by OpenTelemetry: set-up, exporters and ids that never change the run they trace.

What needs the SDK is imported when it is first asked for: a program that does not trace does not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventbus_engine.telemetry.configure import configure, current_provider
from eventbus_engine.telemetry.watch import watch

if TYPE_CHECKING:
    from eventbus_engine.telemetry.exporters import OtlpHttpExporter, OtlpJsonFileExporter
    from eventbus_engine.telemetry.ids import PrivateIdGenerator
    from eventbus_engine.telemetry.logs import add_event_context
    from eventbus_engine.telemetry.provider import RecordingProvider

__all__ = [
    "OtlpHttpExporter",
    "OtlpJsonFileExporter",
    "PrivateIdGenerator",
    "RecordingProvider",
    "add_event_context",
    "configure",
    "current_provider",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in ("OtlpHttpExporter", "OtlpJsonFileExporter"):
        from eventbus_engine.telemetry import exporters

        return getattr(exporters, name)
    if name == "RecordingProvider":
        from eventbus_engine.telemetry.provider import RecordingProvider

        return RecordingProvider
    if name == "PrivateIdGenerator":
        from eventbus_engine.telemetry.ids import PrivateIdGenerator

        return PrivateIdGenerator
    if name == "add_event_context":
        from eventbus_engine.telemetry.logs import add_event_context

        return add_event_context
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
