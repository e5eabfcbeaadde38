"""A stretch of a batch on the training thread: its computations, and the events between them, in one trip there.

A trip to the thread and back costs as much as several events. So the thread takes over the coroutine itself, with the
algorithms that its events run, up to where a callback or anything async needs the event loop; there the rest goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from time import time_ns
from typing import Any, TypeVar

from eventbus_engine.engine import Engine
from eventbus_engine.envelope import current, current_dispatch, write_envelope
from eventbus_engine.event import Event
from eventbus_engine.lanes import Dispatch
from eventbus_engine.training.worker import Worker

__all__ = ["Sections"]

T = TypeVar("T")


class Sections:
    """Runs stretches of batches on the training thread.

    Args:
        engine: publishes their events.
        worker: has the thread.
    """

    def __init__(self, engine: Engine[Any], worker: Worker) -> None:
        self._engine = engine
        self._worker = worker
        self._inside = False

    async def run(self, stretch: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a stretch; one inside of another goes there again, if the other has come back to the event loop."""
        if self._inside:
            return await (self._worker.drive(stretch()) if self._worker.apart else stretch())
        self._inside = True
        try:
            if not self._worker.apart:
                return await self._worker.drive(stretch())
            async with self._lane():
                return await self._worker.drive(stretch())
        finally:
            self._inside = False

    async def checkpoint_if_interrupted(self) -> None:
        """In a stretch: let a cancellation of the run through, if there has been one."""
        await self._worker.checkpoint_if_interrupted()

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[None]:
        """Keep the lane of the state: the events of the stretch nest, and those of others wait until it is over.

        A lane that is decided upon by each event for itself would need a lock as soon as there are two threads.
        """
        state, lanes, parent = self._engine.state, self._engine.bus._lanes, current_dispatch()
        envelope = write_envelope(Event.BATCH_START, None, state, None, time_ns())
        dispatch = Dispatch.about(envelope, id(state), lanes)
        if parent is not None:
            dispatch.nest_in(parent)
        await lanes.hold(dispatch)
        current.set(dispatch)
        try:
            yield
        finally:
            dispatch.running = False
            lanes.leave(dispatch)
            current.set(parent)
