"""Trace and span ids that leave the program's random numbers alone: `PrivateIdGenerator`."""

from __future__ import annotations

import os
import random

from opentelemetry.sdk.trace.id_generator import IdGenerator

__all__ = ["PrivateIdGenerator"]


class PrivateIdGenerator(IdGenerator):
    """Random ids from a generator of its own, seeded by the operating system.

    The SDK's default draws from the global `random`: ranks seeded alike then share their ids, and switching tracing
    on changes every number the program draws afterwards. A forked child is seeded anew, so that it does not repeat
    the ids of its parent. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._seed()

    def generate_trace_id(self) -> int:
        """A random 128-bit id, never zero."""
        return self._draw(128)

    def generate_span_id(self) -> int:
        """A random 64-bit id, never zero."""
        return self._draw(64)

    def is_trace_id_random(self) -> bool:
        """True: every bit is random, so spans carry the W3C random-trace-id flag."""
        return True

    def _seed(self) -> None:
        self._random = random.Random(int.from_bytes(os.urandom(32), "big"))
        self._pid = os.getpid()

    def _draw(self, bits: int) -> int:
        # Asking for the pid costs 0.1 µs and needs no at-fork hook, which could never be unregistered again.
        if os.getpid() != self._pid:
            self._seed()
        while True:
            if drawn := self._random.getrandbits(bits):
                return drawn
