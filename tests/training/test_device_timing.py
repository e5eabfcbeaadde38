"""Spans of what the device did: read from its own clock, once it is through, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from eventbus_engine import ConfigurationError
from eventbus_engine.telemetry import PrivateIdGenerator
from eventbus_engine.time import Time
from eventbus_engine.training import Trainer
from eventbus_engine.training.loop import TrainingLoop
from eventbus_engine.training.section import Sections
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.tracing import RunTracing
from eventbus_engine.training.worker import InlineWorker

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]


class SlowDevice:
    """A device on which the work up to the next mark takes 2 ms, and that does it when told."""

    name = "slow"

    def __init__(self, broken: bool = False) -> None:
        self.marks = 0
        self.done = 0
        self._broken = broken

    def mark(self) -> int:
        """The number of the mark."""
        self.marks += 1
        return self.marks

    def reached(self, mark: int) -> bool:
        """Whether it was told to come so far."""
        if self._broken:
            raise RuntimeError("device-side assert triggered")
        return mark <= self.done

    def elapsed_ms(self, start: int, end: int) -> float:
        """2 ms from one to the next."""
        assert max(start, end) <= self.done
        return 2.0 * (end - start)


class Spans:
    """What a provider exports."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False, **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def of_device(self) -> Sequence[ReadableSpan]:
        """Those of the device, in the order of their export."""
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith("slow")]

    def parent_of(self, span: ReadableSpan) -> str:
        """The name of its parent."""
        assert span.parent is not None
        (name,) = [
            other.name
            for other in self.exporter.get_finished_spans()
            if other.context is not None and other.context.span_id == span.parent.span_id
        ]
        return name


@pytest.fixture
def spans() -> Iterator[Spans]:
    """A provider and what it exports."""
    made = Spans()
    yield made
    made.provider.shutdown()


def tracing_of(trainer: Trainer, device: SlowDevice) -> RunTracing:
    """Tracing with a clock of the device's."""
    return RunTracing(trainer.engine.tracers, trainer.state, clock=device)


async def test_a_span_is_made_when_the_device_is_through(make_trainer: MakeTrainer, spans: Spans) -> None:
    """Not before, although the section is long over; its length is the device's, its parent the section."""
    device = SlowDevice()
    tracing = tracing_of(make_trainer(tracer_provider=spans.provider), device)

    with tracing.run():
        with tracing.unit("batch"):
            for name in ("forward", "loss"):
                with tracing.section(name):
                    assert tracing.timed(name, lambda: 7)() == 7
        device.done = 2
        with tracing.unit("batch"):
            assert [span.name for span in spans.of_device] == ["slow forward"]
        device.done = 4

    forward, loss = spans.of_device
    assert [spans.parent_of(span) for span in (forward, loss)] == ["forward", "loss"]
    assert dict(forward.attributes or {}) == {
        "eventbus.kind": "device",
        "eventbus.outcome": "ok",
        "train.device.ms": 2.0,
    }
    for span in (forward, loss):
        assert (span.end_time or 0) - (span.start_time or 0) == 2_000_000
    # The device was idle for the 2 ms between the two; and no host is as slow as to launch the second one after that.
    assert (loss.start_time or 0) >= (forward.end_time or 0) + 2_000_000


async def test_what_fails_or_is_not_sampled_is_not_timed(make_trainer: MakeTrainer) -> None:
    """A section that raised has no end on the device, and a trace that nobody keeps costs the device nothing."""

    def explode() -> None:
        raise FloatingPointError

    off, on = Spans(sampler=ALWAYS_OFF), Spans()
    devices = [SlowDevice(), SlowDevice()]
    for spans, device, work in ((off, devices[0], int), (on, devices[1], explode)):
        tracing = tracing_of(make_trainer(tracer_provider=spans.provider), device)
        with pytest.raises(FloatingPointError) if work is explode else tracing.run(), tracing.unit("batch"):
            tracing.timed("forward", work)()
        device.done = 10
        with tracing.unit("batch"):
            pass
        assert spans.of_device == []
        spans.provider.shutdown()
    assert devices[0].marks == 0


async def test_a_broken_device_breaks_no_run_through_its_clock(make_trainer: MakeTrainer, spans: Spans) -> None:
    """Its error comes out where the program uses it, and not out of the tracing."""
    tracing = tracing_of(make_trainer(tracer_provider=spans.provider), SlowDevice(broken=True))

    with tracing.run(), tracing.unit("batch"):
        tracing.timed("forward", int)()

    assert spans.of_device == []


async def test_without_a_provider_nothing_is_timed(make_trainer: MakeTrainer) -> None:
    """The function is the function."""
    tracing = tracing_of(make_trainer(), SlowDevice())

    assert tracing.timed("forward", int) is int


async def test_the_loop_times_its_computations(make_trainer: MakeTrainer, spans: Spans, batches: Any) -> None:
    """Forward, loss, backward and optimizer of each batch, on the thread that launches them."""
    device = SlowDevice()
    device.done = 1_000
    trainer = make_trainer(tracer_provider=spans.provider, max_duration="1ep")
    tracing = tracing_of(trainer, device)
    source = BatchSource(batches, "batches")
    sections = Sections(trainer.engine, InlineWorker())
    loop = TrainingLoop(trainer.state, trainer.engine, sections, source, [], Time.from_epoch(1), False, tracing)

    with tracing.run():
        await loop.fit()
    await trainer.close()

    names = ["forward", "loss", "backward", "optimizer"]
    assert [span.name for span in spans.of_device] == [f"slow {name}" for name in names] * len(batches)
    assert [spans.parent_of(span) for span in spans.of_device] == names * len(batches)


@pytest.mark.parametrize("value", [True, 1, None])
def test_where_there_is_no_cuda_it_says_so(make_trainer: MakeTrainer, value: Any) -> None:
    """And what to do about it."""
    with pytest.raises(ConfigurationError, match="cuda_timing=") as caught:
        make_trainer(cuda_timing=value)

    assert ("cuda_timing=torch.cuda.is_available()" in str(caught.value)) == (value is True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_on_cuda(make_trainer: MakeTrainer, make_model: Callable[..., Any], spans: Spans) -> None:
    """The spans of a real device lie behind their launches and have a length."""
    model = make_model().to("cuda")
    trainer = make_trainer(model=model, tracer_provider=spans.provider, max_duration="1ep", cuda_timing=True)

    await trainer.fit()

    found = [span for span in spans.exporter.get_finished_spans() if span.name.startswith("cuda ")]
    assert {span.name for span in found} == {"cuda forward", "cuda loss", "cuda backward", "cuda optimizer"}
    assert all((span.end_time or 0) > (span.start_time or 0) for span in found)
