"""Keeping what turned out to matter: the spans of roots that the head decision refused, until those have ended.

`TailKeeper` holds them, within bounds, and hands them on if their root failed or took long. The decision comes too
late for anything but the engine's own spans: what was propagated meanwhile said "not sampled".
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.records import RecordedSpan, Root

__all__ = ["HeldRoot", "KeepReport", "TailKeeper"]

_Heap: TypeAlias = "list[tuple[bool, int, int, RecordedSpan]]"


@dataclass(frozen=True)
class KeepReport:
    """What became of the roots that the head decision refused.

    Attributes:
        failed: how many were kept because something in them failed.
        slow: how many were kept because they took long.
        discarded: how many were not.
        lost: how many spans of those that were kept the bounds cost. They are in no `ExportReport`.
    """

    failed: int
    slow: int
    discarded: int
    lost: int


class HeldRoot(Root):
    """A root that has been refused, and may yet be kept.

    Attributes:
        first: its own span; None once its fate is decided.
        failed: whether a span of it has failed so far.
        lost: how many of its spans the bounds have cost.
        kept: why it was kept: `failed` or `slow`; empty if it was not, or not yet.
    """

    __slots__ = ("failed", "first", "kept", "lost")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: RecordedSpan | None = None
        self.failed: bool = False
        self.lost: int = 0
        self.kept: str = ""


class TailKeeper:
    """Decides about refused roots when they have ended.

    The bounds keep what is most telling: of a root, spans that failed and then those that started first, so that a span
    whose parent is there comes with it; of all roots, the youngest. What they cost is counted.

    Args:
        failed: whether to keep roots in which something failed.
        slow: keep roots that took longer; seconds, None for none.
        put: takes the spans that are kept.
        per_root: how many spans of a root to hold.
        in_all: how many to hold of all roots that have not ended.

    Raises:
        ConfigurationError: `slow` is no time.
    """

    def __init__(
        self,
        failed: bool,
        slow: float | None,
        put: Callable[[RecordedSpan], None],
        per_root: int = 4096,
        in_all: int = 32_768,
    ) -> None:
        if slow is not None and not 0 < slow < math.inf:
            raise ConfigurationError(f"keep_slow={slow!r} must be a positive, finite number of seconds")
        self._failed = failed
        self._slow = math.inf if slow is None else slow * 1e9
        self._put = put
        self._per_root = per_root
        self._in_all = in_all
        self._reset()
        if hasattr(os, "register_at_fork"):
            # The parent exports what it holds; and its lock may have been taken. Weak: nothing unregisters a hook.
            reset = weakref.WeakMethod(self._reset)
            os.register_at_fork(after_in_child=lambda: (call := reset()) and call())

    def _reset(self) -> None:
        # Reentrant: the garbage collector or a signal may end a span in the midst of it.
        self._lock = threading.RLock()
        self._held: OrderedDict[HeldRoot, _Heap] = OrderedDict()
        self._numbers = itertools.count()
        self._total = self._lost = 0
        self._decided = {"failed": 0, "slow": 0, "": 0}

    @property
    def report(self) -> KeepReport:
        """What has become of the roots so far."""
        decided = self._decided
        return KeepReport(decided["failed"], decided["slow"], decided[""], self._lost)

    def put(self, span: RecordedSpan) -> None:
        """Take a span of a refused root that has ended. What ends after its root follows that."""
        root = span.root
        assert isinstance(root, HeldRoot)  # noqa: S101 -- others have another `put`
        kept: list[RecordedSpan] = []
        with self._lock:
            if root.first is not None:
                root.failed = root.failed or span.outcome != "ok"
                if span is not root.first:
                    self._hold(root, span)
                    return
                kept = self._decide(root, span.end_time)
                if root.kept and root.lost:
                    span.extra = {**(span.extra or {}), "eventbus.lost": root.lost}
        if root.kept:
            for each in (*kept, span):
                self._put(each)

    def settle(self) -> None:
        """Decide about the roots that have not ended, by what is known: a run is over."""
        kept: list[RecordedSpan] = []
        with self._lock:
            for root in list(self._held):
                kept += self._decide(root, time.time_ns())
        for each in kept:
            self._put(each)

    def _hold(self, root: HeldRoot, span: RecordedSpan) -> None:
        heap = self._held.setdefault(root, [])
        entry = (span.outcome != "ok", -span.start, next(self._numbers), span)
        if len(heap) < self._per_root:
            heap.append(entry)
            self._total += 1
            if len(heap) == self._per_root:
                heapq.heapify(heap)  # and not before: few roots get there
        else:
            heapq.heapreplace(heap, max(entry, heap[0]))
            root.lost += 1
        if self._total > self._in_all:
            oldest, lost = self._held.popitem(last=False)
            oldest.lost += len(lost)
            self._total -= len(lost)

    def _decide(self, root: HeldRoot, now: int) -> list[RecordedSpan]:
        """Settle the fate of a root; what is kept of it, in the order in which it ended."""
        first, root.first = root.first, None
        heap = self._held.pop(root, [])
        self._total -= len(heap)
        if root.failed and self._failed:
            root.kept = "failed"
        elif first is not None and now - first.start > self._slow:
            root.kept = "slow"
        self._decided[root.kept] += 1
        if not root.kept:
            return []
        self._lost += root.lost
        return [span for *_, span in sorted(heap, key=lambda entry: entry[2])]
