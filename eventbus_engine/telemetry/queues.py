"""What waits in the queues of engines and what was lost there, read from outside, on the thread that asks."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from eventbus_engine.logger import Logger

if TYPE_CHECKING:
    from eventbus_engine.engine import Engine
    from eventbus_engine.lanes import Lanes
    from eventbus_engine.telemetry.provider import RecordingProvider
    from eventbus_engine.telemetry.worker import ExportReport

__all__ = ["Counts", "Exports", "Queues", "Reading"]

Counts: TypeAlias = Counter[str]
"""How many, by the name of a participant or a destination."""


@dataclass
class Reading:
    """What engines hold and have lost.

    Attributes:
        pending: events in the mailboxes of background callbacks.
        dropped: events that those will never see to the end.
        unsent: records that wait for a destination.
        lost: records that never reached one.
    """

    pending: Counts = field(default_factory=Counter)
    dropped: Counts = field(default_factory=Counter)
    unsent: Counts = field(default_factory=Counter)
    lost: Counts = field(default_factory=Counter)


class _Watched:
    """An engine, and what it had lost when it was last looked at."""

    def __init__(self, engine: Engine[Any]) -> None:
        self.engine = weakref.ref(engine)
        self.dropped: Counts = Counter()
        self.lost: Counts = Counter()
        self.closed = False

    def read(self, engine: Engine[Any]) -> Reading:
        reading = Reading()
        for mailbox in list(engine._delivery.mailboxes.values()):
            reading.pending[mailbox.entry.name] += mailbox.waiting
            reading.dropped[mailbox.entry.name] += mailbox.dropped
        logger = engine.logger
        for entry in engine._roster.latest.destinations if isinstance(logger, Logger) else ():
            pending = logger.pending(entry.callback)
            if pending is not None:
                # The one that is on its way counts as lost there until it has arrived; here, it does not yet.
                on_its_way = pending.delivering is not None
                reading.lost[entry.name] += pending.lost + (len(pending) if self.closed else -on_its_way)
                reading.unsent[entry.name] += 0 if self.closed else len(pending) + on_its_way
        # Never less than before, whatever has been read in the middle of a change.
        self.dropped |= reading.dropped
        self.lost |= reading.lost
        return reading


class Queues:
    """Reads any number of engines. What those had lost that are no more is still counted."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._dropped: Counts = Counter()
        self._lost: Counts = Counter()
        self._lock = threading.Lock()

    def watch(self, engine: Engine[Any]) -> None:
        """Read this engine too, until it is no more."""
        with self._lock:
            if all(watched.engine() is not engine for watched in self._watched):
                self._watched.append(_Watched(engine))

    def settle(self, engine: Engine[Any]) -> None:
        """Read an engine that has just been closed: what still waits there is lost."""
        with self._lock:
            for watched in self._watched:
                if watched.engine() is engine:
                    watched.closed = True
                    watched.read(engine)

    def read(self) -> Reading:
        """What all of them hold and have lost, by name."""
        total = Reading()
        with self._lock:
            for watched in tuple(self._watched):
                engine = watched.engine()
                if engine is None:
                    self._dropped.update(watched.dropped)
                    self._lost.update(watched.lost)
                    self._watched.remove(watched)
                else:
                    reading = watched.read(engine)
                    total.pending.update(reading.pending)
                    total.unsent.update(reading.unsent)
                    total.dropped.update(watched.dropped)
                    total.lost.update(watched.lost)
            total.dropped.update(self._dropped)
            total.lost.update(self._lost)
        return total

    def in_lanes(self) -> int:
        """The events that wait for their lane, on the buses of all of them."""
        with self._lock:
            engines = [engine for watched in self._watched if (engine := watched.engine()) is not None]
        lanes: set[Lanes] = {engine._bus._lanes for engine in engines if engine._bus is not None}
        return sum(each.waiting for each in lanes)


class Exports:
    """What became of the spans of any number of providers, by destination."""

    def __init__(self) -> None:
        self._providers: list[RecordingProvider] = []
        self._ended: list[ExportReport] = []
        self._lock = threading.Lock()

    def watch(self, provider: RecordingProvider) -> None:
        """Count this provider's spans too."""
        with self._lock:
            if all(known is not provider for known in self._providers):
                self._providers.append(provider)

    def read(self, what: str) -> Counts:
        """How many were `recorded`, `delivered`, `dropped` or `failed`."""
        counts: Counts = Counter()
        with self._lock:
            for provider in tuple(self._providers):
                if provider.closed:
                    self._providers.remove(provider)
                    self._ended += provider.reports
            for report in [*self._ended, *(report for provider in self._providers for report in provider.reports)]:
                counts[report.destination] += getattr(report, what)
        return counts
