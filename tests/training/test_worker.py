"""The compute worker: one thread, the caller's context, and no caller that leaves before its work is done."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from eventbus_engine.errors import EngineClosedError
from eventbus_engine.training.worker import ComputeWorker, InlineWorker, Worker

pytestmark = pytest.mark.anyio

flavour: contextvars.ContextVar[str] = contextvars.ContextVar("flavour", default="plain")


@pytest.fixture
def worker() -> Iterator[ComputeWorker]:
    """A worker that is gone after the test."""
    compute = ComputeWorker()
    yield compute
    assert compute.close()


@pytest.fixture(params=[ComputeWorker, InlineWorker])
def any_worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """Either worker: what they promise in common."""
    compute: Worker = request.param()
    yield compute
    assert compute.close()


class Gate:
    """Holds work on the thread until the test lets it go, and says when it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()
        self.passed = False

    def __call__(self) -> str:
        self.begun.set()
        if not self.opened.wait(timeout=10):
            raise TimeoutError("nobody opened the gate")
        self.passed = True
        return "through"

    async def wait_begun(self) -> None:
        """Wait, off the event loop, until the work is on the thread."""
        if not await anyio.to_thread.run_sync(self.begun.wait, 10):
            raise TimeoutError("the work never began")


async def test_a_result_comes_back(any_worker: Worker) -> None:
    """Positional arguments go in, the result comes out."""
    actual = await any_worker.run(divmod, 17, 5)

    assert actual == (3, 2)


async def test_an_exception_comes_back_as_itself(any_worker: Worker) -> None:
    """Neither worker wraps what the function raises."""
    error = KeyError("loss")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        await any_worker.run(fail)

    assert caught.value is error


async def test_the_callers_context_is_seen_and_left_alone(any_worker: Worker) -> None:
    """The function reads the caller's variables; what it sets stays in its own copy."""

    def read_and_set() -> str:
        seen = flavour.get()
        flavour.set("changed")
        return seen

    token = flavour.set("vanilla")
    seen = await any_worker.run(read_and_set)
    after = flavour.get()
    flavour.reset(token)

    assert (seen, after) == ("vanilla", "vanilla")


async def test_everything_runs_on_one_thread_that_is_not_the_loops(worker: ComputeWorker) -> None:
    """Also with several callers at once."""
    threads: set[int] = set()

    async def call() -> None:
        for _ in range(5):
            threads.add(await worker.run(threading.get_ident))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(call)

    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident()})


async def test_the_inline_worker_stays_on_the_callers_thread() -> None:
    """That is what offload=False asks for."""
    actual = await InlineWorker().run(threading.get_ident)

    assert actual == threading.get_ident()


async def test_work_runs_in_order_of_arrival(worker: ComputeWorker) -> None:
    """The thread is the only one to issue collectives, so their order must be the callers'."""
    gate, order = Gate(), list[int]()

    async def submit(number: int) -> None:
        await worker.run(order.append, number)

    async with anyio.create_task_group() as group:
        group.start_soon(worker.run, gate)
        await gate.wait_begun()
        for number in range(20):
            group.start_soon(submit, number)
            await anyio.wait_all_tasks_blocked()
        gate.opened.set()

    assert order == list(range(20))


async def test_the_loop_keeps_beating_while_work_runs(worker: ComputeWorker) -> None:
    """The work ends only after the loop has gone round a hundred times: a blocked loop would never get there."""
    gate, beats = Gate(), 0

    async with anyio.create_task_group() as group:
        group.start_soon(worker.run, gate)
        while beats < 100:
            await anyio.lowlevel.checkpoint()
            beats += 1
        gate.opened.set()

    assert (beats, gate.passed) == (100, True)


async def test_a_cancelled_caller_waits_for_work_that_has_begun(worker: ComputeWorker) -> None:
    """A thread cannot be interrupted, so the scope ends only when the work has."""
    gate, returned, passed_before = Gate(), False, True

    async def call() -> None:
        nonlocal returned
        await worker.run(gate)
        returned = True

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await gate.wait_begun()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
        passed_before = gate.passed
        gate.opened.set()

    assert (passed_before, gate.passed, returned) == (False, True, False)


async def test_work_that_only_queues_is_withdrawn_on_cancellation(worker: ComputeWorker) -> None:
    """It has not begun, so there is nothing to wait for, and it never runs."""
    gate, ran = Gate(), list[str]()

    async with anyio.create_task_group() as outer:
        outer.start_soon(worker.run, gate)
        await gate.wait_begun()
        async with anyio.create_task_group() as inner:
            inner.start_soon(worker.run, ran.append, "never")
            await anyio.wait_all_tasks_blocked()
            inner.cancel_scope.cancel()
        gate.opened.set()
    await worker.run(ran.append, "afterwards")

    assert ran == ["afterwards"]


async def test_a_failure_during_cancellation_is_not_swallowed(worker: ComputeWorker) -> None:
    """The step ran out of memory while it was being cancelled: that is what the caller has to hear."""
    gate = Gate()

    def fail() -> None:
        gate()
        raise MemoryError("out of memory")

    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012 -- the group raises on the way out
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run, fail)
            await gate.wait_begun()
            group.cancel_scope.cancel()
            gate.opened.set()

    assert caught.group_contains(MemoryError, match="out of memory")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_repeated_asyncio_cancellations_do_not_pierce_the_wait(worker: ComputeWorker) -> None:
    """Task.cancel goes through anyio's shields; the worker waits all the same, and raises it at the end."""
    import asyncio

    gate = Gate()
    task = asyncio.create_task(worker.run(gate))
    await gate.wait_begun()
    for _ in range(3):
        task.cancel()
        await anyio.wait_all_tasks_blocked()
    done_early = task.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert (done_early, gate.passed) == (False, True)


async def test_nothing_starts_in_a_scope_already_cancelled(worker: ComputeWorker) -> None:
    """`run` is a checkpoint like any other."""
    ran = list[int]()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await worker.run(ran.append, 1)

    assert ran == []


async def test_a_nested_run_on_the_thread_is_inline(worker: ComputeWorker) -> None:
    """Work that drives a coroutine which asks for the same worker must not wait for itself."""

    def step_to_the_end(start: Callable[[], Awaitable[int]]) -> int:
        iterator = start().__await__()
        try:
            next(iterator)
        except StopIteration as stop:
            return int(stop.value)
        raise AssertionError("the nested run suspended")

    actual = await worker.run(step_to_the_end, lambda: worker.run(threading.get_ident))

    assert actual == await worker.run(threading.get_ident)


async def test_close_joins_the_thread_and_refuses_more(any_worker: Worker) -> None:
    """Closing twice is fine; working afterwards is a typed error with the cure."""
    await any_worker.run(int)
    before = {thread.name for thread in threading.enumerate()}
    closed = any_worker.close(), any_worker.close()
    after = {thread.name for thread in threading.enumerate()}

    assert closed == (True, True)
    assert "eventbus-engine-compute" not in after
    assert ("eventbus-engine-compute" in before) == isinstance(any_worker, ComputeWorker)
    with pytest.raises(EngineClosedError, match="make a new Trainer"):
        await any_worker.run(int)


async def test_no_thread_before_the_first_work() -> None:
    """A trainer that never trains starts nothing."""
    before = threading.active_count()
    worker = ComputeWorker()
    after = threading.active_count()

    assert (after, worker.close()) == (before, True)


async def test_nothing_of_finished_work_stays_alive(worker: ComputeWorker) -> None:
    """Neither the waiting thread nor a failed call keeps its arguments: they are batches and graphs."""

    class Batch:
        pass

    def fail(batch: Batch) -> None:
        raise ValueError("bad batch")

    async def lose_one(function: Callable[[Batch], object]) -> weakref.ref[Batch]:
        batch = Batch()
        try:
            await worker.run(function, batch)
        except ValueError:
            pass
        return weakref.ref(batch)

    gc.disable()
    try:
        finished, failed = await lose_one(id), await lose_one(fail)
        await worker.run(int)
        alive = finished(), failed()
    finally:
        gc.enable()

    assert alive == (None, None)
