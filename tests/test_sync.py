"""`engine.sync`: the same engine for a program without an event loop, and inside one that runs already."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eventbus_engine import (
    Callback,
    CallbackErrors,
    Engine,
    EngineClosedError,
    Event,
    EventName,
    LoggerDestination,
    SyncUsageError,
    algorithm,
    callback,
    current_envelope,
)
from eventbus_engine.sync import LoopThread
from eventbus_engine.testing import FakeAlgorithm, FakeCallback, Recorder, assert_order

request: ContextVar[str] = ContextVar("request", default="none")


async def look_around(event: EventName, state: Any, logger: Any) -> None:
    """An async handler that really suspends, and notes where it runs."""
    await anyio.lowlevel.checkpoint()
    state.log.append((event.value, threading.current_thread().name))


def plain(event: EventName, state: Any, logger: Any) -> int:
    """A plain handler."""
    state.log.append((event.value, threading.current_thread().name))
    return len(state.log)


@pytest.fixture
def state() -> SimpleNamespace:
    """What the handlers write to."""
    return SimpleNamespace(log=[])


@pytest.fixture
def no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, neither an event loop nor a thread can be made."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("this needs neither a loop nor a thread")

    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    monkeypatch.setattr(asyncio, "Runner", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test closes its engines, so no thread of theirs may be left."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("eventbus-engine")] == []


def jupyter(backend: str, cell: Callable[[], Any]) -> Any:
    """Run a cell as a notebook does: plain code, called from inside a running event loop."""

    async def kernel() -> Any:
        await anyio.lowlevel.checkpoint()
        return cell()

    return anyio.run(kernel, backend=backend)


BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


# ----------------------------------------------------------------------------------------------------- without any loop


@pytest.mark.usefixtures("no_loop")
def test_an_event_of_plain_functions_needs_no_loop_and_no_thread(state: SimpleNamespace) -> None:
    """Algorithms, callbacks, subscribers, destinations, open, nesting and pairs: all on the calling thread."""
    seen: list[Any] = []
    watcher = FakeCallback(hook=plain)
    engine = Engine(
        state, algorithms=[FakeAlgorithm("first", apply=plain), FakeAlgorithm("second")], callbacks=[watcher]
    )
    engine.bus.subscribe(seen.append)
    traces = engine.sync.run_event(Event.INIT)
    with engine.sync.pair("before_loss") as pair:
        seen.append("between")

    assert_order(traces, "first", "second")
    assert_order(pair.before, "first", "second")
    assert_order(pair.after, "second", "first")
    assert (watcher.opened, watcher.names) == (1, ["init", "before_loss", "after_loss"])
    assert [getattr(entry, "event", entry) for entry in seen] == [
        Event.INIT,
        Event.BEFORE_LOSS,
        "between",
        Event.AFTER_LOSS,
    ]
    assert {thread for _, thread in state.log} == {"MainThread"}


@pytest.mark.usefixtures("no_loop")
def test_context_variables_set_by_plain_functions_are_seen_by_the_caller(state: SimpleNamespace) -> None:
    """They run in the caller's context, as far as anybody can tell."""
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=lambda *_: bool(request.set("by the algorithm")))])
    request.set("before")
    engine.sync.run_event("init")

    assert request.get() == "by the algorithm"


def test_context_variables_are_the_callers_after_an_async_event_too(state: SimpleNamespace) -> None:
    """An algorithm shares the caller's context, async or not; an async callback has a copy of it."""

    async def set_in_algorithm(event: EventName, state: Any, logger: Any) -> None:
        state.log.append(request.get())
        await anyio.lowlevel.checkpoint()
        request.set("by the algorithm")

    async def set_in_callback(event: EventName, state: Any, logger: Any) -> None:
        state.log.append(request.get())
        await anyio.lowlevel.checkpoint()
        request.set("by the callback")

    engine = Engine(
        state, algorithms=[FakeAlgorithm(apply=set_in_algorithm)], callbacks=[FakeCallback(hook=set_in_callback)]
    )
    request.set("before")
    engine.sync.run_event("init")
    engine.sync.run_event("fit_start")
    engine.sync.close()

    # INIT runs the callbacks first.
    assert state.log == ["before", "before", "by the algorithm", "by the algorithm"]
    assert request.get() == "by the algorithm"


@pytest.mark.usefixtures("no_loop")
def test_a_context_variable_can_be_reset_in_a_later_event(state: SimpleNamespace) -> None:
    """Its token belongs to the caller's context, and so do plain handlers."""
    tokens = [request.set("before")]
    undo = FakeAlgorithm(match="fit_start", apply=lambda *_: request.reset(tokens.pop()))
    mark = FakeAlgorithm(match="init", apply=lambda *_: tokens.append(request.set("by the algorithm")))
    engine = Engine(state, algorithms=[mark, undo])
    engine.sync.run_event("init")
    during = request.get()
    engine.sync.run_event("fit_start")

    assert (during, request.get()) == ("by the algorithm", "before")


@pytest.mark.usefixtures("no_loop")
def test_a_failure_reads_as_if_nothing_were_between(state: SimpleNamespace) -> None:
    """From the caller's line to the handler's, with its notes, and no other exception behind it."""

    def careless(event: EventName, state: Any, logger: Any) -> None:
        raise ZeroDivisionError("no samples")

    engine = Engine(state, algorithms=[FakeAlgorithm("careless", apply=careless), FakeAlgorithm("next")])
    with pytest.raises(ZeroDivisionError, match="no samples") as caught:
        engine.sync.run_event("init")
    error = caught.value
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    assert (error.__context__, error.__cause__) == (None, None)
    assert error.__notes__ == ["in algorithm careless on INIT"]
    assert [trace.outcome for trace in error.traces.values()] == ["failed", "skipped"]  # type: ignore[attr-defined]
    assert (frames[0], frames[-1]) == ("test_a_failure_reads_as_if_nothing_were_between", "careless")


@pytest.mark.parametrize("running", [None, "asyncio", "trio"])
def test_a_failure_of_an_async_handler_reads_well_too(running: str | None, state: SimpleNamespace) -> None:
    """By way of a loop, or of another thread, there is no other exception behind it either."""

    async def careless(event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        raise ZeroDivisionError("no samples")

    def cell() -> BaseException:
        engine = Engine(state, algorithms=[FakeAlgorithm("careless", apply=careless)])
        with pytest.raises(ZeroDivisionError, match="no samples") as caught:
            engine.sync.run_event("init")
        engine.sync.close()
        return caught.value

    error = cell() if running is None else jupyter(running, cell)
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    assert (error.__context__, error.__cause__, error.__notes__) == (None, None, ["in algorithm careless on INIT"])
    assert (frames[0], frames[-1]) == ("cell", "careless")


# ---------------------------------------------------------------------------------------------------- a loop of its own


def test_async_participants_run_on_the_calling_thread(state: SimpleNamespace) -> None:
    """On a private loop, which stays the same, and is not installed as anybody's current one."""
    loops: set[Any] = set()

    async def note_loop(event: EventName, state: Any, logger: Any) -> None:
        await look_around(event, state, logger)
        loops.add(asyncio.get_running_loop())

    engine = Engine(state, algorithms=[FakeAlgorithm(apply=note_loop)], callbacks=[FakeCallback(hook=look_around)])
    traces = engine.sync.run_event("init")
    engine.sync.run_event("fit_start")
    report = engine.sync.close()

    assert traces["fake/INIT"].outcome == "ok"
    assert state.log == [(event, "MainThread") for event in ("init", "init", "fit_start", "fit_start")]
    assert (len(loops), {loop.is_closed() for loop in loops}, report.ok) == (1, {True}, True)
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_an_event_that_does_not_wait_needs_no_more_than_the_loop(
    state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner would redirect Ctrl-C for each. What a handler looks at is as true as under one."""

    async def look(event: EventName, state: Any, logger: Any) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        state.log.append((loop, loop.is_running() and task in asyncio.all_tasks(), anyio.get_current_task().id))

    async def look_and_turn(event: EventName, state: Any, logger: Any) -> None:
        await look(event, state, logger)
        await asyncio.sleep(0)

    monkeypatch.delattr(asyncio.Runner, "run")
    callbacks = [FakeCallback(hook=look_and_turn), FakeCallback(hook=look_and_turn)]
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=look)], callbacks=callbacks)
    engine.sync.run_event("batch_end")
    engine.sync.close()
    loops, truths, tasks = zip(*state.log, strict=True)

    assert (len(set(loops)), truths, len(set(tasks))) == (1, (True, True, True), 3)


def test_in_a_thread_it_is_the_same(state: SimpleNamespace) -> None:
    """The calling thread is whichever calls."""
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=look_around), FakeAlgorithm("plain", apply=plain)])
    thread = threading.Thread(target=engine.sync.run_event, args=("init",), name="worker")
    thread.start()
    thread.join()
    engine.sync.close()

    assert state.log == [("init", "worker"), ("init", "worker")]


def test_gradient_and_precision_modes_of_the_caller_hold_in_async_algorithms(state: SimpleNamespace) -> None:
    """They belong to the thread, and an async algorithm runs on it."""
    torch = pytest.importorskip("torch", reason="what is tested are torch's thread-local modes")

    async def look(event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        state.log.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    engine = Engine(state, algorithms=[FakeAlgorithm(apply=look)])
    engine.sync.run_event("init")
    with torch.no_grad():
        engine.sync.run_event("before_forward")
        with torch.autocast("cpu"):
            engine.sync.run_event("after_forward")
    engine.sync.close()

    assert state.log == [(True, False), (False, False), (False, True)]


def test_what_is_plain_until_then_runs_before_the_loop_is_needed(state: SimpleNamespace) -> None:
    """The first algorithms run at once; the loop comes in where it is needed, in the middle of an event."""
    engine = Engine(
        state,
        algorithms=[
            FakeAlgorithm("a", apply=lambda e, s, _: s.log.append(asyncio._get_running_loop())),
            FakeAlgorithm("b", apply=look_around),
            FakeAlgorithm("c", apply=lambda e, s, _: s.log.append(asyncio._get_running_loop() is not None)),
        ],
    )
    traces = engine.sync.run_event("init")
    engine.sync.close()

    assert_order(traces, "a", "b", "c")
    assert state.log == [None, ("init", "MainThread"), True]


def test_a_plain_function_that_returns_an_awaitable_gets_a_loop(state: SimpleNamespace) -> None:
    """It could not be known before, and works all the same: as algorithm, as callback, as subscriber."""
    engine = Engine(
        state,
        algorithms=[FakeAlgorithm(apply=lambda event, state, _: look_around(event, state, None))],
        callbacks=[FakeCallback(hook=lambda event, state, _: look_around(event, state, None))],
    )
    engine.bus.subscribe(lambda envelope: look_around(envelope.event, envelope.state, None))
    engine.sync.run_event("batch_end")
    engine.sync.close()

    assert state.log == [("batch_end", "MainThread")] * 3


def test_a_middleware_of_the_users_own_gets_a_loop(state: SimpleNamespace) -> None:
    """It may await anything, so it cannot be stepped without one."""

    async def slow(envelope: Any, call_next: Any) -> Any:
        await asyncio.sleep(0)
        return await call_next(envelope)

    engine = Engine(state, algorithms=[FakeAlgorithm(apply=plain)])
    engine.bus.use(slow)
    traces = engine.sync.run_event("init")
    engine.sync.close()

    assert traces["fake/INIT"].exit_code == 1


def test_an_event_and_a_pair_take_a_key() -> None:
    """As on an event loop."""
    keys: list[Any] = []
    engine = Engine()
    engine.bus.subscribe(lambda envelope: keys.append(envelope.key))

    engine.sync.run_event(Event.INIT, 7, key="a")
    with engine.sync.pair(Event.BEFORE_LOSS, 7, key="b"):
        pass
    engine.sync.close()

    assert keys == ["a", "b", "b"]


def test_events_nest_and_lanes_hold(state: SimpleNamespace) -> None:
    """An async handler awaits the engine itself, about the same state, at once."""
    engine: Engine[Any]

    async def nest(event: EventName, state: Any, logger: Any) -> None:
        state.log.append("begin")
        await engine.run_event("fit_start")
        state.log.append("end")

    engine = Engine(
        state,
        algorithms=[
            FakeAlgorithm("outer", match="init", apply=nest),
            FakeAlgorithm("inner", match="fit_start", apply=plain),
        ],
    )
    engine.sync.run_event("init")
    engine.sync.close()

    assert state.log == ["begin", ("fit_start", "MainThread"), "end"]
    assert len(engine.bus._lanes) == 0


# ---------------------------------------------------------------------------------------- inside a loop that is running


@BACKENDS
def test_in_jupyter_plain_events_run_where_they_are(backend: str, state: SimpleNamespace) -> None:
    """A running loop is nothing they would need."""
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=plain)], callbacks=[FakeCallback(hook=plain)])
    traces = jupyter(backend, lambda: engine.sync.run_event("batch_end"))
    engine.sync.close()

    assert traces["fake/BATCH_END"].exit_code == 1
    assert state.log == [("batch_end", "MainThread")] * 2


@BACKENDS
def test_in_jupyter_async_events_run_on_one_loop_thread_while_the_caller_waits(
    backend: str, state: SimpleNamespace
) -> None:
    """Always the same: what an async callback has opened there can be used there."""
    threads: list[int] = []

    async def note_thread(event: EventName, state: Any, logger: Any) -> None:
        await look_around(event, state, logger)
        threads.append(threading.get_ident())

    def cell() -> Any:
        engine = Engine(state, algorithms=[FakeAlgorithm("a", apply=plain), FakeAlgorithm("b", apply=note_thread)])
        with engine.sync.pair("before_loss"):
            state.log.append("between")
        return engine.sync.close()

    report = jupyter(backend, cell)

    assert report.ok
    assert state.log == [
        ("before_loss", "MainThread"),
        ("before_loss", "eventbus-engine-loop"),
        "between",
        ("after_loss", "eventbus-engine-loop"),
        ("after_loss", "eventbus-engine-loop"),
    ]
    assert len(set(threads)) == 1


@BACKENDS
def test_in_jupyter_context_variables_go_there_and_come_back(backend: str, state: SimpleNamespace) -> None:
    """An algorithm shares the caller's context, whatever thread it is on."""

    async def set_it(event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        state.log.append(request.get())
        request.set("by the algorithm")

    def cell() -> str:
        engine = Engine(state, algorithms=[FakeAlgorithm(apply=set_it)])
        request.set("by the cell")
        engine.sync.run_event("init")
        engine.sync.close()
        return request.get()

    assert jupyter(backend, cell) == "by the algorithm"
    assert state.log == ["by the cell"]


@BACKENDS
def test_the_callers_loop_goes_on_afterwards(backend: str, state: SimpleNamespace) -> None:
    """And knows which library it is: nothing of the other loop is left in the caller's context."""
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=look_around)])

    async def main() -> None:
        engine.sync.run_event("init")
        await anyio.lowlevel.checkpoint()
        await anyio.to_thread.run_sync(lambda: None)
        await engine.run_event("fit_start")
        engine.sync.close()

    anyio.run(main, backend=backend)

    assert state.log == [("init", "eventbus-engine-loop"), ("fit_start", "MainThread")]


@BACKENDS
def test_from_a_worker_thread_of_a_running_loop_it_drives_its_own(backend: str, state: SimpleNamespace) -> None:
    """`to_thread` hands the context on, and with it, what the loop's library has noted there."""
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=look_around)])

    async def main() -> None:
        await anyio.to_thread.run_sync(engine.sync.run_event, "init")

    anyio.run(main, backend=backend)
    engine.sync.close()

    assert [event for event, thread in state.log if "eventbus" not in thread] == ["init"]


def test_a_runner_can_be_closed_inside_a_running_loop(state: SimpleNamespace) -> None:
    """A script used it; a notebook closes it."""
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=look_around)])
    engine.sync.run_event("init")

    assert jupyter("asyncio", engine.sync.close).ok


@BACKENDS
def test_an_event_of_its_own_loop_would_be_blocked_for_ever(backend: str, state: SimpleNamespace) -> None:
    """While an event of the state is being handled on this thread's loop, a blocking one about it could never end."""

    async def main() -> None:
        engine = Engine(state, callbacks=[FakeCallback("init", hook=wait)])
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run_event, "init")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(SyncUsageError, match=r"FIT_START of SimpleNamespace at .* await engine.run_event"):
                engine.sync.run_event("fit_start")
            go_on.set()

    async def wait(event: EventName, state: Any, logger: Any) -> None:
        await go_on.wait()

    go_on = anyio.Event()
    anyio.run(main, backend=backend)


# ------------------------------------------------------------------------------------------------ from inside a handler


@pytest.mark.parametrize("running", [None, "asyncio", "trio"])
@pytest.mark.parametrize("is_async", [False, True])
def test_from_inside_a_handler_it_is_a_typed_error(running: str | None, is_async: bool, state: SimpleNamespace) -> None:
    """It would wait for itself. The message says what to do."""

    def reenter(event: EventName, state: Any, logger: Any) -> None:
        engine.sync.run_event("fit_start")

    async def reenter_async(event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        engine.sync.run_event("fit_start")

    engine = Engine(state, algorithms=[FakeAlgorithm(match="init", apply=reenter_async if is_async else reenter)])

    def cell() -> None:
        with pytest.raises(SyncUsageError, match="called from one of the engine's own handlers") as caught:
            engine.sync.run_event("init")
        assert "make the handler async and await engine.run_event(...) there" in str(caught.value)
        engine.sync.close()

    cell() if running is None else jupyter(running, cell)


@pytest.mark.anyio
async def test_from_inside_a_handler_of_the_async_engine_too(state: SimpleNamespace) -> None:
    """Also in what a handler has sent to a thread, as long as the event is running."""

    def reenter(event: EventName, state: Any, logger: Any) -> None:
        engine.sync.close()

    async def from_a_thread(event: EventName, state: Any, logger: Any) -> None:
        await anyio.to_thread.run_sync(engine.sync.run_event, "fit_end")

    engine = Engine(
        state,
        algorithms=[FakeAlgorithm(match="init", apply=reenter)],
        callbacks=[FakeCallback("fit_start", hook=from_a_thread)],
    )
    with pytest.raises(SyncUsageError, match=r"await engine\.run_event"):
        await engine.run_event("init")
    with pytest.raises(CallbackErrors) as caught:
        await engine.run_event("fit_start")

    assert [type(error) for error in caught.value.exceptions] == [SyncUsageError]


def test_a_handler_may_use_another_engine(state: SimpleNamespace) -> None:
    """Only its own would wait for itself."""
    other = Engine(state, algorithms=[FakeAlgorithm(apply=look_around)])
    engine = Engine(
        SimpleNamespace(), callbacks=[FakeCallback(hook=lambda *_: other.sync.run_event("fit_start") and None)]
    )
    engine.sync.run_event("init")
    engine.sync.close()
    other.sync.close()

    assert state.log == [("fit_start", "MainThread")]


# ---------------------------------------------------------------------------------------------------------------- pairs


def test_pair_publishes_the_second_half_only_if_the_block_succeeded(state: SimpleNamespace) -> None:
    """The block's own error comes through as it is."""
    recorder = Recorder()
    engine = Engine(state, callbacks=[recorder])
    with pytest.raises(KeyError, match="in the block") as caught, engine.sync.pair("before_loss"):
        raise KeyError("in the block")
    with engine.sync.pair("before_loss"):
        pass

    assert recorder.names == ["before_loss", "before_loss", "after_loss"]
    assert caught.value.__context__ is None


def test_pair_whose_first_half_fails_never_enters_the_block(state: SimpleNamespace) -> None:
    """As with the async one."""
    engine = Engine(state, algorithms=[FakeAlgorithm(apply=lambda *_: 1 // 0)])
    with pytest.raises(ZeroDivisionError), engine.sync.pair("before_loss"):
        state.log.append("entered")

    assert state.log == []


@pytest.mark.parametrize("running", [None, "asyncio", "trio"])
def test_spans_of_a_pair_hold_both_halves_and_the_work_between(running: str | None, state: SimpleNamespace) -> None:
    """A user's span in the block is the pair's child; afterwards the caller's own span is current again."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("user")

    def cell() -> None:
        engine = Engine(state, algorithms=[FakeAlgorithm(apply=look_around)], tracer_provider=provider)
        with tracer.start_as_current_span("caller"):
            with engine.sync.pair("before_loss"), tracer.start_as_current_span("work"):
                pass
            with pytest.raises(ValueError, match="bad"), engine.sync.pair("before_forward"):
                raise ValueError("bad")
            with tracer.start_as_current_span("after"):
                pass
        engine.sync.close()

    cell() if running is None else jupyter(running, cell)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    names = {span.context.span_id: span.name for span in spans.values() if span.context is not None}
    parents = {name: names[span.parent.span_id] for name, span in spans.items() if span.parent is not None}

    assert parents == {
        "loss": "caller",
        "dispatch before_loss": "loss",
        "work": "loss",
        "dispatch after_loss": "loss",
        "algorithm fake": "dispatch before_forward",  # the last of that name
        "forward": "caller",
        "dispatch before_forward": "forward",
        "after": "caller",
    }
    assert spans["forward"].attributes is not None
    assert (spans["forward"].status.is_ok, spans["forward"].attributes["error.type"]) == (False, "ValueError")


# -------------------------------------------------------------------------------------------------------------- closing


def test_close_closes_the_callbacks_and_ends_the_loop(state: SimpleNamespace) -> None:
    """Once; and then events are refused."""

    class Lived(Callback):
        async def open(self, state: Any, logger: Any) -> None:
            state.log.append("open")

        async def close(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            state.log.append("close")

    engine = Engine(state, callbacks=[Lived()])
    engine.sync.run_event("init")
    report = engine.sync.close()

    assert (report.ok, report.closed, engine.sync.close() is report) == (True, ["lived"], True)
    assert state.log == ["open", "close"]
    with pytest.raises(EngineClosedError, match="publish before close"):
        engine.sync.run_event("fit_end")


def test_close_keeps_its_deadline(state: SimpleNamespace) -> None:
    """And says who did not."""

    class Hanging(Callback):
        async def close(self, state: Any, logger: Any) -> None:
            await anyio.sleep_forever()

    engine = Engine(state, callbacks=[Hanging()])
    engine.sync.run_event("init")

    assert engine.sync.close(timeout=0.05).timed_out == ["hanging"]


# --------------------------------------------------------------------------------------------------- background workers


class Remote(Callback):
    """A background callback that lives on one loop, as a client of a service does."""

    delivery, snapshot = "background", ("loss",)

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.loops: set[Any] = set()

    def note(self, entry: Any) -> None:
        """Note it, and where."""
        self.log.append(entry)
        self.loops.add((threading.current_thread().name, asyncio.get_running_loop()))

    async def open(self, state: Any, logger: Any) -> None:
        """Make what the hooks need."""
        self.note("open")
        self.arrived = asyncio.Event()

    async def batch_end(self, state: Any, logger: Any) -> None:
        """Take its time."""
        await asyncio.sleep(0.001)
        self.arrived.set()
        self.note(state.loss)

    async def close(self, state: Any, logger: Any) -> None:
        """Needs the loop that `open` was on."""
        await self.arrived.wait()
        self.note("close")

    async def post_close(self) -> None:
        """Likewise."""
        self.note("post_close")


@pytest.mark.parametrize("running", [None, "asyncio", "trio"])
@pytest.mark.parametrize("inline", [plain, look_around], ids=["plain", "async"])
def test_background_workers_live_on_a_loop_thread(running: str | None, inline: Any, state: SimpleNamespace) -> None:
    """From their first event to the engine's close: open, hooks, close and post_close share a loop and a thread."""
    remote = Remote()

    def cell() -> Any:
        engine = Engine(state, algorithms=[FakeAlgorithm(apply=inline)], callbacks=[remote])
        for number in range(5):
            state.loss = number
            engine.sync.run_event("batch_end")
        return engine.sync.close()

    report = cell() if running is None else jupyter(running, cell)

    assert (report.ok, report.closed) == (True, ["remote"])
    assert remote.log == ["open", 0, 1, 2, 3, 4, "close", "post_close"]
    assert [name for name, _ in remote.loops] == ["eventbus-engine-loop"]
    expected = "MainThread" if running is None or inline is plain else "eventbus-engine-loop"
    assert {thread for _, thread in state.log} == {expected}


def test_a_full_mailbox_holds_up_the_calling_thread(state: SimpleNamespace) -> None:
    """With `on_full="block"`, nothing is lost however slow the callback is."""
    remote = Remote()
    remote.max_pending, remote.on_full = 1, "block"
    engine = Engine(state, callbacks=[remote])
    for number in range(20):
        state.loss = number
        engine.sync.run_event("batch_end")
    report = engine.sync.close()

    assert (report.ok, remote.log[1:-2]) == (True, list(range(20)))


@BACKENDS
def test_a_full_mailbox_holds_up_a_notebook_too(backend: str, state: SimpleNamespace) -> None:
    """Where the event itself runs on the loop thread, beside the worker it waits for."""
    remote = Remote()
    remote.max_pending, remote.on_full = 1, "block"

    def cell() -> Any:
        engine = Engine(state, algorithms=[FakeAlgorithm(apply=look_around)], callbacks=[remote])
        for number in range(10):
            state.loss = number
            engine.sync.run_event("batch_end")
        return engine.sync.close()

    assert (jupyter(backend, cell).ok, remote.log[1:-2]) == (True, list(range(10)))


def test_close_says_what_a_background_callback_never_saw(state: SimpleNamespace) -> None:
    """Within its deadline, across threads."""

    class Hanging(Callback):
        delivery = "background"

        async def batch_end(self, state: Any, logger: Any) -> None:
            await anyio.sleep_forever()

    engine = Engine(state, callbacks=[Hanging()])
    for _ in range(3):
        engine.sync.run_event("batch_end")

    assert engine.sync.close(timeout=0.05).undelivered == {"hanging": 3}


def test_a_plain_hook_that_never_returns_does_not_hold_up_close(
    state: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """It blocks the loop thread, which is left behind, and said to be."""
    release = threading.Event()

    @callback("batch_end", delivery="background")
    def stuck(event: EventName, state: Any, logger: Any) -> None:
        release.wait()

    engine = Engine(state, callbacks=[stuck])
    engine.sync.run_event("batch_end")
    report = engine.sync.close(timeout=0.05)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "eventbus-engine-loop"]
    release.set()
    thread.join()

    assert report.undelivered == {"stuck": 1}
    assert "a background callback holds up its thread, which is left behind" in caplog.messages


def test_publishing_from_a_background_callback_is_a_typed_error(
    state: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's events are on another thread. Async, through the bus, and blocking: each says what to do."""
    engine: Engine[Any]

    @callback("batch_end", delivery="background")
    async def awaits(event: EventName, state: Any, logger: Any) -> None:
        await engine.run_event("fit_end")

    @callback("batch_end", delivery="background")
    async def publishes_later(event: EventName, state: Any, logger: Any) -> None:
        leftover.append(asyncio.create_task(engine.bus.publish(Event.FIT_END)))

    @callback("batch_end", delivery="background")
    def blocks(event: EventName, state: Any, logger: Any) -> None:
        engine.sync.run_event("fit_end")

    leftover: list[asyncio.Task[Any]] = []
    engine = Engine(state, callbacks=[awaits, publishes_later, blocks])
    engine.sync.run_event("batch_end")
    engine.sync.close()
    errors = {record.getMessage(): record.exc_info[1] for record in caplog.records if record.exc_info}

    for name, message in (("awaits", "FIT_END was published by a background callback"), ("blocks", "own handlers")):
        error = errors[f"background callback {name} failed on BATCH_END"]
        assert isinstance(error, SyncUsageError)
        assert message in str(error)
    assert isinstance(leftover[0].exception(), SyncUsageError)


@BACKENDS
def test_an_engine_entered_on_another_threads_loop_refuses(backend: str, state: SimpleNamespace) -> None:
    """Its mailboxes belong to that loop. The message names the callback and the way."""

    async def main() -> None:
        async with Engine(state, callbacks=[FakeCallback(delivery="background")]) as engine:
            engine.sync.run_event("init")  # on the thread of the loop, a plain event is fine
            with pytest.raises(SyncUsageError, match="callback fake is delivered in the background") as caught:
                await anyio.to_thread.run_sync(engine.sync.run_event, "fit_start")
            assert "anyio.from_thread.run(engine.run_event, ...)" in str(caught.value)

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_program_may_go_on_asynchronously(backend: str, state: SimpleNamespace) -> None:
    """What has its worker on the loop thread keeps it there; leaving the engine closes it all the same."""
    remote = Remote()
    engine = Engine(state, callbacks=[remote])

    async def main() -> None:
        async with engine:
            for state.loss in (1, 2):
                await engine.run_event("batch_end")

    state.loss = 0
    engine.sync.run_event("batch_end")
    anyio.run(main, backend=backend)
    report = engine.sync.close()

    assert (report.ok, remote.log) == (True, ["open", 0, 1, 2, "close", "post_close"])
    assert len(remote.loops) == 1


def test_a_program_that_forgets_to_close_still_ends() -> None:
    """The loop thread is a daemon, and nothing is printed about it."""
    done = run_script(
        """
        class Remote(Callback):
            delivery = "background"
            async def batch_end(self, state, logger): ...

        engine = Engine(callbacks=[Remote()])
        engine.sync.run_event("batch_end")
        print("end")
        """
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# ------------------------------------------------------------------------------------------------------------ a process


def run_script(body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a plain script in a process of its own, every warning an error."""
    script = (
        "import anyio, asyncio, os, signal, threading, time\n"
        "from eventbus_engine import *\n"
        "from eventbus_engine.testing import *\n"
    ) + textwrap.dedent(body)
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_plain_script() -> None:
    """Top to bottom, without a line about loops."""
    done = run_script(
        """
        @algorithm("before_loss")
        async def slow(event, state, logger):
            await anyio.sleep(0.01)
            return 7

        engine = Engine(algorithms=[slow])
        with engine.sync.pair("before_loss") as pair:
            print(pair.before["slow/BEFORE_LOSS"].exit_code)
        print(engine.sync.close().ok, threading.active_count())
        """
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "7\nTrue 1\n", "")


INTERRUPTED = """
    handler_state = []

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)  # the interrupt ends it

    async def apply(event, state, logger):
        handler_state.append("in")
        try:
            if {is_async}:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                await anyio.sleep(30)
            else:
                interrupt()
        finally:
            handler_state.append("out")

    def plain(event, state, logger):
        handler_state.append("in")
        try:
            interrupt()
        finally:
            handler_state.append("out")

    class Lived(Callback):
        async def close(self, state, logger):
            handler_state.append("closed")

    def cell():
        first = FakeAlgorithm("interrupted", match="init", apply=apply if {is_async} else plain)
        second = FakeAlgorithm("next", match="fit_start", apply=look)
        engine = Engine(object(), algorithms=[first, second], callbacks=[Lived()])
        started = time.monotonic()
        try:
            engine.sync.run_event("init")
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - started < 10)
        traces = engine.sync.run_event("fit_start")
        print(len(engine.bus._lanes), len(engine._active), traces["next/FIT_START"].exit_code)
        print(engine.sync.close().ok, handler_state, threading.active_count())

    async def look(event, state, logger):
        await anyio.lowlevel.checkpoint()
        return 7

    async def kernel():
        cell()

    {run}
"""


NOTEBOOK = "loop = asyncio.new_event_loop(); loop.run_until_complete(kernel()); loop.close()"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent with os.kill")
@pytest.mark.parametrize(
    ("run", "is_async"),
    [
        pytest.param("cell()", False, id="script-plain"),
        pytest.param("cell()", True, id="script-async"),
        pytest.param(NOTEBOOK, False, id="notebook-plain"),
        pytest.param(NOTEBOOK, True, id="notebook-async"),
        pytest.param("anyio.run(kernel, backend='trio')", True, id="trio-async"),
    ],
)
def test_an_interrupt_leaves_nothing_behind(run: str, is_async: bool) -> None:
    """Ctrl-C in a real process: the handler is cleaned up, the lane is free, and the engine goes on and closes."""
    done = run_script(INTERRUPTED.format(is_async=is_async, run=run))

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "interrupted True\n0 0 7\nTrue ['in', 'out', 'closed'] 1\n"


def test_an_interrupt_that_comes_before_the_loop_has_anything_leaves_nothing_either(
    state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the two cannot be hit on purpose with a signal, so here the loop itself raises."""

    def interrupted(loop: asyncio.BaseEventLoop) -> None:
        patch.undo()
        raise KeyboardInterrupt

    engine = Engine(state, algorithms=[FakeAlgorithm(apply=look_around)])
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "run_forever", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.sync.run_event("init")

    assert (state.log, len(engine.bus._lanes), len(engine._active), current_envelope()) == ([], 0, 0, None)
    engine.sync.run_event("init")
    assert engine.sync.close().ok


def test_an_interrupt_in_something_else_on_the_loop_cancels_the_event(state: SimpleNamespace) -> None:
    """What an earlier event has left there gets its turn as well, and may be what a signal hits."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def leave(event: EventName, state: Any, logger: Any) -> None:
        asyncio.get_running_loop().call_later(0, interrupt)

    async def suspend(event: EventName, state: Any, logger: Any) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            state.log.append("out")

    engine = Engine(
        state, algorithms=[FakeAlgorithm(match="init", apply=leave), FakeAlgorithm(match="fit_start", apply=suspend)]
    )
    engine.sync.run_event("init")
    with pytest.raises(KeyboardInterrupt):
        engine.sync.run_event("fit_start")

    assert (state.log, len(engine.bus._lanes), len(engine._active), current_envelope()) == (["out"], 0, 0, None)
    assert engine.sync.close().ok


@pytest.mark.parametrize("turns", range(4))
def test_an_interrupt_in_a_handler_cancels_the_others_of_its_event(
    turns: int, state: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it has suspended by then or not; nothing is left to be told of, by the loop least of all."""

    async def interrupted(event: EventName, state: Any, logger: Any) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise KeyboardInterrupt

    async def other(event: EventName, state: Any, logger: Any) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            state.log.append("out")

    engine = Engine(state, callbacks=[FakeCallback(hook=other), FakeCallback(hook=interrupted)])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.sync.run_event("batch_end")
    report = engine.sync.close()
    gc.collect()

    assert (state.log, len(engine.bus._lanes), len(engine._active), current_envelope()) == (["out"] * 2, 0, 0, None)
    assert (report.ok, caplog.messages) == (True, [])


def test_an_interrupt_that_comes_before_the_loop_thread_has_anything_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing to cancel, and nothing to wait for."""
    thread = LoopThread()
    real, calls = thread._loop.call_soon_threadsafe, list[Any]()

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    coroutine = asyncio.sleep(10)
    with pytest.raises(KeyboardInterrupt):
        thread.run(coroutine, copy_context())
    thread.stop(5)

    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_what_a_call_on_the_loop_thread_raises_comes_back() -> None:
    """To who waits for it, and to nobody else."""
    thread = LoopThread()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    thread.stop(5)


# --------------------------------------------------------------------------------------------------------- many threads


@pytest.mark.parametrize("apply", [plain, look_around], ids=["plain", "async"])
def test_two_threads_take_turns(apply: Any, state: SimpleNamespace) -> None:
    """Their events never overlap, and each gets its own traces."""
    overlap: list[str] = []
    busy = threading.Lock()
    errors: list[BaseException] = []

    async def alone(event: EventName, state: Any, logger: Any) -> int:
        if not busy.acquire(blocking=False):
            overlap.append(event.value)
            return 0
        result = apply(event, state, logger)
        await (result if apply is look_around else anyio.lowlevel.checkpoint())
        busy.release()
        return threading.get_ident()

    engine = Engine(state, algorithms=[FakeAlgorithm(apply=alone)])

    def run() -> None:
        for _ in range(50):
            if engine.sync.run_event("batch_end")["fake/BATCH_END"].exit_code != threading.get_ident():
                errors.append(AssertionError("somebody else's traces"))  # noqa: PERF401

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.sync.close()

    assert (overlap, errors, len(state.log)) == ([], [], 200)


def test_the_envelope_is_there_in_every_handler(state: SimpleNamespace) -> None:
    """Also before there is a loop, and none is left afterwards."""
    seen: list[Any] = []

    @algorithm("init")
    def note(event: EventName, state: Any, logger: Any) -> None:
        seen.append(current_envelope())

    @callback("init")
    async def note_too(event: EventName, state: Any, logger: Any) -> None:
        seen.append(current_envelope())

    engine = Engine(state, algorithms=[note], callbacks=[note_too])
    engine.sync.run_event("init")
    engine.sync.close()

    assert [envelope.event for envelope in seen] == [Event.INIT, Event.INIT]
    assert current_envelope() is None


def test_a_destination_that_fails_is_logged(state: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """And the caller gets its traces."""

    class Broken(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise OSError("disk full")

    def log(event: EventName, state: Any, logger: Any) -> None:
        logger.log_metrics({"loss": 1.0})

    engine = Engine(state, algorithms=[FakeAlgorithm(apply=log)], callbacks=[Broken()])
    traces = engine.sync.run_event("batch_end")
    engine.sync.close()

    assert traces["fake/BATCH_END"].outcome == "ok"
    assert "destination broken failed on BATCH_END" in caplog.messages
