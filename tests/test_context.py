"""Context variables: who sees what a handler sets."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import Algorithm, Callback, Engine, Envelope, EventName

pytestmark = pytest.mark.anyio


class Tick(EventName):
    """A vocabulary."""

    TICK = "tick"


class Suspends(Callback[Any]):
    """An async callback, for there to be one."""

    async def tick(self, state: Any, logger: Any) -> None:
        """Suspend."""
        await anyio.lowlevel.checkpoint()


variable: ContextVar[str] = ContextVar("variable")


def setting(value: str, seen: list[str | None]) -> Callable[..., Any]:
    """A hook that reads the variable and sets it."""

    async def hook(*_: Any) -> None:
        seen.append(variable.get(None))
        variable.set(value)
        await anyio.lowlevel.checkpoint()
        assert variable.get() == value

    return hook


async def test_rule_6_5_algorithms_and_plain_functions_run_in_the_callers_context() -> None:
    """What they set, the caller sees, and so does everything that follows."""
    seen: list[str | None] = []

    class Sets(Algorithm[Any, Any]):
        def __init__(self, value: str) -> None:
            self.value = value

        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            seen.append(variable.get(None))
            await anyio.lowlevel.checkpoint()
            variable.set(self.value)

    class Plain(Callback[Any]):
        def tick(self, state: Any, logger: Any) -> None:
            seen.append(variable.get(None))
            variable.set("plain callback")

    def subscriber(envelope: Envelope) -> None:
        seen.append(variable.get(None))
        variable.set("subscriber")

    engine = Engine(events=Tick, algorithms=[Sets("one"), Sets("two")], callbacks=[Plain()])
    engine.bus.subscribe(subscriber)
    variable.set("caller")
    await engine.run_event(Tick.TICK)

    assert seen == ["caller", "one", "two", "plain callback"]
    assert variable.get() == "subscriber"


async def test_rule_6_5_every_async_callback_is_isolated() -> None:
    """Each starts from the context at fan-out: nothing it sets is seen by the others, the subscribers or the caller."""
    seen: list[str | None] = []
    callbacks = []
    for name in ("a", "b", "c"):
        each = Callback[Any]()
        each.name = name
        each.tick = setting(name, seen)  # type: ignore[attr-defined]
        callbacks.append(each)
    engine = Engine(events=Tick, callbacks=callbacks)
    engine.bus.subscribe(setting("subscriber", seen))
    variable.set("caller")

    await engine.run_event(Tick.TICK)

    assert seen == ["caller"] * 4
    assert variable.get() == "caller"


async def test_rule_6_5_a_single_async_callback_is_isolated_too() -> None:
    """Even one that never suspends."""

    class Sets(Callback[Any]):
        async def tick(self, state: Any, logger: Any) -> None:
            variable.set("callback")

    engine = Engine(events=Tick, callbacks=[Sets()])
    variable.set("caller")

    await engine.run_event(Tick.TICK)

    assert variable.get() == "caller"


async def test_rule_6_5_plain_functions_among_async_ones() -> None:
    """The plain ones change the caller's context, the async ones start from what it was at fan-out."""
    seen: list[str | None] = []

    class Plain(Callback[Any]):
        def tick(self, state: Any, logger: Any) -> None:
            seen.append(variable.get(None))
            variable.set("plain")

    class Async(Callback[Any]):
        async def tick(self, state: Any, logger: Any) -> None:
            seen.append(variable.get(None))
            variable.set("async")
            await anyio.lowlevel.checkpoint()

    engine = Engine(events=Tick, callbacks=[Async(), Plain(), Async(), Plain()])
    variable.set("caller")

    await engine.run_event(Tick.TICK)

    assert seen == ["caller", "caller", "caller", "plain"]
    assert variable.get() == "plain"


async def test_rule_6_5_middleware_behind_an_engine_runs_in_the_callers_context() -> None:
    """It is no callback: what it and the plain functions behind it set, the caller sees, beside async callbacks too."""

    async def middleware(envelope: Envelope, call_next: Any) -> Any:
        variable.set(f"{variable.get()} middleware")
        return await call_next(envelope)

    class Async(Callback[Any]):
        async def tick(self, state: Any, logger: Any) -> None:
            variable.set("async")
            await anyio.lowlevel.checkpoint()

    engine = Engine(events=Tick, callbacks=[Async()])
    engine.bus.use(middleware)
    engine.bus.subscribe(lambda _: variable.set(f"{variable.get()} subscriber") and None)
    variable.set("caller")

    await engine.run_event(Tick.TICK)

    assert variable.get() == "caller middleware subscriber"


async def test_rule_6_5_a_second_engines_algorithms_run_in_the_callers_context() -> None:
    """The same holds for the algorithms of an engine further down."""

    class Sets(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            variable.set("second engine")

    first = Engine(events=Tick, callbacks=[Suspends()])
    Engine(events=Tick, bus=first.bus, algorithms=[Sets()])
    variable.set("caller")

    await first.run_event(Tick.TICK)

    assert variable.get() == "second engine"
