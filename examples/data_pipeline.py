"""A data pipeline without torch: 600 weather readings, hundreds in flight, each one's events in order.

A station sends text. On the way into the store each reading is parsed, checked and given its station's name, in this
order, by three algorithms; two callbacks watch at the same time; a third tells a slow archive, in the background.
Nothing buffers without bounds: the source waits while 200 readings are in flight, and all wait for an archive behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import anyio

from eventbus_engine import Callback, Engine, EventName, Logger, algorithm

READINGS, IN_FLIGHT, STATIONS = 600, 200, ("Adelboden", "Bivio", "Crans")


class Ingest(EventName):
    """What happens to a reading. The two halves of `store` are a pair, published around the writing itself."""

    RECEIVED = "received"
    BEFORE_STORE = "before_store"
    AFTER_STORE = "after_store"


@dataclass(eq=False)
class Reading:
    """One reading: the state that its events are about, and so the lane that keeps them in order."""

    number: int
    text: str
    station: str = ""
    celsius: float = 0.0
    history: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------ algorithms: what changes a reading


@algorithm(Ingest.BEFORE_STORE, run_after=["check"])
async def enrich(event: Ingest, reading: Reading, logger: Logger) -> None:
    """Look the station up in a registry, which takes its time."""
    await anyio.sleep(0.005)
    reading.station = STATIONS[int(reading.station)]
    reading.history.append("enrich")


@algorithm(Ingest.BEFORE_STORE, run_after=["parse"])
def check(event: Ingest, reading: Reading, logger: Logger) -> None:
    """Refuse what no thermometer can have measured. What an algorithm raises, `engine.pair` raises."""
    if not -60 < reading.celsius < 60:
        raise ValueError(f"{reading.celsius:g} degrees at station {reading.station}")
    reading.history.append("check")


@algorithm(Ingest.BEFORE_STORE)
def parse(event: Ingest, reading: Reading, logger: Logger) -> None:
    """Read the text: `station;degrees`."""
    reading.station, _, degrees = reading.text.partition(";")
    reading.celsius = float(degrees)
    reading.history.append("parse")


# --------------------------------------------------------------------------------- callbacks: what watches, all at once


class Gauge(Callback[Reading]):
    """Counts what is in flight."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def received(self, reading: Reading, logger: Logger) -> None:
        """One more."""
        self.now += 1
        self.most = max(self.most, self.now)


class Journal(Callback[Reading]):
    """Keeps every event of every reading, over a connection that is slow but not in the way: callbacks overlap."""

    def __init__(self) -> None:
        self.events: dict[int, list[str]] = {}

    async def run_event(self, event: EventName, reading: Reading, logger: Logger) -> None:
        """Take every event in one place."""
        await anyio.sleep(0.001)
        self.events.setdefault(reading.number, []).append(event.value)


class Archive(Callback[Reading]):
    """Tells a service that is slower than the pipeline. Its events wait in a mailbox of 50; then the pipeline does."""

    delivery, snapshot, max_pending, on_full = "background", ("station", "celsius"), 50, "block"

    def __init__(self) -> None:
        self.warmest: dict[str, float] = {}
        self.received = 0

    async def open(self, reading: Reading, logger: Logger) -> None:
        """Connect, before the first event."""
        await anyio.sleep(0.05)

    async def after_store(self, reading: Reading, logger: Logger) -> None:
        """The reading is a snapshot: the pipeline may have moved on since."""
        await anyio.sleep(0.001)
        self.received += 1
        self.warmest[reading.station] = max(self.warmest.get(reading.station, -273.0), reading.celsius)


# ------------------------------------------------------------------------------------------------------- the pipeline


def station() -> Iterator[Reading]:
    """Where the readings come from. Every 100th is nonsense."""
    for number in range(READINGS):
        degrees = 999 if number % 100 == 99 else number % 37 - 7
        yield Reading(number, f"{number % len(STATIONS)};{degrees}")


async def main() -> None:
    """Run the pipeline, and say what happened."""
    gauge, journal, archive = Gauge(), Journal(), Archive()
    stored: list[Reading] = []
    refused: Counter[str] = Counter()
    free = anyio.Semaphore(IN_FLIGHT)

    async def ingest(reading: Reading) -> None:
        await engine.run_event(Ingest.RECEIVED, reading)
        try:
            async with engine.pair(Ingest.BEFORE_STORE, reading):
                await anyio.sleep(0.002)
                stored.append(reading)
        except ValueError as error:
            refused[str(error)] += 1
        gauge.now -= 1
        free.release()

    engine = Engine(events=Ingest, algorithms=[enrich, check, parse], callbacks=[gauge, journal, archive])
    print(engine.explain(Ingest.BEFORE_STORE), end="\n\n")
    async with engine:
        async with anyio.create_task_group() as group:
            for reading in station():
                await free.acquire()
                group.start_soon(ingest, reading)
        report = await engine.close()

    in_order = all(reading.history == ["parse", "check", "enrich"] for reading in stored)
    sequences = Counter(tuple(events) for events in journal.events.values())
    print(f"{len(stored)} of {READINGS} readings stored, at most {gauge.most} in flight")
    print(f"parsed, checked and enriched in this order: {'all' if in_order else 'NOT all'}")
    for events, count in sequences.most_common():
        print(f"{count:>4} readings went through {' -> '.join(events)}")
    for message, count in refused.most_common():
        print(f"{count:>4} refused: {message}")
    lost = sum(report.undelivered.values())
    print(f"{archive.received} reached the archive, {lost} were lost; warmest: {archive.warmest}")


if __name__ == "__main__":
    anyio.run(main)
