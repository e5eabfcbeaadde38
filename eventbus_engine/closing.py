"""Closing an engine: every callback in order of dependence, within a deadline, and a report of how it went."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from eventbus_engine._options import is_async_callable
from eventbus_engine.callback import overrides
from eventbus_engine.destinations import drain
from eventbus_engine.errors import HandlerTimeoutError
from eventbus_engine.fanout import HOOK, Handler, Occasion, run_fanout
from eventbus_engine.logger import Logger
from eventbus_engine.participants import CallbackEntry

__all__ = ["CloseReport", "close_participants"]

log = logging.getLogger("eventbus_engine")


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
    def ok(self) -> bool:
        """Whether everything was closed and nothing was left behind."""
        return not (self.failed or self.timed_out or self.in_flight or self.undelivered or self.pending)


class _Closing:
    """Stands in for an envelope: closing is no event, but its handlers are called like hooks."""

    event = type("_Close", (), {"name": "CLOSE", "value": "close"})()


async def close_participants(
    report: CloseReport, entries: Sequence[CallbackEntry], state: Any, logger: Any, deadline: float
) -> None:
    """Close the callbacks, deliver what they logged, close the destinations, then `post_close` them all.

    Every step runs concurrently over its callbacks. A callback that was to be opened and never was is left alone.
    """
    occasion = Occasion(_Closing(), state, logger, None)
    due = [entry for entry in entries if entry.opened or overrides(entry.callback, "open") is None]
    callbacks = [entry for entry in due if not entry.destination]
    destinations = [entry for entry in due if entry.destination]
    await _run_step("close", callbacks, occasion, report, deadline)
    await _deliver_rest(destinations, logger, report, deadline)
    await _run_step("close", destinations, occasion, report, deadline)
    survivors = [entry for entry in due if entry.name not in report.failed and entry.name not in report.timed_out]
    await _run_step("post_close", survivors, occasion, report, deadline)
    report.closed = [entry.name for entry in survivors if entry.name not in report.failed]
    for entry in entries:
        entry.release()
        entry.opened = False


async def _run_step(
    method: str, entries: Sequence[CallbackEntry], occasion: Occasion, report: CloseReport, deadline: float
) -> None:
    handlers = [h for entry in entries if (h := _handler(entry, method, deadline, occasion)) is not None]
    for handler, error in await run_fanout(handlers, occasion) if handlers else []:
        if isinstance(error, HandlerTimeoutError):
            report.timed_out.append(handler.name)
            log.error("callback %s did not finish %s by the deadline", handler.name, method)
        else:
            report.failed[handler.name] = error
            log.error("callback %s failed in %s", handler.name, method, exc_info=error)


def _handler(entry: CallbackEntry, method: str, deadline: float, occasion: Occasion) -> Handler | None:
    bound = overrides(entry.callback, method)
    if bound is None:
        return None
    is_async = is_async_callable(bound)
    call = bound
    if method == "post_close":
        call = (lambda *_: bound())  # noqa: E731
    # A deadline in the past still grants a moment, so that a `close` that need not wait gets to run.
    timeout = max(deadline - anyio.current_time(), 0.001) if is_async else None
    return Handler(entry.name, call, HOOK, is_async=is_async, timeout=timeout)


async def _deliver_rest(destinations: Sequence[CallbackEntry], logger: Any, report: CloseReport, deadline: float) -> None:
    """Deliver the records that wait for the async destinations, and count what the deadline leaves."""
    if not isinstance(logger, Logger):
        return
    waiting = [(entry, pending) for entry in destinations if (pending := logger.pending(entry.callback))]
    if not waiting:
        return

    async def deliver(entry: CallbackEntry, pending: Any) -> None:
        failure = await drain(pending)
        if failure is not None:
            log.error("destination %s failed while closing", entry.name, exc_info=failure)

    with anyio.move_on_after(max(deadline - anyio.current_time(), 0)):
        async with anyio.create_task_group() as group:
            for entry, pending in waiting:
                group.start_soon(deliver, entry, pending)
    for entry, pending in waiting:
        if pending:
            report.undelivered[entry.name] = len(pending)
            log.error("destination %s was closed with %d records undelivered", entry.name, len(pending))
