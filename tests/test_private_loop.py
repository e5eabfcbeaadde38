"""The private loop of `engine.sync`: what an event leaves on it gets its turn, though it is not started for each."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import copy_context
from typing import Any

import anyio
import pytest

from eventbus_engine import Engine, Event
from eventbus_engine._loop import PrivateLoop
from eventbus_engine.testing import FakeAlgorithm


@pytest.fixture
def engine() -> Iterator[Engine[Any]]:
    """An engine whose async algorithm does what `do` says, on its private loop."""
    engine = Engine(object(), algorithms=[FakeAlgorithm(apply=call_do)])
    yield engine
    engine.sync.close()


do: Callable[[], Any] = list


async def call_do(event: Any, state: Any, logger: Any) -> Any:
    """The algorithm."""
    result = do()
    return await result if asyncio.iscoroutine(result) else result


def run(engine: Engine[Any], monkeypatch: pytest.MonkeyPatch, what: Callable[[], Any]) -> Any:
    """An event in which that is done, and what it returned."""
    monkeypatch.setattr(sys.modules[__name__], "do", what)
    return engine.sync.run_event(Event.BATCH_END)["fake/BATCH_END"].exit_code


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry each time that the loop is started."""
    starts: list[None] = []
    real = PrivateLoop.run_forever

    def counted(self: PrivateLoop) -> None:
        starts.append(None)
        real(self)

    monkeypatch.setattr(PrivateLoop, "run_forever", counted)
    return starts


def leave_callback(log: list[str]) -> None:
    """On the next turn."""
    asyncio.get_running_loop().call_soon(log.append, "came")


def leave_timer(log: list[str]) -> None:
    """As soon as its time has come."""
    asyncio.get_running_loop().call_later(0, log.append, "came")


def leave_reader(log: list[str]) -> None:
    """A pipe that can be read."""
    ours, theirs = os.pipe()
    loop = asyncio.get_running_loop()

    def read() -> None:
        loop.remove_reader(ours)
        os.close(ours)
        os.close(theirs)
        log.append("came")

    os.write(theirs, b"x")
    loop.add_reader(ours, read)


def leave_writer(log: list[str]) -> None:
    """A pipe that can be written."""
    ours, theirs = os.pipe()
    loop = asyncio.get_running_loop()

    def write() -> None:
        loop.remove_writer(theirs)
        os.close(ours)
        os.close(theirs)
        log.append("came")

    loop.add_writer(theirs, write)


def leave_thread(log: list[str]) -> None:
    """A call from another thread."""
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(log.append, "came"))
    thread.start()
    thread.join()


def leave_signal(log: list[str]) -> None:
    """A handler of a signal that has come."""
    loop = asyncio.get_running_loop()

    def handle() -> None:
        loop.remove_signal_handler(signal.SIGUSR1)
        log.append("came")

    loop.add_signal_handler(signal.SIGUSR1, handle)
    signal.raise_signal(signal.SIGUSR1)


def leave_task(log: list[str]) -> asyncio.Task[None]:
    """A task."""

    async def note() -> None:
        log.append("came")

    return asyncio.ensure_future(note())


LEAVE = [leave_callback, leave_timer, leave_task, leave_thread, leave_reader, leave_writer, leave_signal]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes and signals as POSIX has them")
@pytest.mark.parametrize("leave", LEAVE)
def test_what_an_event_leaves_behind_gets_its_turn_with_the_next(
    leave: Callable[[list[str]], Any], engine: Engine[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the two suspends, so that nothing else would start the loop. A signal takes a turn more to arrive."""
    log: list[str] = []
    run(engine, monkeypatch, list)
    run(engine, monkeypatch, lambda: leave(log) and None)
    before = list(log)
    for _ in range(1 + (leave is leave_signal)):
        run(engine, monkeypatch, list)

    assert (before, log) == ([], ["came"])


def test_a_timer_gets_its_turn_though_events_went_by_before_it_was_due(
    engine: Engine[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is not idle until it is through."""
    log: list[str] = []
    now = [0.0]
    run(engine, monkeypatch, list)
    monkeypatch.setattr(PrivateLoop, "time", lambda self: now[0])
    run(engine, monkeypatch, lambda: asyncio.get_running_loop().call_later(5, log.append, "came") and None)
    for now[0] in (1.0, 2.0, 6.0):
        run(engine, monkeypatch, log.copy)

    assert log == ["came"]


def test_an_event_that_does_not_suspend_does_not_start_the_loop(
    engine: Engine[Any], monkeypatch: pytest.MonkeyPatch, turns: list[None]
) -> None:
    """But for the first, which makes it, and what suspends; after that it is idle again."""
    run(engine, monkeypatch, list)
    first = len(turns)
    for _ in range(3):
        run(engine, monkeypatch, list)
    quiet = len(turns)
    run(engine, monkeypatch, lambda: asyncio.sleep(0))
    suspended = len(turns)
    for _ in range(3):
        run(engine, monkeypatch, list)

    assert (first, quiet, suspended) == (1, 1, 2)
    assert len(turns) == suspended


def test_a_task_factory_makes_the_task_of_an_event_too(engine: Engine[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next one on."""

    class Task(asyncio.Task[Any]):
        """One's own."""

    def make(loop: asyncio.AbstractEventLoop, steps: Any, **options: Any) -> Task:
        return Task(steps, loop=loop, **options)

    run(engine, monkeypatch, lambda: asyncio.get_running_loop().set_task_factory(make))

    assert run(engine, monkeypatch, lambda: type(asyncio.current_task())) is Task


def test_while_it_takes_a_step_it_is_the_running_loop(engine: Engine[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To asyncio, to anyio, and to whoever would start it."""

    def look() -> tuple[bool, bool, str]:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="already running"):
            loop.run_forever()
        return (
            loop.is_running(),
            asyncio.current_task() in asyncio.all_tasks(),
            anyio.get_cancelled_exc_class().__name__,
        )

    run(engine, monkeypatch, list)

    assert run(engine, monkeypatch, look) == (True, True, "CancelledError")


def test_an_async_generator_left_in_the_middle_is_closed_by_the_loop(
    engine: Engine[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes the loop's hooks; those of the program are back afterwards."""
    log: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            log.append("closed")

    async def take_one() -> None:
        async for _ in numbers():
            break

    before = sys.get_asyncgen_hooks()
    run(engine, monkeypatch, list)
    run(engine, monkeypatch, take_one)
    gc.collect()
    after = sys.get_asyncgen_hooks()
    for _ in range(3):
        run(engine, monkeypatch, list)

    assert (log, after) == (["closed"], before)


def test_a_step_that_an_interrupt_has_prevented_is_left_to_the_loop() -> None:
    """The task is not lost, and not taken twice."""
    loop = PrivateLoop()
    context = copy_context()
    log: list[str] = []

    async def note() -> None:
        log.append("ran")

    task = loop.prepare(note(), context)
    loop.put_back(context)
    loop.put_back(context)
    loop.run_until_complete(task)
    loop.close()

    assert log == ["ran"]


def test_an_interrupt_before_the_first_step_cancels_the_event(
    engine: Engine[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine goes on."""

    def interrupted(self: PrivateLoop, context: Any) -> None:
        raise KeyboardInterrupt

    run(engine, monkeypatch, list)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateLoop, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, monkeypatch, list)

    assert (len(engine.bus._lanes), len(engine._active)) == (0, 0)
    assert run(engine, monkeypatch, lambda: 7) == 7


@pytest.mark.parametrize("kind", ["another", "debug"])
def test_the_loop_that_the_program_wants_stays_what_it_is(
    kind: str, engine: Engine[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of its own, or asyncio's debug mode."""

    class Another(asyncio.SelectorEventLoop):
        """Of a policy, uvloop's for instance."""

    def debugged() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop()
        loop.set_debug(True)
        return loop

    monkeypatch.setattr(asyncio, "new_event_loop", Another if kind == "another" else debugged)
    expected = Another if kind == "another" else asyncio.SelectorEventLoop

    assert run(engine, monkeypatch, lambda: type(asyncio.get_running_loop())) is expected
