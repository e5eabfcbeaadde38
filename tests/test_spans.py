"""Spans: what the engine does, as OpenTelemetry sees it through the real SDK."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import anyio.lowlevel
import pytest
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, SamplingResult, StaticSampler
from opentelemetry.trace import SpanContext, StatusCode

from eventbus_engine import Algorithm, Callback, CallbackErrors, Engine, Envelope, Event, EventName, LoggerDestination
from eventbus_engine.telemetry import PrivateIdGenerator, configure
from eventbus_engine.telemetry.exporters import OtlpExporter
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.telemetry.recorder import Recorder
from eventbus_engine.telemetry.sampling import EveryNth
from eventbus_engine.telemetry.spans import ApiTracer, code_name
from eventbus_engine.telemetry.wire import Records

pytestmark = pytest.mark.anyio


class Tick(EventName):
    """A vocabulary."""

    TICK = "tick"
    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"


class Step(Algorithm[Any, Any]):
    """An async algorithm that takes a few steps, and does what it is told."""

    def __init__(self, name: str, matches: bool = True, action: Any = None, timeout: float | None = None) -> None:
        self.name = name
        self.matches = matches
        self.action = action
        self.timeout = timeout

    def match(self, event: EventName, state: Any) -> bool:
        """As told."""
        return self.matches

    async def apply(self, event: EventName, state: Any, logger: Any) -> int | None:
        """Suspend, then raise or await what it has."""
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        if isinstance(self.action, BaseException):
            raise self.action
        if self.action is not None:
            await self.action()
        return 7


class Watch(Callback[Any]):
    """An async callback of the same kind."""

    def __init__(self, name: str, action: Any = None, timeout: float | None = None) -> None:
        self.name = name
        self.action = action
        self.timeout = timeout

    async def tick(self, state: Any, logger: Any) -> None:
        """Suspend, then raise or await what it has."""
        await anyio.lowlevel.checkpoint()
        if isinstance(self.action, BaseException):
            raise self.action
        if self.action is not None:
            await self.action()


def context_of(span: ReadableSpan) -> SpanContext:
    """Its ids."""
    context: SpanContext | None = span.context
    assert context is not None
    return context


class Keep(OtlpExporter):
    """An exporter that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.kept: list[ReadableSpan] = []

    def _deliver(self, spans: Sequence[ReadableSpan], records: Records | None) -> int:
        self.kept += [*spans, *(records.to_spans() if records is not None else [])]
        return 0

    def _release(self) -> None:
        """There is nothing to close."""

    def get_finished_spans(self) -> tuple[ReadableSpan, ...]:
        """As the SDK's own in-memory exporter calls it."""
        return tuple(self.kept)

    def clear(self) -> None:
        """Forget them."""
        self.kept.clear()


class Spans:
    """The spans that a provider has exported.

    Args:
        way: `live`, a user's own provider with live spans, or `recorded`, the provider of `telemetry.configure`.
    """

    def __init__(self, way: str = "live") -> None:
        self.exporter: InMemorySpanExporter | Keep
        self.provider: TracerProvider
        if way == "live":
            self.exporter = InMemorySpanExporter()
            self.provider = TracerProvider(id_generator=PrivateIdGenerator())
            self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        else:
            self.exporter = Keep()
            self.provider = RecordingProvider([self.exporter])

    def clear(self) -> None:
        """Forget those so far."""
        assert self.provider.force_flush()
        self.exporter.clear()

    @property
    def all(self) -> Sequence[ReadableSpan]:
        """In the order of their start."""
        assert self.provider.force_flush()
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    @property
    def names(self) -> list[str]:
        """In the order of their start."""
        return [span.name for span in self.all]

    def one(self, name: str) -> ReadableSpan:
        """The only span of that name."""
        (found,) = [span for span in self.all if span.name == name]
        return found

    def parent(self, name: str) -> str | None:
        """The name of its parent."""
        parent = self.one(name).parent
        if parent is None:
            return None
        return next(span.name for span in self.all if context_of(span).span_id == parent.span_id)

    def attributes(self, name: str) -> dict[str, Any]:
        """The attributes of the only span of that name."""
        return dict(self.one(name).attributes or {})


@pytest.fixture(params=["live", "recorded"])
def spans(request: pytest.FixtureRequest) -> Iterator[Spans]:
    """A provider of its own, with a private id generator, and what it exports."""
    made = Spans(request.param)
    yield made
    made.provider.shutdown()


def interval(span: ReadableSpan) -> tuple[int, int]:
    """Start and end in nanoseconds."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


# --------------------------------------------------------------------------------------------- names, tree, attributes


async def test_rule_7_2_a_span_per_event_and_per_handler_that_ran(spans: Spans) -> None:
    """`dispatch {event}`, under it `algorithm {name}` in order and `callback {name}`, subscribers included."""

    class Out(LoggerDestination):
        def tick(self, state: Any, logger: Any) -> None: ...

    async def subscriber(envelope: Envelope) -> None: ...

    engine = Engine(
        events=Tick,
        algorithms=[Step("b"), Step("a"), Step("idle", matches=False)],
        callbacks=[Out(), Watch("watch")],
        tracer_provider=spans.provider,
    )
    engine.bus.subscribe(subscriber)

    await engine.run_event(Tick.TICK)

    assert spans.names == [
        "dispatch tick",
        "algorithm b",
        "algorithm a",
        "callback watch",
        "callback subscriber",
        "callback out",
    ]
    assert {spans.parent(name) for name in spans.names[1:]} == {"dispatch tick"}
    assert spans.parent("dispatch tick") is None
    assert {span.instrumentation_scope.name for span in spans.all if span.instrumentation_scope} == {"eventbus_engine"}


async def test_rule_7_2_attributes(spans: Spans) -> None:
    """Kind, event and outcome for all; order and exit code for algorithms; what did not match on the dispatch span."""
    engine = Engine(
        events=Tick,
        algorithms=[Step("first"), Step("idle", matches=False), Step("second"), Step("unused", matches=False)],
        callbacks=[Watch("watch")],
        tracer_provider=spans.provider,
    )

    await engine.run_event(Tick.TICK)

    assert spans.attributes("dispatch tick") == {
        "eventbus.kind": "dispatch",
        "eventbus.event": "tick",
        "eventbus.outcome": "ok",
        "eventbus.skipped": ("idle", "unused"),
    }
    assert spans.attributes("algorithm second") == {
        "eventbus.kind": "algorithm",
        "eventbus.event": "tick",
        "eventbus.outcome": "ok",
        "eventbus.order": 1,
        "eventbus.exit_code": 7,
        "code.function.name": f"{__name__}.Step.apply",
    }
    assert spans.attributes("callback watch") == {
        "eventbus.kind": "callback",
        "eventbus.event": "tick",
        "eventbus.outcome": "ok",
        "code.function.name": f"{__name__}.Watch.tick",
    }


async def test_rule_7_2_every_event_has_spans_of_its_own(spans: Spans) -> None:
    """The second one's are like the first's, and none of them shares an id."""
    engine = Engine(events=Tick, algorithms=[Step("a")], callbacks=[Watch("c")], tracer_provider=spans.provider)

    for _ in range(2):
        await engine.run_event(Tick.TICK)

    assert spans.names == ["dispatch tick", "algorithm a", "callback c"] * 2
    assert len({context_of(span).span_id for span in spans.all}) == 6
    assert len({context_of(span).trace_id for span in spans.all}) == 2


async def test_rule_7_2_no_exit_code_no_attribute(spans: Spans) -> None:
    """An algorithm that returns nothing has none, and an event without a mismatch skips nothing."""
    mock = Mock(match=Mock(return_value=True), apply=Mock(return_value=None))
    engine = Engine(events=Tick, algorithms=[mock], tracer_provider=spans.provider)

    await engine.run_event(Tick.TICK)

    assert "eventbus.exit_code" not in spans.attributes("algorithm mock")
    assert "eventbus.skipped" not in spans.attributes("dispatch tick")


async def test_rule_7_2_eight_callbacks_overlap_and_eight_algorithms_do_not(spans: Spans) -> None:
    """It shows in the spans: all callbacks are open at one moment, no two algorithms ever are."""
    everybody = anyio.Event()
    inside = 0

    async def meet() -> None:
        nonlocal inside
        inside += 1
        if inside == 8:
            everybody.set()
        await everybody.wait()

    engine = Engine(
        events=Tick,
        algorithms=[Step(str(i)) for i in range(8)],
        callbacks=[Watch(str(i), meet) for i in range(8)],
        tracer_provider=spans.provider,
    )

    with anyio.fail_after(5):
        await engine.run_event(Tick.TICK)

    algorithms = [span for span in spans.all if span.name.startswith("algorithm")]
    callbacks = [span for span in spans.all if span.name.startswith("callback")]
    assert [span.name for span in algorithms] == [f"algorithm {i}" for i in range(8)]
    assert [span.name for span in callbacks] == [f"callback {i}" for i in range(8)]
    assert all(interval(one)[1] <= interval(two)[0] for one, two in pairwise(algorithms))
    assert max(interval(span)[0] for span in callbacks) < min(interval(span)[1] for span in callbacks)
    assert interval(algorithms[-1])[1] <= interval(callbacks[0])[0]


async def test_rule_7_2_eight_callbacks_of_ten_milliseconds(spans: Spans) -> None:
    """Eight that each await 10 ms finish one event in under twice that, as the dispatch span tells."""
    engine = Engine(
        events=Tick,
        callbacks=[Watch(str(i), partial(anyio.sleep, 0.05)) for i in range(8)],
        tracer_provider=spans.provider,
    )
    await engine.run_event(Tick.TICK)
    durations = []

    # A busy machine may get in the way of one event, but not of all of them.
    for _ in range(10):
        spans.clear()
        await engine.run_event(Tick.TICK)
        start, end = interval(spans.one("dispatch tick"))
        durations.append((end - start) / 1e9)

    assert 0.05 <= min(durations) < 0.1


async def test_rule_7_2_a_pair_is_a_span_over_both_dispatches(spans: Spans) -> None:
    """Named by what the halves share, it holds both and the work between them."""
    engine = Engine(events=Tick, tracer_provider=spans.provider)
    tracer = spans.provider.get_tracer("user")

    async with engine.pair(Tick.BEFORE_WRITE):
        with tracer.start_as_current_span("the write itself"):
            await anyio.lowlevel.checkpoint()

    assert spans.names == ["write", "dispatch before_write", "the write itself", "dispatch after_write"]
    assert [spans.parent(name) for name in spans.names] == [None, "write", "write", "write"]
    assert spans.attributes("write") == {
        "eventbus.kind": "pair",
        "eventbus.event": "before_write",
        "eventbus.outcome": "ok",
    }


async def test_rule_7_2_under_a_callers_span(spans: Spans) -> None:
    """All of it is the caller's child, and the caller's span is current again afterwards."""
    engine = Engine(events=Tick, callbacks=[Watch("watch")], tracer_provider=spans.provider)
    tracer = spans.provider.get_tracer("user")

    with tracer.start_as_current_span("caller") as caller:
        await engine.run_event(Tick.TICK)
        async with engine.pair(Tick.BEFORE_WRITE):
            pass
        assert otel.get_current_span() is caller

    assert spans.parent("dispatch tick") == "caller"
    assert spans.parent("write") == "caller"
    assert len({context_of(span).trace_id for span in spans.all}) == 1


@pytest.mark.parametrize("kind", ["algorithm", "async callback", "plain callback", "surprise", "subscriber"])
async def test_rule_7_2_a_users_span_in_a_handler_is_its_child(spans: Spans, kind: str) -> None:
    """Whatever the handler, before it suspends and after; one span for each."""
    tracer = spans.provider.get_tracer("user")

    async def work() -> None:
        with tracer.start_as_current_span("early"):
            await anyio.lowlevel.checkpoint()
        with tracer.start_as_current_span("late"):
            pass

    class Plain(Callback[Any]):
        name = "it"

        def tick(self, state: Any, logger: Any) -> None:
            for name in ("early", "late"):
                with tracer.start_as_current_span(name):
                    pass

    class Surprise(Callback[Any]):
        name = "it"

        def tick(self, state: Any, logger: Any) -> Awaitable[None]:
            with tracer.start_as_current_span("plain part"):
                return work()

    async def it(envelope: Envelope) -> None:
        await work()

    callbacks: dict[str, list[Any]] = {
        "async callback": [Watch("it", work)],
        "plain callback": [Plain()],
        "surprise": [Surprise()],
    }
    engine = Engine(
        events=Tick,
        algorithms=[Step("it", action=work)] if kind == "algorithm" else [],
        callbacks=callbacks.get(kind, []),
        tracer_provider=spans.provider,
    )
    if kind == "subscriber":
        engine.bus.subscribe(it)

    await engine.run_event(Tick.TICK)

    parent = "algorithm it" if kind == "algorithm" else "callback it"
    assert [spans.parent(name) for name in ("early", "late", parent)] == [parent, parent, "dispatch tick"]
    if kind == "surprise":
        assert spans.parent("plain part") == "callback it"
    assert otel.get_current_span() is otel.INVALID_SPAN


async def test_rule_7_2_nested_events_nest_in_the_handler(spans: Spans) -> None:
    """What an algorithm publishes is the child of that algorithm's span."""

    class Outer(Step):
        def match(self, event: EventName, state: Any) -> bool:
            return event is Tick.TICK

    outer = Outer("outer", action=lambda: engine.run_event(Tick.BEFORE_WRITE))
    engine: Engine[Any] = Engine(events=Tick, algorithms=[outer], tracer_provider=spans.provider)

    await engine.run_event(Tick.TICK)

    assert spans.parent("dispatch before_write") == "algorithm outer"


async def test_rule_7_2_open_and_close_are_no_events(spans: Spans) -> None:
    """They are no run of the callback on the event, and get no span of that name."""

    class Life(Watch):
        async def open(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()

        async def close(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()

    async with Engine(events=Tick, callbacks=[Life("life")], tracer_provider=spans.provider) as engine:
        await engine.run_event(Tick.TICK)

    assert spans.names == ["dispatch tick", "callback life"]


async def test_rule_7_2_two_engines_one_bus(spans: Spans) -> None:
    """The second's dispatch is the first's child: it runs in its chain."""
    first = Engine(events=Tick, callbacks=[Watch("first")], tracer_provider=spans.provider)
    Engine(events=Tick, bus=first.bus, algorithms=[Step("second")], tracer_provider=spans.provider)

    await first.run_event(Tick.TICK)

    assert spans.names == ["dispatch tick", "callback first", "dispatch tick", "algorithm second"]


# ------------------------------------------------------------------------------------------------------------- statuses


async def test_rule_7_5_success_leaves_the_status_unset(spans: Spans) -> None:
    """On every span."""
    engine = Engine(events=Tick, algorithms=[Step("a")], callbacks=[Watch("c")], tracer_provider=spans.provider)

    async with engine.pair(Tick.BEFORE_WRITE):
        await engine.run_event(Tick.TICK)

    assert {span.status.status_code for span in spans.all} == {StatusCode.UNSET}


async def test_rule_7_5_a_failed_algorithm(spans: Spans) -> None:
    """ERROR with description and `error.type` on its span and on the dispatch, and the exception as a span event."""
    engine = Engine(
        events=Tick, algorithms=[Step("a", action=ValueError("broken")), Step("b")], tracer_provider=spans.provider
    )

    with pytest.raises(ValueError, match="broken"):
        await engine.run_event(Tick.TICK)

    for name in ("algorithm a", "dispatch tick"):
        span = spans.one(name)
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ValueError: broken")
        assert spans.attributes(name)["error.type"] == "ValueError"
        assert spans.attributes(name)["eventbus.outcome"] == "failed"
        assert [event.name for event in span.events] == ["exception"]
    assert spans.attributes("dispatch tick")["eventbus.skipped"] == ("b",)
    assert "algorithm b" not in spans.names


async def test_rule_7_5_a_failed_callback(spans: Spans) -> None:
    """Its own span has the error; the dispatch span has the group's; one that is logged leaves the dispatch alone."""

    class Problem(Exception):  # noqa: N818
        """Has no message."""

    quiet = Watch("quiet", Problem())
    quiet.on_error = "log"
    engine = Engine(events=Tick, callbacks=[Watch("loud", Problem()), quiet], tracer_provider=spans.provider)
    other = Engine(events=Tick, callbacks=[quiet], tracer_provider=spans.provider)

    with pytest.raises(CallbackErrors):
        await engine.run_event(Tick.TICK)

    qualified = f"{__name__}.test_rule_7_5_a_failed_callback.<locals>.Problem"
    for name in ("callback loud", "callback quiet"):
        assert (spans.one(name).status.status_code, spans.one(name).status.description) == (StatusCode.ERROR, "Problem")
        assert spans.attributes(name)["error.type"] == qualified
    assert spans.attributes("dispatch tick")["error.type"] == "eventbus_engine.errors.CallbackErrors"

    spans.clear()
    await other.run_event(Tick.TICK)
    assert spans.one("dispatch tick").status.status_code is StatusCode.UNSET
    assert spans.attributes("callback quiet")["eventbus.outcome"] == "failed"


async def test_rule_7_5_timeouts(spans: Spans) -> None:
    """ERROR, outcome `timed_out`, for algorithms and callbacks."""
    algorithm = Engine(
        events=Tick, algorithms=[Step("slow", action=anyio.sleep_forever, timeout=0.01)], tracer_provider=spans.provider
    )
    callback = Engine(
        events=Tick, callbacks=[Watch("slow", anyio.sleep_forever, timeout=0.01)], tracer_provider=spans.provider
    )

    with pytest.raises(TimeoutError):
        await algorithm.run_event(Tick.TICK)
    with pytest.raises(CallbackErrors):
        await callback.run_event(Tick.TICK)

    for name in ("algorithm slow", "callback slow"):
        assert spans.one(name).status.status_code is StatusCode.ERROR
        assert spans.attributes(name)["eventbus.outcome"] == "timed_out"
        assert spans.attributes(name)["error.type"] == "eventbus_engine.errors.HandlerTimeoutError"


async def test_rule_7_5_cancellation_is_an_error(spans: Spans) -> None:
    """The SDK would leave it UNSET: handlers, dispatch and pair say ERROR and `cancelled`, without an event."""
    engine = Engine(
        events=Tick,
        algorithms=[Step("a")],
        callbacks=[Watch("one", anyio.sleep_forever), Watch("two", anyio.sleep_forever)],
        tracer_provider=spans.provider,
    )

    with anyio.move_on_after(0.2):
        async with engine.pair(Tick.BEFORE_WRITE):
            await engine.run_event(Tick.TICK)

    for name in ("callback one", "callback two", "dispatch tick", "write"):
        assert spans.one(name).status.status_code is StatusCode.ERROR
        assert spans.attributes(name)["eventbus.outcome"] == "cancelled"
        assert "error.type" in spans.attributes(name)
        assert spans.one(name).events == ()
    assert spans.one("dispatch before_write").status.status_code is StatusCode.UNSET


async def test_rule_7_5_a_cancelled_algorithm(spans: Spans) -> None:
    """The same for the algorithm under way."""
    engine = Engine(events=Tick, algorithms=[Step("a", action=anyio.sleep_forever)], tracer_provider=spans.provider)

    with anyio.move_on_after(0.2):
        await engine.run_event(Tick.TICK)

    assert spans.attributes("algorithm a")["eventbus.outcome"] == "cancelled"
    assert spans.one("algorithm a").status.status_code is StatusCode.ERROR


async def test_rule_7_5_a_pair_whose_first_half_fails(spans: Spans) -> None:
    """Its span ends with that error."""
    engine = Engine(events=Tick, algorithms=[Step("a", action=LookupError("gone"))], tracer_provider=spans.provider)

    with pytest.raises(LookupError):
        async with engine.pair(Tick.BEFORE_WRITE):
            pass

    assert spans.one("write").status.description == "LookupError: gone"
    assert otel.get_current_span() is otel.INVALID_SPAN


async def test_rule_7_5_a_plain_interrupt(spans: Spans) -> None:
    """A KeyboardInterrupt in a plain callback ends its span, too."""

    class Interrupt(Callback[Any]):
        name = "it"

        def tick(self, state: Any, logger: Any) -> None:
            raise KeyboardInterrupt

    engine = Engine(events=Tick, callbacks=[Interrupt()], tracer_provider=spans.provider)
    error: BaseException | None = None

    try:
        await engine.run_event(Tick.TICK)
    except KeyboardInterrupt as raised:
        error = raised

    assert isinstance(error, KeyboardInterrupt)
    assert spans.attributes("callback it")["error.type"] == "KeyboardInterrupt"


# ----------------------------------------------------------------------------------------------------- free when off


async def test_rule_7_1_tracing_is_switched_on_and_off_under_an_engine(tmp_path: Path) -> None:
    """An engine follows `telemetry.configure`: its events inside the block are traced, those outside are not."""
    engine = Engine(events=Tick, algorithms=[Step("a")])
    path = tmp_path / "spans.jsonl"

    await engine.run_event(Tick.TICK)
    with configure(path=path):
        await engine.run_event(Tick.TICK)
    await engine.run_event(Tick.TICK)

    assert path.read_text().count('"name":"dispatch tick"') == 1


async def test_rule_6_6_no_provider_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a provider not a single span object is made."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a span was made")

    for module, maker in (("engine", "event"), ("pair", "event"), ("handlers", "handler"), ("sequence", "handler")):
        monkeypatch.setattr(f"eventbus_engine.{module}.{maker}_template", refuse)
    monkeypatch.setattr(ApiTracer, "open", refuse)
    monkeypatch.setattr(Recorder, "open", refuse)
    engine = Engine(events=Tick, algorithms=[Step("a")], callbacks=[Watch("c")])

    async with engine.pair(Tick.BEFORE_WRITE):
        traces = await engine.run_event(Tick.TICK)

    assert traces["a/TICK"].outcome == "ok"


async def test_rule_6_6_an_unsampled_dispatch_has_no_children() -> None:
    """A sampler that drops the dispatch drops what is under it, before it is made."""
    started: list[str] = []

    class Counting(TracerProvider):
        def get_tracer(self, *args: Any, **kwargs: Any) -> Any:
            tracer = super().get_tracer(*args, **kwargs)
            start = tracer.start_span

            def start_span(name: str, *args: Any, **kwargs: Any) -> Any:
                started.append(name)
                return start(name, *args, **kwargs)

            tracer.start_span = start_span  # type: ignore[method-assign]
            return tracer

    provider = Counting(sampler=ALWAYS_OFF, id_generator=PrivateIdGenerator())
    engine = Engine(algorithms=[Step("a")], callbacks=[Watch("c")], tracer_provider=provider)

    traces = await engine.run_event(Event.INIT)

    assert traces["a/INIT"].run
    assert started == ["dispatch init"]


async def test_rule_7_8_a_recorder_asks_the_sampler_once_a_root() -> None:
    """What it refuses, and what is under that, is not recorded, whether by the engine or by the user."""
    asked: list[str] = []

    class Counting(StaticSampler):
        def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
            asked.append(kwargs["name"])
            return super().should_sample(*args, **kwargs)

    exporter = Keep()
    refusing = RecordingProvider([exporter], sampler=ParentBased(Counting(Decision.DROP)))
    inside: list[bool] = []

    async def work() -> None:
        with refusing.get_tracer("user").start_as_current_span("inside") as span:
            inside.append(span.is_recording())

    engine = Engine(events=Tick, algorithms=[Step("a", action=work)], tracer_provider=refusing)

    async with engine.pair(Tick.BEFORE_WRITE):
        await engine.run_event(Tick.TICK)
    refusing.force_flush()
    refusing.shutdown()

    assert asked == ["write"]
    assert inside == [False] * 3
    assert exporter.kept == []
    assert otel.get_current_span() is otel.INVALID_SPAN


async def test_rule_6_6_an_event_that_nobody_hears_costs_nothing_where_nothing_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither with a sampler that never takes anything, nor below a root that has been refused."""
    opened: list[str] = []
    real = Recorder.open

    def opening(recorder: Recorder, template: Any, **options: Any) -> Any:
        opened.append(template.name)
        return real(recorder, template, **options)

    monkeypatch.setattr(Recorder, "open", opening)
    never = RecordingProvider([], sampler=ParentBased(ALWAYS_OFF))
    await Engine(events=Tick, tracer_provider=never).run_event(Tick.TICK)
    unheard = list(opened)

    second = RecordingProvider([], sampler=EveryNth(2))
    engine = Engine(events=Tick, tracer_provider=second)
    for _ in range(2):
        opened.append("|")
        async with engine.pair(Tick.BEFORE_WRITE):
            await engine.run_event(Tick.TICK)
    processed = RecordingProvider([], sampler=ALWAYS_OFF)
    processed.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    opened.append("|")
    await Engine(events=Tick, tracer_provider=processed).run_event(Tick.TICK)
    for provider in (never, second, processed):
        provider.shutdown()

    kept = ["write", "dispatch before_write", "dispatch tick", "dispatch after_write"]
    assert unheard == []
    assert opened == ["|", *kept, "|", "write", "|", "dispatch tick"]


async def test_rule_7_7_a_trace_and_its_span_have_one_clock() -> None:
    """To the nanosecond, as both come from the same two looks at it."""
    exporter = Keep()
    provider = RecordingProvider([exporter])
    engine = Engine(events=Tick, algorithms=[Step("a"), Step("b")], tracer_provider=provider)
    traces = await engine.run_event(Tick.TICK)
    provider.force_flush()
    provider.shutdown()
    taken = {span.name: (span.end_time or 0) - (span.start_time or 0) for span in exporter.kept}

    assert [taken["algorithm a"], taken["algorithm b"]] == [trace.duration_ns for trace in traces.values()]


async def test_rule_7_7_a_processor_of_the_users_sees_spans_live() -> None:
    """It gets `on_start` at the start and `on_end` at the end, in order, and what it sets arrives."""
    exporter = Keep()
    provider = RecordingProvider([exporter])
    seen: list[str] = []

    class Watching(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            seen.append(f"+{span.name}")
            span.set_attribute("seen", True)

        def on_end(self, span: ReadableSpan) -> None:
            seen.append(f"-{span.name}")

    provider.add_span_processor(Watching())
    await Engine(events=Tick, algorithms=[Step("a")], tracer_provider=provider).run_event(Tick.TICK)
    provider.force_flush()
    provider.shutdown()

    assert seen == ["+dispatch tick", "+algorithm a", "-algorithm a", "-dispatch tick"]
    assert [(span.attributes or {})["seen"] for span in exporter.kept] == [True, True]


async def test_rule_7_2_what_is_set_on_the_current_span_goes_with_it(spans: Spans) -> None:
    """Attributes, events, links, a name, a status; until it ends and no longer."""
    outer = spans.provider.get_tracer("user").start_span("elsewhere")
    outer.end()
    current: list[otel.Span] = []

    async def decorate() -> None:
        span = otel.get_current_span()
        current.append(span)
        assert span.is_recording()
        span.set_attribute("list", ["a", "b"])
        span.set_attributes({"number": 3})
        span.add_event("happened", {"at": "once"})
        span.add_link(outer.get_span_context(), {"why": "so"})
        span.update_name("algorithm renamed")
        span.record_exception(ValueError("by the way"))
        span.set_status(StatusCode.OK)
        span.set_status(StatusCode.ERROR, "too late")

    engine = Engine(events=Tick, algorithms=[Step("a", action=decorate)], tracer_provider=spans.provider)
    await engine.run_event(Tick.TICK)
    current[0].set_attribute("late", True)
    current[0].add_event("late")
    current[0].update_name("late")
    current[0].set_status(StatusCode.ERROR)
    current[0].end()

    span = spans.one("algorithm renamed")
    assert not current[0].is_recording()
    assert spans.attributes("algorithm renamed") | {"list": ("a", "b"), "number": 3} == dict(span.attributes or {})
    assert "late" not in spans.attributes("algorithm renamed")
    assert [(event.name, event.timestamp > 0) for event in span.events] == [("happened", True), ("exception", True)]
    assert [link.context.span_id for link in span.links] == [outer.get_span_context().span_id]
    assert span.status.status_code is StatusCode.OK


async def test_rule_7_2_a_task_that_a_handler_leaves_behind_keeps_its_ids(spans: Spans) -> None:
    """The next handler's span is never what it finds."""
    found: list[int] = []
    go, done = anyio.Event(), anyio.Event()

    async def straggler() -> None:
        await go.wait()
        found.append(otel.get_current_span().get_span_context().span_id)
        done.set()

    async with anyio.create_task_group() as group:

        async def spawn() -> None:
            group.start_soon(straggler)

        async def release() -> None:
            go.set()
            await done.wait()

        engine = Engine(
            events=Tick,
            algorithms=[Step("first", action=spawn), Step("second", action=release)],
            tracer_provider=spans.provider,
        )
        await engine.run_event(Tick.TICK)

    assert found == [context_of(spans.one("algorithm first")).span_id]


async def test_rule_7_2_background_delivery_shows(spans: Spans) -> None:
    """What ran after its event says so."""
    watch = Watch("watch")
    watch.delivery = "background"

    async with Engine(events=Tick, callbacks=[watch], tracer_provider=spans.provider) as engine:
        await engine.run_event(Tick.TICK)

    assert spans.attributes("callback watch")["eventbus.delivery"] == "background"
    assert spans.parent("callback watch") == "dispatch tick"


def test_rule_7_4_code_name() -> None:
    """Qualified, of functions, bound methods, partials and callable objects alike."""

    class Callable_:
        def __call__(self) -> None: ...

    names = [
        code_name(anyio.sleep),
        code_name(Spans().one),
        code_name(partial(partial(anyio.sleep), 1)),
        code_name(Callable_()),
    ]

    assert names == [
        "anyio.sleep",
        f"{__name__}.Spans.one",
        "anyio.sleep",
        f"{__name__}.test_rule_7_4_code_name.<locals>.Callable_",
    ]
