"""`instrument` in an async loop: the same events, awaited, and the computations on a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import Tensor, nn
from torch.nn import functional

from eventbus_adapters.torch_loop import AsyncTorchLoop, instrument
from eventbus_engine import Algorithm, Callback, Engine, Event, EventName
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry import PrivateIdGenerator
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop

pytestmark = pytest.mark.anyio

BATCH = (
    "before_dataloader after_dataloader batch_start before_train_batch before_forward after_forward before_loss "
    "after_loss before_backward after_backward after_train_batch batch_end batch_checkpoint"
).split()
EPOCH = ["epoch_start", *BATCH, *BATCH, "before_dataloader", "epoch_end", "epoch_checkpoint"]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and results stay comparable across machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Recorder(Callback[Any]):
    """Keeps the names of the events; async, so that they really are awaited."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def run_event(self, event: EventName, state: Any, logger: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self.events.append(event.value)


def new_batches() -> list[tuple[Tensor, Tensor]]:
    """Two batches of six samples."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(2)]


class Program:
    """Somebody's async loop."""

    def __init__(self, *algorithms: Any, state: Any = None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches: Any = new_batches()
        self.recorder = Recorder()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.engine: Engine[Any] = Engine(
            state, algorithms=algorithms, callbacks=[self.recorder], tracer_provider=provider
        )
        self.losses: list[float] = []

    def instrument(self, **options: Any) -> Any:
        return instrument(self.engine, self.model, self.optimizer, self.batches, functional.cross_entropy, **options)

    async def train(self, loop: AsyncTorchLoop) -> None:
        """An epoch."""
        async for inputs, targets in loop:
            self.optimizer.zero_grad()
            loss = await loop.loss(await loop.forward(inputs), targets)
            await loop.backward(loss)
            await loop.step()
            self.losses.append(loss.item())

    async def run(self, epochs: int = 1, **options: Any) -> None:
        async with self.instrument(**options) as loop:
            for _ in range(epochs):
                await self.train(loop)

    def outcomes(self, name: str) -> list[Any]:
        """The outcomes of the spans of a name, in the order of their ends."""
        spans = self.exporter.get_finished_spans()
        return [span.attributes["eventbus.outcome"] for span in spans if span.name == name and span.attributes]


async def test_an_async_loop_publishes_what_a_blocking_one_does() -> None:
    """Awaited, in the same order."""
    program = Program()

    await program.run(epochs=2)

    assert program.recorder.events == ["init", "fit_start", *EPOCH, *EPOCH, "fit_end"]


async def test_an_async_loop_without_algorithms_is_the_bare_loop_bit_for_bit() -> None:
    """Although it computes on another thread."""
    torch.manual_seed(5)
    program = Program()
    await program.run(epochs=2)

    torch.manual_seed(5)
    bare = Program()
    expected: list[float] = []
    for _ in range(2):
        for inputs, targets in bare.batches:
            bare.optimizer.zero_grad()
            loss = functional.cross_entropy(bare.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            bare.optimizer.step()
            expected.append(loss.item())

    assert program.losses == expected


async def test_the_event_loop_keeps_beating_while_the_loop_computes() -> None:
    """Forward pass, plain algorithms and all run on one other thread, and the event loop on its own."""
    threads: set[int] = set()
    beats: list[bool] = []

    class Note(Algorithm[Any, Any]):
        def match(self, event: Event, state: Any) -> bool:
            return event == Event.BEFORE_FORWARD

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            threads.add(threading.get_ident())

    program = Program(Note())
    beat = threading.Event()

    def slow(module: nn.Module, args: Any) -> None:
        threads.add(threading.get_ident())
        beats.append(beat.wait(10))

    program.model.register_forward_pre_hook(slow)

    async def set_beat() -> None:
        while not beats:
            await anyio.sleep(0.001)
            beat.set()

    async with anyio.create_task_group() as group:
        group.start_soon(set_beat)
        await program.run()

    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert beats == [True, True]
    assert program.engine.offload is None


async def test_the_trainers_algorithms_work_in_an_async_loop() -> None:
    """What they change reaches the awaited calls."""
    program = Program(LabelSmoothing(1.0), SelectiveBackprop(start=0.0, end=1.0, interrupt=0))
    sizes: list[int] = []
    program.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))

    await program.run(max_duration="1ep")

    assert sizes == [6, 3, 6, 3]  # the whole batch to choose from, then the chosen half
    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


async def test_an_async_loader_is_awaited_and_left_in_order() -> None:
    """It is closed when the loop breaks out of its epoch."""
    closed: list[str] = []

    class Loader:
        async def __aiter__(self) -> AsyncIterator[Any]:
            try:
                for batch in new_batches():
                    await anyio.lowlevel.checkpoint()
                    yield batch
            finally:
                closed.append("closed")

    program = Program()
    program.batches = Loader()

    async with program.instrument() as loop:
        await program.train(loop)
        async for _ in loop:
            break

    short = ["epoch_start", *BATCH[:4], *BATCH[10:], "epoch_end", "epoch_checkpoint"]
    assert program.recorder.events == ["init", "fit_start", *EPOCH, *short, "fit_end"]
    assert closed == ["closed", "closed"]


async def test_an_error_in_an_async_loop_leaves_failed_spans_and_cleans_up() -> None:
    """The call that raised, its batch and its epoch have failed; the next loop can begin."""
    program = Program()

    async def run() -> None:
        async with program.instrument() as loop:
            async for _ in loop:
                await loop.forward(torch.zeros(6, 5))

    with pytest.raises(RuntimeError, match="shapes"):
        await run()

    assert [program.outcomes(name)[-1:] for name in ("forward", "batch", "epoch")] == [["failed"]] * 3
    assert program.recorder.events[-1] == "before_forward"
    program.recorder.events.clear()
    await program.run()
    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


async def test_a_cancelled_loop_leaves_cancelled_spans_and_cleans_up() -> None:
    """Cancellation comes through, and publishes nothing on its way."""
    program = Program()

    with anyio.CancelScope() as scope:
        async with program.instrument() as loop:
            async for _ in loop:
                scope.cancel()
                await anyio.sleep(60)

    assert scope.cancelled_caught
    assert program.outcomes("batch")[-1:] == ["cancelled"]
    assert program.recorder.events[-1] == "before_train_batch"
    await program.run()


async def test_a_step_that_raises_fails_its_span() -> None:
    """And comes through."""
    program = Program()

    def broken(*args: Any) -> None:
        raise RuntimeError("no memory")

    program.optimizer.register_step_pre_hook(broken)
    with pytest.raises(RuntimeError, match="no memory"):
        await program.run()

    assert program.outcomes("optimizer") == ["failed"]


async def test_explicit_pairs_work_in_an_async_loop() -> None:
    """Around calls of the loop's own, on the thread it likes."""
    program = Program()
    engine = program.engine

    async with program.instrument() as loop:
        async for inputs, targets in loop:
            program.optimizer.zero_grad()
            async with engine.pair(Event.BEFORE_FORWARD):
                loop.state.outputs = program.model(inputs)
            async with engine.pair(Event.BEFORE_LOSS):
                loop.state.loss = functional.cross_entropy(loop.state.outputs, targets)
            async with engine.pair(Event.BEFORE_BACKWARD):
                loop.state.loss.backward()
            await loop.step()

    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


async def test_outside_a_batch_the_calls_publish_nothing() -> None:
    """Between epochs they are what they wrap."""
    program = Program()

    async with program.instrument() as loop:
        outputs = await loop.forward(torch.zeros(2, 4))
        await loop.backward(await loop.loss(outputs, torch.zeros(2, dtype=torch.long)))
        await loop.step()

    assert program.recorder.events == ["init", "fit_start", "fit_end"]
    assert outputs.shape == (2, 3)


async def test_a_state_that_does_not_compute_gets_its_computations_inline() -> None:
    """There is no thread to run them on, and none is made behind its back."""
    threads: set[int] = set()
    program = Program(state=SimpleNamespace())
    program.model.register_forward_pre_hook(lambda module, args: threads.add(threading.get_ident()))

    await program.run()

    assert threads == {threading.get_ident()}
    assert program.recorder.events == ["fit_start", *EPOCH, "fit_end"]


async def test_an_async_loop_that_cannot_start_says_so_and_leaves_nothing_behind() -> None:
    """A failing INIT ends the run before it has begun."""

    class Replace(Algorithm[Any, Any]):
        def match(self, event: Event, state: Any) -> bool:
            return event == Event.INIT

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            state.model = nn.Identity()

    program = Program(Replace())

    with pytest.raises(ConfigurationError, match="replaced the model on INIT"):
        await program.run()

    program.engine = Engine()
    await program.run()
