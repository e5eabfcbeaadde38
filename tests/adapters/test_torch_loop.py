"""`instrument`: a hand-written blocking loop publishes its events, and what algorithms change reaches it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eventbus_adapters.torch_loop import TorchLoop, instrument
from eventbus_engine import Algorithm, Callback, CallbackErrors, Engine, Event, EventName, Logger
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.telemetry import PrivateIdGenerator
from eventbus_engine.training import State
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop

Batches = list[tuple[Tensor, Tensor]]

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
    """Keeps the names of the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: EventName, state: Any, logger: Any) -> None:
        self.events.append(event.value)


class Change(Algorithm[Any, Any]):
    """Runs a function of the state on one event."""

    def __init__(self, event: Event, function: Callable[[Any], object], name: str = "change") -> None:
        self.event, self.function, self.name = event, function, name

    def match(self, event: Event, state: Any) -> bool:
        return event == self.event

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        self.function(state)


def fail(state: Any) -> None:
    """Raise."""
    raise ZeroDivisionError("no samples")


def new_model() -> nn.Module:
    """The same small classifier each time; its dropout draws from the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def new_batches(count: int = 2) -> Batches:
    """Batches of six samples with four features and one of three classes."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(count)
    ]


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many hooks there are: what `instrument` must leave none of."""
    registries: list[Any] = [model.__dict__[name] for name in ("_forward_pre_hooks", "_forward_hooks")]
    registries += [optimizer.__dict__[name] for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    return sum(len(registry) for registry in registries)


class Program:
    """Somebody's loop, with a model, an optimizer and data of its own."""

    def __init__(self, *algorithms: Any, callbacks: tuple[Any, ...] = (), **options: Any) -> None:
        self.recorder = Recorder()
        self.model = new_model()
        self.optimizer = new_optimizer(self.model)
        self.batches: Any = new_batches()
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.engine: Engine[Any] = Engine(
            algorithms=algorithms, callbacks=[self.recorder, *callbacks], tracer_provider=self.provider
        )
        self.options: dict[str, Any] = {"loss": functional.cross_entropy} | options
        self.losses: list[float] = []

    def instrument(self, **options: Any) -> Any:
        return instrument(self.engine, self.model, self.optimizer, self.batches, **self.options | options)

    def train(self, loop: TorchLoop) -> None:
        """An epoch, exactly as one writes it."""
        for inputs, targets in loop:
            self.optimizer.zero_grad()
            loss = loop.loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def run(self, epochs: int = 1) -> None:
        with self.instrument() as loop:
            for _ in range(epochs):
                self.train(loop)

    def close(self) -> None:
        """What takes an event loop leaves one open until then."""
        self.engine.sync.close()

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def outcomes(self, name: str) -> list[Any]:
        """The outcomes of the spans of a name, in the order of their ends."""
        return [span.attributes["eventbus.outcome"] for span in self.spans if span.name == name and span.attributes]


# ------------------------------------------------------------------------------------------------------------- events


def test_a_loop_publishes_the_events_of_training_in_their_order() -> None:
    """Two epochs of two batches, with the fetch that finds the data at its end."""
    program = Program()

    program.run(epochs=2)

    assert program.recorder.events == ["init", "fit_start", *EPOCH, *EPOCH, "fit_end"]
    assert hooks_of(program.model, program.optimizer) == 0


def test_the_timestamp_counts_batches_samples_and_epochs() -> None:
    """A batch counts from BATCH_END on, an epoch from EPOCH_END on."""
    seen: list[tuple[int, ...]] = []

    def note(state: Any) -> None:
        now = state.timestamp
        seen.append((int(now.epoch), int(now.batch), int(now.batch_in_epoch), int(now.sample)))

    events = (Event.BATCH_START, Event.BATCH_END, Event.EPOCH_END)
    program = Program(*[Change(event, note, event.value) for event in events])

    program.run()

    assert seen == [(0, 0, 0, 0), (0, 1, 1, 6), (0, 1, 1, 6), (0, 2, 2, 12), (1, 2, 0, 12)]


def test_algorithms_run_in_the_order_of_the_passes() -> None:
    """Mirrored after the call, pinned where they are pinned, whatever the registration order."""
    ran: list[str] = []

    class Note(Algorithm[Any, Any]):
        name: str | None = "note"

        def match(self, event: Event, state: Any) -> bool:
            return event in (Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS)

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            ran.append(f"{self.name} {event.value}")

    class Blend(Note):
        name = "blend"

    class Pick(Note):
        name, pin = "pick", "first"

    program = Program(Blend(), Pick(), Note())
    program.batches = new_batches(1)

    program.run()

    assert ran == [
        *["pick after_dataloader", "note after_dataloader", "blend after_dataloader"],
        *["pick before_loss", "blend before_loss", "note before_loss"],
        *["pick after_loss", "note after_loss", "blend after_loss"],
    ]


def test_async_algorithms_and_background_callbacks_take_part_in_a_blocking_loop() -> None:
    """`engine.sync` gives them a loop when they need one."""
    ran: list[str] = []

    class Slow(Algorithm[Any, Any]):
        def match(self, event: Event, state: Any) -> bool:
            return event == Event.AFTER_FORWARD

        async def apply(self, event: Event, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            ran.append("slow")

    class Remote(Callback[Any]):
        delivery, snapshot = "background", ("loss",)

        async def batch_end(self, state: Any, logger: Any) -> None:
            ran.append(f"batch {int(state.timestamp.batch)} {state.loss.item():.6f}")

    program = Program(Slow(), callbacks=(Remote(),))

    program.run()
    program.close()

    assert sorted(ran) == [*[f"batch {i + 1} {loss:.6f}" for i, loss in enumerate(program.losses)], "slow", "slow"]


def test_a_step_that_accumulates_gradients_publishes_each_backward_pass() -> None:
    """What is made of a loss is a tensor of its own: `loop.backward` knows what it is."""
    program = Program()
    program.batches = new_batches(1)

    with program.instrument() as loop:
        for inputs, targets in loop:
            for half in (slice(3), slice(3, 6)):
                loss = loop.loss(program.model(inputs[half]), targets[half])
                loop.backward(loss / 2)
            program.optimizer.step()

    twice = [*BATCH[4:10], *BATCH[4:10]]
    assert program.recorder.events[3:-4] == [*BATCH[:4], *twice, *BATCH[10:]]


def test_a_closure_of_the_optimizer_publishes_the_calls_it_makes() -> None:
    """LBFGS calls the model inside its step."""
    program = Program()
    optimizer: Any = torch.optim.LBFGS(program.model.parameters(), max_iter=1)
    program.optimizer = optimizer
    program.batches = new_batches(1)

    with program.instrument() as loop:
        for inputs, targets in loop:

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Any:
                program.optimizer.zero_grad()
                loss = loop.loss(program.model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)

    assert program.recorder.events[3:-4] == [*BATCH[:4], "after_train_batch", *BATCH[4:10], *BATCH[11:]]


def test_a_loss_that_is_a_module_publishes_wherever_it_is_called() -> None:
    """With a criterion, the loader is all that changes in the loop."""
    criterion = nn.CrossEntropyLoss()
    program = Program(loss=criterion)

    with program.instrument() as loop:
        for inputs, targets in loop:
            program.optimizer.zero_grad()
            criterion(program.model(inputs), targets).backward()
            program.optimizer.step()

    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


def test_what_an_evaluation_calls_is_no_part_of_the_training() -> None:
    """Without gradients, inside a batch as well as between epochs."""
    program = Program()

    with program.instrument() as loop:
        for inputs, targets in loop:
            program.optimizer.zero_grad()
            loop.loss(program.model(inputs), targets).backward()
            program.optimizer.step()
            with torch.no_grad():
                loop.loss(program.model(inputs), targets)
        loop.loss(program.model(torch.zeros(1, 4)), torch.zeros(1, dtype=torch.long)).backward()

    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


def test_what_an_algorithm_calls_is_no_part_of_the_loop() -> None:
    """SelectiveBackprop runs the model on AFTER_DATALOADER; an event from there would wait for itself."""
    program = Program(
        SelectiveBackprop(start=0.0, end=1.0, interrupt=0),
        Change(Event.BATCH_START, lambda state: state.model(state.batch[0])),
        max_duration="1ep",
    )

    program.run()
    program.close()

    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


def test_a_model_that_calls_itself_publishes_one_forward_pass() -> None:
    """The inner call is part of the outer one."""

    class Twice(nn.Linear):
        deep = False

        def forward(self, input: Tensor) -> Tensor:
            self.deep = not self.deep
            return self(super().forward(input)) if self.deep else super().forward(input)

    program = Program()
    program.model = Twice(4, 4)
    program.optimizer = new_optimizer(program.model)

    program.run()

    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


# ---------------------------------------------------------------------------------------------------- what reaches it


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH])
def test_the_loop_gets_the_batch_that_the_algorithms_left(event: Event) -> None:
    """Whatever changed it, up to the moment it is handed over."""

    def halve(state: Any) -> None:
        state.batch = tuple(part[:3] for part in state.batch)

    program = Program(Change(event, halve))
    with program.instrument() as loop:
        sizes = [(len(inputs), len(targets)) for inputs, targets in loop]

    assert sizes == [(3, 3), (3, 3)]


def test_a_changed_input_reaches_the_model() -> None:
    """BEFORE_FORWARD comes after the loop has its batch in hand; the argument is exchanged."""
    got: list[Tensor] = []
    program = Program(Change(Event.BEFORE_FORWARD, lambda state: state.batch_set_item(0, torch.zeros(6, 4))))
    program.model.register_forward_pre_hook(lambda module, args: got.append(args[0]))

    program.run()

    assert [float(inputs.abs().sum()) for inputs in got] == [0.0, 0.0]


def test_smoothed_labels_reach_the_loss() -> None:
    """LabelSmoothing changes the targets on BEFORE_LOSS and puts them back after: the Trainer's own algorithm works."""
    torch.manual_seed(3)
    program = Program(LabelSmoothing(0.3))
    program.run()

    torch.manual_seed(3)
    model = new_model()
    optimizer = new_optimizer(model)
    expected = []
    for inputs, targets in new_batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), functional.one_hot(targets, 3) * 0.7 + 0.1)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())

    assert program.losses == pytest.approx(expected, abs=1e-6)


def test_changed_outputs_and_a_changed_loss_reach_the_loop() -> None:
    """AFTER_FORWARD, BEFORE_LOSS and AFTER_LOSS each may replace what comes next."""

    def add(attribute: str, value: float) -> Callable[[Any], None]:
        return lambda state: setattr(state, attribute, getattr(state, attribute) + value)

    program = Program(
        Change(Event.AFTER_FORWARD, add("outputs", 1), "a"),
        Change(Event.BEFORE_LOSS, add("outputs", 2), "b"),
        Change(Event.AFTER_LOSS, add("loss", 4), "c"),
        loss=lambda outputs, targets: outputs.mean(),
    )
    program.model = nn.Identity()
    program.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    with program.instrument() as loop:
        found = [loop.loss(program.model(torch.zeros_like(inputs)), targets) for inputs, targets in loop]

    assert [float(loss) for loss in found] == [7.0, 7.0]


def test_the_backward_pass_starts_from_the_loss_that_the_algorithms_left() -> None:
    """A scaled loss gives scaled gradients, though the loop calls `loss.backward()` on its own."""

    def scale(state: Any) -> None:
        state.loss = state.loss * 10

    gradients: list[float] = []
    for algorithms in ((), (Change(Event.BEFORE_BACKWARD, scale),)):
        torch.manual_seed(0)
        program = Program(*algorithms)
        program.batches = new_batches(1)
        program.run()
        weight: Any = program.model.get_parameter("0.weight").grad
        gradients.append(float(weight.norm()))

    assert gradients[1] == pytest.approx(10 * gradients[0], rel=1e-5)


def test_of_one_tensor_in_two_places_the_changed_one_counts() -> None:
    """An autoencoder's batch is (x, x)."""
    program = Program(
        Change(Event.BEFORE_FORWARD, lambda state: state.batch_set_item(0, state.batch[0] + 1)),
        loss=functional.mse_loss,
    )
    program.model = nn.Linear(4, 4)
    program.optimizer = new_optimizer(program.model)
    program.batches = [(inputs, inputs) for inputs, _ in new_batches(1)]
    got: list[Tensor] = []
    program.model.register_forward_pre_hook(lambda module, args: got.append(args[0]))

    program.run()

    assert torch.equal(got[0], program.batches[0][0] + 1)


def test_mappings_and_keyword_arguments_are_exchanged_alike() -> None:
    """The parts of a batch are known wherever in it they are."""

    class Keyword(nn.Linear):
        def forward(self, *, features: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(features)

    def zero(state: Any) -> None:
        state.batch = {"in": {"features": torch.zeros(6, 4)}, "labels": state.batch["labels"]}

    program = Program(Change(Event.BEFORE_FORWARD, zero))
    program.model = Keyword(4, 3, bias=False)
    program.optimizer = new_optimizer(program.model)
    program.batches = [{"in": {"features": inputs}, "labels": targets} for inputs, targets in new_batches()]

    with program.instrument() as loop:
        outputs = [program.model(features=batch["in"]["features"]) for batch in loop]

    assert [float(found.detach().abs().sum()) for found in outputs] == [0.0, 0.0]


def test_a_change_that_would_not_reach_the_loop_is_an_error() -> None:
    """The loop calls with copies, so that smoothed labels would be smoothed for nothing."""
    program = Program(LabelSmoothing())

    def run() -> None:
        with program.instrument() as loop:
            for inputs, targets in loop:
                loop.loss(program.model(inputs), targets.clone())

    with pytest.raises(BatchError, match=r"changed state.batch on BEFORE_LOSS.*would be lost"):
        run()

    assert program.outcomes("loss") == ["failed"]


def test_a_batch_without_the_part_that_the_loop_uses_is_an_error() -> None:
    """It names what the batch has become."""
    program = Program(Change(Event.BEFORE_FORWARD, lambda state: setattr(state, "batch", [])))

    with pytest.raises(BatchError, match=r"state.batch into list\(\), which has no item 0"):
        program.run()


def test_a_loop_without_algorithms_is_the_bare_loop_bit_for_bit() -> None:
    """Shuffling, dropout, tracing and all: nothing draws from the generators but the training."""

    def new_loader() -> DataLoader[Any]:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(1)
        features, labels = torch.randn(32, 4, generator=generator), torch.arange(32) % 3
        return DataLoader(TensorDataset(features, labels), batch_size=8, shuffle=True)

    program = Program()
    program.batches = new_loader()
    program.run(epochs=3)

    bare: list[float] = []
    model = new_model()
    optimizer = new_optimizer(model)
    loader = new_loader()
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            bare.append(loss.item())

    assert program.losses == bare
    assert all(map(torch.equal, program.model.state_dict().values(), model.state_dict().values()))


# ------------------------------------------------------------------------------------------------------------- errors


def test_rule_5_1_an_algorithms_error_comes_through_the_model_as_itself() -> None:
    """With its note and the traces so far; the batch has failed, and nothing stays behind."""
    program = Program(Change(Event.BEFORE_FORWARD, fail), Change(Event.BEFORE_FORWARD, fail, "later"))

    with pytest.raises(ZeroDivisionError, match="no samples") as caught:
        program.run()

    traces = caught.value.traces  # type: ignore[attr-defined]
    assert caught.value.__notes__ == ["in algorithm change on BEFORE_FORWARD"]
    assert {key: trace.outcome for key, trace in traces.items()} == {
        "change/BEFORE_FORWARD": "failed",
        "later/BEFORE_FORWARD": "skipped",
    }
    assert program.recorder.events[-1] == "before_train_batch"
    assert program.outcomes("batch") == ["failed", "failed"]  # the pair of events, and the unit around it
    assert program.outcomes("epoch") == ["failed"]
    assert hooks_of(program.model, program.optimizer) == 0


@pytest.mark.parametrize("event", ["after_forward", "after_loss", "after_backward", "batch_end", "fit_end"])
def test_rule_5_2_callbacks_errors_come_through_from_every_point(event: str) -> None:
    """As the group that the engine makes of them."""

    class Broken(Callback[Any]):
        def run_event(self, event_now: EventName, state: Any, logger: Any) -> None:
            if event_now.value == event:
                raise ValueError(event)

    program = Program(callbacks=(Broken(),))

    with pytest.raises(CallbackErrors) as caught:
        program.run()

    assert [str(error) for error in caught.value.exceptions] == [event]
    assert program.recorder.events[-1] == event
    assert hooks_of(program.model, program.optimizer) == 0


def test_an_error_in_the_loop_leaves_a_failed_batch_and_cleans_up() -> None:
    """No events are published on the way out; the engine is ready for the next loop."""
    program = Program()

    def run() -> None:
        with program.instrument() as loop:
            for _ in loop:
                raise KeyError("mine")

    with pytest.raises(KeyError):
        run()

    assert program.recorder.events[-1] == "before_train_batch"
    assert program.outcomes("batch") == ["failed", "failed"]
    program.recorder.events.clear()
    program.run()
    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


def test_an_error_of_the_model_fails_its_forward_pass_even_if_the_loop_goes_on() -> None:
    """A loop that skips what it has no memory for keeps its batches, and the trace shows which call it was."""
    program = Program()
    program.batches = [(torch.zeros(6, 5), torch.zeros(6, dtype=torch.long)), *new_batches(1)]

    with program.instrument() as loop:
        for inputs, targets in loop:
            try:
                loss = loop.loss(program.model(inputs), targets)
            except RuntimeError:
                continue
            loss.backward()
            program.optimizer.step()

    assert program.outcomes("forward") == ["failed", "ok"]
    assert program.outcomes("train_batch") == ["ok", "ok"]
    assert program.recorder.events[-1] == "fit_end"


def test_a_step_that_raised_and_was_caught_shows_as_failed() -> None:
    """Torch calls no hook after it, so that the end of the batch finds it open."""
    program = Program()
    program.batches = new_batches(1)

    def broken() -> float:
        raise RuntimeError("no memory")

    with program.instrument() as loop:
        for _ in loop:
            with pytest.raises(RuntimeError):
                program.optimizer.step(broken)

    assert program.outcomes("optimizer") == ["failed"]
    assert program.recorder.events[-1] == "fit_end"


def test_an_error_of_the_data_comes_through() -> None:
    """The fetch has failed, and so has its batch."""

    def broken() -> Iterator[Any]:
        yield from new_batches(1)
        raise OSError("disk")

    program = Program()
    program.batches = broken()

    with pytest.raises(OSError, match="disk"):
        program.run()

    assert program.outcomes("dataloader") == ["ok", "failed"]


def test_errors_of_loss_backward_and_step_methods_fail_their_spans() -> None:
    """The explicit calls behave as the hooked ones."""
    program = Program(hooks=False)
    program.batches = new_batches(1)
    program.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    program.optimizer.register_step_pre_hook(broken)
    with program.instrument(loss=broken) as loop:
        for _ in loop:
            for call in (lambda: loop.loss(1), lambda: loop.backward(torch.zeros(2)), loop.step):
                with pytest.raises(RuntimeError):
                    call()

    assert [program.outcomes(name) for name in ("loss", "backward", "optimizer")] == [["failed"]] * 3


# -------------------------------------------------------------------------------------------------- epochs and misuse


def test_a_break_ends_the_epoch_and_the_next_one_begins_at_the_beginning() -> None:
    """As with the bare loader: the last batch has been trained on, and the epoch counts."""
    program = Program()
    firsts: list[Tensor] = []

    with program.instrument() as loop:
        for _ in range(2):
            for inputs, _targets in loop:
                firsts.append(inputs)
                break

    short = ["epoch_start", *BATCH[:4], *BATCH[10:], "epoch_end", "epoch_checkpoint"]
    assert program.recorder.events == ["init", "fit_start", *short, *short, "fit_end"]
    assert torch.equal(*firsts)
    assert int(loop.state.timestamp.epoch) == 2


def test_an_exhausted_iteration_stays_exhausted() -> None:
    """As iterators do."""
    program = Program()
    with program.instrument() as loop:
        batches = iter(loop)
        found = len(list(batches)), len(list(batches)), len(loop)

    assert found == (2, 0, 2)


@pytest.mark.parametrize("shared", ["engine", "model", "optimizer"])
def test_an_engine_a_model_or_an_optimizer_in_two_loops_is_an_error(shared: str) -> None:
    """Every event would be published twice."""
    first, second = Program(), Program()
    setattr(second, shared, getattr(first, shared))

    with first.instrument(), pytest.raises(ConfigurationError, match=rf"a loop is used twice: its {shared}"):  # noqa: SIM117
        with second.instrument():
            pass
    second.run()

    assert second.recorder.events[-1:] == ([] if shared == "engine" else ["fit_end"])


def test_one_instrumentation_is_one_run() -> None:
    """Inside itself, and again after it."""
    once = Program().instrument()
    with once, pytest.raises(ConfigurationError, match="a loop is used twice"), once:
        pass

    with pytest.raises(ConfigurationError, match="entered before"), once:
        pass


def test_two_iterations_at_a_time_are_an_error() -> None:
    """The first one's batch has been ended by the second."""
    with Program().instrument() as loop:
        first, second = iter(loop), iter(loop)
        next(first)
        next(second)
        with pytest.raises(ConfigurationError, match="another iteration over it has begun"):
            next(first)


def test_a_loop_that_is_over_cannot_be_iterated() -> None:
    """Outside of its `with`, there is nobody to end the run."""
    with Program().instrument() as loop:
        pass

    with pytest.raises(ConfigurationError, match="this loop is over"):
        list(loop)


def test_after_the_loop_its_loss_is_a_plain_tensor() -> None:
    """Nothing of the loop stays on it."""
    program = Program()
    with program.instrument() as loop:
        inputs, targets = next(iter(loop))
        loss = loop.loss(program.model(inputs), targets)

    assert "backward" not in vars(loss)
    loss.backward()
    assert "before_backward" not in program.recorder.events


def test_a_loss_is_freed_with_its_batch() -> None:
    """Not when the garbage collector comes by: on a GPU that would be too late."""
    program = Program()
    losses: list[weakref.ref[Tensor]] = []
    gc.disable()
    try:
        with program.instrument() as loop:
            for inputs, targets in loop:
                loss = loop.loss(program.model(inputs), targets)
                loss.backward()
                losses.append(weakref.ref(loss))
                del loss
        alive = [loss() is not None for loss in losses]
    finally:
        gc.enable()

    assert alive == [False, False]


def test_a_copy_of_the_model_is_not_watched() -> None:
    """For a moving average, or a file."""
    program = Program()
    with program.instrument() as loop:
        for inputs, _ in loop:
            copy.deepcopy(program.model)(inputs)
            pickle.loads(pickle.dumps(program.model))(inputs)

    assert "before_forward" not in program.recorder.events


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": functional.relu}, "model is a function"),
        ({"optimizers": 0.1}, "0.1 is no optimizer"),
        ({"dataloader": 3}, "dataloader is a int"),
        ({"loss": 3}, "loss is a int"),
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"max_duration": "3iter"}, "max_duration is 3iter"),
    ],
)
def test_arguments_that_do_not_fit_say_what_would(arguments: dict[str, Any], message: str) -> None:
    """Before anything is touched."""
    model = new_model()
    fitting: dict[str, Any] = {"model": model, "optimizers": new_optimizer(model), "dataloader": new_batches()}

    with pytest.raises(ConfigurationError, match=message):
        instrument(Engine(), **fitting | arguments)


def test_an_engine_of_another_vocabulary_is_an_error() -> None:
    """It has no BATCH_START."""

    class Ingest(EventName):
        WRITE = "write"

    program = Program()
    program.engine = Engine(events=Ingest)

    with pytest.raises(ConfigurationError, match="the engine's events are Ingest"):
        program.instrument()


def test_an_async_loader_asks_for_an_async_loop() -> None:
    """There is nobody to await it."""

    async def batches() -> Any:
        yield new_batches(1)[0]

    program = Program()
    program.batches = batches()

    with pytest.raises(ConfigurationError, match="async with"), program.instrument():
        pass


def test_a_loop_without_a_loss_says_how_to_give_it_one() -> None:
    """Either way of it."""
    program = Program(loss=None)

    with program.instrument() as loop, pytest.raises(ConfigurationError, match=r"instrument\(..., loss="):
        loop.loss(1, 2)


def test_a_model_replaced_on_init_is_an_error() -> None:
    """The loop's code still has the old one in its hands."""
    program = Program(Change(Event.INIT, lambda state: setattr(state, "model", new_model())))

    with pytest.raises(ConfigurationError, match="replaced the model on INIT"):
        program.run()

    assert hooks_of(program.model, program.optimizer) == 0


# -------------------------------------------------------------------------------------------------------------- state


def test_an_engine_with_a_state_of_its_own_keeps_it() -> None:
    """It goes on counting from one loop to the next, and INIT is its owner's business."""
    program = Program()
    state = State(program.model, callbacks=[program.recorder], run_name="mine")
    program.engine = Engine(state)

    program.run()
    program.run()

    assert program.recorder.events == ["fit_start", *EPOCH, "fit_end"] * 2
    assert (int(state.timestamp.batch), int(state.timestamp.epoch), program.engine.state) == (4, 2, state)


def test_any_state_that_takes_attributes_will_do() -> None:
    """What it lacks is added."""
    program = Program()
    state = SimpleNamespace(tag="mine")
    program.engine = Engine(state, callbacks=[program.recorder])

    program.run()

    assert int(state.timestamp.batch) == 2
    assert program.recorder.events == ["fit_start", *EPOCH, "fit_end"]


@pytest.mark.parametrize(
    ("options", "message"), [({}, "cannot take the loop's"), ({"run_name": "a"}, "set them there")]
)
def test_a_state_that_does_not_fit_says_so(options: dict[str, Any], message: str) -> None:
    """A list has no attributes; and what a state says for itself is not said twice."""
    program = Program(**options)
    program.engine = Engine([])

    with pytest.raises(ConfigurationError, match=message), program.instrument():
        pass

    program.engine = Engine()
    program.run()


def test_the_logger_knows_the_batch() -> None:
    """A loop's engine has no state when its logger is made; the step is that of the loop's."""
    memory = InMemoryLogger()

    class Log(Callback[Any]):
        def batch_end(self, state: Any, logger: Logger) -> None:
            logger.log_metrics({"loss": float(state.loss)})

    program = Program(callbacks=(memory, Log()))

    program.run()

    assert memory.get_timeseries("loss") == {"step": [1, 2], "loss": program.losses}


def test_a_batch_of_any_kind_passes_through() -> None:
    """What has no samples to count is trained on all the same."""

    class Graph:
        def __init__(self, nodes: Tensor) -> None:
            self.nodes = nodes

    program = Program()
    program.batches = [Graph(inputs) for inputs, _ in new_batches()]

    with program.instrument() as loop:
        same = [found is given for found, given in zip(loop, program.batches, strict=True)]

    assert same == [True, True]
    assert int(loop.state.timestamp.sample) == 0


# ------------------------------------------------------------------------------------------------------ explicit pairs


def test_explicit_pairs_take_the_place_of_the_hooks() -> None:
    """For a loop whose calls no hook would recognise."""
    program = Program(loss=None, hooks=False)
    sync = program.engine.sync

    with program.instrument() as loop:
        for inputs, targets in loop:
            program.optimizer.zero_grad()
            with sync.pair(Event.BEFORE_FORWARD):
                loop.state.outputs = program.model(inputs)
            with sync.pair("before_loss"):
                loop.state.loss = functional.cross_entropy(loop.state.outputs, targets)
            with sync.pair(Event.BEFORE_BACKWARD):
                loop.state.loss.backward()
            program.optimizer.step()

    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]


@pytest.mark.parametrize("hooks", [True, False])
def test_the_methods_publish_with_and_without_hooks(hooks: bool) -> None:
    """And never twice."""
    program = Program(hooks=hooks)

    with program.instrument() as loop:
        for inputs, targets in loop:
            program.optimizer.zero_grad()
            loop.backward(loop.loss(loop.forward(inputs), targets))
            loop.step()

    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]
    assert program.outcomes("optimizer") == ["ok", "ok"]


# -------------------------------------------------------------------------------------------------------------- traces


def tree(spans: tuple[ReadableSpan, ...], root: ReadableSpan, depth: int = 0) -> Iterator[str]:
    """The names of a span and of those below it, indented, in the order of their starting."""
    yield "  " * depth + root.name
    children = [span for span in spans if span.parent and root.context and span.parent.span_id == root.context.span_id]
    for child in sorted(children, key=lambda span: span.start_time or 0):
        yield from tree(spans, child, depth + 1)


def test_rule_7_3_every_batch_is_a_trace_of_its_own_linked_to_the_run() -> None:
    """With waiting for data, forward, loss, backward and the optimizer as bars, and algorithms where they ran."""
    program = Program(LabelSmoothing(), run_name="a-run")

    program.run()

    spans = program.spans
    roots = sorted((span for span in spans if span.parent is None), key=lambda span: span.start_time or 0)
    assert [span.name for span in roots] == ["run", "epoch", "batch", "batch", "end of data"]
    assert len({span.context.trace_id for span in roots if span.context}) == 5
    run, _, first, second, _ = roots
    assert [[link.context.span_id for link in span.links] for span in (first, second)] == [
        [run.context.span_id if run.context else None]
    ] * 2
    found = [span.attributes or {} for span in (first, second)]
    assert [(each["train.run.id"], each["train.epoch"], each["train.batch"]) for each in found] == [
        ("a-run", 0, 0),
        ("a-run", 0, 1),
    ]
    lines = [line for line in tree(spans, first) if "callback" not in line]
    assert lines == [
        "batch",
        "  dataloader",
        "    dispatch before_dataloader",
        "    dispatch after_dataloader",
        "  batch",
        "    dispatch batch_start",
        "    train_batch",
        "      dispatch before_train_batch",
        "      forward",
        "        dispatch before_forward",
        "        dispatch after_forward",
        "      loss",
        "        dispatch before_loss",
        "          algorithm label_smoothing",
        "        dispatch after_loss",
        "          algorithm label_smoothing",
        "      backward",
        "        dispatch before_backward",
        "        dispatch after_backward",
        "      dispatch after_train_batch",
        "    optimizer",
        "    dispatch batch_end",
        "  dispatch batch_checkpoint",
    ]


def test_a_span_of_the_loops_own_belongs_to_the_batch() -> None:
    """What the loop traces itself is found with the batch it belongs to."""
    program = Program()
    tracer = program.provider.get_tracer("mine")

    with program.instrument() as loop:
        for _ in loop:
            with tracer.start_as_current_span("mine"):
                pass

    by_id = {span.context.span_id: span for span in program.spans if span.context}
    parents = [by_id[span.parent.span_id].name for span in program.spans if span.name == "mine" and span.parent]
    assert parents == ["train_batch", "train_batch"]


def test_hooks_of_the_users_own_stay() -> None:
    """Only what was added is taken away."""
    program = Program()
    program.model.register_forward_pre_hook(lambda module, args: None)

    program.run()

    registry: Any = program.model.__dict__["_forward_pre_hooks"]
    assert (hooks_of(program.model, program.optimizer), type(registry)) == (1, OrderedDict)


@pytest.mark.parametrize(
    "device",
    ["meta", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_on_another_device_batches_are_moved_before_the_algorithms_see_them(device: str) -> None:
    """So that a loop's own `.to(device)` changes nothing, and what they change still reaches the loss."""
    seen: list[tuple[str, str, bool]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((outputs.device.type, targets.device.type, targets.is_floating_point()))
        return functional.cross_entropy(outputs, targets)

    program = Program(LabelSmoothing(), loss=loss)
    program.model.to(device)

    with program.instrument() as loop:
        for inputs, targets in loop:
            program.optimizer.zero_grad()
            loop.loss(program.model(inputs.to(device)), targets.to(device)).backward()
            program.optimizer.step()

    assert seen == [(device, device, True)] * 2
    assert program.recorder.events == ["init", "fit_start", *EPOCH, "fit_end"]
