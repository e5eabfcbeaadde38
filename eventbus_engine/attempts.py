"""Calling the hooks of a background callback, and again as its `retry` and its `circuit` say: `Attempts`."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine.errors import HandlerTimeoutError
from eventbus_engine.fanout import run_fanout
from eventbus_engine.handlers import Handler, Occasion, Owner, add_note, moment, told
from eventbus_engine.policy import Breaker, asked_for, transient

if TYPE_CHECKING:
    from eventbus_engine.entries import CallbackEntry
    from eventbus_engine.event import EventName

__all__ = ["Attempts", "OutOfTimeError", "returning"]

log: logging.Logger = logging.getLogger("eventbus_engine")

SHORTEST = 0.1
"""Seconds that have to be left of the time for closing, so that another attempt has a chance."""


class OutOfTimeError(Exception):
    """The next attempt would come after the deadline of the closing."""


class Attempts:
    """Calls hooks of one background callback, and sees to what their failures mean.

    Attributes:
        entry: the callback.
        retried: attempts after the first.
        timed_out: attempts that outlived the callback's `timeout`.
        breaker: the state of its circuit.
        occasion: the event of the hook that is running; None in between.
        until_safe: waits until all there is to send is on the disk.
    """

    def __init__(self, entry: CallbackEntry) -> None:
        self.entry = entry
        self.retried: int = 0
        self.timed_out: int = 0
        self.breaker: Breaker = Breaker(entry.circuit)
        self.occasion: Occasion | None = None
        # Its own, so that no seeded run notices: the generators of random, numpy and torch stay where they are.
        self._chance = random.Random()
        self.until_safe: Callable[[], Awaitable[None]] = anyio.sleep_forever
        self._logged: set[type[Exception]] = set()
        self._closes_at: float | None = None
        self._closing = anyio.Event()

    @property
    def closing(self) -> bool:
        """Whether there is a deadline."""
        return self._closing.is_set()

    def hurry(self, closes_at: float) -> None:
        """Make what pauses before another attempt make it now, and make none after this time."""
        self._closes_at = closes_at
        self._closing.set()

    async def call(self, handler: Handler, occasion: Occasion) -> Exception | None:
        """Call a hook, once, in a task of its own; its failure is the callback's own, and never the run's."""
        self.occasion = occasion
        try:
            if self.entry.thread is not None:
                # Outside of the time limit, which is for the hook, and not for the one before it.
                await self.entry.thread.free()
            failures = await run_fanout([_asynchronous(handler)], occasion)
        finally:
            self.occasion = None
        error = failures[0][1] if failures else None
        self.timed_out += isinstance(error, HandlerTimeoutError)
        if error is not None:
            add_note(error, f"in background callback {self.entry.name} {moment(occasion.event, handler)}")
        return error

    async def persist(self, handler: Handler, occasion: Occasion) -> Exception | None:
        """Call a hook, and again as `retry` and `circuit` say; returns what it failed with at last.

        Raises:
            OutOfTimeError: there is no time for the next attempt.
        """
        retry, attempt = self.entry.retry, 1
        while True:
            error = await self.call(handler, occasion)
            if error is None:
                if self.breaker.succeeded():
                    log.warning("background callback %s works again: its circuit is closed", self.entry.name)
                return None
            pause, opened = self.breaker.failed(error)
            if pause is not None:
                if opened:
                    said, traceback = told(error, sends=self.entry.sender is not None)
                    log.error(
                        "background callback %s failed %d times in a row: its circuit is open, its events wait, and "
                        "one is tried every %g s%s",
                        self.entry.name, self.breaker.failures, pause, said, exc_info=traceback,
                    )  # fmt: skip
            elif retry is not None and attempt < retry.attempts and retry.covers(error):
                pause = retry.pause(attempt, error, self._chance)
            else:
                return error
            await self.pause(pause, asked_for(error))
            if self.breaker.state == "open":
                self.breaker.state = "probing"
            attempt += 1
            self.retried += 1

    async def pause(self, seconds: float, asked: float = 0.0) -> None:
        """Wait before the next attempt. Closing cuts it short.

        Args:
            seconds: how long.
            asked: how much of that the far side has asked for.

        Raises:
            OutOfTimeError: the wait would be over after the deadline.
        """
        if self._closes_at is None:
            with anyio.move_on_after(seconds):
                await self._closing.wait()
            return
        left = self._closes_at - anyio.current_time()
        if seconds < left:
            await anyio.sleep(seconds)
            return
        seconds = max(left / 2, asked)
        if SHORTEST < left > seconds:
            # Giving up would lose what waits, and a pause of our own choosing is no reason for that.
            with anyio.move_on_after(seconds) as pause:
                await self.until_safe()
            if pause.cancelled_caught:
                return
        raise OutOfTimeError("there is no time for another attempt")

    def worth_another(self, error: Exception) -> bool:
        """Whether the same may go through later, as far as the callback's options and the exception can tell."""
        retry = self.entry.retry
        return transient(error) if retry is None else retry.covers(error)

    def settle(self, error: Exception, event: EventName | str) -> None:
        """Have a failure logged, or the callback quarantined for it. There is no event left to raise it from.

        Of failures in a row, the first of each type of exception is logged: a far side that is down has one thing to
        say, however many events that costs.
        """
        entry = self.entry
        entry.failures += 1
        name, kind = entry.name, "destination" if entry.destination else "background callback"
        said, traceback = told(error, sends=entry.sender is not None)
        if entry.on_error == "quarantine" and entry.failures >= entry.quarantine_after:
            entry.quarantined = True
            log.error(
                "%s %s failed %d times in a row, last %s, and is dropped from the run%s",
                kind.removeprefix("background "), name, entry.failures, moment(event), said, exc_info=traceback,
            )  # fmt: skip
            return
        if entry.failures == 1:
            self._logged.clear()
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.error("%s %s failed %s%s", kind, name, moment(event), said, exc_info=traceback)


def _asynchronous(handler: Handler) -> Handler:
    """A plain hook as an async one, for a task of its own: what it does to its task must not hit the worker."""
    return handler if handler.is_async else returning(handler, [], handler.owner)


def returning(handler: Handler, results: list[Any], owner: Owner | None) -> Handler:
    """The same hook as an async one that leaves what it returns in a list."""

    @functools.wraps(handler.call)
    async def call(*arguments: Any) -> Any:
        result = handler.call(*arguments)
        results.append(await result if isinstance(result, Awaitable) else result)

    return Handler(
        handler.name,
        call,
        handler.takes,
        is_async=True,
        timeout=handler.timeout,
        owner=owner,
        heeded=handler.heeded and owner is not None,
        blocks_after=handler.blocks_after if owner is not None else math.inf,
    )
