"""The traces of a training run: a short one for the run, and one for each batch, epoch and evaluation, linked to it.

One trace for a whole run would be exported when the run has ended, and be too large for what reads it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from eventbus_engine.handlers import outcome_of
from eventbus_engine.telemetry.spans import SCOPE, Activity, TracerSource
from eventbus_engine.time import Time, TimeUnit
from eventbus_engine.training.device_timing import DeviceClock, DeviceTiming
from eventbus_engine.training.state import State

__all__ = ["RunTracing", "Unit", "in_one_run"]

T = TypeVar("T")


class Unit:
    """A unit of work under way; a stand-in that does nothing where nothing is traced."""

    __slots__ = ("_last", "_span")

    def __init__(self, span: Activity | None, last: bool = False) -> None:
        self._span = span
        self._last = last

    def rename(self, name: str) -> None:
        """It turned out to be something else."""
        if self._span is not None:
            self._span.rename(name)
            self._span.set("eventbus.kind", name)
            if self._last:
                self._span.set("train.last", False)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """What runs inside still belongs to it, although it is over."""
        if self._span is None:
            yield
            return
        self._span.enter()
        try:
            yield
        finally:
            self._span.leave()


def is_last(unit: str, state: State) -> bool:
    """Whether a unit of work that is about to begin is known to be the last of its kind, by `max_duration`.

    False where only the end will tell: without a duration, with one in samples, tokens or seconds, or with a loader
    whose length is not known. An evaluation is the last if the training is over by then.
    """
    # A hand-written loop may have a state of its own, without a duration.
    now, end = state.timestamp, getattr(state, "max_duration", None)
    if not isinstance(end, Time):
        return False
    if unit == "eval":
        return now >= end
    length = _length(getattr(state, "train_dataloader", None))
    left = None if length is None else length - int(now.batch_in_epoch)
    if end.unit is TimeUnit.EPOCH:
        return int(now.epoch) + 1 >= int(end) and (unit == "epoch" or left == 1)
    if end.unit is TimeUnit.BATCH:
        ahead = 1 if unit == "batch" and left != 0 else left or 0
        return ahead > 0 and int(now.batch) + ahead >= int(end)
    return False


def _length(loader: Any) -> int | None:
    """Batches in an epoch; None unless asking is sure to run nothing that could draw random numbers or warn."""
    if isinstance(loader, list | tuple):
        return len(loader)
    if (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
    ):
        return len(loader)
    return None


class RunTracing:
    """Opens the spans of one run's units of work. Without a tracer provider it does nothing.

    Args:
        tracers: the engine's.
        state: the run's, for its name and its timestamp.
        rank: of this process in a distributed job.
        clock: of the device, to time on it what `timed` is given; None to leave that out.
    """

    def __init__(self, tracers: TracerSource, state: State, rank: int = 0, clock: DeviceClock | None = None) -> None:
        self._tracers = tracers
        self._state = state
        self._rank = rank
        self._run: SpanContext | None = None  # what units are linked to
        self._device = None if clock is None else DeviceTiming(clock)

    @property
    def traceparent(self) -> str:
        """The span of the run that is under way, as a header of W3C Trace Context; empty where nothing is traced."""
        carrier: dict[str, str] = {}
        if self._run is not None:
            TraceContextTextMapPropagator().inject(carrier, otel.set_span_in_context(NonRecordingSpan(self._run)))
        return carrier.get("traceparent", "")

    @contextmanager
    def run(self, leader: str = "") -> Iterator[None]:
        """The run: its span is over, and exported, at once; what belongs to no unit of work becomes its child.

        Args:
            leader: the `traceparent` of rank 0. This rank's span is a child of that one, to which its units are linked.
        """
        tracer = self._tracers.get()
        if tracer is None:
            yield
            return
        outer = otel_context.get_current()
        led = otel.get_current_span(TraceContextTextMapPropagator().extract({"traceparent": leader})).get_span_context()
        if led.is_valid:
            otel_context.attach(otel.set_span_in_context(NonRecordingSpan(led)))
        elif not otel.get_current_span(outer).get_span_context().is_valid:
            # Whoever launched this process may have handed down its span, as torchrun hands down its environment.
            carrier = {name: os.environ.get(name.upper(), "") for name in ("traceparent", "tracestate")}
            otel_context.attach(TraceContextTextMapPropagator().extract(carrier, outer))
        span = Activity(tracer, "run", "run", attributes=self._attributes())
        self._run = led if led.is_valid else span.span_context
        span.end("ok")
        otel_context.attach(otel.set_span_in_context(NonRecordingSpan(span.span_context)))
        try:
            yield
        finally:
            self._run = None
            self._poll()
            otel_context.attach(outer)

    @contextmanager
    def unit(self, name: str) -> Iterator[Unit]:
        """A unit of work, the root of its own trace: `batch`, `epoch` or `eval`."""
        self._poll()
        if self._tracers.get() is None:
            yield Unit(None)
            return
        now = self._state.timestamp
        place: dict[str, Any] = {"train.epoch": int(now.epoch), "train.batch": int(now.batch)}
        last = is_last(name, self._state)
        if last:
            place["train.last"] = True
        links = [Link(self._run)] if self._run is not None else []
        with self._open(name, name, {**self._attributes(), **place}, links, root=True) as span:
            yield Unit(span, last)

    def timed(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """The function, timed on the device if that was asked for."""
        provider = self._tracers.provider if self._tracers.get() is not None else None
        if self._device is None or provider is None:
            return function
        return self._device.timed(name, provider.get_tracer(SCOPE), function)

    def _poll(self) -> None:
        if self._device is not None:
            self._device.poll()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A part of a unit that no pair of events surrounds."""
        with self._open(name, "section", {}, [], root=False):
            yield

    @contextmanager
    def _open(
        self, name: str, kind: str, attributes: Mapping[str, Any], links: Sequence[Link], *, root: bool
    ) -> Iterator[Activity | None]:
        tracer = self._tracers.get()
        if tracer is None:
            yield None
            return
        span = Activity(tracer, name, kind, attributes=attributes, links=links, root=root)
        error: BaseException | None = None
        try:
            yield span
        except BaseException as raised:
            error = raised
            raise
        finally:
            span.end(outcome_of(error), error)

    def _attributes(self) -> dict[str, Any]:
        return {"train.run.id": self._state.run_name, "train.rank": self._rank}


@asynccontextmanager
async def in_one_run(state: State, tracing: RunTracing) -> AsyncIterator[None]:
    """One call of a trainer's: a run that has one name on all ranks, and one trace, which rank 0 begins."""
    ranks = state._ranks
    if not ranks.together:
        with tracing.run():
            yield
        return
    with ranks.failures():
        await state.compute(ranks.join, state.device)
        heard = {} if ranks.leads else await state.compute(ranks.hand_down)
        state.run_name = heard.get("run_name", state.run_name)
        with tracing.run(heard.get("traceparent", "")):
            if ranks.leads:
                told = {"run_name": state.run_name, "traceparent": tracing.traceparent}
                await state.compute(ranks.hand_down, told)
            yield
