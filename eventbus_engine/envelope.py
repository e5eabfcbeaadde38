"""What is published, and the way from any code back to the event it runs for."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextvars import Context, ContextVar, copy_context
from datetime import UTC, datetime
from time import time_ns as wall_clock_ns
from typing import TYPE_CHECKING, Any, Self

from opentelemetry import trace as otel

from eventbus_engine._steps import leave_loop
from eventbus_engine.event import EventName

if TYPE_CHECKING:
    from eventbus_engine.lanes import Dispatch

__all__ = [
    "Envelope",
    "context_of",
    "current",
    "current_dispatch",
    "current_envelope",
    "enter_apart",
    "write_envelope",
]

current: ContextVar[Dispatch | None] = ContextVar("eventbus_engine_dispatch", default=None)
"""The dispatch being handled in this context, and through it those it is nested in."""

current_dispatch: Callable[[], Dispatch | None] = current.get
"""Gives the dispatch from whose context it is called, whether that still runs or not."""


def context_of(dispatch: Dispatch) -> Context:
    """A copy of the caller's context in which that dispatch is the current one."""
    context = copy_context()
    context.run(current.set, dispatch)
    return context


def enter_apart(dispatch: Dispatch) -> None:
    """Make a dispatch the current one of this context, and let no loop of `engine.sync` seem to drive it."""
    _ = current.set(dispatch)
    leave_loop()


class _Draft:
    """An envelope while it is being written."""

    __slots__ = ("_id", "_traceparent", "event", "key", "payload", "source", "state", "time_ns")

    event: EventName
    payload: Any
    state: Any
    key: Hashable
    source: str | None
    _id: str | None
    time_ns: int
    _traceparent: str | None


class Envelope(_Draft):
    """One published event, as a plain handler receives it. Frozen.

    Attributes:
        event: the event.
        payload: what was published with it, for plain handlers.
        state: the state it is about, None for none.
        time_ns: when it was published, nanoseconds since the epoch.
        key: the key of its lane, None where the state is the lane.
        source: where it came from, None if it was published here.
    """

    __slots__ = ()

    def __new__(
        cls, event: EventName, payload: Any = None, state: Any = None, key: Hashable = None, source: str | None = None
    ) -> Self:
        """Write it, with the time that it is now."""
        envelope: Self = write_envelope(event, payload, state, key, wall_clock_ns(), source, cls)  # type: ignore[assignment]
        return envelope

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Envelope is frozen; publish another event instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an Envelope is frozen; {name!r} cannot be deleted")

    @property
    def id(self) -> str:
        """128 random bits in hex, unique over processes. Made when first asked for: most events never are."""
        if self._id is None:
            object.__setattr__(self, "_id", os.urandom(16).hex())
        return str(self._id)

    @property
    def time(self) -> datetime:
        """When it was published, in UTC."""
        return datetime.fromtimestamp(self.time_ns / 1e9, UTC)

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context it was first read under (`00-<trace>-<span>-<flags>`), None outside any trace."""
        if self._traceparent is None:
            span = otel.get_current_span().get_span_context()
            if span.is_valid:
                value = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
                object.__setattr__(self, "_traceparent", value)
        return self._traceparent

    def __repr__(self) -> str:
        return f"<Envelope {type(self.event).__name__}.{self.event.name}>"


def write_envelope(
    event: EventName,
    payload: Any,
    state: Any,
    key: Hashable,
    time_ns: int,
    source: str | None = None,
    cls: type[Envelope] = Envelope,
) -> Envelope:
    """Write an envelope, then freeze it: changing its class costs a third of going around its own `__setattr__`.

    A plain function, because a call of the class costs as much again.
    """
    draft: Any = _Draft()
    draft.event = event
    draft.payload = payload
    draft.state = state
    draft.key = key
    draft.source = source
    draft.time_ns = time_ns
    draft._id = draft._traceparent = None
    draft.__class__ = cls
    envelope: Envelope = draft
    return envelope


def current_envelope() -> Envelope | None:
    """The event being handled in this context, None outside any handler."""
    dispatch = current.get()
    while dispatch is not None and not dispatch.running:
        dispatch = dispatch.parent
    return dispatch.envelope if dispatch is not None else None
