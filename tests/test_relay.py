"""The relay does what an anyio task group does: the two are held against each other, and against what they promise."""

from __future__ import annotations

import asyncio
import gc
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventbus_engine import Callback, CallbackErrors, Engine, Event, EventName, callback, relay
from eventbus_engine.relay import Relay

seen_by: ContextVar[str] = ContextVar("seen_by", default="nobody")


@dataclass(frozen=True)
class Doer:
    """A callback: plain, or async with steps that a plain one leaves out."""

    plain: bool
    steps: tuple[str, ...]


STEPS = ("see", "set", "yield", "hang", "raise", "give up", "shield", "stay cancelled", "group", "timeout")
doers = st.builds(Doer, st.booleans(), st.lists(st.sampled_from(STEPS), max_size=4).map(tuple))


class Program:
    """Callbacks on one event, and what became of each."""

    def __init__(self, doers: list[Doer]) -> None:
        self.started: list[int] = []
        self.logs: dict[int, list[str]] = {i: [] for i in range(len(doers))}
        self.at_rest = 0
        self.rest = anyio.Event()
        self.engine: Engine[Any] = Engine(callbacks=[self.callback(i, doer) for i, doer in enumerate(doers)])

    def callback(self, i: int, doer: Doer) -> Any:
        """The callback for a doer."""
        log = self.logs[i]

        @callback(Event.BATCH_END)
        def plain(event: EventName, state: Any, logger: Any) -> None:
            self.started.append(i)
            try:
                for step in doer.steps:
                    if step in ("see", "set", "raise"):
                        self.do_plain(step, i, log)
            finally:
                self.settle()

        @callback(Event.BATCH_END)
        async def steps(event: EventName, state: Any, logger: Any) -> None:
            self.started.append(i)
            try:
                for step in doer.steps:
                    if step in ("see", "set", "raise"):
                        self.do_plain(step, i, log)
                    else:
                        await self.do(step, log)
            except anyio.get_cancelled_exc_class():
                log.append("cancelled")
                raise
            finally:
                self.settle()

        return plain if doer.plain else steps

    def do_plain(self, step: str, i: int, log: list[str]) -> None:
        """A step that awaits nothing."""
        if step == "see":
            log.append(seen_by.get())
        elif step == "set":
            seen_by.set(f"handler {i}")
        else:
            raise ValueError(i)

    async def do(self, step: str, log: list[str]) -> None:
        """A step that may suspend."""
        if step == "yield":
            await anyio.lowlevel.checkpoint()
        elif step == "hang":
            self.settle()
            try:
                await anyio.sleep_forever()
            finally:
                self.at_rest -= 1
        elif step == "give up":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await anyio.lowlevel.checkpoint()
        elif step == "shield":
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                log.append("shielded")
        elif step == "stay cancelled":
            try:
                await anyio.lowlevel.checkpoint()
            except anyio.get_cancelled_exc_class():
                log.append("once")
                await anyio.lowlevel.checkpoint()
        elif step == "group":
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep, 0)
            log.append("grouped")
        else:
            with anyio.move_on_after(0):
                await anyio.sleep_forever()
            log.append("in time")

    def settle(self) -> None:
        """A handler is done, or hangs."""
        self.at_rest += 1
        if self.at_rest == len(self.logs):
            self.rest.set()

    async def run(self) -> dict[str, Any]:
        """Run it, cancel it once nothing goes on, and say how it ended."""
        errors: list[str] = []
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def publish() -> None:
                    seen_by.set("caller")
                    try:
                        await self.engine.run_event(Event.BATCH_END)
                        errors.append("none")
                    except CallbackErrors as raised:
                        errors.extend(repr(error) for error in raised.exceptions)
                    except anyio.get_cancelled_exc_class():
                        errors.append("cancelled")
                        raise
                    finally:
                        errors.append(seen_by.get())
                        group.cancel_scope.cancel()

                group.start_soon(publish)
                await self.rest.wait()
                # Whatever has not ended by now hangs; who is about to end has the turns it takes.
                for _ in range(20):
                    with anyio.CancelScope(shield=True):
                        await anyio.lowlevel.checkpoint()
                scope.cancel()
        return {"started": self.started, "logs": self.logs, "errors": errors}


def run(doers: list[Doer], *, with_relay: bool) -> dict[str, Any]:
    """Run a program on asyncio, by the relay or in task groups."""

    async def main() -> dict[str, Any]:
        return await Program(doers).run()

    before, relay.enabled = relay.enabled, with_relay
    try:
        return asyncio.run(main())
    finally:
        relay.enabled = before


@given(st.lists(doers, min_size=1, max_size=6))
@example([Doer(False, ("set",)), Doer(False, ("see",)), Doer(True, ("see", "set")), Doer(False, ("see",))])
@example([Doer(False, ("hang",)), Doer(False, ("shield", "hang")), Doer(False, ("raise",))])
@example([Doer(False, ("give up",)), Doer(False, ("yield", "see")), Doer(False, ("hang",))])
def test_the_relay_and_a_task_group_agree(doers: list[Doer]) -> None:
    """On who starts when, what each sees and does, what fails, what is cancelled, and what the caller is left with."""
    assert run(doers, with_relay=True) == run(doers, with_relay=False)


def used(monkeypatch: pytest.MonkeyPatch) -> list[Relay]:
    """The relays that are made from here on."""
    made: list[Relay] = []
    real = relay.find_relay

    def find(fan: Any) -> Relay | None:
        found = real(fan)
        if found is not None:
            made.append(found)
        return found

    monkeypatch.setattr("eventbus_engine.fanout.find_relay", find)
    return made


class Watch(Callback):
    """Notes its task, before and after it suspends."""

    def __init__(self, name: str, suspends: bool) -> None:
        self.name = name
        self.suspends = suspends
        self.tasks: list[asyncio.Task[Any] | None] = []

    async def batch_end(self, state: Any, logger: Any) -> None:
        self.tasks.append(asyncio.current_task())
        if self.suspends:
            await asyncio.sleep(0)
        self.tasks.append(asyncio.current_task())


@pytest.mark.asyncio
async def test_no_more_tasks_than_handlers_that_suspend_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one current task throughout, which is not its caller's; those that do not suspend share theirs."""
    made = used(monkeypatch)
    watching = [Watch(str(i), suspends=i == 2) for i in range(6)]
    await Engine(callbacks=watching).run_event(Event.BATCH_END)

    assert len(made) == 1
    tasks = [set(each.tasks) for each in watching]
    assert all(len(each) == 1 and asyncio.current_task() not in each for each in tasks)
    assert tasks[0] == tasks[1] == tasks[2] != tasks[3] == tasks[4] == tasks[5]


@pytest.mark.asyncio
async def test_inside_a_scope_with_a_deadline_handlers_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay's own scope has none, so there a task group runs them."""
    made = used(monkeypatch)
    deadlines: list[float] = []

    @callback(Event.BATCH_END)
    async def look(event: EventName, state: Any, logger: Any) -> None:
        deadlines.append(anyio.current_effective_deadline())

    with anyio.move_on_after(60) as scope:
        await Engine(callbacks=[look]).run_event(Event.BATCH_END)

    assert (deadlines, made) == ([scope.deadline], [])


@pytest.mark.asyncio
async def test_a_task_factory_of_the_programs_own_makes_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay makes its own, so it leaves the field."""
    made = used(monkeypatch)
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Any]] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        tasks.append(task)
        return task

    watch = Watch("watch", suspends=False)
    loop.set_task_factory(factory)
    try:
        await Engine(callbacks=[watch]).run_event(Event.BATCH_END)
    finally:
        loop.set_task_factory(None)

    assert made == []
    assert watch.tasks[0] in tasks


@pytest.mark.asyncio
async def test_what_a_finalizer_schedules_meanwhile_is_not_lost() -> None:
    """A garbage collection may run anything at any time, also while a task is being made."""
    loop = asyncio.get_running_loop()
    called = asyncio.Event()

    class Cyclic:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            loop.call_soon(called.set)

    made: list[Any] = []
    real = asyncio.Task

    def collecting(*args: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(None)
        Cyclic()
        gc.collect()
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "Task", collecting)
        await Engine(callbacks=[Watch("watch", suspends=False)]).run_event(Event.BATCH_END)
    await asyncio.wait_for(called.wait(), 30)

    assert made


@pytest.mark.parametrize("suspends", [False, True])
def test_a_keyboard_interrupt_in_a_handler_ends_the_program(suspends: bool) -> None:
    """Those beside it are cancelled first, and nothing complains about an exception that nobody asked for."""
    ended: list[str] = []

    @callback(Event.BATCH_END)
    async def beside(event: EventName, state: Any, logger: Any) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("beside")

    @callback(Event.BATCH_END)
    async def interrupted(event: EventName, state: Any, logger: Any) -> None:
        if suspends:
            await asyncio.sleep(0)
        raise KeyboardInterrupt

    async def main() -> None:
        await Engine(callbacks=[beside, interrupted]).run_event(Event.BATCH_END)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    gc.collect()

    assert ended == ["beside"]


@pytest.mark.asyncio
async def test_an_exception_that_is_none_of_the_usual_ends_them_all() -> None:
    """Nor of the loop's: it is not kept as a failure, but goes on to the caller once the others are done."""

    class Stop(BaseException):
        pass

    ended: list[str] = []

    @callback(Event.BATCH_END)
    async def beside(event: EventName, state: Any, logger: Any) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            ended.append("beside")

    @callback(Event.BATCH_END)
    async def stop(event: EventName, state: Any, logger: Any) -> None:
        await asyncio.sleep(0)
        raise Stop

    with pytest.raises(Stop):
        await Engine(callbacks=[beside, stop]).run_event(Event.BATCH_END)

    assert ended == ["beside"]


@pytest.mark.asyncio
async def test_cancelled_again_and_again_it_waits_all_the_same() -> None:
    """A handler that takes its time to end is waited for, however impatient the caller's caller is."""
    entered, release = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    @callback(Event.BATCH_END)
    async def slow(event: EventName, state: Any, logger: Any) -> None:
        with anyio.CancelScope(shield=True):
            entered.set()
            await release.wait()
            ended.append("slow")

    task = asyncio.create_task(Engine(callbacks=[slow]).run_event(Event.BATCH_END))
    await entered.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    release.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["slow"]


@pytest.mark.anyio
async def test_a_context_variable_may_hold_what_cannot_be_compared() -> None:
    """An array refuses to say whether it equals another; each handler starts from the same one all the same."""

    class Array:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    array: ContextVar[Any] = ContextVar("array", default=None)
    first = Array()
    seen: list[bool] = []

    @callback(Event.BATCH_END)
    async def change(event: EventName, state: Any, logger: Any) -> None:
        seen.append(array.get() is first)
        array.set(Array())

    @callback(Event.BATCH_END)
    async def again(event: EventName, state: Any, logger: Any) -> None:
        seen.append(array.get() is first)

    array.set(first)
    await Engine(callbacks=[change, again]).run_event(Event.BATCH_END, object())

    assert seen == [True, True]
    assert array.get() is first
