"""Durations on the hot path: `Timer` measures what an engine executes, `Durations` keeps it as histograms.

An execution costs two clock readings, one small object and an append to a list; an algorithm, which the engine times
anyway, the append alone. Lists are folded into their histograms
a few hundred at a time, by sorting, which is far cheaper than finding the bucket of each value.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as otel
from opentelemetry.trace import Link, SpanContext

from eventbus_engine.telemetry.spans import Activity, EngineTracer, Template, type_name

if TYPE_CHECKING:
    from eventbus_engine.trace import Outcome

__all__ = ["BOUNDARIES", "KINDS", "Durations", "Histogram", "SpanTimer", "Timer"]

KINDS = ("dispatch", "algorithm", "callback")
"""What is measured, by the value of `eventbus.kind`."""

BOUNDARIES = tuple(
    microseconds / 1e6
    for microseconds in (
        *(10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000),
        *(100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000),
    )
)
"""The upper bounds of the buckets, in seconds; each belongs to its bucket."""

_BOUNDS = tuple(round(boundary * 1e9) for boundary in BOUNDARIES)
_FOLD_AT = 256
_new = object.__new__


@dataclass(slots=True)
class Histogram:
    """Durations in nanoseconds, by bucket.

    Attributes:
        counts: how many there are in each bucket; the last has no upper bound.
        sums: what those of each bucket add up to.
        low: the shortest, if there are any.
        high: the longest.
    """

    counts: list[int]
    sums: list[int]
    low: int = 0
    high: int = 0

    @classmethod
    def of(cls, durations: Sequence[int]) -> Histogram:
        """The histogram of these durations, of which there is at least one."""
        ordered = sorted(durations)
        edges = [0, *(bisect_right(ordered, bound) for bound in _BOUNDS), len(ordered)]
        return cls(
            [end - start for start, end in pairwise(edges)],
            [sum(ordered[start:end]) for start, end in pairwise(edges)],
            ordered[0],
            ordered[-1],
        )

    def add(self, other: Histogram) -> None:
        """Add what another one has."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sums = [mine + theirs for mine, theirs in zip(self.sums, other.sums, strict=True)]
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def stand_ins(self) -> Iterator[tuple[int, int]]:
        """Durations, each with how often it occurs, of which this is the histogram as well.

        The shortest and the longest are themselves; the others are the whole numbers next to the mean of their bucket,
        so that they are within its bounds and add up to its sum.
        """
        held = [place for place, count in enumerate(self.counts) if count]
        for place in held:
            count, total = self.counts[place], self.sums[place]
            extremes = []
            if place == held[0]:
                extremes.append(self.low)
            if place == held[-1] and (count > 1 or not extremes):
                extremes.append(self.high)
            for extreme in extremes:
                yield extreme, 1
            if rest := count - len(extremes):
                mean, larger = divmod(total - sum(extremes), rest)
                yield mean, rest - larger
                yield mean + 1, larger


class Series:
    """The durations of one kind of execution that ended in one way.

    Args:
        attributes: what tells it from the others.
        lock: for folding.

    Attributes:
        waiting: durations in nanoseconds that are not in a histogram yet.
    """

    __slots__ = ("_histogram", "_lock", "attributes", "waiting")

    def __init__(self, attributes: dict[str, str], lock: _Lock) -> None:
        self.attributes: dict[str, str] = attributes
        self.waiting: list[int] = []
        self._lock = lock
        self._histogram: Histogram | None = None

    def fold(self) -> None:
        """Fold what waits, unless another thread is at it: that one, or the next to come, will."""
        if self._lock.held.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.held.release()

    def _fold(self) -> None:
        waiting = self.waiting
        # Each step is atomic, and whoever appends meanwhile does so behind what is taken.
        taken = waiting[:]
        del waiting[: len(taken)]
        if taken:
            histogram = Histogram.of(taken)
            if self._histogram is None:
                self._histogram = histogram
            else:
                self._histogram.add(histogram)

    def take(self) -> Histogram | None:
        """What has come since this was last called; None for nothing."""
        with self._lock.held:
            self._fold()
            taken, self._histogram = self._histogram, None
        return taken


class _Lock:
    """A lock that nobody holds in a forked child."""

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            # Weak: nothing unregisters a hook.
            renew = weakref.WeakMethod(self._renew)
            os.register_at_fork(after_in_child=lambda: (call := renew()) and call())

    def _renew(self) -> None:
        self.held: threading.Lock = threading.Lock()


class Durations:
    """All series that go to one place, and how many executions ended in which error."""

    def __init__(self) -> None:
        self._lock = _Lock()
        self._series: dict[tuple[str, ...], Series] = {}
        self._errors: dict[tuple[str, ...], int] = {}

    def series(self, key: tuple[str, ...]) -> Series:
        """The series of a kind, an event, a name and an outcome."""
        with self._lock.held:
            found = self._series.get(key)
            if found is None:
                found = self._series[key] = Series(_attributes(key), self._lock)
        return found

    def by_kind(self) -> list[tuple[str, Series]]:
        """Every series there is, with its kind."""
        with self._lock.held:
            return [(key[0], series) for key, series in self._series.items()]

    def count_error(self, key: tuple[str, ...], error: BaseException) -> None:
        """Count what an execution ended in."""
        full = (*key, type_name(error))
        with self._lock.held:
            self._errors[full] = self._errors.get(full, 0) + 1

    def errors(self) -> list[tuple[dict[str, str], int]]:
        """How many there were, by their attributes."""
        with self._lock.held:
            counted = list(self._errors.items())
        return [({"eventbus.kind": key[0], **_attributes(key[:4]), "error.type": key[4]}, n) for key, n in counted]


def _attributes(key: tuple[str, ...]) -> dict[str, str]:
    _, event, name, outcome = key
    attributes = {"eventbus.event": event, "eventbus.outcome": outcome}
    if name:
        attributes["eventbus.name"] = name
    return attributes


class _Outcomes:
    """The series of one template: that of what went well at hand, the others when there is need of one."""

    __slots__ = ("_durations", "_key", "_ok", "_others", "waiting")

    def __init__(self, durations: Durations, template: Template) -> None:
        kind = template.kind
        name = "" if kind == "dispatch" else template.name.removeprefix(f"{kind} ")
        self._durations = durations
        self._key = kind, str(template.attributes["eventbus.event"]), name
        self._others: dict[str, Series] = {}
        self._ok = durations.series((*self._key, "ok"))
        self.waiting: list[int] = self._ok.waiting

    def add(self, elapsed: int, outcome: Outcome, error: BaseException | None) -> None:
        """Take down an execution."""
        waiting = self.waiting if outcome == "ok" else self.other(outcome, error).waiting
        waiting.append(elapsed)
        if len(waiting) >= _FOLD_AT:
            self.fold()

    def other(self, outcome: Outcome, error: BaseException | None) -> Series:
        """The series of another outcome; its error is counted."""
        key = (*self._key, outcome)
        if error is not None:
            self._durations.count_error(key, error)
        series = self._others.get(outcome)
        if series is None:
            series = self._others[outcome] = self._durations.series(key)
        return series

    def fold(self) -> None:
        """Fold what waits in any of them."""
        for series in (self._ok, *tuple(self._others.values())):
            series.fold()


class Timer(EngineTracer):
    """Measures how long what it opens lasts, and makes no spans.

    Args:
        durations: where to.
    """

    __slots__ = ("_durations", "_outcomes")
    spans = False

    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self._outcomes: dict[Template, _Outcomes] = {}

    def _find(self, template: Template) -> _Outcomes:
        # Two threads that are here at once get two of these over the same series.
        found = self._outcomes[template] = _Outcomes(self._durations, template)
        return found

    def open(
        self, template: Template, *, order: int | None = None, links: Sequence[Link] = (), root: bool = False
    ) -> Activity:
        """Start measuring."""
        activity = _new(_Timed)
        activity.outcomes = self._outcomes.get(template) or self._find(template)
        activity.start = perf_counter_ns()
        return activity

    def measured(self, template: Template, elapsed: int, outcome: Outcome, error: BaseException | None) -> None:
        """Take down how long something was that has not been opened."""
        (self._outcomes.get(template) or self._find(template)).add(elapsed, outcome, error)


class SpanTimer(Timer):
    """Measures how long the spans last that another tracer opens, whether these are recorded or not.

    Args:
        durations: where to.
        tracer: the other one.
    """

    __slots__ = ("_tracer", "alone")
    spans = True

    def __init__(self, durations: Durations, tracer: EngineTracer) -> None:
        super().__init__(durations)
        self._tracer = tracer
        self.alone: Timer = Timer(durations)
        # The same dictionary: which series a template has does not depend on its spans.
        self.alone._outcomes = self._outcomes

    def open(
        self, template: Template, *, order: int | None = None, links: Sequence[Link] = (), root: bool = False
    ) -> Activity:
        """Open a span, and start measuring."""
        activity = _new(_TimedSpan)
        activity.outcomes = self._outcomes.get(template) or self._find(template)
        activity.inner = self._tracer.open(template, order=order, links=links, root=root)
        activity.start = perf_counter_ns()
        return activity


class _Timed(Activity):
    """An execution that is measured."""

    __slots__ = ("outcomes", "start")
    outcomes: _Outcomes
    start: int

    def enter(self) -> None:
        """Leave what is current as it is."""

    def leave(self) -> None:
        """Leave what is current as it is."""

    @property
    def recording(self) -> bool:
        """False: there is no span."""
        return False

    @property
    def span_context(self) -> SpanContext:
        """That of the span around it."""
        return otel.get_current_span().get_span_context()

    def below(self, tracer: EngineTracer) -> EngineTracer | None:
        """What is inside is measured in any case."""
        return tracer

    def set(self, key: str, value: Any) -> None:
        """Forget it."""

    def rename(self, name: str) -> None:
        """Forget it."""

    def end(self, outcome: Outcome, error: BaseException | None = None, at: int = 0) -> None:
        """Take down how long it was."""
        self.outcomes.add((at or perf_counter_ns()) - self.start, outcome, error)


class _TimedSpan(_Timed):
    """A span that is measured."""

    __slots__ = ("inner",)
    inner: Activity

    def enter(self) -> None:
        """Make it current here."""
        self.inner.enter()

    def leave(self) -> None:
        """Make current again what was so before."""
        self.inner.leave()

    @property
    def recording(self) -> bool:
        """Whether anything will come of the span."""
        return self.inner.recording

    @property
    def span_context(self) -> SpanContext:
        """What others link to."""
        return self.inner.span_context

    def below(self, tracer: EngineTracer) -> EngineTracer | None:
        """What is inside a span that is not recorded is measured without spans."""
        return tracer if self.inner.recording or not isinstance(tracer, SpanTimer) else tracer.alone

    def set(self, key: str, value: Any) -> None:
        """Set an attribute of the span."""
        self.inner.set(key, value)

    def rename(self, name: str) -> None:
        """Give the span another name."""
        self.inner.rename(name)

    def end(self, outcome: Outcome, error: BaseException | None = None, at: int = 0) -> None:
        """Take down how long it was, and end the span."""
        super().end(outcome, error, at)
        self.inner.end(outcome, error, at)
