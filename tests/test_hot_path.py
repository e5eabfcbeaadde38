"""The hot path stays short: an event makes no more calls than it used to. Counted, so that no machine is too busy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from eventbus_engine import Algorithm, Engine, Event, EventBus
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.telemetry.sampling import EveryNth

EVENT = Event.BATCH_START
EVENTS = 20


class Plain:
    def batch_start(self, state: Any, logger: Any) -> None: ...


class Async:
    async def batch_start(self, state: Any, logger: Any) -> None: ...


class Idle:
    def fit_end(self, state: Any, logger: Any) -> None: ...


class NoOp(Algorithm[Any, Any]):
    def __init__(self, number: int, matching: bool = True) -> None:
        self.name = f"no_op_{number}"
        self.matching = matching

    def match(self, event: Any, state: Any) -> bool:
        return self.matching

    async def apply(self, event: Any, state: Any, logger: Any) -> None: ...


def run(
    callbacks: Sequence[Any] = (), algorithms: Sequence[Any] = (), tracer_provider: Any = None
) -> Callable[[], Awaitable[Any]]:
    """An engine's dispatch."""
    engine = Engine(object(), callbacks=callbacks, algorithms=algorithms, tracer_provider=tracer_provider)
    return partial(engine.run_event, EVENT)


def not_sampled() -> RecordingProvider:
    """Records nothing."""
    return RecordingProvider([], sampler=ParentBased(ALWAYS_OFF))


def every_other() -> RecordingProvider:
    """Records half of the events, so that its cost is half of both."""
    return RecordingProvider([], sampler=EveryNth(2))


def recorded() -> RecordingProvider:
    """Records all of them."""
    return RecordingProvider([])


def publish(count: int) -> Callable[[], Awaitable[Any]]:
    """A bus's dispatch to so many subscribers."""
    bus = EventBus()
    for _ in range(count):
        bus.subscribe(lambda envelope: None, EVENT)
    return partial(bus.publish, EVENT)


# Calls per event, of Python and C functions together, the handlers' own among them (a match and an apply for each
# algorithm). Lower a number when the path gets shorter. Raise one only for something that is worth it on every event
# of every user, and say in the commit what.
MOST_CALLS: dict[str, tuple[Callable[[], Callable[[], Awaitable[Any]]], int]] = {
    "nothing": (run, 7),
    "64 callbacks without the hook": (lambda: run(callbacks=[Idle() for _ in range(64)]), 7),
    "8 plain callbacks": (lambda: run(callbacks=[Plain() for _ in range(8)]), 29),
    "8 async callbacks": (lambda: run(callbacks=[Async() for _ in range(8)]), 116),
    "32 async callbacks": (lambda: run(callbacks=[Async() for _ in range(32)]), 188),
    "8 matching algorithms": (lambda: run(algorithms=[NoOp(number) for number in range(8)]), 76),
    "8 algorithms that do not match": (lambda: run(algorithms=[NoOp(number, False) for number in range(8)]), 31),
    "1 plain subscriber": (lambda: publish(1), 12),
    "nothing, not sampled": (lambda: run(tracer_provider=not_sampled()), 10),
    "8 plain callbacks, not sampled": (lambda: run([Plain() for _ in range(8)], [], not_sampled()), 42),
    "8 plain callbacks, every other recorded": (lambda: run([Plain() for _ in range(8)], [], every_other()), 126),
    "8 plain callbacks, recorded": (lambda: run([Plain() for _ in range(8)], [], recorded()), 204),
    "8 async callbacks, recorded": (lambda: run([Async() for _ in range(8)], [], recorded()), 276),
    "8 matching algorithms, recorded": (lambda: run([], [NoOp(number) for number in range(8)], recorded()), 238),
}


def calls_per_event(make: Callable[[], Callable[[], Awaitable[Any]]]) -> float:
    """How many functions are called on an event, once the plans are made."""
    calls = 0

    def count(frame: Any, kind: str, argument: Any) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    async def main() -> None:
        dispatch = make()
        for _ in range(3):
            await dispatch()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for _ in range(EVENTS):
                await dispatch()
        finally:
            sys.setprofile(before)

    asyncio.run(main())
    # The last call is that of setprofile itself.
    return (calls - 1) / EVENTS


@pytest.mark.parametrize("what", MOST_CALLS)
def test_an_event_makes_no_more_calls_than_before(what: str) -> None:
    """A call costs about 50 ns on every event of a run, so one more needs a reason."""
    make, most = MOST_CALLS[what]

    calls = calls_per_event(make)

    assert calls <= most, f"an event with {what} makes {calls:g} calls, {most} so far; see MOST_CALLS"


def test_the_count_sees_one_more_call() -> None:
    """The guard would notice a function called once for each event, and one called once for each handler."""

    def twice(self: Any, state: Any, logger: Any) -> None:
        Plain.batch_start(self, state, logger)

    once_more = type("OnceMore", (), {"batch_start": twice})
    plain = calls_per_event(lambda: run(callbacks=[Plain() for _ in range(8)]))

    longer = calls_per_event(lambda: run(callbacks=[once_more() for _ in range(8)]))

    assert longer == plain + 8
