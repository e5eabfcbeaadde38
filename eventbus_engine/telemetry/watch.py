"""Watching an engine for handlers that take long, while they still run."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import NonRecordingSpan, set_span_in_context

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.spans import SCOPE

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from eventbus_engine.engine import Engine
    from eventbus_engine.in_flight import InFlight

__all__ = ["watch"]

log: logging.Logger = logging.getLogger("eventbus_engine")


@contextmanager
def watch(engine: Engine[Any], slow_after: float = 5.0) -> Iterator[None]:
    """Say, while it still runs, which algorithm or callback of an engine takes long. Once per execution.

    One warning is logged, with the top of the stack of the thread that its event is handled on. If the engine is
    traced, a span `slow callback <name>` of kind `slow` is exported at once, a child of the one that still runs.
    A thread of its own looks every quarter of `slow_after`, and at least every second. The run takes no notice.

    Args:
        engine: whose handlers to watch.
        slow_after: seconds.

    Raises:
        ConfigurationError: `slow_after` is not positive and finite.
    """
    if not 0 < slow_after < math.inf:
        raise ConfigurationError(f"slow_after={slow_after!r} must be a positive, finite number of seconds")
    over = threading.Event()

    def look() -> None:
        known: dict[tuple[int, ...], tuple[float, bool]] = {}
        while not over.wait(min(1.0, slow_after / 4)):
            now, before, known = time.monotonic(), known, {}
            for record in engine.in_flight():
                if record.kind == "dispatch":
                    continue
                # Plain callbacks share the clock of their stage, so how long they have been seen counts as well.
                first, told = before.get(record.execution, (now, False))
                if not told and min(record.elapsed, now - first) >= slow_after:
                    told = True
                    _report(record, engine.tracers.wanted)
                known[record.execution] = first, told

    thread = threading.Thread(target=look, name="eventbus_engine watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _report(record: InFlight, provider: TracerProvider | None) -> None:
    frame = sys._current_frames().get(record.thread)
    stack = "".join(traceback.format_stack(frame)[-3:]).rstrip() if frame is not None else "unknown"
    log.warning(
        "%s %s has been running on %s for %.3g s; its thread is at:\n%s",
        record.kind,
        record.name,
        record.event.name,
        record.elapsed,
        stack,
    )
    if provider is None or record.span is None:
        return
    start = time.time_ns() - int(record.elapsed * 1e9)
    span = provider.get_tracer(SCOPE).start_span(
        f"slow {record.kind} {record.name}",
        context=set_span_in_context(NonRecordingSpan(record.span)),
        attributes={"eventbus.kind": "slow", "eventbus.event": record.event.value},
        start_time=start,
    )
    span.end()
