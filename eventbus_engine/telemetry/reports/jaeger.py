"""The recording as Jaeger's JSON, which its UI takes under "Upload".

The model is that of Jaeger's query service (https://github.com/jaegertracing/jaeger, model/json); what of a span goes
where is OpenTelemetry's "OpenTelemetry to Jaeger Transformation"
(https://opentelemetry.io/docs/specs/otel/trace/sdk_exporters/jaeger/).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TextIO

from eventbus_engine.telemetry.reports.decode import Json
from eventbus_engine.telemetry.reports.model import (
    ERROR,
    OK,
    Process,
    RecordedSpan,
    RecordedTrace,
    SpanEvent,
    SpanLink,
)
from eventbus_engine.telemetry.reports.plain import SAFE_INTEGERS, plain
from eventbus_engine.telemetry.reports.reader import Recording

__all__ = ["MAX_SPANS", "jaeger_trace", "write_jaeger"]

MAX_SPANS = 10_000
"""What a Jaeger on Elasticsearch loads of a trace: a search there returns no more documents, unless told otherwise."""

_KINDS = {2: "server", 3: "client", 4: "producer", 5: "consumer"}
"""No tag for internal spans, says the transformation."""


def write_jaeger(recording: Recording, out: TextIO) -> list[str]:
    """Write all traces, each as soon as it is complete.

    Returns:
        What to tell the user: one sentence for each trace of more than `MAX_SPANS` spans.

    Raises:
        SpanFileError: a line of the recording is no request.
    """
    warnings: list[str] = []
    out.write('{"data":[')
    separator = "\n"
    for trace in recording.traces():
        written = jaeger_trace(trace)
        warnings += written.get("warnings", ())
        out.write(separator + json.dumps(written, separators=(",", ":"), allow_nan=False))
        separator = ",\n"
    out.write("\n]}\n")
    return warnings


def jaeger_trace(trace: RecordedTrace) -> Json:
    """One trace in Jaeger's model.

    Times are in microseconds, and siblings that start within the same one show in the order they have here: that of
    `RecordedTrace.walk`.
    """
    ids = {span.span_id for span in trace.spans}
    processes: dict[Process, str] = {}
    spans = [
        _span(node.span, ids, processes.setdefault(node.span.process, f"p{len(processes) + 1}"))
        for node in trace.walk()
    ]
    written: Json = {
        "traceID": trace.trace_id,
        "spans": spans,
        "processes": {
            key: {"serviceName": process.service, "tags": _tags(process.attributes, without="service.name")}
            for process, key in processes.items()
        },
    }
    if len(spans) > MAX_SPANS:
        most = f"a Jaeger that stores in Elasticsearch shows {MAX_SPANS:,} of them"
        written["warnings"] = [f"trace {trace.trace_id} has {len(spans):,} spans; {most}"]
    return written


def _span(span: RecordedSpan, ids: set[str], process: str) -> Json:
    start = span.start_ns // 1000
    references: list[Json] = []
    if span.parent_id:
        references.append(_reference("CHILD_OF", span.trace_id, span.parent_id))
    as_logs: list[SpanLink] = []
    for link in span.links:
        # Where there is no parent, Jaeger takes a reference into the same trace for one, whatever its type.
        if span.parent_id or (link.trace_id != span.trace_id and link.span_id not in ids):
            references.append(_reference("FOLLOWS_FROM", link.trace_id, link.span_id))
            if link.attributes:
                as_logs.append(link)
        else:
            as_logs.append(link)
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": references,
        "startTime": start,
        # Both ends are cut to microseconds, not the duration: so a child stays within its parent.
        "duration": span.end_ns // 1000 - start,
        "tags": _tags(span.attributes | _span_tags(span)),
        "logs": [_link_log(link, start) for link in as_logs] + _logs(span.events),
        "processID": process,
    }


def _span_tags(span: RecordedSpan) -> dict[str, Any]:
    """What has no field of its own in Jaeger."""
    tags = {
        "span.kind": _KINDS.get(span.kind),
        "otel.status_code": {OK: "OK", ERROR: "ERROR"}.get(span.status.code),
        "otel.status_description": span.status.message,
        "error": span.status.code == ERROR,
        "otel.scope.name": span.scope.name,
        "otel.scope.version": span.scope.version,
        "w3c.tracestate": span.trace_state,
        **{f"otel.dropped_{what}_count": count for what, count in span.dropped.items()},
    }
    return {key: value for key, value in tags.items() if value}


def _logs(events: Iterable[SpanEvent]) -> list[Json]:
    written: list[Json] = []
    for order, event in enumerate(sorted(events, key=lambda event: event.time_ns)):
        # Jaeger sorts what happened in the same microsecond by name, so each says where it belongs.
        fields = {"event": event.name, "eventbus.order": order, **event.attributes}
        if event.dropped_attributes:
            fields["otel.event.dropped_attributes_count"] = event.dropped_attributes
        written.append({"timestamp": event.time_ns // 1000, "fields": _tags(fields)})
    return written


def _link_log(link: SpanLink, start: int) -> Json:
    fields = {**link.attributes, "event": "link", "trace_id": link.trace_id, "span_id": link.span_id}
    return {"timestamp": start, "fields": _tags(fields)}


def _reference(kind: str, trace_id: str, span_id: str) -> Json:
    return {"refType": kind, "traceID": trace_id, "spanID": span_id}


def _tags(attributes: dict[str, Any], without: str | None = None) -> list[Json]:
    return [_tag(key, value) for key, value in attributes.items() if key != without]


def _tag(key: str, value: Any) -> Json:
    written = plain(value)
    match value:
        case bool():
            kind = "bool"
        case int() if value in SAFE_INTEGERS:
            kind = "int64"
        case float() if written is value:
            kind = "float64"
        case bytes():
            kind = "binary"
        case _:
            kind = "string"
            if not isinstance(written, str):
                written = "" if written is None else json.dumps(written, ensure_ascii=False)
    return {"key": key, "type": kind, "value": written}
