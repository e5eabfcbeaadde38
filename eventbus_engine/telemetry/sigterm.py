"""SIGTERM while tracing, on request: what is known is exported, then the signal does what it would have done."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ending_on_sigterm"]

log: logging.Logger = logging.getLogger("eventbus_engine")


@contextmanager
def ending_on_sigterm(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` on SIGTERM, inside the block and on the main thread, before whatever the signal did so far.

    `end` runs on a thread of its own, while the main thread goes on: that may have been interrupted anywhere, with a
    lock that `end` needs. Whatever `end` raises is logged. A second SIGTERM meanwhile does what it did before the
    block, at once. A SIGTERM that was ignored stays ignored.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if previous in (signal.SIG_IGN, None):  # None: somebody outside Python handles it, who cannot be put back
        yield
        return
    ended = threading.Lock()

    def end_and_pass_on() -> None:  # pragma: no cover -- on a thread that `threading` has not started for coverage
        try:
            end()
        except Exception:
            log.exception("what was to be exported on SIGTERM may be lost")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            ended.release()

    def handle(number: int, frame: FrameType | None) -> None:
        # Here and now: only the main thread may, and it may never come by again.
        signal.signal(signal.SIGTERM, previous)
        ended.acquire()
        # `threading.Thread` has locks of its own, which the interrupted frame may hold.
        _thread.start_new_thread(end_and_pass_on, ())

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, previous)
        # What has begun is waited for.
        ended.acquire()
