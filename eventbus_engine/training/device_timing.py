"""What the device did and when: spans timed on a CUDA stream, where those of the loop only show the launches.

A launch returns at once, so that the bar of a section ends long before its kernels do. `DeviceTiming` marks the stream
around the work of a section, and reads the marks once the device has passed them, without ever waiting for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import Tracer

__all__ = ["CudaClock", "DeviceClock", "DeviceTiming"]

T = TypeVar("T")


class DeviceClock(Protocol):
    """Tells the time on a device that runs behind the program."""

    name: str
    """Of the device, and the first word of its spans."""

    def mark(self) -> Any:
        """Put a mark behind all work launched so far by this thread. Returns at once."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to the mark. Returns at once."""
        ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to another, both reached."""
        ...


class CudaClock:
    """Marks are CUDA events on the thread's current stream."""

    name = "cuda"

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        """Query it."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The device's own measurement, to half a microsecond."""
        return float(start.elapsed_time(end))


@dataclass(frozen=True)
class _Section:
    name: str
    tracer: Tracer
    context: Context
    launched_ns: int
    start: Any
    end: Any


class DeviceTiming:
    """Makes a span `cuda forward` for what a section `forward` had the device do, below the section's own.

    The length of such a span is the device's measurement. Its place follows from the spans before it: it begins as
    long after the last one as the device says, and not before it was launched.

    Args:
        clock: the device's.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._pending: deque[_Section] = deque()
        self._last: tuple[Any, int] | None = None

    def timed(self, name: str, tracer: Tracer, function: Callable[..., T]) -> Callable[..., T]:
        """The function, with marks around what it launches; in a trace that is not sampled, without them."""

        def call(*args: Any) -> T:
            context = otel_context.get_current()
            if not otel.get_current_span(context).get_span_context().trace_flags.sampled:
                return function(*args)
            launched, start = time.time_ns(), self._clock.mark()
            result = function(*args)
            self._pending.append(_Section(name, tracer, context, launched, start, self._clock.mark()))
            return result

        return call

    def poll(self) -> None:
        """Make the spans of what the device has finished."""
        # An error of the device reaches the program where it uses the device. What is left cannot be read any more.
        with suppress(RuntimeError):
            while self._pending and self._clock.reached(self._pending[0].end):
                self._export(self._pending.popleft())

    def _export(self, section: _Section) -> None:
        start_ns = section.launched_ns
        if self._last is not None:
            mark, at = self._last
            start_ns = max(start_ns, at + int(self._clock.elapsed_ms(mark, section.start) * 1e6))
        took_ms = self._clock.elapsed_ms(section.start, section.end)
        end_ns = start_ns + int(took_ms * 1e6)
        self._last = section.end, end_ns
        attributes: dict[str, Any] = {"eventbus.kind": "device", "eventbus.outcome": "ok", "train.device.ms": took_ms}
        name = f"{self._clock.name} {section.name}"
        section.tracer.start_span(name, section.context, attributes=attributes, start_time=start_ns).end(end_ns)
