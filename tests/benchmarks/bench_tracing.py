"""What tracing costs: an event with 1 and with 10 algorithms, recorded, and traced in the SDK's own way.

The SDK's way is `start_as_current_span` around the same work with a BatchSpanProcessor, to the same collector on the
loopback (in a process of its own). The ways are taken in turns, round by round, so that whatever else the machine does
hits all of them alike. The hot path is the wall time of an event in the thread that runs it while the exporters sleep;
the CPU is that of the whole process until everything is delivered.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns, process_time_ns
from typing import Any

import anyio
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from eventbus_engine import Algorithm, Engine, Event
from eventbus_engine.telemetry import OtlpHttpExporter, PrivateIdGenerator
from eventbus_engine.telemetry.provider import RecordingProvider

ROUNDS = 12
EVENTS = 200
STEPS = 2000

COLLECTOR = """
import socketserver
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(server.server_address[1], flush=True)
server.serve_forever()
"""

Row = tuple[str, float, str, float | None]


class Note(Algorithm[Any, Any]):
    """An algorithm that does next to nothing, so that what is measured is what surrounds it."""

    def __init__(self, number: int) -> None:
        self.name = f"note_{number}"

    def match(self, event: Any, state: Any) -> bool:
        """Always."""
        return True

    def apply(self, event: Any, state: Any, logger: Any) -> int:
        """Next to nothing."""
        return 0


class Way:
    """A way to run an event; `sdk` wraps it and each algorithm in the SDK's own spans.

    Args:
        algorithms: how many.
        provider: where the engine's spans go, None for none.
        sdk: where the SDK's own go, None for none.
    """

    def __init__(self, algorithms: int, provider: Any = None, sdk: TracerProvider | None = None) -> None:
        self.provider = provider or sdk
        self.notes = [Note(number) for number in range(algorithms)]
        if sdk is not None:
            tracer = sdk.get_tracer("benchmark")
            self.run_event = self._in_sdk_spans(tracer)
            for note in self.notes:
                note.apply = _in_sdk_span(tracer, note)  # type: ignore[assignment, method-assign]
        else:
            # Without a provider of its own an engine would look for a global one, and there is none here.
            self.run_event = self._plainly
        self.engine: Engine[Any] = Engine(algorithms=self.notes, tracer_provider=provider)
        self.hot: list[float] = []
        self.cpu: list[float] = []

    async def _plainly(self) -> None:
        await self.engine.run_event(Event.BATCH_END)

    def _in_sdk_spans(self, tracer: Any) -> Callable[[], Any]:
        attributes = {"eventbus.kind": "dispatch", "eventbus.event": "batch_end"}

        async def run_event() -> None:
            with tracer.start_as_current_span("dispatch batch_end", attributes=attributes) as span:
                await self.engine.run_event(Event.BATCH_END)
                span.set_attribute("eventbus.outcome", "ok")

        return run_event

    async def round(self) -> None:
        """Some events, the time of each, and the CPU of all of it."""
        cpu_before = process_time_ns()
        times = []
        for _ in range(EVENTS):
            started = perf_counter_ns()
            await self.run_event()
            times.append(perf_counter_ns() - started)
        if self.provider is not None:
            assert self.provider.force_flush(30_000)
        self.hot.append(statistics.median(times) / 1000)
        self.cpu.append((process_time_ns() - cpu_before) / EVENTS / 1000)


def _in_sdk_span(tracer: Any, note: Note) -> Callable[[Any, Any, Any], int]:
    name = f"algorithm {note.name}"
    attributes = {
        "eventbus.kind": "algorithm",
        "eventbus.event": "batch_end",
        "eventbus.order": 0,
        "code.function.name": "benchmark.Note.apply",
    }

    def apply(event: Any, state: Any, logger: Any) -> int:
        with tracer.start_as_current_span(name, attributes=attributes) as span:
            span.set_attribute("eventbus.exit_code", 0)
            span.set_attribute("eventbus.outcome", "ok")
            return 0

    return apply


def sdk_provider(url: str) -> TracerProvider:
    """A provider with the SDK's own processor, and our exporter, so that the sending is the same."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": "sdk"}), shutdown_on_exit=False, id_generator=PrivateIdGenerator()
    )
    provider.add_span_processor(BatchSpanProcessor(OtlpHttpExporter(url)))
    return provider


@contextmanager
def collector() -> Iterator[str]:
    """The URL of a collector in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def measure() -> Iterator[Row]:
    """The hot path and the CPU for each way, their ratios, and the losses at steps of 1 ms."""
    with collector() as url:
        # Both ways read these: a round fits into the queue, and the exporters sleep until they are told to flush.
        sizes = {"OTEL_BSP_MAX_QUEUE_SIZE": "8192", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8192"}
        os.environ.update(sizes)
        try:
            for algorithms in (1, 10):
                yield from compare(url, algorithms)
        finally:
            for name in sizes:
                del os.environ[name]
        yield from steps(url)


def compare(url: str, algorithms: int) -> Iterator[Row]:
    """Microseconds per event, beyond the same event untraced."""
    ways = {
        "untraced": Way(algorithms),
        "sampled out": Way(algorithms, RecordingProvider([], sampler=ParentBased(ALWAYS_OFF))),
        "sampled out, failures kept": Way(
            algorithms, RecordingProvider([], sampler=ParentBased(ALWAYS_OFF), keep_failed=True)
        ),
        "recorded": Way(algorithms, RecordingProvider([])),
        "exported": Way(algorithms, RecordingProvider([OtlpHttpExporter(url)])),
        "SDK": Way(algorithms, sdk=sdk_provider(url)),
    }

    async def rounds() -> None:
        for _ in range(ROUNDS):
            for way in ways.values():
                await way.round()

    anyio.run(rounds)
    hot = {name: statistics.median(way.hot[1:]) for name, way in ways.items()}
    cpu = {name: statistics.median(way.cpu[1:]) for name, way in ways.items()}
    for way in ways.values():
        if way.provider is not None:
            way.provider.shutdown()
    label = f"{algorithms} algorithm{'s' if algorithms > 1 else ''}"
    yield f"{label}, untraced: hot path", hot["untraced"], "us/event", None
    for name in list(ways)[1:]:
        yield f"{label}, {name}: hot path added", hot[name] - hot["untraced"], "us/event", None
        yield f"{label}, {name}: CPU added", cpu[name] - cpu["untraced"], "us/event", None
    for name in ("recorded", "exported"):
        ratio = (hot[name] - hot["untraced"]) / (hot["SDK"] - hot["untraced"])
        yield f"{label}, {name} over SDK: hot path", ratio, "times", 1 / 12 if name == "recorded" else None
    ratio = (cpu["exported"] - cpu["untraced"]) / (cpu["SDK"] - cpu["untraced"])
    yield f"{label}, exported over SDK: CPU", ratio, "times", 1 / 5


def steps(url: str) -> Iterator[Row]:
    """Spans lost in steps of 1 ms, with ten algorithms each, queues as they come."""
    provider = RecordingProvider([OtlpHttpExporter(url)])
    way = Way(10, provider)

    async def run() -> None:
        for _ in range(STEPS):
            due = time.perf_counter() + 0.001
            await way.run_event()
            while time.perf_counter() < due:
                pass

    anyio.run(run)
    (report,) = provider.close(10)
    yield "steps of 1 ms, 10 algorithms: spans recorded", report.recorded, "spans", None
    yield "steps of 1 ms, 10 algorithms: spans lost", report.recorded - report.delivered, "spans", 0


if __name__ == "__main__":
    for row in measure():
        print(*row)
