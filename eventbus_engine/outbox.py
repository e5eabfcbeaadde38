"""What a background callback with a spool is to send: on the disk first, then on its way, then forgotten."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from eventbus_engine.attempts import Attempts, OutOfTimeError
from eventbus_engine.envelope import context_of
from eventbus_engine.errors import SpoolError
from eventbus_engine.handlers import Occasion, lost_in, moment
from eventbus_engine.lanes import Dispatch, Lanes
from eventbus_engine.mailbox import sending
from eventbus_engine.snapshot import Record, Snapshot, kept_values
from eventbus_engine.spool import QueueStats, Spool, SpooledEvent, SpoolSender

if TYPE_CHECKING:
    from eventbus_engine.entries import CallbackEntry
    from eventbus_engine.event import EventName

__all__ = ["Outbox", "Spools"]

log: logging.Logger = logging.getLogger("eventbus_engine")

LINGER = 0.05
"""Seconds that a record may wait for others to be written down with it."""

RETRY_WAIT = 1.0
"""Seconds from a spool that cannot be opened, or a sending that failed, to the next attempt."""


class Spools:
    """The spools of an engine: those that were given as paths are opened here, each once, and closed in the end."""

    def __init__(self) -> None:
        self._opened: dict[Path, Spool] = {}
        self._lock = threading.Lock()

    def get(self, where: str | os.PathLike[str] | Spool) -> Spool:
        """The spool for an option of a callback. Blocks.

        Raises:
            SpoolError: it cannot be opened.
        """
        if isinstance(where, Spool):
            return where
        path = Path(where).absolute()
        with self._lock:
            if path not in self._opened:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise SpoolError(f"the spool {path} cannot be used: {error}; check that path", path) from error
                self._opened[path] = Spool(path)
            return self._opened[path]

    def close(self) -> None:
        """Close those that were opened here. Blocks."""
        with self._lock:
            for spool in self._opened.values():
                spool.close()
            self._opened.clear()


class _Sending:
    """Stands in for an envelope: what is sent may come from many events, and from another process."""

    event: Any = type("_Send", (), {"name": "sending", "value": "send", "__str__": lambda _: "while sending"})()

    def __init__(self) -> None:
        self.time_ns: int = time_ns()


class Outbox:
    """Takes the records of one callback, writes them down, and has its `send_records` send them, in order.

    Args:
        entry: the callback.
        logger: what `send_records` gets to log to.
        spools: where its spool is kept.
        apart: whether it works on another thread than its engine.

    Attributes:
        attempts: what calls its hooks.
        delivered: records that `send_records` has returned for.
        failed: records that the far side refused for good.
        running: the sending in progress.
    """

    def __init__(self, entry: CallbackEntry, logger: Any, spools: Spools, *, apart: bool) -> None:
        self.attempts: Attempts = Attempts(entry)
        self.delivered: int = 0
        self.failed: int = 0
        self.running: set[Dispatch] = set()
        self._entry = entry
        self._logger = logger
        self._spools = spools
        self._apart = apart
        self._sender: SpoolSender | None = None
        self._before = QueueStats()
        self._after: QueueStats | None = None

    # ------------------------------------------------------------------------------------------------------- counting

    @property
    def spooled(self) -> int:
        """Records in the spool, as far as is known without looking."""
        if self._after is not None:
            return self._after.pending
        return self._sender.spooled if self._sender is not None else 0

    @property
    def in_memory(self) -> int:
        """Records on their way to the disk."""
        return self._sender.in_memory if self._sender is not None and self._after is None else 0

    @property
    def dropped(self) -> int:
        """Records that were lost; those that a bound of the spool has cost are known when it is closed."""
        if self._sender is None:
            return 0
        if self._after is None:
            return self._sender.lost
        # Those that had been lost to memory have been noted in the spool, as far as it took that.
        return self._after.lost - self._before.lost + self._sender.unrecorded + self._sender.in_memory

    # ------------------------------------------------------------------------------------------------------ delivering

    async def open(self) -> None:
        """Open the spool, if that is still to be done.

        Raises:
            SpoolError: it cannot be opened.
        """
        if self._sender is None:
            entry = self._entry
            spool = await anyio.to_thread.run_sync(self._spools.get, entry.spool)
            spool.claim(entry.name)
            try:
                self._before = await anyio.to_thread.run_sync(spool.stats, entry.name)
            except BaseException:
                spool.release(entry.name)
                raise
            self._sender = SpoolSender(
                spool,
                entry.name,
                self._send,
                max_batch=entry.max_batch,
                max_wait=entry.max_wait,
                retry_wait=RETRY_WAIT,
                linger=LINGER,
            )
            self._sender.spooled = self._before.pending
            self.attempts.until_safe = functools.partial(self._sender.room, 1)
            if self.attempts.closing:
                self._sender.hurry()

    async def open_at_last(self) -> None:
        """Open the spool, as often as it takes.

        Raises:
            OutOfTimeError: the engine closes first.
        """
        while True:
            try:
                return await self.open()
            except SpoolError as error:
                self.attempts.settle(error, _Sending.event)
            await self.attempts.pause(RETRY_WAIT)

    async def run(self) -> None:
        """Write and send until cancelled, or until there is no time for another attempt."""
        await self._there.run()

    @property
    def _there(self) -> SpoolSender:
        assert self._sender is not None  # noqa: S101 -- nothing is put in before `open`
        return self._sender

    def put(self, records: Sequence[Record]) -> None:
        """Take records, to be written down at once.

        Raises:
            SpoolRecordError: a value that the spool cannot keep. None of them is taken.
        """
        self._there.put_all([_spooled(record) for record in records])

    async def room(self) -> None:
        """Wait until another batch may be put in."""
        await self._there.room(self._entry.max_batch)

    async def _send(self, events: Sequence[SpooledEvent]) -> None:
        """Send a batch. An exception of it means that it stays in the spool."""
        entry, attempts = self._entry, self.attempts
        assert entry.sender is not None  # noqa: S101 -- its options have been checked
        if entry.quarantined:
            raise OutOfTimeError("the callback has been dropped from the run")
        dispatch = Dispatch.about(_Sending(), None, Lanes())
        dispatch.apart = self._apart
        occasion = Occasion.begin(_Sending(), Snapshot(entry.name, (), {}), self._logger, dispatch)
        occasion.context = context_of(dispatch)
        self.running.add(dispatch)
        try:
            if not entry.opened and (opener := entry.opener()) is not None:
                error = await attempts.persist(opener, occasion)
                if error is not None:
                    attempts.settle(error, moment(occasion.event, opener))
                    raise error
            records = [_record(event, entry) for event in events]
            error = await attempts.persist(sending(entry.sender, records), occasion)
        finally:
            self.running.discard(dispatch)
            dispatch.running = False
        if error is None:
            self.delivered += len(records)
            return
        lasting = not attempts.worth_another(error)
        if lasting or entry.on_error == "quarantine":
            attempts.settle(error, occasion.event)
        if not lasting:
            raise error
        # What the far side will never take must not be in the way of what is behind it.
        lost = lost_in(error, len(records))
        self.failed += lost
        self.delivered += len(records) - lost

    # --------------------------------------------------------------------------------------------------------- closing

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send, or no sense in trying."""
        return self._sender is None or self._sender.idle

    def hurry(self) -> None:
        """Let nothing wait that can be tried now."""
        if self._sender is not None:
            self._sender.hurry()

    async def drain(self) -> None:
        """Wait until it is idle."""
        if self._sender is not None:
            await self._sender.drain()

    def give_up(self) -> None:
        """Send nothing more after what is on its way; go on writing."""
        if self._sender is not None:
            self._sender.give_up()

    async def finish(self, seconds: float) -> None:
        """Stop sending, and write down what is not on the disk yet.

        Args:
            seconds: for a sending that has been cancelled to end.
        """
        if self._sender is not None:
            with anyio.move_on_after(seconds, shield=True):
                await self._quietly(self._sender.close, 0)
            await self._count()

    async def send_rest(self, records: Sequence[Record], seconds: float) -> None:
        """Take what was logged after the last event: write it down, and try to send it."""
        await self.open()
        sender = self._there
        self.put(records)
        with anyio.CancelScope(shield=True):
            await self._quietly(sender.write)
        with anyio.move_on_after(seconds):
            await self._quietly(sender.flush)
        await self._count()

    async def _count(self) -> None:
        if self._after is None:
            self._there.spool.release(self._entry.name)
        # In case it cannot be looked into.
        self._after = self._before._replace(pending=self._there.spooled)
        with anyio.CancelScope(shield=True):
            await self._quietly(self._look)

    async def _look(self) -> None:
        self._after = await anyio.to_thread.run_sync(self._there.spool.stats, self._entry.name)

    async def _quietly(self, step: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Take a step of the closing: whatever is wrong with the spool, the rest has to be closed."""
        try:
            await step(*arguments)
        except SpoolError as error:
            log.error("the spool of background callback %s: %s", self._entry.name, error)


def _spooled(record: Record) -> SpooledEvent:
    values: dict[str, Any] = {"value": record.value}
    if record.state is not None:
        values["state"] = kept_values(record.state)
    name = "" if record.event is None else record.event.value
    return SpooledEvent(name, values, time=round(record.time.timestamp() * 1e6) * 1000, id=record.id)


def _record(event: SpooledEvent, entry: CallbackEntry) -> Record:
    values, name = event.values, entry.name
    state = Snapshot(name, tuple(entry.snapshot), values["state"]) if "state" in values else None
    time = datetime.fromtimestamp(event.time / 1e9, UTC)
    return Record(_event_of(event.event, entry), state, time, event.id, values.get("value"))


def _event_of(value: str, entry: CallbackEntry) -> EventName | None:
    """The event of that value; None if there is none, or none of that name any more."""
    return next((event for event in entry.events if event.value == value), None)
