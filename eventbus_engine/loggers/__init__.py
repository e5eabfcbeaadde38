"""Destinations for log records: the console, a file of JSON lines, memory."""

from __future__ import annotations

from eventbus_engine.loggers.console import ConsoleLogger
from eventbus_engine.loggers.jsonl import JsonlLogger
from eventbus_engine.loggers.memory import InMemoryLogger

__all__ = ["ConsoleLogger", "InMemoryLogger", "JsonlLogger"]
