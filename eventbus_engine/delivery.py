"""Background delivery: a bounded mailbox and one worker for each callback that the events shall not wait for."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio
from anyio.abc import TaskGroup

from eventbus_engine._steps import leave_loop
from eventbus_engine.envelope import context_of
from eventbus_engine.errors import ConfigurationError, SyncUsageError
from eventbus_engine.fanout import run_fanout
from eventbus_engine.handlers import ENVELOPE, HOOK, Handler, Occasion, Owner, add_note
from eventbus_engine.lanes import Dispatch, Waiter
from eventbus_engine.snapshot import take_snapshot

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.participants import CallbackEntry
    from eventbus_engine.sync import LoopThread

__all__ = ["Delivery", "Mailbox"]

log: logging.Logger = logging.getLogger("eventbus_engine")

GRACE = 0.2
"""Seconds past the deadline before a thread that does not answer is left behind."""

Room = Callable[[], Awaitable[None]]
"""Waits until there is room in a mailbox for the event that was put into it."""


class _Item(NamedTuple):
    hook: Handler
    occasion: Occasion
    dispatch: Dispatch
    size: int


class Mailbox:
    """The events that wait for one background callback, in order, and the worker that delivers them.

    An event whose publisher is to wait for room (`on_full="block"`) stands in line already, beyond `max_pending`: so
    the order is that of the publishing, and a publisher that is cancelled loses nothing.

    Attributes:
        entry: the callback.
        thread: the thread its worker lives on, if that is not the engine's own.
        delivered: events whose hook has run to its end.
        failed: events whose hook raised or timed out.
        dropped: events it will never see to the end: the mailbox was full, the callback would not open or was
            dropped from the run, or the engine closed.
        running: the delivery in progress.
        occasion: the event of that.
        stopped: whether it takes and delivers nothing any more.
    """

    def __init__(self, entry: CallbackEntry, thread: LoopThread | None = None) -> None:
        self.entry = entry
        self.thread = thread
        self.delivered: int = 0
        self.failed: int = 0
        self.dropped: int = 0
        self.running: set[Dispatch] = set()
        self.occasion: Occasion | None = None
        self._items: deque[_Item] = deque()
        self._put_in = self._taken_out = 0
        self._blocked: deque[tuple[int, Waiter]] = deque()
        self._current: _Item | None = None
        self.stopped: bool = False
        self._arrived = anyio.Event()
        self._idle = anyio.Event()
        # Its own shield: cancelling the run shall not lose what `close` still has time to deliver.
        self._scope = anyio.CancelScope(shield=True)

    def put(self, item: _Item) -> int | None:
        """Put an event in.

        Returns:
            None; or the event's number, for `wait_for_room`, if there was no room and the publisher is to wait for it.
        """
        if self.stopped:
            self._drop(item)
            return None
        full = len(self._items) >= self.entry.max_pending
        if full and self.entry.on_full != "block":
            self._make_room_for(item)
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._items.append(item)
        self._put_in += 1
        self._arrived.set()
        return self._put_in if full and self.entry.on_full == "block" else None

    def _make_room_for(self, item: _Item) -> None:
        event = item.occasion.event
        alike = (i for i, waiting in enumerate(self._items) if waiting.occasion.event is event)
        oldest = next(alike, 0) if self.entry.on_full == "coalesce" else 0
        self._drop(self._items[oldest])
        del self._items[oldest]

    def _drop(self, item: _Item) -> None:
        self.dropped += item.size

    async def wait_for_room(self, number: int, dispatches: list[Dispatch]) -> None:
        """Wait until the event of that number is within the bounds of the mailbox.

        Args:
            number: what `put` returned.
            dispatches: who waits, and its ancestors.

        Raises:
            DeadlockError: the callback waits for one of those.
        """
        if number - self._taken_out > self.entry.max_pending and not self.stopped:
            waiter = Waiter(self, dispatches[0], f"the full mailbox of callback {self.entry.name}, which is at ")
            self._blocked.append((number, waiter))
            await waiter.wait(dispatches)

    async def run(self) -> None:
        """Deliver, one after another, until stopped."""
        try:
            with self._scope:
                while True:
                    while self._items:
                        await self._deliver(self._take())
                    self._idle.set()
                    self._arrived = anyio.Event()
                    await self._arrived.wait()
        except anyio.get_cancelled_exc_class():
            # Its shield keeps out every scope, so it was the task itself that somebody cancelled.
            log.error("the worker of background callback %s was cancelled; it gets no more events", self.entry.name)
        finally:
            self.stop()

    def _take(self) -> _Item:
        self._taken_out += 1
        item = self._items.popleft()
        self._admit_blocked()
        return item

    def _admit_blocked(self) -> None:
        while self._blocked and (self.stopped or self._blocked[0][0] - self._taken_out <= self.entry.max_pending):
            self._blocked.popleft()[1].ready.set()

    async def _deliver(self, item: _Item) -> None:
        entry, done = self.entry, None
        self._current = item
        self.running.add(item.dispatch)
        self.occasion = item.occasion
        try:
            if not entry.opened and not entry.quarantined and (opener := entry.opener()) is not None:
                await self._call(opener, item.occasion.untraced())
            if entry.ready:
                done = await self._call(item.hook, item.occasion)
        finally:
            self.running.clear()
            self.occasion = None
            # On a thread of its own it stays the current one for whatever the hook leaves behind there.
            item.dispatch.running = item.dispatch.apart
        if self._current is None:
            return  # It outlived the closing, which has counted it as lost.
        self._current = None
        if done is None:
            self._drop(item)
        elif done:
            self.delivered += 1
        else:
            self.failed += 1

    async def _call(self, handler: Handler, occasion: Occasion) -> bool:
        """Call a hook in a task of its own; its failure is the callback's own, and never the run's."""
        failures = await run_fanout([_asynchronous(handler)], occasion)
        for _, error in failures:
            self.settle(handler.owner, error, occasion.event)
        return not failures

    def settle(self, owner: Owner, error: Exception, event: EventName) -> None:
        """Have a failure logged, or the callback quarantined for it. There is no event left to raise it from."""
        add_note(error, f"in background callback {self.entry.name} on {event.name}")
        if owner.settle(error, event):
            log.error("background callback %s failed on %s", self.entry.name, event.name, exc_info=error)

    @property
    def waiting(self) -> int:
        """The events in it. May be read from any thread."""
        return len(self._items)

    @property
    def idle(self) -> bool:
        """Whether everything that was put in has been delivered."""
        return self._idle.is_set()

    async def drain(self, seconds: float) -> None:
        """Wait until it is idle, for so many seconds."""
        with anyio.move_on_after(seconds):
            await self._idle.wait()

    def stop(self) -> None:
        """Stop the worker, and count what it leaves behind."""
        self.abandon()
        self._admit_blocked()
        self._idle.set()
        self._scope.cancel()

    def abandon(self) -> None:
        """Count what is left as lost. All that can be done from another thread, while a hook holds up the worker's."""
        self.stopped = True
        for item in [*([self._current] if self._current is not None else []), *self._items]:
            self._drop(item)
        self._current = None
        self._items.clear()


def _asynchronous(handler: Handler) -> Handler:
    """A plain hook as an async one, for a task of its own: what it does to its task must not hit the worker."""
    if handler.is_async:
        return handler

    @functools.wraps(handler.call)
    async def call(*arguments: Any) -> Any:
        result = handler.call(*arguments)
        return await result if isinstance(result, Awaitable) else result

    return Handler(
        handler.name,
        call,
        handler.takes,
        is_async=True,
        timeout=handler.timeout,
        owner=handler.owner,
        heeded=handler.heeded,
    )


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
        self._thread_id = 0

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

    def post(self, hook: Handler, occasion: Occasion, size: int = 1) -> list[Room]:
        """Put an event into its callback's mailbox: a snapshot of it, as it is now.

        Args:
            hook: what to call, of a background callback.
            occasion: the event.
            size: for how many it counts if it is lost.

        Returns:
            What to await, if the mailbox is full and the callback wants events to wait for room; else nothing.

        Raises:
            ConfigurationError: the engine is not entered, so that no worker would ever deliver it.
            SyncUsageError: the engine is entered on the event loop of another thread.
        """
        entry: CallbackEntry = hook.owner
        if entry.quarantined:
            return []
        mailbox = self.mailboxes.get(entry) or self._open_mailbox(entry)
        thread = mailbox.thread
        if thread is None and threading.get_ident() != self._thread_id:
            raise SyncUsageError(
                f"callback {entry.name} is delivered in the background, on the event loop of another thread, which has "
                f"the engine entered; call anyio.from_thread.run(engine.run_event, ...) instead of engine.sync"
            )
        try:
            item = _address(hook, occasion, size, apart=thread is not None)
        except Exception as error:
            # What it asked for cannot be copied. That is its own failure, and never the run's.
            mailbox.dropped += size
            mailbox.settle(entry, error, occasion.event)
            return []
        number = mailbox.put(item) if thread is None else thread.call(mailbox.put, item)
        if number is None:
            return []
        dispatch = _dispatch_of(occasion)
        if thread is None:
            return [functools.partial(mailbox.wait_for_room, number, [dispatch, *dispatch.ancestors()])]
        # The worker never waits for an event there, since it may not publish any.
        return [functools.partial(thread.visit, mailbox.wait_for_room, number, [dispatch])]

    def _open_mailbox(self, entry: CallbackEntry) -> Mailbox:
        if self._group is not None:
            mailbox = Mailbox(entry)
            # In a context of its own: it belongs to no event, and keeps nothing of the first one's alive.
            _ = Context().run(self._group.start_soon, mailbox.run)
        elif self.start_thread is not None:
            thread = self.start_thread()
            mailbox = thread.call(Mailbox, entry, thread)
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
        with anyio.move_on_after(max(deadline - anyio.current_time(), 0) + GRACE) as limit:
            # More than once: a hook may publish, and so fill a mailbox that was empty.
            while (seconds := deadline - anyio.current_time()) > 0 and not all(mailbox.idle for mailbox in mailboxes):
                async with anyio.create_task_group() as group:
                    for mailbox in mailboxes:
                        _ = group.start_soon(self.at_home(mailbox.entry, mailbox.drain), seconds)
            for mailbox in mailboxes:
                if mailbox.thread is None:
                    mailbox.stop()
                else:
                    await mailbox.thread.visit(mailbox.stop)
        if limit.cancelled_caught:
            for mailbox in mailboxes:
                mailbox.abandon()
        lost = {mailbox.entry.name: mailbox.dropped for mailbox in self.mailboxes.values() if mailbox.dropped}
        for name, count in lost.items():
            log.error("background callback %s never saw %d events", name, count)
        return lost


def _dispatch_of(occasion: Occasion) -> Dispatch:
    assert occasion.dispatch is not None  # noqa: S101 -- only closing has none, and it posts nothing
    return occasion.dispatch


def _address(hook: Handler, occasion: Occasion, size: int, *, apart: bool) -> _Item:
    """An event as its mailbox keeps it: with the snapshot for the callback, and the context it was published in."""
    envelope = occasion.arguments[ENVELOPE][0]
    _, logger = occasion.arguments[HOOK]
    snapshot = take_snapshot(hook.owner, occasion)
    bound = logger.bound_to(snapshot) if hasattr(logger, "bound_to") else logger
    dispatch = Dispatch(envelope, None, None, _dispatch_of(occasion).lanes, apart=apart)
    context = context_of(dispatch)
    context.run(leave_loop)
    theirs = Occasion(envelope, snapshot, bound, dispatch, occasion.tracer)
    theirs.context = context
    return _Item(hook, theirs, dispatch, size)
