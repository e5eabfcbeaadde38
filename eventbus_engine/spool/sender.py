"""From the spool to the far side, in order, across outages and processes: `SpoolSender`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from eventbus_engine.errors import ConfigurationError, SpoolCorruptError, SpoolError, SpoolFullError
from eventbus_engine.policy import asked_for
from eventbus_engine.spool.encoding import SpooledEvent, decode_event, encode_event
from eventbus_engine.spool.store import Record, Spool

__all__ = ["SenderReport", "SpoolSender"]

log: logging.Logger = logging.getLogger("eventbus_engine")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SenderReport(NamedTuple):
    """What became of the events.

    Attributes:
        delivered: events that the far side took, those of earlier processes included.
        left: events in the spool, for the next process.
        lost: events that are neither: still in memory, since the disk took none, or unreadable.
    """

    delivered: int
    left: int
    lost: int


class SpoolSender:
    """Takes events at any rate, writes them down at once, and delivers them from there in the order they came in.

    Every event goes through the spool, so the order and the promise are the same whether the far side is up, slow or
    down, and the next process begins where this one ended. While the disk refuses to take any, they are kept in memory,
    and delivered from there once the spool is empty; `room` says when there are too many.

    Args:
        spool: where to; several senders may share one.
        queue: whose events they are: the callback's name. One sender per queue.
        deliver: async, takes a list of events. Its exception means that they are to be tried again; what the far side
            will never take it has to drop itself. Its own retries and deadlines come first.
        max_batch: the most events for one call of it.
        max_wait: seconds that a batch waits to fill up, written down all the while.
        retry_wait: seconds from an exception to the next attempt, if it does not ask for more (`retry_after`).
        linger: seconds that an event waits for others to be written down with it: a write costs the same for many.

    Attributes:
        delivered: events that `deliver` has returned for.
        lost: events that were unreadable.
        unrecorded: losses that are still to be noted in the spool.
        spooled: events that are written down and not delivered, as far as it knows without looking.

    Raises:
        ConfigurationError: a limit below 1, or a negative wait.
    """

    def __init__(
        self,
        spool: Spool,
        queue: str,
        deliver: Callable[[Sequence[SpooledEvent]], Awaitable[object]],
        *,
        max_batch: int = 100,
        max_wait: float = 0.0,
        retry_wait: float = 1.0,
        linger: float = 0.0,
    ) -> None:
        if max_batch < 1 or retry_wait < 0:
            raise ConfigurationError(
                f"max_batch={max_batch}, retry_wait={retry_wait} do not fit a SpoolSender; the first is at least 1, "
                f"the second at least 0"
            )
        self.spool = spool
        self.queue = queue
        self.delivered: int = 0
        self.lost: int = 0
        self.spooled: int = 0
        self._deliver = deliver
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._retry_wait = retry_wait
        self._linger = linger
        self._fresh: deque[Record] = deque()
        self._taken: list[Record] = []
        self._cursor = self._batch = 0
        self.unrecorded: int = 0
        self._refused = self._failing = self._closing = self._given_up = False
        self._arrived, self._stored, self._idle = anyio.Event(), anyio.Event(), anyio.Event()
        self._moved, self._hurried, self._due = anyio.Event(), anyio.Event(), anyio.Event()
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._ended.set()
        # Held by whoever has taken events out of memory, so that none overtakes them.
        self._memory = anyio.Lock()
        self._threads = anyio.CapacityLimiter(2)

    def put(self, event: SpooledEvent) -> bool:
        """Take an event. Returns at once; to be called on the event loop's thread.

        Returns:
            False if the sender is closing and does not take it.

        Raises:
            SpoolRecordError: it holds what cannot be encoded, or is too large. It is not taken.
        """
        if self._closing:
            return False
        self.put_all([event])
        return True

    def put_all(self, events: Sequence[SpooledEvent]) -> None:
        """Take all of these events, or none of them.

        Raises:
            SpoolRecordError: one holds what cannot be encoded, or is too large.
        """
        if not events:
            return
        records = [encode_event(event) for event in events]
        for record in records:
            self.spool.check(record)
        self._fresh.extend(records)
        if self._refused:
            # The disk may take its time; what can be delivered from memory need not wait for it.
            self._stored.set()
        if self._idle.is_set() and not self._given_up:
            self._idle = anyio.Event()
        self._arrived.set()

    @property
    def in_memory(self) -> int:
        """Events that are not written down yet."""
        return len(self._fresh) + len(self._taken)

    async def room(self, limit: int) -> None:
        """Wait until fewer than so many events are in memory, or there is no sense in waiting."""
        while self.in_memory >= limit and not self._given_up:
            self._due.set()
            if self._moved.is_set():  # else others wait for it
                self._moved = anyio.Event()
            await self._moved.wait()

    @property
    def idle(self) -> bool:
        """Whether everything has been delivered, or will not be: it was hurried, and another attempt failed."""
        return self._idle.is_set()

    def hurry(self) -> None:
        """Let no batch wait to fill up, and give up at the first attempt that fails with all on the disk."""
        for event in (self._hurried, self._stored, self._due):
            event.set()

    def give_up(self) -> None:
        """Deliver nothing more after what is on its way; go on writing."""
        self._given_up = True
        for event in (self._hurried, self._idle, self._moved, self._stored, self._due):
            event.set()

    async def drain(self) -> None:
        """Wait until it is idle."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write and deliver until cancelled, or closed. What is in memory by then is written first."""
        self._ended = ended = anyio.Event()
        try:
            with self._scope:
                with suppress(SpoolError):
                    self.spooled = (await self._in_thread(self.spool.stats, self.queue)).pending
                async with anyio.create_task_group() as group:
                    group.start_soon(self._write_all)
                    group.start_soon(self._send_all)
        finally:
            with anyio.CancelScope(shield=True):
                await self.write()
            ended.set()

    async def close(self, seconds: float) -> SenderReport:
        """Take no more events, deliver what there is for so many seconds, write down what is left, and end `run`.

        Returns:
            What became of all events. What is left in the spool is for the next process.
        """
        self._closing = True
        with anyio.move_on_after(seconds):
            await self._idle.wait()
        self._scope.cancel()
        left = 0
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
            await self.write()
            await self._acknowledge()
            self.spooled = left = (await self._in_thread(self.spool.stats, self.queue)).pending
        return SenderReport(self.delivered, left, self.lost + len(self._fresh))

    # ---------------------------------------------------------------------------------------------------- writing

    async def _write_all(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            if self._linger and not self._hurried.is_set():
                self._due = anyio.Event()
                with anyio.move_on_after(self._linger):
                    await self._due.wait()
            while not await self.write():
                self._stored.set()
                await anyio.sleep(self._retry_wait)

    async def write(self) -> bool:
        """Move what is in memory into the spool, and say whether that went well."""
        async with self._memory:
            if not self._fresh and not self.unrecorded:
                self._refused = False  # there is nothing that it refuses
                return True
            self._take(len(self._fresh))
            stored = 0
            try:
                if self.unrecorded:
                    await self._in_thread(self.spool.count_lost, self.queue, self.unrecorded)
                    self.unrecorded = 0
                stored = await self._in_thread(self.spool.append, self.queue, self._taken)
                self._refused = False
            except SpoolError as error:
                stored = error.stored if isinstance(error, SpoolFullError) else 0
                if not self._refused:
                    log.error("the events of %s stay in memory: %s", self.queue, error)
                self._refused = True
            finally:
                self.spooled += stored
                self._put_back(stored)
                self._stored.set()
            return not self._refused

    def _take(self, count: int) -> None:
        self._taken = [self._fresh.popleft() for _ in range(min(count, len(self._fresh)))]

    def _put_back(self, done: int) -> None:
        """Return what was taken out of memory, but for the first ones."""
        self._fresh.extendleft(reversed(self._taken[done:]))
        self._taken = []
        self._moved.set()

    def _lose(self) -> None:
        self.lost += 1
        self.unrecorded += 1

    # --------------------------------------------------------------------------------------------------- delivering

    async def _send_all(self) -> None:
        while not self._given_up:
            await self._fill()
            self._stored = anyio.Event()
            try:
                sent = await self._send_stored() or await self._send_fresh()
                if self._failing:
                    log.warning("the events of %s are delivered again", self.queue)
                self._failing = False
            except Exception as error:
                await self._fail(error)
                continue
            if not sent:
                if not self._fresh and not self._taken and not self._stored.is_set():
                    self._idle.set()
                await self._stored.wait()

    async def _fill(self) -> None:
        """Wait for a batch to fill up. What is in it is on the disk."""
        with anyio.move_on_after(self._max_wait):
            while 0 < self.spooled < self._max_batch and not self._hurried.is_set() and not self._failing:
                self._stored = anyio.Event()
                await self._stored.wait()

    async def _fail(self, error: Exception) -> None:
        if not self._failing:
            log.warning("the events of %s cannot be delivered now: %r", self.queue, error)
        self._failing = True
        pause = max(self._retry_wait, asked_for(error))
        if not self._hurried.is_set():
            with anyio.move_on_after(pause):
                await self._hurried.wait()
        elif self.in_memory:
            await anyio.sleep(pause)  # giving up would lose them
        else:
            self.give_up()

    async def flush(self) -> None:
        """Write and deliver what there is, once, without `run`; what fails stays in the spool."""
        await self.write()
        try:
            while await self._send_stored():
                pass
        except Exception as error:
            log.warning("the events of %s cannot be delivered now: %r", self.queue, error)

    async def _send_stored(self) -> bool:
        """Deliver the next events of the spool, and say whether there were any."""
        records = await self._in_thread(self.spool.next_batch, self.queue, self._max_batch, self._cursor)
        if not records:
            self.spooled = 0
            return False
        await self._hand_over(records)
        # Even if that cannot be noted now, they are not to be sent again, except by the next process.
        self._cursor = records[-1].number
        self.spooled -= len(records)
        await self._acknowledge()
        return True

    async def _acknowledge(self) -> None:
        try:
            await self._in_thread(self.spool.ack, self.queue, self._cursor)
        except SpoolFullError:
            pass  # The next one covers this one.

    async def _send_fresh(self) -> bool:
        """Deliver from memory what the disk refuses to take, once the spool is empty, and say whether that was any."""
        async with self._memory:
            waiting = await self._in_thread(self.spool.peek, self.queue, 1, self._cursor)
            if waiting or not self._refused:
                return False
            # The same ones as the last time, so that a batch that comes again is the same batch.
            self._take(self._batch or self._max_batch)
            self._batch, done = len(self._taken), 0
            try:
                await self._hand_over(self._taken)
                done, self._batch = len(self._taken), 0
            finally:
                self._put_back(done)
            return done > 0

    async def _hand_over(self, records: Sequence[Record]) -> None:
        events: list[SpooledEvent] = []
        unreadable: list[SpoolCorruptError] = []
        for record in records:
            try:
                events.append(decode_event(record))
            except SpoolCorruptError as error:
                unreadable.append(error)
        if events:
            await self._deliver(events)
            self.delivered += len(events)
        for damage in unreadable:
            log.error("an event of %s is lost: %s", self.queue, damage)
            self._lose()
            self._arrived.set()

    async def _in_thread(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)
