"""What an engine is executing right now: noted with a few stores while it runs, read from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from eventbus_engine.event import EventName
    from eventbus_engine.telemetry.spans import Activity

__all__ = ["InFlight", "Progress", "Running", "read_in_flight"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """Something that an engine is executing.

    Attributes:
        kind: `dispatch`, `algorithm` or `callback`.
        name: of the algorithm or callback; of a dispatch, its event.
        event: the event it runs on.
        elapsed: seconds since it started. A plain callback's count from the start of its stage, where all the plain
            callbacks of an event run one after another.
        background: whether it is a background callback, whose event is over.
        thread: the id of the thread that its event is handled on, as `threading.get_ident` gives it.
        span: the ids of its span, None if it has none.
        started_ns: when it started, by `time.perf_counter_ns`.
    """

    kind: Literal["dispatch", "algorithm", "callback"]
    name: str
    event: EventName
    elapsed: float
    background: bool = False
    thread: int = field(default=0, repr=False)
    span: SpanContext | None = field(default=None, repr=False)
    started_ns: int = field(default=0, repr=False)


Running: TypeAlias = "tuple[str, int, int, Activity | None]"
"""An async callback: its name, its start, its thread and its span."""


class Progress:
    """How far an event has come.

    Attributes:
        now: what runs in the task of the event, by its name; None in between.
        kind: whether that is an algorithm or a callback.
        since: when it started, by `perf_counter_ns`; of plain callbacks, when the first of them did.
        span: its span, if it has one.
        tasks: the async callbacks, by an object of their own.
    """

    __slots__ = ("background", "event", "kind", "now", "since", "span", "started", "tasks", "thread", "whole")

    def __init__(self, event: EventName) -> None:
        self.event: EventName = event
        self.started: int = perf_counter_ns()
        self.since: int = self.started
        self.thread: int = threading.get_ident()
        self.now: str | None = None
        self.kind: Literal["algorithm", "callback"] = "algorithm"
        self.span: Activity | None = None
        self.whole: Activity | None = None
        self.background: bool = False
        self.tasks: dict[object, Running] | None = None

    def begin_callbacks(self) -> None:
        """Note the start of a stage of callbacks."""
        self.kind, self.since = "callback", perf_counter_ns()

    def begin_task(self, key: object, name: str, span: Activity | None) -> None:
        """Note an async callback that starts."""
        if self.tasks is None:
            self.tasks = {}
        self.tasks[key] = name, perf_counter_ns(), threading.get_ident(), span

    def end_task(self, key: object) -> None:
        """Forget it."""
        if self.tasks is not None:
            self.tasks.pop(key, None)


def read_in_flight(dispatches: Iterable[Progress], deliveries: Iterable[Progress]) -> tuple[InFlight, ...]:
    """What these events are executing, in the order of its start."""
    now = perf_counter_ns()
    found: list[InFlight] = []

    def add(
        kind: Any, name: str, progress: Progress, since: int, thread: int, span: Activity | None, background: bool
    ) -> None:
        ids = None if span is None or not span.recording else span.span_context
        elapsed = max(0, now - since) / 1e9
        found.append(InFlight(kind, name, progress.event, elapsed, background, thread, ids, since))

    for background, group in ((False, dispatches), (True, deliveries)):
        for progress in group:
            if not background:
                add("dispatch", progress.event.name, progress, progress.started, progress.thread, progress.whole, False)
            # Read once: the thread that runs it may be done with it at any moment.
            name, kind, since, span = progress.now, progress.kind, progress.since, progress.span
            if name is not None:
                add(kind, name, progress, since, progress.thread, span, background)
            # A copy made in one step, so that no thread changes it meanwhile.
            for name, since, thread, span in tuple((progress.tasks or {}).values()):
                add("callback", name, progress, since, thread, span, background)
    return tuple(sorted(found, key=lambda record: record.started_ns))
