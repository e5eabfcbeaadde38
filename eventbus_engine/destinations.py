"""The destination stage: a destination gets the records logged for it since the last event, then its hook."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any

import anyio

from eventbus_engine.entries import CallbackEntry
from eventbus_engine.handlers import HOOK, Handler
from eventbus_engine.logger import Logger, Pending

__all__ = ["delivery_handler", "discard", "drain"]


log: logging.Logger = logging.getLogger("eventbus_engine")

_delivering: ContextVar[Pending | None] = ContextVar("eventbus_engine_delivering", default=None)


def delivery_handler(
    entry: CallbackEntry, hook: Handler | None, records: Pending, pending: Pending, rows: list[Any]
) -> Handler:
    """What a destination with waiting records does on an event: the records first, in order, then its hook.

    Args:
        entry: the destination.
        hook: its hook for the event, if it has one.
        records: the records.
        pending: where what is lost of them is counted; the same object, unless they have been taken out.
        rows: gets what they and the hook come to, as far as that goes.
    """

    async def deliver(*arguments: Any) -> None:
        failures = await drain(records, entry, rows)
        if records is not pending:
            pending.lost, records.lost = pending.lost + records.lost, 0
        if failures and entry.patient:
            # The rest waits for the next attempt, in its order.
            raise failures[0]
        if not failures:
            entry.told.clear()
        elif entry.sender is not None:
            for failure in failures:
                # Of those in a row, the first of each type, as of all failures in the background.
                if type(failure) not in entry.told:
                    entry.told.add(type(failure))
                    log.error("destination %s failed in making a record", entry.name, exc_info=failure)
            failures.clear()
        if hook is not None:
            try:
                result = hook.call(*arguments)
                rows.append(await result if isinstance(result, Awaitable) else result)
            except Exception as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"{len(failures)} failures of destination {entry.name}", failures)

    takes = HOOK if hook is None else hook.takes
    return Handler(entry.name, deliver, takes, is_async=True, timeout=entry.timeout, owner=entry)


def discard(entry: CallbackEntry, logger: Any) -> None:
    """Drop, and count, what was logged for a destination that has been dropped from the run."""
    pending = logger.pending(entry.callback) if isinstance(logger, Logger) else None
    if pending:
        pending.lost += len(pending)
        pending.clear()


async def drain(pending: Pending, entry: CallbackEntry, rows: list[Any]) -> list[Exception]:
    """Deliver every waiting record, in order. One that fails does not keep back the next, unless it is to be retried.

    Args:
        pending: the records.
        entry: the destination.
        rows: gets what the records come to.

    Returns:
        The failures.
    """
    if _delivering.get() is pending:
        return []  # A record being delivered has published an event: whoever delivers it goes on with the rest.
    while pending.delivering is not None:
        await pending.delivering.wait()
    pending.delivering = anyio.Event()
    outside = _delivering.set(pending)
    failures: list[Exception] = []
    try:
        while pending:
            send = pending.popleft()
            pending.lost += 1
            try:
                if entry.thread is not None:
                    row = await entry.thread.run(send)
                else:
                    result = send()
                    row = await result if isinstance(result, Awaitable) else result
                rows.append(row)
            except Exception as error:
                failures.append(error)
                if entry.patient:
                    pending.appendleft(send)
                    pending.lost -= 1
                    break
            else:
                pending.lost -= 1
    finally:
        _delivering.reset(outside)
        pending.delivering.set()
        pending.delivering = None
    return failures
