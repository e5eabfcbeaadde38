"""`composer.loggers`: `Logger` and `LoggerDestination`. What Composer logs to is in `eventbus_engine.loggers`."""

from __future__ import annotations

from eventbus_adapters.composer_api.loggers.logger import Logger
from eventbus_adapters.composer_api.loggers.logger_destination import LoggerDestination

__all__ = ["Logger", "LoggerDestination"]
