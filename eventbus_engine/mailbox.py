"""The mailbox of one background callback, and the worker that delivers what is in it, in order."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from eventbus_engine.attempts import Attempts, OutOfTimeError, returning
from eventbus_engine.counts import DeliveryCounts
from eventbus_engine.errors import SpoolRecordError
from eventbus_engine.handlers import HOOK, Handler, Occasion, lost_in, moment
from eventbus_engine.waiting import Item, Line

if TYPE_CHECKING:
    from eventbus_engine.entries import CallbackEntry
    from eventbus_engine.lanes import Dispatch
    from eventbus_engine.outbox import Outbox
    from eventbus_engine.snapshot import Record
    from eventbus_engine.sync import LoopThread

__all__ = ["PATIENCE", "TURN", "Mailbox", "sending"]

log: logging.Logger = logging.getLogger("eventbus_engine")

PATIENCE = 1.0
"""Seconds, past the deadline of the closing, for what is in a mailbox to get to the spool; and for that to be written.
"""


TURN = 0.02
"""Seconds after which publishers and workers that never suspend let the event loop have a turn."""


class Fate(NamedTuple):
    """What became of an event in its worker.

    Attributes:
        reached: whether it got as far as its hook.
        error: what that failed with at last.
        failure: what the sending of what it came to failed with at last.
    """

    reached: bool = True
    error: Exception | None = None
    failure: Exception | None = None


class Mailbox:
    """The events that wait for one background callback, in order, and the worker that delivers them.

    Attributes:
        entry: the callback.
        thread: the thread its worker lives on, if that is not the engine's own.
        outbox: what takes what there is to send, for a callback with a spool.
        attempts: what calls its hooks.
        delivered: as in `DeliveryCounts`; `failed` and `dropped` likewise.
        stopped: whether it takes and delivers nothing any more.
    """

    def __init__(self, entry: CallbackEntry, thread: LoopThread | None = None, outbox: Outbox | None = None) -> None:
        self.entry = entry
        self.thread = thread
        self.outbox = outbox
        self.attempts: Attempts = Attempts(entry) if outbox is None else outbox.attempts
        self.delivered: int = 0
        self.failed: int = 0
        self.dropped: int = 0
        self.stopped: bool = False
        self.line: Line = Line(entry)
        self._current: list[Item] = []
        self._idle = anyio.Event()
        # Its own shield: cancelling the run shall not lose what `close` still has time to deliver.
        self._scope = anyio.CancelScope(shield=True)

    # ------------------------------------------------------------------------------------------------------- counting

    @property
    def running(self) -> set[Dispatch]:
        """The deliveries in progress."""
        return self.line.running if self.outbox is None else self.line.running | self.outbox.running

    @property
    def occasion(self) -> Occasion | None:
        """The event of the hook that is running; None in between."""
        return self.attempts.occasion

    @property
    def waiting(self) -> int:
        """The events in it, without those in the hook. May be read from any thread."""
        return len(self.line)

    @property
    def lost(self) -> int:
        """The events, and records, that have not got where they were to go: with a far side, also those it refused."""
        counts = self.counts()
        return counts.dropped + (counts.failed if self.entry.sender is not None else 0)

    def counts(self) -> DeliveryCounts:
        """How its events have fared so far."""
        box = self.outbox
        breaker = self.attempts.breaker
        return DeliveryCounts(
            delivered=self.delivered + (box.delivered if box is not None else 0),
            failed=self.failed + (box.failed if box is not None else 0),
            dropped=self.dropped + (box.dropped if box is not None else 0),
            waiting=self.waiting + len(self._current) + (box.in_memory if box is not None else 0),
            spooled=box.spooled if box is not None else 0,
            retried=self.attempts.retried,
            timed_out=self.attempts.timed_out,
            circuit=breaker.state,
            openings=breaker.openings,
        )

    # ------------------------------------------------------------------------------------------------------ putting in

    def put(self, item: Item) -> int | None:
        """Put an event in.

        Returns:
            None; or the event's number, for `wait_for_room`, if there was no room and the publisher is to wait for it.
        """
        if self.stopped:
            self.undeliverable(item)
            return None
        if self._idle.is_set():
            self._idle = anyio.Event()
        number, fallen = self.line.put(item)
        if fallen is not None:
            self.undeliverable(fallen)
        return number

    async def wait_for_room(self, number: int, dispatches: list[Dispatch]) -> None:
        """Wait until the event of that number is within the bounds of the mailbox.

        Raises:
            DeadlockError: the callback waits for one of those dispatches.
        """
        if not self.stopped and not self.line.has_room(number):
            await self.line.wait_for_room(number, dispatches)

    def undeliverable(self, item: Item) -> None:
        """Count an event whose turn will never come."""
        self.dropped += item.size

    def _failed(self, item: Item) -> None:
        """Count what has failed of an event besides what it had to send: its hook, and the records not made by then."""
        self.failed += item.hook is not None or self.entry.sender is None
        self.dropped += len(item.records) + item.records.lost if item.records is not None else 0

    # ------------------------------------------------------------------------------------------------------ delivering

    async def run(self) -> None:
        """Deliver, one after another, until stopped."""
        try:
            with self._scope:
                if self.outbox is None:
                    await self._work()
                else:
                    await self.outbox.open_at_last()
                    async with anyio.create_task_group() as group:
                        group.start_soon(self.outbox.run)
                        await self._work()
        except anyio.get_cancelled_exc_class():
            # Its shield keeps out every scope, so it was the task itself that somebody cancelled.
            log.error("the worker of background callback %s was cancelled; it gets no more events", self.entry.name)
        except OutOfTimeError:
            pass  # Nothing would come of it in time, so `close` need not wait either.
        finally:
            self.stop()

    async def _work(self) -> None:
        turn_due = 0.0
        while True:
            if (now := perf_counter()) > turn_due:
                # Hooks that never suspend would keep the event loop to themselves for as long as there are events.
                await checkpoint()
                turn_due = now + TURN
            await self._deliver_safely(await self._next())

    async def _deliver_safely(self, items: list[Item]) -> None:
        try:
            await self._deliver(items)
        except OutOfTimeError:
            raise
        except Exception:
            # Of what nobody has foreseen, such as an exception that itself raises. It is no reason to stop the run.
            log.exception("background callback %s could not be delivered to", self.entry.name)
            left, self._current = self._current, []
            self.failed += sum(item.weight for item in left)

    async def _next(self) -> list[Item]:
        """Wait for what is to be delivered next: one event, or a batch."""
        while not self.line:
            self._idle.set()
            await self.line.arrival()
        most = min(self.entry.max_batch, self.entry.max_pending)
        # What goes to the disk goes there at once; the batch to send is filled there.
        wait = self.entry.max_wait if self.outbox is None else 0.0
        if len(self.line) < most and wait and not self.attempts.closing:
            with anyio.move_on_after(wait):
                while len(self.line) < most and not self.attempts.closing:
                    await self.line.arrival(most)
        return self.line.take(self.entry.max_batch)

    async def _deliver(self, items: list[Item]) -> None:
        self._current = list(items)
        running = self.line.running
        try:
            if self.outbox is None:
                self._account(items, await self._attempt_all(items))
            else:
                await self._hand_over(items, self.outbox)
        finally:
            running.clear()
            for item in items:
                if item.begun is not None:
                    # On a thread of its own it stays the current one for whatever the hook leaves behind there.
                    item.begun.running = item.begun.apart

    def _account(self, items: list[Item], fates: list[Fate]) -> None:
        if not self._current:
            return  # It outlived the closing, which has counted it as lost.
        self._current = []
        for item, (reached, error, failure) in zip(items, fates, strict=True):
            if not reached:
                self.undeliverable(item)
                continue
            rows = len(item.made or ())
            if failure is None:
                self.delivered += rows or error is None
            else:
                self.failed += rows
                self.delivered += error is None and not rows
            if error is not None:
                self._failed(item)
        failure = fates[-1].failure  # of the whole batch
        if failure is not None:
            rows = sum(len(item.made or ()) for item in items)
            arrived = rows - lost_in(failure, rows)
            self.failed -= arrived
            self.delivered += arrived

    async def _attempt_all(self, items: list[Item]) -> list[Fate]:
        """Call the hooks, and send what they come to."""
        entry, first = self.entry, items[0]
        if not entry.opened and not entry.quarantined and (opener := entry.opener()) is not None:
            error = await self.attempts.persist(opener, self._begin(first).untraced())
            if error is not None:
                self.attempts.settle(error, moment(first.event, opener))
        if not entry.ready:
            return [Fate(reached=False)] * len(items)
        if entry.sender is None:
            error = await self.attempts.persist(first.handler, self._begin(first))
            if error is not None:
                self.attempts.settle(error, first.event)
            return [Fate(error=error)]
        return await self._send(entry.sender, items)

    async def _send(self, sender: Handler, items: list[Item]) -> list[Fate]:
        """Have every event's hook say what there is to send, and send that together."""
        records: list[Record] = []
        errors: list[Exception | None] = []
        for item in items:
            errors.append(await self._make(item) if item.made is None else None)
            records += item.to_send()
        failure: Exception | None = None
        if records:
            last = items[-1]
            failure = await self.attempts.persist(sending(sender, records), self._begin(last))
            if failure is not None:
                self.attempts.settle(failure, last.event)
        return [Fate(error=error, failure=failure) for error in errors]

    async def _hand_over(self, items: list[Item], outbox: Outbox) -> None:
        """Have every event's hook say what there is to send, and leave it to the outbox."""
        for item in items:
            known = item.made is not None or self.entry.quarantined
            error = None if known else await self._make(item)
            if not self._current:
                return  # It outlived the closing, which has counted it as lost.
            del self._current[0]
            if self.entry.quarantined:
                if error is None:
                    self.undeliverable(item)
                else:
                    self.dropped += len(item.made or ())
                    self._failed(item)
                continue
            records = item.to_send()
            try:
                outbox.put(records)
            except SpoolRecordError as refused:
                self.attempts.settle(refused, item.event)
                self.failed += len(records)
            if error is not None:
                self._failed(item)
            elif not records:
                self.delivered += 1
        # A disk that takes no more fills the mailbox, which knows what to do about that.
        await outbox.room()

    async def _make(self, item: Item) -> Exception | None:
        """Have the hook of an event say what there is to send; returns what it failed with."""
        values: list[Any] = []
        error: Exception | None = None
        try:
            error = await self.attempts.call(returning(item.handler, values, owner=None), self._begin(item))
        finally:
            # However it ended: what there is to send counts for as much if it is lost.
            item.made = [row for row in (*item.rows, *values) if row is not None]
        if error is not None:
            self.attempts.settle(error, item.event)
        return error

    def _begin(self, item: Item) -> Occasion:
        """The event as its hook sees it, from here on in progress."""
        occasion = item.begin()
        assert item.begun is not None  # noqa: S101 -- it has just begun
        self.line.running.add(item.begun)
        return occasion

    # --------------------------------------------------------------------------------------------------------- closing

    @property
    def idle(self) -> bool:
        """Whether everything that was put in has been delivered."""
        return self._idle.is_set() and (self.outbox is None or self.outbox.idle)

    async def drain(self, seconds: float) -> None:
        """Wait until it is idle, for so many seconds. What pauses before another attempt makes it now."""
        self.attempts.hurry(anyio.current_time() + seconds)
        self.line.wake()
        with anyio.move_on_after(seconds):
            if self.outbox is not None:
                self.outbox.hurry()
            await self._idle.wait()
            if self.outbox is not None:
                await self.outbox.drain()

    async def finish(self) -> None:
        """Stop the worker; what is to be sent and is not goes to the spool."""
        if self.outbox is not None:
            self.outbox.give_up()
            with anyio.move_on_after(PATIENCE, shield=True):
                await self._idle.wait()
            await self.outbox.finish(PATIENCE)
        self.stop()

    def stop(self) -> None:
        """Stop the worker, and count what it leaves behind."""
        self.abandon()
        self.line.admit(everybody=True)
        self._idle.set()
        self._scope.cancel()

    def abandon(self) -> None:
        """Count what is left as lost. All that can be done from another thread, while a hook holds up the worker's."""
        self.stopped = True
        items, self._current = [*self._current, *self.line.clear()], []
        for item in items:
            self.undeliverable(item)


def sending(sender: Handler, records: Sequence[Record]) -> Handler:
    """A callback's `send_records` with what it is to send."""
    return Handler(
        sender.name,
        functools.wraps(sender.call)(lambda _, logger: sender.call(records, logger)),
        HOOK,
        is_async=False,
        timeout=sender.timeout,
        owner=sender.owner,
        blocks_after=sender.blocks_after,
    )
