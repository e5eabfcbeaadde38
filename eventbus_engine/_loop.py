"""An asyncio event loop that need not be started for a task that does not wait: `PrivateLoop`."""

from __future__ import annotations

import asyncio
import math
import selectors
import sys
from asyncio import AbstractEventLoop, Handle, Task, TimerHandle
from asyncio import _set_running_loop as set_running_loop
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

__all__ = ["PrivateLoop", "new_private_loop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class PrivateLoop(asyncio.SelectorEventLoop):
    """A loop that can take a task's first step at once, as the running one, without being started for it.

    To start a loop and to stop it takes several times as long as that step.

    Attributes:
        idle: whether nothing has been left on it that takes a turn of the loop, now or later.
    """

    def __init__(self) -> None:
        self.idle: bool = False
        self._plain = True
        self._stepping = False
        self._last_timer = -math.inf
        self._context: Context | None = None
        self._step: Callable[..., object] | None = None
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self._files = selector.get_map()
        self._files_of_its_own = len(self._files)
        # How a running loop looks after async generators can be seen only while it runs.
        self._hooks = sys.get_asyncgen_hooks()
        self.call_soon(self._note_hooks)

    def _note_hooks(self) -> None:
        self._hooks = sys.get_asyncgen_hooks()

    # --------------------------------------------------------------------------------------------------- a first step

    def prepare(self, coroutine: Coroutine[Any, Any, T], context: Context) -> Task[T]:
        """A task whose first step is left to `step`."""
        self._context = context
        # It asks its loop, by `call_soon`, to take that step.
        task = Task(coroutine, loop=self, context=context)
        self._context = None
        return task

    def step(self, context: Context) -> None:
        """Take the first step of the task that has been prepared."""
        hooks = sys.get_asyncgen_hooks()
        set_running_loop(self)
        try:
            sys.set_asyncgen_hooks(*self._hooks)
            self._stepping = True
            # No interrupt comes between these two lines.
            step, self._step = self._step, None
            context.run(step)  # type: ignore[arg-type]
        finally:
            self._stepping = False
            sys.set_asyncgen_hooks(*hooks)
            set_running_loop(None)

    def put_back(self, context: Context) -> None:
        """Leave that step to the loop after all, if it has not been taken: there was an interrupt before."""
        step, self._step = self._step, None
        if step is not None:
            self.call_soon(step, context=context)

    # ------------------------------------------------------------------------ what asyncio asks it for, seen in passing

    def is_running(self) -> bool:
        """Whether it runs, or takes a first step."""
        return self._stepping or super().is_running()

    def run_forever(self) -> None:
        """Run until it is stopped; stopped before, for one turn."""
        # First: what comes meanwhile, from other threads as well, may be for the next turn.
        self.idle = True
        if self._last_timer <= self.time():
            self._last_timer = -math.inf
        try:
            super().run_forever()
        finally:
            if self._last_timer > -math.inf or len(self._files) > self._files_of_its_own or not self._plain:
                self.idle = False

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> Handle:
        """Call a function in the next turn."""
        if context is not None and context is self._context:
            self._step = callback
            return None  # type: ignore[return-value]  # no task asks for it
        self.idle = False
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Handle:
        """Likewise, from any thread."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        self.idle = False  # last: a turn that began before may have missed it
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> TimerHandle:
        """Call a function at a time of the loop's clock."""
        self.idle = False
        self._last_timer = max(self._last_timer, when)
        return super().call_at(when, callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call a function when a file can be read."""
        self.idle = False
        super().add_reader(fd, callback, *args)

    def add_writer(self, fd: Any, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call a function when a file can be written."""
        self.idle = False
        super().add_writer(fd, callback, *args)

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call a function after a signal. From then on it never is idle."""
        self.idle = self._plain = False
        super().add_signal_handler(sig, callback, *args)

    def set_task_factory(self, factory: Any) -> None:
        """Have tasks made in another way. From then on it never is idle."""
        self.idle = self._plain = False
        super().set_task_factory(factory)


def new_private_loop() -> AbstractEventLoop:
    """A PrivateLoop, or the loop of another kind that the program's policy makes, or of one that is to be debugged."""
    loop = asyncio.new_event_loop()
    if type(loop) is not asyncio.SelectorEventLoop or loop.get_debug():
        return loop
    loop.close()
    return PrivateLoop()
