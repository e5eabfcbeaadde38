"""Callbacks that raise, hang, return a wrong type, cancel themselves, publish, or close the engine from inside."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import (
    CallbackErrors,
    DeliveryCounts,
    Engine,
    HandlerCancelledError,
    HandlerTimeoutError,
    current_envelope,
)
from eventbus_engine.testing import FakeCallback, Recorder

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["inline", "background"])
def delivery(request: pytest.FixtureRequest) -> str:
    """Both deliveries: what a callback does is its own failure in each."""
    return str(request.param)


async def run(engine: Engine[Any], delivery: str) -> Exception | None:
    """Three events; what the second of them failed with."""
    error: Exception | None = None
    await engine.run_event("init")
    try:
        await engine.run_event("fit_start")
    except CallbackErrors as raised:
        (error,) = raised.exceptions
    await engine.run_event("batch_start")
    if delivery == "background":
        await anyio.wait_all_tasks_blocked()
    return error


def callbacks(hook: Any, delivery: str, **options: Any) -> tuple[FakeCallback, Recorder]:
    """The one that misbehaves, and an innocent one beside it."""
    return FakeCallback(name="bad", hook=hook, delivery=delivery, **options), Recorder()


async def test_one_that_raises(delivery: str) -> None:
    """Inline the event fails with it, in the background the report does; either way the run goes on."""

    async def hook(event: Any, state: Any, logger: Any) -> None:
        if event == "fit_start":
            raise ValueError("bad")

    bad, innocent = callbacks(hook, delivery)
    async with Engine(callbacks=[bad, innocent]) as engine:
        error = await run(engine, delivery)
        report = await engine.close()

    assert isinstance(error, ValueError) == (delivery == "inline")
    assert report.unraised == ({} if delivery == "inline" else {"bad": 1})
    assert bad.names == innocent.names == ["init", "fit_start", "batch_start"]


async def test_one_that_hangs(delivery: str) -> None:
    """Its timeout ends it; without one, inline, the event waits for it: that is what inline means."""

    async def hook(event: Any, state: Any, logger: Any) -> None:
        if event == "fit_start":
            await anyio.sleep_forever()

    bad, innocent = callbacks(hook, delivery, timeout=0.01)
    async with Engine(callbacks=[bad, innocent]) as engine:
        error = await run(engine, delivery)
        report = await engine.close()

    assert isinstance(error, HandlerTimeoutError) == (delivery == "inline")
    if delivery == "background":
        assert report.deliveries["bad"] == DeliveryCounts(delivered=2, failed=1, timed_out=1)
    assert bad.names == innocent.names == ["init", "fit_start", "batch_start"]


@pytest.mark.parametrize("result", [7, "text", object(), [1], NotImplemented, ValueError("not raised")])
async def test_one_that_returns_something_odd(delivery: str, result: Any) -> None:
    """Nobody asked it for anything: a hook's result is taken for nothing, an exception that is returned too."""

    def hook(event: Any, state: Any, logger: Any) -> Any:
        return result

    bad, innocent = callbacks(hook, delivery)
    async with Engine(callbacks=[bad, innocent]) as engine:
        error = await run(engine, delivery)
        report = await engine.close()

    assert (error, report.ok) == (None, True)


async def test_one_that_cancels_itself(delivery: str) -> None:
    """It lets the cancellation of a scope out of it that is over: it alone fails, and nobody else is cancelled."""

    async def hook(event: Any, state: Any, logger: Any) -> None:
        cancellations: list[BaseException] = []
        with anyio.CancelScope() as scope:
            scope.cancel()
            try:
                await anyio.lowlevel.checkpoint()
            except anyio.get_cancelled_exc_class() as error:
                cancellations.append(error)
        if event == "fit_start":
            raise cancellations[0]

    bad, innocent = callbacks(hook, delivery)
    async with Engine(callbacks=[bad, innocent]) as engine:
        error = await run(engine, delivery)
        report = await engine.close()

    assert isinstance(error, HandlerCancelledError) == (delivery == "inline")
    assert report.unraised == ({} if delivery == "inline" else {"bad": 1})
    assert bad.names == innocent.names == ["init", "fit_start", "batch_start"]


async def test_one_that_publishes(delivery: str) -> None:
    """About the same state: inline nested in its event, in the background in its turn. All of it runs."""

    async def hook(event: Any, state: Any, logger: Any) -> None:
        if event == "fit_start":
            await engine.run_event("epoch_start")

    bad, innocent = callbacks(hook, delivery)
    engine = Engine(object(), callbacks=[bad, innocent])
    with anyio.fail_after(5):
        async with engine:
            await run(engine, delivery)

    assert sorted(bad.names) == sorted(innocent.names) == ["batch_start", "epoch_start", "fit_start", "init"]


async def test_one_that_closes_the_engine(delivery: str) -> None:
    """The closing is marked and happens once the event is done; what is published later is refused."""
    pending: list[bool] = []

    async def hook(event: Any, state: Any, logger: Any) -> None:
        if event == "fit_start":
            pending.append((await engine.close()).pending)
            assert current_envelope() is not None

    bad, innocent = callbacks(hook, delivery)
    engine = Engine(object(), callbacks=[bad, innocent])
    with anyio.fail_after(5):
        async with engine:
            await engine.run_event("init")
            await engine.run_event("fit_start")
        report = await engine.close()

    assert (pending, report.ok, report.closed) == ([True], True, ["bad", "recorder"])
    assert (bad.closed, bad.post_closed) == (1, 1)
