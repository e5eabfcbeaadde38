"""What a spool holds, and how much of it: `Record` and `QueueStats`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from eventbus_engine.errors import ConfigurationError

__all__ = ["QueueStats", "Record", "check_limits", "split"]

MIN_BYTES = 2**20

OVERHEAD = 128
"""Bytes that a record takes besides its data and its id: its row and its entries in two indexes, generously."""


class Record(NamedTuple):
    """What a queue holds.

    Attributes:
        id: the same for every attempt to deliver it, so that the far side can tell a duplicate.
        time: when it happened, in nanoseconds since the epoch.
        data: bytes that mean nothing to the spool.
        number: its place in the order of the spool, from 1; 0 until it is stored.
    """

    id: str
    time: int
    data: bytes
    number: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes in a spool."""
        return len(self.data) + len(self.id.encode()) + OVERHEAD


class QueueStats(NamedTuple):
    """How a queue stands; the losses are those of all processes so far.

    Attributes:
        pending: records in it.
        size: bytes of their data.
        oldest: when the one that happened first did, in nanoseconds since the epoch; None if the queue is empty.
        lost_to_size: records dropped since the file was full.
        lost_to_age: records dropped since they were too old.
        not_stored: records that `count_lost` was told of.
    """

    pending: int = 0
    size: int = 0
    oldest: int | None = None
    lost_to_size: int = 0
    lost_to_age: int = 0
    not_stored: int = 0

    @property
    def lost(self) -> int:
        """All losses together."""
        return self.lost_to_size + self.lost_to_age + self.not_stored


def split(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Parts that take so many bytes at most, or hold one record."""
    part: list[Record] = []
    total = 0
    for record in records:
        if part and total + record.size > size:
            yield part
            part, total = [], 0
        part.append(record)
        total += record.size
    if part:
        yield part


def check_limits(max_bytes: int, max_age: float | None, durability: str, on_corrupt: str) -> None:
    """Refuse arguments that do not fit a spool.

    Raises:
        ConfigurationError: naming the first of them, and what would fit.
    """
    for name, value, fits, wanted in (
        ("max_bytes", max_bytes, max_bytes >= MIN_BYTES, f"at least {MIN_BYTES} (1 MiB)"),
        ("max_age", max_age, max_age is None or max_age > 0, "a number of seconds above 0, or None"),
        ("durability", durability, durability in ("process", "power"), "'process' or 'power'"),
        ("on_corrupt", on_corrupt, on_corrupt in ("raise", "set_aside"), "'raise' or 'set_aside'"),
    ):
        if not fits:
            raise ConfigurationError(f"{name}={value!r} does not fit a Spool; give {wanted}")
