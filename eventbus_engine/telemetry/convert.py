"""Records as the SDK's spans, for exporters that know no others and for what few spans have."""

from __future__ import annotations

from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode

from eventbus_engine.telemetry.records import Failure, RecordedEvent, RecordedSpan
from eventbus_engine.telemetry.spans import SCOPE

__all__ = ["ENGINE_SCOPE", "attributes_of", "to_span"]

ENGINE_SCOPE = InstrumentationScope(SCOPE)


def to_span(record: RecordedSpan, resource: Resource, limits: SpanLimits) -> ReadableSpan:
    """The span that the SDK would have made of it, within the same limits."""
    parent = record.remote_parent
    if parent is None and record.parent_id:
        root = record.root
        parent = SpanContext(root.trace_id, record.parent_id, False, root.flags, root.state)
    events = list(record.events)
    status = record.status or Status(StatusCode.UNSET)
    if record.failure is not None:
        status = Status(StatusCode.ERROR, record.failure.description)
        if record.failure.report is not None:
            events.append(_exception_event(record.failure, record.end_time))
    return ReadableSpan(
        name=record.name or record.template.name,
        context=record.get_span_context(),
        parent=parent,
        resource=resource,
        attributes=_bounded(attributes_of(record), limits.max_span_attributes, limits.max_span_attribute_length),
        events=BoundedList.from_seq(limits.max_events, [_to_event(event, limits) for event in events]),
        links=BoundedList.from_seq(limits.max_links, [_to_link(link, limits) for link in record.links]),
        status=status,
        start_time=record.start,
        end_time=record.end_time,
        instrumentation_scope=ENGINE_SCOPE,
    )


def attributes_of(record: RecordedSpan) -> dict[str, Any]:
    """All attributes, in the order in which they were set."""
    attributes = dict(record.template.attributes)
    if record.order is not None:
        attributes["eventbus.order"] = record.order
    if record.extra:
        attributes.update(record.extra)
    attributes["eventbus.outcome"] = record.outcome
    if record.root.kept:
        attributes["eventbus.kept"] = record.root.kept
    if record.failure is not None:
        attributes["error.type"] = record.failure.type
    return attributes


def _exception_event(failure: Failure, timestamp: int) -> RecordedEvent:
    assert failure.report is not None  # noqa: S101 -- seen by the caller
    attributes = {
        "exception.type": failure.type,
        "exception.message": failure.message,
        "exception.stacktrace": "".join(failure.report.format()),
        "exception.escaped": "False",
    }
    return RecordedEvent("exception", attributes, timestamp)


def _to_event(event: RecordedEvent, limits: SpanLimits) -> Event:
    attributes = _bounded(event.attributes, limits.max_event_attributes, limits.max_attribute_length)
    return Event(event.name, attributes, event.timestamp)


def _to_link(link: Link, limits: SpanLimits) -> Link:
    return Link(link.context, _bounded(link.attributes, limits.max_link_attributes, limits.max_attribute_length))


def _bounded(attributes: Any, count: int | None, length: int | None) -> BoundedAttributes:
    return BoundedAttributes(count, attributes, immutable=True, max_value_len=length)
