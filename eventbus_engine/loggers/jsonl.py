"""Log records for programs: `JsonlLogger`, one JSON object per line."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eventbus_engine.errors import ConfigurationError, TelemetryError
from eventbus_engine.loggers.files import append
from eventbus_engine.loggers.plain import jsonable
from eventbus_engine.loggers.records import RecordDestination

__all__ = ["JsonlLogger"]

_log: logging.Logger = logging.getLogger("eventbus_engine")


class JsonlLogger(RecordDestination):
    """Append records to a file of JSON lines (https://jsonlines.org), one per call, each written through at once.

    Every record has `time` (ISO 8601, UTC), `kind` and `step` (null where there is none), then:

    * `metrics`: `metrics`, name to value;
    * `hyperparameters`: `hyperparameters`, name to value;
    * `traces`, if asked for: `traces`, key to the fields of the `Trace`, in order;
    * `table`: `name`, `columns`, `rows`;
    * `images`: `name`, `shape`, `channels_last`. The pixels stay out: JSON is no place for them.

    Tensors and arrays become numbers or lists. JSON has no NaN and no infinities: they are the strings `"NaN"`,
    `"Infinity"` and `"-Infinity"`, as in protobuf's JSON, which `float()` reads back.

    A record is in the hands of the operating system when the call returns, so a process that dies loses none of them;
    nothing is synced to the disk, so a power failure may lose the last seconds. A process that dies in the middle of a
    record leaves half a line, which the next run ends before it writes its first.

    With `max_bytes` the file is renamed to `<path>.1` before it would grow larger, `<path>.1` to `<path>.2` and so on,
    and the one beyond `backups` is gone. No record is split over two files; one larger than `max_bytes` has a file of
    its own. A file has one writer: where several ranks log, give each its own path.

    When a record cannot be written (the disk is full, say), the first of them raises, which a run reports and survives
    as `on_error` says; the others are only counted. No half line stays behind, and writing resumes as soon as there is
    space. What was lost is logged as a warning when the file is closed.

    The file stays open until the engine has closed all callbacks (`post_close`), so what they log while closing is in
    it. Another engine opens it again and continues it. Safe to use from several threads.

    Attributes:
        lost: how many records could not be written.

    Args:
        path: the file. Parent directories are made, an existing file is continued.
        max_bytes: the size at which the file is set aside and a new one begun; None, the default, lets it grow.
        backups: how many older files to keep, at least 1.
        log_traces: whether to write the traces, too: a record for each event.
        **options: the options of `Callback`.

    Raises:
        ConfigurationError: the file cannot be opened for writing, or a limit is no positive whole number.
        HandlerTypeError: an option that callbacks do not have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int | None = None,
        backups: int = 5,
        *,
        log_traces: bool = False,
        **options: Any,
    ) -> None:
        for name, limit in (("max_bytes", 1 if max_bytes is None else max_bytes), ("backups", backups)):
            if not isinstance(limit, int) or limit < 1:
                raise ConfigurationError(f"{name}={limit!r} is no limit; give a whole number of at least 1")
        super().__init__(log_traces=log_traces, **options)
        self.path: Path = Path(path)
        self.lost: int = 0
        self._max_bytes = max_bytes
        self._backups = backups
        self._failing = False
        self._lock = threading.Lock()
        self._closed = True
        self._file: io.FileIO
        self.open(None, None)

    def open(self, state: Any, logger: Any) -> None:
        """Open the file again if it is closed."""
        with self._lock:
            if not self._closed:
                return
            try:
                self._file = _open_file(self.path)
            except OSError as exc:
                raise ConfigurationError(
                    f"cannot write records to {str(self.path)!r}: {exc}; give a path in a directory you may write to"
                ) from exc
            self._closed = False

    def post_close(self) -> None:
        """Close the file. Safe to call again."""
        with self._lock:
            if not self._closed and self.lost:
                _log.warning("%s: %d records could not be written and are lost", self.path, self.lost)
            self._closed = True
            self._file.close()

    def write(self, kind: str, step: int | None, **fields: Any) -> None:
        """Append one record."""
        record = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), "kind": kind, "step": step}
        text = json.dumps(jsonable({**record, **fields}), allow_nan=False, separators=(",", ":"))
        line = f"{text}\n".encode("ascii")
        with self._lock:
            if self._closed:
                raise TelemetryError(
                    f"{self.path} is closed, and so cannot take this record of kind {kind!r}; log before the engine "
                    "is closed, or make another JsonlLogger, which continues the file"
                )
            try:
                if self._file.closed:  # a rotation could not open the new one
                    self._file = _open_file(self.path)
                if self._max_bytes is not None and self._file.tell() > max(0, self._max_bytes - len(line)):
                    self._rotate()
                append(self._file, line)
            except OSError as error:
                self.lost += 1
                first, self._failing = not self._failing, True
                if first:
                    raise TelemetryError(
                        f"cannot write to {self.path}: {error}; make room there. Until it works again, records are "
                        "lost and counted"
                    ) from error
            else:
                self._failing = False

    def _rotate(self) -> None:
        """Move the file and the older ones up by one number, the oldest first, so that a crash in between loses none.

        Each rename is atomic. A number that is free, as such a crash leaves one, is filled instead of the last one.
        """
        files = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self._backups + 1))]
        free = next((n for n, file in enumerate(files) if not file.exists()), self._backups)
        self._file.close()  # Windows renames no open file
        try:
            for number in range(free, 0, -1):
                files[number - 1].replace(files[number])
        finally:
            self._file = _open_file(self.path)


def _open_file(path: Path) -> io.FileIO:
    """Open the file to append to it, and end the line in the middle of which an earlier process was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    within_a_line = path.is_file() and _last_byte(path) not in (b"", b"\n")
    # Unbuffered: what a buffer holds is lost when the process is killed, and written twice after a fork.
    file = io.FileIO(path, "a")
    if within_a_line:
        file.write(b"\n")
    return file


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1)
