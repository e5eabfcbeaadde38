"""What the guarantees alone cost: prototypes that keep what an event cannot do without, and leave out all the rest.

Each stands beside the event that it is a prototype of, with eight handlers that do nothing (the last: that suspend
once). None of them is of any use: no errors, no cancellation, no tracing, nobody may come or go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from time import perf_counter
from typing import Any

import anyio
import ours
from interleaved import Case, Dispatch, measure_in_turns
from peers import Async, Plain, Suspending, close_peers
from tables import Table, cell

from eventbus_engine import Event
from eventbus_engine.lanes import Dispatch as Handled
from eventbus_engine.lanes import Lanes
from eventbus_engine.relay import _scope_class, _start_now
from eventbus_engine.trace import Trace

Row = tuple[str, float, str, float | None]
Hook = Callable[[Any, Any], Any]

COUNT = 8
EVENT = Event.BATCH_START
CURRENT: ContextVar[Any] = ContextVar("current", default=None)


def hooks(kind: type[Any]) -> list[Hook]:
    """Those of so many callbacks."""
    return [kind().batch_start for _ in range(COUNT)]


def plain() -> Dispatch:
    """Three coroutines, a dispatch on its lane, the context variable, and a guard around each call."""
    called, state, lanes, running = hooks(Plain), object(), Lanes(), dict[Any, Any]()

    async def run_event() -> Any:
        return await publish(EVENT, state)

    async def publish(event: Event, state: object) -> Any:
        lane, parent = id(state), CURRENT.get()
        dispatch = Handled.publish(event, None, state, None, lane, lanes)
        if lanes.used.setdefault(lane, dispatch) is not dispatch:
            await lanes.wait(dispatch)
        CURRENT.set(dispatch)
        try:
            return await handle(dispatch, state)
        finally:
            dispatch.running = False
            del lanes.used[lane]
            CURRENT.set(parent)

    async def handle(dispatch: Handled, state: object) -> Any:
        running[dispatch] = state
        try:
            began = perf_counter()
            for hook in called:
                try:
                    result = hook(state, None)
                except Exception as error:
                    result = error
                if result is not None:
                    return result
            return {} if perf_counter() - began < 1 else None
        finally:
            del running[dispatch]

    return run_event


def asynchronous() -> Dispatch:
    """The question for a deadline, and one task, with a scope of its own, that awaits all of them."""
    called = hooks(Async)

    async def run_event() -> None:
        anyio.current_effective_deadline()
        loop = asyncio.get_running_loop()
        scope = _scope_class()()

        async def run() -> None:
            with scope:
                for hook in called:
                    await hook(None, None)

        parent = asyncio.current_task(loop)
        assert parent is not None
        assert _start_now(run(), loop, parent, copy_context()).done()

    return run_event


def not_matching() -> Dispatch:
    """A call of `match` and a Trace each, which may be the same on every event."""
    matches = [
        (one.match, f"{one.name}/{EVENT.name}", Trace(str(one.name), EVENT, reason="not matched"))
        for one in ours.algorithms(COUNT, matching=False)
    ]

    async def run_event() -> Any:
        return {key: skipped for match, key, skipped in matches if match(EVENT, None) is False}

    return run_event


def suspending() -> Dispatch:
    """The question for a deadline, a task with a scope of its own for each, and a future for the last one."""
    called = hooks(Suspending)

    async def run_event() -> None:
        anyio.current_effective_deadline()
        loop = asyncio.get_running_loop()
        parent, context, new_scope = asyncio.current_task(loop), copy_context(), _scope_class()
        assert parent is not None
        left, done = len(called), loop.create_future()

        async def run(hook: Hook, scope: anyio.CancelScope) -> None:
            nonlocal left
            with scope:
                await hook(None, None)
            left -= 1
            if not left:
                done.set_result(None)

        for hook in called:
            _ = _start_now(run(hook, new_scope()), loop, parent, context.copy())
        await done

    return run_event


def group() -> Dispatch:
    """Asyncio's own way, without scopes."""
    called: Sequence[Callable[[Any, Any], Awaitable[Any]]] = hooks(Suspending)

    async def run_event() -> None:
        async with asyncio.TaskGroup() as tasks:
            for hook in called:
                tasks.create_task(hook(None, None))  # type: ignore[arg-type]

    return run_event


BESIDE: dict[str, tuple[str, Callable[[], Dispatch], Callable[[], Dispatch]]] = {
    "8 plain callbacks": (
        "three coroutines, lane, context variable, guarded calls",
        plain,
        partial(ours.with_callbacks(Plain), COUNT),
    ),
    "8 async callbacks": (
        "one task with its scope, the question for a deadline, the awaits",
        asynchronous,
        partial(ours.with_callbacks(Async), COUNT),
    ),
    "8 algorithms that do not match": (
        "`match` and a Trace each",
        not_matching,
        partial(ours.with_algorithms(matching=False), COUNT),
    ),
    "8 callbacks that suspend once": (
        "a task with its scope each, and waiting for the last",
        suspending,
        partial(ours.with_callbacks(Suspending), COUNT),
    ),
    "8 tasks in an asyncio.TaskGroup, which has no scopes": ("", group, group),
}


def measure(*, loop: str = "asyncio", rounds: int = 31, sample_ms: float = 3.0) -> Iterator[Row | Table]:
    """Each prototype, and the event that it is one of.

    Args:
        loop: `asyncio` or `uvloop`.
        rounds: samples for each figure.
        sample_ms: how long each takes.
    """
    stripped = {name: Case(f"{name}, prototype", 1, make) for name, (_, make, _) in BESIDE.items()}
    whole = {name: Case(name, 1, make) for name, (_, _, make) in BESIDE.items()}
    measure_in_turns(
        [*stripped.values(), *whole.values()], loop=loop, rounds=rounds, sample_ms=sample_ms, close=close_peers
    )
    rows = [
        (name, keeps, cell(stripped[name].median), cell(whole[name].median)) for name, (keeps, _, _) in BESIDE.items()
    ]
    figures = {case.row: case.figures() for case in (*stripped.values(), *whole.values())}
    head = ["", "what its prototype keeps", "prototype", "the event"]
    yield Table("prototypes", "What is left without all that can be left out, µs", head, rows, figures)
    for name in BESIDE:
        yield f"{name}, over its prototype", whole[name].median / stripped[name].median, "times", None
