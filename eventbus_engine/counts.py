"""How the events of a background callback have fared: `DeliveryCounts`."""

from __future__ import annotations

from dataclasses import dataclass

from eventbus_engine.policy import CircuitState

__all__ = ["DeliveryCounts"]


@dataclass(frozen=True, slots=True)
class DeliveryCounts:
    """How the events of one background callback have fared. Each is delivered, failed, dropped, or still waiting.

    Where `send_records` sends what hooks and `log_*` methods return, an event counts for as many as it had to send,
    if that is more than one. With a spool, those of earlier processes are counted too, once they are delivered.

    Attributes:
        delivered: events whose hook has run to its end.
        failed: events whose hook raised or timed out, after all the attempts that it gets.
        dropped: events, and records of a destination, that were lost without that: the mailbox was full, the callback
            would not open or was dropped from the run, or the engine closed.
        waiting: events in the mailbox or in the hook.
        spooled: records in the spool, to be sent, those of earlier processes included.
        retried: attempts after the first.
        timed_out: attempts that outlived the callback's `timeout`.
        circuit: `closed`, `open` or `probing`; `closed` for a callback without one.
        openings: how often the circuit has opened.
    """

    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    waiting: int = 0
    spooled: int = 0
    retried: int = 0
    timed_out: int = 0
    circuit: CircuitState = "closed"
    openings: int = 0
