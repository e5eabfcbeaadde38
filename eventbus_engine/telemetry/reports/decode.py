"""From OTLP JSON to spans: the JSON Protobuf encoding of an `ExportTraceServiceRequest`.

The mapping is that of the OTLP specification (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding):
ids in hexadecimal, 64-bit integers as strings or numbers, fields that hold their default left out, unknown ones
ignored. What does not fit raises ValueError and says which field it was.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from eventbus_engine.telemetry.reports.model import Process, RecordedSpan, Scope, SpanEvent, SpanLink, Status

__all__ = ["Json", "RawSpan", "SpanDecoder", "trace_id_of", "times_of"]

Json: TypeAlias = dict[str, Any]

_NO_SERVICE = "unknown_service"
"""The SDKs' own name for a service without one."""
_DROPPED = {
    "attributes": "droppedAttributesCount",
    "events": "droppedEventsCount",
    "links": "droppedLinksCount",
}
_ID = {digits: re.compile(f"(?!0*$)[0-9a-fA-F]{{{digits}}}") for digits in (16, 32)}
_NO_ID = re.compile("0*")
_TIMES = range(2**64)


class RawSpan(NamedTuple):
    """A span as JSON, and what it shares with others."""

    fields: Json
    process: Process
    scope: Scope


class SpanDecoder:
    """Decodes the requests of a file; equal resources become one `Process`."""

    def __init__(self) -> None:
        self._processes: dict[str, Process] = {}

    def raw_spans(self, request: Any) -> Iterator[RawSpan]:
        """The spans of a request, not decoded yet.

        Raises:
            ValueError: it is no such request.
        """
        if not isinstance(request, dict):
            raise ValueError(f"the line holds {_shown(request)}, not an object")
        for resource in _objects(request, "resourceSpans"):
            process = self._process(_object(resource, "resource"))
            for scoped in _objects(resource, "scopeSpans"):
                fields = _object(scoped, "scope")
                scope = Scope(_text(fields, "name"), _text(fields, "version"))
                for span in _objects(scoped, "spans"):
                    yield RawSpan(span, process, scope)

    def decode(self, raw: RawSpan) -> RecordedSpan:
        """Decode one span.

        Raises:
            ValueError: a field does not fit.
        """
        fields = raw.fields
        start_ns, end_ns = times_of(raw)
        status = _object(fields, "status")
        parent_id = _text(fields, "parentSpanId")
        return RecordedSpan(
            trace_id=trace_id_of(raw),
            span_id=_id(fields, "spanId", 16),
            parent_id="" if _NO_ID.fullmatch(parent_id) else _id(fields, "parentSpanId", 16),
            name=_text(fields, "name"),
            kind=_integer(fields, "kind"),
            start_ns=start_ns,
            end_ns=end_ns,
            attributes=_attributes(fields),
            events=[_event(event) for event in _objects(fields, "events")],
            links=[_link(link) for link in _objects(fields, "links")],
            status=Status(_integer(status, "code"), _text(status, "message")),
            trace_state=_text(fields, "traceState"),
            dropped={what: count for what, name in _DROPPED.items() if (count := _integer(fields, name))},
            process=raw.process,
            scope=raw.scope,
        )

    def _process(self, resource: Json) -> Process:
        key = json.dumps(resource, sort_keys=True)
        process = self._processes.get(key)
        if process is None:
            attributes = _attributes(resource)
            process = self._processes[key] = Process(str(attributes.get("service.name", _NO_SERVICE)), attributes)
        return process


def trace_id_of(raw: RawSpan) -> str:
    """The trace a span belongs to. Raises ValueError without one."""
    return _id(raw.fields, "traceId", 32)


def times_of(raw: RawSpan) -> tuple[int, int]:
    """Start and end in nanoseconds; one without an end, or whose clock was set back, is taken to last no time."""
    start_ns = _time(raw.fields, "startTimeUnixNano")
    return start_ns, max(start_ns, _time(raw.fields, "endTimeUnixNano"))


def _event(fields: Json) -> SpanEvent:
    return SpanEvent(
        _time(fields, "timeUnixNano"),
        _text(fields, "name"),
        _attributes(fields),
        _integer(fields, "droppedAttributesCount"),
    )


def _link(fields: Json) -> SpanLink:
    return SpanLink(_id(fields, "traceId", 32), _id(fields, "spanId", 16), _attributes(fields))


def _attributes(fields: Json, name: str = "attributes") -> dict[str, Any]:
    return {_text(pair, "key"): _value(_object(pair, "value")) for pair in _objects(fields, name)}


def _value(value: Json) -> Any:
    """The Python value of an `AnyValue`; the empty one is None."""
    match value:
        case {"stringValue": str(text)}:
            return text
        case {"boolValue": bool(truth)}:
            return truth
        case {"intValue": _}:
            return _integer(value, "intValue")
        case {"doubleValue": int() | float() | str() as number} if not isinstance(number, bool):
            return float(number)
        case {"arrayValue": dict()}:
            return [_value(item) for item in _objects(_object(value, "arrayValue"), "values")]
        case {"kvlistValue": dict()}:
            return _attributes(_object(value, "kvlistValue"), "values")
        case {"bytesValue": str(text)}:
            return base64.b64decode(text, validate=True)
        case _ if value:
            raise ValueError(f"{_shown(value)} is no attribute value")
        case _:
            return None


def _object(parent: Json, name: str) -> Json:
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_shown(value)}, not an object")
    return value


def _objects(parent: Json, name: str) -> list[Json]:
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} is {_shown(value)}, not a list of objects")
    return value


def _text(parent: Json, name: str) -> str:
    value = parent.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, not a string")
    return value


def _integer(parent: Json, name: str) -> int:
    value = parent.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{name} is {_shown(value)}, not an integer")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} is {_shown(value)}, not an integer") from None


def _time(parent: Json, name: str) -> int:
    value = _integer(parent, name)
    if value not in _TIMES:
        raise ValueError(f"{name} is {value}, not the nanoseconds since the epoch")
    return value


def _id(parent: Json, name: str, digits: int) -> str:
    value = _text(parent, name)
    if not _ID[digits].fullmatch(value):
        raise ValueError(f"{name} is {_shown(value)}, not an id of {digits} hexadecimal digits")
    return value.lower()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
