"""Lanes: the events of one state, or of one key, are handled one at a time in the order of their publishing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from time import time_ns as wall_clock_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio

from eventbus_engine._steps import current_task_id, need_loop, without_loop
from eventbus_engine.envelope import write_envelope
from eventbus_engine.errors import DeadlockError, SyncUsageError
from eventbus_engine.handlers import Occasion

if TYPE_CHECKING:
    from eventbus_engine.event import EventName

__all__ = ["Dispatch", "Lanes"]


class Dispatch(Occasion):
    """One event being handled: what a nested publish looks up through its context.

    It is an occasion as well, that of the first engine: an event that goes through one engine takes one object.

    Attributes:
        payload: what was published with the event.
        key: as it was published.
        parent: the dispatch from whose context this one was published, itself or by way of others that are done.
        lane: the key of its lane, None for an event without one.
        lanes: the lanes of the bus it was published on.
        running: False once it has been handled; a task that outlives it no longer nests.
        task_id: the anyio task that handles it, once something async runs in it.
        blocked: the publishes from this dispatch that wait for another lane, or for room in a mailbox.
        apart: whether it is handled on another thread than its engine's events, so that nothing may be published.
    """

    __slots__ = ("apart", "blocked", "key", "lane", "lanes", "parent", "payload", "running", "task_id")

    payload: Any
    key: Hashable
    parent: Dispatch | None
    lane: Hashable
    lanes: Lanes
    running: bool
    task_id: int | None
    blocked: set[Waiter] | None
    apart: bool

    @staticmethod
    def publish(event: EventName, payload: Any, state: Any, key: Hashable, lane: Hashable, lanes: Lanes) -> Dispatch:
        """A new one. No `__init__`, because calling a class that has one costs half as much again."""
        dispatch = Dispatch()
        dispatch.event, dispatch.payload, dispatch.state, dispatch.key = event, payload, state, key
        dispatch.lane, dispatch.lanes, dispatch.time_ns = lane, lanes, wall_clock_ns()
        dispatch.running, dispatch.apart, dispatch.since = True, False, 0
        dispatch._envelope = dispatch.parent = dispatch.task_id = dispatch.blocked = None
        dispatch.tracer = dispatch.whole = dispatch.context = dispatch.copies = None
        dispatch.now = dispatch.span = dispatch.tasks = None
        return dispatch

    @staticmethod
    def about(envelope: Any, lane: Hashable, lanes: Lanes) -> Dispatch:
        """One that is no occasion: all that there is to know of the event is its envelope."""
        dispatch = Dispatch()
        dispatch._envelope, dispatch.lane, dispatch.lanes = envelope, lane, lanes
        dispatch.running, dispatch.apart = True, False
        dispatch.parent = dispatch.task_id = dispatch.blocked = None
        return dispatch

    def nest_in(self, parent: Dispatch) -> None:
        """Note the dispatches that still run from whose context this one is published.

        Those that are done are forgotten: a task that publishes from a task that published from a task, and so on,
        would keep everything they ever handled.
        """
        child = self
        child.parent = parent
        for ancestor in self.ancestors():
            child.parent = ancestor
            child = ancestor
        child.parent = None

    @property
    def dispatch(self) -> Dispatch:
        """Itself."""
        return self

    @property
    def envelope(self) -> Any:
        """The event as plain subscribers get it. Written when first asked for: most events never are."""
        if self._envelope is None:
            self._envelope = write_envelope(self.event, self.payload, self.state, self.key, self.time_ns)
        return self._envelope

    def ancestors(self) -> Iterator[Dispatch]:
        """The dispatches still running from whose context this one was published, innermost first."""
        dispatch = self.parent
        while dispatch is not None:
            if dispatch.running:
                yield dispatch
            dispatch = dispatch.parent

    async def enter_task(self) -> None:
        """Get ready for something asynchronous: an event loop, and a note of the task that handles it.

        By that note, a dispatch that waits for itself can be told from one that does not.
        """
        await need_loop()
        if self.task_id is None:
            self.task_id = current_task_id()


class Busy(Protocol):
    """What a dispatch may have to wait for: a lane, or a full mailbox."""

    running: set[Dispatch]
    """The dispatches that have to end before it is free."""


class Waiter:
    """A dispatch that waits for a lane, or for room in a mailbox.

    Args:
        behind: what it waits for.
        dispatch: who waits.
        what: says what it waits for, unless that is for somebody on a lane to be done.
    """

    __slots__ = ("behind", "dispatch", "granted", "ready", "task_id", "what")

    def __init__(self, behind: Busy, dispatch: Dispatch, what: str = "") -> None:
        self.behind: Busy = behind
        self.dispatch: Dispatch = dispatch
        self.what: str = what
        self.task_id: int = current_task_id()
        self.ready: anyio.Event = anyio.Event()
        self.granted: bool = False

    async def wait(self, held_up: Sequence[Dispatch]) -> None:
        """Wait until it is ready.

        Args:
            held_up: the dispatches that cannot end before this wait.

        Raises:
            DeadlockError: what it waits for waits, however indirectly, for one of those.
        """
        for dispatch in held_up:
            if dispatch.blocked is None:
                dispatch.blocked = set()
            dispatch.blocked.add(self)
        try:
            if held_up:
                _refuse_deadlock(self, held_up)
            await self.ready.wait()
        finally:
            for dispatch in held_up:
                (dispatch.blocked or set()).discard(self)


class Lane:
    """Who is being handled on a lane, and who waits for it in order. It exists only while it is in use.

    Attributes:
        running: the dispatch at its front, and those nested in it. One that was nested from a task outlives the
            front, and the lane stays theirs until all of them are done.
        waiters: those whose turn is to come.
    """

    __slots__ = ("running", "waiters")

    def __init__(self, front: Dispatch) -> None:
        self.running: set[Dispatch] = {front}
        # An ordered dict, because leaving from the middle has to be as cheap as from the front: a storm of
        # cancellations over a long queue would be quadratic otherwise.
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()


class Starter(Protocol):
    """What has started tasks, and waits for them."""

    def family(self) -> Iterator[tuple[int, int]]:
        """The ids of those tasks, each with that of the task which waits for it."""
        ...


class Lanes:
    """The lanes in use on one bus.

    A dispatch that is alone on its lane puts itself into `used` and takes itself out again.

    Attributes:
        used: by key, the dispatch that is alone on a lane, or who is on it and who waits.
        relays: what starts tasks for handlers and waits for them, and is doing so.
    """

    def __init__(self) -> None:
        self.used: dict[Hashable, Dispatch | Lane] = {}
        self.relays: set[Starter] = set()

    def __len__(self) -> int:
        return len(self.used)

    @property
    def waiting(self) -> int:
        """The dispatches whose turn is to come. May be read from any thread."""
        return sum(len(lane.waiters) for lane in list(self.used.values()) if isinstance(lane, Lane))

    def join(self, dispatch: Dispatch) -> bool:
        """Go on a lane in use, if the dispatch is nested in one that has it; False if it has to wait."""
        if dispatch.parent is not None:
            lane = self._lane(dispatch)
            if any(ancestor in lane.running for ancestor in dispatch.ancestors()):
                lane.running.add(dispatch)
                return True
        return False

    def _lane(self, dispatch: Dispatch) -> Lane:
        """The lane of a dispatch that is not alone on it."""
        holder = self.used[dispatch.lane]
        if isinstance(holder, Lane):
            return holder
        lane = self.used[dispatch.lane] = Lane(holder)
        return lane

    async def hold(self, dispatch: Dispatch) -> None:
        """Take the lane for more than one event: they nest in this dispatch, which is none, until it leaves.

        They may be handled on another thread. An event that is alone on its lane sees to it that nobody else is, which
        goes wrong where two threads do; here all of this is decided by whoever holds it, on the event loop.
        """
        if self.used.setdefault(dispatch.lane, dispatch) is not dispatch and not self.join(dispatch):
            await self.wait(dispatch)
        self._lane(dispatch)
        dispatch.task_id = current_task_id()

    async def wait(self, dispatch: Dispatch) -> None:
        """Take the lane behind those that came before.

        Raises:
            DeadlockError: if whoever has the lane waits, however indirectly, for this dispatch to finish.
        """
        if without_loop.driven:
            await need_loop()
        elif without_loop.get():
            raise SyncUsageError(
                f"{_describe(dispatch)} was published by engine.sync while an event of it is being handled on an event "
                f"loop, which this call would block; await engine.run_event(...) there"
            )
        lane = self._lane(dispatch)
        waiter = Waiter(lane, dispatch)
        lane.waiters[waiter] = None
        try:
            await waiter.wait(list(dispatch.ancestors()))
        except BaseException:
            if waiter.granted:
                self.leave(dispatch)
            else:
                del lane.waiters[waiter]
            raise

    def leave(self, dispatch: Dispatch) -> None:
        """Leave a lane that others are or were on too: the last hands it to the next in the queue, or it vanishes."""
        lane = self.used[dispatch.lane]
        assert isinstance(lane, Lane)  # noqa: S101 -- or this dispatch would be alone on it
        lane.running.remove(dispatch)
        if lane.running:
            return
        if lane.waiters:
            waiter, _ = lane.waiters.popitem(last=False)
            lane.running.add(waiter.dispatch)
            waiter.granted = True
            waiter.ready.set()
        else:
            del self.used[dispatch.lane]


HoldsUp: TypeAlias = Callable[[int, "int | None"], bool]
"""Whether a task that waits holds up another: whether the other cannot end before it."""


def _refuse_deadlock(waiter: Waiter, ancestors: Sequence[Dispatch]) -> None:
    """Raise if whoever has what it waits for waits for one of the dispatches that wait for `waiter`.

    A wait counts only if the dispatch cannot end before it: a task that a handler sent off to a group of somebody
    else's, or without any group, holds nobody up.
    """
    # Thousands of tasks take their time to be read, so they are only if there is a cycle but for that question.
    if _find_cycle(waiter, ancestors, lambda *_: True):
        chain = _find_cycle(waiter, ancestors, _TaskTree(waiter.dispatch.lanes.relays).holds_up)
        if chain:
            raise DeadlockError(
                f"these dispatches wait for each other and would never end: {'; '.join(chain)}. Publish the inner "
                f"event without awaiting it in the handler, give both states one key, or let a full mailbox drop "
                f"events instead of on_full='block'",
                chain,
            )


def _find_cycle(waiter: Waiter, ancestors: Sequence[Dispatch], holds_up: HoldsUp) -> list[str]:
    """Follow who waits for whom from `waiter`, and say how it leads back to one of its ancestors, if it does."""
    held_up = {ancestor for ancestor in ancestors if holds_up(waiter.task_id, ancestor.task_id)}
    reached: dict[Dispatch, tuple[Waiter, Dispatch | None]] = {}
    ahead: list[tuple[Waiter, Dispatch | None]] = [(waiter, None)]
    while ahead:
        wait, by_way_of = ahead.pop()
        for dispatch in tuple(wait.behind.running):  # nested ones come and go on the thread of a lane that is held
            if dispatch in reached:
                continue
            reached[dispatch] = wait, by_way_of
            if dispatch in held_up:
                return _chain(dispatch, reached)
            ahead += [(b, dispatch) for b in dispatch.blocked or () if holds_up(b.task_id, dispatch.task_id)]
    return []


def _chain(end: Dispatch, reached: Mapping[Dispatch, tuple[Waiter, Dispatch | None]]) -> list[str]:
    steps: list[str] = []
    dispatch: Dispatch | None = end
    while dispatch is not None:
        wait, by_way_of = reached[dispatch]
        steps.append(f"{_describe(wait.dispatch)} waits for {wait.what}{_describe(dispatch)}")
        dispatch = by_way_of
    return steps[::-1]


class _TaskTree:
    """Which tasks a task cannot end before, as far as task groups and relays tell."""

    def __init__(self, starters: Iterable[Starter]) -> None:
        self._parents = {task.id: task.parent_id for task in anyio.get_running_tasks()}
        for starter in starters:
            self._parents.update(starter.family())

    def holds_up(self, task_id: int, ancestor_id: int | None) -> bool:
        """Whether a task is another one or was started in a task group of it, directly or not."""
        task: int | None = task_id
        while task is not None and task != ancestor_id:
            task = self._parents.get(task)
        return task is not None


def _describe(dispatch: Dispatch) -> str:
    envelope = dispatch.envelope
    state = envelope.state
    on = f"{type(state).__name__} at {id(state):#x}" if envelope.key is None else f"key {envelope.key!r}"
    return f"{envelope.event.name} of {on}"
