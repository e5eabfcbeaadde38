"""A recorded span, and a recorded trace: its spans as a tree, each parent before its children, siblings in order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

__all__ = [
    "ERROR",
    "OK",
    "Node",
    "Process",
    "RecordedSpan",
    "RecordedTrace",
    "Scope",
    "SpanEvent",
    "SpanLink",
    "Status",
    "format_time",
]

OK, ERROR = 1, 2
"""The codes of a status; 0 is UNSET."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Scope(NamedTuple):
    """The instrumentation scope: the library that made a span."""

    name: str
    version: str


class Status(NamedTuple):
    """The status of a span: 0 for UNSET, `OK` or `ERROR`, and what describes it."""

    code: int
    message: str


@dataclass(slots=True, eq=False)
class Process:
    """What an OTLP resource describes: the process that made the spans. One object for each distinct resource."""

    service: str
    attributes: dict[str, Any]


@dataclass(slots=True)
class SpanEvent:
    """Something that happened at one point of time during a span."""

    time_ns: int
    name: str
    attributes: dict[str, Any]
    dropped_attributes: int


@dataclass(slots=True)
class SpanLink:
    """A reference to a span that is not the parent, most often of another trace."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(slots=True)
class RecordedSpan:
    """A span as it was exported.

    Attributes:
        trace_id: 32 lowercase hexadecimal digits.
        span_id: 16 of them.
        parent_id: the same, empty for a root.
        name: of the span.
        kind: OTLP's `SpanKind`: 1 internal, 2 server, 3 client, 4 producer, 5 consumer, 0 unknown.
        start_ns: nanoseconds since the epoch.
        end_ns: the same, never before `start_ns`.
        attributes: in their order, as Python values.
        events: in their order.
        links: in their order.
        status: code and description.
        trace_state: the W3C `tracestate`, mostly empty.
        dropped: how many `attributes`, `events` and `links` went beyond the SDK's limits.
        process: where it was made.
        scope: the library that made it.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[SpanEvent]
    links: list[SpanLink]
    status: Status
    trace_state: str
    dropped: dict[str, int]
    process: Process
    scope: Scope

    @property
    def duration_ns(self) -> int:
        """From start to end, in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def order(self) -> float:
        """The `eventbus.order` of an algorithm; infinite for everything else, which has none."""
        order = self.attributes.get("eventbus.order")
        return order if isinstance(order, int) else math.inf


class Node(NamedTuple):
    """A span in its tree: `depth` is 0 and `parent` is None for a root, which is a span whose parent is not there."""

    span: RecordedSpan
    parent: RecordedSpan | None
    depth: int


class RecordedTrace:
    """The spans of one trace.

    Args:
        trace_id: of all of them.
        spans: in the order of the file, which is that of their ends; at least one.
    """

    def __init__(self, trace_id: str, spans: Sequence[RecordedSpan]) -> None:
        self.trace_id = trace_id
        self.spans = spans
        self.start_ns: int = min(span.start_ns for span in spans)
        self.end_ns: int = max(span.end_ns for span in spans)

    def walk(self) -> Iterator[Node]:
        """Every span once, each parent before its children, siblings in the order in which they ran.

        That is by start, then by end (of two that start in the same tick and run one after another, the first took no
        time), then by `eventbus.order`, then as in the file.
        """
        spans = self.spans
        by_id: dict[str, int] = {}
        for index, span in enumerate(spans):
            by_id.setdefault(span.span_id, index)
        children: defaultdict[int | None, list[int]] = defaultdict(list)
        for index, span in enumerate(spans):
            children[by_id.get(span.parent_id)].append(index)
        for siblings in children.values():
            siblings.sort(key=self._position)
        reached: set[int] = set()
        yield from self._descend(children[None], children, reached)
        if len(reached) < len(spans):
            # Spans that are each other's ancestors hang on no root; the earliest of them has to be one.
            left = sorted(set(range(len(spans))) - reached, key=self._position)
            yield from self._descend(left, children, reached)

    def _descend(
        self, starts: Iterable[int], children: dict[int | None, list[int]], reached: set[int]
    ) -> Iterator[Node]:
        for start in starts:
            pending: list[tuple[int, RecordedSpan | None, int]] = [(start, None, 0)]
            while pending:
                index, parent, depth = pending.pop()
                if index in reached:
                    continue
                reached.add(index)
                span = self.spans[index]
                yield Node(span, parent, depth)
                pending.extend((child, span, depth + 1) for child in reversed(children.get(index, ())))

    def _position(self, index: int) -> tuple[int, int, float, int]:
        span = self.spans[index]
        return span.start_ns, span.end_ns, span.order, index


def format_time(nanoseconds: int) -> str:
    """A time since the epoch, to the millisecond, in UTC: `2026-03-01T12:00:00.123Z`."""
    try:
        moment = _EPOCH + timedelta(milliseconds=nanoseconds // 1_000_000)
    except OverflowError:  # beyond the year 9999
        return f"{nanoseconds} ns"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
