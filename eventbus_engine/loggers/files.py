"""Writing records to files so that none is there by half: `append`."""

from __future__ import annotations

import io
import os
from contextlib import suppress

__all__ = ["append"]


def append(file: io.FileIO, record: bytes) -> None:
    """Write the whole record at the end, or leave the file as it was.

    Raises:
        OSError: it cannot be written.
    """
    rest = memoryview(record)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):  # a device has no length
            file.truncate(file.tell() - (len(record) - len(rest)))
            file.seek(0, os.SEEK_END)
        raise
