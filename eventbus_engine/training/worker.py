"""Where the training step runs: on one thread of its own, so that the event loop keeps beating, or inline.

A step takes long and holds the thread it runs on, though torch releases the GIL meanwhile. `ComputeWorker` gives a
trainer exactly one such thread: what torch keeps per thread (grad mode, autocast, the current device, the order of
collectives) then has one owner. `InlineWorker` has the same interface and runs on the calling thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, TypeVarTuple, Unpack

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from eventbus_engine._steps import NOWHERE, need_loop, without_loop
from eventbus_engine.errors import EngineClosedError

__all__ = ["ComputeWorker", "InlineWorker", "Worker"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_Post: TypeAlias = Callable[[Callable[[], None]], object]
"""Has the event loop call something soon, from any thread, without waiting until it has."""


class Worker(Protocol):
    """What runs the computations of a trainer."""

    apart: ClassVar[bool]
    """Whether that is on a thread of its own."""

    async def run(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Call `function(*args)` under a copy of the caller's context variables and return what it returns."""
        ...

    async def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the computations run, as far as it gets without an event loop, and then here."""
        ...

    async def checkpoint_if_interrupted(self) -> None:
        """In a coroutine that is driven: go back to the event loop now if its caller has been cancelled meanwhile."""
        ...

    def close(self, timeout: float = 10.0) -> bool:
        """Take no more work. True if everything it started has ended."""
        ...


class InlineWorker:
    """Runs everything at once on the calling thread: the event loop stands still meanwhile."""

    apart: ClassVar[bool] = False

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

    async def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await it: here is where the computations run. The event loop gets a turn first, and may cancel the caller."""
        try:
            await checkpoint()
        except BaseException:
            coroutine.close()
            raise
        return await coroutine

    async def checkpoint_if_interrupted(self) -> None:
        """Nobody can have been cancelled meanwhile: the event loop has stood still."""

    def close(self, timeout: float = 10.0) -> bool:
        """Take no more work. Always True: nothing outlives its `run`."""
        self._closed = True
        return True


class ComputeWorker:
    """Runs everything, in order of arrival, on one daemon thread, which starts with the first `run`."""

    apart: ClassVar[bool] = True

    def __init__(self, name: str = "eventbus-engine-compute") -> None:
        self._name = name
        self._queue: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._job: _Job[Any] | None = None  # that the thread is at
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

    async def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread, as far as it gets without an event loop; from there on it runs here.

        What it runs by `run` meanwhile, it runs without a trip to the thread and back: it is there already. It needs
        the event loop where it calls `need_loop`, as the engine does before callbacks and whatever is async.

        It sees the caller's context variables, and the caller those that it has set. A caller that is cancelled waits
        until it gets to where it needs the loop, or to its end, and cancels it there.

        Raises:
            EngineClosedError: the worker is closed.
        """
        if threading.current_thread() is self._thread:
            return await coroutine
        start = _Start(coroutine)
        interruption: BaseException | None = None
        try:
            await self.run(start.take)
        except BaseException as error:
            if coroutine.cr_frame is None:  # type: ignore[attr-defined]  # it has come to its end, by this error or not
                raise
            interruption = error
        for variable, value in start.changed.items():
            variable.set(value)
        return start.result[0] if start.result else await _rest(coroutine, interruption)

    async def checkpoint_if_interrupted(self) -> None:
        """In a coroutine that is driven: go back to the event loop now if its caller has been cancelled meanwhile."""
        if threading.current_thread() is self._thread and self._job is not None and self._job.interrupted:
            await need_loop()

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
            self._job = job
            job.execute()
            # While this thread waits for the next one, it must not keep the last one's batch and graph alive.
            self._job = None
            del job


class _Start(Generic[T]):
    """The part of a coroutine that is run on the thread.

    Attributes:
        result: what it has returned, if it came to its end.
        changed: the context variables that it has set, with their values.
    """

    __slots__ = ("_coroutine", "changed", "result")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.result: list[T] = []
        self.changed: dict[contextvars.ContextVar[Any], Any] = {}

    def take(self) -> None:
        """On the thread: run it."""
        before = contextvars.copy_context()
        without_loop.around, without_loop.driven = None, True  # there is no loop on this thread
        try:
            self._coroutine.send(None)
        except StopIteration as stop:
            self.result.append(stop.value)
        finally:
            without_loop.around, without_loop.driven = NOWHERE, False
            after = contextvars.copy_context()
            self.changed = {v: value for v, value in after.items() if v not in before or before[v] is not value}


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, T], interruption: BaseException | None) -> Generator[Any, Any, T]:
    """What is left of a coroutine that has begun elsewhere; an interruption is raised where it stands."""
    try:
        yielded = coroutine.send(None) if interruption is None else coroutine.throw(interruption)
        while True:
            try:
                sent = yield yielded
            except BaseException as error:
                yielded = coroutine.throw(error)
            else:
                yielded = coroutine.send(sent)
    except StopIteration as stop:
        result: T = stop.value
        return result


class _Job(Generic[T]):
    """One call on its way to the thread and back.

    Attributes:
        interrupted: whether its caller has been cancelled since it began.
    """

    __slots__ = ("_begun", "_call", "_context", "_done", "_error", "_post", "_result", "interrupted")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._done = anyio.Event()
        self._post = _post()
        self._begun = threading.Lock()
        self.interrupted = False
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
        # An event loop that is gone (trio's says so by an error of its own) has no caller left to tell.
        with contextlib.suppress(RuntimeError):
            self._post(self._done.set)

    async def wait(self) -> T:
        """On the event loop: the result, once there is one."""
        interruption: BaseException | None = None
        try:
            await self._done.wait()
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt) as error:
            if self.claim():
                raise
            self.interrupted = True
            interruption = await self._see_through(error)
        failure, self._error = self._error or interruption, None
        if failure is not None:
            # The traceback holds this frame and, through it, the failure again: cut that circle, or a failed step
            # keeps its tensors until the garbage collector happens to come by.
            try:
                raise failure
            finally:
                del failure, interruption
        return self._result

    async def _see_through(self, interruption: BaseException) -> BaseException:
        """Wait for the end of what has begun all the same; returns the latest interruption."""
        while not self._done.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    await self._done.wait()
            # asyncio's Task.cancel pierces a shield, so this may happen again.
            except (anyio.get_cancelled_exc_class(), KeyboardInterrupt) as again:
                interruption = again
        return interruption


def _post() -> _Post:
    """How to reach the running event loop. What anyio has for it makes the thread wait until the call is done."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio.lowlevel

        return trio.lowlevel.current_trio_token().run_sync_soon


def _closed_error() -> EngineClosedError:
    return EngineClosedError(
        "the trainer's compute worker is closed and takes no more work; make a new Trainer, or keep this one open over "
        "several calls with `async with trainer:`"
    )
