"""This project's ways to hand an event to N handlers that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from interleaved import Dispatch, Loop
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from peers import SUSPENDING_COLUMNS, Async, Plain, Suspending, SuspendingOnTrio

from eventbus_engine import Algorithm, Engine, Event, EventBus
from eventbus_engine.telemetry.provider import RecordingProvider

__all__ = ["NO_OP", "SUSPENDING", "Way", "algorithms"]

EVENT = Event.BATCH_START
COLUMNS = (0, 1, 8, 32)


class Way(NamedTuple):
    """How to build a dispatch to so many handlers, and the peer to compare it with where Composer has the same."""

    name: str
    make: Callable[[int], Dispatch]
    loop: Loop = "asyncio"
    columns: Sequence[int] = COLUMNS
    composer: str | None = "Composer, callbacks"


class Idle:
    """A callback that has no hook for the event."""

    def fit_end(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class NoOp(Algorithm[Any, Any]):
    """An async algorithm that does nothing, with a Trace of each event."""

    def __init__(self, number: int, matching: bool) -> None:
        self.name = f"no_op_{number}"
        self.matching = matching

    def match(self, event: Any, state: Any) -> bool:
        """Always or never."""
        return self.matching

    async def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Do nothing."""


def algorithms(count: int, matching: bool = True) -> list[NoOp]:
    """So many of them."""
    return [NoOp(number, matching) for number in range(count)]


def recording() -> RecordingProvider:
    """Records every span and exports none."""
    return RecordingProvider([])


def sampled_out() -> RecordingProvider:
    """Records none."""
    return RecordingProvider([], sampler=ParentBased(ALWAYS_OFF))


def with_callbacks(
    kind: type[Any], provider: Callable[[], Any] = lambda: None, blocking: bool = False
) -> Callable[[int], Dispatch]:
    """An engine with callbacks; its state gives every event a lane."""

    def make(count: int) -> Dispatch:
        engine: Engine[Any] = Engine(object(), callbacks=[kind() for _ in range(count)], tracer_provider=provider())
        return partial(engine.sync.run_event if blocking else engine.run_event, EVENT)

    return make


def with_algorithms(matching: bool, provider: Callable[[], Any] = lambda: None) -> Callable[[int], Dispatch]:
    """An engine with algorithms and the default passes."""

    def make(count: int) -> Dispatch:
        engine: Engine[Any] = Engine(object(), algorithms=algorithms(count, matching), tracer_provider=provider())
        return partial(engine.run_event, EVENT)

    return make


def with_subscribers(count: int) -> Dispatch:
    """A bus without an engine."""
    bus = EventBus()
    for _ in range(count):
        bus.subscribe(lambda envelope: None, EVENT)
    return partial(bus.publish, EVENT)


NO_OP = [
    Way("plain callbacks", with_callbacks(Plain)),
    Way("plain callbacks, sampled out", with_callbacks(Plain, sampled_out)),
    Way("plain callbacks, recorded", with_callbacks(Plain, recording)),
    Way("async callbacks", with_callbacks(Async)),
    Way("async callbacks, sampled out", with_callbacks(Async, sampled_out)),
    Way("async callbacks, recorded", with_callbacks(Async, recording)),
    Way("async callbacks on trio", with_callbacks(Async), "trio"),
    Way(
        "callbacks without the hook",
        with_callbacks(Idle),
        columns=(8, 64),
        composer="Composer, callbacks without the hook",
    ),
    Way("matching async algorithms", with_algorithms(True), composer="Composer, matching algorithms"),
    Way("matching, sampled out", with_algorithms(True, sampled_out), composer="Composer, matching algorithms"),
    Way("matching, recorded", with_algorithms(True, recording), composer="Composer, matching algorithms"),
    Way("algorithms that do not match", with_algorithms(False), composer="Composer, algorithms that do not match"),
    Way("bus.publish, plain subscribers", with_subscribers, composer=None),
    Way("engine.sync, plain callbacks", with_callbacks(Plain, blocking=True), "none"),
    Way("engine.sync, async callbacks", with_callbacks(Async, blocking=True), "none"),
]
"""Handlers that do nothing. Traces are made and returned in all of them, spans only where it says so."""

SUSPENDING = [
    Way("async callbacks", with_callbacks(Suspending), "asyncio", SUSPENDING_COLUMNS, None),
    Way("async callbacks on trio", with_callbacks(SuspendingOnTrio), "trio", SUSPENDING_COLUMNS, None),
]
"""Handlers that suspend once."""
