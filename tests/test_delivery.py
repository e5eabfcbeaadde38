"""Background delivery: in order, bounded, from a snapshot; it never slows, stops or falsifies the run."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eventbus_engine import (
    Callback,
    CallbackErrors,
    ConfigurationError,
    DeadlockError,
    Engine,
    EngineClosedError,
    Event,
    EventName,
    HandlerCancelledError,
    HandlerTimeoutError,
    LoggerDestination,
    SnapshotError,
    Timestamp,
    algorithm,
    background,
    callback,
    current_envelope,
)
from eventbus_engine.mailbox import Mailbox
from eventbus_engine.snapshot import leaves_of
from eventbus_engine.testing import FakeAlgorithm, FakeCallback, Recorder

pytestmark = pytest.mark.anyio

ASYNCIO_ONLY = pytest.mark.parametrize("anyio_backend", ["asyncio"])

request: ContextVar[str] = ContextVar("request", default="none")


class State:
    """A state with what the tests ask for; compared by identity."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class Watcher(Callback):
    """A background callback that waits at a gate and notes what it was given."""

    delivery = "background"
    snapshot: tuple[str, ...] = ("number",)

    def __init__(self, **options: Any) -> None:
        self.gate = anyio.Event()
        self.entered = anyio.Event()
        self.seen: list[int] = []
        for option, value in options.items():
            setattr(self, option, value)

    async def batch_end(self, state: Any, logger: Any) -> None:
        """Note the number once the gate is open."""
        self.entered.set()
        await self.gate.wait()
        self.seen.append(state.number)


def set_number(engine: Engine[Any], number: Any) -> None:
    """Change the engine's state in place."""
    state: Any = engine.state
    state.number = number


async def publish_numbers(engine: Engine[Any], count: int, start: int = 0) -> None:
    """Publish that many events, each about a state that is changed in place."""
    for number in range(start, start + count):
        set_number(engine, number)
        await engine.run_event(Event.BATCH_END)


def mailbox_of(engine: Engine[Any]) -> Mailbox:
    """The only mailbox of an engine."""
    (mailbox,) = engine._delivery.mailboxes.values()
    return mailbox


def counts_of(engine: Engine[Any]) -> tuple[int, int, int]:
    """How many events were delivered, failed and were dropped."""
    mailbox = mailbox_of(engine)
    return mailbox.delivered, mailbox.failed, mailbox.dropped


def logged(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Message to exception, of what the engine logged."""
    return {r.getMessage(): r.exc_info and r.exc_info[1] for r in caplog.records if r.name == "eventbus_engine"}


# ---------------------------------------------------------------------------------------------------------------- order


async def test_events_reach_each_callback_in_the_order_of_their_publishing() -> None:
    """One that takes its time keeps its own order, and holds up neither the others nor the run."""
    slow, quick = Watcher(name="slow"), Watcher(name="quick")
    quick.gate.set()
    async with Engine(State(), callbacks=[slow, quick]) as engine:
        await publish_numbers(engine, 10)
        await anyio.wait_all_tasks_blocked()

        assert (slow.seen, quick.seen) == ([], list(range(10)))
        slow.gate.set()

    assert slow.seen == list(range(10))


async def test_the_event_does_not_wait_for_a_background_callback() -> None:
    """`run_event` returns while the hook has not even begun to wait."""
    watcher, inline = Watcher(), Recorder()
    async with Engine(State(), callbacks=[watcher, inline]) as engine:
        with anyio.fail_after(5):
            await publish_numbers(engine, 3)

        assert (inline.names, watcher.seen) == (["batch_end"] * 3, [])
        watcher.gate.set()


async def test_a_plain_hook_works_in_the_background_too() -> None:
    """As does `run_event`, which takes every event in one place, and a plain function that returns a coroutine."""
    seen: list[Any] = []

    class Plain(Callback):
        delivery, snapshot = "background", ("number",)

        def batch_end(self, state: Any, logger: Any) -> None:
            seen.append(("plain", state.number))

    @callback(delivery="background", snapshot=("number",))
    def takes_all(event: EventName, state: Any, logger: Any) -> Awaitable[None]:
        async def later() -> None:
            await anyio.lowlevel.checkpoint()
            seen.append((event.value, state.number))

        return later()

    async with Engine(State(), callbacks=[Plain(), takes_all]) as engine:
        await publish_numbers(engine, 2)

    assert sorted(seen) == [("batch_end", 0), ("batch_end", 1), ("plain", 0), ("plain", 1)]


async def test_background_changes_how_a_callback_is_delivered_and_nothing_else() -> None:
    """The class stays as it is; its object may be used inline elsewhere."""
    recorder = Recorder(look=lambda state: type(state).__name__)
    async with Engine(State(), callbacks=[background(recorder, max_pending=2)]) as engine:
        await engine.run_event("init")
    async with Engine(State(), callbacks=[recorder]) as engine:
        await engine.run_event("init")

    assert recorder.seen == ["Snapshot", "State"]


# --------------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("on_full", "expected"),
    [
        # The first is in the hook; the mailbox has room for three.
        ("drop_oldest", [("batch_end", 0), ("batch_end", 4), ("batch_end", 5), ("batch_end", 6)]),
        # One of the same kind makes room, the oldest; the new one goes to the end, where its turn is.
        ("coalesce", [("batch_end", 0), ("epoch_end", 1), ("batch_end", 5), ("batch_end", 6)]),
    ],
)
async def test_a_full_mailbox_drops_events_and_counts_them(
    on_full: str, expected: list[tuple[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on at once; the report and the log say how many events were never seen."""
    gate, entered, seen = anyio.Event(), anyio.Event(), list[tuple[str, int]]()

    @callback(delivery="background", snapshot=("number",), max_pending=3, on_full=on_full)
    async def watcher(event: EventName, state: Any, logger: Any) -> None:
        entered.set()
        await gate.wait()
        seen.append((event.value, state.number))

    engine = Engine(State(), callbacks=[watcher])
    async with engine:
        for number, event in enumerate("b e b b b b b".split()):
            set_number(engine, number)
            await engine.run_event({"b": Event.BATCH_END, "e": Event.EPOCH_END}[event])
            await entered.wait()
        gate.set()
        report = await engine.close()

    assert seen == expected
    assert counts_of(engine) == (4, 0, 3)
    assert (report.undelivered, report.ok) == ({"watcher": 3}, False)
    assert "background callback watcher has lost 3 events" in logged(caplog)


async def test_coalesce_drops_the_oldest_where_nothing_is_alike() -> None:
    """Full is full."""
    gate, entered, seen = anyio.Event(), anyio.Event(), list[str]()

    @callback(delivery="background", max_pending=2, on_full="coalesce")
    async def watcher(event: EventName, state: Any, logger: Any) -> None:
        entered.set()
        await gate.wait()
        seen.append(event.value)

    async with Engine(State(), callbacks=[watcher]) as engine:
        for event in ("init", "fit_start", "epoch_start", "batch_start"):
            await engine.run_event(event)
            await entered.wait()
        gate.set()

    assert seen == ["init", "epoch_start", "batch_start"]


async def test_block_makes_the_publisher_wait_for_room_and_loses_nothing() -> None:
    """One event in the hook, two in the mailbox; the fourth waits, and the run with it."""
    watcher, published = Watcher(max_pending=2, on_full="block"), list[int]()

    async def publish() -> None:
        for number in range(6):
            await publish_numbers(engine, 1, start=number)
            await watcher.entered.wait()
            published.append(number)

    async with Engine(State(), callbacks=[watcher]) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(publish)
            await anyio.wait_all_tasks_blocked()

            assert published == [0, 1, 2]
            watcher.gate.set()
        report = await engine.close()

    assert (watcher.seen, report.ok) == (list(range(6)), True)
    assert counts_of(engine) == (6, 0, 0)


async def test_a_full_mailbox_holds_up_no_callback_of_the_same_event() -> None:
    """Inline callbacks and destinations run as ever; what waits is the next event."""
    watcher, inline = Watcher(max_pending=1, on_full="block"), Recorder()
    async with Engine(State(), callbacks=[watcher, inline]) as engine:
        await publish_numbers(engine, 1)
        await watcher.entered.wait()
        async with anyio.create_task_group() as group:
            group.start_soon(publish_numbers, engine, 3)
            await anyio.wait_all_tasks_blocked()

            assert len(inline.records) == 3
            watcher.gate.set()


async def test_blocked_publishers_of_many_lanes_keep_their_order() -> None:
    """None overtakes another, however they are woken. Which is first is up to the event loop."""
    watcher, inline = Watcher(max_pending=2, on_full="block"), Recorder(look=lambda state: state.number)
    async with Engine(callbacks=[watcher, inline]) as engine, anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(engine.run_event, Event.BATCH_END, State(number=number))
        await anyio.wait_all_tasks_blocked()
        watcher.gate.set()

    assert sorted(watcher.seen) == list(range(50))
    assert watcher.seen == inline.seen


async def test_room_that_has_come_by_then_is_not_waited_for() -> None:
    """The worker goes on while the inline callbacks of the event run."""
    watcher = Watcher(max_pending=1, on_full="block")

    @callback("batch_end")
    async def makes_room(event: EventName, state: Any, logger: Any) -> None:
        if state.number == 2:
            watcher.gate.set()
            await anyio.wait_all_tasks_blocked()

    async with Engine(State(), callbacks=[watcher, makes_room]) as engine:
        await publish_numbers(engine, 1)
        await watcher.entered.wait()
        await publish_numbers(engine, 2, start=1)

    assert watcher.seen == [0, 1, 2]


async def test_a_publisher_that_is_cancelled_while_it_waits_for_room_loses_nothing() -> None:
    """Its event stands in line already; the lane is free again."""
    watcher = Watcher(max_pending=1, on_full="block")
    async with Engine(State(), callbacks=[watcher]) as engine:
        await publish_numbers(engine, 1)
        await watcher.entered.wait()
        await publish_numbers(engine, 1, start=1)
        with anyio.move_on_after(0.01) as scope:
            await publish_numbers(engine, 1, start=2)

        assert (scope.cancelled_caught, len(engine.bus._lanes)) == (True, 0)
        watcher.gate.set()
        await publish_numbers(engine, 1, start=3)

    assert watcher.seen == [0, 1, 2, 3]


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.sampled_from(["batch_end", "epoch_end", "deliver"]), max_size=30),
    max_pending=st.integers(1, 4),
    on_full=st.sampled_from(["drop_oldest", "coalesce"]),
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_mailbox_does_what_a_list_would(steps: list[str], max_pending: int, on_full: str) -> None:
    """Any interleaving of publishing and delivering, against the rule written down as naively as can be."""
    waiting: list[tuple[str, int]] = []
    expected: list[tuple[str, int]] = []
    lost = 0
    seen: list[tuple[str, int]] = []
    turns = anyio.Semaphore(0)

    @callback(delivery="background", snapshot=("number",), max_pending=max_pending, on_full=on_full)
    async def watcher(event: EventName, state: Any, logger: Any) -> None:
        seen.append((event.value, state.number))
        await turns.acquire()

    engine = Engine(State(), callbacks=[watcher])
    async with engine:
        in_the_hook: list[tuple[str, int]] = []
        for number, step in enumerate(steps):
            if step == "deliver":
                if in_the_hook:
                    in_the_hook.clear()
                    turns.release()
            else:
                if len(waiting) >= max_pending:
                    alike = [entry for entry in waiting if entry[0] == step] if on_full == "coalesce" else []
                    waiting.remove(alike[0] if alike else waiting[0])
                    lost += 1
                waiting.append((step, number))
                set_number(engine, number)
                await engine.run_event(step)
            if waiting and not in_the_hook:
                in_the_hook.append(waiting.pop(0))
                expected += in_the_hook
            for _ in range(10):
                await anyio.lowlevel.checkpoint()

            assert seen == expected
        for _ in steps:
            turns.release()
        report = await engine.close()

    assert seen == expected + waiting
    assert report.undelivered == ({"watcher": lost} if lost else {})


# ------------------------------------------------------------------------------------------------------------ snapshots


class Pair(NamedTuple):
    """A tuple with a class of its own."""

    first: Any
    second: Any


@dataclass(slots=True)
class Result:
    """An object without a `__dict__`."""

    value: Any
    others: list[Any]


def shell(value: Any) -> list[Any]:
    """Every kind of container, around one value."""
    return [
        [value],
        (value, 1),
        {"a": value},
        Pair(value, 1),
        OrderedDict(a=value),
        deque([value]),
        SimpleNamespace(a=value),
        Result(value, [value]),
    ]


nested_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.builds(Timestamp, batch=st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.sets(st.integers(), max_size=2)
        | inner.flatmap(lambda value: st.sampled_from(shell(value)))
    ),
    max_leaves=8,
)


def spoil(value: Any) -> None:
    """Change everything in a value that can be changed in place."""
    match value:
        case Timestamp():
            value.load_state_dict({**value.state_dict(), "batch": 77})
        case set():
            value.add("spoilt")
        case dict():
            for item in value.values():
                spoil(item)
            value["spoilt"] = True
        case SimpleNamespace():
            spoil(vars(value))
        case Result():
            spoil(value.others)
            spoil(value.value)
            value.value = "spoilt"
        case list() | tuple() | deque():
            for item in value:
                spoil(item)
            if not isinstance(value, tuple):
                value.append("spoilt")
        case _:
            pass


@settings(deadline=None, max_examples=60)
@given(values=st.lists(nested_values, min_size=1, max_size=4))
async def test_what_changes_after_the_event_never_shows(values: list[Any]) -> None:
    """Whatever the state holds, however deep it is changed while the event waits, and by another callback too."""
    expected = copy.deepcopy(values)

    def look(state: Any) -> Any:
        seen = copy.deepcopy(state.value)
        assert state.value is state.value
        spoil(state.value)
        return seen

    recorders = [Recorder(name=f"{i}", look=look, delivery="background", snapshot=("value",)) for i in range(3)]
    state = State()
    async with Engine(state, callbacks=recorders) as engine:
        for value in values:
            state.value = value
            await engine.run_event("batch_end")
            spoil(value)

    assert [recorder.seen for recorder in recorders] == [expected] * 3


async def test_what_a_callback_does_to_its_snapshot_shows_to_no_other() -> None:
    """Nor does what the state's own timestamp takes over later."""
    turns, seen = anyio.Event(), list[Any]()

    class First(Callback):
        delivery = "background"

        async def batch_end(self, state: Any, logger: Any) -> None:
            state.metrics["accuracy"] = 99
            state.timestamp.load_state_dict(Timestamp(batch=99).state_dict())
            turns.set()

    class Second(Callback):
        delivery = "background"

        async def batch_end(self, state: Any, logger: Any) -> None:
            await turns.wait()
            seen.append((state.metrics, int(state.timestamp.batch)))

    state = State(metrics={"accuracy": 0.5}, timestamp=Timestamp(batch=1))
    async with Engine(state, callbacks=[First(), Second()]) as engine:
        await engine.run_event("batch_end")
        state.timestamp.load_state_dict(Timestamp(batch=2).state_dict())

    assert seen == [({"accuracy": 0.5}, 1)]


@pytest.mark.parametrize("readable", [True, False])
async def test_what_nobody_declared_fails_no_event(readable: bool) -> None:
    """What cannot be copied, or not even read, is left out; reading it says why."""
    messages: list[str] = []

    class Broken:
        @property
        def metrics(self) -> Any:
            if not readable:
                raise OSError("gone")
            return threading.Lock()

    def look(state: Any) -> None:
        with pytest.raises(SnapshotError) as caught:
            _ = state.metrics
        messages.append(str(caught.value))

    recorder = Recorder(name="far", look=look, delivery="background")
    async with Engine(Broken(), callbacks=[recorder]) as engine:
        await engine.run_event("init")
        report = await engine.close()

    why = "TypeError: cannot pickle '_thread.lock' object" if readable else "OSError: gone"
    assert messages == [
        f"background callback far read state.metrics, which could not be copied at the event: {why}",
    ]
    assert report.ok


async def test_reading_what_was_not_declared_raises_and_says_how_to_declare_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also for what the state did not have, and for writing: the message names the callback and the attribute."""
    messages: list[str] = []

    @callback(delivery="background", snapshot=("loss", "later"), name="remote")
    def curious(event: EventName, state: Any, logger: Any) -> None:
        for attempt in (
            lambda: state.model,
            lambda: state.later,
            lambda: setattr(state, "loss", 0),
            lambda: delattr(state, "loss"),
        ):
            with pytest.raises(SnapshotError) as caught:
                attempt()
            messages.append(str(caught.value))
        assert (state.loss, getattr(state, "model", "absent"), hasattr(state, "model")) == (1.5, "absent", False)
        messages.append(repr(state))
        state.batch  # noqa: B018 -- raises, and so is logged

    async with Engine(State(loss=1.5, model=object(), batch=1), callbacks=[curious]) as engine:
        await engine.run_event("batch_end")

    assert messages == [
        (
            "background callback remote read state.model, which its snapshot does not hold; declare it: "
            "snapshot = ('loss', 'later', 'model')"
        ),
        "background callback remote read state.later, which the state did not have at the event",
        "background callback remote set state.loss, but its snapshot is frozen; change the state in an algorithm",
        "background callback remote deleted state.loss, but its snapshot is frozen",
        "<Snapshot for remote: loss>",
    ]
    assert isinstance(logged(caplog)["background callback remote failed on BATCH_END"], SnapshotError)


async def test_a_state_that_is_a_dict_says_what_to_do() -> None:
    """However it is read: by attribute or by key, declared or not. And with an object it works as it says."""
    messages: list[str] = []
    numbers: list[int] = []

    @callback(delivery="background", snapshot=("number",), name="remote")
    def curious(event: EventName, state: Any, logger: Any) -> None:
        for read in (attrgetter("number"), itemgetter("number")):
            with pytest.raises(SnapshotError) as caught:
                read(state)
            messages.append(str(caught.value))

    @callback(delivery="background", snapshot=("number",))
    def reading(event: EventName, state: Any, logger: Any) -> None:
        numbers.append(state.number)

    state = {"number": 7}
    async with Engine(state, callbacks=[curious]) as engine:
        await engine.run_event("init")
    async with Engine(SimpleNamespace(**state), callbacks=[reading]) as working:
        await working.run_event("init")

    cure = (
        "let the state be an object, such as a dataclass or types.SimpleNamespace(**state), and name them in snapshot="
    )
    assert messages == [
        "background callback remote read state.number, but the state is a dict, and a snapshot is of attributes; "
        + cure,
        f"background callback remote read state['number'], but a snapshot has attributes and no keys; {cure}",
    ]
    assert numbers == [7]


async def test_a_snapshot_can_be_copied_and_pickled() -> None:
    """A hook may hand it to another process; and what asks for odd attributes gets an ordinary answer."""
    recorder = Recorder(look=lambda state: state, delivery="background", snapshot=("number",))
    async with Engine(State(number=7), callbacks=[recorder]) as engine:
        await engine.run_event("init")
    (snapshot,) = recorder.seen

    for twin in (copy.copy(snapshot), copy.deepcopy(snapshot), pickle.loads(pickle.dumps(snapshot))):
        assert (twin.number, repr(twin)) == (7, "<Snapshot for recorder: number>")
    assert not hasattr(snapshot, "_repr_html_")


async def test_the_timestamp_is_there_undeclared_and_binds_the_logger() -> None:
    """Long after the batch has moved on, metrics are logged at the step of their event."""
    gate, steps = anyio.Event(), list[Any]()

    class Steps(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            steps.append((dict(metrics), step))

    class Remote(Callback):
        delivery = "background"

        async def batch_end(self, state: Any, logger: Any) -> None:
            await gate.wait()
            logger.log_metrics({"batch": int(state.timestamp.batch)})

    state = State(timestamp=Timestamp())
    async with Engine(state, callbacks=[Remote(), Steps()]) as engine:
        for _ in range(3):
            state.timestamp = state.timestamp.to_next_batch(1, 1)
            await engine.run_event("batch_end")
        gate.set()

    assert steps == [({"batch": 1}, 1), ({"batch": 2}, 2), ({"batch": 3}, 3)]


async def test_the_metrics_are_there_undeclared() -> None:
    """As they were at the event: what the state takes in later never shows."""
    recorder = Recorder(look=lambda state: state.metrics, delivery="background")
    state = State(metrics={"accuracy": 0.5, "per_class": [1, 2]})
    async with Engine(state, callbacks=[recorder]) as engine:
        await engine.run_event("eval_end")
        state.metrics["accuracy"] = 0.75
        state.metrics["per_class"].append(3)
        await engine.run_event("eval_end")

    assert recorder.seen == [
        {"accuracy": 0.5, "per_class": [1, 2]},
        {"accuracy": 0.75, "per_class": [1, 2, 3]},
    ]


async def test_without_a_background_callback_nothing_is_read_off_the_state() -> None:
    """A snapshot that nobody asked for costs nothing."""

    class Untouchable:
        def __getattribute__(self, name: str) -> Any:
            if name in ("timestamp", "metrics", "big"):
                read.append(name)
            return super().__getattribute__(name)

    read: list[str] = []

    class Elsewhere(Callback):
        delivery, snapshot = "background", ("big",)

        def init(self, state: Any, logger: Any) -> None: ...

    async with Engine(callbacks=[Recorder(name="inline"), Elsewhere()]) as engine:
        await engine.run_event("batch_end", Untouchable())

    assert read == []


class Counted:
    """Counts how often it is copied."""

    copies = 0

    def __deepcopy__(self, memo: Any) -> Counted:
        Counted.copies += 1
        return self


async def test_an_attribute_is_copied_once_per_event_however_many_ask() -> None:
    """And not at all where nobody does."""
    Counted.copies = 0
    callbacks = [FakeCallback("batch_end", name=f"{i}", delivery="background", snapshot=("big",)) for i in range(3)]
    idle = [FakeCallback("batch_end", name="asks for nothing", delivery="background"), FakeCallback(name="inline")]
    async with Engine(State(big=Counted()), callbacks=[*callbacks, *idle]) as engine:
        await engine.run_event("batch_end")
        await engine.run_event("batch_end")

    assert Counted.copies == 2


async def test_an_attribute_that_cannot_be_copied_is_the_callbacks_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Not the run's. The event counts as lost, and the error says whose snapshot it was."""
    watcher = FakeCallback(name="watcher", delivery="background", snapshot=("lock",))
    quiet = FakeCallback(name="quiet", delivery="background", snapshot=("lock",), on_error="quarantine")
    quiet.quarantine_after = 1
    async with Engine(State(lock=threading.Lock()), callbacks=[watcher, quiet]) as engine:
        await engine.run_event("init")
        await engine.run_event("fit_start")
        report = await engine.close()
    error = logged(caplog)["background callback watcher failed on INIT"]

    assert (watcher.records, report.undelivered) == ([], {"watcher": 2, "quiet": 1})
    assert isinstance(error, SnapshotError)
    assert isinstance(error.__cause__, TypeError)
    assert str(error) == (
        "background callback watcher has 'lock' in snapshot=, but state.lock cannot be copied: TypeError: cannot "
        "pickle '_thread.lock' object; leave it out, and put what the callback needs of it into an attribute of "
        "numbers, strings or tensors"
    )
    assert error.__notes__ == ["in background callback watcher on INIT"]
    assert "callback quiet failed 1 times in a row, last on INIT, and is dropped from the run" in logged(caplog)


async def test_tensors_are_detached_and_cloned() -> None:
    """With their graph they could not be copied, and without a copy the next step would show."""
    torch = pytest.importorskip("torch", reason="what is tested are torch's tensors")
    names = ("loss", "outputs", "by_name", "module", "odd")
    recorder = Recorder(look=lambda state: state, delivery="background", snapshot=names)
    weight = torch.ones(2, requires_grad=True)
    state = State(
        loss=(weight * 3).sum(),
        outputs=[weight * 2, (weight * 4,)],
        by_name={"logits": weight * 5},
        module=torch.nn.Linear(1, 1),
        odd=OrderedDict(a=1),
    )
    async with Engine(state, callbacks=[recorder]) as engine:
        await engine.run_event("batch_end")
        with torch.no_grad():
            weight.zero_()
            for tensor in (state.loss, state.outputs[0], state.outputs[1][0], state.by_name["logits"]):
                tensor.zero_()
    (seen,) = recorder.seen

    assert (seen.loss.item(), seen.loss.requires_grad) == (6.0, False)
    assert [t.tolist() for t in (seen.outputs[0], seen.outputs[1][0], seen.by_name["logits"])] == [
        [2, 2],
        [4, 4],
        [5, 5],
    ]
    assert seen.module is not state.module
    assert seen.odd == OrderedDict(a=1)


async def test_tensors_are_found_wherever_they_are() -> None:
    """In objects and containers of any kind: detached, and the same for all callbacks; the rest is each one's own."""
    torch = pytest.importorskip("torch", reason="what is tested are torch's tensors")
    weight = torch.ones(2, requires_grad=True)
    recorders = [
        Recorder(name=f"{i}", look=lambda state: state.out, delivery="background", snapshot=("out",)) for i in range(2)
    ]
    cycle: list[Any] = [weight * 2]
    cycle.append(cycle)
    values: list[Any] = [
        *shell(weight * 2),
        cycle,
        {"array": np.ones(2), "type": torch.Tensor},
        torch.nn.Linear(1, 1),
        [weight],
    ]
    async with Engine(State(), callbacks=recorders) as engine:
        for value in values:
            await engine.run_event("batch_end", State(out=value))
    first, second = (recorder.seen for recorder in recorders)

    assert [type(value) for value in first] == [type(value) for value in values]
    found = [[leaves_of(value) for value in seen] for seen in (first, second)]
    tensors = [leaf for leaves in found[0][:-3] for leaf, _ in leaves]
    assert [tensor.tolist() for tensor in tensors] == [[2, 2]] * 9
    assert not any(tensor.requires_grad for tensor in [*tensors, first[-1][0]])
    assert [[id(leaf) for leaf, _ in leaves] for leaves in found[0]] == [
        [id(leaf) for leaf, _ in leaves] for leaves in found[1]
    ]
    assert not any(one is other for one, other in zip(first, second, strict=True) if type(one) is not tuple)
    assert first[8][1] is first[8]
    assert first[-3]["type"] is torch.Tensor
    assert isinstance(first[-2].weight, torch.nn.Parameter)
    assert first[-2].weight is not values[-2].weight


async def test_a_state_without_any_of_it_will_do() -> None:
    """None, or a record that is a dict, has nothing to be read off it."""
    recorder = Recorder(look=repr, delivery="background")
    async with Engine(callbacks=[recorder]) as engine:
        await engine.run_event("init")
        await engine.run_event("fit_start", {"row": 1})

    assert recorder.seen == ["<Snapshot for recorder: >"] * 2


async def test_what_is_delivered_is_kept_alive_by_nobody() -> None:
    """Neither the mailbox nor its worker holds on to the state, the snapshot or the publisher's context."""

    class Big: ...

    held: ContextVar[Any] = ContextVar("held")
    recorder = FakeCallback(delivery="background", snapshot=("big",))
    async with Engine(callbacks=[recorder]) as engine:
        references: list[weakref.ref[Any]] = []

        async def publish() -> None:
            state, context = State(big=Big()), Big()
            held.set(context)
            references.extend((weakref.ref(state), weakref.ref(context)))
            await engine.run_event("init", state)

        async with anyio.create_task_group() as group:
            group.start_soon(publish)
        await anyio.wait_all_tasks_blocked()
        references.append(weakref.ref(recorder.records[0].state.big))
        recorder.clear()
        gc.collect()

        assert [reference() for reference in references] == [None, None, None]


# -------------------------------------------------------------------------------------------------------------- context


async def test_a_hook_runs_in_the_context_of_its_event() -> None:
    """What the publisher had set shows; what the hook sets does not, neither to the run nor to the next event."""
    seen: list[Any] = []

    async def look(event: EventName, state: Any, logger: Any) -> None:
        envelope = current_envelope()
        seen.append((request.get(), envelope and envelope.event))
        request.set("by the hook")

    async with Engine(State(), callbacks=[FakeCallback(hook=look, delivery="background")]) as engine:
        for name in ("one", "two"):
            request.set(name)
            await engine.run_event("init")
        await anyio.wait_all_tasks_blocked()

        assert request.get() == "two"

    assert seen == [("one", Event.INIT), ("two", Event.INIT)]


async def test_a_hook_may_publish_and_queues_like_anyone() -> None:
    """About its own state too: the event it was called for is over, so nothing nests, and nothing waits for ever."""
    log: list[str] = []

    @callback("batch_end", delivery="background")
    async def republish(event: EventName, state: Any, logger: Any) -> None:
        await engine.run_event("epoch_end")
        log.append("published")

    @algorithm("epoch_end")
    async def slow(event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        log.append("epoch_end")

    engine = Engine(State(), algorithms=[slow], callbacks=[republish])
    async with engine:
        for _ in range(3):
            await engine.run_event("batch_end")
            await anyio.wait_all_tasks_blocked()

    assert log == ["epoch_end", "published"] * 3


async def test_a_worker_nests_in_no_event_that_is_still_running() -> None:
    """It was started by one, and belongs to none: its events wait for the lane, and two of them never overlap."""
    log: list[str] = []

    @callback("batch_end", delivery="background")
    async def republish(event: EventName, state: Any, logger: Any) -> None:
        await engine.run_event("epoch_end")

    @callback("epoch_end")
    async def note(event: EventName, state: Any, logger: Any) -> None:
        log.append("epoch_end")

    @algorithm("fit_start")
    async def whole_run(event: EventName, state: Any, logger: Any) -> None:
        await engine.run_event("batch_end")
        await anyio.wait_all_tasks_blocked()
        log.append("fit_start is over")

    engine = Engine(State(), algorithms=[whole_run], callbacks=[republish, note])
    async with engine:
        await engine.run_event("fit_start")
        await anyio.wait_all_tasks_blocked()

    assert log == ["fit_start is over", "epoch_end"]


# ---------------------------------------------------------------------------------------------------------- open, close


class Lived(Watcher):
    """A background callback with a lifetime."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate.set()
        self.log: list[Any] = []

    async def open(self, state: Any, logger: Any) -> None:
        """Note it, and the kind of state."""
        await anyio.lowlevel.checkpoint()
        self.log.append(("open", type(state).__name__))

    async def batch_end(self, state: Any, logger: Any) -> None:
        """Note it."""
        self.log.append(state.number)

    async def close(self, state: Any, logger: Any) -> None:
        """Note it."""
        self.log.append("close")

    async def post_close(self) -> None:
        """Note it."""
        self.log.append("post_close")


async def test_open_runs_in_the_worker_before_its_first_event() -> None:
    """So that opening does not slow the run either; it gets the snapshot, as all that runs in the background."""
    lived = Lived()
    async with Engine(State(), callbacks=[lived]) as engine:
        await engine.run_event("init")  # not one of its events
        assert lived.log == []
        await publish_numbers(engine, 2)
        assert lived.log == []

    assert lived.log == [("open", "Snapshot"), 0, 1, "close", "post_close"]


async def test_a_callback_that_had_no_event_is_neither_opened_nor_closed() -> None:
    """There is nothing for `close` to close; one without an `open` is closed as ever."""

    class OnlyClosed(Callback):
        delivery = "background"

        def close(self, state: Any, logger: Any) -> None:
            closed.append("only closed")

    lived, closed = Lived(), list[str]()
    async with Engine(State(), callbacks=[lived, OnlyClosed()]) as engine:
        await engine.run_event("init")
        report = await engine.close()

    assert (lived.log, closed, report.closed) == ([], ["only closed"], ["only_closed"])


async def test_an_open_that_fails_is_tried_again_at_the_next_event(caplog: pytest.LogCaptureFixture) -> None:
    """The event that could not be delivered counts as lost."""

    class Stubborn(Lived):
        async def open(self, state: Any, logger: Any) -> None:
            await super().open(state, logger)
            if len(self.log) < 3:
                raise OSError("no route to host")

    lived = Stubborn()
    async with Engine(State(), callbacks=[lived]) as engine:
        await publish_numbers(engine, 4)
        report = await engine.close()

    assert lived.log == [("open", "Snapshot")] * 3 + [2, 3, "close", "post_close"]
    assert (counts_of(engine), report.undelivered) == ((2, 0, 2), {"stubborn": 2})
    assert str(logged(caplog)["background callback stubborn failed in open, before BATCH_END"]) == "no route to host"


async def test_an_open_that_always_fails_can_quarantine_the_callback(caplog: pytest.LogCaptureFixture) -> None:
    """After so many failures it is dropped from the run: nothing is copied for it any more."""

    class Hopeless(Lived):
        on_error, quarantine_after = "quarantine", 2

        async def open(self, state: Any, logger: Any) -> None:
            raise OSError("no route to host")

    lived = Hopeless()
    async with Engine(State(), callbacks=[lived]) as engine:
        await publish_numbers(engine, 5)
        await anyio.wait_all_tasks_blocked()
        await publish_numbers(engine, 5)
        report = await engine.close()

    assert (lived.log, report.undelivered, report.closed) == ([], {"hopeless": 5}, [])
    message = "callback hopeless failed 2 times in a row, last in open, before BATCH_END, and is dropped from the run"
    assert message in logged(caplog)


async def test_a_callback_that_leaves_the_run_is_closed_with_it() -> None:
    """Also if its worker has not opened it yet when it leaves."""
    lived = Lived()
    state = State(callbacks=[lived], number=0)
    async with Engine(state) as engine:
        await engine.run_event("batch_end")
        state.callbacks.clear()
        await engine.run_event("batch_end")

    assert lived.log == [("open", "Snapshot"), 0, "close", "post_close"]


# -------------------------------------------------------------------------------------------------------------- failure


async def test_a_hook_that_fails_is_logged_and_gets_the_next_event(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its `on_error`: there is no event left to raise it from. Where one would have, the report says so."""

    def fail(event: EventName, state: Any, logger: Any) -> None:
        raise ValueError(f"on {event.value}")

    callbacks = [
        FakeCallback(name=on_error, hook=fail, delivery="background", on_error=on_error, quarantine_after=2)
        for on_error in ("raise", "log", "quarantine")
    ]
    async with Engine(State(), callbacks=callbacks) as engine:
        for event in ("init", "fit_start", "epoch_start", "batch_start"):
            await engine.run_event(event)
            await anyio.wait_all_tasks_blocked()
        counts = {m.entry.name: (m.delivered, m.failed, m.dropped) for m in engine._delivery.mailboxes.values()}
        report = await engine.close()

    assert counts == {"raise": (0, 4, 0), "log": (0, 4, 0), "quarantine": (0, 2, 0)}
    assert (report.unraised, report.ok) == ({"raise": 4}, False)
    assert logged(caplog)["background callback raise failed on INIT"].__notes__ == [
        "in background callback raise on INIT"
    ]


async def test_quarantine_drops_what_waits_and_only_failures_in_a_row_count() -> None:
    """A success in between starts the count anew."""
    outcomes = iter([1, 0, 1, 1])  # a failure, a success, two failures

    async def hook(event: EventName, state: Any, logger: Any) -> None:
        if next(outcomes):
            raise ValueError("bad")

    watcher = FakeCallback(hook=hook, delivery="background", on_error="quarantine", quarantine_after=2)
    async with Engine(State(), callbacks=[watcher]) as engine:
        for _ in range(6):
            await engine.run_event("batch_end")
        report = await engine.close()

    assert (counts_of(engine), report.undelivered) == ((1, 3, 2), {"fake": 2})


async def test_a_hook_that_hangs_is_ended_by_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """The next event is delivered."""

    async def hang(event: EventName, state: Any, logger: Any) -> None:
        if event is Event.INIT:
            await anyio.sleep_forever()

    watcher = FakeCallback(name="remote", hook=hang, delivery="background", timeout=0.01)
    async with Engine(State(), callbacks=[watcher]) as engine:
        await engine.run_event("init")
        await engine.run_event("fit_start")
        await engine.close()

    assert counts_of(engine) == (1, 1, 0)
    assert isinstance(logged(caplog)["background callback remote failed on INIT"], HandlerTimeoutError)


async def cancel_and_wait() -> None:
    """Cancel the current task, and let that happen."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(10)


async def cancel_and_return() -> None:
    """Cancel the current task, and leave no chance for that to happen."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancel_and_swallow() -> None:
    """Cancel the current task again and again, and take no notice."""
    for _ in range(3):
        try:
            await cancel_and_wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)


async def wait_for_something_cancelled() -> None:
    """What happens to whoever awaits a task that somebody else has cancelled."""
    other = asyncio.get_running_loop().create_future()
    other.cancel()
    await other


@ASYNCIO_ONLY
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize(
    ("cancel", "delivered"),
    [(cancel_and_wait, 5), (cancel_and_return, 6), (cancel_and_swallow, 6), (wait_for_something_cancelled, 5)],
)
async def test_a_hook_that_cancels_itself_hits_neither_worker_nor_close(
    cancel: Callable[[], Awaitable[None]], delivered: int, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """However it goes about it, the events after it are delivered, and closing takes no longer than they do."""

    async def hook(event: EventName, state: Any, logger: Any) -> None:
        if event is Event.EPOCH_START:
            await cancel()

    watcher = FakeCallback(
        name="remote",
        hook=(lambda event, state, logger: hook(event, state, logger)) if plain else hook,  # noqa: PLW0108
        delivery="background",
        max_pending=2,
        on_full="block",
    )
    inline = Recorder()
    engine = Engine(State(), callbacks=[watcher, inline])
    with anyio.fail_after(5):
        async with engine:
            for event in ("init", "fit_start", "epoch_start", "batch_start", "batch_end", "epoch_end"):
                await engine.run_event(event)
            report = await engine.close()

    assert watcher.names == inline.names
    assert (report.ok, counts_of(engine)) == (delivered == 6, (delivered, 6 - delivered, 0))
    error = logged(caplog).get("background callback remote failed on EPOCH_START")
    assert isinstance(error, HandlerCancelledError) == (delivered == 5)


@ASYNCIO_ONLY
async def test_a_plain_hook_that_cancels_its_task_hits_only_itself() -> None:
    """It runs in a task of its own, and not in the worker's."""

    def hook(event: EventName, state: Any, logger: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    watcher = FakeCallback(hook=hook, delivery="background")
    with anyio.fail_after(5):
        async with Engine(State(), callbacks=[watcher]) as engine:
            await engine.run_event("init")
            await engine.run_event("fit_start")
            report = await engine.close()

    assert (watcher.names, report.ok, counts_of(engine)) == (["init", "fit_start"], True, (2, 0, 0))


@ASYNCIO_ONLY
async def test_a_worker_that_is_cancelled_behind_our_back_ends_without_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody cancels tasks that are not his. The run goes on; what the callback never saw is counted."""
    watcher = Watcher()
    engine = Engine(State(), callbacks=[watcher])
    with anyio.fail_after(5):
        async with engine:
            await publish_numbers(engine, 3)
            await watcher.entered.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if "Mailbox" in repr(task):
                    task.cancel()
            await anyio.wait_all_tasks_blocked()
            await publish_numbers(engine, 1)
            report = await engine.close()

    assert report.undelivered == {"watcher": 4}
    assert "the worker of background callback watcher was cancelled; it gets no more events" in logged(caplog)


async def test_a_scope_the_hook_cancels_is_its_own() -> None:
    """The way that anyio and trio have of cancelling oneself."""
    seen: list[str] = []

    async def hook(event: EventName, state: Any, logger: Any) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep_forever()
        seen.append(event.value)

    async with Engine(State(), callbacks=[FakeCallback(hook=hook, delivery="background")]) as engine:
        await engine.run_event("init")
        await engine.run_event("fit_start")

    assert seen == ["init", "fit_start"]


class Fatal(BaseException):
    """Like SystemExit, but no event loop treats it in a way of its own."""


async def test_what_is_meant_for_the_process_is_not_taken_for_a_failure() -> None:
    """It ends the run, as it would from anywhere else, and closing does not wait for a worker that is gone."""

    async def hook(event: EventName, state: Any, logger: Any) -> None:
        raise Fatal

    with pytest.raises(BaseExceptionGroup) as caught, anyio.fail_after(5):  # noqa: PT012
        async with Engine(State(), callbacks=[FakeCallback(hook=hook, delivery="background")]) as engine:
            await engine.run_event("init")
            await anyio.sleep_forever()

    assert caught.group_contains(Fatal)


# ------------------------------------------------------------------------------------------------- entering and closing


async def test_it_needs_an_entered_engine() -> None:
    """Without one, no worker would ever deliver anything; the message names the callback and the way out."""
    engine = Engine(State(), callbacks=[Watcher()])
    with pytest.raises(ConfigurationError, match="callback watcher is delivered in the background") as caught:
        await engine.run_event("batch_end")

    assert "run its events inside `async with engine:`, or by engine.sync" in str(caught.value)
    assert (await engine.close()).ok


async def test_an_engine_is_entered_once() -> None:
    """A second time would orphan the first workers. Leaving what was never entered is harmless."""
    engine = Engine(State(), callbacks=[Watcher()])
    async with engine:
        with pytest.raises(ConfigurationError, match="entered already"):
            await engine.__aenter__()
    await engine._delivery.__aexit__(None, None, None)

    with pytest.raises(EngineClosedError):
        await engine.run_event("batch_end")


async def test_close_drains_the_mailboxes_before_anything_is_closed() -> None:
    """And a later call gives the same report."""
    lived, slow = Lived(), Watcher(name="slow")
    async with Engine(State(), callbacks=[lived, slow]) as engine:
        await publish_numbers(engine, 20)
        slow.gate.set()
        report = await engine.close()

        assert lived.log == [("open", "Snapshot"), *range(20), "close", "post_close"]
        assert slow.seen == list(range(20))
    assert (report.ok, await engine.close() is report) == (True, True)


async def test_close_keeps_its_deadline_and_reports_what_was_left() -> None:
    """What is in the hook has not been delivered either. The others are not held up."""
    hanging, quick = Watcher(name="hanging"), Watcher(name="quick")
    quick.gate.set()
    async with Engine(State(), callbacks=[hanging, quick]) as engine:
        await publish_numbers(engine, 5)
        with anyio.fail_after(5):
            report = await engine.close(timeout=0.05)

    assert (report.undelivered, report.ok) == ({"hanging": 5}, False)
    assert (hanging.seen, quick.seen) == ([], list(range(5)))
    assert sorted(report.closed) == ["hanging", "quick"]


async def test_a_hook_that_outlives_its_closing_is_counted_once() -> None:
    """Under a shield of its own it goes on to its end; the report has been written by then."""
    gate = anyio.Event()

    async def stubborn(event: EventName, state: Any, logger: Any) -> None:
        with anyio.CancelScope(shield=True):
            await gate.wait()

    async with Engine(State(), callbacks=[FakeCallback(hook=stubborn, delivery="background")]) as engine:
        await engine.run_event("init")
        await engine.run_event("fit_start")
        await anyio.wait_all_tasks_blocked()
        report = await engine.close(timeout=0.01)
        gate.set()
        await anyio.wait_all_tasks_blocked()

    assert (report.undelivered, counts_of(engine)) == ({"fake": 2}, (0, 0, 2))


async def test_an_event_that_comes_in_after_the_deadline_is_lost_and_counted() -> None:
    """It was in flight when the engine closed, and has reached its callbacks only now."""
    go_on, reached = anyio.Event(), anyio.Event()
    report: Any = None

    @algorithm("fit_end")
    async def slow(event: EventName, state: Any, logger: Any) -> None:
        reached.set()
        await go_on.wait()

    watcher = FakeCallback(delivery="background", max_pending=1, on_full="block")
    async with Engine(State(), algorithms=[slow], callbacks=[watcher]) as engine:
        await engine.run_event("init")
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run_event, "fit_end")
            await reached.wait()
            report = await engine.close(timeout=0.05)
            go_on.set()

    assert (report.in_flight, watcher.names, counts_of(engine)) == (("FIT_END",), ["init"], (1, 0, 1))


async def test_closing_lets_go_of_publishers_that_wait_for_room() -> None:
    """They would wait for ever otherwise."""
    watcher, report = Watcher(max_pending=1, on_full="block"), cast("Any", None)
    async with Engine(State(), callbacks=[watcher]) as engine:
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(publish_numbers, engine, 3)
                await anyio.wait_all_tasks_blocked()
                report = await engine.close(timeout=0.05)

    assert (report.in_flight, report.undelivered) == (("BATCH_END",), {"watcher": 3})


async def test_cancelling_the_run_still_drains() -> None:
    """The worker is shielded, and so is the closing; the cancellation gets through afterwards."""
    watcher, passed = Watcher(), False
    watcher.gate.set()
    with anyio.CancelScope() as scope:
        async with Engine(State(), callbacks=[watcher]) as engine:
            await publish_numbers(engine, 5)
            scope.cancel()
            await anyio.sleep_forever()
        passed = True

    assert (scope.cancelled_caught, passed, watcher.seen) == (True, False, list(range(5)))


async def test_a_failing_run_still_drains_and_fails_as_itself() -> None:
    """Nothing is wrapped in a group of somebody's."""
    watcher = Watcher()
    watcher.gate.set()
    with pytest.raises(KeyError, match="the run's own"):  # noqa: PT012
        async with Engine(State(), callbacks=[watcher]) as engine:
            await publish_numbers(engine, 5)
            raise KeyError("the run's own")

    assert watcher.seen == list(range(5))


async def test_close_from_a_background_hook_marks_the_closing_and_returns() -> None:
    """It must not wait for itself. The engine closes when it is left."""
    reports: list[Any] = []

    @callback("batch_end", delivery="background")
    async def closes(event: EventName, state: Any, logger: Any) -> None:
        reports.append(await engine.close())

    engine = Engine(State(), callbacks=[closes])
    with anyio.fail_after(5):
        async with engine:
            await engine.run_event("batch_end")
            await anyio.wait_all_tasks_blocked()

            assert (reports[0].pending, engine.closed) == (True, True)
            with pytest.raises(EngineClosedError, match="is closing"):
                await engine.run_event("batch_end")
    assert (await engine.close()).ok


async def test_hooks_may_publish_until_the_last_mailbox_is_empty() -> None:
    """What is drained runs as it would have before: also what it publishes is handled, in the background as well."""
    first, last = Recorder("batch_end"), Recorder("epoch_end", delivery="background", name="last")

    @callback("batch_end", delivery="background")
    async def republish(event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        await engine.run_event("epoch_end")

    engine = Engine(State(), callbacks=[first, last, republish])
    with anyio.fail_after(5):
        async with engine:
            await engine.run_event("epoch_end")
            await anyio.wait_all_tasks_blocked()
            for _ in range(5):
                await engine.run_event("batch_end")
            report = await engine.close()

    assert (report.ok, len(last.records)) == (True, 6)
    with pytest.raises(EngineClosedError, match="is closed"):
        await engine.run_event("batch_end")


async def test_a_thread_of_the_loop_goes_by_the_loop() -> None:
    """What `engine.sync` refuses there works as its message says."""
    watcher = Watcher()
    watcher.gate.set()
    async with Engine(State(number=7), callbacks=[watcher]) as engine:
        await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(engine.run_event, Event.BATCH_END))

    assert watcher.seen == [7]


# ------------------------------------------------------------------------------------------------------------ deadlocks


async def test_a_hook_that_waits_for_room_in_its_own_mailbox_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It would wait for itself for ever. What it published has been handled, and stands in line."""
    recorder = Recorder("epoch_end")

    class Republishing(Callback):
        delivery, max_pending, on_full = "background", 1, "block"

        def __init__(self) -> None:
            self.seen: list[str] = []
            self.full = anyio.Event()

        async def batch_end(self, state: Any, logger: Any) -> None:
            self.seen.append("batch_end")
            await self.full.wait()
            await engine.run_event("epoch_end", State())

        async def epoch_end(self, state: Any, logger: Any) -> None:
            self.seen.append("epoch_end")

        async def fit_end(self, state: Any, logger: Any) -> None:
            self.seen.append("fit_end")

    watcher = Republishing()
    engine = Engine(callbacks=[watcher, recorder])
    with anyio.fail_after(5):
        async with engine:
            await engine.run_event("batch_end", State())
            await anyio.wait_all_tasks_blocked()
            await engine.run_event("fit_end", State())
            watcher.full.set()
            await anyio.wait_all_tasks_blocked()
    error = logged(caplog)["background callback republishing failed on BATCH_END"]

    assert isinstance(error, DeadlockError)
    assert len(error.chain) == 1
    assert "EPOCH_END of State at" in error.chain[0]
    assert "waits for the full mailbox of callback republishing, which is at BATCH_END of State at" in error.chain[0]
    assert "let a full mailbox drop events instead of on_full='block'" in str(error)
    assert (watcher.seen, recorder.names) == (["batch_end", "fit_end", "epoch_end"], ["epoch_end"])


async def test_a_circle_of_lanes_and_mailboxes_is_a_deadlock(caplog: pytest.LogCaptureFixture) -> None:
    """The publisher has the lane that the hook waits for, and waits for room behind the hook. The last one is told."""
    errors: list[DeadlockError] = []
    hook_waits = anyio.Event()
    record = State()

    class Republishing(Callback):
        delivery, max_pending, on_full = "background", 1, "block"

        async def batch_end(self, state: Any, logger: Any) -> None:
            hook_waits.set()
            await engine.run_event("epoch_end", record)

    @algorithm("fit_start")
    async def publisher(event: EventName, state: Any, logger: Any) -> None:
        await engine.run_event("batch_end", State())
        await hook_waits.wait()
        await anyio.wait_all_tasks_blocked()
        await engine.run_event("batch_end", State())
        try:
            await engine.run_event("batch_end", State())
        except DeadlockError as error:
            errors.append(error)

    engine = Engine(algorithms=[publisher], callbacks=[Republishing()])
    with anyio.fail_after(5):
        async with engine:
            await engine.run_event("fit_start", record)
            await anyio.wait_all_tasks_blocked()

    assert len(errors) == 1
    assert ["the full mailbox of callback republishing" in step for step in errors[0].chain] == [True, False]
    assert "FIT_START of State" in errors[0].chain[1]
    assert [trace.name for trace in errors[0].traces.values()] == ["publisher"]
    assert not logged(caplog)


async def test_a_deadlock_is_raised_as_itself_beside_what_callbacks_raised(caplog: pytest.LogCaptureFixture) -> None:
    """Those are logged: the program has to change its shape before anything else."""
    errors: list[BaseException] = []

    class Republishing(Callback):
        delivery, max_pending, on_full = "background", 1, "block"

        def __init__(self) -> None:
            self.full = anyio.Event()

        async def batch_end(self, state: Any, logger: Any) -> None:
            await self.full.wait()
            try:
                await engine.run_event("epoch_end", State())
            except Exception as error:
                errors.append(error)

        async def epoch_end(self, state: Any, logger: Any) -> None: ...

    @callback("epoch_end")
    def failing(event: EventName, state: Any, logger: Any) -> None:
        raise ValueError("bad")

    watcher = Republishing()
    engine = Engine(callbacks=[watcher, failing])
    async with engine:
        await engine.run_event("batch_end", State())
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(CallbackErrors):
            await engine.run_event("epoch_end", State())
        watcher.full.set()
        await anyio.wait_all_tasks_blocked()

    assert [type(error) for error in errors] == [DeadlockError]
    assert isinstance(
        logged(caplog)["1 callback failed on EPOCH_END, besides an error that propagates"], CallbackErrors
    )


# --------------------------------------------------------------------------------------------------------- destinations


class Remote(LoggerDestination):
    """A destination that delivers its records to a service, in the background."""

    delivery = "background"

    def __init__(self, **options: Any) -> None:
        self.gate, self.entered = anyio.Event(), anyio.Event()
        self.received: list[Any] = []
        for option, value in options.items():
            setattr(self, option, value)

    async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Send them."""
        self.entered.set()
        await self.gate.wait()
        self.received.append(metrics["number"])
        if metrics["number"] == "bad":
            raise ValueError("refused")

    async def epoch_end(self, state: Any, logger: Any) -> None:
        """A hook of its own."""
        self.received.append("epoch_end")


@algorithm()
def log_number(event: EventName, state: Any, logger: Any) -> None:
    """Log two metrics on each event."""
    logger.log_metrics({"number": state.number})
    logger.log_metrics({"number": -state.number})


async def test_an_async_destination_in_the_background_never_holds_up_the_run() -> None:
    """Its records go into the mailbox with their event, before its hook; none is lost, and all keep their order."""
    remote = Remote()
    async with Engine(State(), algorithms=[log_number], callbacks=[remote]) as engine:
        for number, event in enumerate(("init", "batch_end", "epoch_end"), start=1):
            set_number(engine, number)
            await engine.run_event(event)
        assert remote.received == []
        remote.gate.set()
        report = await engine.close()

    # INIT's destinations come before its algorithms, so that its records are delivered with the next event.
    assert (remote.received, report.ok) == ([1, -1, 2, -2, 3, -3, "epoch_end"], True)


async def test_its_mailbox_bounds_its_records_too() -> None:
    """What a hung service has not taken is dropped with its event, and counted record by record."""
    remote = Remote(max_pending=2)
    async with Engine(State(), algorithms=[log_number], callbacks=[remote]) as engine:
        for number in range(1, 7):
            set_number(engine, number)
            await engine.run_event("epoch_end")
            await remote.entered.wait()
        remote.gate.set()
        report = await engine.close()

    # Two records and a hook each, of the events 2, 3 and 4.
    assert report.undelivered == {"remote": 9}
    assert remote.received == [1, -1, "epoch_end", 5, -5, "epoch_end", 6, -6, "epoch_end"]


async def test_records_that_fail_and_records_that_are_left_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Exactly: each once."""
    remote = Remote()
    remote.gate.set()

    def log_some(event: EventName, state: Any, logger: Any) -> None:
        for number in state.numbers:
            logger.log_metrics({"number": number})

    async with Engine(State(), algorithms=[FakeAlgorithm(apply=log_some)], callbacks=[remote]) as engine:
        await engine.run_event("batch_end", State(numbers=["bad", 1]))
        await anyio.wait_all_tasks_blocked()
        remote.gate = anyio.Event()
        await engine.run_event("batch_end", State(numbers=[2, 3]))
        report = await engine.close(timeout=0.05)

    assert (remote.received, report.undelivered) == (["bad", 1], {"remote": 3})
    assert str(logged(caplog)["destination remote failed on BATCH_END"]) == "refused"


async def test_a_quarantined_background_destination_gets_nothing_any_more() -> None:
    """Neither records nor hooks."""
    remote = Remote(on_error="quarantine", quarantine_after=1)
    remote.gate.set()
    async with Engine(State(number="bad"), algorithms=[FakeAlgorithm(apply=_log)], callbacks=[remote]) as engine:
        for _ in range(3):
            await engine.run_event("epoch_end")
            await anyio.wait_all_tasks_blocked()

    assert remote.received == ["bad", "epoch_end"]


def _log(event: EventName, state: Any, logger: Any) -> None:
    logger.log_metrics({"number": state.number})


async def test_a_destination_with_room_for_few_can_hold_up_the_run_if_it_wants_to() -> None:
    """`on_full="block"` holds for destinations as well, on INIT too."""
    remote = Remote(max_pending=1, on_full="block")
    done: list[str] = []

    async def publish() -> None:
        for event in ("init", "batch_end", "epoch_end", "batch_end", "fit_end"):
            await engine.run_event(event)
            done.append(event)

    engine = Engine(State(number=1), algorithms=[FakeAlgorithm(apply=_log)], callbacks=[remote])
    async with engine, anyio.create_task_group() as group:
        group.start_soon(publish)
        await anyio.wait_all_tasks_blocked()

        assert len(done) < 5
        remote.gate.set()

    assert remote.received.count(1) == 5


# ---------------------------------------------------------------------------------------------------------------- spans


async def test_spans_of_background_callbacks_hang_under_their_event() -> None:
    """Whenever they run, and with what the user opens inside them; nothing of one event shows in the next."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("user")
    gate = anyio.Event()

    async def hook(event: EventName, state: Any, logger: Any) -> None:
        await gate.wait()
        with tracer.start_as_current_span(f"work on {event.value}"):
            await anyio.lowlevel.checkpoint()
        if event is Event.FIT_START:
            raise ValueError("bad")

    callbacks = [
        FakeCallback(name="asynchronous", hook=hook, delivery="background"),
        FakeCallback(name="plain", delivery="background"),
    ]
    async with Engine(State(), callbacks=callbacks, tracer_provider=provider) as engine:
        with tracer.start_as_current_span("caller"):
            await engine.run_event("init")
        await engine.run_event("fit_start")
        gate.set()
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context is not None}

    def path(span: ReadableSpan) -> str:
        return span.name if span.parent is None else f"{path(by_id[span.parent.span_id])} > {span.name}"

    assert sorted(path(span) for span in spans) == [
        "caller",
        "caller > dispatch init",
        "caller > dispatch init > callback asynchronous",
        "caller > dispatch init > callback asynchronous > work on init",
        "caller > dispatch init > callback plain",
        "dispatch fit_start",
        "dispatch fit_start > callback asynchronous",
        "dispatch fit_start > callback asynchronous > work on fit_start",
        "dispatch fit_start > callback plain",
    ]
    failed = [span for span in spans if not span.status.is_unset]
    assert [(span.name, (span.attributes or {})["error.type"]) for span in failed] == [
        ("callback asynchronous", "ValueError")
    ]
    functions = {span.name: (span.attributes or {}).get("code.function.name") for span in spans}
    assert functions["callback plain"] == "eventbus_engine.testing.fakes.FakeCallback._call"


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delivery": "later"}, "has delivery='later'; use 'inline' or 'background'"),
        ({"on_full": "wait"}, "has on_full='wait'; use 'drop_oldest' or 'block' or 'coalesce'"),
        ({"max_pending": 0}, "has max_pending=0; give a number of events, 1 or more"),
        ({"snapshot": "loss"}, r"has snapshot='loss'; give a tuple of names of attributes, as in \('loss',\)"),
    ],
)
async def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """At construction, by the callback's name."""
    with pytest.raises(ConfigurationError, match=f"callback fake {message}"):
        Engine(callbacks=[FakeCallback(**options)])


async def test_an_unused_mailbox_does_not_exist() -> None:
    """A background callback costs nothing before its first event."""
    async with Engine(State(), callbacks=[Watcher()]) as engine:
        await engine.run_event("init")

        assert engine._delivery.mailboxes == {}
