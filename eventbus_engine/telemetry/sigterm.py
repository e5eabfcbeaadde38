"""SIGTERM while tracing, on request: what is known is exported, then the signal does what it would have done."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ending_on_sigterm"]


@contextmanager
def ending_on_sigterm(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` on SIGTERM, inside the block and on the main thread, before whatever the signal did so far.

    A SIGTERM that was ignored stays ignored.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if previous is signal.SIG_IGN:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        end()
        signal.signal(signal.SIGTERM, previous)
        if callable(previous):
            previous(number, frame)
        else:
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, previous)
