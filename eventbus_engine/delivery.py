"""Background delivery: a bounded mailbox and one worker for each callback that the events shall not wait for."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Awaitable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio
from anyio.abc import TaskGroup
from opentelemetry import context as otel_context

from eventbus_engine.errors import ConfigurationError, DeadlockError, SnapshotError
from eventbus_engine.fanout import EVENT, HOOK, Handler, Occasion, outcome_of
from eventbus_engine.telemetry.spans import Activity, code_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eventbus_engine.participants import CallbackEntry

__all__ = ["Delivery", "Mailbox", "Snapshot"]

log = logging.getLogger("eventbus_engine")

ALWAYS_TAKEN = ("timestamp", "metrics")
"""What every snapshot holds, where the state has it."""

_working: ContextVar[Mailbox | None] = ContextVar("eventbus_engine_mailbox", default=None)


class Snapshot:
    """What a background callback gets for the state: copies of what it declared, as they were at the event.

    `timestamp` and `metrics` are always there if the state has them. Reading anything else raises `SnapshotError`.
    """

    __slots__ = ("_name", "_values")

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise SnapshotError(
                f"background callback {self._name} read state.{name}, which its snapshot does not hold; declare it: "
                f"snapshot = {(*self._values.keys() - set(ALWAYS_TAKEN), name)!r}"
            ) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise SnapshotError(f"background callback {self._name} set {name!r}, but a snapshot is frozen; use an algorithm")

    def __repr__(self) -> str:
        return f"<Snapshot for {self._name}: {', '.join(self._values)}>"


def take_snapshot(entry: CallbackEntry, occasion: Occasion) -> Snapshot:
    """Copy what the callback declared, each attribute once per event however many callbacks ask for it."""
    state = occasion.arguments[HOOK][0]
    copies = occasion.copies
    for name in (*ALWAYS_TAKEN, *entry.snapshot):
        if name not in copies and hasattr(state, name):
            copies[name] = freeze(getattr(state, name))
    return Snapshot(entry.name, {name: copies[name] for name in (*ALWAYS_TAKEN, *entry.snapshot) if name in copies})


def freeze(value: Any) -> Any:
    """A copy that the original's future does not show in. A tensor is detached from its graph first."""
    if hasattr(value, "detach") and hasattr(value, "clone"):
        return value.detach().clone()
    return copy.deepcopy(value)


class _Item(NamedTuple):
    hook: Handler
    occasion: Occasion
    snapshot: Snapshot
    logger: Any
    parent: Any


class Mailbox:
    """The events that wait for one background callback, in order.

    Attributes:
        delivered: events the callback has been called with.
        failed: those of them it raised on.
        dropped: events it will never see, because the mailbox was full or the engine closed.
    """

    def __init__(self, entry: CallbackEntry) -> None:
        self.entry = entry
        self.delivered = self.failed = self.dropped = 0
        self._items: deque[_Item] = deque()
        self._arrived = anyio.Event()
        self._room = anyio.Event()
        self._idle = anyio.Event()
        self._busy = False
        self._opened = entry.lifetime_handler("open") is None
        # Its own shield: cancelling the run shall not lose what `close` still has time to deliver.
        self.scope = anyio.CancelScope(shield=True)

    def post(self, hook: Handler, occasion: Occasion) -> Awaitable[None] | None:
        """Put an event in; if there is no room and the callback wants to `block`, something to await first."""
        state, logger = occasion.arguments[HOOK]
        snapshot = take_snapshot(self.entry, occasion)
        bound = logger.bound_to(snapshot) if hasattr(logger, "bound_to") else logger
        parent = otel_context.get_current() if occasion.tracer is not None else None
        item = _Item(hook, occasion, snapshot, bound, parent)
        if len(self._items) < self.entry.max_pending:
            self._put(item)
            return None
        if self.entry.on_full == "block":
            return self._put_when_room(item)
        self.dropped += 1
        if self.entry.on_full == "coalesce":
            for i, waiting in enumerate(self._items):
                if waiting.occasion.event is occasion.event:
                    self._items[i] = item
                    return None
        self._items.popleft()
        self._put(item)
        return None

    def _put(self, item: _Item) -> None:
        self._items.append(item)
        self._arrived.set()

    async def _put_when_room(self, item: _Item) -> None:
        if _working.get() is self:
            raise DeadlockError(
                f"background callback {self.entry.name} published an event that waits for room in its own full "
                f"mailbox; use on_full='drop_oldest', or a larger max_pending",
                (f"callback {self.entry.name} waits for its own mailbox",),
            )
        while len(self._items) >= self.entry.max_pending:
            if self._room.is_set():
                self._room = anyio.Event()
            await self._room.wait()
        self._put(item)

    async def run(self) -> None:
        """Deliver, one after another, until cancelled by way of `scope`."""
        _working.set(self)
        with self.scope:
            while True:
                while not self._items:
                    self._idle.set()
                    self._arrived = anyio.Event()
                    await self._arrived.wait()
                self._idle = anyio.Event()
                item = self._items.popleft()
                self._room.set()
                await self._deliver(item)

    async def _deliver(self, item: _Item) -> None:
        if self.entry.quarantined:
            self.dropped += 1
            return
        self._busy = True
        try:
            if not self._opened:
                open_hook = self.entry.lifetime_handler("open")
                self._opened = open_hook is None or await self._call(open_hook, item)
            if self._opened:
                self.delivered += await self._call(item.hook, item)
            else:
                self.dropped += 1
        finally:
            self._busy = False

    async def _call(self, handler: Handler, item: _Item) -> bool:
        """Call a hook with the snapshot; its failure is the callback's own, and never the run's."""
        event, span = item.occasion.event, None
        if item.occasion.tracer is not None:
            otel_context.attach(item.parent)
            attributes = {"code.function.name": code_name(handler.call), "eventbus.delivery": "background"}
            span = Activity(item.occasion.tracer, f"callback {handler.name}", "callback", event, attributes)
        error: BaseException | None = None
        arguments = (event, item.snapshot, item.logger) if handler.takes == EVENT else (item.snapshot, item.logger)
        try:
            with anyio.fail_after(handler.timeout):
                result = handler.call(*arguments)
                if isinstance(result, Awaitable):
                    await result
            self.entry.failures = 0
            return True
        except Exception as raised:
            error = raised
            self.failed += 1
            raised.add_note(f"in background callback {handler.name} on {event.name}")
            if self.entry.settle(raised, event):
                log.error("background callback %s failed on %s", handler.name, event.name, exc_info=raised)
            return False
        finally:
            if span is not None:
                span.end(outcome_of(error), error)

    async def drain(self) -> None:
        """Wait until everything that is in has been delivered."""
        while self._items or self._busy:
            await self._idle.wait()

    def stop(self) -> int:
        """Stop the worker, and count what it leaves behind."""
        left = len(self._items) + self._busy
        self._items.clear()
        self.dropped += left
        self.scope.cancel()
        return self.dropped


class Delivery:
    """The mailboxes of an engine, alive while the engine is entered."""

    def __init__(self) -> None:
        self._group: TaskGroup | None = None
        self.mailboxes: dict[int, Mailbox] = {}

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        for mailbox in self.mailboxes.values():
            mailbox.stop()
        if group is not None:
            await group.__aexit__(None, None, None)

    def post(self, hook: Handler, occasion: Occasion) -> Handler | None:
        """Put an event into its callback's mailbox; a handler to run beside the callbacks if that has to wait.

        Raises:
            ConfigurationError: the engine is not entered, so that no worker would ever deliver it.
        """
        entry: CallbackEntry = hook.owner
        mailbox = self.mailboxes.get(id(entry))
        if mailbox is None:
            if self._group is None:
                raise ConfigurationError(
                    f"callback {entry.name} is delivered in the background, by a worker that lives while the engine is "
                    f"entered; run its events inside `async with engine:`"
                )
            mailbox = self.mailboxes[id(entry)] = Mailbox(entry)
            self._group.start_soon(mailbox.run, name=f"mailbox of {entry.name}")
        waiting = mailbox.post(hook, occasion)
        if waiting is None:
            return None
        return Handler(entry.name, lambda *_: waiting, HOOK, is_async=True)

    async def close(self, deadline: float) -> dict[str, int]:
        """Deliver what is in the mailboxes until the deadline, then stop.

        Returns:
            Name to number of the events that were never delivered, those dropped earlier included.
        """
        with anyio.move_on_after(max(deadline - anyio.current_time(), 0)):
            async with anyio.create_task_group() as group:
                for mailbox in self.mailboxes.values():
                    group.start_soon(mailbox.drain)
        lost = {mailbox.entry.name: mailbox.stop() for mailbox in self.mailboxes.values()}
        for name, count in lost.items():
            if count:
                log.error("background callback %s never saw %d events", name, count)
        return {name: count for name, count in lost.items() if count}
