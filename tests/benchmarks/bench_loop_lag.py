"""How late the event loop is while a model trains beside it in steps of 200 ms: `examples/loop_lag.py`, measured."""

from __future__ import annotations

import runpy
import statistics
from collections.abc import Iterator
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop_lag.py"
LIMIT = 20.0  # milliseconds, a tenth of the step


def measure() -> Iterator[tuple[str, float, str, float | None]]:
    """The percentiles of the lag, and the length of the steps they were measured under."""
    steps, lags = runpy.run_path(str(EXAMPLE))["measure"]()
    cuts = statistics.quantiles(lags, n=100, method="inclusive")
    yield "training step, median", statistics.median(steps) * 1000, "ms", None
    yield "event loop lag, p50", cuts[49] * 1000, "ms", None
    yield "event loop lag, p99", cuts[98] * 1000, "ms", LIMIT
    yield "event loop lag, longest", max(lags) * 1000, "ms", None


if __name__ == "__main__":
    for row in measure():
        print(*row)
