"""Records as OTLP, in protobuf or JSON, put together from pieces that are encoded once for all spans of a kind.

What few spans have (errors, links, events of the user's, a trace state) takes the long way over the SDK's own span and
encoder. The bytes decode to what that encoder gives for the same spans.

The formats: https://protobuf.dev/programming-guides/encoding/ and `opentelemetry/proto/trace/v1/trace.proto`.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.trace import SpanContext

from eventbus_engine.telemetry.convert import ENGINE_SCOPE, to_span
from eventbus_engine.telemetry.otlp import encode_attributes, encode_span, encode_spans
from eventbus_engine.telemetry.records import RecordedSpan
from eventbus_engine.telemetry.spans import Template

__all__ = ["Records"]

T = TypeVar("T")

# Field numbers of Span, shifted, with the wire type in the low three bits: 1 fixed64, 2 length-delimited, 5 fixed32.
_IDS = struct.Struct(">2s16s2sQ")
_PARENT = struct.Struct(">2sQ")
_TIMES = struct.Struct("<BQBQ")
_START, _END = 7 << 3 | 1, 8 << 3 | 1
_NAME, _ATTRIBUTE = b"\x2a", b"\x4a"
_KIND_INTERNAL = b"\x30\x01"
# An empty Status, which the SDK sends for UNSET as well, and the flags: known to have no remote parent.
_TAIL = b"\x7a\x00\x85\x01\x00\x01\x00\x00"
_JSON_HAS_IS_REMOTE = 0x100
_MANY = 32


class Records:
    """A batch of records on its way to an exporter.

    Args:
        records: that have ended.
        resource: of the provider they belong to.
        limits: of that provider.
    """

    def __init__(self, records: Sequence[RecordedSpan], resource: Resource, limits: SpanLimits) -> None:
        self._records = records
        self._resource = resource
        self._limits = limits
        # Limits that could touch a span of a kind like any other are rare, and all others stay far below the default.
        many = limits.max_span_attributes is None or limits.max_span_attributes >= _MANY
        self._by_template = many and limits.max_span_attribute_length is None

    def __len__(self) -> int:
        return len(self._records)

    def to_spans(self) -> list[ReadableSpan]:
        """As the SDK's own."""
        return [self._to_span(record) for record in self._records]

    def to_protobuf(self) -> bytes:
        """As a serialized `ExportTraceServiceRequest`."""
        spans = [self._protobuf(record) for record in self._records]
        head, scope = _protobuf_frame(self._resource)
        body = b"".join([scope, *[b"\x12" + _varint(len(span)) + span for span in spans]])
        return _delimited(b"\x0a", head + _delimited(b"\x12", body) + _schema_url(self._resource))

    def to_json(self) -> str:
        """As the inside of the list `resourceSpans` of an `ExportTraceServiceRequest` in JSON."""
        before, after = _json_frame(self._resource)
        return before + ",".join([self._json(record) for record in self._records]) + after

    def _to_span(self, record: RecordedSpan) -> ReadableSpan:
        return to_span(record, self._resource, self._limits)

    def _takes_template(self, record: RecordedSpan) -> bool:
        if not (self._by_template and record.plain) or record.root.state:
            return False
        extra = record.extra
        return extra is None or (len(extra) < _MANY // 2 and record.template.attributes.keys().isdisjoint(extra))

    def _protobuf(self, record: RecordedSpan) -> bytes:
        if self._takes_template(record):
            extra = _extra(record, _known_attribute)
            if extra is not None:
                root = record.root
                return b"".join(
                    [
                        _IDS.pack(b"\x0a\x10", root.trace_id.to_bytes(16, "big"), b"\x12\x08", record.span_id),
                        _PARENT.pack(b"\x22\x08", record.parent_id) if record.parent_id else b"",
                        _TIMES.pack(_START, record.start, _END, record.end_time),
                        record.template.encoded.get("protobuf") or _protobuf_template(record.template),
                        *extra,
                        _TAIL,
                    ]
                )
        return _sdk_protobuf(self._to_span(record))

    def _json(self, record: RecordedSpan) -> str:
        if self._takes_template(record):
            extra = _extra(record, _known_json_attribute)
            if extra is not None:
                root = record.root
                parent = f'"parentSpanId":"{record.parent_id:016x}",' if record.parent_id else ""
                template = record.template.encoded.get("json") or _json_template(record.template)
                return (
                    f'{{"traceId":"{root.trace_id:032x}","spanId":"{record.span_id:016x}",{parent}'
                    f'"flags":{root.flags | _JSON_HAS_IS_REMOTE},{template[0]}"startTimeUnixNano":"{record.start}",'
                    f'"endTimeUnixNano":"{record.end_time}",{template[1]},{",".join(extra)}],"status":{{}}}}'
                )
        return _dump(encode_span(self._to_span(record)))


# ------------------------------------------------------------------------------------------------------------ protobuf


def _varint(value: int) -> bytes:
    if value < 0x80:
        return value.to_bytes(1, "little")
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _delimited(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _text(tag: bytes, value: str) -> bytes:
    # A lone surrogate has no UTF-8 form; better a question mark than a lost batch.
    return _delimited(tag, value.encode("utf-8", "replace"))


def _any_value(value: Any) -> bytes | None:
    """An `AnyValue`; None for what is left to the SDK."""
    kind = type(value)
    if kind is str:
        return _text(b"\x0a", value)
    if kind is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if kind is int and -(2**63) <= value < 2**63:
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if kind is float:
        return b"\x21" + struct.pack("<d", value)
    if kind is tuple and all(type(item) is str for item in value):
        return _delimited(b"\x2a", b"".join([_delimited(b"\x0a", _text(b"\x0a", item)) for item in value]))
    return None


def _attribute(key: str, value: Any) -> bytes | None:
    encoded = _any_value(value)
    if encoded is None or type(key) is not str or not key:
        return None
    return _delimited(_ATTRIBUTE, _text(b"\x0a", key) + _delimited(b"\x12", encoded))


# Engines set the same again and again: orders, exit codes, outcomes, what was skipped.
_known_attribute = functools.lru_cache(maxsize=4096, typed=True)(_attribute)


def _extra(record: RecordedSpan, encode: Callable[[str, Any], T | None]) -> list[T] | None:
    """The attributes that its template does not have, encoded; None if one of them is left to the SDK."""
    pieces = [encode("eventbus.order", record.order)] if record.order is not None else []
    try:
        if record.extra:
            pieces += [encode(key, value) for key, value in record.extra.items()]
    except TypeError:  # what cannot be hashed is nothing an engine sets
        return None
    pieces.append(encode("eventbus.outcome", record.outcome))
    if record.root.kept:
        pieces.append(encode("eventbus.kept", record.root.kept))
    return None if None in pieces else cast("list[T]", pieces)


def _protobuf_template(template: Template) -> bytes:
    pieces = [_attribute(key, value) for key, value in template.attributes.items()]
    encoded = _text(_NAME, template.name) + _KIND_INTERNAL + b"".join(piece for piece in pieces if piece is not None)
    template.encoded["protobuf"] = encoded
    return encoded


@functools.lru_cache(maxsize=8)
def _schema_url(resource: Resource) -> bytes:
    return _text(b"\x1a", resource.schema_url) if resource.schema_url else b""


@functools.lru_cache(maxsize=8)
def _protobuf_frame(resource: Resource) -> tuple[bytes, bytes]:
    """The resource and the scope, as the SDK encodes them."""
    nothing = ReadableSpan("", SpanContext(1, 1, False), resource=resource, instrumentation_scope=ENGINE_SCOPE)
    encoded = _sdk_request(nothing)
    scope = encoded.scope_spans[0].scope.SerializeToString()
    return _delimited(b"\x0a", encoded.resource.SerializeToString()), _delimited(b"\x0a", scope)


def _sdk_protobuf(span: ReadableSpan) -> bytes:
    encoded: bytes = _sdk_request(span).scope_spans[0].spans[0].SerializeToString()
    return encoded


def _sdk_request(span: ReadableSpan) -> Any:
    # Of the extra "otlp"; nobody asks for protobuf without it.
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode

    return encode([span]).resource_spans[0]


# ---------------------------------------------------------------------------------------------------------------- JSON


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _json_attribute(key: str, value: Any) -> str | None:
    return _dump(encode_attributes({key: value})[0]) if _any_value(value) is not None else None


_known_json_attribute = functools.lru_cache(maxsize=4096, typed=True)(_json_attribute)


def _json_template(template: Template) -> tuple[str, str]:
    """What stands before the times, and what stands after them."""
    attributes = _dump(encode_attributes(template.attributes))
    encoded = f'"name":{_dump(template.name)},"kind":1,', f'"attributes":{attributes[:-1]}'
    template.encoded["json"] = encoded
    return encoded


@functools.lru_cache(maxsize=8)
def _json_frame(resource: Resource) -> tuple[str, str]:
    """What stands before the spans, and what stands after them."""
    nothing = ReadableSpan("", SpanContext(1, 1, False), resource=resource, instrumentation_scope=ENGINE_SCOPE)
    request = encode_spans([nothing])["resourceSpans"][0]
    request["scopeSpans"][0]["spans"] = []
    before, _, after = _dump(request).rpartition("[]")
    return f"{before}[", f"]{after}"
