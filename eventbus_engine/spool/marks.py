"""How far each queue of a spool has got, noted in place, which takes no room on a disk that has none: `Marks`."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

from eventbus_engine.spool.database import NO_ROOM

__all__ = ["Mark", "Marks"]

BLOCK = 4096
"""Bytes that the file grows by: they are on the disk from then on, and only ever overwritten."""

_SLOT = struct.Struct("<QQI12x")


class Mark(NamedTuple):
    """How far a queue has got, by the numbers of its records.

    Attributes:
        acknowledged: what has been delivered, up to and including this one.
        batch_end: the last one of the batch that is, or was, to be sent together.
    """

    acknowledged: int = 0
    batch_end: int = 0

    def in_flight(self, number: int) -> bool:
        """Whether a record may be on its way: it is of the batch that was begun, and nobody has acknowledged it."""
        return self.acknowledged < number <= self.batch_end


class Marks:
    """A file beside a spool with a slot for each queue. Not safe to use from several threads.

    Each slot has a checksum: one that was torn by a crash counts as empty, and what it acknowledged is delivered again.

    Args:
        path: the spool, to whose name `.marks` is added.
        identity: 16 bytes, of this spool and no other: marks of another one of that name mean nothing.
        sync: whether a mark is to survive the machine.

    Raises:
        OSError: the file cannot be opened or read, for any reason but a lack of room.
    """

    def __init__(self, path: Path, identity: bytes, *, sync: bool) -> None:
        self._identity = identity
        self._sync = sync
        self._marks: dict[int, Mark] = {}
        self._size = 0
        self._file: BinaryIO | None = None
        try:
            self._file = open(os.open(f"{path}.marks", os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
            self._read(self._file)
        except OSError as error:
            # Without room for the file `set` will say so. Any other reason may hide what has been delivered.
            if error.errno not in NO_ROOM:
                self.close()
                raise

    def _read(self, file: BinaryIO) -> None:
        data = file.read()
        if data[: len(self._identity)] != self._identity:
            file.truncate(0)
            data = b""
        self._size = len(data) // BLOCK * BLOCK
        for queue in range(1, self._size // _SLOT.size):
            acknowledged, batch_end, checksum = _SLOT.unpack_from(data, queue * _SLOT.size)
            if checksum == self._checksum(queue, acknowledged, batch_end):
                self._marks[queue] = Mark(acknowledged, batch_end)
        self.reserve(1)

    def reserve(self, queue: int) -> None:
        """Take the room for the mark of a queue, while there is some."""
        size = ((queue + 1) * _SLOT.size + BLOCK - 1) // BLOCK * BLOCK
        if self._file is None or size <= self._size:
            return
        try:
            self._file.seek(self._size)
            self._size += self._file.write(bytes(size - self._size)) // BLOCK * BLOCK
            self._file.seek(0)
            self._file.write(self._identity)
        except OSError:
            pass  # `set` will say so.

    def get(self, queue: int) -> Mark:
        """How far a queue has got; all zero if that is nowhere yet."""
        return self._marks.get(queue, Mark())

    def set(self, queue: int, mark: Mark) -> bool:
        """Note how far a queue has got, and say whether the disk has it. It is `get`'s answer either way."""
        self._marks[queue] = mark
        if self._file is None or (queue + 1) * _SLOT.size > self._size:
            return False
        try:
            self._write(self._file, queue, mark)
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError:
            return False
        return True

    def take_back(self, last: int) -> None:
        """Let no mark be ahead of the last number that the spool has given out.

        One is if the file was put back to what it was, by a backup or by a machine that died before the file was on its
        disk. The numbers from there on are to be those of other records, which nobody has delivered.

        Raises:
            OSError: that cannot be noted.
        """
        for queue, mark in self._marks.items():
            if self._file is not None and max(mark) > last:
                self._marks[queue] = Mark(min(mark.acknowledged, last), min(mark.batch_end, last))
                self._write(self._file, queue, self._marks[queue])
                # Or those records might reach the disk before this does.
                os.fsync(self._file.fileno())

    def _write(self, file: BinaryIO, queue: int, mark: Mark) -> None:
        file.seek(queue * _SLOT.size)
        file.write(_SLOT.pack(*mark, self._checksum(queue, *mark)))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _checksum(self, *values: int) -> int:
        return zlib.crc32(self._identity + struct.pack(f"<{len(values)}Q", *values))
