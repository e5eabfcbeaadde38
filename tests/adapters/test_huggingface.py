"""`eventbus_adapters.huggingface`, with transformers itself: a tiny classifier of made-up tokens.

transformers takes seconds to import, so that is done by the first test that runs, and not where tests are collected.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from eventbus_engine.errors import BatchError, CallbackInUseError, ConfigurationError, HandlerTypeError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.telemetry import PrivateIdGenerator
from eventbus_engine.training import State
from eventbus_engine.training import Trainer as OurTrainer
from eventbus_engine.training.algorithms import LabelSmoothing, SelectiveBackprop

if TYPE_CHECKING:
    from transformers import Trainer

DATALOADER = ["before_dataloader", "after_dataloader"]
CALLS = "before_forward after_forward before_loss after_loss before_backward after_backward".split()
BATCH = [
    *DATALOADER,
    "batch_start",
    "before_train_batch",
    *CALLS,
    "after_train_batch",
    "batch_end",
    "batch_checkpoint",
]
EPOCH = ["epoch_start", *BATCH, *BATCH, "epoch_end", "epoch_checkpoint"]
EVAL_BATCH = "eval_batch_start eval_before_forward eval_after_forward eval_batch_end".split()
EVALUATOR = ["eval_start", *EVAL_BATCH, *EVAL_BATCH, "eval_end"]
FIRST = ["init", "fit_start"]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and results stay comparable across machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Accelerate collects garbage before each run, which what has been imported would make slow."""
    adapter()
    new_model()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Trainer writes goes to a folder of the test's."""
    monkeypatch.chdir(tmp_path)


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
    return importlib.import_module("eventbus_adapters.huggingface")


def new_model() -> Any:
    """The same small classifier each time, with dropout, which draws from the global generator."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    config.num_labels = 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(config)


def new_dataset(samples: int = 8) -> list[dict[str, Any]]:
    """Rows of four tokens, and one of three classes."""
    tokens = torch.randint(0, 16, (samples, 4), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": index % 3} for index, row in enumerate(tokens)]


def new_trainer(model: Any = None, dataset: Any = None, kind: type[Any] | None = None, **options: Any) -> Trainer:
    """Two batches of four samples an epoch, and nothing that the test does not ask for."""
    import transformers

    eval_dataset = options.pop("eval_dataset", None)
    arguments: dict[str, Any] = {
        "output_dir": "out",
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "seed": 3,
    }
    trainer = (kind or transformers.Trainer)(
        model or new_model(),
        transformers.TrainingArguments(**{**arguments, **options}),
        train_dataset=dataset or new_dataset(),
        eval_dataset=eval_dataset,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Program:
    """Somebody's Trainer, with an engine put into it."""

    def __init__(self, *algorithms: Any, callbacks: tuple[Any, ...] = (), loss: Any = None, **options: Any) -> None:
        self.recorder = Recorder()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.engine: Engine[Any] = Engine(
            algorithms=algorithms, callbacks=[self.recorder, *callbacks], tracer_provider=provider
        )
        self.trainer: Any = new_trainer(**options)
        self.attributes = {id(owner): dict(vars(owner)) for owner in (self.trainer, self.trainer.accelerator)}
        self.callback = adapter().use_engine(self.trainer, self.engine, loss)

    def train(self, **options: Any) -> list[str]:
        """The events of the run."""
        self.recorder.events.clear()
        self.trainer.train(**options)
        return list(self.recorder.events)

    def wrapped(self) -> set[str]:
        """The attributes of the Trainer and its accelerator that only the adapter can have put there."""
        names = {"get_batch_samples", "training_step", "compute_loss", "evaluate", "evaluation_loop"}
        names |= {"prediction_step", "backward", "train", "loss_is_scaled_for_ga"}
        return names & {*vars(self.trainer), *vars(self.trainer.accelerator)}

    @property
    def state(self) -> Any:
        """The engine's."""
        return self.engine.state

    def outcomes(self, name: str) -> list[Any]:
        """The outcomes of the spans of a name, in the order of their ends."""
        spans = self.exporter.get_finished_spans()
        return [span.attributes["eventbus.outcome"] for span in spans if span.name == name and span.attributes]


def parameters(model: nn.Module) -> list[float]:
    """All of them."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def leave_out_dropout(model: Any) -> Any:
    """So that two models do the same whatever has been drawn before."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# ------------------------------------------------------------------------------------------------------------- events


def test_a_trainer_publishes_the_events_of_training_and_evaluation_in_their_order() -> None:
    """Two epochs, with an evaluation after each, as the Trainer makes it: after the epoch."""
    program = Program(num_train_epochs=2, eval_strategy="epoch", eval_dataset=new_dataset())
    evaluation = ["eval_before_all", *EVALUATOR, "eval_after_all"]

    events = program.train()

    assert events == [*FIRST, *EPOCH, *evaluation, *EPOCH, *evaluation, "fit_end"]
    assert program.wrapped() == {"train"}
    assert sorted(program.state.metrics) == ["metrics/eval/loss"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_algorithms_a_trainer_trains_bit_for_bit_as_it_would_alone(accumulation: int) -> None:
    """Its draws, its losses, its parameters; and it is given back as it was."""
    options: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "eval_strategy": "epoch",
        "eval_dataset": new_dataset(),
        "num_train_epochs": 2,
    }
    program = Program(**options)
    bare: Any = new_trainer(**options)

    losses: list[float] = []
    for trainer in (bare, program.trainer):
        torch.manual_seed(5)
        losses.append(trainer.train().training_loss)
    program.callback.remove()

    assert losses[0] == losses[1]
    assert parameters(bare.model) == parameters(program.trainer.model)
    assert bare.evaluate()["eval_loss"] == program.trainer.evaluate()["eval_loss"]
    assert program.wrapped() == set()


def test_several_batches_of_one_step_are_parts_of_one_batch_of_ours() -> None:
    """Each is fetched, and goes through the model and back; the batch counts the samples of all of them."""
    counted: list[tuple[int, int]] = []

    def note(state: Any) -> None:
        counted.append((int(state.timestamp.batch), int(state.timestamp.sample)))

    program = Program(Change(Event.BATCH_END, note), gradient_accumulation_steps=2, dataset=new_dataset(12))
    first = [*DATALOADER, "batch_start", "before_train_batch", *CALLS, *DATALOADER, *CALLS, *BATCH[-3:]]

    events = program.train()

    assert events == [*FIRST, "epoch_start", *first, *BATCH, *EPOCH[-2:], "fit_end"]
    assert counted == [(1, 8), (2, 12)]


def test_evaluations_of_several_data_sets_are_evaluators_of_one_evaluation() -> None:
    """Their metrics have the label that the Trainer gives them."""
    program = Program(eval_strategy="epoch", eval_dataset={"a": new_dataset(), "b": new_dataset()})

    events = program.train()

    assert events == [*FIRST, *EPOCH, "eval_before_all", *EVALUATOR, *EVALUATOR, "eval_after_all", "fit_end"]
    assert sorted(program.state.metrics) == ["metrics/eval_a/loss", "metrics/eval_b/loss"]


def test_outside_of_training_the_trainer_publishes_nothing() -> None:
    """There is no run that an evaluation or a prediction would belong to."""
    program = Program(eval_dataset=new_dataset())

    program.trainer.evaluate()
    program.trainer.predict(new_dataset())

    assert program.recorder.events == []


def test_a_prediction_in_the_course_of_training_publishes_nothing_of_its_own() -> None:
    """A callback may make one."""
    program = Program(Change(Event.BATCH_CHECKPOINT, lambda state: None))
    program.engine.bus.subscribe(lambda envelope: program.trainer.predict(new_dataset(4)), Event.BATCH_CHECKPOINT)

    assert program.train() == [*FIRST, *EPOCH, "fit_end"]


def test_data_that_ends_too_early_ends_the_fetch() -> None:
    """An iterable data set may have less than it was said to have."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(new_dataset(4))

    program = Program(dataset=Stream(), max_steps=2)

    events = program.train()

    assert events[: 3 + len(BATCH)] == [*FIRST, "epoch_start", *BATCH]
    assert events.count("batch_end") == 2
    assert "failed" not in program.outcomes("end of data")
    assert program.outcomes("end of data")


def test_a_run_that_begins_anew_with_smaller_batches_is_a_run_of_its_own() -> None:
    """The one that ran out of memory has failed."""
    fails = [True]

    def run_out(state: Any) -> None:
        if fails and fails.pop():
            raise RuntimeError("CUDA out of memory.")

    program = Program(Change(Event.BEFORE_BACKWARD, run_out), auto_find_batch_size=True)

    events = program.train()

    begun = [*FIRST, "epoch_start", *BATCH[: BATCH.index("before_backward")]]
    assert events[: len(begun)] == begun
    assert events[len(begun) : len(begun) + 3] == [*FIRST, "epoch_start"]
    assert events.count("batch_end") > 2
    assert program.outcomes("backward")[0] == "failed"


def test_a_resumed_trainer_goes_on_counting_where_it_was() -> None:
    """The Trainer's own step is the batch."""
    before = Program(num_train_epochs=2, save_strategy="steps", save_steps=3)
    before.train()
    counted: list[tuple[int, int]] = []

    def note(state: Any) -> None:
        counted.append((int(state.timestamp.epoch), int(state.timestamp.batch)))

    program = Program(Change(Event.BATCH_START, note), num_train_epochs=2)
    program.train(resume_from_checkpoint="out/checkpoint-3")

    assert counted == [(1, 3)]
    assert str(program.state.max_duration) == "4ba"


def test_the_spans_of_a_step_are_those_of_a_batch() -> None:
    """With the optimizer's own, after the training on the batch."""
    program = Program()

    program.train()

    spans = program.exporter.get_finished_spans()
    names = [span.name for span in spans if not span.name.startswith(("dispatch", "callback"))]
    one = ["dataloader", "forward", "loss", "backward", "train_batch", "optimizer", "batch", "batch"]
    assert names == ["run", *one, *one, "epoch"]
    assert set(program.outcomes("batch")) == {"ok"}


def test_what_the_trainer_logs_goes_to_the_destinations_as_well() -> None:
    """Loss, learning rate, and the metrics of evaluations."""
    memory = InMemoryLogger()
    program = Program(callbacks=(memory,), logging_strategy="steps", logging_steps=1)

    program.train()

    assert memory.get_timeseries("learning_rate")["step"] == [1, 2]


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

    Program(blend, pick, cut, max_steps=1).train()

    assert ran == ["pick", "cut", "blend"]


def test_what_an_algorithm_makes_of_the_batch_reaches_the_model_and_the_count_of_its_labels() -> None:
    """The model averages over the labels that are left, and not over those that the loader gave."""

    def halve(state: Any) -> None:
        for key in ("input_ids", "labels"):
            state.batch_set_item(key, state.batch[key][:2])

    program = Program(Change(Event.AFTER_DATALOADER, halve), max_steps=1)
    seen: list[Any] = []
    program.trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((len(kwargs["input_ids"]), int(kwargs["num_items_in_batch"]))),
        with_kwargs=True,
    )

    program.train()

    assert seen == [(2, 2)]


def test_what_an_algorithm_changes_and_adds_before_the_forward_pass_reaches_the_model() -> None:
    """By name, as the model takes its batches."""

    def change(state: Any) -> None:
        tokens = torch.zeros_like(state.batch["input_ids"])
        state.batch = {**state.batch, "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    program = Program(Change(Event.BEFORE_FORWARD, change), max_steps=1)
    seen: list[Any] = []
    program.trainer.model.bert.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((int(args[0].sum()), kwargs["attention_mask"] is not None)),
        with_kwargs=True,
    )

    program.train()

    assert seen == [(0, True)]


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
@pytest.mark.parametrize("loss", [None, functional.cross_entropy])
def test_what_an_algorithm_makes_of_the_loss_is_what_is_trained_on(event: Event, loss: Any) -> None:
    """A loss of nothing has gradients of nothing."""
    program = Program(Change(event, lambda state: setattr(state, "loss", state.loss * 0)), loss=loss)
    before = parameters(program.trainer.model)

    program.train()

    assert parameters(program.trainer.model) == before


def test_a_loss_of_the_adapters_is_trained_on_and_evaluated_with() -> None:
    """Label smoothing has to come between the outputs and the loss; its gradients are those of a loop by hand."""
    program = Program(
        LabelSmoothing(0.3, target_key="labels"),
        loss=functional.cross_entropy,
        max_steps=1,
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=new_dataset(),
    )
    program.trainer.loss_is_scaled_for_ga = True  # of no account to another loss
    leave_out_dropout(program.trainer.model)
    batches: list[dict[str, Any]] = []
    program.engine.bus.subscribe(
        lambda envelope: batches.append({name: value.clone() for name, value in envelope.state.batch.items()}),
        Event.AFTER_DATALOADER,
    )
    twin = leave_out_dropout(new_model())

    program.train()

    assert program.trainer.loss_is_scaled_for_ga is True
    batch = batches[0]
    loss: Any = functional.cross_entropy(twin(batch["input_ids"]).logits, batch["labels"], label_smoothing=0.3)
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(parameters(program.trainer.model), parameters(twin))
    tokens = torch.stack([row["input_ids"] for row in new_dataset()])
    labels = torch.tensor([row["labels"] for row in new_dataset()])
    with torch.no_grad():
        expected = float(functional.cross_entropy(twin(tokens).logits, labels))
    assert program.state.metrics["metrics/eval/loss"] == pytest.approx(expected, rel=1e-5)


def test_selective_backprop_picks_by_the_adapters_loss() -> None:
    """Its extra forward pass is its own and publishes nothing; the model is then trained on the half that it keeps."""
    pick = SelectiveBackprop(start=0.0, end=1.0, interrupt=0, input_key="input_ids", target_key="labels")
    memory: list[int] = []
    program = Program(
        pick,
        Change(Event.BEFORE_FORWARD, lambda state: memory.append(len(state.batch["labels"]))),
        loss=functional.cross_entropy,
    )
    assert program.train() == [*FIRST, *EPOCH, "fit_end"]
    assert memory == [2, 2]


def test_a_change_that_could_not_reach_the_models_own_loss_is_refused() -> None:
    """The model has computed it already; the error says what to give."""
    program = Program(LabelSmoothing(0.3, target_key="labels"))
    changed = Program(Change(Event.BEFORE_LOSS, lambda state: state.batch_set_item("labels", None)))

    with pytest.raises(BatchError, match="LabelSmoothing needs the model's output to be one tensor"):
        program.train()
    with pytest.raises(BatchError, match="use_engine\\(trainer, engine, loss="):
        changed.train()


def test_stop_training_ends_the_run_after_the_step() -> None:
    """And its epoch, as the Trainer does it."""
    program = Program(Change(Event.BATCH_END, lambda state: state.stop_training()), num_train_epochs=5)

    events = program.train()

    assert events == [*FIRST, "epoch_start", *BATCH, *EPOCH[-2:], "fit_end"]
    assert program.trainer.state.global_step == 1


@pytest.mark.parametrize("event", [Event.EPOCH_END, Event.EVAL_AFTER_ALL])
def test_stop_training_at_the_end_of_an_epoch_or_of_an_evaluation_ends_the_run(event: Event) -> None:
    """Before another epoch begins."""
    program = Program(
        Change(event, lambda state: state.stop_training()),
        num_train_epochs=5,
        eval_strategy="epoch",
        eval_dataset=new_dataset(),
    )

    program.train()

    assert program.trainer.state.global_step == 2


def test_a_state_of_ones_own_goes_on_counting() -> None:
    """INIT is its owner's to publish."""
    model = new_model()
    state = State(model)
    recorder = Recorder()
    state.callbacks.append(recorder)
    trainer = new_trainer(model)
    adapter().use_engine(trainer, Engine(state))

    trainer.train()
    trainer.train()

    assert recorder.events == ["fit_start", *EPOCH, "fit_end"] * 2
    assert int(state.timestamp.batch) == 4


def test_a_subclass_that_computes_its_own_loss_has_it_published() -> None:
    """Whatever `compute_loss` it brings, with and without outputs."""
    import transformers

    class Own(transformers.Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            return (outputs.loss * 2, outputs) if return_outputs else outputs.loss * 2

    losses: list[float] = []
    note = Change(Event.AFTER_LOSS, lambda state: losses.append(state.loss.item() / state.outputs.loss.item()))
    program = Program(note, kind=Own, eval_strategy="epoch", eval_dataset=new_dataset())

    assert [event for event in program.train() if "eval" not in event] == [*FIRST, *EPOCH, "fit_end"]
    assert losses == [2.0, 2.0]


# ------------------------------------------------------------------------------------------------------------- errors


def fail(state: Any) -> None:
    """Raise."""
    raise ZeroDivisionError("no samples")


@pytest.mark.parametrize(
    "event", [Event.INIT, Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BATCH_END]
)
def test_an_algorithm_that_raises_ends_the_run_as_itself(event: Event) -> None:
    """With its note and its traces, no event after it, and a Trainer that trains again."""
    program = Program(Change(event, fail))

    with pytest.raises(ZeroDivisionError) as raised:
        program.train()

    assert raised.value.__notes__ == [f"in algorithm change on {event.name}"]
    assert list(raised.value.traces) == [f"change/{event.name}"]  # type: ignore[attr-defined]
    assert event.value not in program.recorder.events[:-1]
    assert program.wrapped() == {"train"}
    if event != Event.INIT:
        assert program.outcomes("epoch") == ["failed"]
    program.callback.remove()
    adapter().use_engine(program.trainer, Engine())
    program.trainer.train()


def test_an_error_in_an_evaluation_ends_its_spans() -> None:
    """And the run's."""
    program = Program(Change(Event.EVAL_BATCH_START, fail), eval_strategy="epoch", eval_dataset=new_dataset())

    with pytest.raises(ZeroDivisionError):
        program.train()

    assert program.outcomes("eval") == ["failed", "failed"]  # the evaluator's, and the whole


def test_an_evaluation_whose_error_is_caught_is_over() -> None:
    """The training goes on with its batch, and its spans are none of the evaluation's."""
    import transformers

    program = Program()

    class Caught(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            batch = program.state.batch
            with pytest.raises(ValueError, match="batch received was empty"):
                program.trainer.evaluate(eval_dataset=[{"nothing": 1}])
            assert program.state.batch is batch

    program.trainer.add_callback(Caught())
    events = program.train()

    assert events.count("batch_end") == events.count("eval_before_all") == 2
    assert set(program.outcomes("eval")) == {"failed"}


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
        program.train()

    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]
    assert seen == ["late"]
    program.engine.sync.close()


def test_a_trainer_takes_one_engine() -> None:
    """A second one would have everything published twice; removed, it makes room."""
    program = Program()

    with pytest.raises(ConfigurationError, match=r"has an engine already.*remove\(\)"):
        adapter().use_engine(program.trainer, Engine())

    program.callback.remove()
    adapter().use_engine(program.trainer, Engine()).remove()


def test_a_model_or_an_engine_in_two_runs_at_a_time_is_refused() -> None:
    """Whoever has it first keeps it."""
    inner: Any = new_trainer()
    program = Program()
    adapter().use_engine(inner, program.engine)
    program.engine.bus.subscribe(lambda envelope: inner.train(), Event.EPOCH_START)

    with pytest.raises(CallbackErrors) as raised:
        program.train()

    assert "its engine is in one already" in str(raised.value.exceptions[0])


def test_a_callback_open_in_two_engines_is_refused() -> None:
    """The first one's Trainer has left it open, as the engine is still open."""

    class Open(Callback[Any]):
        def open(self, state: Any, logger: Any) -> None:
            """Acquire something."""

    shared = Open()
    first, second = Program(callbacks=(shared,)), Program(callbacks=(shared,))
    first.train()

    with pytest.raises(CallbackInUseError):
        second.train()

    first.engine.sync.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"trainer": nn.Identity()}, "trainer is a Identity; give a transformers.Trainer"),
        ({"loss": 0.5}, "loss is a float"),
        ({"engine": Engine(events=Mine)}, "the engine's events are Mine"),
        ({"engine": None}, "give an Engine of ours, an instance"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], expected: str) -> None:
    """By name, with what would."""
    arguments = {"engine": Engine(), **options}
    trainer = arguments.pop("trainer", None) or new_trainer()

    with pytest.raises(ConfigurationError, match=expected):
        adapter().use_engine(trainer, **arguments)


def test_a_model_copied_to_several_devices_is_refused() -> None:
    """What its copies compute, on threads of their own, nobody can follow."""
    program = Program()
    program.trainer.args._n_gpu = 2

    with pytest.raises(ConfigurationError, match="start one process for each by torchrun"):
        program.train()


def test_a_version_that_was_never_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For both directions."""
    trainer = new_trainer()
    monkeypatch.setattr(metadata, "version", lambda name: "4.57.1")

    with pytest.raises(ConfigurationError, match=r"transformers 4\.57\.1 is installed.*goes with 5\.23"):
        adapter().use_engine(trainer, Engine())
    with pytest.raises(ConfigurationError, match=r"eventbus-engine\[huggingface\]"):
        adapter().HuggingFaceCallback(trainer.callback_handler.callbacks[0])


def test_without_transformers_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error, with the one of the import as its cause."""
    adapter()
    monkeypatch.delitem(sys.modules, "eventbus_adapters.huggingface")
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'eventbus-engine\[huggingface\]'") as raised:
        importlib.import_module("eventbus_adapters.huggingface")

    assert isinstance(raised.value.__cause__, ImportError)


# ----------------------------------------------------------------------------------------- their callbacks in our loop


def our_trainer(*callbacks: Any, duration: str = "2ep", **options: Any) -> OurTrainer:
    """Two batches an epoch, and an evaluation after each epoch."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(2)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    return OurTrainer(
        model,
        batches,
        batches[:1],
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1)),
        max_duration=duration,
        callbacks=callbacks,
        offload=False,
        **options,
    )


def test_their_callback_is_called_as_by_their_trainer() -> None:
    """Every hook that has an event of ours, with their state, kept up to date, and their control."""
    import transformers

    heard: list[tuple[str, int, float]] = []

    class Theirs(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)

            def hook(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                assert {"model", "optimizer", "lr_scheduler", "train_dataloader"} <= set(kwargs)
                heard.append((name, state.global_step, state.epoch))
                return control

            return hook

    wrapped = adapter().HuggingFaceCallback(Theirs())
    anyio.run(our_trainer(wrapped, duration="1ep").fit)

    step = ["on_step_begin", "on_pre_optimizer_step", "on_log", "on_optimizer_step", "on_step_end"]
    end = ["on_epoch_end", "on_prediction_step", "on_log", "on_evaluate", "on_train_end"]
    assert [name for name, _, _ in heard] == ["on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, *end]
    assert [(count, epoch) for name, count, epoch in heard if name == "on_step_end"] == [(1, 0.5), (2, 1.0)]
    assert (wrapped.name, wrapped.state.max_steps, wrapped.state.num_train_epochs) == ("theirs", 2, 1)
    assert wrapped.state.log_history[-1]["step"] == 2


def test_their_early_stopping_stops_our_training() -> None:
    """It looks at the metric that their arguments name, by our metrics; with a learning rate of 0 nothing improves."""
    import transformers

    args = transformers.TrainingArguments(
        output_dir="out", metric_for_best_model="loss", greater_is_better=False, eval_strategy="epoch", report_to=[]
    )
    logging.getLogger("transformers").setLevel(logging.ERROR)
    stopper = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = our_trainer(adapter().HuggingFaceCallback(stopper, args), duration="10ep", lr=0.0)

    anyio.run(trainer.fit)

    assert int(trainer.state.timestamp.epoch) == 3


@pytest.mark.parametrize(("duration", "steps"), [("2ba", 2), ("12sp", 0)])
def test_a_duration_in_batches_is_their_number_of_steps(duration: str, steps: int) -> None:
    """Where the loader has no length, the epoch is a whole number. What is logged before the training is not theirs."""
    import transformers

    wrapped = adapter().HuggingFaceCallback(transformers.TrainerCallback(), name="mine", on_error="log")
    trainer = our_trainer(wrapped, duration=duration)
    trainer.state.train_dataloader = iter(())
    trainer.logger.log_metrics({"early": 1.0})
    anyio.run(trainer.fit)

    assert (wrapped.state.max_steps, wrapped.state.epoch) == (steps, 1)
    assert not any("early" in logs for logs in wrapped.state.log_history)
    assert (wrapped.name, wrapped.on_error) == ("mine", "log")


def test_what_is_no_callback_of_theirs_is_refused() -> None:
    """And so is an option that there is not."""
    import transformers

    with pytest.raises(ConfigurationError, match="is no TrainerCallback of transformers"):
        adapter().HuggingFaceCallback(Recorder())
    with pytest.raises(HandlerTypeError, match="has no option 'deliver'"):
        adapter().HuggingFaceCallback(transformers.TrainerCallback(), deliver="inline")
