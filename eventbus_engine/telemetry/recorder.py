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
from eventbus_engine.telemetry.sampling import quick_verdict
from eventbus_engine.telemetry.spans import Activity, EngineTracer, Template
from eventbus_engine.telemetry.tail import HeldRoot

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from eventbus_engine.telemetry.tail import TailKeeper
    from eventbus_engine.trace import Outcome

__all__ = ["Failure", "RecordedEvent", "RecordedSpan", "Recorder"]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
_UNSAMPLED = TraceFlags(TraceFlags.RANDOM_TRACE_ID)
_NO_STATE = TraceState()
_new: Callable[[type[RecordedSpan]], RecordedSpan] = object.__new__
_new_silent: Callable[[type[_SampledOut]], _SampledOut] = object.__new__
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

    def below(self, tracer: EngineTracer) -> EngineTracer | None:
        """None."""
        return None

    @property
    def span_context(self) -> SpanContext:
        """That of the span around it."""
        return otel.get_current_span().get_span_context()

    def set(self, key: str, value: Any) -> None:
        """Forget it."""

    def rename(self, name: str) -> None:
        """Forget it."""

    def end(self, outcome: Outcome, error: BaseException | None = None, at: int = 0) -> None:
        """Nothing comes of it."""


class _SampledOut(NonRecordingSpan, _Nothing):
    """The root of a trace that is not recorded: current, so that nothing below it is recorded either.

    At once what user code finds as its span. Its ids are drawn when somebody asks for them.
    """

    __slots__ = ("_bits", "_known", "_outer")
    _bits: Callable[[int], int]
    _known: SpanContext | None
    _outer: Context

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Nothing: it has been filled in already when `Activity(...)` returns it."""

    def get_span_context(self) -> SpanContext:
        """Its ids, not sampled."""
        if self._known is None:
            ids = self._bits(128) or 1, self._bits(64) or 1
            self._known = SpanContext(*ids, False, _UNSAMPLED, _NO_STATE)
        return self._known

    def enter(self) -> None:
        """Make it current here."""
        self._outer = outer = current_context()
        set_context(Context({**outer, SPAN_KEY: self}))

    def leave(self) -> None:
        """Make current again what was so before."""
        set_context(self._outer)

    @property
    def span_context(self) -> SpanContext:
        """What others link to."""
        return self.get_span_context()

    def end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, outcome: Outcome | int | None = None, error: BaseException | None = None, at: int = 0
    ) -> None:
        """Nothing comes of it. Without an outcome it is a user who has found it, and is not to end it."""
        if type(outcome) is str:
            set_context(self._outer)

    def __repr__(self) -> str:
        return f"<not sampled: {self.get_span_context()}>"


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

    __slots__ = ("__weakref__", "_bits", "_keeper", "_off", "_sampler", "_takes", "live", "open_spans", "put")

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
        # Of spans without a parent, and only if those that are refused need nothing else.
        self._takes = None if keeper is not None and sampler is not None else quick_verdict(sampler)
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
        outer = current_context()
        parent = None if root else outer.get(SPAN_KEY)
        if type(parent) is RecordedSpan and parent.root.recorder is self:
            span = _new(RecordedSpan)
            span.extra = None
            span.root = parent.root
            span.parent_id = parent.span_id
            # One of its own for every span, never changed: a task that a handler leaves behind keeps reading its ids.
            inner = Context({SPAN_KEY: span} if len(outer) == 1 else {**outer, SPAN_KEY: span})
        elif parent is None and self._takes is False:
            return self._silence(outer)
        else:
            opened = self._open_root(parent, template, order, links, outer, root)
            if type(opened) is not RecordedSpan:
                return opened
            span = opened
            held = {_HELD: span.root} if type(span.root) is HeldRoot else {}
            inner = Context({**outer, **held, SPAN_KEY: span})
        span.template = template
        span.span_id = self._bits(64) or 1
        span.order = order
        span._ended = 0
        span._known = None
        span._outer = outer
        if links:
            span.links = tuple(links)
        set_context(inner)
        span.began = perf_counter_ns()
        # Last: another thread may hand on what is in there at any moment.
        self.open_spans.add(span)
        return span

    def is_idle(self) -> bool:
        """Whether a span opened here and now would be none, whatever it is of."""
        parent = current_context().get(SPAN_KEY)
        return self.live is None and (type(parent) is _SampledOut or (parent is None and self._takes is False))

    def _open_root(
        self,
        parent: object,
        template: Template,
        order: int | None,
        links: Sequence[Link],
        current: Context,
        root: bool,
    ) -> Activity:
        """What has no parent here: a span that knows its root and parent, or what stands for one that is refused."""
        if type(parent) is _SampledOut:
            return _NOTHING
        takes = self._takes if parent is None else None
        if takes is False or not (takes is None or takes is True or takes(template.name, template.attributes)):
            return self._silence(current)
        span = _new(RecordedSpan)
        span.extra = None
        if takes is None:
            return self._decide(span, template, order, links, current, root) or span
        span.root = Root(self, self.put, self._bits(128) or 1, _SAMPLED, _NO_STATE)
        span.parent_id = 0
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
            return self._silence(
                current, SpanContext(trace_id, self._bits(64) or 1, False, TraceFlags(random_id), state)
            )
        span.parent_id = around.span_id if around.is_valid else 0
        if around.is_remote:
            span.remote_parent = around
        return None

    def _silence(self, current: Context, ids: SpanContext | None = None) -> Activity:
        """A root of which nothing is recorded, made current; its ids are drawn when first asked for, if not given."""
        silent = _new_silent(_SampledOut)
        silent._bits = self._bits
        silent._known = ids
        silent._outer = current
        set_context(Context({**current, SPAN_KEY: silent} if current else {SPAN_KEY: silent}))
        return silent

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
