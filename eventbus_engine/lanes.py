"""Lanes: the events of one state, or of one key, are handled one at a time in the order of their publishing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

import anyio

from eventbus_engine._steps import without_loop
from eventbus_engine.errors import DeadlockError, SyncUsageError

__all__ = ["Dispatch", "Lanes"]


class Dispatch:
    """One event being handled: what a nested publish looks up through its context.

    Attributes:
        what: the envelope.
        parent: the dispatch from whose context this one was published.
        lane: the key of its lane, None for an event without one.
        lanes: the lanes of the bus it was published on.
        running: False once it has been handled; a task that outlives it no longer nests.
        task_id: the anyio task that handles it, once something async runs in it.
        blocked: the publishes from this dispatch that wait for another lane.
    """

    __slots__ = ("blocked", "lane", "lanes", "parent", "running", "task_id", "what")

    def __init__(self, what: Any, parent: Dispatch | None, lane: Hashable, lanes: Lanes) -> None:
        self.what = what
        self.parent = parent
        self.lane = lane
        self.lanes = lanes
        self.running = True
        self.task_id: int | None = None
        self.blocked: set[Waiter] | None = None

    def ancestors(self) -> Iterator[Dispatch]:
        """The dispatches still running from whose context this one was published, innermost first."""
        dispatch = self.parent
        while dispatch is not None:
            if dispatch.running:
                yield dispatch
            dispatch = dispatch.parent


class Waiter:
    """A dispatch in the queue of a lane."""

    __slots__ = ("dispatch", "granted", "lane", "ready", "task_id")

    def __init__(self, lane: Lane, dispatch: Dispatch, task_id: int) -> None:
        self.lane = lane
        self.dispatch = dispatch
        self.task_id = task_id
        self.ready = anyio.Event()
        self.granted = False


class Lane:
    """Who is being handled on a lane, and who waits for it in order. It exists only while it is in use."""

    __slots__ = ("holder", "waiters")

    def __init__(self, holder: Dispatch) -> None:
        self.holder = holder
        # An ordered dict, because leaving from the middle has to be as cheap as from the front: a storm of
        # cancellations over a long queue would be quadratic otherwise.
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()


class Lanes:
    """The lanes in use on one bus."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def nests(self, dispatch: Dispatch) -> bool:
        """Whether the dispatch was published from a dispatch still running on the same lane of this bus."""
        return any(d.lanes is self and d.lane == dispatch.lane for d in dispatch.ancestors())

    async def enter(self, dispatch: Dispatch) -> None:
        """Take the lane, or wait for it behind those that came before.

        Raises:
            DeadlockError: if whoever holds the lane waits, however indirectly, for this dispatch to finish.
        """
        lane = self._lanes.get(dispatch.lane)
        if lane is None:
            self._lanes[dispatch.lane] = Lane(dispatch)
            return
        if without_loop.get():
            raise SyncUsageError(
                f"{_describe(dispatch)} was published by engine.sync while an event of it is being handled on an event "
                f"loop, which this call would block; await engine.run_event(...) there"
            )
        waiter = Waiter(lane, dispatch, anyio.get_current_task().id)
        lane.waiters[waiter] = None
        ancestors = list(dispatch.ancestors())
        for ancestor in ancestors:
            ancestor.blocked = ancestor.blocked or set()
            ancestor.blocked.add(waiter)
        try:
            if ancestors:
                _refuse_deadlock(waiter, ancestors)
            await waiter.ready.wait()
        except BaseException:
            if waiter.granted:
                self.leave(dispatch)
            else:
                del lane.waiters[waiter]
            raise
        finally:
            for ancestor in ancestors:
                if ancestor.blocked is not None:
                    ancestor.blocked.discard(waiter)

    def leave(self, dispatch: Dispatch) -> None:
        """Hand the lane to the next in the queue; without one it vanishes."""
        lane = self._lanes[dispatch.lane]
        if lane.waiters:
            waiter, _ = lane.waiters.popitem(last=False)
            lane.holder = waiter.dispatch
            waiter.granted = True
            waiter.ready.set()
        else:
            del self._lanes[dispatch.lane]


def _refuse_deadlock(waiter: Waiter, ancestors: list[Dispatch]) -> None:
    """Raise if the holder of the lane waits for one of the dispatches that wait for `waiter`.

    A wait counts only if the dispatch cannot end before it: a task that a handler sent off to a group of somebody
    else's, or without any group, holds nobody up.
    """
    tasks = _TaskTree()
    held_up = {id(d) for d in ancestors if tasks.descends(waiter.task_id, d.task_id)}
    path = [waiter]
    seen: set[int] = set()

    def search(holder: Dispatch) -> bool:
        if id(holder) in held_up:
            return True
        if id(holder) in seen:
            return False
        seen.add(id(holder))
        for blocked in holder.blocked or ():
            if tasks.descends(blocked.task_id, holder.task_id):
                path.append(blocked)
                if search(blocked.lane.holder):
                    return True
                path.pop()
        return False

    if held_up and search(waiter.lane.holder):
        chain = [f"{_describe(step.dispatch)} waits for {_describe(step.lane.holder)}" for step in path]
        raise DeadlockError(
            f"these dispatches wait for each other and would never end: {'; '.join(chain)}. Publish the inner event "
            f"without awaiting it in the handler, or give both states one key",
            chain,
        )


class _TaskTree:
    """Which tasks a task cannot end before, as far as task groups tell. Read only once somebody really waits."""

    def __init__(self) -> None:
        self._parents: dict[int, int | None] | None = None

    def descends(self, task_id: int | None, ancestor_id: int | None) -> bool:
        """Whether a task is another one or was started in a task group of it, directly or not."""
        if task_id == ancestor_id or ancestor_id is None:
            return task_id == ancestor_id
        if self._parents is None:
            self._parents = {task.id: task.parent_id for task in anyio.get_running_tasks()}
        while task_id is not None and task_id != ancestor_id:
            task_id = self._parents.get(task_id)
        return task_id == ancestor_id


def _describe(dispatch: Dispatch) -> str:
    envelope = dispatch.what
    on = f"key {envelope.key!r}" if envelope.key is not None else f"{type(envelope.state).__name__} at {id(envelope.state):#x}"
    return f"{envelope.event.name} of {on}"
