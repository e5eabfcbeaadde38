"""What a collector receives is the tree that the engine's Traces describe, whatever happened on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from eventbus_engine import Algorithm, Callback, Engine, Envelope, EventBus, EventName, LoggerDestination, Traces
from eventbus_engine.bus import CallNext
from eventbus_engine.telemetry import OtlpHttpExporter
from eventbus_engine.telemetry.exporters import OtlpExporter
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.telemetry.wire import Records

ELSEWHERE = SpanContext(0xA1, 0xB2, True, TraceFlags(1))
UNSET, ERROR = 0, 2


class Tick(EventName):
    """A vocabulary: an event, and a pair."""

    TICK = "tick"
    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"


@dataclass
class Happening:
    """An event or a pair of them: what is to happen on it, and what has.

    Attributes:
        acts: on each event, what each algorithm does: `skip`, `ok`, `link`, `fail`, `cancel`, `time out`, or what it
            publishes.
        failing: on each event, the callbacks that raise.
        parent_id: the id of the span it was published under.
        above: the id of the span that each dispatch ran under: that one, or the pair's.
        dispatched: the id of each dispatch's span, in their order.
        error: what came out of it.
    """

    acts: list[tuple[Any, ...]]
    failing: list[frozenset[str]]
    parent_id: int = 0
    above: dict[EventName, int] = field(default_factory=dict)
    dispatched: dict[EventName, int] = field(default_factory=dict)
    error: BaseException | None = None

    def act(self, event: EventName, number: int) -> Any:
        """What an algorithm is to do."""
        return self.acts[event is Tick.AFTER_WRITE][number]

    def fails(self, event: EventName, name: str) -> bool:
        """Whether a callback is to fail."""
        return name in self.failing[event is Tick.AFTER_WRITE]


def current_id() -> int:
    """The id of the current span, 0 if there is none."""
    return otel.get_current_span().get_span_context().span_id


class Slot(Algorithm[Any, Any]):
    """Does what the happening says for its number."""

    def __init__(self, number: int, player: Player, timeout: float | None = None) -> None:
        self.name = f"slot_{number}"
        self.timeout = timeout
        self._number = number
        self._player = player

    def match(self, event: EventName, state: Happening) -> bool:
        """Unless it is to be skipped."""
        state.dispatched[event] = current_id()
        return bool(state.act(event, self._number) != "skip")

    async def apply(self, event: EventName, state: Happening, logger: Any) -> int | None:
        """As told."""
        await anyio.lowlevel.checkpoint()
        act = state.act(event, self._number)
        if isinstance(act, Happening):
            await self._player.play(act)
            return None
        if act == "link":
            otel.get_current_span().add_link(ELSEWHERE, {"why": "asked to"})
        elif act == "fail":
            raise LookupError(f"{self.name} ü")
        elif act == "cancel":
            self._player.scope.cancel()
            await anyio.lowlevel.checkpoint()
        elif act == "time out":
            await anyio.sleep_forever()
        return self._number


class Watch(Callback[Any]):
    """Fails on some events."""

    def __init__(self, name: str, on_error: Literal["raise", "log"]) -> None:
        self.name = name
        self.on_error = on_error

    async def tick(self, state: Happening, logger: Any) -> None:
        """As told."""
        self._fail_if_told(Tick.TICK, state)

    async def before_write(self, state: Happening, logger: Any) -> None:
        """As told."""
        self._fail_if_told(Tick.BEFORE_WRITE, state)

    async def after_write(self, state: Happening, logger: Any) -> None:
        """As told."""
        self._fail_if_told(Tick.AFTER_WRITE, state)

    def _fail_if_told(self, event: EventName, state: Happening) -> None:
        if state.fails(event, str(self.name)):
            raise OSError(self.name)


class Remote(Callback[Any]):
    """Runs in the background."""

    name = "remote"
    delivery = "background"

    async def tick(self, state: Any, logger: Any) -> None:
        """After the event."""
        await anyio.lowlevel.checkpoint()


class Keep(LoggerDestination):
    """Keeps the Traces, by the id of the dispatch's span, which is current when they are logged."""

    def __init__(self) -> None:
        self.traces: dict[int, Traces] = {}

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """Of one event."""
        self.traces[current_id()] = traces


class Encoded(OtlpExporter):
    """What the SDK's encoder makes of the same spans."""

    def __init__(self) -> None:
        super().__init__("the SDK's encoder")
        self.requests: list[ExportTraceServiceRequest] = []

    def _deliver(self, spans: Sequence[ReadableSpan], records: Records | None) -> int:
        self.requests.append(sdk_encode([*spans, *(records.to_spans() if records is not None else [])]))
        return 0

    def _release(self) -> None:
        """There is nothing to close."""


async def note_what_is_above(envelope: Envelope, call_next: CallNext) -> Traces:
    """Middleware in front of the engine, so that the span of the dispatch is not open yet."""
    envelope.state.above[envelope.event] = current_id()
    return await call_next(envelope)


class Player:
    """An engine, and what happens on it."""

    def __init__(self, provider: RecordingProvider) -> None:
        self.kept = Keep()
        self.scope: anyio.CancelScope
        self.played: list[Happening] = []
        bus = EventBus()
        bus.use(note_what_is_above)
        self._engine: Engine[Any] = Engine(
            events=Tick,
            bus=bus,
            algorithms=[Slot(0, self), Slot(1, self), Slot(2, self, timeout=0.001)],
            callbacks=[Watch("loud", "raise"), Watch("quiet", "log"), Remote(), self.kept],
            tracer_provider=provider,
        )

    async def run(self, happenings: Sequence[Happening]) -> None:
        """One after the other. A failure ends what it is a part of, a cancellation all of them."""
        async with self._engine:
            with anyio.CancelScope() as self.scope:
                for happening in happenings:
                    with suppress(Exception):
                        await self.play(happening)

    async def play(self, happening: Happening) -> None:
        """One, and what its algorithms publish."""
        self.played.append(happening)
        happening.parent_id = current_id()
        try:
            if len(happening.acts) == 1:
                await self._engine.run_event(Tick.TICK, happening)
                return
            async with self._engine.pair(Tick.BEFORE_WRITE, happening):
                pass
        except BaseException as error:
            happening.error = error
            raise


Row = tuple[str, int, tuple[tuple[str, Any], ...], tuple[int, str], tuple[int, ...], tuple[str, ...]]
"""Of a span: name, parent, attributes, status, the spans it links to, and the names of its events."""


def row(
    name: str, parent: int, error: BaseException | None, outcome: str, links: tuple[int, ...] = (), **attributes: Any
) -> Row:
    """What a span with this outcome is to look like."""
    named = {f"eventbus.{key}": value for key, value in attributes.items() if key != "function"}
    named["eventbus.outcome"] = outcome
    if "function" in attributes:
        named["code.function.name"] = f"{__name__}.{attributes['function']}"
    if error is None:
        return name, parent, tuple(sorted(named.items())), (UNSET, ""), links, ()
    kind = type(error)
    named["error.type"] = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = f"{kind.__name__}: {error}" if str(error) else kind.__name__
    events = () if outcome == "cancelled" else ("exception",)
    return name, parent, tuple(sorted(named.items())), (ERROR, message), links, events


def described(player: Player) -> list[Row]:
    """The tree that the Traces describe."""
    rows = []
    for happening in player.played:
        outcome = "ok"
        for number, (event, span_id) in enumerate(happening.dispatched.items()):
            error = happening.error if number == len(happening.dispatched) - 1 else None
            traces = player.kept.traces[span_id]
            rows += of_algorithms(happening, traces, span_id)
            outcome = next((trace.outcome for trace in traces.values() if trace.error is not None), "ok")
            if outcome == "ok":
                rows += of_callbacks(happening, event, span_id)
                outcome = "ok" if error is None else "failed"
            skipped = [trace.name for trace in traces.values() if not trace.run]
            more: dict[str, Any] = {"skipped": tuple(skipped)} if skipped else {}
            name, parent = f"dispatch {event.value}", happening.above[event]
            rows.append(row(name, parent, error, outcome, kind="dispatch", event=event.value, **more))
        if len(happening.acts) == 2:
            parent = happening.parent_id
            rows.append(row("write", parent, happening.error, outcome, kind="pair", event="before_write"))
    return sorted(rows)


def of_algorithms(happening: Happening, traces: Traces, span_id: int) -> list[Row]:
    """A span for each that ran."""
    rows = []
    for trace in traces.values():
        if not trace.run:
            continue
        assert trace.event is not None
        number = int(trace.name.removeprefix("slot_"))
        links = (ELSEWHERE.span_id,) if happening.act(trace.event, number) == "link" else ()
        more: dict[str, Any] = {} if trace.exit_code is None else {"exit_code": trace.exit_code}
        more |= {"kind": "algorithm", "event": trace.event.value, "order": trace.order, "function": "Slot.apply"}
        rows.append(row(f"algorithm {trace.name}", span_id, trace.error, trace.outcome, links, **more))
    return rows


def of_callbacks(happening: Happening, event: EventName, span_id: int) -> list[Row]:
    """A span for each that is there on the event."""
    rows = []
    more: dict[str, Any]
    for name in ("loud", "quiet"):
        error = OSError(name) if happening.fails(event, name) else None
        outcome = "ok" if error is None else "failed"
        more = {"kind": "callback", "event": event.value, "function": f"Watch.{event.value}"}
        rows.append(row(f"callback {name}", span_id, error, outcome, **more))
    if event is Tick.TICK:
        more = {"kind": "callback", "event": "tick", "function": "Remote.tick", "delivery": "background"}
        rows.append(row("callback remote", span_id, None, "ok", **more))
    return rows


def spans_of(requests: Sequence[ExportTraceServiceRequest]) -> dict[int, Span]:
    """All spans, by their ids."""
    spans = [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    found = {int.from_bytes(span.span_id, "big"): span for span in spans}
    assert len(found) == len(spans)
    return found


def row_of(span: Span) -> Row:
    """A span that was received."""
    attributes: dict[str, Any] = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind or "")
        attributes[attribute.key] = (
            tuple(each.string_value for each in value.values) if kind == "array_value" else value
        )
    return (
        span.name,
        int.from_bytes(span.parent_span_id, "big"),
        tuple(sorted(attributes.items())),
        (int(span.status.code), span.status.message),
        tuple(int.from_bytes(link.span_id, "big") for link in span.links),
        tuple(event.name for event in span.events),
    )


def check_times(spans: dict[int, Span], traces_of: dict[int, Traces]) -> None:
    """A child lies within its parent, unless it ran in the background; algorithms come in the order of their Traces."""
    for span in spans.values():
        parent = spans.get(int.from_bytes(span.parent_span_id, "big"))
        if parent is None:
            continue
        assert span.trace_id == parent.trace_id
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.name == "callback remote" or span.end_time_unix_nano <= parent.end_time_unix_nano
    for span_id, traces in traces_of.items():
        children = [
            span
            for span in spans.values()
            if int.from_bytes(span.parent_span_id, "big") == span_id and span.name.startswith("algorithm")
        ]
        children.sort(key=lambda span: span.start_time_unix_nano)
        ran = [trace for trace in traces.values() if trace.run]
        assert [span.name for span in children] == [f"algorithm {trace.name}" for trace in ran]
        for span, trace in zip(children, ran, strict=True):
            assert span.end_time_unix_nano - span.start_time_unix_nano >= trace.duration_ns


def happenings_of(acts: st.SearchStrategy[Any]) -> st.SearchStrategy[Happening]:
    """An event or a pair whose algorithms do this."""
    # An algorithm with a time limit that is to do something else would, on a busy machine, reach it all the same.
    step = st.tuples(acts, acts, st.sampled_from(["skip"] * 3 + ["time out"]))
    failing = st.frozensets(st.sampled_from(["loud", "quiet"]))
    return st.integers(1, 2).flatmap(
        lambda count: st.builds(
            Happening,
            st.lists(step, min_size=count, max_size=count),
            st.lists(failing, min_size=count, max_size=count),
        )
    )


plain = st.sampled_from(["ok", "ok", "ok", "skip", "link", "fail", "cancel"])
happenings = happenings_of(st.one_of(plain, happenings_of(st.one_of(plain, happenings_of(plain)))))

NONE: frozenset[str] = frozenset()


def event(*acts: Any, failing: frozenset[str] = NONE) -> Happening:
    """One event."""
    return Happening([acts], [failing])


def pair(before: tuple[Any, ...], after: tuple[Any, ...] = ("ok", "ok", "skip")) -> Happening:
    """Both halves of a pair."""
    return Happening([before, after], [NONE, NONE])


def check(collector: Any, backend: str, happenings: list[Happening]) -> dict[int, Span]:
    """Play the happenings, and compare what the collector has received."""
    encoded = Encoded()
    collector.requests.clear()
    provider = RecordingProvider([OtlpHttpExporter(collector.url), encoded])
    player = Player(provider)
    anyio.run(player.run, happenings, backend=backend)
    reports = provider.close(10)

    received = spans_of([ExportTraceServiceRequest.FromString(request.body) for request in collector.requests])
    assert {report.delivered for report in reports} == {len(received)}
    assert sorted(row_of(span) for span in received.values()) == described(player)
    assert received == spans_of(encoded.requests)
    pairs = [happening for happening in player.played if len(happening.acts) == 2]
    assert {received[span_id].name for happening in pairs for span_id in happening.above.values()} <= {"write"}
    check_times(received, player.kept.traces)
    return received


SCENARIOS: dict[str, tuple[Callable[[], list[Happening]], set[str]]] = {
    "success": (lambda: [event("ok", "ok", "skip")], {"ok"}),
    "failure": (lambda: [event("ok", "fail", "skip"), event("fail", "ok", "skip")], {"ok", "failed"}),
    "failing callbacks": (lambda: [event("ok", "ok", "skip", failing=frozenset({"loud", "quiet"}))], {"ok", "failed"}),
    "timeout": (lambda: [event("ok", "ok", "time out")], {"ok", "timed_out"}),
    "cancellation": (lambda: [event("ok", event("cancel", "ok", "skip"), "skip")], {"ok", "cancelled"}),
    "nesting": (lambda: [event("ok", event("ok", pair(("ok", "link", "skip")), "skip"), "skip")], {"ok"}),
    "a pair": (lambda: [pair(("link", "ok", "skip"))], {"ok"}),
    "a failing half": (
        lambda: [pair(("ok", "fail", "skip")), pair(("ok",) * 2 + ("skip",), ("fail", "ok", "skip"))],
        {"ok", "failed"},
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_of_what_may_happen_arrives_as_the_traces_have_it(
    collector: Any, anyio_backend: str, scenario: str
) -> None:
    """Parents, order, attributes, links and status; one case for each, so that none is left to chance."""
    make, outcomes = SCENARIOS[scenario]

    received = check(collector, anyio_backend, make())

    assert {dict(row_of(span)[2])["eventbus.outcome"] for span in received.values()} == outcomes


@given(programs=st.lists(happenings, max_size=3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_happens_arrives_as_the_traces_have_it(
    collector: Any, anyio_backend: str, programs: list[Happening]
) -> None:
    """Any of it within any other; the bytes decode to what the SDK's encoder gives for the same spans."""
    check(collector, anyio_backend, programs)
