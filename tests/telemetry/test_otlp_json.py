"""OTLP JSON, against the protobuf encoder that OpenTelemetry ships."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped,unused-ignore]
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode_protobuf
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from eventbus_engine.telemetry.ids import PrivateIdGenerator
from eventbus_engine.telemetry.otlp import encode_attributes, encode_span, encode_spans

REMOTE = SpanContext(
    trace_id=0x00F0 << 96 | 1,
    span_id=0x0A,
    is_remote=True,
    trace_flags=TraceFlags(TraceFlags.SAMPLED),
    trace_state=TraceState([("vendor", "a=b"), ("other", "1")]),
)
LOCAL = SpanContext(trace_id=5, span_id=6, is_remote=False)


def provider_into(kept: InMemorySpanExporter, **options: Any) -> TracerProvider:
    """A provider whose ended spans are kept."""
    provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False, **options)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return provider


def reference(spans: Sequence[ReadableSpan]) -> Any:
    """The stock encoding in JSON, ids in hexadecimal, completed by two fields of the protocol that it leaves out."""
    message = encode_protobuf(spans)
    encoded = [s for resource in message.resource_spans for scope in resource.scope_spans for s in scope.spans]
    by_id = {int.from_bytes(span.span_id, "big"): span for span in encoded}
    for span in spans:
        assert span.context is not None
        proto = by_id[span.context.span_id]
        proto.flags |= span.context.trace_flags
        for link, proto_link in zip(span.links, proto.links, strict=True):
            proto_link.flags |= link.context.trace_flags
            proto_link.trace_state = link.context.trace_state.to_header()
    return with_hex_ids(MessageToDict(message, use_integers_for_enums=True))


def with_hex_ids(value: Any) -> Any:
    """OTLP's one departure from protobuf's JSON: ids are not in base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in ("traceId", "spanId", "parentSpanId") else with_hex_ids(item)
            for key, item in value.items()
        }
    return [with_hex_ids(item) for item in value] if isinstance(value, list) else value


def test_spans_with_everything_in_them_encode_as_the_protobuf_encoder_does() -> None:
    """Parents, remote parents, trace state, kinds, events, links, status, drops, two scopes, two resources."""
    kept = InMemorySpanExporter()
    limits = SpanLimits(max_span_attributes=2, max_events=2, max_links=2, max_event_attributes=1, max_link_attributes=1)
    rich = provider_into(
        kept, resource=Resource({"service.name": "rich", "n": 1}, "https://schema/r"), span_limits=limits
    )
    poor = provider_into(kept, resource=Resource({}))
    tracer = rich.get_tracer("scope", "1.2", "https://schema/s", {"scoped": True})
    remote = trace.set_span_in_context(trace.NonRecordingSpan(REMOTE))
    links = [Link(LOCAL, {"x": 1, "y": 2}), Link(REMOTE), Link(LOCAL)]
    with tracer.start_as_current_span("remote child", remote, SpanKind.SERVER, links=links) as parent:
        parent.set_attributes({"dropped": 0, "kept": "ü", "also": (1, 2)})
        for number in range(3):
            parent.add_event(f"event {number}", {"a": 1, "b": [True, False]}, timestamp=number)
        for kind in SpanKind:
            tracer.start_span(kind.name, kind=kind).end()
        for number, status in enumerate((Status(StatusCode.OK), Status(StatusCode.ERROR, "broken: ü"))):
            span = poor.get_tracer("other").start_span("")
            span.set_status(status)
            span.end(end_time=number)
    rich.get_tracer("other").start_span("root").end()
    spans = kept.get_finished_spans()
    actual = encode_spans(spans)

    assert actual == reference(spans)
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@settings(deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.dictionaries(KEYS, SCALARS, max_size=3))
@example({"nan": float("nan"), "infinities": [float("inf"), float("-inf")], "empty": [[], {}, "", b"", 0, None]}, {})
def test_attributes_of_every_type_encode_as_the_protobuf_encoder_does(
    attributes: dict[str, Any], event_attributes: dict[str, Any]
) -> None:
    """Strings, numbers, bytes, NaN, nested arrays and maps, on spans, events and links."""
    kept = InMemorySpanExporter()
    tracer = provider_into(kept, resource=Resource({})).get_tracer("scope")
    span = tracer.start_span("span", attributes=attributes, links=[Link(LOCAL, event_attributes)])
    span.add_event("event", event_attributes)
    span.end()
    spans = kept.get_finished_spans()

    assert encode_spans(spans) == reference(spans)


def test_an_integer_beyond_64_bits_becomes_its_decimal_string() -> None:
    """OTLP has no such integer, and the attribute is worth keeping."""
    actual = encode_attributes({"big": 2**63, "small": -(2**63)})

    assert actual == [
        {"key": "big", "value": {"stringValue": "9223372036854775808"}},
        {"key": "small", "value": {"intValue": "-9223372036854775808"}},
    ]


def test_no_spans_make_an_empty_request() -> None:
    """An empty batch is a valid request too."""
    assert encode_spans([]) == {"resourceSpans": []}


def test_a_span_without_context_is_refused_by_name() -> None:
    """It has no id to be exported under."""
    with pytest.raises(ValueError, match="'nameless' has no context"):
        encode_span(ReadableSpan("nameless"))


def test_a_span_of_no_scope_has_an_empty_one() -> None:
    """Bridges from other tracing libraries make such spans."""
    span = ReadableSpan("bridged", LOCAL, resource=Resource({}))

    assert encode_spans([span]) == reference([span])


def test_spans_of_one_tracer_stand_in_one_group(make_spans: Callable[[int], list[ReadableSpan]]) -> None:
    """Resource and scope are written once, not once per span."""
    (resource,) = encode_spans(make_spans(3))["resourceSpans"]
    (scope,) = resource["scopeSpans"]

    assert [span["name"] for span in scope["spans"]] == ["span 0", "span 1", "span 2"]
