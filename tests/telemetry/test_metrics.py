"""Metrics of engines: what is measured, that it is exact, and that nobody pays who did not ask."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import Histogram as SdkHistogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from eventbus_engine import Algorithm, Callback, Engine, Event, LoggerDestination, telemetry
from eventbus_engine.errors import CallbackErrors
from eventbus_engine.telemetry import durations
from eventbus_engine.telemetry.durations import BOUNDARIES, Durations, Histogram, Timer
from eventbus_engine.telemetry.meters import CONFIGURED
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.telemetry.spans import event_template

pytestmark = pytest.mark.usefixtures("untouched_randomness")

DELTA = {SdkHistogram: AggregationTemporality.DELTA}


class Meters:
    """A provider, and what it has collected."""

    def __init__(self, temporality: dict[type, AggregationTemporality] | None = None, readers: int = 1) -> None:
        self.readers = [InMemoryMetricReader(temporality) for _ in range(readers)]
        self.provider = MeterProvider(self.readers, shutdown_on_exit=False)

    def metrics(self, reader: int = 0) -> dict[str, Metric]:
        """Collect; the metrics by name."""
        data = self.readers[reader].get_metrics_data()
        assert data is not None
        return {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}

    def points(self, name: str, reader: int = 0) -> dict[frozenset[Any], Any]:
        """Collect; the points of a metric by their attributes' values."""
        metric = self.metrics(reader).get(name)
        return {frozenset((p.attributes or {}).values()): p for p in metric.data.data_points} if metric else {}

    def counts(self, name: str) -> dict[frozenset[Any], int]:
        """Collect; how many there are in each point."""
        return {key: p.count if hasattr(p, "count") else p.value for key, p in self.points(name).items()}


@pytest.fixture
def meters() -> Meters:
    """A provider with a reader that keeps everything."""
    return Meters()


@pytest.fixture
def durations_in_turn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nanoseconds that the next executions take, whatever they do: for executions one after another."""
    coming: list[int] = []

    def clock() -> Iterator[int]:
        while True:
            yield 1_000
            yield 1_000 + coming.pop(0)

    monkeypatch.setattr(durations, "perf_counter_ns", clock().__next__)
    return coming


class Clip(Algorithm[Any, Any]):
    """Fails if the state says so."""

    def match(self, event: Any, state: Any) -> bool:
        return event is Event.BATCH_END

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        if isinstance(state, BaseException):
            raise state


class Watch(Callback[Any]):
    async def batch_end(self, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()


def key(*values: str) -> frozenset[str]:
    """The values of a point's attributes."""
    return frozenset(values)


# ------------------------------------------------------------------------------------------------------- what there is


@pytest.mark.anyio
async def test_dispatches_algorithms_and_callbacks_are_histograms_by_event_name_and_outcome(meters: Meters) -> None:
    """An event that nobody listens to is an event all the same."""
    engine = Engine(algorithms=[Clip()], callbacks=[Watch()], meter_provider=meters.provider)
    for event in (Event.BATCH_END, Event.BATCH_END, Event.BATCH_START):
        await engine.run_event(event)
    metrics = meters.metrics()

    assert meters.counts("eventbus.dispatch.duration") == {key("batch_end", "ok"): 2, key("batch_start", "ok"): 1}
    assert meters.counts("eventbus.algorithm.duration") == {key("batch_end", "ok", "clip"): 2}
    assert meters.counts("eventbus.callback.duration") == {key("batch_end", "ok", "watch"): 2}
    (point,) = metrics["eventbus.callback.duration"].data.data_points
    assert point.attributes == {"eventbus.event": "batch_end", "eventbus.outcome": "ok", "eventbus.name": "watch"}
    assert {metrics[f"eventbus.{kind}.duration"].unit for kind in ("dispatch", "algorithm", "callback")} == {"s"}


@pytest.mark.anyio
@pytest.mark.parametrize("make", [lambda: None, ValueError])
async def test_an_algorithm_is_measured_by_the_clock_of_its_trace(meters: Meters, make: Any) -> None:
    """Without spans: its metric and its Trace say the same to the nanosecond, whether it fails or not."""
    engine = Engine(make(), algorithms=[Clip()], meter_provider=meters.provider)
    try:
        traces = await engine.run_event(Event.BATCH_END)
    except ValueError as error:
        traces = error.traces  # type: ignore[attr-defined]
    (point,) = meters.points("eventbus.algorithm.duration").values()

    assert point.sum == pytest.approx(traces["clip/BATCH_END"].duration_ns / 1e9, rel=1e-12)


@pytest.mark.anyio
async def test_what_failed_is_measured_by_its_outcome_and_counted_by_its_error(meters: Meters) -> None:
    """Algorithm and dispatch fail with the same error; the event after it is fine."""
    engine = Engine(algorithms=[Clip()], meter_provider=meters.provider)
    for state in (ValueError("no"), ValueError("no"), KeyError("no")):
        with pytest.raises(type(state)):
            await engine.run_event(Event.BATCH_END, state)
    await engine.run_event(Event.BATCH_END)

    assert meters.counts("eventbus.algorithm.duration") == {
        key("batch_end", "ok", "clip"): 1,
        key("batch_end", "failed", "clip"): 3,
    }
    assert meters.counts("eventbus.errors") == {
        key("algorithm", "batch_end", "failed", "clip", "ValueError"): 2,
        key("algorithm", "batch_end", "failed", "clip", "KeyError"): 1,
        key("dispatch", "batch_end", "failed", "ValueError"): 2,
        key("dispatch", "batch_end", "failed", "KeyError"): 1,
    }


@pytest.mark.anyio
async def test_timeout_and_cancellation_are_outcomes(meters: Meters) -> None:
    """A callback past its limit has timed out; a dispatch whose scope is cancelled was cancelled."""

    class Slow(Callback[Any]):
        timeout = 0.001

        async def batch_end(self, state: Any, logger: Any) -> None:
            await anyio.sleep_forever()

    class Endless(Callback[Any]):
        async def batch_start(self, state: Any, logger: Any) -> None:
            scope.cancel()
            await anyio.sleep_forever()

    engine = Engine(callbacks=[Slow(), Endless()], meter_provider=meters.provider)
    with pytest.raises(CallbackErrors):
        await engine.run_event(Event.BATCH_END)
    with anyio.CancelScope() as scope:
        await engine.run_event(Event.BATCH_START)

    assert meters.counts("eventbus.callback.duration") == {
        key("batch_end", "timed_out", "slow"): 1,
        key("batch_start", "cancelled", "endless"): 1,
    }
    assert meters.counts("eventbus.dispatch.duration") == {
        key("batch_end", "failed"): 1,
        key("batch_start", "cancelled"): 1,
    }


@pytest.mark.anyio
async def test_a_mailbox_shows_how_full_it_is_and_what_it_dropped(meters: Meters) -> None:
    """One event is being delivered, two wait, and the oldest of those that came too many is lost."""
    release, begun = anyio.Event(), anyio.Event()

    class Upload(Callback[Any]):
        delivery = "background"
        max_pending = 2
        on_full = "drop_oldest"

        async def batch_end(self, state: Any, logger: Any) -> None:
            begun.set()
            await release.wait()

    engine = Engine(callbacks=[Upload()], meter_provider=meters.provider)
    async with engine:
        await engine.run_event(Event.BATCH_END)
        await begun.wait()
        for _ in range(3):
            await engine.run_event(Event.BATCH_END)
        pending, dropped = meters.counts("eventbus.callback.pending"), meters.counts("eventbus.callback.dropped")
        release.set()

    assert (pending, dropped) == ({key("upload"): 2}, {key("upload"): 1})
    assert meters.counts("eventbus.callback.pending") == {key("upload"): 0}
    assert meters.counts("eventbus.callback.duration") == {key("batch_end", "ok", "upload"): 3}


@pytest.mark.anyio
async def test_events_that_wait_for_their_lane_are_counted(meters: Meters) -> None:
    """Three events of one state: one is handled, two wait. The bus of two engines is counted once."""
    release = anyio.Event()

    class Hold(Callback[Any]):
        async def batch_end(self, state: Any, logger: Any) -> None:
            await release.wait()

    engine = Engine(object(), callbacks=[Hold()], meter_provider=meters.provider)
    Engine(bus=engine.bus, meter_provider=meters.provider)
    waiting: dict[frozenset[Any], int] = {}
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(engine.run_event, Event.BATCH_END)
        await anyio.wait_all_tasks_blocked()
        waiting |= meters.counts("eventbus.lanes.waiting")
        release.set()

    assert waiting == {key(): 2}
    assert meters.counts("eventbus.lanes.waiting") == {key(): 0}


class Records(LoggerDestination):
    """A destination that takes no record before it may."""

    def __init__(self, free: anyio.Event) -> None:
        self.free = free

    async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if metrics.get("fail"):
            raise OSError("no")
        await self.free.wait()


@pytest.mark.anyio
async def test_records_that_wait_and_records_that_are_lost_are_counted_by_destination(meters: Meters) -> None:
    """What waits when the engine is closed is lost; what is on its way is not, yet. Nothing ever counts backwards."""
    free = anyio.Event()
    engine = Engine(callbacks=[Records(free)], meter_provider=meters.provider)
    seen: list[Any] = []
    engine.logger.log_metrics({"fail": 1})
    await engine.run_event(Event.BATCH_END)
    engine.logger.log_metrics({"a": 1})
    engine.logger.log_metrics({"a": 2})
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Event.BATCH_END)
        await anyio.wait_all_tasks_blocked()
        seen.append((meters.counts("eventbus.destination.pending"), meters.counts("eventbus.destination.lost")))
        group.cancel_scope.cancel()
    report = await engine.close(timeout=0.01)

    name = key("records")
    assert seen == [({name: 2}, {name: 1})]
    assert report.undelivered == {"records": 3}
    assert (meters.counts("eventbus.destination.pending"), meters.counts("eventbus.destination.lost")) == (
        {name: 0},
        {name: 3},
    )


def test_what_an_engine_had_lost_is_still_counted_when_it_is_no_more(meters: Meters) -> None:
    """A counter never goes back; the next engine's losses come on top."""

    class Broken(LoggerDestination):
        async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise OSError("no")

    def lose() -> weakref.ref[Engine[Any]]:
        engine = Engine(callbacks=[Broken()], meter_provider=meters.provider)
        engine.logger.log_metrics({"a": 1})
        engine.sync.run_event(Event.BATCH_END)
        engine.sync.close()
        return weakref.ref(engine)

    gone = lose()
    gc.collect()
    before = meters.counts("eventbus.destination.lost")
    lose()

    assert gone() is None
    assert (before, meters.counts("eventbus.destination.lost")) == ({key("broken"): 1}, {key("broken"): 2})


def test_what_became_of_the_spans_is_counted_by_destination(meters: Meters, tmp_path: Any) -> None:
    """Recorded is delivered and dropped and failed; blocks of one destination add up."""
    path = tmp_path / "spans.jsonl"
    engine = Engine(algorithms=[Clip()], meter_provider=meters.provider)
    for _ in range(2):
        with telemetry.configure(path=path):
            engine.sync.run_event(Event.BATCH_END)
    engine.sync.close()
    counts = {what: meters.counts(f"eventbus.spans.{what}") for what in ("recorded", "delivered", "dropped", "failed")}

    assert counts == {
        "recorded": {key(str(path)): 4},
        "delivered": {key(str(path)): 4},
        "dropped": {key(str(path)): 0},
        "failed": {key(str(path)): 0},
    }


# ---------------------------------------------------------------------------------------------------------- exactness


def expected(values: Sequence[int]) -> tuple[int, list[int], int, int]:
    """Count, buckets, shortest and longest, straight from the definition."""
    buckets = [0] * (len(BOUNDARIES) + 1)
    for value in values:
        buckets[bisect_left(BOUNDARIES, value / 1e9)] += 1
    return len(values), buckets, min(values), max(values)


def found(histogram: Histogram) -> tuple[int, list[int], int, int]:
    """The same of a histogram."""
    return sum(histogram.counts), histogram.counts, histogram.low, histogram.high


EDGES = [round(boundary * 1e9) for boundary in BOUNDARIES]
NANOSECONDS = st.integers(0, 20_000_000_000) | st.sampled_from([e + d for e in EDGES for d in (-1, 0, 1)])


@given(st.lists(NANOSECONDS, min_size=1), st.lists(NANOSECONDS, min_size=1))
def test_what_stands_in_for_durations_has_their_histogram(first: list[int], second: list[int]) -> None:
    """Count, buckets, the sum of each bucket, shortest and longest, as integers; for histograms put together too."""
    histogram = Histogram.of(first)
    histogram.add(Histogram.of(second))
    replayed = [value for value, count in histogram.stand_ins() for _ in range(count)]

    assert found(histogram) == expected([*first, *second])
    assert Histogram.of(replayed) == histogram
    assert sum(histogram.sums) == sum([*first, *second])


@pytest.mark.parametrize("temporality", [None, DELTA], ids=["cumulative", "delta"])
def test_a_reader_gets_the_histogram_that_the_durations_have(
    temporality: dict[type, AggregationTemporality] | None, durations_in_turn: list[int]
) -> None:
    """Whatever its temporality; two readers of one provider get it, each at its own pace."""
    meters = Meters(temporality, readers=2)
    engine = Engine(meter_provider=meters.provider)
    batches = [[10_000, 10_001, 1_500_000, 1_700_001, 42_000_000_007], [3, 25_000, 999_999_999, 1_000_000_000]]
    points: list[Any] = []
    for batch in batches:
        durations_in_turn += batch
        for _ in batch:
            engine.sync.run_event(Event.BATCH_END)
        points += meters.points("eventbus.dispatch.duration").values()
    late = list(meters.points("eventbus.dispatch.duration", reader=1).values())
    engine.sync.close()

    everything = batches[0] + batches[1]
    seen = [batches[0], batches[1] if temporality is DELTA else everything, everything]
    for point, values in zip([*points, *late], seen, strict=True):
        count, buckets, low, high = expected(values)
        assert (point.count, list(point.bucket_counts), point.min, point.max) == (count, buckets, low / 1e9, high / 1e9)
        assert point.sum == pytest.approx(sum(values) / 1e9, rel=1e-12)
        assert tuple(point.explicit_bounds) == BOUNDARIES


def test_counts_are_exact_however_many_threads_measure_while_others_collect() -> None:
    """Engines of one provider on eight threads, and two readers that collect all the while."""
    meters = Meters(readers=2)
    threads, events = 8, 700
    done = threading.Event()

    def publish() -> None:
        engine = Engine(algorithms=[Clip()], meter_provider=meters.provider)
        for _ in range(events):
            engine.sync.run_event(Event.BATCH_END)
        engine.sync.close()

    def collect(reader: int) -> None:
        while not done.is_set():
            meters.metrics(reader)

    publishers = [threading.Thread(target=publish) for _ in range(threads)]
    collectors = [threading.Thread(target=collect, args=(reader,)) for reader in range(2)]
    for thread in publishers + collectors:
        thread.start()
    for thread in publishers:
        thread.join()
    done.set()
    for thread in collectors:
        thread.join()

    for reader in range(2):
        (dispatches,) = meters.points("eventbus.dispatch.duration", reader).values()
        (algorithms,) = meters.points("eventbus.algorithm.duration", reader).values()
        assert (dispatches.count, algorithms.count) == (threads * events, threads * events)
        assert sum(dispatches.bucket_counts) == threads * events


def test_one_timer_on_many_threads_loses_nothing() -> None:
    """Of one series, which is folded by whoever fills it: what is appended meanwhile stays."""
    kept = Durations()
    timer = Timer(kept)
    template = event_template("dispatch", Event.BATCH_END)
    start = threading.Barrier(8)
    before = sys.getswitchinterval()

    def measure() -> None:
        start.wait()
        for number in range(5_000):
            timer.open(template).end("failed" if number % 10 == 0 else "ok", None)

    threads = [threading.Thread(target=measure) for _ in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    counts = {s.attributes["eventbus.outcome"]: sum(h.counts) for _, s in kept.by_kind() if (h := s.take())}

    assert counts == {"ok": 36_000, "failed": 4_000}


def test_the_list_of_what_waits_stays_short() -> None:
    """Nobody collects, for hours on end."""
    kept = Durations()
    timer = Timer(kept)
    for _ in range(5_000):
        timer.open(event_template("dispatch", Event.BATCH_END)).end("ok")
    ((_, series),) = kept.by_kind()

    assert len(series.waiting) < 256


# --------------------------------------------------------------------------------------------------- beside the spans


@pytest.mark.parametrize(
    "make",
    [
        lambda: TracerProvider(sampler=ALWAYS_OFF, id_generator=telemetry.PrivateIdGenerator(), shutdown_on_exit=False),
        lambda: RecordingProvider([], sampler=ALWAYS_OFF),
        lambda: RecordingProvider([], groups={"dispatch": False}),
    ],
)
def test_events_that_are_not_sampled_are_measured(meters: Meters, make: Any) -> None:
    """And so is what runs in them, which then has no spans either."""
    provider = make()
    engine = Engine(algorithms=[Clip()], tracer_provider=provider, meter_provider=meters.provider)
    engine.sync.run_event(Event.BATCH_END)
    engine.sync.close()
    provider.shutdown()

    assert meters.counts("eventbus.algorithm.duration") == {key("batch_end", "ok", "clip"): 1}


@pytest.mark.anyio
async def test_spans_are_what_they_are_without_metrics(meters: Meters) -> None:
    """Names, parents, attributes and status, of what is plain, asynchronous or fails."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    class Returns(Callback[Any]):
        def batch_end(self, state: Any, logger: Any) -> Any:
            return anyio.lowlevel.checkpoint()

    async def spans(meter_provider: Any) -> list[Any]:
        kept = InMemorySpanExporter()
        provider = TracerProvider(id_generator=telemetry.PrivateIdGenerator(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(kept))
        engine = Engine(
            algorithms=[Clip()], callbacks=[Watch(), Returns()], tracer_provider=provider, meter_provider=meter_provider
        )
        async with engine.pair(Event.BEFORE_LOSS):
            await engine.run_event(Event.BATCH_END)
        with pytest.raises(ValueError, match="no"):
            await engine.run_event(Event.BATCH_END, ValueError("no"))
        ended = kept.get_finished_spans()
        names = {span.context.span_id: span.name for span in ended if span.context is not None}
        return [
            (
                span.name,
                names[span.parent.span_id] if span.parent else "",
                span.status.status_code.name,
                dict(span.attributes or {}),
            )
            for span in ended
        ]

    assert await spans(meters.provider) == await spans(None)
    assert meters.counts("eventbus.callback.duration") == {
        key("batch_end", "ok", "watch"): 1,
        key("batch_end", "ok", "returns"): 1,
    }


# -------------------------------------------------------------------------------------------------------- who asked


def test_the_global_provider_is_found_without_further_calls_and_nobody_pays_before() -> None:
    """No module for metrics is imported until somebody else has; an engine that was there before is measured then."""
    program = """
import sys
from eventbus_engine import Engine, Event
engine = Engine()
for _ in range(100):
    engine.sync.run_event(Event.BATCH_END)
assert not [name for name in sys.modules if "metrics" in name or "durations" in name or ".sdk" in name]
assert engine.meters.around(None) is None

from opentelemetry import metrics
for _ in range(100):
    engine.sync.run_event(Event.BATCH_END)
assert engine.meters.around(None) is None
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
fresh = Engine()
fresh.sync.run_event(Event.EPOCH_END)
for _ in range(100):
    engine.sync.run_event(Event.BATCH_END)
points = {
    point.attributes["eventbus.event"]: point.count
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    if metric.name == "eventbus.dispatch.duration"
    for point in metric.data.data_points
}
assert points["epoch_end"] == 1 and 60 < points["batch_end"] <= 100, points

from eventbus_engine import telemetry
with telemetry.configure(path=sys.argv[1], metrics=True) as provider:
    assert provider.meter_provider is None
"""
    result = subprocess.run(
        [sys.executable, "-c", program, "/dev/null"], check=False, capture_output=True, text=True, timeout=60
    )

    assert result.returncode == 0, result.stderr
    assert "metrics are configured already, by a MeterProvider" in result.stderr


def test_a_forked_child_measures_on_and_waits_for_nobody() -> None:
    """Not for a lock either that a thread of its parent held."""
    program = """
import os, sys
from eventbus_engine import Engine, Event
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from eventbus_engine.telemetry.metrics import metrics_of
provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
engine = Engine(meter_provider=provider)
engine.sync.run_event(Event.BATCH_END)
kept = metrics_of(provider).durations
with kept._lock.held:
    child = os.fork()
    if child == 0:
        engine.sync.run_event(Event.BATCH_END)
        ((_, series),) = kept.by_kind()
        os._exit(0 if sum(series.take().counts) == 2 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_nobody_is_measured_outside_of_the_block(tmp_path: Any) -> None:
    """And a provider of the engine's own wins within."""
    meters = Meters()
    own, other = Engine(meter_provider=meters.provider), Engine()
    with telemetry.configure(path=tmp_path / "spans.jsonl", metrics=True):
        assert CONFIGURED.metrics is not None
        for engine in (own, other):
            engine.sync.run_event(Event.BATCH_END)
        kept = CONFIGURED.metrics.durations
    other.sync.run_event(Event.BATCH_END)
    for engine in (own, other):
        engine.sync.close()

    assert CONFIGURED.metrics is None
    assert meters.counts("eventbus.dispatch.duration") == {key("batch_end", "ok"): 1}
    assert [series.take() for _, series in kept.by_kind()] == [None]


def test_boundaries_are_in_order_and_cover_what_engines_do() -> None:
    """From what nothing takes to what a user notices."""
    assert all(low < high for low, high in pairwise(BOUNDARIES))
    assert (BOUNDARIES[0], BOUNDARIES[-1]) == (1e-5, 10.0)
