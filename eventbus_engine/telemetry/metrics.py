"""Metrics of engines by the OpenTelemetry API: durations, errors, queue depths, losses, and what became of the spans.

All of it is read when a reader collects, on the thread that does. The API has no way to hand over a histogram, so that
is when durations are recorded that have the same one (`Histogram.stand_ins`).
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from eventbus_engine.telemetry.durations import BOUNDARIES, KINDS, Durations, SpanTimer, Timer
from eventbus_engine.telemetry.queues import Counts, Exports, Queues
from eventbus_engine.telemetry.spans import SCOPE

if TYPE_CHECKING:
    from eventbus_engine.engine import Engine
    from eventbus_engine.telemetry.provider import RecordingProvider
    from eventbus_engine.telemetry.spans import EngineTracer

__all__ = ["HISTOGRAMS", "EngineMetrics", "metrics_of"]

HISTOGRAMS = {
    kind: (f"eventbus.{kind}.duration", f"How long {article} {kind} took.")
    for kind, article in zip(KINDS, ("a", "an", "a"), strict=True)
}
"""The name and the description of the histogram of a kind. The unit is the second."""

_SPANS = {
    "recorded": "Spans that were to be exported.",
    "delivered": "Spans that their destination took.",
    "dropped": "Spans that a full queue pushed out, or that were left when the time was over.",
    "failed": "Spans that their destination refused, or that did not reach it in time.",
}

_APART = otel.set_span_in_context(otel.INVALID_SPAN, Context())
"""A context of nobody's. In that of a span, the SDK keeps examples of measurements, picked by the global `random`."""

_BREATHER = 32
"""So many durations are recorded, then other threads get their turn: that is less than the interpreter gives them."""


class EngineMetrics:
    """The metrics of all engines that share a provider.

    Args:
        provider: where they go.
        replay: whether the provider gets the durations; False if somebody takes them from `durations`.

    Attributes:
        durations: what the timers of the engines fill.
        queues: the engines.
        exports: the providers of their spans, if these are such as `configure` sets up.
    """

    def __init__(self, provider: MeterProvider, *, replay: bool = True) -> None:
        self.durations: Durations = Durations()
        self.queues: Queues = Queues()
        self.exports: Exports = Exports()
        meter = provider.get_meter(SCOPE)
        self._histograms = {
            kind: meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=BOUNDARIES)
            for kind, (name, description) in (HISTOGRAMS if replay else {}).items()
        }
        queues, name = self.queues, "eventbus.name"
        for counter, read, unit, description in (
            ("callback.dropped", lambda: queues.read().dropped, "{event}", "Events a background callback never saw."),
            ("destination.lost", lambda: queues.read().lost, "{record}", "Records that never reached a destination."),
        ):
            meter.create_observable_counter(f"eventbus.{counter}", [_observer(read, name)], unit, description)
        for gauge, read, unit, description in (
            ("callback.pending", lambda: queues.read().pending, "{event}", "Events waiting for a background callback."),
            ("destination.pending", lambda: queues.read().unsent, "{record}", "Records waiting for a destination."),
        ):
            meter.create_observable_gauge(f"eventbus.{gauge}", [_observer(read, name)], unit, description)
        meter.create_observable_gauge(
            "eventbus.lanes.waiting", [self._observe_lanes], "{event}", "Events waiting for their lane."
        )
        for what, description in _SPANS.items():
            observer = _observer(functools.partial(self.exports.read, what), "eventbus.destination")
            meter.create_observable_counter(f"eventbus.spans.{what}", [observer], "{span}", description)
        meter.create_observable_counter(
            "eventbus.errors", [self._observe_errors], "{error}", "Executions that failed, timed out or were cancelled."
        )

    def timer(self, engine: Engine[Any], tracer: EngineTracer | None) -> EngineTracer:
        """What measures an engine that opens its spans with this tracer, if any. The engine is read from now on."""
        self.queues.watch(engine)
        if hasattr(engine.tracers.provider, "reports"):
            self.exports.watch(cast("RecordingProvider", engine.tracers.provider))
        return Timer(self.durations) if tracer is None else SpanTimer(self.durations, tracer)

    def _observe_errors(self, _: CallbackOptions) -> Iterator[Observation]:
        if self._histograms:
            self._replay()
        for attributes, count in self.durations.errors():
            yield Observation(count, attributes, _APART)

    def _observe_lanes(self, _: CallbackOptions) -> Iterator[Observation]:
        yield Observation(self.queues.in_lanes(), {}, _APART)

    def _replay(self) -> None:
        """Record, for what has been measured since the last time, durations that have the same histogram."""
        since = 0
        for kind, series in self.durations.by_kind():
            histogram = series.take()
            if histogram is None:
                continue
            record, attributes = self._histograms[kind].record, series.attributes
            for nanoseconds, count in histogram.stand_ins():
                seconds = nanoseconds / 1e9
                for _ in range(count):
                    record(seconds, attributes, _APART)
                    since += 1
                    if since >= _BREATHER:
                        since = 0
                        time.sleep(0)


def _observer(read: Callable[[], Counts], label: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for name, count in read().items():
            yield Observation(count, {label: name}, _APART)

    return observe


_known: weakref.WeakKeyDictionary[MeterProvider, EngineMetrics] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def metrics_of(provider: MeterProvider) -> EngineMetrics:
    """The metrics of the engines that share a provider, made when first asked for."""
    with _lock:
        metrics = _known.get(provider)
        if metrics is None:
            metrics = _known[provider] = EngineMetrics(provider)
    return metrics
