"""Lightning: its Trainer and Fabric drive our Engine, and its callbacks run in our Trainer."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor, ModelCheckpoint, Timer
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eventbus_adapters._lightning_guest import ModuleStandIn, TrainerStandIn
from eventbus_adapters._lightning_peer import find_peer
from eventbus_adapters.lightning import EngineCallback, LightningCallback, instrument_fabric
from eventbus_engine import Algorithm, Callback, CallbackErrors, Engine, Event, EventName, Logger
from eventbus_engine.errors import BatchError, ConfigurationError, StandInError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.telemetry import PrivateIdGenerator
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop

# Lightning's own: of torch's deprecations, and of what would be faster with more data than there is here.
pytestmark = pytest.mark.filterwarnings("ignore:::pytorch_lightning", "ignore:::lightning_fabric")

FETCH = ["before_dataloader", "after_dataloader", "batch_start", "before_train_batch"]
CALLS = "before_forward after_forward before_loss after_loss before_backward after_backward".split()
BATCH = [*FETCH, *CALLS, "after_train_batch", "batch_end", "batch_checkpoint"]
EVAL_BATCH = ["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"]
EVAL = ["eval_start", *EVAL_BATCH, *EVAL_BATCH, "eval_end"]
EVALUATION = ["eval_before_all", *EVAL, "eval_after_all"]
EPOCH_END = ["epoch_end", "epoch_checkpoint"]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and results stay comparable across machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
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


class Classifier(pl.LightningModule):
    """A classifier as people write it; the same weights each time."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Linear(4, 3)
        self.criterion = nn.CrossEntropyLoss()
        self.got: list[Any] = []
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs)

    def cost(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.got.append(batch)
        inputs, targets = batch
        loss = self.criterion(self(inputs), targets)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.got.append(batch)
        inputs, targets = batch
        self.log("val_loss", self.criterion(self(inputs), targets))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByName(Classifier):
    """Calls a part and a method, not itself and a module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        return {"loss": self.cost(self.net(inputs), targets)}


class Unknown(Classifier):
    """Nobody can tell where it computes what."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.got.append(batch)
        inputs, targets = batch
        return functional.cross_entropy(inputs @ self.net.weight.T, targets)


class Manual(Classifier):
    """Steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.criterion(self(inputs), targets))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.net.parameters()]


def new_loader(batches: int = 2) -> DataLoader[Any]:
    """Batches of six samples with four features and one of three classes."""
    generator = torch.Generator().manual_seed(0)
    samples = 6 * batches
    return DataLoader(TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3), 6)


def new_trainer(*callbacks: Any, **options: Any) -> pl.Trainer:
    """Lightning's, without what it prints and writes."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 1, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(callbacks=list(callbacks), **quiet | options)


class Program:
    """Somebody's Lightning program, with our callback added."""

    def __init__(self, *algorithms: Any, callbacks: tuple[Any, ...] = (), state: Any = None, **names: Any) -> None:
        self.recorder = Recorder()
        self.module: Any = Classifier()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.engine: Engine[Any] = Engine(
            state, algorithms=algorithms, callbacks=[self.recorder, *callbacks], tracer_provider=provider
        )
        self.callback = EngineCallback(self.engine, **{"loss": "criterion"} | names)

    def fit(self, *callbacks: Any, evaluate: bool = False, **options: Any) -> pl.Trainer:
        resume = {name: options.pop(name) for name in ("ckpt_path", "weights_only") if name in options}
        trainer = new_trainer(*callbacks, self.callback, **options)
        trainer.fit(self.module, new_loader(), new_loader() if evaluate else None, **resume)
        return trainer

    @property
    def state(self) -> Any:
        return self.engine.state

    @property
    def events(self) -> list[str]:
        return self.recorder.events

    @property
    def weights(self) -> list[float]:
        return numbers_of(self.module.net)


def numbers_of(net: nn.Linear) -> list[float]:
    """Its weights."""
    numbers: list[float] = net.weight.detach().flatten().tolist()
    return numbers


def weights_by_hand(cost: Callable[[Any, Any], Any], change: Callable[[Any], Any] = lambda batch: batch) -> list[float]:
    """What an epoch of the same training, written by hand, leaves in the model."""
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in new_loader():
        inputs, targets = change(batch)
        optimizer.zero_grad()
        cost(module.net(inputs), targets).backward()
        optimizer.step()
    return numbers_of(module.net)


def trace_of(span: ReadableSpan) -> int:
    """The trace that it belongs to."""
    context = span.get_span_context()
    return 0 if context is None else context.trace_id


def original_of(module: Any) -> list[str]:
    """What of the module is not the class's: nothing, once a run is over."""
    return sorted({"training_step", "validation_step", "backward", "cost"} & vars(module).keys())


# ------------------------------------------------------------------------------------------- their loop: the events


def test_a_fit_publishes_the_events_of_training_in_their_order() -> None:
    """Two epochs of two batches, each with its validation; the sanity check before them is no part of it."""
    program = Program()

    program.fit(evaluate=True, max_epochs=2)

    epoch = ["epoch_start", *BATCH, *BATCH, *EVALUATION, *EPOCH_END]
    assert program.events == ["init", "fit_start", *epoch, *epoch, "fit_end"]
    assert original_of(program.module) == []


def test_validation_test_and_prediction_of_their_own_publish_too() -> None:
    """INIT comes once for a module, whatever is done with it."""
    program = Program()
    trainer = new_trainer(program.callback)

    trainer.validate(program.module, new_loader(), verbose=False)
    trainer.test(program.module, new_loader(), verbose=False)
    trainer.predict(program.module, new_loader(1))

    standalone = ["eval_standalone_start", *EVAL, "eval_standalone_end"]
    prediction = [name.replace("eval", "predict") for name in ["eval_start", *EVAL_BATCH, "eval_end"]]
    assert program.events == ["init", *standalone, *standalone, *prediction]


def test_each_loader_of_a_validation_is_an_evaluation() -> None:
    """Lightning numbers them."""
    program = Program()
    batches: list[int] = []
    program.engine.bus.subscribe(lambda envelope: batches.append(int(envelope.state.eval_timestamp.batch)), "eval_end")

    new_trainer(program.callback).validate(program.module, [new_loader(), new_loader()], verbose=False)

    assert program.events == ["init", "eval_standalone_start", *EVAL, *EVAL, "eval_standalone_end"]
    assert batches == [2, 2]


def test_a_validation_within_an_epoch_takes_back_the_fetch_that_had_begun() -> None:
    """BEFORE_DATALOADER is published when the batch before is over: what comes next, nobody says."""
    program = Program()

    program.fit(evaluate=True, val_check_interval=1, limit_val_batches=1, num_sanity_val_steps=0)

    once = ["eval_before_all", "eval_start", *EVAL_BATCH, "eval_end", "eval_after_all"]
    first, second = [*BATCH, "before_dataloader", *once], [*BATCH, *once]
    assert program.events == ["init", "fit_start", "epoch_start", *first, *second, *EPOCH_END, "fit_end"]


def test_batches_that_accumulate_end_without_a_step() -> None:
    """AFTER_TRAIN_BATCH still comes once a batch."""
    program = Program()
    steps: list[int] = []

    program.fit(
        LambdaCallback(on_before_optimizer_step=lambda *_: steps.append(len(program.events))), accumulate_grad_batches=2
    )

    assert program.events == ["init", "fit_start", "epoch_start", *BATCH, *BATCH, *EPOCH_END, "fit_end"]
    assert len(steps) == 1


def test_manual_optimization_publishes_each_backward_pass() -> None:
    """AFTER_TRAIN_BATCH comes before the first step of the batch."""
    program = Program()
    program.module = Manual()

    program.fit(limit_train_batches=1)

    batch = [*FETCH, *CALLS, "after_train_batch", *CALLS, "batch_end", "batch_checkpoint"]
    assert program.events == ["init", "fit_start", "epoch_start", *batch, *EPOCH_END, "fit_end"]


def test_a_batch_that_the_module_skips_is_not_counted() -> None:
    """Lightning ends the epoch when on_train_batch_start returns -1."""
    program = Program()
    program.module.on_train_batch_start = lambda batch, index: -1

    program.fit()

    assert program.events == ["init", "fit_start", "epoch_start", *FETCH, *EPOCH_END, "fit_end"]
    assert int(program.state.timestamp.batch) == 0


def test_a_run_that_ends_within_an_epoch_ends_it() -> None:
    """`max_steps` ends the epoch as well; what was about to be fetched is not."""
    program = Program()

    program.fit(max_epochs=-1, max_steps=1)

    assert program.events == [
        *["init", "fit_start", "epoch_start", *BATCH, "before_dataloader", *EPOCH_END, "fit_end"],
    ]
    assert str(program.state.max_duration) == "1ba"


def test_a_closure_that_is_called_twice_publishes_its_calls_twice() -> None:
    """LBFGS computes the gradients inside its step, which Lightning announces each time."""
    program = Program()
    program.module.configure_optimizers = lambda: torch.optim.LBFGS(program.module.parameters(), max_iter=2)

    program.fit(limit_train_batches=1)

    batch = [*FETCH, *CALLS, "after_train_batch", *CALLS, "batch_end", "batch_checkpoint"]
    assert program.events == ["init", "fit_start", "epoch_start", *batch, *EPOCH_END, "fit_end"]


def test_a_scaled_loss_is_shown_to_nobody() -> None:
    """Lightning scales it between the step and the backward pass; AFTER_BACKWARD has the loss again."""
    seen: list[float] = []
    program = Program(Change(Event.AFTER_BACKWARD, lambda state: seen.append(state.loss.item())))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    program.fit(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

    assert seen == program.module.losses
    assert program.state.scaler is scaler


@pytest.mark.parametrize(("model", "loss"), [("net", "cost"), (None, None)])
def test_parts_are_known_by_their_names(model: str | None, loss: str | None) -> None:
    """A torch module, or a method; without names the calls within the step are not told apart."""
    program = Program(model=model, loss=loss)
    program.module = ByName()

    program.fit(limit_train_batches=1)

    batch = BATCH if model else [*FETCH, *CALLS[4:], *BATCH[-3:]]
    assert program.events == ["init", "fit_start", "epoch_start", *batch, *EPOCH_END, "fit_end"]
    assert original_of(program.module) == []


def test_the_state_shows_what_lightning_has() -> None:
    """Batch, outputs, loss, model, optimizers, time, and how much of the run is over."""
    seen: list[Any] = []

    def look(state: Any) -> None:
        seen.append((int(state.timestamp.batch), int(state.timestamp.sample), state.get_elapsed_duration().value))
        seen.append((tuple(state.outputs.shape), state.loss.requires_grad, len(state.batch)))

    program = Program(Change(Event.BATCH_END, look))
    trainer = program.fit(precision="bf16-mixed", max_epochs=2)

    state = program.state
    assert seen[::2] == [(1, 6, 0.0), (2, 12, 0.0), (3, 18, 0.5), (4, 24, 0.5)]
    assert seen[1::2] == [((6, 3), False, 2)] * 4
    assert state.model is program.module
    assert state.optimizers == trainer.optimizers
    assert (state.precision, state.device.type, state.loss_fn) == ("amp_bf16", "cpu", program.module.criterion)


def test_metrics_that_a_module_logs_are_in_the_state() -> None:
    """Under the names that our own callbacks look for."""
    program = Program()

    trainer = program.fit(evaluate=True)

    expected = {f"metrics/eval/{name}": float(value) for name, value in trainer.callback_metrics.items()}
    assert program.state.metrics == expected
    assert "metrics/eval/val_loss" in expected


def test_spans_are_those_of_the_trainer() -> None:
    """Each batch, epoch and evaluation is the root of a trace; the batch shows where its time went."""
    program = Program()

    program.fit(evaluate=True, limit_train_batches=1)

    spans = program.exporter.get_finished_spans()
    roots = [span.name for span in spans if span.parent is None]
    batch = next(span for span in spans if span.name == "batch" and span.parent is None)
    below = {span.name for span in spans if trace_of(span) == trace_of(batch)}
    assert roots == ["run", "batch", "eval", "epoch"]
    assert below >= {"dataloader", "forward", "loss", "backward", "optimizer", "train_batch", "dispatch batch_end"}


# ----------------------------------------------------------------------------------------- their loop: what reaches it


def test_without_algorithms_the_weights_are_those_of_lightning_bit_for_bit() -> None:
    """Watching changes nothing, the global generator included."""
    program, bare = Program(), Classifier()

    torch.manual_seed(1)
    program.fit(evaluate=True, max_epochs=2)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    new_trainer(max_epochs=2).fit(bare, new_loader(), new_loader())

    assert program.module.losses == bare.losses
    assert all(torch.equal(a, b) for a, b in zip(program.module.parameters(), bare.parameters(), strict=True))
    assert torch.equal(drawn, torch.rand(1))


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

    Program(Blend(), Pick(), Note()).fit(limit_train_batches=1)

    assert ran == [
        *["pick after_dataloader", "note after_dataloader", "blend after_dataloader"],
        *["pick before_loss", "blend before_loss", "note before_loss"],
        *["pick after_loss", "note after_loss", "blend after_loss"],
    ]


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH])
def test_the_training_step_gets_the_batch_that_the_algorithms_left(event: Event) -> None:
    """Whatever changed it, up to the moment of the step."""

    def halve(batch: Any) -> Any:
        return [part[:3] for part in batch]

    program = Program(Change(event, lambda state: setattr(state, "batch", halve(state.batch))))
    program.fit()

    assert [len(inputs) for inputs, _ in program.module.got] == [3, 3]
    assert program.weights == pytest.approx(weights_by_hand(functional.cross_entropy, halve))


@pytest.mark.parametrize("event", [Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD])
def test_a_validation_works_on_what_the_algorithms_left(event: Event) -> None:
    """The step gets the batch, the model its inputs."""
    program = Program(Change(event, lambda state: state.batch_set_item(0, state.batch[0] * 0)))

    new_trainer(program.callback).validate(program.module, new_loader(1), verbose=False)

    expected = functional.cross_entropy(program.module.net.bias.expand(6, 3), torch.arange(6) % 3)
    assert program.state.metrics["metrics/eval/val_loss"] == pytest.approx(expected.item())


def test_smoothed_labels_reach_the_loss() -> None:
    """LabelSmoothing changes the targets on BEFORE_LOSS and puts them back after it."""
    program = Program(LabelSmoothing(0.3))
    program.fit()

    smooth = nn.CrossEntropyLoss(label_smoothing=0.3)
    assert program.weights == pytest.approx(weights_by_hand(smooth), abs=1e-6)


@pytest.mark.parametrize(
    ("event", "attribute"),
    [(Event.AFTER_FORWARD, "outputs"), (Event.AFTER_LOSS, "loss"), (Event.BEFORE_BACKWARD, "loss")],
)
def test_changed_outputs_and_a_changed_loss_reach_the_loop(event: Event, attribute: str) -> None:
    """Each may replace what comes next: the gradient is that of the replacement."""

    def triple(state: Any) -> None:
        setattr(state, attribute, getattr(state, attribute) * 3)

    program = Program(Change(event, triple))
    program.fit()

    def cost(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs * 3 if attribute == "outputs" else outputs, targets)
        return loss * 3 if attribute == "loss" else loss

    assert program.weights == pytest.approx(weights_by_hand(cost), abs=1e-6)


def test_changed_gradients_reach_the_step() -> None:
    """AFTER_TRAIN_BATCH comes before the optimizer."""

    def drop(state: Any) -> None:
        for parameter in state.model.parameters():
            parameter.grad.zero_()

    program = Program(Change(Event.AFTER_TRAIN_BATCH, drop))
    program.fit()

    assert program.weights == numbers_of(Classifier().net)


def test_async_algorithms_and_background_callbacks_take_part() -> None:
    """`engine.sync` gives them a loop; SelectiveBackprop runs the module itself, which publishes nothing."""
    delivered: list[int] = []

    class Remote(Callback[Any]):
        delivery = "background"

        async def batch_end(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            delivered.append(int(state.timestamp.batch))

    program = Program(SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0), callbacks=(Remote(),))
    program.fit()
    program.engine.sync.close()

    assert [len(inputs) for inputs, _ in program.module.got] == [3, 3]
    assert program.events == ["init", "fit_start", "epoch_start", *BATCH, *BATCH, *EPOCH_END, "fit_end"]
    assert delivered == [1, 2]


@pytest.mark.parametrize("epochs", [5, -1])
def test_stop_training_stops_lightning(epochs: int) -> None:
    """It ends after the batch in progress, as in the Trainer, whether or not an end was known."""
    program = Program(Change(Event.BATCH_START, lambda state: state.timestamp.batch == 2 and state.stop_training()))

    trainer = program.fit(max_epochs=epochs)

    assert (trainer.global_step, trainer.should_stop) == (3, True)


def test_a_state_of_ones_own_goes_on_and_is_not_initialised() -> None:
    """Its INIT is its author's to publish, and so is its duration."""
    module = Classifier()
    state = State(module)
    program = Program(state=None)
    program.engine = Engine(state, tracer_provider=None)
    state.callbacks.append(program.recorder)
    program.module, program.callback = module, EngineCallback(program.engine, loss="criterion")

    program.fit(limit_train_batches=1)

    assert program.events == ["fit_start", "epoch_start", *BATCH, *EPOCH_END, "fit_end"]
    assert (state.max_duration, int(state.timestamp.sample)) == (None, 6)


@pytest.mark.parametrize("saved", [1, 2])
def test_a_resumed_run_goes_on_counting(saved: int, tmp_path: Path) -> None:
    """The timestamp is in Lightning's own checkpoint, as plain numbers. An epoch does not begin twice."""
    first = Program()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    new_trainer(first.callback, keep, enable_checkpointing=True).fit(first.module, new_loader())

    second = Program()
    second.fit(max_epochs=2, ckpt_path=tmp_path / f"step={saved}.ckpt", weights_only=True)

    rest = [*BATCH, *EPOCH_END, "epoch_start"] if saved == 1 else []
    now = second.state.timestamp
    assert second.events == ["init", "fit_start", *rest, *BATCH, *BATCH, *EPOCH_END, "fit_end"]
    assert (int(now.epoch), int(now.batch), int(now.sample)) == (2, 4, 24)


def test_a_checkpoint_can_be_saved_after_the_run(tmp_path: Path) -> None:
    """As people do; a run goes on from it."""
    first = Program()
    first.fit().save_checkpoint(tmp_path / "last.ckpt")

    second = Program()
    second.fit(max_epochs=2, ckpt_path=tmp_path / "last.ckpt", weights_only=True)

    assert (int(second.state.timestamp.epoch), int(second.state.timestamp.batch)) == (2, 4)


# --------------------------------------------------------------------------------------------------- their loop: errors


def test_an_error_of_an_algorithm_leaves_fit_as_itself() -> None:
    """With a note and the traces so far; nothing more is published, and the module is as it was."""

    def fail(state: Any) -> None:
        raise ZeroDivisionError("no samples")

    program = Program(Change(Event.AFTER_LOSS, fail))

    with pytest.raises(ZeroDivisionError) as caught:
        program.fit()

    assert caught.value.__notes__ == ["in algorithm change on AFTER_LOSS"]
    assert [trace.outcome for trace in caught.value.traces.values()] == ["failed"]  # type: ignore[attr-defined]
    assert program.events[-2:] == ["after_forward", "before_loss"]
    assert original_of(program.module) == []
    assert not program.module._forward_hooks
    failed = {span.name for span in program.exporter.get_finished_spans() if not span.status.is_ok}
    assert failed >= {"batch", "epoch", "loss", "algorithm change"}


def test_errors_of_callbacks_leave_fit_together() -> None:
    """After all of them have run, in the order of their registration."""

    class Broken(Callback[Any]):
        def batch_end(self, state: Any, logger: Any) -> None:
            raise KeyError("gone")

    program = Program(callbacks=(Broken(),))

    with pytest.raises(CallbackErrors) as caught:
        program.fit()

    assert [str(error) for error in caught.value.exceptions] == ["'gone'"]
    assert program.events[-1] == "batch_end"


def test_after_a_failure_the_same_callback_fits_again() -> None:
    """Nothing is left of the run that failed."""
    program = Program()
    program.module.on_train_batch_start = lambda batch, index: 1 / 0
    trainer = new_trainer(program.callback)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(program.module, new_loader())
    program.events.clear()
    del program.module.on_train_batch_start

    program.fit(limit_train_batches=1)

    assert program.events == ["fit_start", "epoch_start", *BATCH, *EPOCH_END, "fit_end"]


@pytest.mark.parametrize(
    ("event", "option"), [(Event.AFTER_FORWARD, "model"), (Event.BEFORE_LOSS, "loss"), (Event.AFTER_LOSS, "loss")]
)
def test_an_algorithm_for_calls_that_nobody_knows_is_refused(event: Event, option: str) -> None:
    """It would be left out without a word, and the run be wrong."""
    program = Program(Change(event, lambda state: None), loss=None)
    program.module = Unknown()

    with pytest.raises(ConfigurationError, match=rf"change is for .*EngineCallback\(\.\.\., {option}=\.\.\.\)"):
        program.fit()


def test_a_change_that_cannot_reach_the_loop_is_an_error() -> None:
    """The step computes with a copy of the inputs."""
    program = Program(Change(Event.BEFORE_FORWARD, lambda state: state.batch_set_item(0, torch.zeros(6, 4))))
    program.module.training_step = lambda batch, batch_idx: program.module(batch[0].clone()).sum()

    with pytest.raises(BatchError, match=r"state\.batch on BEFORE_FORWARD"):
        program.fit()


def test_one_engine_or_callback_in_two_runs_is_refused() -> None:
    """Every event would be published twice. The run that was there first goes on."""
    program = Program()
    other = EngineCallback(program.engine, loss="criterion")
    refused: list[str] = []

    def intrude(state: Any) -> None:
        for callback in (program.callback, other):
            try:
                new_trainer(callback).fit(Classifier(), new_loader())
            except ConfigurationError as error:
                refused.append(str(error))

    program.fit(LambdaCallback(on_train_start=lambda trainer, module: intrude(None)), limit_train_batches=1)

    assert len(refused) == 2
    assert all("a loop is used twice" in message for message in refused)
    assert program.events == ["init", "fit_start", "epoch_start", *BATCH, *EPOCH_END, "fit_end"]


def test_a_state_that_cannot_take_what_a_loop_writes_is_refused() -> None:
    """And nothing is held: the module can be fitted with another engine."""
    program = Program(state=object())
    with pytest.raises(ConfigurationError, match="cannot take the loop's batch"):
        program.fit()
    program.callback = EngineCallback(Engine(), loss="criterion")

    trainer = program.fit(limit_train_batches=1)

    assert trainer.global_step == 1


def test_a_callback_outside_of_a_run_is_refused() -> None:
    """It needs what `setup` tells it."""
    program = Program()

    with pytest.raises(ConfigurationError, match="outside of a run"):
        program.callback.on_train_start(None, None)


def test_a_step_that_fetches_its_batches_itself_is_refused() -> None:
    """There is no moment for the events of a batch."""

    class Fetching(Classifier):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    program = Program()
    program.module = Fetching()

    with pytest.raises(ConfigurationError, match=r"Fetching\.training_step takes dataloader_iter"):
        program.fit()


@pytest.mark.parametrize(("model", "loss"), [(None, "missing"), ("net.missing", None), ("net.forward", None)])
def test_a_part_that_the_module_has_none_of_is_refused(model: str | None, loss: str | None) -> None:
    """It names the module and the part."""
    program = Program(model=model, loss=loss)

    with pytest.raises(ConfigurationError, match=f"Classifier has no torch module {(model or loss)!r}"):
        program.fit()
    assert original_of(program.module) == []


def test_an_engine_of_another_vocabulary_is_refused() -> None:
    """A loop publishes the events of training."""

    class Other(EventName):
        START = "start_of_it"

    for engine in (Engine(events=Other), "engine"):
        with pytest.raises(ConfigurationError, match="EngineCallback needs an Engine"):
            EngineCallback(engine)  # type: ignore[arg-type]


def test_lightning_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under both of its names."""
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)

    with pytest.raises(ConfigurationError, match=r"eventbus-engine\[lightning\]"):
        find_peer()


@pytest.mark.parametrize("version", ["1.9.5", "3.0.0", ""])
def test_lightning_of_another_version_is_named_with_those_that_fit(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything has run."""
    monkeypatch.setattr(pl, "__version__", version)

    with pytest.raises(ConfigurationError, match=r"goes with 2\.5 up to, not including, 3;"):
        find_peer()


def test_what_the_adapter_adds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make bench` divides it by the events of a step."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    bench, adapter = importlib.import_module("bench_adapters"), importlib.import_module("adapter_lightning")

    monkeypatch.setattr(bench, "STEPS", 5)

    assert bench.events_in_a_step(adapter.train) == len(BATCH)
    assert len(bench.added_seconds(adapter.train, 1)) == 1


# ------------------------------------------------------------------------------------------------------------- Fabric


class FabricProgram:
    """Somebody's loop with Fabric."""

    def __init__(self, *algorithms: Any) -> None:
        self.recorder = Recorder()
        self.fabric: Any = Fabric(accelerator="cpu", devices=1)
        self.engine: Engine[Any] = Engine(algorithms=algorithms, callbacks=[self.recorder])
        self.bare = Classifier().net
        self.model, self.optimizer = self.fabric.setup(self.bare, torch.optim.SGD(self.bare.parameters(), lr=0.1))
        self.loader = self.fabric.setup_dataloaders(new_loader())

    def instrument(self, loss: Any = functional.cross_entropy) -> Any:
        return instrument_fabric(self.engine, self.fabric, self.model, self.optimizer, self.loader, loss)

    def run(self) -> list[float]:
        with self.instrument() as loop:
            for inputs, targets in loop:
                self.optimizer.zero_grad()
                self.fabric.backward(loop.loss(self.model(inputs), targets) / 2)
                self.optimizer.step()
        return numbers_of(self.bare)


def test_a_loop_with_fabric_publishes_the_events_of_training() -> None:
    """`fabric.backward` counts, also of what was made of the loss; afterwards it is Fabric's own."""
    program = FabricProgram()

    weights = program.run()

    epoch = ["epoch_start", *BATCH, *BATCH, "before_dataloader", *EPOCH_END]
    assert program.recorder.events == ["init", "fit_start", *epoch, "fit_end"]
    assert "backward" not in vars(program.fabric)
    assert weights == weights_by_hand(lambda outputs, targets: functional.cross_entropy(outputs, targets) / 2)


def test_what_algorithms_change_reaches_a_loop_with_fabric() -> None:
    """The targets before the loss, and the loss before the backward pass."""
    program = FabricProgram(
        LabelSmoothing(0.3), Change(Event.BEFORE_BACKWARD, lambda state: setattr(state, "loss", state.loss * 2))
    )

    weights = program.run()

    assert weights == pytest.approx(weights_by_hand(nn.CrossEntropyLoss(label_smoothing=0.3)), abs=1e-6)


def test_one_fabric_in_two_loops_is_refused() -> None:
    """Whose backward pass would it be?"""
    program, other = FabricProgram(), FabricProgram()
    other.fabric = program.fabric

    with program.instrument(), pytest.raises(ConfigurationError, match="its fabric is in one already"):
        other.instrument().__enter__()
    program.run()

    assert program.recorder.events.count("fit_end") == 2


@pytest.mark.parametrize("fabric", [None, Fabric])
def test_what_is_no_fabric_is_refused(fabric: Any) -> None:
    """Before the loop begins."""
    program = FabricProgram()
    program.fabric = fabric

    with pytest.raises(ConfigurationError, match="give the Fabric"):
        program.instrument()


# -------------------------------------------------------------------------------------- our loop: a callback of theirs


class Hooks(pl.Callback):
    """Keeps the hooks that it is called by, in their order, with what they are about."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


def _keep(name: str) -> Any:
    def hook(self: Hooks, trainer: Any, module: Any, *arguments: Any, **stage: str) -> None:
        numbers = [argument for argument in arguments if isinstance(argument, int)]
        self.calls.append((name, *numbers) if numbers else name)

    return hook


for _name in dir(pl.Callback):
    if (_name.startswith("on_") and "checkpoint" not in _name) or _name in ("setup", "teardown"):
        setattr(Hooks, _name, _keep(_name))


def fit_ours(*callbacks: Any, eval_dataloader: Any = None, max_duration: str = "1ep") -> Trainer:
    """Our Trainer over the same data."""
    model = Classifier().net
    trainer = Trainer(
        model,
        new_loader(),
        eval_dataloader,
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=callbacks,
        max_duration=max_duration,
    )
    anyio.run(trainer.fit)
    return trainer


def test_our_trainer_calls_the_hooks_of_their_callback_in_their_order() -> None:
    """As Lightning itself does for such a run, but for the gradients, which ours drops before the forward pass."""
    ours, theirs = Hooks(), Hooks()

    fit_ours(LightningCallback(ours), eval_dataloader=new_loader(1), max_duration="2ep")
    new_trainer(theirs, max_epochs=2, num_sanity_val_steps=0).fit(Classifier(), new_loader(), new_loader(1))

    moved = [call for call in ours.calls if call != "on_before_zero_grad"]
    assert moved == [call for call in theirs.calls if call != "on_before_zero_grad"]
    assert ours.calls.count("on_before_zero_grad") == 4


def test_our_prediction_and_standalone_evaluation_call_their_hooks() -> None:
    """And tell what is going on."""
    hooks = Hooks()
    stages: list[Any] = []

    def note(trainer: Any, *_: Any) -> None:
        stages.append((trainer.state.fn, trainer.state.stage, trainer.training, trainer.validating, trainer.predicting))

    told = LambdaCallback(on_validation_start=note, on_predict_start=note)
    model = Classifier().net
    trainer = Trainer(
        model,
        new_loader(),
        loss=functional.cross_entropy,
        max_duration="1ep",
        callbacks=[LightningCallback(hooks), LightningCallback(told)],
    )

    async def main() -> None:
        async with trainer:
            await trainer.eval(new_loader(1))
            await trainer.predict(new_loader(1))

    anyio.run(main)

    validation = ["on_validation_start", "on_validation_epoch_start", ("on_validation_batch_start", 0)]
    validation += [("on_validation_batch_end", 0), "on_validation_epoch_end", "on_validation_end"]
    prediction = ["on_predict_start", "on_predict_epoch_start", ("on_predict_batch_start", 0)]
    prediction += [("on_predict_batch_end", 0), "on_predict_epoch_end", "on_predict_end"]
    assert hooks.calls == ["setup", *validation, *prediction, "teardown"]
    assert stages == [("validate", "validate", False, True, False), ("fit", "predict", False, False, True)]


def test_their_early_stopping_stops_our_trainer() -> None:
    """Unmodified; it goes by the names that our metrics have."""
    stopping = EarlyStopping("metrics/eval/loss", mode="max", patience=1)

    trainer = fit_ours(LightningCallback(stopping), eval_dataloader=new_loader(1), max_duration="9ep")

    assert int(trainer.state.timestamp.epoch) == 2
    assert stopping.stopped_epoch == 1


def test_a_callback_of_theirs_that_has_stopped_a_training_lets_the_next_one_run() -> None:
    """As with Lightning's, whose `should_stop` is down again when a fit begins."""
    heard: list[bool] = []

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any, **named: Any) -> None:
            heard.append(trainer.should_stop)
            trainer.should_stop = trainer.should_stop or len(heard) == 1

    model = Classifier().net
    trainer = Trainer(
        model,
        new_loader(),
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[LightningCallback(Stop())],
        max_duration="1ep",
    )

    async def fit_twice() -> None:
        async with trainer:
            await trainer.fit()
            await trainer.fit(duration="3ba")

    anyio.run(fit_twice)

    assert heard == [False] * 4


def test_their_timer_stops_our_trainer_and_keeps_its_state() -> None:
    """Before the first batch, where there is no time at all. The state of the callback is its own."""
    timer = Timer(duration={"seconds": 0})
    guest = LightningCallback(timer)

    trainer = fit_ours(guest)

    assert int(trainer.state.timestamp.batch) == 0
    assert guest.state_dict() == timer.state_dict()
    guest.load_state_dict({"time_elapsed": {"train": 5.0}})
    assert timer.time_elapsed() > 5.0


def test_the_stand_ins_answer_from_our_state() -> None:
    """What most callbacks ask for."""
    seen: dict[str, Any] = {}

    def look(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        module.log("seen", 2.0)
        seen.update(
            trainer=(trainer.current_epoch, trainer.global_step, trainer.max_epochs, trainer.max_steps),
            batches=(trainer.num_training_batches, trainer.is_last_batch, trainer.train_dataloader is not None),
            module=(module.current_epoch, module.global_step, module.device.type, module.out_features),
            optimizer=module.optimizers() is trainer.optimizers[0],
            loss=outputs["loss"].item() > 0,
            weights=trainer.model is not module and len(list(module.parameters())),
            callbacks=[type(callback) for callback in trainer.callbacks],
            should_stop=trainer.should_stop,
            logged=trainer.callback_metrics["seen"].item(),
            precision=trainer.precision,
        )
        trainer.logger.log_metrics({"by_logger": 3.0})

    memory = InMemoryLogger()
    fit_ours(LightningCallback(LambdaCallback(on_train_batch_end=look)), memory, max_duration="2ba")

    assert seen == {
        "trainer": (0, 2, None, 2),
        "batches": (2, True, True),
        "module": (0, 2, "cpu", 3),
        "optimizer": True,
        "loss": True,
        "weights": 2,
        "callbacks": [LambdaCallback],
        "should_stop": False,
        "logged": 2.0,
        "precision": "fp32",
    }
    assert memory.most_recent_values["seen"] == 2.0
    assert memory.most_recent_values["by_logger"] == 3.0


def test_what_a_stand_in_has_none_of_is_said_with_what_it_has() -> None:
    """LearningRateMonitor reads Lightning's internals."""
    with pytest.raises(CallbackErrors) as caught:
        fit_ours(LightningCallback(LearningRateMonitor()))

    (error,) = caught.value.exceptions
    assert isinstance(error, StandInError)
    assert "'lr_scheduler_configs'" in str(error)
    assert "current_epoch, " in str(error)


def test_a_stand_in_for_the_module_says_what_it_has() -> None:
    """`hasattr` works, and a missing dunder is no matter for a message."""
    state = State(nn.Linear(2, 2))
    trainer = TrainerStandIn(state, Logger(state))
    module = ModuleStandIn(state, Logger(state), trainer)

    with pytest.raises(StandInError, match=r"Linear has none of; it has .*log_dict"):
        module.hparams  # noqa: B018
    assert not hasattr(trainer, "fit_loop")
    assert not hasattr(trainer, "__deepcopy__")
    assert not hasattr(module, "__deepcopy__")
    assert (trainer.num_training_batches, trainer.max_epochs, trainer.max_steps) == (float("inf"), None, -1)


def test_several_optimizers_are_handed_on_one_by_one() -> None:
    """As a list, from the module."""
    state = State(nn.Linear(2, 2), optimizers=[torch.optim.SGD([torch.zeros(1)]) for _ in range(2)])
    module = TrainerStandIn(state, Logger(state)).lightning_module

    assert module.optimizers() == state.optimizers


@pytest.mark.parametrize("candidate", [pl.Callback(), object(), Hooks])
def test_what_has_no_hook_of_theirs_is_refused(candidate: Any) -> None:
    """It would never be called."""
    with pytest.raises(ConfigurationError, match="no callback of Lightning's"):
        LightningCallback(candidate)


def test_a_wrapped_callback_has_the_options_of_ours() -> None:
    """And the name of its class."""
    assert LightningCallback(Hooks()).name == "hooks"
    assert LightningCallback(Hooks(), name="mine", on_error="log").on_error == "log"
