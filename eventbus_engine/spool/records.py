"""What a spool holds, and how much of it: `Record` and `QueueStats`."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["QueueStats", "Record"]


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
