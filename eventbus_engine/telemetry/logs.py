"""Log records that say which event they were written in: `add_event_context`, a processor for structlog."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from opentelemetry.trace import format_span_id, format_trace_id, get_current_span

from eventbus_engine.envelope import current_envelope
from eventbus_engine.trace import step_of

__all__ = ["add_event_context"]


def add_event_context(logger: Any, method_name: str, event_dict: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add `bus_event`, `step`, `trace_id` and `span_id` to records that are written while an event runs.

    `bus_event` is the event's value (structlog keeps `event` for the message), `step` the one of the trace lines,
    where the state has a timestamp; the ids, in hexadecimal, are there while tracing is on. A key that the record
    has already is left as it is.

    Example:
        >>> import structlog
        >>> structlog.configure(processors=[add_event_context, structlog.processors.JSONRenderer()])  # doctest: +SKIP
    """
    envelope = current_envelope()
    if envelope is None:
        return event_dict
    event_dict.setdefault("bus_event", envelope.event.value)
    if (step := step_of(envelope.event, envelope.state)) is not None:
        event_dict.setdefault("step", step)
    context = get_current_span().get_span_context()
    if context.is_valid:
        event_dict.setdefault("trace_id", format_trace_id(context.trace_id))
        event_dict.setdefault("span_id", format_span_id(context.span_id))
    return event_dict
