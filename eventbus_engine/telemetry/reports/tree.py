"""A trace as a tree in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eventbus_engine.telemetry.reports.model import ERROR, RecordedSpan, RecordedTrace, format_time

__all__ = ["format_trace", "printable"]

_TOLD = {"train.epoch": "epoch={}", "train.batch": "batch={}", "eventbus.order": "#{}", "eventbus.exit_code": "exit={}"}
"""The attributes that say where a span belongs, and how they show."""


def format_trace(trace: RecordedTrace) -> str:
    """One line for a span, indented below its parent: duration, name, outcome, order, what was skipped, links."""
    services = sorted({span.process.service for span in trace.spans})
    heading = (
        f"trace {trace.trace_id}  {format_time(trace.start_ns)}  {printable(', '.join(services))}  "
        f"{len(trace.spans):,} spans"
    )
    durations = [_ms(span.duration_ns) for span in trace.spans]
    width = max(map(len, durations))
    return "\n".join(
        [
            heading,
            *(
                f"{_ms(node.span.duration_ns):>{width}} ms  {'  ' * node.depth}{_describe(node.span)}"
                for node in trace.walk()
            ),
        ]
    )


def printable(text: str) -> str:
    """The text with what a terminal would act on escaped: a span's name may hold anything."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _describe(span: RecordedSpan) -> str:
    return "  ".join([printable(span.name), *(printable(part) for part in _details(span))])


def _details(span: RecordedSpan) -> Iterator[str]:
    attributes = span.attributes
    outcome = attributes.get("eventbus.outcome")
    if outcome is not None:
        yield str(outcome)
    for key, form in _TOLD.items():
        if key in attributes:
            yield form.format(attributes[key])
    if skipped := attributes.get("eventbus.skipped"):
        yield f"skipped: {_listed(skipped)}"
    if span.status.code == ERROR:
        yield f"error: {span.status.message or attributes.get('error.type', 'no description')}"
    for link in span.links:
        yield f"-> {link.trace_id}/{link.span_id}"


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f}"
