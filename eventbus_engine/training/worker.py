"""Where the training step runs: on one thread of its own, so that the event loop keeps beating, or inline.

A step takes long and holds the thread it runs on, though torch releases the GIL meanwhile. `ComputeWorker` gives a
trainer exactly one such thread: what torch keeps per thread (grad mode, autocast, the current device, the order of
collectives) then has one owner. `InlineWorker` has the same interface and runs on the calling thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, Unpack

import anyio
from anyio import from_thread
from anyio.lowlevel import EventLoopToken, checkpoint_if_cancelled, current_token

from eventbus_engine.errors import EngineClosedError

__all__ = ["ComputeWorker", "InlineWorker", "Worker"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Worker(Protocol):
    """What runs the computations of a trainer."""

    async def run(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Call `function(*args)` under a copy of the caller's context variables and return what it returns."""
        ...

    def close(self, timeout: float = 10.0) -> bool:
        """Take no more work. True if everything it started has ended."""
        ...


class InlineWorker:
    """Runs everything at once on the calling thread: the event loop stands still meanwhile."""

    def __init__(self) -> None:
        self._closed = False

    async def run(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Call `function(*args)` here and now, under a copy of the caller's context variables.

        Raises:
            EngineClosedError: the worker is closed.
        """
        if self._closed:
            raise _closed_error()
        return contextvars.copy_context().run(function, *args)

    def close(self, timeout: float = 10.0) -> bool:
        """Take no more work. Always True: nothing outlives its `run`."""
        self._closed = True
        return True


class ComputeWorker:
    """Runs everything, in order of arrival, on one daemon thread, which starts with the first `run`."""

    def __init__(self, name: str = "eventbus-engine-compute") -> None:
        self._name = name
        self._queue: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    async def run(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Call `function(*args)` on the thread, under a copy of the caller's context variables.

        Called on the worker's own thread it runs inline, as there is nobody else to do it.

        A thread cannot be interrupted: a caller that is cancelled waits for the end of what has begun, and only then
        gets its cancellation, or the exception of `function` if it failed meanwhile. What still queues is withdrawn.

        Raises:
            EngineClosedError: the worker is closed.
        """
        if threading.current_thread() is self._thread:
            return contextvars.copy_context().run(function, *args)
        await checkpoint_if_cancelled()
        job = _Job(lambda: function(*args))
        self._submit(job)
        return await job.wait()

    def close(self, timeout: float = 10.0) -> bool:
        """Finish what is queued, then end the thread and join it.

        Args:
            timeout: seconds to wait for the thread.

        Returns:
            Whether the thread has ended. One that has not is a daemon: it cannot keep the process alive.
        """
        with self._lock:
            thread = self._thread
            if thread is not None and not self._closed:
                self._queue.put(None)
            self._closed = True
        if thread is None:
            return True
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()

    def _submit(self, job: _Job[Any]) -> None:
        with self._lock:
            if self._closed:
                raise _closed_error()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(job)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job.execute()
            # While this thread waits for the next one, it must not keep the last one's batch and graph alive.
            del job


class _Job(Generic[T]):
    """One call on its way to the thread and back."""

    __slots__ = ("_begun", "_call", "_context", "_done", "_error", "_result", "_token")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._done = anyio.Event()
        self._token: EventLoopToken = current_token()
        self._begun = threading.Lock()
        self._error: BaseException | None = None
        self._result: T

    def claim(self) -> bool:
        """Decide between the thread, which wants to begin, and a cancelled caller, who wants to withdraw."""
        return self._begun.acquire(blocking=False)

    def execute(self) -> None:
        """On the thread: make the call, and tell the caller's event loop."""
        if not self.claim():
            return
        try:
            self._result = self._context.run(self._call)
        except BaseException as error:
            self._error = error
        # An event loop that is gone has no caller left to tell.
        with contextlib.suppress(anyio.RunFinishedError):
            from_thread.run_sync(self._done.set, token=self._token)

    async def wait(self) -> T:
        """On the event loop: the result, once there is one."""
        interruptions = (anyio.get_cancelled_exc_class(), KeyboardInterrupt)
        interruption: BaseException | None = None
        while not self._done.is_set():
            try:
                with anyio.CancelScope(shield=interruption is not None):
                    await self._done.wait()
            except interruptions as error:  # asyncio's Task.cancel pierces a shield, so this may happen again
                interruption = error
                if self.claim():
                    raise
        failure, self._error = self._error or interruption, None
        if failure is not None:
            # The traceback holds this frame and, through it, the failure again: cut that circle, or a failed step
            # keeps its tensors until the garbage collector happens to come by.
            try:
                raise failure
            finally:
                del failure, interruption
        return self._result


def _closed_error() -> EngineClosedError:
    return EngineClosedError(
        "the trainer's compute worker is closed and takes no more work; make a new Trainer, or keep this one open over "
        "several calls with `async with trainer:`"
    )
