"""How long `import eventbus_engine` takes, against importing what it stands on."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

PROCESSES = 10
LIMIT = 1.5

OURS = "import eventbus_engine"
BASE = "import anyio, structlog, opentelemetry.trace"
FORBIDDEN = ("httpx", "numpy", "opentelemetry.sdk", "torch")


def measure() -> Iterator[tuple[str, float, str, float | None]]:
    """Medians over fresh processes, taken in turns so that whatever else the machine does hits both alike."""
    for statement in (OURS, BASE):
        seconds(statement)  # compiles the bytecode
    timings: dict[str, list[float]] = {OURS: [], BASE: []}
    for _ in range(PROCESSES):
        for statement, taken in timings.items():
            taken.append(seconds(statement))
    ours, base = (statistics.median(timings[statement]) for statement in (OURS, BASE))
    yield OURS, ours * 1000, "ms", None
    yield BASE, base * 1000, "ms", None
    yield "the first over the second", ours / base, "times", LIMIT
    loaded = output(f"{OURS}; import sys; print(*(m for m in {FORBIDDEN} if m in sys.modules))").split()
    yield f"forbidden modules loaded: {', '.join(loaded) or 'none'}", len(loaded), "modules", 0


def seconds(statement: str) -> float:
    """How long a statement takes in a process of its own, the start of the interpreter not counted."""
    return float(output(f"from time import perf_counter as now; t = now(); {statement}; print(now() - t)"))


def output(program: str) -> str:
    """What a program prints."""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    for row in measure():
        print(*row)
