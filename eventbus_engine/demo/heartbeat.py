"""`Heartbeat`: how late the event loop is."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

__all__ = ["Heartbeat", "percentile"]


@dataclass
class Heartbeat:
    """Sleeps again and again, and notes how much later than asked for it woke up: the lag of the event loop.

    Attributes:
        interval: seconds between two beats.
        lags: seconds, one for each beat.
    """

    interval: float = 0.005
    lags: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            due = time.perf_counter() + self.interval
            await anyio.sleep(self.interval)
            self.lags.append(max(0.0, time.perf_counter() - due))


def percentile(values: Sequence[float], rank: float) -> float:
    """The smallest value that at least `rank` percent of the values do not exceed (nearest rank); NaN of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(rank * len(ordered) / 100) - 1)]
