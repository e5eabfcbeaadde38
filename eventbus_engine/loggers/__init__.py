"""Destinations for log records: the console, files, memory, HTTP, structlog, OpenTelemetry; and a progress bar.

Each is imported when it is first asked for, and with it what it needs.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventbus_engine.loggers.console import ConsoleLogger
    from eventbus_engine.loggers.http import HttpLogger
    from eventbus_engine.loggers.jsonl import JsonlLogger
    from eventbus_engine.loggers.memory import InMemoryLogger
    from eventbus_engine.loggers.otel import OtelLogger
    from eventbus_engine.loggers.progress import ProgressBar
    from eventbus_engine.loggers.structured import StructlogLogger

__all__ = [
    "ConsoleLogger",
    "HttpLogger",
    "InMemoryLogger",
    "JsonlLogger",
    "OtelLogger",
    "ProgressBar",
    "StructlogLogger",
]

_MODULES = {
    "ConsoleLogger": "console",
    "HttpLogger": "http",
    "InMemoryLogger": "memory",
    "JsonlLogger": "jsonl",
    "OtelLogger": "otel",
    "ProgressBar": "progress",
    "StructlogLogger": "structured",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        # rich, which structlog loads as well, draws from the global generator when it is imported.
        drawn = random.getstate()
        try:
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        finally:
            random.setstate(drawn)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
