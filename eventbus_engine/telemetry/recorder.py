"""The hot path of tracing: spans noted down as light records, for another thread to build, encode and send.

A record is at the same time the live span that user code finds in the current context: its ids never change, and what
is set on it before its end goes with it. Nothing here needs the SDK.
"""

from __future__ import annotations

import os
import random
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace as otel
from opentelemetry.context import Context, attach, get_current
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, TraceState

from eventbus_engine.telemetry.spans import Activity, EngineTracer, Template, describe_error, type_name

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from eventbus_engine.trace import Outcome

__all__ = ["Failure", "RecordedEvent", "RecordedSpan", "Recorder"]

# The key under which a context keeps its current span, as the API itself puts it there.
(_SPAN,) = otel.set_span_in_context(otel.INVALID_SPAN, Context())
_SAMPLED = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
_NO_STATE = TraceState()


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


class _Root:
    """What the spans share that one sampling decision was made for."""

    __slots__ = ("flags", "offset", "recorder", "state", "trace_id")

    def __init__(self, recorder: Recorder, trace_id: int, flags: TraceFlags, state: TraceState) -> None:
        self.recorder: Recorder = recorder
        self.trace_id: int = trace_id
        self.flags: TraceFlags = flags
        self.state: TraceState = state
        # A monotonic clock within, so that no bar has a negative length; the wall clock anew for every root.
        self.offset: int = time.time_ns() - perf_counter_ns()


class RecordedSpan(otel.Span):
    """A span as the hot path leaves it, and as user code sees it while it lasts.

    Attributes:
        template: its name and constant attributes.
        root: trace id, flags and clock.
        span_id: its id.
        parent_id: of its parent, 0 if it has none.
        start: nanoseconds since the epoch.
        end_time: likewise; 0 until it has ended.
        order: the value of `eventbus.order`, None if it has none.
        outcome: how it ended.
        extra: attributes set after its start, None if there are none.
    """

    __slots__ = ("_known", "end_time", "extra", "order", "outcome", "parent_id", "root", "span_id", "start", "template")
    template: Template
    root: _Root
    span_id: int
    parent_id: int
    start: int
    end_time: int
    order: int | None
    outcome: str
    extra: dict[str, Any] | None
    _known: SpanContext | None

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

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        if self._known is None:
            root = self.root
            self._known = SpanContext(root.trace_id, self.span_id, False, root.flags, root.state)
        return self._known

    def is_recording(self) -> bool:
        """Whether it has not ended yet."""
        return not self.end_time

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute; one that is set already changes its value."""
        if self.end_time:
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
        if not self.end_time:
            copied = dict(attributes) if attributes else None
            self.events = (*self.events, RecordedEvent(name, copied, timestamp or perf_counter_ns() + self.root.offset))

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        """Add a link to another span."""
        if not self.end_time:
            self.links = (*self.links, Link(context, attributes))

    def update_name(self, name: str) -> None:
        """Give it another name."""
        if not self.end_time:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set its status, unless it has been found OK already. The engine's own verdict, a failure, beats it."""
        if self.end_time or (self.status is not None and self.status.status_code is StatusCode.OK):
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

    def end(self, end_time: int | None = None) -> None:
        """Do nothing: the engine ends its spans itself."""


class _RecordedActivity(Activity):
    __slots__ = ("_outer", "_span")
    _span: RecordedSpan
    _outer: Context

    def enter(self) -> None:
        """Make it current here."""
        self._outer = outer = get_current()
        attach(Context({**outer, _SPAN: self._span}))

    def leave(self) -> None:
        """Make current again what was so before."""
        attach(self._outer)

    @property
    def recording(self) -> bool:
        """True: what is not recorded has no such activity."""
        return True

    @property
    def span_context(self) -> SpanContext:
        """What others link to."""
        return self._span.get_span_context()

    def set(self, key: str, value: Any) -> None:
        """Set an attribute."""
        span = self._span
        if span.extra is None and type(value) is not list:
            span.extra = {key: value}
        else:
            span.set_attribute(key, value)

    def rename(self, name: str) -> None:
        """Give it another name."""
        self._span.update_name(name)

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """End it, and hand it on."""
        attach(self._outer)
        span = self._span
        span.outcome = outcome
        if error is not None:
            span.failure = Failure.of(outcome, error)
        root = span.root
        span.end_time = perf_counter_ns() + root.offset
        root.recorder.put(span)


class _Nothing(Activity):
    """A span that is not recorded and not current either: what runs in it belongs to what is around it."""

    __slots__ = ()

    def enter(self) -> None:
        """Leave what is current as it is."""

    def leave(self) -> None:
        """Leave what is current as it is."""

    @property
    def recording(self) -> bool:
        """False."""
        return False

    @property
    def span_context(self) -> SpanContext:
        """That of the span around it."""
        return otel.get_current_span().get_span_context()

    def set(self, key: str, value: Any) -> None:
        """Forget it."""

    def rename(self, name: str) -> None:
        """Forget it."""

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """Nothing comes of it."""


class _SampledOut(_Nothing):
    """The root of a trace that is not recorded: current, so that nothing below it is recorded either."""

    __slots__ = ("_context", "_outer")
    _context: Context
    _outer: Context

    def enter(self) -> None:
        """Make it current here."""
        self._outer = get_current()
        attach(self._context)

    def leave(self) -> None:
        """Make current again what was so before."""
        attach(self._outer)

    @property
    def span_context(self) -> SpanContext:
        """Its ids, not sampled."""
        return otel.get_current_span(self._context).get_span_context()

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """Nothing comes of it."""
        attach(self._outer)


class _UnsampledSpan(NonRecordingSpan):
    """Marks a context in which nothing is recorded."""


_NOTHING = object.__new__(_Nothing)


class Recorder(EngineTracer):
    """Notes spans down.

    Args:
        sampler: asked once for every root: a span whose parent, if it has one, is not the recorder's own. None takes
            whatever has no parent, and otherwise what its parent has.
        put: takes every span that has ended.
        off: kinds of spans that are not recorded.

    Attributes:
        live: the tracer to open live spans with instead, once somebody wants to see them live.
    """

    __slots__ = ("__weakref__", "_off", "_random", "_sampler", "live", "put")

    def __init__(
        self, sampler: Sampler | None, put: Callable[[RecordedSpan], None], off: frozenset[str] = frozenset()
    ) -> None:
        self._off = off
        self._sampler = sampler
        self.put: Callable[[RecordedSpan], None] = put
        self.live: EngineTracer | None = None
        self._seed()
        if hasattr(os, "register_at_fork"):
            # A forked child would go on drawing the ids that its parent draws. Weak: nothing unregisters a hook.
            seed = weakref.WeakMethod(self._seed)
            os.register_at_fork(after_in_child=lambda: (reseed := seed()) and reseed())

    def _seed(self) -> None:
        self._random = random.Random(int.from_bytes(os.urandom(32), "big"))

    def open(
        self, template: Template, *, order: int | None = None, links: Sequence[Link] = (), root: bool = False
    ) -> Activity:
        """Open a span and make it current."""
        if self._off and template.kind in self._off:
            return _NOTHING
        if self.live is not None:
            return self.live.open(template, order=order, links=links, root=root)
        outer = get_current()
        parent = outer.get(_SPAN) if not root else None
        alone = parent is not None and len(outer) == 1
        span = object.__new__(RecordedSpan)
        span.extra = span._known = None
        if type(parent) is RecordedSpan and parent.root.recorder is self:
            shared = span.root = parent.root
            span.parent_id = parent.span_id
        elif type(parent) is _UnsampledSpan:
            return _NOTHING
        else:
            refused = self._decide(span, template, order, links, outer, root)
            if refused is not None:
                return refused
            shared = span.root
        span.template = template
        span.span_id = self._random.getrandbits(64) or 1
        span.order = order
        span.end_time = 0
        if links:
            span.links = tuple(links)
        activity = object.__new__(_RecordedActivity)
        activity._span, activity._outer = span, outer
        # One of its own for every span, and never changed: a task that a handler leaves behind keeps reading its ids.
        attach(Context({_SPAN: span} if alone else {**outer, _SPAN: span}))
        span.start = perf_counter_ns() + shared.offset
        return activity

    def _decide(
        self,
        span: RecordedSpan,
        template: Template,
        order: int | None,
        links: Sequence[Link],
        current: Context,
        root: bool,
    ) -> Activity | None:
        """Ask the sampler; returns what to open instead, or None after filling in what a root has of its own."""
        context = Context() if root else current
        around = otel.get_current_span(context).get_span_context()
        trace_id = around.trace_id if around.is_valid else self._random.getrandbits(128) or 1
        random_id = around.trace_flags & TraceFlags.RANDOM_TRACE_ID if around.is_valid else TraceFlags.RANDOM_TRACE_ID
        if self._sampler is None:
            sampled = not around.is_valid or bool(around.trace_flags.sampled)
            state = around.trace_state
        else:
            given = template.attributes if order is None else {**template.attributes, "eventbus.order": order}
            kind = otel.SpanKind.INTERNAL
            result = self._sampler.should_sample(context, trace_id, template.name, kind, given, links)
            sampled = result.decision.is_sampled()  # type: ignore[no-untyped-call]
            state = result.trace_state or _NO_STATE
            if result.attributes and len(result.attributes) > len(given):
                span.extra = {key: value for key, value in result.attributes.items() if key not in given}
        if not sampled:
            ids = SpanContext(trace_id, self._random.getrandbits(64) or 1, False, TraceFlags(random_id), state)
            silent = object.__new__(_SampledOut)
            silent._context = otel.set_span_in_context(_UnsampledSpan(ids), current)
            silent.enter()
            return silent
        flags = _SAMPLED if random_id else TraceFlags(TraceFlags.SAMPLED)
        span.root = _Root(self, trace_id, flags, state)
        span.parent_id = around.span_id if around.is_valid else 0
        if around.is_remote:
            span.remote_parent = around
        return None
