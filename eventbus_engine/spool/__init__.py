"""A durable queue on the local disk, for what cannot be delivered now: see docs/remote-logging.md."""

from __future__ import annotations

from eventbus_engine.spool.encoding import Array, SpooledEvent, decode_event, encode_event, new_id
from eventbus_engine.spool.sender import SenderReport, SpoolSender
from eventbus_engine.spool.store import QueueStats, Record, Spool

__all__ = [
    "Array",
    "QueueStats",
    "Record",
    "SenderReport",
    "Spool",
    "SpoolSender",
    "SpooledEvent",
    "decode_event",
    "encode_event",
    "new_id",
]
