"""The destination stage: a destination gets the records logged for it since the last event, then its hook."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any

import anyio

from eventbus_engine.handlers import HOOK, Handler
from eventbus_engine.logger import Logger, Pending
from eventbus_engine.participants import CallbackEntry

__all__ = ["delivery_handler", "discard", "drain"]

_delivering: ContextVar[Pending | None] = ContextVar("eventbus_engine_delivering", default=None)


def delivery_handler(entry: CallbackEntry, hook: Handler | None, logger: Any) -> tuple[Handler | None, int]:
    """What a destination does on an event: its waiting records first, in order, then its hook. None for nothing.

    In the background it takes the records along, so that the mailbox bounds them too.

    Returns:
        The handler, and the number of records and events it stands for.
    """
    pending = logger.pending(entry.callback) if isinstance(logger, Logger) else None
    if not pending:
        return hook, 1
    records = pending if entry.delivery == "inline" else pending.take()

    async def deliver(*arguments: Any) -> None:
        failures = await drain(records)
        if records is not pending:
            pending.lost += records.lost
        if hook is not None:
            try:
                result = hook.call(*arguments)
                if isinstance(result, Awaitable):
                    await result
            except Exception as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"{len(failures)} failures of destination {entry.name}", failures)

    takes = HOOK if hook is None else hook.takes
    handler = Handler(entry.name, deliver, takes, is_async=True, timeout=entry.timeout, owner=entry)
    return handler, len(records) + (hook is not None)


def discard(entry: CallbackEntry, logger: Any) -> None:
    """Drop, and count, what was logged for a destination that has been dropped from the run."""
    pending = logger.pending(entry.callback) if isinstance(logger, Logger) else None
    if pending:
        pending.lost += len(pending)
        pending.clear()


async def drain(pending: Pending) -> list[Exception]:
    """Deliver every waiting record, in order; one that fails does not keep back the next.

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
                await send()
            except Exception as error:
                failures.append(error)
            else:
                pending.lost -= 1
    finally:
        _delivering.reset(outside)
        pending.delivering.set()
        pending.delivering = None
    return failures
