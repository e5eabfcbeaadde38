"""What an engine is executing right now: noted with a few stores while it runs, read from any thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Literal, TypeAlias

from eventbus_engine.handlers import Handler, Occasion

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from eventbus_engine.event import EventName
    from eventbus_engine.telemetry.spans import Activity

__all__ = ["InFlight", "read_in_flight"]

Kind: TypeAlias = Literal["dispatch", "algorithm", "callback"]


_EPOCH = time_ns() - perf_counter_ns()
"""Where the monotonic clock began, by the wall clock: read once, so that the start of an event is always the same."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Something that an engine is executing.

    Attributes:
        kind: `dispatch`, `algorithm` or `callback`.
        name: of the algorithm or callback; of a dispatch, its event.
        event: the event it runs on; one named `CLOSE` where a callback is being closed.
        elapsed: seconds since it started; of a dispatch and of a plain callback, since its event was published.
        background: whether it is a background callback, whose event is over.
        thread: the id of the thread that its event is handled on, as `threading.get_ident` gives it.
        span: the ids of its span, None if it has none.
        started_ns: when it started, by `time.perf_counter_ns`.
        execution: the same whenever one execution is read, and different in every other, whatever its name.
    """

    kind: Kind
    name: str
    event: EventName
    elapsed: float
    background: bool = False
    thread: int = field(default=0, repr=False)
    span: SpanContext | None = field(default=None, repr=False)
    started_ns: int = field(default=0, repr=False)
    execution: tuple[int, ...] = field(default=(), repr=False)


def read_in_flight(dispatches: Iterable[Occasion], deliveries: Iterable[Occasion]) -> tuple[InFlight, ...]:
    """What these events are executing, in the order of its start."""
    now = perf_counter_ns()
    found: list[InFlight] = []

    def add(kind: Kind, name: str, occasion: Occasion, since: int, span: Activity | None, what: object) -> None:
        ids = None if span is None or not span.recording else span.span_context
        elapsed = max(0, now - since) / 1e9
        background = occasion.context is not None
        # No references: whoever keeps a record keeps nothing alive. What has the id of another has another start.
        execution = id(occasion), id(what), since
        found.append(InFlight(kind, name, occasion.event, elapsed, background, occasion.thread, ids, since, execution))

    for occasion in dispatches:
        add("dispatch", occasion.event.name, occasion, occasion.time_ns - _EPOCH, occasion.whole, None)
    for occasion in (*dispatches, *deliveries):
        # Read once: the thread that runs it may be done with it at any moment.
        one, since, span = occasion.now, occasion.since or occasion.time_ns - _EPOCH, occasion.span
        if one is not None:
            add("callback" if isinstance(one, Handler) else "algorithm", one.name, occasion, since, span, one)
        # A copy made in one step, so that no thread changes it meanwhile.
        for key, (name, since, span) in tuple(() if occasion.tasks is None else occasion.tasks.items()):
            add("callback", name, occasion, since, span, key)
    return tuple(sorted(found, key=lambda record: record.started_ns))
