"""The events that wait for one background callback: in order, bounded, and what a full mailbox does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine.destinations import delivery_handler
from eventbus_engine.envelope import enter_apart
from eventbus_engine.handlers import Handler, Occasion
from eventbus_engine.lanes import Dispatch, Waiter
from eventbus_engine.snapshot import Record, Snapshot

if TYPE_CHECKING:
    from eventbus_engine.entries import CallbackEntry
    from eventbus_engine.event import EventName
    from eventbus_engine.logger import Pending

__all__ = ["Item", "Line"]


class Item:
    """One event in the mailbox of a callback.

    Args:
        entry: the callback.
        hook: its hook for the event; None for a destination that only has records to take.
        occasion: the event as the publisher's handlers see it.
        snapshot: what the callback gets to see of the state.
        pending: what has been logged for it since its last event, and is taken out here.
        apart: whether it is delivered on another thread than its engine's events.

    Attributes:
        entry: the callback.
        hook: as above.
        records: what was logged, as far as it takes a call to make it; None if it takes none.
        rows: gets what those calls, and the hook behind them, come to.
        made: what there is to send, once that is known.
        key: what `on_full="coalesce"` takes for alike.
        begun: its delivery, for what the hook publishes; None before `begin`.
    """

    __slots__ = (
        "_apart", "_context", "_envelope", "_lanes", "_logger", "_occasion", "_pending", "_snapshot", "_tracer",
        "begun", "entry", "hook", "key", "made", "records", "rows",
    )  # fmt: skip

    def __init__(
        self,
        entry: CallbackEntry,
        hook: Handler | None,
        occasion: Occasion,
        snapshot: Snapshot,
        pending: Pending | None,
        *,
        apart: bool,
    ) -> None:
        self.entry: CallbackEntry = entry
        self.hook: Handler | None = hook
        self.made: list[Any] | None = None
        self.records: Pending | None = None
        self.rows: list[Any] = []
        self.key: Hashable = None
        self.begun: Dispatch | None = None
        assert occasion.dispatch is not None  # noqa: S101 -- only closing has none, and it posts nothing
        self._envelope: Any = occasion.envelope
        self._lanes = occasion.dispatch.lanes
        self._logger: Any = occasion.logger
        self._tracer = occasion.tracer
        self._snapshot = snapshot
        self._pending = pending
        self._apart = apart
        # What it was published in; all else that a hook needs is made when there is a hook to run.
        self._context = copy_context()
        self._occasion: Occasion | None = None
        if pending:
            # Where there is a tracer, even what is made already has its span.
            self.made = pending.take_made() if hook is None and occasion.tracer is None else None
            self.records = pending.take() if self.made is None else None

    @property
    def size(self) -> int:
        """For how many events and records it counts if it is lost now."""
        records = len(self.records) + self.records.lost if self.records is not None else 0
        return records + max(self.hook is not None, len(self.made or ()))

    @property
    def weight(self) -> int:
        """For how many events and records it counts once its hook has run."""
        return max(1, len(self.made or ()))

    @property
    def handler(self) -> Handler:
        """What to call."""
        if self.records is not None:
            assert self._pending is not None  # noqa: S101 -- the records are taken out of it
            return delivery_handler(self.entry, self.hook, self.records, self._pending, self.rows)
        assert self.hook is not None  # noqa: S101 -- without one, and without such records, there is nothing to call
        return self.hook

    def begin(self) -> Occasion:
        """The event as the hook sees it: with the snapshot for the state, in the context it was published in."""
        if self._occasion is None:
            self.begun = dispatch = Dispatch.about(self._envelope, None, self._lanes)
            dispatch.apart = self._apart
            logger = self._logger
            bound = logger.bound_to(self._snapshot) if hasattr(logger, "bound_to") else logger
            self._context.run(enter_apart, dispatch)
            self._occasion = Occasion.begin(self._envelope, self._snapshot, bound, dispatch, self._tracer)
            self._occasion.context = self._context
        return self._occasion

    @property
    def event(self) -> EventName:
        """The event."""
        event: EventName = self._envelope.event
        return event

    def to_send(self) -> list[Record]:
        """What is made, with what tells where it comes from."""
        if not self.made:
            return []
        envelope, state = self._envelope, self._snapshot
        event, time, ids = envelope.event, envelope.time, f"{envelope.id}-{self.entry.name}"
        return [Record(event, state, time, f"{ids}-{i}", row) for i, row in enumerate(self.made)]


class Line:
    """The waiting line of a mailbox.

    An event whose publisher is to wait for room (`on_full="block"`) stands in line already, beyond `max_pending`: so
    the order is that of the publishing, and a publisher that is cancelled loses nothing.

    Attributes:
        running: the deliveries in progress, which a publisher that waits for room waits for.
    """

    def __init__(self, entry: CallbackEntry) -> None:
        self.running: set[Dispatch] = set()
        self._entry = entry
        self._items: OrderedDict[int, Item] = OrderedDict()
        self._alike: dict[Hashable, deque[int]] = {}
        self._put_in = self._taken_out = 0
        self._blocked: deque[tuple[int, Waiter]] = deque()
        self._awaited = 1
        self._arrived = anyio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> tuple[int | None, Item | None]:
        """Put an event in.

        Returns:
            Its number, for `wait_for_room`, if its publisher is to wait; and the event that had to make room for it.
        """
        entry, fallen = self._entry, None
        full = len(self._items) >= entry.max_pending
        if full and entry.on_full != "block":
            fallen = self._make_room_for(item)
        self._put_in += 1
        self._items[self._put_in] = item
        if entry.on_full == "coalesce":
            self._alike.setdefault(item.key, deque()).append(self._put_in)
        if len(self._items) >= self._awaited:
            self._arrived.set()
        return (self._put_in if full and entry.on_full == "block" else None), fallen

    def _make_room_for(self, item: Item) -> Item:
        alike = self._alike.get(item.key)
        return self._remove(alike[0] if alike else next(iter(self._items)))

    def _remove(self, number: int) -> Item:
        item = self._items.pop(number)
        if self._entry.on_full == "coalesce":
            alike = self._alike[item.key]
            # Those alike are put in, and go, in their order.
            alike.popleft()
            if not alike:
                del self._alike[item.key]
        return item

    def take(self, most: int) -> list[Item]:
        """Take the oldest ones out, so many at most."""
        taken = [self._remove(next(iter(self._items))) for _ in range(min(most, len(self._items)))]
        self._taken_out += len(taken)
        self.admit()
        return taken

    def clear(self) -> list[Item]:
        """Take out all there are."""
        items = list(self._items.values())
        self._items.clear()
        self._alike.clear()
        return items

    async def arrival(self, count: int = 1) -> None:
        """Wait until there are so many, or `wake` is called."""
        self._awaited = count
        self._arrived = anyio.Event()
        await self._arrived.wait()

    def wake(self) -> None:
        """End the wait for an arrival."""
        self._arrived.set()

    def has_room(self, number: int) -> bool:
        """Whether the event of that number is within the bounds."""
        return number - self._taken_out <= self._entry.max_pending

    async def wait_for_room(self, number: int, dispatches: list[Dispatch]) -> None:
        """Wait until the event of that number is within the bounds.

        Args:
            number: what `put` returned.
            dispatches: who waits, and its ancestors.

        Raises:
            DeadlockError: the callback waits for one of those.
        """
        waiter = Waiter(self, dispatches[0], f"the full mailbox of callback {self._entry.name}, which is at ")
        self._blocked.append((number, waiter))
        await waiter.wait(dispatches)

    def admit(self, everybody: bool = False) -> None:
        """Let those publishers go on for whose events there is room by now."""
        while self._blocked and (everybody or self.has_room(self._blocked[0][0])):
            self._blocked.popleft()[1].ready.set()
