"""Closing an engine: every callback in order of dependence, within a deadline, and a report of how it went."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine._options import is_async_callable
from eventbus_engine.attempts import Attempts, OutOfTimeError
from eventbus_engine.callback import overrides
from eventbus_engine.counts import DeliveryCounts
from eventbus_engine.delivery import Delivery
from eventbus_engine.destinations import drain
from eventbus_engine.entries import CallbackEntry
from eventbus_engine.envelope import Envelope
from eventbus_engine.errors import CallbackInUseError, HandlerTimeoutError, SpoolError
from eventbus_engine.event import EventName
from eventbus_engine.fanout import run_fanout
from eventbus_engine.handlers import HOOK, Handler, Occasion, lost_in, told
from eventbus_engine.logger import Logger, Pending
from eventbus_engine.mailbox import Mailbox, sending
from eventbus_engine.snapshot import Record

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
        undelivered: name to number of events or records that never reached a callback or destination, or that its
            `send_records` could not send.
        spooled: name to number of records that are left in the spool of a callback, to be sent by the next process.
        deliveries: name to counts, of the background callbacks that had an event.
        abandoned: those with a hook on a thread that has not come back.
        unraised: name to number of events that failed in the background, of callbacks whose failures count
            (`on_error="raise"`): there was no event left to raise them from.
        pending: closing was asked for from inside a handler, and happens once its event has been handled.
    """

    closed: list[str] = field(default_factory=list)
    failed: dict[str, BaseException] = field(default_factory=dict)
    timed_out: list[str] = field(default_factory=list)
    in_flight: tuple[str, ...] = ()
    undelivered: dict[str, int] = field(default_factory=dict)
    spooled: dict[str, int] = field(default_factory=dict)
    deliveries: dict[str, DeliveryCounts] = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)
    unraised: dict[str, int] = field(default_factory=dict)
    pending: bool = False

    @property
    def not_closed(self) -> set[str]:
        """The callbacks that did not close as they should."""
        return {*self.failed, *self.timed_out}

    @property
    def ok(self) -> bool:
        """Whether everything was closed, nothing was lost, and nothing that counts failed unseen.

        What is `spooled` is late, and not lost.
        """
        troubles = (self.failed, self.timed_out, self.in_flight, self.undelivered, self.unraised, self.abandoned)
        return not (any(troubles) or self.pending)


closing_engine: ContextVar[object] = ContextVar("eventbus_engine_closing", default=None)
"""The engine whose closing has called what runs in this context."""


class _Moment(EventName):
    """Closing is no event, but its handlers are called like hooks."""

    CLOSE = "closing"


async def close_participants(
    engine: Engine[Any], report: CloseReport, entries: Sequence[CallbackEntry], delivery: Delivery, deadline: float
) -> None:
    """Empty the mailboxes, close the callbacks, deliver what they logged, close the destinations, `post_close` all.

    Every step runs concurrently over its callbacks. A callback that was to be opened and never was is left alone, but
    for a destination that something was logged for. If this is interrupted, what is not closed by then stands in the
    report as timed out.
    """
    steps = _Steps(engine, report, delivery, deadline)
    engine._hooks.append(steps.occasion)
    due: list[CallbackEntry] = []
    done = False
    try:
        report.undelivered |= await delivery.close(deadline)
        destinations = [entry for entry in entries if entry.destination]
        await steps.open_late(destinations, engine)
        # Not before: until their mailboxes are empty, background callbacks may still be opened.
        due += [entry for entry in entries if entry.closes_in(engine)]
        await steps.run("close", [entry for entry in due if not entry.destination])
        # Again, for what those have logged.
        await steps.open_late(destinations, engine)
        due += [entry for entry in destinations if entry not in due and entry.closes_in(engine)]
        await steps.deliver_rest([entry for entry in due if entry.destination])
        await steps.run("close", [entry for entry in due if entry.destination])
        await steps.run("post_close", [entry for entry in due if entry.name not in report.not_closed])
        done = True
    finally:
        engine._hooks.remove(steps.occasion)
        due = due or [entry for entry in entries if entry.closes_in(engine)]
        if not done:
            report.timed_out += sorted({entry.name for entry in due} - report.not_closed)
        report.deliveries = delivery.counts()
        report.spooled = {name: counts.spooled for name, counts in report.deliveries.items() if counts.spooled}
        report.unraised = delivery.unraised()
        report.abandoned = [entry.name for entry in entries if entry.thread is not None and entry.thread.busy]
        for name in report.abandoned:
            log.error("callback %s has a hook on its thread that has not come back; the thread is left behind", name)
        report.closed = [entry.name for entry in due if entry.name not in report.not_closed]
        _count_undelivered(report, [entry for entry in entries if entry.destination], engine.logger)
        engine.meters.settle()
        for entry in entries:
            entry.release(engine)
        await delivery.close_spools()


class _Steps:
    """The steps of closing, each over some callbacks, concurrently."""

    def __init__(self, engine: Engine[Any], report: CloseReport, delivery: Delivery, deadline: float) -> None:
        self.report = report
        self.delivery = delivery
        self.deadline = deadline
        self.logger = engine.logger
        self.occasion = Occasion.begin(Envelope(_Moment.CLOSE), engine.state, engine.logger, None)
        self._opened_late: list[CallbackEntry] = []

    async def open_late(self, entries: Sequence[CallbackEntry], engine: Engine[Any]) -> None:
        """Open those for which something was logged although there was no event to open them, so that they close."""
        # A worker that has had an event for one, and could not open it, has no use for it any more.
        had_events = self.delivery.mailboxes
        used = [e for e, pending in _pending(entries, self.logger) if pending or (pending.used and e not in had_events)]
        late = [entry for entry in used if not (entry.opened or entry.quarantined or entry in self._opened_late)]
        self._opened_late += late
        openers: list[Handler] = []
        for entry in late:
            # One that is open in another engine is closed there.
            with suppress(CallbackInUseError):
                entry.claim(engine)
                opener = entry.opener()
                openers += [] if opener is None else [opener]
        for opener in openers:
            opener.timeout = max(self.deadline - anyio.current_time(), 0.001)
        for handler, error in await run_fanout(openers, self.occasion) if openers else []:
            log.error("destination %s could not be opened", handler.name, exc_info=error)

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
        placed, is_async = entry.placed(bound)
        call = self.delivery.at_home(entry, placed if method == "close" else lambda *_: placed())
        # A deadline in the past still grants a moment, so that a `close` that need not wait gets to run.
        timeout = max(self.deadline - anyio.current_time(), 0.001)
        is_async = is_async or is_async_callable(call)
        return Handler(entry.name, call, HOOK, is_async=is_async, timeout=timeout)

    async def deliver_rest(self, entries: Sequence[CallbackEntry]) -> None:
        """Deliver, until the deadline, the records that wait for the async destinations."""

        async def deliver(entry: CallbackEntry, pending: Pending) -> None:
            mailbox = self.delivery.mailboxes.get(entry)
            seconds = self.deadline - anyio.current_time()
            call = self.delivery.at_home(entry, _deliver_rest)
            failures = await call(entry, pending, self.occasion, mailbox, seconds)
            for failure in failures:
                said, traceback = told(failure, sends=entry.sender is not None)
                log.error("destination %s failed while closing%s", entry.name, said, exc_info=traceback)

        with anyio.move_on_after(max(self.deadline - anyio.current_time(), 0)):
            async with anyio.create_task_group() as group:
                for entry, pending in _pending(entries, self.logger):
                    group.start_soon(deliver, entry, pending)


async def _deliver_rest(
    entry: CallbackEntry, pending: Pending, occasion: Occasion, mailbox: Mailbox | None, seconds: float
) -> list[Exception]:
    """Deliver what was logged after the last event, and send what that comes to; returns what failed."""
    rows: list[Any] = []
    failures = await drain(pending, entry, rows)
    kept = [row for row in rows if row is not None]
    if entry.sender is None or not kept:
        return failures
    pending.lost += len(kept)
    now = datetime.now(UTC)
    records = [Record(None, None, now, os.urandom(16).hex(), row) for row in kept]
    try:
        if mailbox is not None and mailbox.outbox is not None:
            await mailbox.outbox.send_rest(records, seconds)
            error = None
        else:
            attempts = Attempts(entry)
            attempts.hurry(anyio.current_time() + seconds)
            error = await attempts.persist(sending(entry.sender, records), occasion)
    except (OutOfTimeError, SpoolError) as raised:
        error = raised
    pending.lost -= len(kept) - (0 if error is None else lost_in(error, len(kept)))
    return failures if error is None else [*failures, error]


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
