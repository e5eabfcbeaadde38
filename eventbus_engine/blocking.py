"""Plain hooks on a thread of their own, so that a client that blocks does not hold up the event loop."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import anyio
import anyio.from_thread
from anyio.lowlevel import current_token

from eventbus_engine._steps import leave_loop

__all__ = ["HookThread"]


class HookThread:
    """The thread on which the plain hooks of one callback run, one after another, in the order they are called in.

    A daemon, started when first used: a hook that never returns must not keep the program from ending.

    Args:
        name: of the callback.

    Attributes:
        abandoned: hooks that were given up on while they ran: their timeout, or the deadline of `close`, was over.
    """

    def __init__(self, name: str) -> None:
        self.abandoned: int = 0
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: _Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a hook is running. May be read from any thread."""
        return self._running is not None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a plain function on the thread, in a copy of the caller's context, and wait for what it returns.

        A cancellation does not wait: nothing can interrupt the thread. What has not begun by then is not called.
        """
        job = _Job(functools.partial(copy_context().run, _called_from_thread, function, *arguments))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"eventbus-engine-{self._name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        try:
            await job.done.wait()
        except BaseException:
            job.abandoned = True
            self.abandoned += self._running is job
            raise
        result = job.outcome()
        return await result if isinstance(result, Awaitable) else result

    async def free(self) -> None:
        """Wait until the thread is through with what was given up on, so that it does not cost others their time."""
        if self.busy:
            await self.run(_nothing)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function as an async one that runs on the thread."""

        @functools.wraps(function)
        async def call(*arguments: Any) -> Any:
            return await self.run(function, *arguments)

        return call

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.abandoned:
                self._running = job
                job.run()
                self._running = None
                job.tell()

    def stop(self) -> None:
        """End the thread, once it is through with what it was given."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None


def _nothing() -> None: ...


def _called_from_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    leave_loop()
    return function(*arguments)


class _Job:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.abandoned: bool = False
        self.done = anyio.Event()
        self._function = function
        self._token = current_token()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def tell(self) -> None:
        """Wake whoever waits, unless nobody does any more."""
        # The loop may have ended meanwhile: that is what abandoning is for.
        with suppress(RuntimeError):
            if not self.abandoned:
                anyio.from_thread.run_sync(self.done.set, token=self._token)

    def outcome(self) -> Any:
        try:
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._error = self._result = None
