"""The numbers of a run: for each algorithm and callback, how often it ran and what that took."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eventbus_engine.telemetry.reports.model import Node, RecordedSpan, RecordedTrace, format_time

__all__ = ["Participant", "Slowest", "Summary", "format_summary", "summarize"]

_PARTICIPANTS = ("algorithm", "callback")
_HEADINGS = ("runs", "skips", "failed", "p50 ms", "p99 ms", "total ms", "share", "slowest ms")


@dataclass(frozen=True, slots=True)
class Slowest:
    """The longest execution: its duration, the event it was for, and where in the run that was.

    Attributes:
        duration_ns: in nanoseconds.
        event: the value of the event, empty if the span does not say.
        where: `epoch 2, batch 117` if a span around it says so, else the time it started.
    """

    duration_ns: int
    event: str
    where: str


@dataclass(slots=True)
class Participant:
    """What an algorithm or a callback did.

    Attributes:
        kind: `algorithm` or `callback`.
        name: as on its spans.
        skips: on how many events it was there and did not run. Callbacks are not asked, so theirs is always 0.
        failures: how many of its executions failed, timed out or were cancelled.
        durations_ns: of its executions, nanoseconds each.
        slowest: the longest of them, None if there are none.
        waited_ns: the part of them that lies within their dispatch: for what went on in the background, nobody waited.
        step_ns: the part of `waited_ns` that lies within a step.
    """

    kind: str
    name: str
    skips: int = 0
    failures: int = 0
    durations_ns: array[int] = field(default_factory=lambda: array("Q"))
    slowest: Slowest | None = None
    waited_ns: int = 0
    step_ns: int = 0

    @property
    def runs(self) -> int:
        """How often it ran."""
        return len(self.durations_ns)

    @property
    def total_ns(self) -> int:
        """What its executions took together, in nanoseconds."""
        return sum(self.durations_ns)

    def percentiles_ns(self, *ranks: float) -> list[int]:
        """For each rank, the shortest duration that `rank` percent do not exceed (nearest rank). It has to have run."""
        ordered = sorted(self.durations_ns)
        return [ordered[max(0, math.ceil(rank * len(ordered) / 100) - 1)] for rank in ranks]

    def add(self, span: RecordedSpan, waited_ns: int, in_step: bool, place: str) -> None:
        """Count one execution."""
        duration = span.duration_ns
        self.durations_ns.append(duration)
        self.failures += span.attributes.get("eventbus.outcome", "ok") != "ok"
        self.waited_ns += waited_ns
        self.step_ns += waited_ns * in_step
        if self.slowest is None or duration > self.slowest.duration_ns:
            event = str(span.attributes.get("eventbus.event", ""))
            self.slowest = Slowest(duration, event, place or format_time(span.start_ns))


@dataclass(slots=True)
class Summary:
    """What a recording holds.

    Attributes:
        spans: how many.
        traces: how many.
        dispatches: how many events were dispatched.
        dispatch_ns: what the outermost of them took together, nanoseconds.
        steps: how many batches were trained on.
        steps_ns: what they took together, nanoseconds.
        participants: the algorithms, then the callbacks, each in the order of what they took.
    """

    spans: int = 0
    traces: int = 0
    dispatches: int = 0
    dispatch_ns: int = 0
    steps: int = 0
    steps_ns: int = 0
    participants: Sequence[Participant] = ()

    def share(self, participant: Participant) -> float:
        """The part of the steps that a participant took; of the dispatches, where the run has no steps.

        Callbacks run concurrently, so shares may add up to more than 1. NaN if there is nothing to have a part in.
        """
        taken, whole = (participant.step_ns, self.steps_ns) if self.steps else (participant.waited_ns, self.dispatch_ns)
        return taken / whole if whole else math.nan


def summarize(traces: Iterable[RecordedTrace]) -> Summary:
    """Add up traces, one at a time; of each execution nothing is kept but its duration."""
    summary = Summary()
    known: dict[tuple[str, str], Participant] = {}
    for trace in traces:
        summary.traces += 1
        summary.spans += len(trace.spans)
        _add_trace(trace, summary, known)
    summary.participants = sorted(known.values(), key=lambda one: (one.kind, -one.total_ns, one.name))
    return summary


@dataclass(frozen=True, slots=True)
class _Around:
    """What a span hands down to those below it."""

    step_end_ns: int = 0
    dispatch_end_ns: int | None = None
    place: str = ""


def _add_trace(trace: RecordedTrace, summary: Summary, known: dict[tuple[str, str], Participant]) -> None:
    around: dict[int, _Around] = {}
    for node in trace.walk():
        span = node.span
        outer = around.get(id(node.parent), _Around())
        kind = span.attributes.get("eventbus.kind")
        around[id(span)] = _inside(node, outer)
        if _is_step(span):
            summary.steps += 1
            summary.steps_ns += span.duration_ns
        elif kind == "dispatch":
            summary.dispatches += 1
            if outer.dispatch_end_ns is None:
                summary.dispatch_ns += span.duration_ns
            for name in _names(span.attributes.get("eventbus.skipped")):
                _participant(known, "algorithm", name).skips += 1
        elif kind in _PARTICIPANTS:
            name = span.name.removeprefix(f"{kind} ")
            # What a dispatch and a batch have below them may come after them: background callbacks, checkpoints.
            end_ns = span.end_ns if outer.dispatch_end_ns is None else min(span.end_ns, outer.dispatch_end_ns)
            waited_ns = max(0, end_ns - span.start_ns)
            in_step = span.start_ns < outer.step_end_ns
            _participant(known, kind, name).add(span, waited_ns, in_step, around[id(span)].place)


def _is_step(span: RecordedSpan) -> bool:
    # A batch that found no data left is named otherwise in the end.
    return span.name == span.attributes.get("eventbus.kind") == "batch"


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _inside(node: Node, outer: _Around) -> _Around:
    span, attributes = node.span, node.span.attributes
    parts = [f"{unit} {attributes[key]}" for unit in ("epoch", "batch") if (key := f"train.{unit}") in attributes]
    return _Around(
        step_end_ns=span.end_ns if _is_step(span) else outer.step_end_ns,
        dispatch_end_ns=span.end_ns if attributes.get("eventbus.kind") == "dispatch" else outer.dispatch_end_ns,
        place=", ".join(parts) or outer.place,
    )


def _participant(known: dict[tuple[str, str], Participant], kind: str, name: str) -> Participant:
    key = kind, name
    found = known.get(key)
    if found is None:
        found = known[key] = Participant(kind, name)
    return found


def format_summary(summary: Summary) -> str:
    """A table for the terminal: a line for each algorithm and callback, durations in milliseconds."""
    lines = [f"{summary.spans:,} spans in {summary.traces:,} traces, {summary.dispatches:,} dispatches"]
    if summary.steps:
        mean = summary.steps_ns / summary.steps
        lines.append(f"{summary.steps:,} steps of {_ms(mean)} ms on average; shares are of these")
    else:
        lines.append("no batches of a training run; shares are of the dispatches")
    for kind in _PARTICIPANTS:
        ours = [one for one in summary.participants if one.kind == kind]
        if ours:
            lines += ["", *_table([(kind, *_HEADINGS), *(_row(summary, one) for one in ours)])]
    return "\n".join(lines)


def _row(summary: Summary, one: Participant) -> tuple[str, ...]:
    skips = f"{one.skips:,}" if one.kind == "algorithm" else "-"
    if one.slowest is None:
        return (one.name, "0", skips, *"------")
    p50, p99 = one.percentiles_ns(50, 99)
    share = summary.share(one)
    slowest = ", ".join(part for part in (one.slowest.event, one.slowest.where) if part)
    return (
        one.name,
        f"{one.runs:,}",
        skips,
        f"{one.failures:,}",
        _ms(p50),
        _ms(p99),
        _ms(one.total_ns),
        "-" if math.isnan(share) else f"{share:.1%}",
        f"{_ms(one.slowest.duration_ns)}  {slowest}",
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side: the first to the left, the last as it is, those between to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True))]
        )
        + f"  {row[-1]}"
        for row in rows
    ]


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.3f}"
