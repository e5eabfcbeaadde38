"""`engine.pair`: the two halves of a pair of events around a block of code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import EventName
from eventbus_engine.handlers import outcome_of
from eventbus_engine.telemetry.spans import Activity, TracerSource, event_template
from eventbus_engine.trace import Traces

__all__ = ["Pair"]


class Pair:
    """An async context manager: publishes the first half, runs the block, publishes the second if it succeeded.

    A span named by what the halves share (`loss`, `forward`) lasts from before the first to after the second, so
    that the work between them shows.

    Attributes:
        before: the traces of the first half, once entered.
        after: the traces of the second half, once left.
    """

    def __init__(
        self,
        run_event: Callable[[EventName, Any], Awaitable[Traces]],
        event: EventName,
        state: Any,
        tracers: TracerSource,
    ) -> None:
        partner = event.partner
        if partner is None or not event.is_before_event:
            cure = f"use its first half, {partner.name}" if partner is not None else "use run_event"
            raise ConfigurationError(f"{event.name} is not the first half of a pair; {cure}")
        self.before: Traces = {}
        self.after: Traces = {}
        self._run_event = run_event
        self._event = event
        self._partner = partner
        self._state = state
        self._tracers = tracers
        self._span: Activity | None = None
        self._abandoned = False

    def abandon(self) -> None:
        """Leave out the second half: there was nothing between the two after all, and that is no failure."""
        self._abandoned = True

    async def __aenter__(self) -> Self:
        tracer = self._tracers.get()
        if tracer is not None:
            self._span = tracer.open(event_template("pair", self._event))
        try:
            self.before = await self._run_event(self._event, self._state)
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._abandoned:
                self.after = await self._run_event(self._partner, self._state)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._span is not None:
            self._span.end(outcome_of(error), error)
            self._span = None
