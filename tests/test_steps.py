"""Coroutines taken step by step: nothing that `await` does is lost on the way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from contextvars import copy_context
from typing import Any

import pytest

from eventbus_engine._steps import NOWHERE, FirstStep, leave_loop, need_loop, steps_of, without_loop


class Yielding:
    """An awaitable that says what happens to it: it yields twice, and takes what it is sent and thrown."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __await__(self) -> Generator[Any, Any, str]:
        try:
            self.log.append((yield "first"))
            self.log.append((yield "second"))
        except KeyError as error:
            self.log.append(error)
            return "recovered"
        finally:
            self.log.append("closed")
        return "done"


class PlainIterator:
    """An awaitable whose iterator has neither `send` nor `throw`, which Python allows."""

    def __await__(self) -> Any:
        return iter(["only"])


async def awaiting(awaitable: Any) -> Any:
    """Await it."""
    return await awaitable


def first_step(log: list[Any]) -> Any:
    """A coroutine that awaits a Yielding by way of a FirstStep."""
    return awaiting(FirstStep(Yielding(log), lambda: log.append("suspended")))


def test_first_suspension_is_told_once_after_it_happened() -> None:
    """Whoever is told can rely on the awaitable's being under way."""
    log: list[Any] = []
    coroutine = first_step(log)

    assert coroutine.send(None) == "first"
    assert log == ["suspended"]
    assert coroutine.send(1) == "second"
    with pytest.raises(StopIteration) as stop:
        coroutine.send(2)
    assert stop.value.value == "done"
    assert log == ["suspended", 1, 2, "closed"]


def test_what_never_suspends_is_never_said_to() -> None:
    """It has a result and no suspension."""
    log: list[Any] = []

    async def at_once() -> int:
        return 7

    with pytest.raises(StopIteration) as stop:
        awaiting(FirstStep(at_once(), lambda: log.append("suspended"))).send(None)

    assert (stop.value.value, log) == (7, [])


def test_an_exception_is_thrown_into_the_awaitable() -> None:
    """As an event loop does to cancel: it may recover, and its result counts."""
    log: list[Any] = []
    coroutine = first_step(log)
    coroutine.send(None)
    error = KeyError("thrown")

    with pytest.raises(StopIteration) as stop:
        coroutine.throw(error)

    assert stop.value.value == "recovered"
    assert log == ["suspended", error, "closed"]


def test_throwing_a_class_works_as_throwing_an_instance() -> None:
    """Old callers pass the three parts of an exception."""
    log: list[Any] = []
    first = FirstStep(Yielding(log), lambda: None)
    first.send(None)

    with pytest.raises(StopIteration):
        first.throw(KeyError, KeyError("thrown"), None)

    assert [type(entry) for entry in log] == [KeyError, str]


def test_closing_closes_the_awaitable() -> None:
    """A coroutine that is thrown away runs its `finally`."""
    log: list[Any] = []
    coroutine = first_step(log)
    coroutine.send(None)
    coroutine.close()

    assert log == ["suspended", "closed"]


def test_an_iterator_without_send_will_do() -> None:
    """Awaitables of extension modules may be as bare as that."""
    log: list[Any] = []
    coroutine = awaiting(FirstStep(PlainIterator(), lambda: log.append("suspended")))

    assert coroutine.send(None) == "only"
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert log == ["suspended"]


@pytest.mark.anyio
async def test_under_a_loop_nothing_asks_for_one() -> None:
    """`need_loop` suspends only where there is none."""
    steps = steps_of(need_loop())

    with pytest.raises(StopIteration):
        steps.send(None)


@pytest.mark.anyio
async def test_leaving_a_loop_makes_a_context_fit_for_any_other() -> None:
    """A context taken from a task runs elsewhere: nothing in it says which library is running."""
    sniffio = pytest.importorskip("sniffio")
    context = copy_context()
    context.run(sniffio.current_async_library_cvar.set, "any")
    context.run(leave_loop)

    assert context[sniffio.current_async_library_cvar] is None


def test_leaving_a_loop_needs_no_sniffio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions of anyio do without it where trio is not installed."""
    monkeypatch.delitem(sys.modules, "sniffio", raising=False)
    context = copy_context()
    before = dict(context)
    context.run(leave_loop)

    assert dict(context) == before


def test_stepping_by_hand_ends_where_a_loop_is_started() -> None:
    """A plain handler may start one of its own, under which there is no need to suspend."""

    async def look() -> bool:
        return without_loop.get()

    before = without_loop.get()
    without_loop.around = None
    try:
        while_stepping = without_loop.get()
        in_a_loop = asyncio.run(look())
    finally:
        without_loop.around = NOWHERE

    assert (before, while_stepping, in_a_loop) == (False, True, False)
