"""The destination stage: an async destination gets the records logged since the last event, then its hook."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

from eventbus_engine.fanout import HOOK, Handler
from eventbus_engine.logger import Logger
from eventbus_engine.participants import CallbackEntry

__all__ = ["delivery_handler", "drain"]


def delivery_handler(entry: CallbackEntry, hook: Handler | None, logger: Any) -> Handler | None:
    """What a destination does on an event: its waiting records first, in order, then its hook. None for nothing."""
    pending = logger.pending(entry.callback) if isinstance(logger, Logger) else None
    if not pending:
        return hook

    async def deliver(*arguments: Any) -> None:
        failure = await drain(pending)
        if hook is not None:
            result = hook.call(*arguments)
            if inspect.isawaitable(result):
                await result
        if failure is not None:
            raise failure

    takes = HOOK if hook is None else hook.takes
    return Handler(entry.name, deliver, takes, is_async=True, timeout=entry.timeout, owner=entry)


async def drain(pending: deque[Callable[[], Any]]) -> Exception | None:
    """Deliver every waiting record, in order; one that fails does not keep back the next.

    Returns:
        The failure, an ExceptionGroup of them if there are several, or None.
    """
    failures: list[Exception] = []
    while pending:
        send = pending.popleft()
        try:
            result = send()
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            failures.append(error)
    if len(failures) > 1:
        return ExceptionGroup(f"{len(failures)} records were not delivered", failures)
    return failures[0] if failures else None
