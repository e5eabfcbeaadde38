"""Ten thousand records in flight over one engine, a million events: their order holds, and nothing is left of them.

The ordinary suite runs a tenth of it, `make soak` all of it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import Engine, Envelope, EventName, algorithm, current_envelope

pytestmark = pytest.mark.anyio

PUBLISHERS, EVENTS = 2, 50  # of each record: two tasks with fifty events each
TOLERANCE = 5 * 2**20


class Flow(EventName):
    """A vocabulary."""

    STEP = "step"


class Record:
    """A record that notes what was published about it, in which order, and what came of that."""

    __slots__ = ("busy", "handled", "overlaps", "published", "seen")

    def __init__(self) -> None:
        self.published: list[int] = []
        self.handled: list[int] = []
        self.seen: list[int] = []
        self.overlaps = 0
        self.busy = False


@algorithm(Flow.STEP)
async def handle(event: EventName, record: Record, logger: Any) -> None:
    """Note the event, and let others in between: every other one suspends."""
    envelope = current_envelope()
    assert envelope is not None
    record.overlaps += record.busy
    record.busy = True
    if envelope.payload % 2:
        await anyio.lowlevel.checkpoint()
    record.handled.append(envelope.payload)
    record.busy = False


def see(envelope: Envelope) -> None:
    """A plain subscriber, after the algorithm."""
    envelope.state.seen.append(envelope.payload)


async def flow(records: int, events: int = EVENTS) -> tuple[int, int, int, int]:
    """Publish so many events, twice, of so many records at once.

    Returns:
        Events handled, records whose order is not that of the publishing, overlaps, and lanes left at the end.
    """
    engine = Engine(events=Flow, algorithms=[handle])
    engine.bus.subscribe(see)
    everything = [Record() for _ in range(records)]

    async def publish(record: Record, first: int) -> None:
        for number in range(first, first + events):
            record.published.append(number)
            await engine.bus.publish(Flow.STEP, number, state=record)

    async with engine, anyio.create_task_group() as group:
        for record in everything:
            for publisher in range(PUBLISHERS):
                group.start_soon(publish, record, publisher * events)
    wrong = sum(not record.published == record.handled == record.seen for record in everything)
    handled = sum(len(record.handled) for record in everything)
    return handled, wrong, sum(record.overlaps for record in everything), len(engine.bus._lanes)


def memory() -> int:
    """Bytes of memory in use, once all that is garbage has been given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return sys.getallocatedblocks() * 64


@pytest.mark.parametrize("records", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_order_holds_and_memory_comes_back(records: int) -> None:
    """Per lane the order is exactly that of the publishing, and memory is back where it was, give or take 5 MB."""
    # As wide but short, for what the allocator keeps for next time. What is left of the events would show all the same.
    await flow(records, EVENTS // 5)
    before, objects = memory(), sys.getallocatedblocks()
    result = await flow(records)
    grown = memory() - before

    assert result == (records * PUBLISHERS * EVENTS, 0, 0, 0)
    assert abs(grown) < TOLERANCE
    assert abs(sys.getallocatedblocks() - objects) < 1_000
