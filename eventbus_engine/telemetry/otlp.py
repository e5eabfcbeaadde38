"""Spans as OTLP JSON: `encode_spans`, a pure function from SDK spans to the body of an export request.

The mapping is the JSON Protobuf encoding of the OTLP specification (https://opentelemetry.io/docs/specs/otlp/):
lowerCamelCase names, trace and span ids in hexadecimal, other bytes in base64, 64-bit integers as decimal strings,
enumerations as integers, fields that hold their default left out.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, TraceState, format_span_id, format_trace_id

__all__ = ["encode_attributes", "encode_span", "encode_spans"]

Json: TypeAlias = dict[str, Any]

_HAS_IS_REMOTE = 0x100
_IS_REMOTE = 0x200
_INT64 = range(-(2**63), 2**63)


def encode_spans(spans: Sequence[ReadableSpan]) -> Json:
    """Encode spans as one `ExportTraceServiceRequest`, grouped by resource, then by instrumentation scope.

    Args:
        spans: ended spans of the SDK, of any number of providers and tracers.

    Returns:
        A dictionary that `json.dumps` takes as it is.
    """
    # Grouped by identity: a provider's spans share one resource object and a tracer's one scope object, whereas
    # hashing a Resource serialises all of its attributes, for every span.
    groups: dict[int, tuple[Resource, dict[int, tuple[InstrumentationScope | None, list[Json]]]]] = {}
    for span in spans:
        _, scopes = groups.setdefault(id(span.resource), (span.resource, {}))
        scope = span.instrumentation_scope
        _, encoded = scopes.setdefault(id(scope), (scope, []))
        encoded.append(encode_span(span))
    return {
        "resourceSpans": [
            _present(
                resource=_present(attributes=encode_attributes(resource.attributes)),
                scopeSpans=[
                    _present(
                        scope=_encode_scope(scope),
                        spans=encoded,
                        schemaUrl=scope.schema_url if scope is not None else None,
                    )
                    for scope, encoded in scopes.values()
                ],
                schemaUrl=resource.schema_url,
            )
            for resource, scopes in groups.values()
        ]
    }


def encode_span(span: ReadableSpan) -> Json:
    """Encode one span, without its resource and scope.

    Raises:
        ValueError: the span has no context, so it has no id.
    """
    context = span.get_span_context()
    if context is None:
        raise ValueError(f"span {span.name!r} has no context, hence no id to export it under")
    parent = span.parent
    return _present(
        traceId=format_trace_id(context.trace_id),
        spanId=format_span_id(context.span_id),
        traceState=_encode_trace_state(context.trace_state),
        parentSpanId=format_span_id(parent.span_id) if parent is not None else None,
        flags=_encode_flags(context, remote=parent is not None and parent.is_remote),
        name=span.name,
        # OTLP keeps 0 for "unspecified"; the API counts from 0.
        kind=span.kind.value + 1,
        startTimeUnixNano=_encode_time(span.start_time),
        endTimeUnixNano=_encode_time(span.end_time),
        attributes=encode_attributes(span.attributes),
        droppedAttributesCount=span.dropped_attributes,
        events=[_encode_event(event) for event in span.events],
        droppedEventsCount=span.dropped_events,
        links=[_encode_link(link) for link in span.links],
        droppedLinksCount=span.dropped_links,
        status=_encode_status(span.status),
    )


def encode_attributes(attributes: Mapping[str, Any] | None) -> list[Json]:
    """Encode attributes as a list of OTLP `KeyValue`s, in their order."""
    return [{"key": str(key), "value": _encode_value(value)} for key, value in (attributes or {}).items()]


def _present(**fields: Any) -> Json:
    """The fields that do not hold their protobuf default. An empty message is no default, so `{}` stays."""
    return {name: value for name, value in fields.items() if value or isinstance(value, dict)}


def _encode_value(value: Any) -> Json:
    """One `AnyValue`. What has no place in it becomes its string, as the specification asks."""
    match value:
        case None:
            return {}
        case bool():
            return {"boolValue": value}
        case str():
            return {"stringValue": value}
        case int() if value in _INT64:
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": _encode_double(value)}
        case bytes():
            return {"bytesValue": base64.b64encode(value).decode("ascii")}
        case Mapping():
            return {"kvlistValue": _present(values=encode_attributes(value))}
        case Sequence():
            return {"arrayValue": _present(values=[_encode_value(item) for item in value])}
        case _:
            return {"stringValue": str(value)}


def _encode_double(value: float) -> float | str:
    """JSON has no NaN and no infinities; protobuf's JSON mapping spells them."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _encode_scope(scope: InstrumentationScope | None) -> Json:
    if scope is None:
        return {}
    return _present(name=scope.name, version=scope.version, attributes=encode_attributes(scope.attributes))


def _encode_event(event: Event) -> Json:
    return _present(
        timeUnixNano=_encode_time(event.timestamp),
        name=event.name,
        attributes=encode_attributes(event.attributes),
        droppedAttributesCount=event.dropped_attributes,
    )


def _encode_link(link: Link) -> Json:
    return _present(
        traceId=format_trace_id(link.context.trace_id),
        spanId=format_span_id(link.context.span_id),
        traceState=_encode_trace_state(link.context.trace_state),
        attributes=encode_attributes(link.attributes),
        droppedAttributesCount=link.dropped_attributes,
        flags=_encode_flags(link.context, remote=link.context.is_remote),
    )


def _encode_status(status: Status) -> Json:
    return _present(code=status.status_code.value, message=status.description)


def _encode_flags(context: SpanContext, remote: bool) -> int:
    """The W3C trace flags in the low byte; above it, that remoteness is known, and what it is."""
    return int(context.trace_flags) | _HAS_IS_REMOTE | (_IS_REMOTE if remote else 0)


def _encode_time(nanoseconds: int | None) -> str | None:
    return str(nanoseconds) if nanoseconds else None


def _encode_trace_state(trace_state: TraceState | None) -> str | None:
    return trace_state.to_header() if trace_state else None
