"""`eventbus_adapters.ignite`, with ignite itself, which takes long to import: done by the first test that runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn
from torch.nn import functional

from eventbus_engine import Algorithm, Callback, CallbackErrors, Engine, Event, EventName
from eventbus_engine.errors import CallbackInUseError, ConfigurationError, HandlerTypeError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.telemetry import PrivateIdGenerator
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop

BATCH = (
    "before_dataloader after_dataloader batch_start before_train_batch before_forward after_forward before_loss "
    "after_loss before_backward after_backward after_train_batch batch_end batch_checkpoint"
).split()
EPOCH = ["epoch_start", *BATCH, *BATCH, "epoch_end", "epoch_checkpoint"]
EVAL_BATCH = "eval_batch_start eval_before_forward eval_after_forward eval_batch_end".split()
EVALUATION = ["eval_before_all", "eval_start", *EVAL_BATCH, *EVAL_BATCH, "eval_end", "eval_after_all"]
FIRST = ["init", "fit_start"]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and results stay comparable across machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Mine(EventName):
    """Not those of training."""

    A = "a"


class Recorder(Callback[Any]):
    """Keeps the names of the events."""

    def __init__(self) -> None:
        super().__init__()
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


def adapter() -> Any:
    """The module under test."""
    return importlib.import_module("eventbus_adapters.ignite")


def peer(name: str) -> Any:
    """A module of ignite's, once the adapter has imported it without what its imports warn of."""
    adapter()
    return importlib.import_module(f"ignite.{name}")


def new_model() -> nn.Module:
    """The same small classifier each time; its dropout draws from the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def new_batches(count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of six samples with four features and one of three classes."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(count)]


class Program:
    """Somebody's trainer and evaluator, as ignite's own functions make them, with our engine attached."""

    def __init__(self, *algorithms: Any, callbacks: tuple[Any, ...] = (), attach: bool = True, **options: Any) -> None:
        engines, metrics = peer("engine"), peer("metrics")
        self.events = engines.Events
        self.recorder = Recorder()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.engine: Engine[Any] = Engine(
            options.pop("state", None),
            algorithms=algorithms,
            callbacks=[self.recorder, *callbacks],
            tracer_provider=provider,
        )
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss: Any = nn.CrossEntropyLoss()
        self.trainer = engines.create_supervised_trainer(self.model, self.optimizer, self.loss, **options)
        self.evaluator = engines.create_supervised_evaluator(self.model, {"accuracy": metrics.Accuracy()})
        self.losses: list[float] = []
        self.trainer.add_event_handler(
            self.events.ITERATION_COMPLETED, lambda trainer: self.losses.append(trainer.state.output)
        )
        if attach:
            self.attachment = self.attach()

    def attach(self) -> Any:
        return adapter().use_engine(
            self.trainer, self.engine, self.model, self.optimizer, self.loss, evaluators={"val": self.evaluator}
        )

    def run(self, epochs: int = 1, batches: Any = None, **options: Any) -> list[str]:
        """The events of the run."""
        self.recorder.events.clear()
        self.trainer.run(batches or new_batches(), max_epochs=epochs, **options)
        return list(self.recorder.events)

    @property
    def state(self) -> Any:
        """The engine's."""
        return self.engine.state

    def outcomes(self, name: str) -> list[Any]:
        """The outcomes of the spans of a name, in the order of their ends."""
        spans = self.exporter.get_finished_spans()
        return [span.attributes["eventbus.outcome"] for span in spans if span.name == name and span.attributes]


# ------------------------------------------------------------------------------------------------------------- events


def test_a_trainer_publishes_the_events_of_training_and_evaluation_in_their_order() -> None:
    """Two epochs, with an evaluation after each, in a handler that comes after the adapter's."""
    program = Program()
    program.trainer.add_event_handler(program.events.EPOCH_COMPLETED, lambda: program.evaluator.run(new_batches()))

    events = program.run(epochs=2)

    assert events == [*FIRST, *EPOCH, *EVALUATION, *EPOCH, *EVALUATION, "fit_end"]
    assert program.state.metrics == {"metrics/val/accuracy": program.evaluator.state.metrics["accuracy"]}


def test_without_algorithms_a_trainer_trains_bit_for_bit_as_it_would_alone() -> None:
    """Its draws and its losses; detached, it is what it was."""
    programs = [Program(attach=False), Program()]
    for program in programs:
        torch.manual_seed(5)
        program.trainer.run(new_batches(), max_epochs=2)

    assert programs[0].losses == programs[1].losses
    programs[1].attachment.detach()
    programs[1].recorder.events.clear()
    programs[1].trainer.state.max_epochs = None
    programs[1].run()
    assert programs[1].recorder.events == []
    assert {"run"}.isdisjoint({*vars(programs[1].trainer), *vars(programs[1].evaluator)})


def test_outside_of_training_an_evaluation_publishes_nothing() -> None:
    """There is no run that it would belong to."""
    program = Program()

    state = program.evaluator.run(new_batches())

    assert program.recorder.events == []
    assert 0 <= state.metrics["accuracy"] <= 1


def test_data_of_unknown_length_ends_with_a_fetch_that_finds_nothing() -> None:
    """As in a loop of one's own."""
    program = Program()

    events = program.run(batches=iter(new_batches()))

    assert events == [*FIRST, *EPOCH[:-2], "before_dataloader", *EPOCH[-2:], "fit_end"]
    assert program.outcomes("end of data") == ["ok"]


def test_data_that_starts_again_within_an_epoch_is_fetched_once() -> None:
    """Ignite restarts it, and fetches on."""
    program = Program()

    assert program.run(epoch_length=2, batches=new_batches(1)) == [*FIRST, *EPOCH, "fit_end"]


def test_a_trainer_without_data_has_batches_without_content() -> None:
    """Its update function makes them up."""
    engines = peer("engine")
    recorder = Recorder()
    model = new_model()
    trainer = engines.Engine(lambda engine, batch: batch)
    adapter().use_engine(
        trainer, Engine(callbacks=[recorder]), model, torch.optim.SGD(model.parameters(), lr=0.1), functional.mse_loss
    )

    trainer.run(epoch_length=1)

    assert recorder.events == [*FIRST, "epoch_start", *BATCH[:4], *BATCH[10:], *EPOCH[-2:], "fit_end"]


def test_accumulated_gradients_are_batches_of_their_own_with_one_step_for_all() -> None:
    """An iteration of ignite's is a batch; the loss is scaled, so the backward pass is not the adapter's to see."""
    program = Program(gradient_accumulation_steps=2)
    seen = [event for event in BATCH if "backward" not in event]

    assert program.run() == [*FIRST, "epoch_start", *seen, *seen, *EPOCH[-2:], "fit_end"]
    assert program.outcomes("optimizer") == ["ok"]


def test_an_update_function_of_ones_own_calls_the_attachments_loss_and_backward() -> None:
    """For a loss that is a function, and a backward pass on what was made of it."""
    engines = peer("engine")
    recorder = Recorder()
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        attachment.backward(attachment.loss(model(batch[0]), batch[1]) / 2)
        optimizer.step()

    trainer = engines.Engine(update)
    ours: Engine[Any] = Engine(algorithms=[LabelSmoothing()], callbacks=[recorder])
    attachment = adapter().use_engine(trainer, ours, model, optimizer, functional.cross_entropy)

    trainer.run(new_batches(), max_iters=2)

    assert recorder.events == [*FIRST, *EPOCH, "fit_end"]
    assert str(attachment.state.max_duration) == "2ba"


def test_an_interrupted_run_goes_on_where_it_was() -> None:
    """As a run of its own, which counts on."""
    counted: list[tuple[int, ...]] = []

    def note(state: Any) -> None:
        now = state.timestamp
        counted.append((int(now.epoch), int(now.batch), int(now.batch_in_epoch)))

    program = Program(Change(Event.BATCH_START, note))
    program.trainer.add_event_handler(program.events.ITERATION_COMPLETED(once=1), program.trainer.interrupt)

    first, second = program.run(epochs=2), program.run(epochs=2)

    assert first == [*FIRST, "epoch_start", *BATCH, *EPOCH[-2:], "fit_end"]
    assert second == [*FIRST, "epoch_start", *BATCH, *EPOCH[-2:], *EPOCH, "fit_end"]
    assert counted == [(0, 0, 0), (0, 1, 1), (1, 2, 0), (1, 3, 1)]


def test_the_spans_of_an_iteration_are_those_of_a_batch() -> None:
    """With the optimizer's own."""
    program = Program()

    program.run()

    spans = program.exporter.get_finished_spans()
    names = [span.name for span in spans if not span.name.startswith(("dispatch", "callback"))]
    one = ["dataloader", "forward", "loss", "backward", "train_batch", "optimizer", "batch", "batch"]
    assert names == ["run", *one, *one, "epoch"]


# ------------------------------------------------------------------------------------------ order, and what is written


def test_algorithms_run_in_the_order_of_the_passes() -> None:
    """The one that picks samples comes first, wherever it is registered."""
    ran: list[str] = []

    class Pick(Change):
        pass

    Pick.__name__ = "SelectiveBackprop"
    blend = Change(Event.AFTER_DATALOADER, lambda state: ran.append("blend"), "blend")
    pick = Pick(Event.AFTER_DATALOADER, lambda state: ran.append("pick"), "pick")
    cut = Change(Event.AFTER_DATALOADER, lambda state: ran.append("cut"), "cut")

    Program(blend, pick, cut).run(batches=new_batches(1))

    assert ran == ["pick", "cut", "blend"]


@pytest.mark.parametrize(
    "event", [Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD]
)
def test_what_an_algorithm_makes_of_the_batch_reaches_the_model(event: Event) -> None:
    """Up to the forward pass."""
    program = Program(Change(event, lambda state: state.batch_set_item(0, torch.zeros(6, 4))))
    sums: list[float] = []
    program.model.register_forward_pre_hook(lambda module, args: sums.append(float(args[0].sum())))

    program.run()

    assert sums == [0.0, 0.0]


def test_what_another_handler_makes_of_the_batch_reaches_the_algorithms() -> None:
    """Ignite's users change it on ITERATION_STARTED."""
    sums: list[float] = []
    program = Program(Change(Event.BATCH_START, lambda state: sums.append(float(state.batch[0].sum()))), attach=False)

    def switch(trainer: Any) -> None:
        trainer.state.batch = (torch.ones(6, 4), trainer.state.batch[1])

    program.trainer.add_event_handler(program.events.ITERATION_STARTED, switch)
    program.attach()

    program.run()

    assert sums == [24.0, 24.0]


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
def test_what_an_algorithm_makes_of_the_loss_is_what_is_trained_on(event: Event) -> None:
    """A loss of nothing has gradients of nothing."""
    program = Program(Change(event, lambda state: setattr(state, "loss", state.loss * 0)))
    before = [parameter.tolist() for parameter in program.model.parameters()]

    program.run()

    assert [parameter.tolist() for parameter in program.model.parameters()] == before


def test_the_trainers_algorithms_work_in_ignites() -> None:
    """They change the batch and the labels, and go by the fraction of the training."""
    program = Program(LabelSmoothing(0.3), SelectiveBackprop(start=0.5, end=1.0, interrupt=0))
    sizes: list[int] = []
    program.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))

    assert program.run(epochs=2) == [*FIRST, *EPOCH, *EPOCH, "fit_end"]
    assert sizes == [6, 6, 6, 3, 6, 3]  # from the half on, the whole batch to choose from, then the chosen half


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EPOCH_END])
def test_stop_training_terminates_the_run(event: Event) -> None:
    """Ignite fires its TERMINATE."""
    program = Program(Change(event, lambda state: state.stop_training()))
    fired: list[int] = []
    program.trainer.add_event_handler(program.events.TERMINATE, lambda: fired.append(program.trainer.state.iteration))

    events = program.run(epochs=5)

    expected = [1] if event == Event.BATCH_END else [2]
    assert fired == expected
    assert events[-3:] == ["epoch_end", "epoch_checkpoint", "fit_end"]


def test_a_state_of_ones_own_goes_on_counting() -> None:
    """INIT is its owner's to publish."""

    class Own:
        pass

    own = Own()
    program = Program(state=own)
    program.trainer.add_event_handler(program.events.EPOCH_COMPLETED, lambda: program.evaluator.run(new_batches()))
    program.run()
    program.trainer.state.max_epochs = None

    assert program.run() == ["fit_start", *EPOCH, *EVALUATION, "fit_end"]
    assert int(own.timestamp.batch) == 4  # type: ignore[attr-defined]
    assert list(own.metrics) == ["metrics/val/accuracy"]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- errors


def fail(state: Any) -> None:
    """Raise."""
    raise ZeroDivisionError("no samples")


@pytest.mark.parametrize(
    "event",
    [Event.INIT, Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BATCH_END, Event.EVAL_START],
)
def test_an_algorithm_that_raises_ends_the_run_as_itself(event: Event) -> None:
    """With its note and its traces, and no event after it."""
    program = Program(Change(event, fail))
    program.trainer.add_event_handler(program.events.ITERATION_COMPLETED, lambda: program.evaluator.run(new_batches()))

    with pytest.raises(ZeroDivisionError) as raised:
        program.run()

    assert raised.value.__notes__ == [f"in algorithm change on {event.name}"]
    assert list(raised.value.traces) == [f"change/{event.name}"]  # type: ignore[attr-defined]
    if event != Event.INIT:  # where the callbacks come first, and nothing has begun yet
        assert event.value not in program.recorder.events
        assert program.outcomes("epoch") == ["failed"]
    program.attachment.detach()
    program.engine = Engine()
    program.attach()


def test_an_error_that_a_handler_of_ignites_takes_ends_the_run_without_it() -> None:
    """As ignite has it: whoever handles EXCEPTION_RAISED decides."""
    program = Program(Change(Event.AFTER_FORWARD, fail))
    program.trainer.add_event_handler(program.events.EXCEPTION_RAISED, lambda trainer, error: None)

    events = program.run()

    assert events[-1] == "fit_end"
    assert program.outcomes("forward") == ["failed"]


def test_callbacks_that_raise_are_raised_together_and_async_ones_are_awaited() -> None:
    """As everywhere: all of them run first."""
    seen: list[str] = []

    class Bad(Callback[Any]):
        def batch_end(self, state: Any, logger: Any) -> None:
            raise ZeroDivisionError

    class Late(Callback[Any]):
        async def batch_end(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append("late")

    program = Program(callbacks=(Bad(), Late()))

    with pytest.raises(CallbackErrors) as raised:
        program.run()

    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]
    assert seen == ["late"]
    program.engine.sync.close()


def test_a_trainer_or_an_evaluator_takes_one_engine() -> None:
    """A second one would have everything published twice; detached, it makes room."""
    program = Program()
    other = Program(attach=False)
    other.evaluator = program.evaluator

    with pytest.raises(ConfigurationError, match=r"trainer has an engine already.*detach\(\)"):
        program.attach()
    with pytest.raises(ConfigurationError, match="val has an engine already"):
        other.attach()

    program.attachment.detach()
    other.attach()


def test_an_ignite_engine_has_one_part() -> None:
    """Under two labels, or as trainer and evaluator, everything of it would be published twice."""
    program = Program(attach=False)
    loop = (program.trainer, Engine(), program.model, program.optimizer)

    for evaluators in ({"a": program.evaluator, "b": program.evaluator}, {"trainer": program.trainer}):
        with pytest.raises(ConfigurationError, match="is here twice"):
            adapter().use_engine(*loop, evaluators=evaluators)


def test_an_evaluation_whose_error_is_caught_is_over() -> None:
    """The training goes on with its batch, and another evaluation is one of its own; ignite runs it to no result."""
    program = Program()
    results: list[Any] = []

    def evaluate(trainer: Any) -> None:
        batch = program.state.batch
        try:
            results.append(program.evaluator.run([(torch.zeros(6, 5), torch.zeros(6))]))
        except RuntimeError as error:
            results.append(type(error))
        assert program.state.batch is batch

    program.trainer.add_event_handler(program.events.ITERATION_COMPLETED, evaluate)

    events = program.run()

    assert results == [RuntimeError, None]
    failed = [*EVALUATION[:2], *EVAL_BATCH[:2]]
    empty = ["eval_before_all", "eval_start", "eval_end", "eval_after_all"]
    assert events == [
        *FIRST,
        "epoch_start",
        *BATCH,
        *failed,
        *BATCH,
        *empty,
        "epoch_end",
        "epoch_checkpoint",
        "fit_end",
    ]
    assert program.outcomes("eval") == ["failed", "failed", "ok", "ok"]


def test_a_model_in_two_runs_at_a_time_is_refused() -> None:
    """The hooks on it would publish everything twice."""
    inner, program = Program(attach=False), Program()
    inner.model = program.model
    inner.attach()
    program.trainer.add_event_handler(program.events.EPOCH_STARTED, lambda: inner.run(1))

    with pytest.raises(ConfigurationError, match="its model is in one already"):
        program.run()


def test_a_callback_open_in_two_engines_is_refused() -> None:
    """The first engine is still open."""

    class Open(Callback[Any]):
        def open(self, state: Any, logger: Any) -> None:
            """Acquire something."""

    shared = Open()
    first, second = Program(callbacks=(shared,)), Program(callbacks=(shared,))
    first.run()

    with pytest.raises(CallbackInUseError):
        second.run()

    first.engine.sync.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"trainer": nn.Identity()}, "trainer is a Identity; give an ignite.engine.Engine"),
        ({"evaluators": {"val": 3}}, "val is a int"),
        ({"model": 3}, "model is a int"),
        ({"optimizers": 3}, "3 is no optimizer"),
        ({"loss": 0.5}, "loss is a float"),
        ({"device": "gpu"}, "device='gpu' is no device"),
        ({"engine": Engine(events=Mine)}, "the engine's events are Mine"),
        ({"engine": Engine}, "give an Engine of ours, an instance"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], expected: str) -> None:
    """By name, with what would."""
    program = Program(attach=False)
    arguments = {
        "trainer": program.trainer,
        "engine": Engine(),
        "model": program.model,
        "optimizers": program.optimizer,
        **options,
    }

    with pytest.raises(ConfigurationError, match=expected):
        adapter().use_engine(**arguments)


def test_a_version_that_was_never_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For both directions."""
    program = Program(attach=False)
    monkeypatch.setattr(metadata, "version", lambda name: "0.4.13")

    with pytest.raises(ConfigurationError, match=r"pytorch-ignite 0\.4\.13 is installed.*goes with 0\.5\.5"):
        program.attach()
    with pytest.raises(ConfigurationError, match=r"eventbus-engine\[ignite\]"):
        adapter().IgniteTrainer()


def test_without_ignite_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error, with the one of the import as its cause."""
    adapter()
    for name in ("ignite", "_ignite_attachment", "_ignite_peer"):
        monkeypatch.delitem(sys.modules, f"eventbus_adapters.{name}")
    monkeypatch.setitem(sys.modules, "ignite.engine", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'eventbus-engine\[ignite\]'") as raised:
        importlib.import_module("eventbus_adapters.ignite")

    assert isinstance(raised.value.__cause__, ImportError)


# ------------------------------------------------------------------------------- their handlers and metrics in our loop


def our_trainer(*callbacks: Any, duration: str = "2ep", loggers: Any = (), lr: float = 0.1) -> Trainer:
    """Two batches an epoch, and an evaluation after each epoch."""
    model = new_model()
    return Trainer(
        model,
        new_batches(),
        new_batches(),
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        max_duration=duration,
        callbacks=callbacks,
        loggers=loggers,
        offload=False,
    )


def test_an_ignite_engine_follows_our_training() -> None:
    """Every event of its own, in its order, with its counters, and its filters."""
    follower = adapter().IgniteTrainer()
    events = peer("engine").Events
    heard: list[tuple[str, int, int]] = []
    for event in events:
        follower.engine.add_event_handler(
            event,
            lambda engine, name=event.name: heard.append((name, engine.state.epoch, engine.state.iteration)),
        )
    every: list[int] = []
    follower.engine.add_event_handler(
        events.ITERATION_COMPLETED(every=2), lambda engine: every.append(engine.state.iteration)
    )
    average = peer("metrics").RunningAverage(output_transform=lambda loss: loss)
    average.attach(follower.engine, "loss")

    anyio.run(our_trainer(follower).fit)

    iteration = ["GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED"]
    epoch = ["EPOCH_STARTED", *iteration, *iteration, "GET_BATCH_STARTED", "EPOCH_COMPLETED"]
    assert [name for name, _, _ in heard] == ["STARTED", *epoch, *epoch, "COMPLETED"]
    assert [(e, i) for name, e, i in heard if name == "ITERATION_STARTED"] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert every == [2, 4]
    assert (follower.engine.state.max_epochs, follower.engine.state.epoch_length) == (2, 2)
    assert follower.engine.state.metrics["loss"] > 0


def test_an_ignite_engine_follows_our_evaluations_and_its_metrics_are_logged() -> None:
    """An evaluation is an epoch of it; the metrics are those that ours measure."""
    follower = adapter().IgniteEvaluator(label="theirs")
    peer("metrics").Accuracy().attach(follower.engine, "accuracy")
    memory = InMemoryLogger()
    trainer = our_trainer(follower, loggers=[memory])

    anyio.run(trainer.fit)

    assert memory.get_timeseries("metrics/theirs/accuracy")["step"] == [2, 4]
    assert follower.engine.state.metrics["accuracy"] == pytest.approx(trainer.state.metrics["metrics/eval/accuracy"])
    assert (follower.engine.state.epoch, follower.engine.state.iteration) == (1, 2)


def test_ignites_early_stopping_stops_our_training() -> None:
    """A handler of the evaluator terminates the trainer; with a learning rate of 0 nothing improves."""
    training, evaluation = adapter().IgniteTrainer(), adapter().IgniteEvaluator()
    events = peer("engine").Events
    stopper = peer("handlers").EarlyStopping(2, lambda engine: -1.0, training.engine)
    evaluation.engine.add_event_handler(events.COMPLETED, stopper)
    terminated: list[int] = []
    training.engine.add_event_handler(events.TERMINATE, lambda engine: terminated.append(engine.state.epoch))
    trainer = our_trainer(training, evaluation, duration="10ep", lr=0.0)

    anyio.run(trainer.fit)

    assert int(trainer.state.timestamp.epoch) == 3
    assert terminated == [3]


def test_outputs_are_what_is_asked_for() -> None:
    """For trainers and evaluators; an evaluation without metrics logs nothing."""
    training = adapter().IgniteTrainer(lambda state: "trained", name="mine")
    evaluation = adapter().IgniteEvaluator(lambda state: "evaluated")

    anyio.run(our_trainer(training, evaluation, duration="2ba").fit)

    assert (training.engine.state.output, evaluation.engine.state.output) == ("trained", "evaluated")
    assert training.engine.state.max_epochs is None
    assert training.name == "mine"


def test_an_ignite_engine_that_follows_cannot_be_run() -> None:
    """Our Trainer runs; and there is no such option."""
    with pytest.raises(ConfigurationError, match="follows a Trainer of ours"):
        adapter().IgniteTrainer().engine.run([1])
    with pytest.raises(HandlerTypeError, match="has no option 'deliver'"):
        adapter().IgniteEvaluator(deliver="inline")


def test_a_training_state_does_as_the_state_of_an_attached_engine() -> None:
    """With its participants."""
    program = Program(attach=False)
    recorder = Recorder()
    state = State(program.model, callbacks=[recorder])
    program.engine = Engine(state)
    program.attach()

    program.run()

    assert recorder.events == ["fit_start", *EPOCH, "fit_end"]
