"""Log records as events of the program's own structlog: `StructlogLogger`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import structlog

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.loggers.plain import plain
from eventbus_engine.loggers.records import RESERVED_KEYS, RecordDestination, key_values

__all__ = ["StructlogLogger"]

_LEVELS = ("debug", "info", "warning", "error", "critical")
_RESERVED = RESERVED_KEYS | {"step", "time"}


class StructlogLogger(RecordDestination):
    """Log every record as one structlog event, through the configuration of the program.

    The event is the kind of the record, with `time` (ISO 8601, UTC) and, where there is one, `step`:

    * `metrics`, `hyperparameters`: each value under its name;
    * `traces`, if asked for: `traces`, key to the fields of the `Trace`;
    * `table`: `table` (its name), `columns`, `rows`;
    * `images`: `images` (their name), `shape`, `channels_last`. The pixels stay out.

    Values are plain Python, tensors numbers or lists. A metric whose name structlog or this record uses gets an
    underscore: `event_`. It never calls `structlog.configure`; processors, renderer and filter are the program's, and
    what is bound to the logger appears in every event. `ConsoleLogger` is for people, and independent of all that.

    Args:
        logger: a structlog logger; by default `structlog.get_logger()`, which follows the configuration.
        level: `debug`, `info`, `warning`, `error` or `critical`.
        log_traces: whether to log the traces, too: an event for each of the engine's.
        **options: the options of `Callback`.

    Raises:
        ConfigurationError: there is no such level.
        HandlerTypeError: an option that callbacks do not have.
    """

    def __init__(self, logger: Any = None, level: str = "info", *, log_traces: bool = False, **options: Any) -> None:
        if level not in _LEVELS:
            raise ConfigurationError(f"level={level!r} is no level of structlog's; give one of {', '.join(_LEVELS)}")
        super().__init__(log_traces=log_traces, **options)
        self._logger: Any = structlog.get_logger() if logger is None else logger
        self._level = level

    def write(self, kind: str, step: int | None, **fields: Any) -> Any:
        """Log one event; what an asynchronous logger returns is awaited when the destinations run."""
        if kind in fields:
            shown = fields[kind] if kind != "traces" else fields
        else:
            shown = {kind: fields.pop("name"), **fields}
        at = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), **({} if step is None else {"step": step})}
        return getattr(self._logger, self._level)(kind, **at, **key_values(plain(shown), _RESERVED))
