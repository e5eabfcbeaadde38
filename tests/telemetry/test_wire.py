"""Records as OTLP: what the templates put together is what the SDK's own encoder gives for the same spans."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, StatusCode, TraceFlags, TraceState

from eventbus_engine import Event
from eventbus_engine.telemetry import otlp
from eventbus_engine.telemetry.recorder import RecordedSpan, Recorder
from eventbus_engine.telemetry.spans import Template, event_template
from eventbus_engine.telemetry.wire import Records

RESOURCE = Resource({"service.name": "ü", "rank": 1}, schema_url="https://example.org/1")
TEMPLATE = Template("algorithm ü", "algorithm", Event.BATCH_END, {"code.function.name": 'a."b"'})
REMOTE = SpanContext(0xA1, 0xB2, True, TraceFlags(1), TraceState([("vendor", "x")]))


def recorder(sampler: Sampler | None = None) -> tuple[Recorder, list[RecordedSpan]]:
    """A recorder, and where what it records ends up."""
    kept: list[RecordedSpan] = []
    return Recorder(sampler, kept.append), kept


def check(kept: list[RecordedSpan], limits: SpanLimits | None = None) -> None:
    """Compare both encodings with those of the spans that the SDK would have made."""
    records = Records(kept, RESOURCE, limits or SpanLimits())
    spans = records.to_spans()

    assert ExportTraceServiceRequest.FromString(records.to_protobuf()) == sdk_encode(spans)
    assert json.loads(f'{{"resourceSpans":[{records.to_json()}]}}') == otlp.encode_spans(spans)


def test_a_dispatch_and_what_runs_in_it() -> None:
    """The usual: a root, children with an order and an exit code, what was skipped."""
    recording, kept = recorder()
    dispatch = recording.open(event_template("dispatch", Event.BATCH_END))
    for order in range(3):
        child = recording.open(TEMPLATE, order=order)
        child.set("eventbus.exit_code", -order)
        child.end("ok")
    dispatch.set("eventbus.skipped", ["a", "b"])
    dispatch.end("ok")

    check(kept)
    assert len({span.span_id for span in kept}) == 4
    assert {span.parent_id for span in kept[:3]} == {kept[3].span_id}


values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4),
    st.lists(st.integers(-(2**31), 2**31), max_size=4),
    st.binary(max_size=200),
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), values, max_size=40))
def test_any_attributes(attributes: dict[str, Any]) -> None:
    """Whatever is set, by the template or the long way."""
    recording, kept = recorder()
    span = recording.open(TEMPLATE, order=200)
    for key, value in attributes.items():
        span.set(key, value)
    span.end("ok")

    check(kept)


def fail(recording: Recorder) -> None:
    """End with an exception."""
    span = recording.open(TEMPLATE)
    try:
        raise LookupError("gone")
    except LookupError as error:
        span.end("failed", error)


def cancel(recording: Recorder) -> None:
    """End with one that is no failure."""
    recording.open(TEMPLATE).end("cancelled", KeyboardInterrupt())


def link(recording: Recorder) -> None:
    """Start a trace of its own, with a link."""
    recording.open(TEMPLATE, links=[Link(REMOTE, {"why": 1})], root=True).end("ok")


def rename(recording: Recorder) -> None:
    """Get another name and kind."""
    span = recording.open(TEMPLATE)
    span.rename("other")
    span.set("eventbus.kind", "other")
    span.end("ok")


def override(recording: Recorder) -> None:
    """Get another value for what the template has."""
    span = recording.open(TEMPLATE)
    span.set("eventbus.kind", "other")
    span.end("ok")


def nest(recording: Recorder) -> None:
    """Get a value that is no attribute's."""
    span = recording.open(TEMPLATE)
    span.set("nested", [[1], {}])
    span.end("ok")


@pytest.mark.parametrize("way", [fail, cancel, link, rename, override, nest])
def test_what_few_spans_have(way: Callable[[Recorder], None]) -> None:
    """Goes the long way and comes to the same."""
    recording, kept = recorder()
    way(recording)

    check(kept)


@pytest.mark.parametrize("sampler", [None, DEFAULT_ON, TraceIdRatioBased(1.0)])
def test_below_a_remote_parent_with_a_trace_state(sampler: Sampler | None) -> None:
    """Its ids, its state, and that it is remote."""
    recording, kept = recorder(sampler)
    with otel.use_span(NonRecordingSpan(REMOTE)):
        outer = recording.open(TEMPLATE)
        recording.open(TEMPLATE).end("ok")
        outer.end("ok")

    check(kept)
    assert {span.root.trace_id for span in kept} == {REMOTE.trace_id}
    assert kept[1].parent_id == REMOTE.span_id


@pytest.mark.parametrize("limits", [{"max_span_attributes": 2}, {"max_span_attribute_length": 3}])
def test_the_limits_of_the_provider_hold(limits: dict[str, int]) -> None:
    """As for the SDK's own spans."""
    recording, kept = recorder()
    recording.open(TEMPLATE, order=1).end("ok")

    check(kept, SpanLimits(**limits))


def test_a_failure_keeps_no_frames_alive() -> None:
    """A batch that an exception has seen is gone when the run has let go of it, however long the queue is."""
    import gc
    import weakref

    class Big:
        pass

    recording, kept = recorder()

    def work() -> weakref.ref[Big]:
        big = Big()
        span = recording.open(TEMPLATE)
        try:
            raise ValueError(str(big))
        except ValueError as error:
            span.end("failed", error)
        return weakref.ref(big)

    seen = work()
    gc.collect()
    (span,) = Records(kept, RESOURCE, SpanLimits()).to_spans()

    assert seen() is None
    assert span.status.status_code is StatusCode.ERROR
    assert "in work" in str((span.events[0].attributes or {})["exception.stacktrace"])
