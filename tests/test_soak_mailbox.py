"""A million events for a consumer that is dead: memory stays flat, and every loss is counted.

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
import pytest

from eventbus_engine import Callback, DeliveryCounts, Engine

pytestmark = pytest.mark.anyio

TOLERANCE = 10 * 2**20
ROOM = 1000


class State:
    """A state with something to copy."""

    def __init__(self) -> None:
        self.loss = [0.0] * 16


class Dead(Callback[Any]):
    """Never done with its first event."""

    delivery, snapshot, max_pending = "background", ("loss",), ROOM

    async def batch_end(self, state: Any, logger: Any) -> None:
        """Hang."""
        await anyio.sleep_forever()


def memory() -> int:
    """Bytes of memory in use, once all that is garbage has been given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return sys.getallocatedblocks() * 64


@pytest.mark.parametrize(
    ("on_full", "events"),
    [
        ("drop_oldest", 100_000),
        ("coalesce", 10_000),
        pytest.param("drop_oldest", 1_000_000, marks=pytest.mark.soak),
        pytest.param("coalesce", 1_000_000, marks=pytest.mark.soak),
    ],
)
async def test_memory_is_flat_and_losses_are_exact(on_full: str, events: int) -> None:
    """One event is in the hook, a thousand wait, and all the others are lost: the counts say exactly that."""
    async with Engine(State(), callbacks=[Dead(on_full=on_full)]) as engine:
        await engine.run_event("batch_end")
        await anyio.wait_all_tasks_blocked()
        for _ in range(2 * ROOM):
            await engine.run_event("batch_end")
        before = memory()
        for _ in range(events - 2 * ROOM - 1):
            await engine.run_event("batch_end")
        grown = memory() - before
        counts = engine.deliveries()["dead"]
        report = await engine.close(timeout=0.01)

    assert counts == DeliveryCounts(dropped=events - ROOM - 1, waiting=ROOM + 1)
    assert report.undelivered == {"dead": events}
    assert abs(grown) < TOLERANCE
