"""Closing an engine: every callback in order of dependence, within a deadline, and a report of how it went."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine._options import is_async_callable
from eventbus_engine.callback import overrides
from eventbus_engine.delivery import Delivery
from eventbus_engine.destinations import drain
from eventbus_engine.errors import HandlerTimeoutError
from eventbus_engine.fanout import run_fanout
from eventbus_engine.handlers import HOOK, Handler, Occasion
from eventbus_engine.logger import Logger, Pending
from eventbus_engine.participants import CallbackEntry

if TYPE_CHECKING:
    from eventbus_engine.engine import Engine

__all__ = ["CloseReport", "close_participants", "closing_engine"]

log: logging.Logger = logging.getLogger("eventbus_engine")


@dataclass(slots=True)
class CloseReport:
    """How closing an engine went.

    Attributes:
        closed: the callbacks that are closed.
        failed: name to exception, of those whose `close` or `post_close` raised.
        timed_out: those whose `close` or `post_close` did not finish by the deadline.
        in_flight: the events still being handled at the deadline.
        undelivered: name to number of events or records that never reached a callback or destination.
        pending: closing was asked for from inside a handler, and happens once its event has been handled.
    """

    closed: list[str] = field(default_factory=list)
    failed: dict[str, BaseException] = field(default_factory=dict)
    timed_out: list[str] = field(default_factory=list)
    in_flight: tuple[str, ...] = ()
    undelivered: dict[str, int] = field(default_factory=dict)
    pending: bool = False

    @property
    def not_closed(self) -> set[str]:
        """The callbacks that did not close as they should."""
        return {*self.failed, *self.timed_out}

    @property
    def ok(self) -> bool:
        """Whether everything was closed and nothing was left behind."""
        return not (self.failed or self.timed_out or self.in_flight or self.undelivered or self.pending)


closing_engine: ContextVar[object] = ContextVar("eventbus_engine_closing", default=None)
"""The engine whose closing has called what runs in this context."""


class _Closing:
    """Stands in for an envelope: closing is no event, but its handlers are called like hooks."""

    event = type("_Close", (), {"name": "CLOSE", "value": "close"})()


async def close_participants(
    engine: Engine[Any], report: CloseReport, entries: Sequence[CallbackEntry], delivery: Delivery, deadline: float
) -> None:
    """Empty the mailboxes, close the callbacks, deliver what they logged, close the destinations, `post_close` all.

    Every step runs concurrently over its callbacks. A callback that was to be opened and never was is left alone.
    If this is interrupted, what is not closed by then stands in the report as timed out.
    """
    steps = _Steps(engine, report, delivery, deadline)
    due: list[CallbackEntry] = []
    done = False
    try:
        report.undelivered |= await delivery.close(deadline)
        # Not before: until their mailboxes are empty, background callbacks may still be opened.
        due += [entry for entry in entries if entry.closes_in(engine)]
        await steps.run("close", [entry for entry in due if not entry.destination])
        await steps.deliver_rest([entry for entry in due if entry.destination])
        await steps.run("close", [entry for entry in due if entry.destination])
        await steps.run("post_close", [entry for entry in due if entry.name not in report.not_closed])
        done = True
    finally:
        due = due or [entry for entry in entries if entry.closes_in(engine)]
        if not done:
            report.timed_out += sorted({entry.name for entry in due} - report.not_closed)
        report.closed = [entry.name for entry in due if entry.name not in report.not_closed]
        _count_undelivered(report, [entry for entry in due if entry.destination], engine.logger)
        engine.meters.settle()
        for entry in entries:
            entry.release(engine)


class _Steps:
    """The steps of closing, each over some callbacks, concurrently."""

    def __init__(self, engine: Engine[Any], report: CloseReport, delivery: Delivery, deadline: float) -> None:
        self.report = report
        self.delivery = delivery
        self.deadline = deadline
        self.logger = engine.logger
        self.occasion = Occasion(_Closing(), engine.state, engine.logger, None)

    async def run(self, method: str, entries: Sequence[CallbackEntry]) -> None:
        """Call their `close` or `post_close`, as far as they have one."""
        handlers = [handler for entry in entries if (handler := self.handler(entry, method)) is not None]
        for handler, error in await run_fanout(handlers, self.occasion) if handlers else []:
            if isinstance(error, HandlerTimeoutError):
                self.report.timed_out.append(handler.name)
                log.error("callback %s did not finish %s by the deadline", handler.name, method)
            else:
                self.report.failed[handler.name] = error
                log.error("callback %s failed in %s", handler.name, method, exc_info=error)

    def handler(self, entry: CallbackEntry, method: str) -> Handler | None:
        bound = overrides(entry.callback, method)
        if bound is None:
            return None
        call = self.delivery.at_home(entry, bound if method == "close" else lambda *_: bound())
        # A deadline in the past still grants a moment, so that a `close` that need not wait gets to run.
        timeout = max(self.deadline - anyio.current_time(), 0.001)
        is_async = is_async_callable(bound) or is_async_callable(call)
        return Handler(entry.name, call, HOOK, is_async=is_async, timeout=timeout)

    async def deliver_rest(self, entries: Sequence[CallbackEntry]) -> None:
        """Deliver, until the deadline, the records that wait for the async destinations."""

        async def deliver(entry: CallbackEntry, pending: Pending) -> None:
            for failure in await self.delivery.at_home(entry, drain)(pending):
                log.error("destination %s failed while closing", entry.name, exc_info=failure)

        with anyio.move_on_after(max(self.deadline - anyio.current_time(), 0)):
            async with anyio.create_task_group() as group:
                for entry, pending in _pending(entries, self.logger):
                    group.start_soon(deliver, entry, pending)


def _count_undelivered(report: CloseReport, destinations: Sequence[CallbackEntry], logger: Any) -> None:
    for entry, pending in _pending(destinations, logger):
        count = len(pending) + pending.lost
        if count:
            report.undelivered[entry.name] = report.undelivered.get(entry.name, 0) + count
            log.error("destination %s was closed with %d records undelivered", entry.name, count)


def _pending(destinations: Sequence[CallbackEntry], logger: Any) -> list[tuple[CallbackEntry, Pending]]:
    if not isinstance(logger, Logger):
        return []
    return [(entry, pending) for entry in destinations if (pending := logger.pending(entry.callback)) is not None]
