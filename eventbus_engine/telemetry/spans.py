"""Spans of what the engine does, through the OpenTelemetry API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.trace import Link, Status, StatusCode, Tracer, TracerProvider

from eventbus_engine.telemetry.configure import current_provider, warn_about_global_randomness

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.trace import Outcome

__all__ = ["Activity", "TracerSource", "code_name"]

SCOPE = "eventbus_engine"


class TracerSource:
    """Where an engine gets its tracer from: its own provider, or the global one once there is one.

    Args:
        provider: a provider of the engine's own; None follows the global one.
    """

    __slots__ = ("_known", "_own", "_tracer")

    def __init__(self, provider: TracerProvider | None) -> None:
        self._own = provider
        self._known: TracerProvider | None = None
        self._tracer: Tracer | None = None

    def get(self) -> Tracer | None:
        """The tracer to use now, None while no provider is configured."""
        provider = self._own if self._own is not None else current_provider()
        if provider is not self._known:
            self._known = provider
            self._tracer = None
            if provider is not None:
                warn_about_global_randomness(provider)
                self._tracer = provider.get_tracer(SCOPE)
        return self._tracer


class Activity:
    """A span that is current from its construction until `end`.

    Args:
        tracer: where to open it.
        name: of low cardinality: `dispatch batch_end`, `algorithm mixup`.
        kind: the value of `eventbus.kind`.
        event: the value of `eventbus.event`, if it belongs to an event.
        attributes: further ones.
        links: to spans of other traces.
        root: whether to start a trace of its own instead of continuing the caller's.
    """

    __slots__ = ("_outer", "_span")

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        kind: str,
        event: EventName | None = None,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] = (),
        root: bool = False,
    ) -> None:
        known: dict[str, Any] = {"eventbus.kind": kind}
        if event is not None:
            known["eventbus.event"] = event.value
        if attributes:
            known.update(attributes)
        self._span = tracer.start_span(
            name,
            context=otel_context.Context() if root else None,
            attributes=known,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        )
        self.enter()

    def enter(self) -> None:
        """Make it current here, as the constructor does; a task that goes on with it calls it again."""
        self._outer = otel_context.get_current()
        otel_context.attach(otel.set_span_in_context(self._span))

    def leave(self) -> None:
        """Make current again what was so before, without ending it."""
        # Not `detach`: its token belongs to one Context object, and `engine.sync.pair` ends in another copy of it.
        otel_context.attach(self._outer)

    @property
    def recording(self) -> bool:
        """Whether anything will come of it; if not, its children are not worth opening."""
        return self._span.is_recording()

    @property
    def span_context(self) -> otel.SpanContext:
        """What others link to."""
        return self._span.get_span_context()

    def set(self, key: str, value: Any) -> None:
        """Set an attribute."""
        self._span.set_attribute(key, value)

    def rename(self, name: str) -> None:
        """Give it another name, of low cardinality as well."""
        self._span.update_name(name)

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """End it: status UNSET on success, ERROR with `error.type` on failure, timeout and cancellation."""
        self.leave()
        span = self._span
        span.set_attribute("eventbus.outcome", outcome)
        if error is not None:
            kind = type(error)
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            span.set_attribute("error.type", name)
            if outcome != "cancelled":
                span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, f"{kind.__name__}: {error}" if str(error) else kind.__name__))
        span.end()


def code_name(function: Callable[..., Any]) -> str:
    """The `code.function.name` of a handler: fully qualified, as the semantic conventions ask."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
