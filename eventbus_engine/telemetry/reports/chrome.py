"""The recording in Chrome's trace event format, for Perfetto (https://ui.perfetto.dev) and `chrome://tracing`.

The format is that of "Trace Event Format" (Google, 2016): complete events (`"ph": "X"`) on tracks, a track being a
process and a thread id. On one track events have to nest; a viewer drops what overlaps otherwise. So what runs
concurrently goes to tracks of its own.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from typing import TextIO

from eventbus_engine.telemetry.reports.decode import Json
from eventbus_engine.telemetry.reports.model import Process, RecordedSpan, RecordedTrace
from eventbus_engine.telemetry.reports.plain import plain
from eventbus_engine.telemetry.reports.reader import Extent, Recording

__all__ = ["write_chrome"]


def write_chrome(recording: Recording, out: TextIO) -> None:
    """Write all spans as events, a trace as soon as it is complete, and then the names of the tracks.

    Times are in whole microseconds: a viewer that cuts fractions of its own would let a child outlast its parent.

    Raises:
        SpanFileError: a line of the recording is no request.
    """
    tracks = _Tracks(recording.index())
    out.write('{"displayTimeUnit":"ms","traceEvents":[')
    separator = "\n"
    for trace in recording.traces():
        for event in _events(trace, tracks):
            out.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
            separator = ",\n"
    for event in tracks.names():
        out.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
        separator = ",\n"
    out.write("\n]}\n")


def _events(trace: RecordedTrace, tracks: _Tracks) -> Iterator[Json]:
    lanes: dict[Process, _Lanes] = {}
    # By start, as the lanes need it; of two that start together the parent comes first, as `walk` has it.
    for node in sorted(trace.walk(), key=lambda node: node.span.start_ns // 1000):
        span = node.span
        lane = lanes.setdefault(span.process, _Lanes()).place(span, node.parent)
        place = tracks.place(span.process, trace.trace_id, lane)
        start = span.start_ns // 1000
        yield {
            "ph": "X",
            "name": span.name,
            "cat": str(span.attributes.get("eventbus.kind", "span")),
            "ts": start,
            "dur": span.end_ns // 1000 - start,
            **place,
            "args": _arguments(span),
        }
        for event in span.events:
            yield {
                "ph": "i",
                "s": "t",
                "name": event.name,
                "cat": "event",
                "ts": event.time_ns // 1000,
                **place,
                "args": plain(event.attributes),
            }


def _arguments(span: RecordedSpan) -> Json:
    """What shows when a slice is selected. The names in capitals are nobody's attributes."""
    arguments: Json = plain(span.attributes)
    arguments["ID"] = f"{span.trace_id}/{span.span_id}"
    arguments["NANOSECONDS"] = span.duration_ns
    if span.parent_id:
        arguments["PARENT"] = span.parent_id
    if span.links:
        arguments["LINKS"] = [f"{link.trace_id}/{link.span_id}" for link in span.links]
    if span.status.message:
        arguments["STATUS"] = span.status.message
    return arguments


class _Tracks:
    """Process and thread ids. Traces that overlap in time get slots of their own; a trace has a track for each lane."""

    def __init__(self, index: Mapping[str, Extent]) -> None:
        self._slots = _assign_slots(index)
        self._processes: dict[Process, int] = {}
        self._threads: dict[tuple[int, int, int], int] = {}

    def place(self, process: Process, trace_id: str, lane: int) -> Json:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        key = pid, self._slots[trace_id], lane
        return {"pid": pid, "tid": self._threads.setdefault(key, len(self._threads) + 1)}

    def names(self) -> Iterator[Json]:
        """The metadata events: how the tracks are called, and in which order they show."""
        for process, pid in self._processes.items():
            yield _metadata("process_name", {"pid": pid}, name=process.service)
        for position, (pid, slot, lane) in enumerate(sorted(self._threads)):
            place = {"pid": pid, "tid": self._threads[pid, slot, lane]}
            name = f"traces {slot + 1}" if lane == 0 else f"traces {slot + 1}, concurrent {lane}"
            yield _metadata("thread_name", place, name=name)
            yield _metadata("thread_sort_index", place, sort_index=position)


def _metadata(what: str, place: Json, **arguments: str | int) -> Json:
    return {"ph": "M", "name": what, **place, "args": arguments}


def _assign_slots(index: Mapping[str, Extent]) -> dict[str, int]:
    """For each trace the lowest slot that no trace before it still takes."""
    slots: dict[str, int] = {}
    free = _FreeNumbers()
    for trace_id in sorted(index, key=lambda trace_id: index[trace_id].start_ns):
        extent = index[trace_id]
        slots[trace_id] = free.take(extent.start_ns // 1000, extent.end_ns // 1000)
    return slots


class _Lanes:
    """The lanes of one trace in one process. On a lane, spans nest or follow each other."""

    def __init__(self) -> None:
        self._free = _FreeNumbers()
        self._open: dict[int, list[RecordedSpan]] = {}
        self._lane_of: dict[int, int] = {}

    def place(self, span: RecordedSpan, parent: RecordedSpan | None) -> int:
        """The lane of a span: on top of its parent where it fits there, else the lowest that is free.

        Called in the order of the starts, in whole microseconds.
        """
        start, end = span.start_ns // 1000, span.end_ns // 1000
        if parent is not None and (lane := self._lane_of.get(id(parent))) is not None:
            stack = self._open[lane]
            while stack and stack[-1] is not parent and stack[-1].end_ns // 1000 <= start:
                stack.pop()
            if stack and stack[-1] is parent and end <= parent.end_ns // 1000:
                stack.append(span)
                self._lane_of[id(span)] = lane
                return lane
        lane = self._free.take(start, end)
        self._open[lane] = [span]
        self._lane_of[id(span)] = lane
        return lane


class _FreeNumbers:
    """Hands out the lowest number that is not taken, each from one time to another."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._count = 0

    def take(self, start: int, end: int) -> int:
        """Take a number. `start` never decreases from call to call."""
        while self._taken and self._taken[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._taken)[1])
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = self._count
            self._count += 1
        heapq.heappush(self._taken, (end, number))
        return number
