"""A dead endpoint costs a bounded amount of memory, and a bounded time at the end, and is told of."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import dataclasses, json, logging, sys, time, tracemalloc
from eventbus_engine import Engine, Event, telemetry

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
engine = Engine()

def dispatch(count):
    for _ in range(count):
        engine.sync.run_event(Event.BATCH_END)

with telemetry.configure(endpoint=sys.argv[1], shutdown_timeout=1) as provider:
    tracemalloc.start()
    sizes = []
    for _ in range(4):
        dispatch(5_000)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    during = dataclasses.asdict(provider.reports[0])
    left = time.monotonic()
took = time.monotonic() - left
print(json.dumps({
    "sizes": sizes, "took": took, "during": during, "after": dataclasses.asdict(provider.reports[0]),
}))
"""

QUEUE, BATCH = 1_000, 200


@pytest.mark.parametrize("name", ["refusing", "black hole", "overloaded"])
def test_memory_and_the_end_are_bounded_and_the_loss_is_reported(
    name: str, start: Callable[..., subprocess.Popen[str]], endpoints: dict[str, Any]
) -> None:
    """20,000 events, none of which arrives, through a queue of 1,000."""
    process = start(
        PROGRAM,
        endpoints[name].url,
        OTEL_BSP_MAX_QUEUE_SIZE=str(QUEUE),
        OTEL_BSP_MAX_EXPORT_BATCH_SIZE=str(BATCH),
    )
    printed, logged = process.communicate(timeout=60)
    assert process.returncode == 0, logged
    result = json.loads(printed)
    sizes, during, after = result["sizes"], result["during"], result["after"]

    # The queue is full after the first 5,000; 15,000 more spans would take several MB.
    assert max(sizes) - sizes[0] < 500_000
    assert sum(during[part] for part in ("delivered", "failed", "dropped", "pending")) == during["recorded"] == 20_000
    assert during["pending"] <= QUEUE + BATCH
    assert result["took"] < 1.5
    assert (after["recorded"], after["delivered"], after["pending"]) == (20_000, 0, 0)
    assert after["failed"] + after["dropped"] == 20_000
    (closing,) = re.findall(
        r"^WARNING 20000 of 20000 spans did not reach (\S+): (\d+) failed, (\d+) dropped", logged, re.MULTILINE
    )
    assert closing == (after["destination"], str(after["failed"]), str(after["dropped"]))
