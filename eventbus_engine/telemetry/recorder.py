"""The hot path of tracing: `Recorder` notes spans down as records, and decides once for each root whether to."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as otel
from opentelemetry.context import Context, create_key
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, TraceState

from eventbus_engine.telemetry.records import (
    SPAN_KEY,
    Failure,
    RecordedEvent,
    RecordedSpan,
    Root,
    current_context,
    set_context,
)
from eventbus_engine.telemetry.spans import Activity, EngineTracer, Template
from eventbus_engine.telemetry.tail import HeldRoot

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from eventbus_engine.telemetry.tail import TailKeeper
    from eventbus_engine.trace import Outcome

__all__ = ["Failure", "RecordedEvent", "RecordedSpan", "Recorder"]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
_NO_STATE = TraceState()
_new: Callable[[type[RecordedSpan]], RecordedSpan] = object.__new__
# Where a context keeps the root that everything in it will follow, also below spans of the user's.
_HELD = create_key("eventbus-held-root")


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
        self._outer = current_context()
        set_context(self._context)

    def leave(self) -> None:
        """Make current again what was so before."""
        set_context(self._outer)

    @property
    def span_context(self) -> SpanContext:
        """Its ids, not sampled."""
        return otel.get_current_span(self._context).get_span_context()

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """Nothing comes of it."""
        set_context(self._outer)


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
        keeper: holds the spans of the roots that are refused, in case they fail or take long; None for nobody.

    Attributes:
        live: the tracer to open live spans with instead, once somebody wants to see them live.
        open_spans: those that have not ended. Taking one out is the right to hand it on.
    """

    __slots__ = ("__weakref__", "_bits", "_keeper", "_off", "_sampler", "live", "open_spans", "put")

    def __init__(
        self,
        sampler: Sampler | None,
        put: Callable[[RecordedSpan], None],
        off: frozenset[str] = frozenset(),
        keeper: TailKeeper | None = None,
    ) -> None:
        self._keeper = keeper
        self._off = off
        self._sampler = sampler
        self.put: Callable[[RecordedSpan], None] = put
        self.live: EngineTracer | None = None
        self._start_afresh()
        if hasattr(os, "register_at_fork"):
            # A forked child would draw its parent's ids, and end its parent's spans. Weak: nothing unregisters a hook.
            afresh = weakref.WeakMethod(self._start_afresh)
            os.register_at_fork(after_in_child=lambda: (start := afresh()) and start())

    def _start_afresh(self) -> None:
        self.open_spans: set[RecordedSpan] = set()
        self._bits = random.Random(int.from_bytes(os.urandom(32), "big")).getrandbits

    def open(
        self, template: Template, *, order: int | None = None, links: Sequence[Link] = (), root: bool = False
    ) -> Activity:
        """Open a span and make it current."""
        if self._off and template.kind in self._off:
            return _NOTHING
        if self.live is not None:
            return self.live.open(template, order=order, links=links, root=root)
        inner = outer = current_context()
        parent = None if root else outer.get(SPAN_KEY)
        span = _new(RecordedSpan)
        span.extra = span._known = None
        if type(parent) is RecordedSpan and parent.root.recorder is self:
            span.root = parent.root
            span.parent_id = parent.span_id
        elif parent is None and self._sampler is None:
            span.root = Root(self, self.put, self._bits(128) or 1, _SAMPLED, _NO_STATE)
            span.parent_id = 0
        elif type(parent) is _UnsampledSpan:
            return _NOTHING
        else:
            refused = self._decide(span, template, order, links, outer, root)
            if refused is not None:
                return refused
            if type(span.root) is HeldRoot:
                inner = Context({**outer, _HELD: span.root})
        span.template = template
        span.span_id = self._bits(64) or 1
        span.order = order
        span._ended = 0
        span._outer = outer
        if links:
            span.links = tuple(links)
        # One of its own for every span, and never changed: a task that a handler leaves behind keeps reading its ids.
        set_context(Context({SPAN_KEY: span} if parent is not None and len(inner) == 1 else {**inner, SPAN_KEY: span}))
        span._began = perf_counter_ns()
        # Last: another thread may hand on what is in there at any moment.
        self.open_spans.add(span)
        return span

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
        trace_id = around.trace_id if around.is_valid else self._bits(128) or 1
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
        if sampled:
            span.root = Root(self, self.put, trace_id, _SAMPLED if random_id else TraceFlags(TraceFlags.SAMPLED), state)
        elif self._keeper is not None:
            span.root = self._hold(span, context, trace_id, TraceFlags(random_id), state)
        else:
            ids = SpanContext(trace_id, self._bits(64) or 1, False, TraceFlags(random_id), state)
            silent = object.__new__(_SampledOut)
            silent._context = otel.set_span_in_context(_UnsampledSpan(ids), current)
            silent.enter()
            return silent
        span.parent_id = around.span_id if around.is_valid else 0
        if around.is_remote:
            span.remote_parent = around
        return None

    def _hold(
        self, span: RecordedSpan, context: Context, trace_id: int, flags: TraceFlags, state: TraceState
    ) -> HeldRoot:
        """A root to be decided about at its end; the one around it where only a span of the user's is in between."""
        assert self._keeper is not None  # noqa: S101 -- seen by the caller
        around = context.get(_HELD)
        if isinstance(around, HeldRoot) and around.recorder is self and around.trace_id == trace_id:
            return around
        root = HeldRoot(self, self._keeper.put, trace_id, flags, state)
        root.first = span
        return root
