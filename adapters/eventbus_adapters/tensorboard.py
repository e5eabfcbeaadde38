"""Log records for TensorBoard: `TensorBoardLogger`. Needs the extra `tensorboard`, and no torch."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventbus_adapters import _peer
from eventbus_adapters._pixels import pixels_of, png
from eventbus_adapters._tracker import Content, Tracker, check_numbers, numbers
from eventbus_engine.errors import DeliveryError
from eventbus_engine.loggers.files import append

try:
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter
except ImportError as _error:
    raise _peer.missing("TensorBoard", "tensorboard") from _error

__all__ = ["TensorBoardLogger"]

# Made when the module is loaded, out of what it has written down, so that no type checker sees them.
Event: Any = getattr(event_pb2, "Event")  # noqa: B009
Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009


class TensorBoardLogger(Tracker):
    """Write what is logged to an event file, for `tensorboard --logdir`.

    * Metrics are scalars, those of one call in one event. TensorBoard keeps 32 bits of a number.
    * Hyperparameters are a session of its HParams page.
    * Images are images: `name`, or `name/0`, `name/1` and so on for several.
    * Tables are texts, in Markdown. Traces and files are not written: TensorBoard has no place for them.

    Without a step, what is logged is at step 0. Its time is that of the logging.

    Each run of an engine writes a file of its own, and each record is in the hands of the operating system before the
    next is begun, so a process that dies loses none that was told. A record that cannot be written (the disk is full)
    leaves nothing behind, and is tried again as `retry` says.

    Args:
        directory: where the event files go. Made if it is not there.
        **options: the options of `Callback`. The defaults here: `delivery="background"`, `run_blocking=True`,
            `max_batch=100`, `max_wait=0.5`, `retry=Retry(attempts=5)`.

    Attributes:
        directory: as given.

    Raises:
        HandlerTypeError: an option that callbacks do not have.
    """

    name: str | None = "tensorboard_logger"

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        self.directory: Path = Path(directory)
        self._file: _Whole | None = None

    def open(self, state: Any, logger: Any) -> None:
        """Begin an event file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # As TensorBoard's own writer names them: it reads them in this order, and none else.
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
        self._file = _Whole(self.directory / name)
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except OSError:
            self.close(state, logger)
            raise

    def close(self, state: Any, logger: Any) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def tell(self, records: Sequence[Content]) -> None:
        """Write a record."""
        for record in records:
            event = Event(wall_time=record["time"], step=record["step"] or 0, summary=_summary_of(record))
            self._write(event)
            if record["kind"] == "metrics":
                check_numbers(record, "TensorBoard")

    def _write(self, event: Any) -> None:
        if self._file is None:
            raise DeliveryError("the event file is not open; log while the engine is")
        RecordWriter(self._file).write(event.SerializeToString())


class _Whole:
    """A file that takes the whole of what is written to it, or nothing. Unbuffered: what is in a buffer may be lost."""

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(path, "x")

    def write(self, data: bytes) -> None:
        append(self._file, data)

    def close(self) -> None:
        self._file.close()


def _summary_of(record: Content) -> Any:
    match record["kind"]:
        case "metrics":
            values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers(record).items()]
        case "hyperparameters":
            return hparams_pb({name: _atom(value) for name, value in record["hyperparameters"].items()})
        case "images":
            values = _images_of(record)
        case "table":
            return text_pb(record["name"], _markdown(record["columns"], record["rows"]))
        case kind:
            raise DeliveryError(f"TensorBoard has no place for a record of kind {kind!r}")
    return Summary(value=values)


def _atom(value: Any) -> bool | int | float | str:
    """What the HParams page takes: anything else in words."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _images_of(record: Content) -> list[Any]:
    name, images = record["name"], pixels_of(record["images"], record["channels_last"])
    tags = [name] if len(images) == 1 else [f"{name}/{number}" for number in range(len(images))]
    return [
        Summary.Value(
            tag=tag,
            image=Summary.Image(
                height=pixels.shape[0],
                width=pixels.shape[1],
                colorspace=pixels.shape[2],
                encoded_image_string=png(pixels),
            ),
        )
        for tag, pixels in zip(tags, images, strict=True)
    ]


def _markdown(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
