"""The traces of a training run: a short one for the run, and one for each batch, epoch and evaluation, linked to it.

One trace for a whole run would be exported when the run has ended, and be too large for what reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext

from eventbus_engine.fanout import outcome_of
from eventbus_engine.telemetry.spans import Activity, TracerSource
from eventbus_engine.training.state import State

__all__ = ["RunTracing"]


class RunTracing:
    """Opens the spans of one run's units of work. Without a tracer provider it does nothing.

    Args:
        tracers: the engine's.
        state: the run's, for its name and its timestamp.
        rank: of this process in a distributed job.
    """

    def __init__(self, tracers: TracerSource, state: State, rank: int = 0) -> None:
        self._tracers = tracers
        self._state = state
        self._rank = rank
        self._run: SpanContext | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """The run: its span is over, and exported, at once; what belongs to no unit of work becomes its child."""
        tracer = self._tracers.get()
        if tracer is None:
            yield
            return
        span = Activity(tracer, "run", "run", attributes=self._attributes())
        self._run = span.span_context
        span.end("ok")
        outer = otel_context.get_current()
        otel_context.attach(otel.set_span_in_context(NonRecordingSpan(self._run)))
        try:
            yield
        finally:
            self._run = None
            otel_context.attach(outer)

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """A unit of work, the root of its own trace: `batch`, `epoch` or `eval`."""
        tracer = self._tracers.get()
        if tracer is None:
            yield
            return
        now = self._state.timestamp
        place = {"train.epoch": int(now.epoch), "train.batch": int(now.batch)}
        links = [Link(self._run)] if self._run is not None else []
        span = Activity(tracer, name, name, attributes={**self._attributes(), **place}, links=links, root=True)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            span.end(outcome_of(error), error)

    def _attributes(self) -> dict[str, Any]:
        return {"train.run.id": self._state.run_name, "train.rank": self._rank}
