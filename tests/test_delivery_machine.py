"""Whatever the delivery, the overflow, the failures and the cancellations: each callback sees its events in order."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from eventbus_engine import Callback, Circuit, Engine, Retry
from eventbus_engine.testing import backend_options

T = TypeVar("T")

OUTCOMES = ("ok", "fail", "hang", "fail twice")


class State:
    """A state, changed in place."""

    number = -1


class Subject(Callback[Any]):
    """A callback that does as told with each event, and notes what it was given and what it has taken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(snapshot=("number",), timeout=5.0, on_error="log", **options)
        self.plan: dict[int, str] = {}
        self.tries: dict[int, int] = {}
        self.begun: list[int] = []
        self.taken: list[int] = []

    async def batch_end(self, state: Any, logger: Any) -> Any:
        """Do as told."""
        if getattr(self, "send_records", None) is not None:
            return state.number
        await self.handle(state.number)
        return None

    async def handle(self, number: int) -> None:
        """Succeed, fail, fail the first two times, or hang."""
        if not self.begun or self.begun[-1] != number:
            self.begun.append(number)
        tries = self.tries[number] = self.tries.get(number, 0) + 1
        outcome = self.plan.get(number, "ok")
        await anyio.sleep(1)
        if outcome == "fail" or (outcome == "fail twice" and tries < 3):
            raise ConnectionError("down")
        if outcome == "hang":
            await anyio.sleep_forever()
        self.taken.append(number)


class Batching(Subject):
    """The same in batches."""

    async def send_records(self, records: Any, logger: Any) -> None:
        """Hand on what there is; a batch is tried as one."""
        for record in records:
            if record.value not in self.taken:
                await self.handle(record.value)


def subjects() -> list[Subject]:
    """One of every kind."""
    retry = Retry(attempts=3, initial=0.5, jitter=0.0)
    return [
        Subject(name="inline"),
        Subject(name="drop_oldest", delivery="background", max_pending=2),
        Subject(name="block", delivery="background", on_full="block", max_pending=2),
        Subject(name="coalesce", delivery="background", on_full="coalesce", max_pending=2),
        Subject(name="retry", delivery="background", max_pending=3, retry=retry),
        Subject(name="circuit", delivery="background", max_pending=3, circuit=Circuit(2, 4.0)),
        Batching(name="batch", delivery="background", max_batch=3, max_wait=1.0, max_pending=4),
    ]


class Machine(RuleBasedStateMachine):
    """An engine on an event loop of its own, published to, cancelled and waited for in any order."""

    backend = "asyncio"

    def __init__(self) -> None:
        super().__init__()
        self.stack = AsyncExitStack()
        self.subjects = subjects()
        self.published: list[int] = []
        self.state = State()
        self.engine: Engine[Any] = Engine(self.state, callbacks=self.subjects)

    @initialize()
    def enter(self) -> None:
        """Start the loop and enter the engine."""
        self.portal_manager = anyio.from_thread.start_blocking_portal(self.backend, backend_options(self.backend))
        self.portal = self.portal_manager.__enter__()
        self.engine_manager = self.portal.wrap_async_context_manager(self.engine)
        self.engine_manager.__enter__()

    @rule(outcomes=st.lists(st.sampled_from(OUTCOMES), min_size=7, max_size=7), give_up=st.none() | st.floats(0, 3))
    def publish(self, outcomes: list[str], give_up: float | None) -> None:
        """Publish one event, and give up on it after a while, or not."""

        async def publish() -> None:
            number = self.state.number = len(self.published)
            self.published.append(number)
            for subject, outcome in zip(self.subjects, outcomes, strict=True):
                subject.plan[number] = outcome
            with anyio.move_on_after(1000 if give_up is None else give_up):
                await self.engine.run_event("batch_end")

        self.portal.call(publish)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.portal.call(anyio.sleep, seconds)

    @invariant()
    def order_holds(self) -> None:
        """Nothing is ever seen out of its order, or twice."""
        for subject in self.subjects:
            for seen in (subject.begun, subject.taken):
                assert seen == sorted(set(seen)), subject.name

    @invariant()
    def counts_add_up(self) -> None:
        """Each event of a background callback is delivered, failed, dropped or waiting."""
        for name, counts in self.engine.deliveries().items():
            total = counts.delivered + counts.failed + counts.dropped + counts.waiting
            assert total == len(self.published), name

    def teardown(self) -> None:
        """Close: what the report says was left is what is missing."""
        if not hasattr(self, "portal"):
            return
        try:
            report = self.portal.call(self.engine.close, 5)
            self.engine_manager.__exit__(None, None, None)
            for subject in self.subjects[1:]:
                counts = report.deliveries.get(str(subject.name))
                if counts is None:
                    continue
                assert counts.waiting == 0
                lost = counts.dropped + (counts.failed if isinstance(subject, Batching) else 0)
                assert lost == report.undelivered.get(str(subject.name), 0)
                if not isinstance(subject, Batching):
                    assert counts.delivered == len(subject.taken)
            self.order_holds()
            self.counts_add_up()
        finally:
            self.portal_manager.__exit__(None, None, None)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_order_holds_whatever_happens(backend: str) -> None:
    """Over every delivery and overflow at once, with failures, timeouts, retries, circuits and cancellations."""
    machine = type("MachineOn", (Machine,), {"backend": backend})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))
