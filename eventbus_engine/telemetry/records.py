"""A span as a light record: what the hot path notes down, for another thread to build, encode and send.

A record is at the same time the live span that user code finds in the current context: its ids never change, and what
is set on it before its end goes with it. Nothing here needs the SDK.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import copy_context
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace as otel
from opentelemetry.context import Context, attach, get_current
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, TraceState

from eventbus_engine.telemetry.spans import Activity, EngineTracer, Template, describe_error, type_name

if TYPE_CHECKING:
    from eventbus_engine.telemetry.recorder import Recorder
    from eventbus_engine.trace import Outcome

__all__ = ["SPAN_KEY", "Failure", "RecordedEvent", "RecordedSpan", "Root", "current_context", "set_context"]

# The key under which a context keeps its current span, as the API itself puts it there.
(SPAN_KEY,) = otel.set_span_in_context(otel.INVALID_SPAN, Context())
_NO_CONTEXT = Context()


def find_context_accessors() -> tuple[Callable[[], Context], Callable[[Context], Any]]:
    """What reads and sets the current context, at a third of the price of `get_current` and `attach`.

    Where the API keeps it in a context variable and does nothing else, that variable's own methods do. It is found by
    what `attach` changes, so that no private name is needed.

    Returns:
        The functions of the API if there is no such variable, or if another implementation is configured.
    """
    if os.environ.get("OTEL_PYTHON_CONTEXT", "contextvars_context") == "contextvars_context":
        mark, aside = Context(), copy_context()
        aside.run(attach, mark)
        for variable, value in aside.items():
            if value is mark:
                return variable.get, variable.set
    return get_current, attach


_accessors = find_context_accessors()
current_context: Callable[[], Context] = _accessors[0]
set_context: Callable[[Context], Any] = _accessors[1]


class Failure(NamedTuple):
    """What is kept of an exception: no frames, so that nothing they hold lives longer for being traced."""

    type: str
    message: str
    description: str
    report: traceback.TracebackException | None

    @classmethod
    def of(cls, outcome: Outcome, error: BaseException) -> Failure:
        """Take down an exception. Its traceback is formatted, and its source lines are read, by whoever wants it."""
        report = None
        if outcome != "cancelled":
            report = traceback.TracebackException(type(error), error, error.__traceback__, lookup_lines=False)
        return cls(type_name(error), str(error), describe_error(error), report)


class RecordedEvent(NamedTuple):
    """A span event that user code added."""

    name: str
    attributes: Mapping[str, Any] | None
    timestamp: int


class Root:
    """What the spans share that one sampling decision was made for.

    Args:
        recorder: of all of them.
        put: takes those that have ended.
        trace_id: of all of them.
        flags: likewise, as they are propagated.
        state: likewise.
    """

    __slots__ = ("flags", "offset", "put", "recorder", "state", "trace_id")
    # The value of `eventbus.kept`, for a root that the head decision had refused.
    kept: str = ""

    def __init__(
        self,
        recorder: Recorder,
        put: Callable[[RecordedSpan], None],
        trace_id: int,
        flags: TraceFlags,
        state: TraceState,
    ) -> None:
        self.recorder: Recorder = recorder
        self.put: Callable[[RecordedSpan], None] = put
        self.trace_id: int = trace_id
        self.flags: TraceFlags = flags
        self.state: TraceState = state
        # A monotonic clock within, so that no bar has a negative length; the wall clock anew for every root.
        self.offset: int = time.time_ns() - perf_counter_ns()


class RecordedSpan(otel.Span, Activity):
    """A span as the hot path leaves it, as the engine handles it, and as user code sees it while it lasts.

    Attributes:
        template: its name and constant attributes.
        root: trace id, flags and clock.
        span_id: its id.
        parent_id: of its parent, 0 if it has none.
        order: the value of `eventbus.order`, None if it has none.
        outcome: how it ended.
        extra: attributes set after its start, None if there are none.
    """

    __slots__ = (
        "_ended",
        "_known",
        "_outer",
        "began",
        "extra",
        "order",
        "outcome",
        "parent_id",
        "root",
        "span_id",
        "template",
    )
    template: Template
    root: Root
    span_id: int
    parent_id: int
    order: int | None
    outcome: str
    extra: dict[str, Any] | None
    began: int
    _ended: int
    _known: SpanContext | None
    _outer: Context

    # What few spans have lives in the instance's dictionary, where it costs the others nothing.
    name: str | None = None
    remote_parent: SpanContext | None = None
    failure: Failure | None = None
    status: Status | None = None
    events: tuple[RecordedEvent, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it has nothing that few spans have."""
        return not self.__dict__

    @property
    def start(self) -> int:
        """Nanoseconds since the epoch."""
        return self.began + self.root.offset

    @property
    def end_time(self) -> int:
        """Likewise; 0 until it has ended."""
        return self._ended and self._ended + self.root.offset

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        if self._known is None:
            root = self.root
            self._known = SpanContext(root.trace_id, self.span_id, False, root.flags, root.state)
        return self._known

    def is_recording(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute; one that is set already changes its value."""
        if self._ended:
            return
        if isinstance(value, list):
            value = tuple(value)
        if self.extra is None:
            self.extra = {key: value}
        else:
            self.extra[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set several."""
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        """Add an event."""
        if not self._ended:
            copied = dict(attributes) if attributes else None
            self.events = (*self.events, RecordedEvent(name, copied, timestamp or perf_counter_ns() + self.root.offset))

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        """Add a link to another span."""
        if not self._ended:
            self.links = (*self.links, Link(context, attributes))

    def update_name(self, name: str) -> None:
        """Give it another name."""
        if not self._ended:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set its status, unless it has been found OK already. The engine's own verdict, a failure, beats it."""
        if self._ended or (self.status is not None and self.status.status_code is StatusCode.OK):
            return
        self.status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Add an event that tells of an exception."""
        known = {
            "exception.type": type_name(exception),
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**known, **(attributes or {})}, timestamp)

    def end(  # type: ignore[override]
        self,
        outcome: Outcome | int | None = None,
        error: BaseException | None = None,
        at: int = 0,
        *,
        end_time: int | None = None,
    ) -> None:
        """End it, and hand it on: with an outcome, as the engine calls it. Without one it is not for users to end."""
        if type(outcome) is not str:
            return
        set_context(self._outer)
        # What is around it need not live until it is exported.
        self._outer = _NO_CONTEXT
        root = self.root
        try:
            root.recorder.open_spans.remove(self)
        except KeyError:  # tracing ended before it, or this is a forked child and the span its parent's
            return
        self.outcome = outcome
        if error is not None:
            self.failure = Failure.of(outcome, error)
        self._ended = at or perf_counter_ns()
        root.put(self)

    def end_now(self) -> None:
        """Hand it on as it is, if nobody else does: tracing ends before it."""
        try:
            self.root.recorder.open_spans.remove(self)
        except KeyError:
            return
        self.set_attribute("eventbus.in_flight", True)
        self.set_status(StatusCode.ERROR, "had not ended when tracing ended")
        self.outcome = "in_flight"
        self._ended = perf_counter_ns()
        self.root.put(self)

    def enter(self) -> None:
        """Make it current here."""
        self._outer = outer = current_context()
        set_context(Context({**outer, SPAN_KEY: self}))

    def leave(self) -> None:
        """Make current again what was so before."""
        set_context(self._outer)

    @property
    def recording(self) -> bool:
        """True: what is not recorded is of another class."""
        return True

    def below(self, tracer: EngineTracer) -> EngineTracer:
        """That tracer."""
        return tracer

    @property
    def span_context(self) -> SpanContext:
        """What others link to."""
        return self.get_span_context()

    def set(self, key: str, value: Any) -> None:
        """Set an attribute."""
        if self.extra is None and type(value) is not list:
            self.extra = {key: value}
        else:
            self.set_attribute(key, value)

    def rename(self, name: str) -> None:
        """Give it another name."""
        self.update_name(name)
