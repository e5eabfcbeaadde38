"""What a dead endpoint costs a run: the throughput in steps of 1 ms with 10 algorithms, traced over untraced.

The endpoints refuse the connection, take it and never answer, or answer 503, which asks for another try; each is a
process of its own. Untraced and traced rounds take turns, so that whatever else the machine does hits both alike. A
step computes for a millisecond and runs an event: what tracing takes of the processor, in whichever thread, makes the
round longer. The memory is what Python has allocated beyond the untraced run, at its highest.
"""

from __future__ import annotations

import gc
import logging
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from bench_tracing import Note, Row

from eventbus_engine import Engine, Event
from eventbus_engine.telemetry import OtlpHttpExporter
from eventbus_engine.telemetry.provider import RecordingProvider

ROUNDS = 24
STEPS = 250
STEP_NS = 1_000_000

ENDPOINT = """
import socket, sys
kind = sys.argv[1]
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
if kind == "refuses":
    sys.stdin.read()  # the port is taken, and nobody listens
listener.listen(16)
if kind == "never answers":
    held = []
    while True:
        held.append(listener.accept()[0])
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args): pass
server = ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
server.daemon_threads = True
server.socket = listener
server.serve_forever()
"""


@contextmanager
def endpoint(kind: str) -> Iterator[str]:
    """The URL of a dead endpoint."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDPOINT, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()
    process.wait()


def compute(count: int) -> int:
    """Work for the processor, as much for the same count, whatever the clock says."""
    total = 0
    for number in range(count):
        total += number & 7
    return total


def calibrate() -> int:
    """The count for which `compute` takes a step's time when nothing disturbs it."""
    best = min(_timed(100_000) for _ in range(20))
    return int(100_000 * STEP_NS / best)


def _timed(count: int) -> int:
    started = time.perf_counter_ns()
    compute(count)
    return time.perf_counter_ns() - started


async def round_of_steps(engine: Engine[Any], count: int) -> tuple[float, float]:
    """Seconds, of the clock and of the processor."""
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        compute(count)
        await engine.run_event(Event.BATCH_END)
    return time.perf_counter() - started, time.process_time() - worked


def measure() -> Iterator[Row]:
    """For each kind of endpoint: throughput, memory, the time that closing takes, and what was reported as lost."""
    logging.getLogger("eventbus_engine").setLevel(logging.ERROR)
    count = calibrate()
    for kind in ("refuses", "never answers", "answers 503"):
        with endpoint(kind) as url:
            yield from compare(kind, url, count)


def compare(kind: str, url: str, count: int) -> Iterator[Row]:
    """The rows of one kind."""
    provider = RecordingProvider([OtlpHttpExporter(url)])
    notes = [Note(number) for number in range(10)]
    off, on = Engine(algorithms=notes), Engine(algorithms=notes, tracer_provider=provider)
    ratios: list[tuple[float, float]] = []

    async def rounds() -> None:
        for number in range(ROUNDS):
            # Which of the two comes first changes, too: what a machine does to the second it does to both.
            first, second = (off, on) if number % 2 else (on, off)
            times = {first: await round_of_steps(first, count), second: await round_of_steps(second, count)}
            ratios.append((times[on][0] / times[off][0], times[on][1] / times[off][1]))

    async def fill() -> None:
        for _ in range(10_000):
            await on.run_event(Event.BATCH_END)

    anyio.run(rounds)
    tracemalloc.start()
    anyio.run(fill)  # more spans than the queue takes
    gc.collect()
    full = tracemalloc.get_traced_memory()[0]
    anyio.run(fill)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - full
    tracemalloc.stop()
    started = time.perf_counter()
    (report,) = provider.close(1)
    took = time.perf_counter() - started
    unexplained = report.recorded - report.delivered - report.failed - report.dropped
    wall, cpu = (statistics.median(both) for both in zip(*ratios[1:], strict=True))
    yield f"endpoint {kind}: untraced over traced throughput", wall, "times", 1 / 0.95
    yield f"endpoint {kind}: traced over untraced CPU", cpu, "times", None
    yield f"endpoint {kind}: memory of a full queue", full / 2**20, "MiB", None
    yield f"endpoint {kind}: grown by as much again", grown / 2**20, "MiB", 1
    yield f"endpoint {kind}: close(timeout=1)", took, "s", 1.5
    yield f"endpoint {kind}: spans recorded", report.recorded, "spans", None
    yield f"endpoint {kind}: spans reported as lost", report.failed + report.dropped, "spans", None
    yield f"endpoint {kind}: spans unaccounted for", unexplained, "spans", 0


if __name__ == "__main__":
    for row in measure():
        print(*row)
