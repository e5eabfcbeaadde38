"""A batch on the training thread, events and all: one trip there, and back where the event loop is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

from eventbus_engine.algorithm import Algorithm, algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.event import Event, EventName
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.worker import ComputeWorker

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]
Batches = list[tuple[Tensor, Tensor]]

word: ContextVar[str] = ContextVar("word", default="")

INSIDE = [
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.AFTER_LOSS,
    Event.AFTER_TRAIN_BATCH,
    Event.BATCH_END,
]


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was handed to the training thread, a name for each time."""
    made: list[str] = []
    submit = ComputeWorker._submit

    def count(self: ComputeWorker, job: Any) -> None:
        made.append("trip")
        submit(self, job)

    monkeypatch.setattr(ComputeWorker, "_submit", count)
    return made


class Everywhere(Algorithm[State, Event]):
    """A plain algorithm that runs on every event of a batch, its end included, and notes the thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def match(self, event: Event, state: State) -> bool:
        """Run on the events of a batch."""
        return event in INSIDE

    def apply(self, event: Event, state: State, logger: Any) -> None:
        """Note where."""
        self.threads.append(threading.current_thread().name)


async def test_a_batch_of_plain_algorithms_takes_one_trip(make_trainer: MakeTrainer, trips: list[str]) -> None:
    """Its loader, its events, its computations and its optimizer step together."""
    algorithms = [Everywhere(), Everywhere()]
    async with make_trainer(algorithms=algorithms) as trainer:
        await trainer.fit("1ba")
        trips.clear()
        await trainer.fit("1ba")

    assert len(trips) == 1
    assert {thread for one in algorithms for thread in one.threads} == {"eventbus-engine-compute"}


async def test_a_destination_with_nothing_to_do_takes_no_trip(make_trainer: MakeTrainer, trips: list[str]) -> None:
    """Metrics are logged when the batch is over, and go out from the event loop."""

    class Remote(LoggerDestination):
        async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.where = threading.current_thread().name

    remote = Remote()
    async with make_trainer(algorithms=[Everywhere()], loggers=remote) as trainer:
        await trainer.fit("1ba")
        trips.clear()
        await trainer.fit("1ba")

    assert len(trips) == 1
    assert remote.where == threading.current_thread().name


@pytest.mark.parametrize("event", INSIDE)
@pytest.mark.parametrize("how", ["plain", "async"])
async def test_callbacks_are_called_on_the_event_loop(make_trainer: MakeTrainer, event: Event, how: str) -> None:
    """Wherever the algorithms of their event have run; what comes after is trained all the same."""
    seen: list[str] = []
    plain = make_trainer(max_duration="1ep")
    await plain.fit()

    def note(state: State, logger: Any) -> None:
        seen.append(threading.current_thread().name)

    async def note_later(state: State, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(threading.current_thread().name)

    callback = Callback[State]()
    setattr(callback, event.value, note if how == "plain" else note_later)
    trainer = make_trainer(max_duration="1ep", algorithms=[Everywhere()], callbacks=[callback])
    await trainer.fit()

    assert seen == [threading.current_thread().name] * (4 if event == Event.BEFORE_DATALOADER else 3)
    for actual, expected in zip(trainer.state.model.parameters(), plain.state.model.parameters(), strict=True):
        assert actual.equal(expected)


@pytest.mark.parametrize("event", INSIDE)
async def test_async_algorithms_run_on_the_event_loop_in_their_order(make_trainer: MakeTrainer, event: Event) -> None:
    """Between plain ones, which may be on the thread before it and are after it."""
    ran: list[str] = []

    @algorithm(event)
    def first(event: EventName, state: State, logger: Any) -> None:
        ran.append("first")

    @algorithm(event, run_after=("first",))
    async def second(event: EventName, state: State, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        here = threading.current_thread() is threading.main_thread()
        ran.append(f"second {'here' if here else 'there'} {await state.compute(lambda: 1)}")

    @algorithm(event, run_after=("second",))
    def third(event: EventName, state: State, logger: Any) -> None:
        ran.append(f"third {threading.current_thread().name}")

    await make_trainer(max_duration="1ba", algorithms=[first, second, third]).fit()

    assert ran == ["first", "second here 1", "third eventbus-engine-compute"]


async def test_context_variables_go_there_and_come_back(make_trainer: MakeTrainer) -> None:
    """An algorithm runs in the context of its event's publisher, whichever thread that is."""
    seen: list[str] = []

    @algorithm(Event.BEFORE_FORWARD)
    def write(event: EventName, state: State, logger: Any) -> None:
        seen.append(word.get())
        word.set(f"{word.get()}!")

    class Look(Callback[State]):
        def batch_end(self, state: State, logger: Any) -> None:
            seen.append(word.get())

    word.set("hello")
    await make_trainer(max_duration="2ba", algorithms=[write], callbacks=[Look()]).fit()

    assert seen == ["hello", "hello!", "hello!", "hello!!"]
    assert word.get() == "hello!!"


async def test_events_of_others_on_the_states_lane_wait_for_the_batch(make_trainer: MakeTrainer) -> None:
    """They neither meet it half-way on another thread nor get lost."""
    order: list[str] = []
    begun, published, proceed = threading.Event(), anyio.Event(), threading.Event()

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            begun.set()
            proceed.wait(10)
            order.append("forward")
            return super().forward(input)

    class Look(Callback[State]):
        def eval_start(self, state: State, logger: Any) -> None:
            order.append("other")

        def batch_end(self, state: State, logger: Any) -> None:
            order.append("batch end")

    trainer = make_trainer(max_duration="1ba", model=Model(4, 3), callbacks=[Look()])

    async def other() -> None:
        await anyio.to_thread.run_sync(begun.wait, 10)
        published.set()
        await trainer.engine.run_event(Event.EVAL_START)

    async with trainer, anyio.create_task_group() as group:
        group.start_soon(other)
        group.start_soon(trainer.fit)
        await published.wait()
        await anyio.wait_all_tasks_blocked()
        proceed.set()

    assert order == ["forward", "batch end", "other"]


async def test_an_error_on_the_thread_leaves_as_itself(make_trainer: MakeTrainer) -> None:
    """With its notes and its traces; the lane is free afterwards."""

    @algorithm(Event.AFTER_LOSS)
    def fail(event: EventName, state: State, logger: Any) -> None:
        raise OSError("disk gone")

    trainer = make_trainer(max_duration="1ba", algorithms=[fail])
    async with trainer:
        with pytest.raises(OSError, match="disk gone") as caught:
            await trainer.fit()
        await trainer.engine.run_event(Event.EPOCH_END)

    assert "in algorithm fail on AFTER_LOSS" in caught.value.__notes__
    assert list(caught.value.traces) == ["fail/AFTER_LOSS"]  # type: ignore[attr-defined]
    assert len(trainer.engine.bus._lanes) == 0


async def test_cancelled_on_the_thread_it_ends_where_it_next_needs_the_loop(make_trainer: MakeTrainer) -> None:
    """At an async callback, say: what was computed by then is computed, what comes after is not begun."""
    begun, proceed = threading.Event(), threading.Event()
    ran: list[str] = []

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            begun.set()
            proceed.wait(10)
            ran.append("forward")
            return super().forward(input)

    class Look(Callback[State]):
        async def after_forward(self, state: State, logger: Any) -> None:
            ran.append("callback")

    @algorithm(Event.AFTER_FORWARD)
    def there(event: EventName, state: State, logger: Any) -> None:
        ran.append("algorithm")

    trainer = make_trainer(model=Model(4, 3), algorithms=[there], callbacks=[Look()])
    async with anyio.create_task_group() as group:
        group.start_soon(trainer.fit)
        await anyio.to_thread.run_sync(begun.wait, 10)
        group.cancel_scope.cancel()
        proceed.set()

    assert ran == ["forward", "algorithm"]
    assert (trainer.engine.closed, len(trainer.engine.bus._lanes)) == (True, 0)


async def test_a_step_that_was_made_is_counted_although_the_run_is_cancelled(make_trainer: MakeTrainer) -> None:
    """Wherever the batch goes on: an async algorithm has brought it back to the event loop."""
    begun, proceed = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            begun.set()
            proceed.wait(10)
            return super().step(closure)

    @algorithm(Event.AFTER_TRAIN_BATCH)
    async def there(event: EventName, state: State, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()

    model = nn.Linear(4, 3)
    trainer = make_trainer(model=model, optimizers=Slow(model.parameters(), lr=0.1), algorithms=[there])
    async with anyio.create_task_group() as group:
        group.start_soon(trainer.fit)
        await anyio.to_thread.run_sync(begun.wait, 10)
        group.cancel_scope.cancel()
        await checkpoint_in_a_shield()
        proceed.set()

    assert trainer.state.timestamp.batch == 1


async def test_a_run_that_is_cancelled_during_its_step_says_nothing_of_the_batch(make_trainer: MakeTrainer) -> None:
    """Plain algorithms could run on the thread still, before callbacks that will not be called any more."""
    begun, proceed = threading.Event(), threading.Event()
    ran: list[str] = []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            begun.set()
            proceed.wait(10)
            return super().step(closure)

    @algorithm(Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
    def there(event: EventName, state: State, logger: Any) -> None:
        ran.append(event.value)

    model = nn.Linear(4, 3)
    trainer = make_trainer(model=model, optimizers=Slow(model.parameters(), lr=0.1), algorithms=[there])
    async with anyio.create_task_group() as group:
        group.start_soon(trainer.fit)
        await anyio.to_thread.run_sync(begun.wait, 10)
        group.cancel_scope.cancel()
        await checkpoint_in_a_shield()
        proceed.set()

    assert ran == ["after_train_batch"]
    assert trainer.state.timestamp.batch == 1


async def checkpoint_in_a_shield() -> None:
    """Let the others hear of a cancellation."""
    with anyio.CancelScope(shield=True):
        for _ in range(3):
            await anyio.lowlevel.checkpoint()


async def test_an_async_loader_may_publish_on_the_states_lane(make_trainer: MakeTrainer, batches: Batches) -> None:
    """Nothing is held while it is waited for, or it would wait for the batch that waits for it."""
    trainers: list[Trainer] = []
    heard: list[str] = []

    class Loader:
        async def __aiter__(self) -> Any:
            for batch in batches:
                await trainers[0].engine.run_event(Event.EVAL_START)
                yield batch

    class Look(Callback[State]):
        def eval_start(self, state: State, logger: Any) -> None:
            heard.append("loading")

    trainers.append(make_trainer(train_dataloader=Loader(), max_duration="1ep", callbacks=[Look()]))
    with anyio.fail_after(30):
        await trainers[0].fit()

    assert heard == ["loading"] * 3


async def test_the_numbers_are_those_of_the_same_run_inline(make_trainer: MakeTrainer) -> None:
    """Bit for bit."""
    inline, offloaded = make_trainer(offload=False, seed=1), make_trainer(seed=1)
    await inline.fit()
    await offloaded.fit()

    pairs = zip(inline.state.model.parameters(), offloaded.state.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
