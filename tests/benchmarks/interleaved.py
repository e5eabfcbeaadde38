"""Measure many ways to do the same thing in turns, in one process, so that whatever else the machine does hits all.

Every case is sampled once a round, the rounds in an order of their own each. A sample is a batch of dispatches that
takes about `sample_ms`; its figure is the time of one. What was made before the first round is kept out of the
garbage collector's sight (`gc.freeze`) and what a sample left behind is collected before the next: each case pays for
the garbage of its own and no other's.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Literal, TypeAlias

__all__ = ["Case", "Dispatch", "Loop", "measure_in_turns"]

Dispatch: TypeAlias = Callable[[], Any]
"""One dispatch: a plain function, or one whose result is awaited."""

Loop: TypeAlias = Literal["none", "asyncio", "trio"]

MOST_CALLS = 200_000


@dataclass(eq=False)
class Case:
    """One figure of a table.

    Attributes:
        row: what dispatches.
        column: to how many handlers.
        make: builds it, on the event loop that it will run on if that is asyncio's; not timed.
        loop: where to call it: `none` for plain functions.
        calls: dispatches per sample, found out before the first.
        samples: microseconds per dispatch.
        missing: why there are none: `not installed`, or what it raised.
        optional: somebody else's code, which may be missing or broken without stopping the rest.
        after: called after each sample, not timed.
    """

    row: str
    column: int
    make: Callable[[], Dispatch]
    loop: Loop = "asyncio"
    optional: bool = False
    after: Callable[[], object] | None = None
    calls: int = 1
    samples: list[float] = field(default_factory=list)
    missing: str = ""

    @property
    def median(self) -> float:
        """Microseconds per dispatch."""
        return statistics.median(self.samples)

    def figures(self) -> dict[str, Any]:
        """What there is to know of it, for JSON."""
        if not self.samples:
            return {"missing": self.missing}
        low, middle, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return {"median": middle, "q1": low, "q3": high, "min": min(self.samples), "calls": self.calls}


def measure_in_turns(
    cases: Iterable[Case], *, loop: str, rounds: int, sample_ms: float, close: Callable[[], Awaitable[None]]
) -> None:
    """Sample all cases round by round.

    Args:
        cases: what to measure; their samples are added to them.
        loop: what to run the asyncio ones on: `asyncio` or `uvloop`.
        rounds: samples per case, two or more.
        sample_ms: milliseconds that a sample should take.
        close: ends what the cases have left running on the loop.
    """
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        built = [(case, dispatch) for case in cases if (dispatch := _build(case, runner)) is not None]
        gc.collect()
        gc.freeze()
        try:
            live = [(case, dispatch) for case, dispatch in built if _calibrate(case, dispatch, runner, sample_ms)]
            shuffle = random.Random(0).shuffle
            for _ in range(rounds):
                shuffle(live)
                for case, dispatch in live:
                    gc.collect()
                    case.samples.append(_sample(case, dispatch, runner) / case.calls / 1000)
        finally:
            gc.unfreeze()
            runner.run(_close(close))


def loop_factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """How to make an event loop of that name."""
    if loop == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def _build(case: Case, runner: asyncio.Runner) -> Dispatch | None:
    """The case's dispatch; None where it cannot be had."""

    async def make() -> Dispatch:
        return case.make()

    try:
        return runner.run(make())
    except Exception as error:
        _miss(case, error)
        return None


def _calibrate(case: Case, dispatch: Dispatch, runner: asyncio.Runner, sample_ms: float) -> bool:
    """Warm it up and size its batches; whether it runs at all."""
    try:
        taken = _sample(case, dispatch, runner) / 1e6
        while taken < sample_ms / 3 and case.calls < MOST_CALLS:
            case.calls = min(case.calls * 4, MOST_CALLS)
            taken = min(_sample(case, dispatch, runner) for _ in range(2)) / 1e6
    except Exception as error:
        _miss(case, error)
        return False
    case.calls = max(1, min(MOST_CALLS, int(case.calls * sample_ms / taken)))
    return True


def _miss(case: Case, error: Exception) -> None:
    """Go on without it if it is somebody else's."""
    if not case.optional:
        raise error
    case.missing = "not installed" if isinstance(error, ImportError) else f"does not run: {error!r}"


def _sample(case: Case, dispatch: Dispatch, runner: asyncio.Runner) -> int:
    """Nanoseconds that a batch of dispatches takes, after a tenth of it to warm the caches up again."""
    warm_up = case.calls // 10 + 1
    if case.loop == "none":
        for _ in itertools.repeat(None, warm_up):
            dispatch()
        started = perf_counter_ns()
        for _ in itertools.repeat(None, case.calls):
            dispatch()
        taken = perf_counter_ns() - started
    elif case.loop == "asyncio":
        taken = runner.run(_awaited(dispatch, warm_up, case.calls))
    else:
        import trio

        taken = trio.run(_awaited, dispatch, warm_up, case.calls)
    if case.after is not None:
        case.after()
    return taken


async def _awaited(dispatch: Dispatch, warm_up: int, calls: int) -> int:
    for _ in itertools.repeat(None, warm_up):
        await dispatch()
    started = perf_counter_ns()
    for _ in itertools.repeat(None, calls):
        await dispatch()
    return perf_counter_ns() - started


async def _close(close: Callable[[], Awaitable[None]]) -> None:
    await close()
