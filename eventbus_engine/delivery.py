"""Background delivery: a bounded mailbox and one worker for each callback that the events shall not wait for."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from eventbus_engine._steps import without_loop
from eventbus_engine.counts import DeliveryCounts
from eventbus_engine.errors import ConfigurationError, SyncUsageError
from eventbus_engine.handlers import Handler, Occasion, add_note
from eventbus_engine.lanes import Dispatch
from eventbus_engine.mailbox import PATIENCE, TURN, Mailbox
from eventbus_engine.snapshot import take_snapshot
from eventbus_engine.waiting import Item

if TYPE_CHECKING:
    from eventbus_engine.engine import Engine
    from eventbus_engine.entries import CallbackEntry
    from eventbus_engine.logger import Pending
    from eventbus_engine.outbox import Outbox, Spools
    from eventbus_engine.sync import LoopThread

__all__ = ["Delivery", "Room"]

log: logging.Logger = logging.getLogger("eventbus_engine")

GRACE = 0.2
"""Seconds past the deadline before a thread that does not answer is left behind."""

Room = Callable[[], Awaitable[None]]
"""Waits until there is room in a mailbox for the event that was put into it, or just lets its worker get on."""


class Delivery:
    """The mailboxes of an engine, alive while the engine is entered, or until `engine.sync` is closed.

    Attributes:
        mailboxes: by callback.
        start_thread: where `engine.sync` has its workers live; None if the engine has not been used that way.
    """

    def __init__(self) -> None:
        self.mailboxes: dict[CallbackEntry, Mailbox] = {}
        self.start_thread: Callable[[], LoopThread] | None = None
        self._group: TaskGroup | None = None
        self._spools: Spools | None = None
        self._thread_id = 0
        self._turn_due = 0.0

    @property
    def running(self) -> set[Dispatch]:
        """The deliveries in progress, unless they have outlived the closing."""
        return {d for mailbox in self.mailboxes.values() if not mailbox.stopped for d in mailbox.running}

    def in_flight(self) -> list[Occasion]:
        """The deliveries in progress, those that have outlived the closing as well. From any thread."""
        found = (mailbox.occasion for mailbox in tuple(self.mailboxes.values()))
        return [occasion for occasion in found if occasion is not None]

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise ConfigurationError("the engine is entered already; `async with engine:` once, around all its events")
        group = anyio.create_task_group()
        await group.__aenter__()
        self._group, self._thread_id = group, threading.get_ident()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        for mailbox in self.mailboxes.values():
            if mailbox.thread is None:
                mailbox.stop()
        if group is not None:
            await group.__aexit__(None, None, None)

    def counts(self) -> dict[str, DeliveryCounts]:
        """How the events of each background callback have fared, by its name."""
        return {mailbox.entry.name: mailbox.counts() for mailbox in list(self.mailboxes.values())}

    def unraised(self) -> dict[str, int]:
        """Name to number of failed events, of the callbacks whose failures an event would have raised."""
        mailboxes = [mailbox for mailbox in self.mailboxes.values() if mailbox.entry.on_error == "raise"]
        failed = [mailbox for mailbox in mailboxes if mailbox.counts().failed]
        return {mailbox.entry.name: mailbox.counts().failed for mailbox in failed}

    def post(
        self, entry: CallbackEntry, hook: Handler | None, occasion: Occasion, pending: Pending | None = None
    ) -> list[Room]:
        """Put an event into the mailbox of a callback: a snapshot of it, as it is now.

        Args:
            entry: the callback.
            hook: what to call, if there is more to deliver than records.
            occasion: the event.
            pending: what was logged for a destination since its last event.

        Returns:
            What to await: if the mailbox is full and the callback wants events to wait for room, or if it is time that
            its worker gets on.

        Raises:
            ConfigurationError: the engine is not entered, so that no worker would ever deliver it.
            SyncUsageError: the engine is entered on the event loop of another thread.
        """
        if entry.quarantined:
            return []
        mailbox = self.mailboxes.get(entry) or self._open_mailbox(entry, occasion.logger)
        thread = mailbox.thread
        if thread is None and threading.get_ident() != self._thread_id:
            raise SyncUsageError(
                f"callback {entry.name} is delivered in the background, on the event loop of another thread, which has "
                f"the engine entered; call anyio.from_thread.run(engine.run_event, ...) instead of engine.sync"
            )
        try:
            snapshot = take_snapshot(entry, occasion)
            key = entry.coalesce_key(occasion.event, snapshot) if entry.coalesce_key is not None else occasion.event
            hash(key)  # here, where it fails as the callback's own
        except Exception as error:
            # What it asked for cannot be copied. That is its own failure, and never the run's.
            add_note(error, f"in background callback {entry.name} on {occasion.event.name}")
            mailbox.dropped += (hook is not None) + (len(pending.take()) if pending else 0)
            mailbox.attempts.settle(error, occasion.event)
            return []
        item = Item(entry, hook, occasion, snapshot, pending, apart=thread is not None)
        item.key = key
        number = mailbox.put(item) if thread is None else thread.call(mailbox.put, item)
        if number is None:
            return [checkpoint] if thread is None and self._owes_a_turn(mailbox) else []
        dispatch = occasion.dispatch
        assert dispatch is not None  # noqa: S101 -- only closing has none, and it posts nothing
        if thread is None:
            return [functools.partial(mailbox.wait_for_room, number, [dispatch, *dispatch.ancestors()])]
        # The worker never waits for an event there, since it may not publish any.
        return [functools.partial(thread.visit, mailbox.wait_for_room, number, [dispatch])]

    def _owes_a_turn(self, mailbox: Mailbox) -> bool:
        """Whether the event loop is to have a turn: without one no worker gets on, however long the events go on.

        A program whose handlers are all plain, and that computes on the thread of the loop, never suspends.
        """
        if without_loop.get():
            return False  # By `engine.sync`, which cannot: whoever calls that gives the loop its turns.
        now = perf_counter()
        if now < self._turn_due and mailbox.waiting <= mailbox.entry.max_pending // 2:
            return False
        self._turn_due = now + TURN
        return True

    async def start(self, entries: Sequence[CallbackEntry], engine: Engine[Any]) -> None:
        """Open the mailboxes of callbacks with a spool, which may have something to send before there is any event.

        Raises:
            CallbackInUseError: one is open in another engine.
            SpoolError: a spool cannot be opened.
        """
        for entry in entries:
            outbox = self._outbox(entry, engine.logger, apart=False)
            if outbox is not None:
                entry.claim(engine)
                await outbox.open()
                _ = self._open_mailbox(entry, engine.logger, outbox)

    def _outbox(self, entry: CallbackEntry, logger: Any, *, apart: bool) -> Outbox | None:
        if entry.spool is None:
            return None
        # Imported on use: few have a spool, and SQLite takes its time to load.
        from eventbus_engine.outbox import Outbox, Spools

        self._spools = self._spools or Spools()
        return Outbox(entry, logger, self._spools, apart=apart)

    def _open_mailbox(self, entry: CallbackEntry, logger: Any, outbox: Outbox | None = None) -> Mailbox:
        if self._group is not None:
            mailbox = Mailbox(entry, outbox=outbox or self._outbox(entry, logger, apart=False))
            # In a context of its own: it belongs to no event, and keeps nothing of the first one's alive.
            _ = Context().run(self._group.start_soon, mailbox.run)
        elif self.start_thread is not None:
            thread = self.start_thread()
            outbox = thread.call(functools.partial(self._outbox, entry, logger, apart=True))
            mailbox = thread.call(Mailbox, entry, thread, outbox)
            thread.start_soon(mailbox.run)
        else:
            raise ConfigurationError(
                f"callback {entry.name} is delivered in the background, by a worker that lives while the engine is "
                f"entered; run its events inside `async with engine:`, or by engine.sync where there is no event loop"
            )
        self.mailboxes[entry] = mailbox
        return mailbox

    def at_home(self, entry: CallbackEntry, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, to be run where the callback's worker lives: what `open` acquired belongs there."""
        mailbox = self.mailboxes.get(entry)
        if mailbox is None or mailbox.thread is None:
            return function
        return functools.partial(mailbox.thread.visit, function)

    async def close(self, deadline: float) -> dict[str, int]:
        """Deliver what is in the mailboxes until the deadline, then stop.

        Args:
            deadline: by `anyio.current_time`.

        Returns:
            Name to number of the events that were never delivered, those dropped earlier included.
        """
        mailboxes = self.mailboxes.values()
        with anyio.move_on_after(max(deadline - anyio.current_time(), 0) + GRACE):
            # More than once: a hook may publish, and so fill a mailbox that was empty.
            while (seconds := deadline - anyio.current_time()) > 0 and not all(mailbox.idle for mailbox in mailboxes):
                async with anyio.create_task_group() as group:
                    for mailbox in mailboxes:
                        _ = group.start_soon(self.at_home(mailbox.entry, mailbox.drain), seconds)
        patience = GRACE + 2 * PATIENCE * any(mailbox.outbox is not None for mailbox in mailboxes)
        with anyio.move_on_after(patience) as limit:
            async with anyio.create_task_group() as group:
                for mailbox in mailboxes:
                    _ = group.start_soon(self.at_home(mailbox.entry, mailbox.finish))
        if limit.cancelled_caught:
            for mailbox in mailboxes:
                mailbox.abandon()
        lost = {mailbox.entry.name: mailbox.lost for mailbox in self.mailboxes.values() if mailbox.lost}
        for mailbox in self.mailboxes.values():
            if dropped := mailbox.counts().dropped:
                log.error("background callback %s has lost %d events", mailbox.entry.name, dropped)
        return lost

    async def close_spools(self) -> None:
        """Close the spools that were opened here."""
        if self._spools is not None:
            await anyio.to_thread.run_sync(self._spools.close)
