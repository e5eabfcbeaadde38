"""The events that wait for one background callback: in order, bounded, and what a full mailbox does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine.handlers import ENVELOPE, HOOK, Handler, Occasion
from eventbus_engine.lanes import Dispatch, Waiter

if TYPE_CHECKING:
    from eventbus_engine.entries import CallbackEntry
    from eventbus_engine.event import EventName
    from eventbus_engine.logger import Pending

__all__ = ["Item", "Line"]


@dataclass(slots=True, eq=False)
class Item:
    """One event in the mailbox of a callback.

    Attributes:
        hook: what to call.
        occasion: the event: a frozen snapshot for the state, and the context it was published in.
        dispatch: its delivery, for what the hook publishes.
        records: what was logged for a destination since its last event; None for a callback.
        counts_itself: whether the event counts besides its records: the destination has a hook for it.
        key: what `on_full="coalesce"` takes for alike.
        rows: how many things to send its hook and its records have come to, once that is known.
    """

    hook: Handler
    occasion: Occasion
    dispatch: Dispatch
    records: Pending | None = None
    counts_itself: bool = True
    key: Hashable = None
    rows: int = 0

    @property
    def size(self) -> int:
        """For how many events and records it counts if it is lost now."""
        records = len(self.records) + self.records.lost if self.records is not None else 0
        return records + max(self.counts_itself, self.rows)

    @property
    def weight(self) -> int:
        """For how many events and records it counts once its hook has run."""
        return max(1, self.rows)

    def made(self) -> list[Any] | None:
        """Take out what its records come to, if it is nothing but records that are made; None if there is a call."""
        if self.records is None or self.counts_itself or self.occasion.tracer is not None:
            return None  # Where there is a tracer, the call has a span.
        return self.records.take_made()

    @property
    def event(self) -> EventName:
        """The event."""
        return self.occasion.event

    @property
    def state(self) -> Any:
        """The snapshot."""
        return self.occasion.arguments[HOOK][0]

    @property
    def time(self) -> datetime:
        """When it was published."""
        time: datetime = self.occasion.arguments[ENVELOPE][0].time
        return time

    @property
    def id(self) -> str:
        """Unique, and the same however often it is sent."""
        return str(self.occasion.arguments[ENVELOPE][0].id)


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

    async def arrival(self) -> None:
        """Wait until something is put in, or `wake` is called."""
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
