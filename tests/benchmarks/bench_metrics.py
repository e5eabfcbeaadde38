"""What metrics cost: an event with 0, 1 and 10 algorithms, and the collection of what was measured.

Three engines take turns, round by round: one whose seam for metrics is taken out, one that looks for a provider and
finds none, and one that is measured. Collections are measured for a provider of the user's own, which gets the
durations recorded one by one, and for that of `telemetry.configure`, whose exporter takes the histograms as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns, thread_time_ns
from typing import Any

import anyio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from eventbus_engine import Algorithm, Engine, Event
from eventbus_engine.telemetry.durations import Durations, Timer
from eventbus_engine.telemetry.metric_export import MetricPipeline
from eventbus_engine.telemetry.metrics import metrics_of
from eventbus_engine.telemetry.spans import event_template

ROUNDS = 100
EVENTS = 200
EXECUTIONS = 50_000

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


class Nobody:
    """Stands where an engine's metrics would."""

    def around(self, tracer: Any) -> Any:
        """The tracer itself."""
        return tracer


def measure() -> Iterator[Row]:
    """The hot path for each number of algorithms, then the collections."""
    for algorithms in (0, 1, 10):
        yield from compare(algorithms)
    yield from collections()


def compare(algorithms: int) -> Iterator[Row]:
    """Microseconds per event, beyond the same event without any metrics."""
    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    engines: dict[str, Engine[Any]] = {
        name: Engine(algorithms=[Note(number) for number in range(algorithms)], meter_provider=given)
        for name, given in (("none", None), ("off", None), ("on", provider))
    }
    engines["none"].meters = Nobody()  # type: ignore[assignment]
    times: dict[str, list[float]] = {name: [] for name in engines}

    async def rounds() -> None:
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                started = perf_counter_ns()
                for _ in range(EVENTS):
                    await engine.run_event(Event.BATCH_END)
                times[name].append((perf_counter_ns() - started) / EVENTS / 1000)

    anyio.run(rounds)
    # The fastest rounds: a fraction of a microsecond does not show in what others on the machine leave to it.
    taken = {name: min(each) for name, each in times.items()}
    label = f"{algorithms} algorithm{'s' if algorithms != 1 else ''}"
    yield f"{label}, no metrics", taken["none"], "us/event", None
    yield f"{label}, nobody asked: added", taken["off"] - taken["none"], "us/event", 0.5
    added = taken["on"] - taken["none"]
    yield f"{label}, measured: added", added, "us/event", None
    if algorithms:
        # Otherwise nobody hears the event, and unmeasured it is not even dispatched.
        yield f"{label}, measured: added per execution", added / (algorithms + 1), "us", 1.0


def fill(durations: Durations) -> None:
    """As many executions."""
    timer, template = Timer(durations), event_template("dispatch", Event.BATCH_END)
    for _ in range(EXECUTIONS):
        timer.open(template).end("ok")


def collections() -> Iterator[Row]:
    """CPU of the thread that collects, per execution and per collection."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    fill(metrics_of(provider).durations)
    started = thread_time_ns()
    reader.collect()
    taken = (thread_time_ns() - started) / 1000
    yield "collection by a provider of one's own", taken / EXECUTIONS, "us/exec", None

    pipeline = MetricPipeline([], Resource({}), 3600)
    fill(pipeline.engines.durations)
    started = thread_time_ns()
    pipeline.provider.force_flush()
    taken = (thread_time_ns() - started) / 1000
    pipeline.close(5)
    yield "collection by configure(metrics=True)", taken / 1000, "ms in all", None


if __name__ == "__main__":
    for row in measure():
        print(*row)
