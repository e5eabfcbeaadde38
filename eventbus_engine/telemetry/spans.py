"""Spans of what the engine does: the seam between the engine and whoever keeps them.

The engine opens an `Activity` for what it executes and ends it with the outcome. Behind `TracerSource.get()` stands
either an `ApiTracer`, which makes live spans through the OpenTelemetry API, or the recorder that `telemetry.configure`
sets up, which notes them down and leaves the rest to another thread (docs/decisions/0007-record-then-convert.md).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.trace import Link, Status, StatusCode, Tracer, TracerProvider

from eventbus_engine.telemetry.configure import _GLOBAL, current_provider, warn_about_global_randomness
from eventbus_engine.telemetry.meters import CONFIGURED

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.telemetry.meters import MeterSource
    from eventbus_engine.trace import Outcome

__all__ = [
    "SCOPE",
    "Activity",
    "ApiTracer",
    "EngineTracer",
    "Template",
    "TracerSource",
    "code_name",
    "describe_error",
    "event_template",
    "handler_template",
    "type_name",
]

SCOPE = "eventbus_engine"


class Template:
    """What the spans of one kind of execution share, made once for all of them.

    Args:
        name: of low cardinality: `dispatch batch_end`, `algorithm mixup`.
        kind: the value of `eventbus.kind`.
        event: the value of `eventbus.event`, if it belongs to an event.
        attributes: further ones.

    Attributes:
        attributes: all of them.
        encoded: room for what an encoder makes of it, by the encoder's name.
    """

    __slots__ = ("attributes", "encoded", "kind", "name")

    def __init__(
        self,
        name: str,
        kind: str,
        event: EventName | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: str = name
        self.kind: str = kind
        self.attributes: dict[str, Any] = {"eventbus.kind": kind}
        if event is not None:
            self.attributes["eventbus.event"] = event.value
        if attributes:
            self.attributes.update(attributes)
        self.encoded: dict[str, Any] = {}


@functools.lru_cache(maxsize=1024)
def event_template(kind: str, event: EventName) -> Template:
    """The template of a dispatch, or of a pair by its first half."""
    return Template(event.canonical_name if kind == "pair" else f"{kind} {event.value}", kind, event)


def handler_template(
    kind: str, name: str, event: EventName, call: Callable[..., Any], *, background: bool = False
) -> Template:
    """The template of an algorithm or a callback on an event."""
    attributes = {"code.function.name": code_name(call)}
    if background:
        attributes["eventbus.delivery"] = "background"
    return Template(f"{kind} {name}", kind, event, attributes)


class Activity:
    """A span that is current from its construction until `end`.

    Constructing one opens it with the tracer, which decides about the class.

    Args:
        tracer: where to open it.
        name: of low cardinality: `dispatch batch_end`, `algorithm mixup`.
        kind: the value of `eventbus.kind`.
        event: the value of `eventbus.event`, if it belongs to an event.
        attributes: further ones.
        links: to spans of other traces.
        root: whether to start a trace of its own instead of continuing the caller's.

    Attributes:
        began: when it did, by `perf_counter_ns`; 0 where whoever wants to know has to look at the clock.
    """

    __slots__ = ()
    began: int = 0

    def __new__(  # noqa: PYI034 -- the tracer decides about the class
        cls,
        tracer: EngineTracer,
        name: str,
        kind: str,
        event: EventName | None = None,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] = (),
        root: bool = False,
    ) -> Activity:
        """Open it."""
        return tracer.open(Template(name, kind, event, attributes), links=links, root=root)

    def enter(self) -> None:
        """Make it current here, as opening it does; a task that goes on with it calls it again."""
        raise NotImplementedError

    def leave(self) -> None:
        """Make current again what was so before, without ending it."""
        raise NotImplementedError

    @property
    def recording(self) -> bool:
        """Whether anything will come of it; if not, its children are not worth opening."""
        raise NotImplementedError

    def below(self, tracer: EngineTracer) -> EngineTracer | None:
        """What to open its children with, None if they are not worth opening; `tracer` has opened this one."""
        return tracer if self.recording else None

    @property
    def span_context(self) -> otel.SpanContext:
        """What others link to."""
        raise NotImplementedError

    def set(self, key: str, value: Any) -> None:
        """Set an attribute."""
        raise NotImplementedError

    def rename(self, name: str) -> None:
        """Give it another name, of low cardinality as well."""
        raise NotImplementedError

    def end(self, outcome: Outcome, error: BaseException | None = None, at: int = 0) -> None:
        """End it: status UNSET on success, ERROR with `error.type` on failure, timeout and cancellation.

        Args:
            outcome: how it ended.
            error: what it raised.
            at: when, by `perf_counter_ns`; 0 for now.
        """
        raise NotImplementedError


class EngineTracer(ABC):
    """Opens activities.

    Attributes:
        spans: whether it makes spans. If not, what has its own clock need not be opened: `measured` takes its duration.
    """

    __slots__ = ()
    spans: bool = True

    @abstractmethod
    def open(
        self, template: Template, *, order: int | None = None, links: Sequence[Link] = (), root: bool = False
    ) -> Activity:
        """Open a span and make it current.

        Args:
            template: what it shares with others of its kind.
            order: the value of `eventbus.order`, if it has one.
            links: to spans of other traces.
            root: whether to start a trace of its own instead of continuing the caller's.
        """

    def is_idle(self) -> bool:
        """Whether anything opened here and now would come to nothing, and need not be opened."""
        return False

    def measured(self, template: Template, elapsed: int, outcome: Outcome, error: BaseException | None) -> None:
        """Take down an execution that has not been opened; its duration is in nanoseconds."""
        raise NotImplementedError


class TracerSource:
    """Where an engine gets its tracer from: its own provider, or the global one once there is one.

    Args:
        provider: a provider of the engine's own; None follows the global one.
    """

    __slots__ = ("_known", "_own", "_tracer")

    def __init__(self, provider: TracerProvider | None) -> None:
        self._own = provider
        self._known: TracerProvider | None = None
        self._tracer: EngineTracer | None = None

    @property
    def provider(self) -> TracerProvider | None:
        """The provider that the last tracer is of."""
        return self._known

    @property
    def wanted(self) -> TracerProvider | None:
        """The provider to use now, None while none is configured. From any thread."""
        return self._own if self._own is not None else current_provider()

    def get(self) -> EngineTracer | None:
        """The tracer to use now, None while no provider is configured."""
        provider = self._own if self._own is not None else current_provider()  # not `wanted`: this is the hot path
        if provider is not self._known:
            self._known = provider
            self._tracer = None
            if provider is not None:
                warn_about_global_randomness(provider)
                recorder = getattr(provider, "recorder", None)
                if not isinstance(recorder, EngineTracer):
                    recorder = ApiTracer(provider.get_tracer(SCOPE))
                self._tracer = recorder
        return self._tracer

    def observer(self, meters: MeterSource) -> EngineTracer | None:
        """What opens spans, measures what runs, or both; None while nobody asked for either.

        Nearly every event has this of telemetry and no more: one look at all the places that would say otherwise.
        """
        if meters.look_in and CONFIGURED.metrics is None:
            provider = _GLOBAL.active if self._own is None else self._own
            if provider is not None:
                if provider is self._known:
                    meters.look_in -= 1
                    return self._tracer
            elif _GLOBAL.asked and ((given := otel._TRACER_PROVIDER) is None or given is _GLOBAL):
                meters.look_in -= 1
                return None
        return meters.around(self.get())


class ApiTracer(EngineTracer):
    """Opens live spans through the OpenTelemetry API, whoever implements it."""

    __slots__ = ("_tracer",)

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def open(
        self, template: Template, *, order: int | None = None, links: Sequence[Link] = (), root: bool = False
    ) -> Activity:
        """Open a span and make it current."""
        attributes = template.attributes if order is None else {**template.attributes, "eventbus.order": order}
        activity = object.__new__(_ApiActivity)
        activity.span = self._tracer.start_span(
            template.name,
            context=otel_context.Context() if root else None,
            attributes=attributes,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        )
        activity.enter()
        return activity


class _ApiActivity(Activity):
    """A live span."""

    __slots__ = ("outer", "span")
    span: otel.Span
    outer: otel_context.Context

    def enter(self) -> None:
        """Make it current here."""
        self.outer = otel_context.get_current()
        otel_context.attach(otel.set_span_in_context(self.span))

    def leave(self) -> None:
        """Make current again what was so before."""
        # Not `detach`: its token belongs to one Context object, and `engine.sync.pair` ends in another copy of it.
        otel_context.attach(self.outer)

    @property
    def recording(self) -> bool:
        """Whether anything will come of it."""
        return self.span.is_recording()

    @property
    def span_context(self) -> otel.SpanContext:
        """What others link to."""
        return self.span.get_span_context()

    def set(self, key: str, value: Any) -> None:
        """Set an attribute."""
        self.span.set_attribute(key, value)

    def rename(self, name: str) -> None:
        """Give it another name."""
        self.span.update_name(name)

    def end(self, outcome: Outcome, error: BaseException | None = None, at: int = 0) -> None:
        """End it now."""
        self.leave()
        span = self.span
        span.set_attribute("eventbus.outcome", outcome)
        if error is not None:
            span.set_attribute("error.type", type_name(error))
            if outcome != "cancelled":
                span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, describe_error(error)))
        span.end()


def type_name(error: BaseException) -> str:
    """The `error.type` of an exception: its class, qualified unless it is built in."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def describe_error(error: BaseException) -> str:
    """The description of the status that an exception leads to."""
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def code_name(function: Callable[..., Any]) -> str:
    """The `code.function.name` of a handler: fully qualified, as the semantic conventions ask."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
