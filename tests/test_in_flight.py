"""`engine.in_flight()` says what runs, from any thread, while it runs."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest

from eventbus_engine import Algorithm, Callback, Engine, Event, InFlight, background


def told(records: tuple[InFlight, ...]) -> list[tuple[str, str, str]]:
    """Their kinds, names and events."""
    return [(record.kind, record.name, record.event.name) for record in records]


@pytest.mark.anyio
async def test_every_kind_is_there_while_it_runs_and_gone_afterwards() -> None:
    """A dispatch with its algorithm, then with its plain and its async callback; nothing once it is over."""
    seen: list[list[tuple[str, str, str]]] = []

    class Mixup(Algorithm):
        def match(self, event: Any, state: Any) -> bool:
            return True

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            seen.append(told(engine.in_flight()))

    class Plain(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            seen.append(told(engine.in_flight()))

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            # From a thread that has nothing to do with the event loop.
            seen.append(told(await anyio.to_thread.run_sync(engine.in_flight)))

    engine = Engine(algorithms=[Mixup()], callbacks=[Plain(), Remote()])
    await engine.run_event(Event.BATCH_END)

    whole = ("dispatch", "BATCH_END", "BATCH_END")
    assert seen == [
        [whole, ("algorithm", "mixup", "BATCH_END")],
        [whole, ("callback", "plain", "BATCH_END")],
        [whole, ("callback", "remote", "BATCH_END")],
    ]
    assert engine.in_flight() == ()


@pytest.mark.anyio
async def test_elapsed_grows_while_a_handler_runs() -> None:
    """Two looks at one execution have the same start, and the later one a longer time."""
    started, go_on = anyio.Event(), anyio.Event()

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            started.set()
            await go_on.wait()

    engine = Engine(callbacks=[Remote()])
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Event.BATCH_END)
        await started.wait()
        first, second = engine.in_flight()[-1], engine.in_flight()[-1]
        go_on.set()
        assert first.started_ns == second.started_ns
        assert 0 <= first.elapsed < second.elapsed
        assert first.thread == threading.get_ident()


@pytest.mark.anyio
async def test_a_background_callback_is_there_after_its_event() -> None:
    """It is marked as such, and no dispatch is."""
    started, go_on = anyio.Event(), anyio.Event()

    class Save(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            started.set()
            await go_on.wait()

    async with Engine(callbacks=[background(Save())]) as engine:
        await engine.run_event(Event.BATCH_END)
        await started.wait()
        (record,) = engine.in_flight()
        go_on.set()

    assert (record.kind, record.name, record.background) == ("callback", "save", True)
    assert engine.in_flight() == ()


@pytest.mark.anyio
async def test_what_outlives_the_closing_is_named() -> None:
    """A close that timed out leaves what still runs to be asked for."""
    started, go_on = anyio.Event(), anyio.Event()

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            started.set()
            await go_on.wait()

    engine = Engine(callbacks=[Remote()])
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run_event, Event.BATCH_END)
        await started.wait()
        report = await engine.close(timeout=0)
        left = told(engine.in_flight())
        go_on.set()
        assert report.in_flight == ("BATCH_END",)
        assert left == [("dispatch", "BATCH_END", "BATCH_END"), ("callback", "remote", "BATCH_END")]


@pytest.mark.anyio
async def test_a_handler_that_failed_is_in_flight_no_more() -> None:
    """However it ends, it is forgotten; an event that it published itself stands beside it."""
    inner: list[tuple[str, str, str]] = []

    class Fails(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            await engine.run_event(Event.EPOCH_END)
            raise ValueError

        def epoch_end(self, state: Any, logger: Any) -> None:
            inner.extend(told(engine.in_flight()))

    engine = Engine(callbacks=[Fails()])
    with pytest.raises(ExceptionGroup):
        await engine.run_event(Event.BATCH_END)

    assert inner == [
        ("dispatch", "BATCH_END", "BATCH_END"),
        ("callback", "fails", "BATCH_END"),
        ("dispatch", "EPOCH_END", "EPOCH_END"),
        ("callback", "fails", "EPOCH_END"),
    ]
    assert engine.in_flight() == ()


@pytest.mark.anyio
async def test_what_opens_and_what_closes_is_there() -> None:
    """Plain or async: `open` on the event that opens, `close` and `post_close` on `CLOSE`."""
    seen: dict[str, list[tuple[str, str, str]]] = {}

    def look(hook: str) -> None:
        seen[hook] = told(engine.in_flight())

    class Plain(Callback):
        def open(self, state: Any, logger: Any) -> None:
            look("plain open")

        def close(self, state: Any, logger: Any) -> None:
            look("plain close")

    class Remote(Callback):
        async def open(self, state: Any, logger: Any) -> None:
            look("remote open")

        async def close(self, state: Any, logger: Any) -> None:
            look("remote close")

        async def post_close(self) -> None:
            look("remote post_close")

    engine = Engine(callbacks=[Plain(), Remote()])
    await engine.run_event(Event.BATCH_END)
    await engine.close()

    whole = ("dispatch", "BATCH_END", "BATCH_END")
    assert seen == {
        "plain open": [whole, ("callback", "plain", "BATCH_END")],
        "remote open": [whole, ("callback", "remote", "BATCH_END")],
        "plain close": [("callback", "plain", "CLOSE")],
        "remote close": [("callback", "remote", "CLOSE")],
        "remote post_close": [("callback", "remote", "CLOSE")],
    }
    assert engine.in_flight() == ()
