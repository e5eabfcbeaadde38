"""A Trainer of Composer's on our Engine: its events, their order, what reaches its loop, errors, closing."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

composer: Any = pytest.importorskip("composer", reason="Composer has its own environment", exc_type=ImportError)

from eventbus_adapters.composer import ComposerEngine, adapt, use_engine  # noqa: E402
from eventbus_engine import Callback, Event, LoggerDestination, algorithm  # noqa: E402
from eventbus_engine.errors import (  # noqa: E402
    CallbackErrors,
    CallbackInUseError,
    ConfigurationError,
    CycleError,
    EngineClosedError,
    PassError,
    SyncUsageError,
    UnknownEventError,
)

algorithms: Any = importlib.import_module("composer.algorithms")
loggers: Any = importlib.import_module("composer.loggers")
profiler: Any = importlib.import_module("composer.profiler")
THEIRS: Any = composer.core.Event

Make = Callable[..., Any]

BATCH = """before_dataloader after_dataloader batch_start before_train_batch before_forward after_forward before_loss
after_loss before_backward after_backward after_train_batch batch_end batch_checkpoint""".split()
EPOCH = [*"iteration_start epoch_start".split(), *BATCH * 3, "before_dataloader", "epoch_end", "epoch_checkpoint"]


class Watch(composer.Callback):
    """Notes the events it gets, and checks that they are Composer's."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        assert isinstance(event, THEIRS)
        assert isinstance(state, composer.State)
        assert isinstance(logger, loggers.Logger)
        self.events.append(event.value)


class Note(composer.Algorithm):
    """Notes that it ran on an event."""

    def __init__(self, notes: list[str], event: Any = THEIRS.AFTER_DATALOADER, exit_code: int | None = None) -> None:
        self.notes, self.event, self.exit_code = notes, event, exit_code

    def match(self, event: Any, state: Any) -> bool:
        return bool(event == self.event)

    def apply(self, event: Any, state: Any, logger: Any) -> int | None:
        self.notes.append(type(self).__name__)
        return self.exit_code


class MixUp(Note):
    """By the name of Composer's."""


class CutMix(Note):
    """By the name of Composer's."""


class SelectiveBackprop(algorithms.SelectiveBackprop):
    """Composer's, which runs at every batch and notes it."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(start=0.0, end=1.0, keep=0.5, interrupt=0)
        self.notes = notes

    def apply(self, event: Any, state: Any, logger: Any) -> Any:
        if event == THEIRS.AFTER_DATALOADER:
            self.notes.append("SelectiveBackprop")
        return super().apply(event, state, logger)


def test_the_trainer_publishes_its_events_in_its_order(make_trainer: Make) -> None:
    """Exactly the sequence that Composer's own engine gives, from FIT_START on."""
    watch = Watch()
    trainer = make_trainer(callbacks=[watch])
    use_engine(trainer)
    trainer.fit()

    assert watch.events == ["init", "before_load", "after_load", "fit_start", *EPOCH, "fit_end"]


@pytest.mark.parametrize("ours", [False, True])
def test_selective_backprop_comes_first_after_the_dataloader(ours: bool, make_trainer: Make) -> None:
    """In Composer's engine it comes last, where it has to judge what the others have augmented."""
    notes: list[str] = []
    trainer = make_trainer(algorithms=[MixUp(notes), SelectiveBackprop(notes), CutMix(notes)], max_duration="1ba")
    if ours:
        use_engine(trainer)
    trainer.fit()

    first_batch = ["SelectiveBackprop", "CutMix", "MixUp"] if ours else ["CutMix", "MixUp", "SelectiveBackprop"]
    assert notes == first_batch


def test_what_algorithms_write_reaches_the_loop(make_trainer: Make) -> None:
    """Composer's and ours: the loop trains on the batch that they leave."""
    losses: list[float] = []

    class Zero(Note):
        def apply(self, event: Any, state: Any, logger: Any) -> None:
            inputs, targets = state.batch
            state.batch = torch.zeros_like(inputs), targets

    @algorithm(Event.AFTER_LOSS)
    def halve(event: Event, state: Any, logger: Any) -> None:
        losses.append(float(state.loss.detach()))
        state.loss = state.loss * 0

    trainer = make_trainer(algorithms=[Zero([])], max_duration="1ba")
    use_engine(trainer, algorithms=[halve])
    trainer.fit()

    assert len(losses) == 1
    assert trainer.state.batch[0].abs().sum() == 0
    assert float(trainer.state.total_loss_dict["loss/train/total"]) == 0.0


@pytest.mark.parametrize("ours", [False, True])
def test_the_traces_that_run_event_returns_are_composers(ours: bool, make_trainer: Make) -> None:
    """Keys, values and order, of what ran."""
    first, second = Note([], THEIRS.BATCH_START, exit_code=7), MixUp([], THEIRS.BATCH_START)
    trainer = make_trainer(algorithms=[first, Note([]), second])
    if ours:
        use_engine(trainer)
    event = THEIRS.BATCH_START

    # Composer's has an empty trace for each algorithm as well, of the same name, which is overwritten.
    assert trainer.engine.run_event("batch_start") == {
        f"{first}/{event}": composer.core.Trace("Note", event, 7, 0, run=True),
        f"{second}/{event}": composer.core.Trace("MixUp", event, None, 1, run=True),
    }
    assert trainer.engine.run_event(THEIRS.FIT_END) == {}


@pytest.mark.parametrize("name", ["batch_start", "BATCH_START", THEIRS.BATCH_START, Event.BATCH_START])
def test_an_event_may_be_given_in_any_form(name: Any, make_trainer: Make) -> None:
    """As Composer's engine and ours take it."""
    watch = Watch()
    trainer = make_trainer(callbacks=[watch])
    use_engine(trainer).run_event(name)

    assert watch.events[-1] == "batch_start"


def test_an_unknown_event_is_refused(make_trainer: Make) -> None:
    """With the nearest names."""
    with pytest.raises(UnknownEventError, match="BATCH_START"):
        use_engine(make_trainer()).run_event("batch_strat")


# ------------------------------------------------------------------------------------------------------------ errors


def test_an_algorithm_that_raises_ends_the_fit_as_itself(make_trainer: Make) -> None:
    """With a note, and with the traces so far; callbacks do not run for the event."""

    class Fail(Note):
        def apply(self, event: Any, state: Any, logger: Any) -> None:
            raise OSError("no disk")

    notes: list[str] = []
    watch = Watch()
    trainer = make_trainer(algorithms=[MixUp(notes), Fail([]), CutMix(notes)], callbacks=[watch])
    use_engine(trainer)
    with pytest.raises(OSError, match="no disk") as caught:
        trainer.fit()

    traces: Any = caught.value.traces  # type: ignore[attr-defined]
    assert caught.value.__notes__ == ["in algorithm fail on AFTER_DATALOADER"]
    assert {key: trace.outcome for key, trace in traces.items()} == {
        "cut_mix/AFTER_DATALOADER": "ok",
        "fail/AFTER_DATALOADER": "failed",
        "mix_up/AFTER_DATALOADER": "skipped",
    }
    assert notes == ["CutMix"]
    assert watch.events[-1] == "before_dataloader"


def test_a_callback_that_raises_lets_the_others_finish(make_trainer: Make) -> None:
    """Then the fit ends with all failures, in the order of registration."""

    class Fail(composer.Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            raise OSError("no disk")

    watch = Watch()
    trainer = make_trainer(callbacks=[Fail(), watch, Fail()])
    use_engine(trainer)
    with pytest.raises(CallbackErrors) as caught:
        trainer.fit()

    assert [type(error) for error in caught.value.exceptions] == [OSError, OSError]
    assert watch.events[-1] == "batch_start"


def test_a_logger_that_raises_is_logged_and_the_fit_goes_on(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Telemetry never kills a run; under Composer's engine it does."""

    class Fail(loggers.LoggerDestination):
        def batch_end(self, state: Any, logger: Any) -> None:
            raise OSError("no disk")

    trainer = make_trainer(loggers=[Fail()])
    use_engine(trainer)
    with caplog.at_level(logging.ERROR, "eventbus_engine"):
        trainer.fit()

    assert int(trainer.state.timestamp.batch) == 3
    assert [record.getMessage() for record in caplog.records] == ["destination fail failed on BATCH_END"] * 3


# ------------------------------------------------------------------------------------------------- other participants


def test_callbacks_of_ours_run_beside_composers(make_trainer: Make) -> None:
    """An async one and a destination; what they log reaches Composer's destinations."""

    class Remote(Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        async def batch_end(self, state: Any, logger: Any) -> None:
            self.seen.append(int(state.timestamp.batch))
            logger.log_metrics({"remote": len(self.seen)})
            logger.log_hyperparameters({"depth": 3})

    class Keep(LoggerDestination):
        def __init__(self) -> None:
            self.metrics: list[tuple[dict[str, Any], int | None]] = []
            self.traces: list[str] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.metrics.append((dict(metrics), step))

        async def log_traces(self, traces: Any, step: int | None = None) -> None:
            self.traces += [key for key, trace in traces.items() if trace.run]

    remote, keep, memory = Remote(), Keep(), loggers.InMemoryLogger()
    trainer = make_trainer(loggers=[memory], algorithms=[Note([])])
    use_engine(trainer, callbacks=[remote, keep])
    trainer.fit()

    assert remote.seen == [1, 2, 3]
    assert [(int(at.batch), value) for at, value in memory.data["remote"]] == [(1, 1), (2, 2), (3, 3)]
    assert memory.hyperparameters["depth"] == 3
    assert keep.metrics == [({"remote": batch}, batch) for batch in (1, 2, 3)]
    assert keep.traces == ["note/AFTER_DATALOADER"] * 3


def test_everything_that_can_be_logged_reaches_composers_destinations(make_trainer: Make) -> None:
    """Each method of the logger, with Composer's arguments."""

    class Keep(loggers.LoggerDestination):
        def __init__(self) -> None:
            self.got: dict[str, tuple[Any, ...]] = {}

        def log_table(self, *arguments: Any) -> None:
            self.got["table"] = arguments

        def log_images(self, *arguments: Any) -> None:
            self.got["images"] = arguments

        def upload_file(self, state: Any, remote_file_name: str, file_path: Any, *, overwrite: bool) -> None:
            self.got["file"] = remote_file_name, str(file_path), overwrite

        def can_upload_files(self) -> bool:
            return True

    keep = Keep()
    engine = use_engine(make_trainer(loggers=[keep]))
    logger = engine.engine.logger
    logger.log_table(["a"], [[1]], "t")
    logger.log_images([1], channels_last=True)
    logger.upload_file("{run_name}.txt", "/tmp/a", overwrite=True)

    assert keep.got == {
        "table": (["a"], [[1]], "t", 0),
        "images": ([1], "Images", True, 0, None, None, True),
        "file": ("run.txt", "/tmp/a", True),
    }


def test_participants_that_join_and_leave_do_so_from_the_next_event_on(make_trainer: Make) -> None:
    """Composer's lists are live."""
    notes: list[str] = []
    trainer = make_trainer()
    engine = use_engine(trainer)
    late, watch = Note(notes, THEIRS.BATCH_START), Watch()
    trainer.state.algorithms.append(late)
    trainer.state.callbacks.append(watch)
    engine.run_event("batch_start")
    trainer.state.algorithms.remove(late)
    engine.run_event("batch_start")
    state: Any = engine.engine.state
    state.batch = "seen"

    assert trainer.state.batch == "seen"
    assert (notes, watch.events) == (["Note"], ["batch_start", "batch_start"])


def test_a_pass_gets_composers_event_and_objects(make_trainer: Make) -> None:
    """One given to the Trainer, one in front of all, and one that is registered later and adds an algorithm."""
    notes: list[str] = []
    seen: list[tuple[str, bool]] = []

    def last(found: Any, event: Any) -> Any:
        seen.append(("last", event is THEIRS.AFTER_DATALOADER))
        return sorted(found, key=lambda each: isinstance(each, MixUp))

    def front(found: Any, event: Any) -> Any:
        seen.append(("front", all(isinstance(each, Note) for each in found)))
        return found

    trainer = make_trainer(algorithms=[CutMix(notes), MixUp(notes), Note(notes)], algorithm_passes=[last, (front, 0)])
    engine = use_engine(trainer)
    engine.register_pass(lambda found, event: [*found, extra])
    extra = CutMix(notes)
    seen.clear()
    traces = engine.run_event("after_dataloader")

    assert notes == ["Note", "CutMix", "MixUp", "CutMix"]
    assert seen == [("front", True), ("last", True)]
    assert [trace.order for trace in traces.values()] == [0, 1, 2, 3]
    assert len(engine.algorithm_passes) == len(trainer.engine.engine.algorithm_passes)


def test_a_pass_that_returns_nothing_is_named(make_trainer: Make) -> None:
    """As under our Engine anywhere."""

    def forgetful(found: Any, event: Any) -> None:
        sorted(found, key=str)

    engine = use_engine(make_trainer(algorithms=[Note([])]))
    engine.register_pass(forgetful)
    with pytest.raises(PassError, match="forgetful"):
        engine.run_event("after_dataloader")


def test_an_algorithm_of_composers_may_say_where_it_belongs(make_trainer: Make) -> None:
    """The options of our algorithms count, and name Composer's classes."""
    notes: list[str] = []
    first, second = MixUp(notes), CutMix(notes)
    second.run_after = [MixUp]
    trainer = make_trainer(algorithms=[first, second])
    use_engine(trainer).run_event("after_dataloader")

    assert notes == ["MixUp", "CutMix"]

    third, fourth = MixUp(notes), CutMix(notes)
    third.run_after, fourth.run_after = [CutMix], [MixUp]
    with pytest.raises(CycleError):
        use_engine(make_trainer(algorithms=[third, fourth]))


def test_a_callback_may_run_the_trainer_in_its_turn(make_trainer: Make) -> None:
    """Composer's engine allows events within events, as an evaluation inside a callback."""
    trainer: Any = None
    watch = Watch()

    class Evaluate(composer.Callback):
        def fit_end(self, state: Any, logger: Any) -> None:
            trainer.eval(eval_dataloader=trainer.state.train_dataloader, subset_num_batches=1)

    trainer = make_trainer(callbacks=[Evaluate(), watch], max_duration="1ba")
    use_engine(trainer)
    trainer.fit()

    batch = "eval_batch_start eval_before_forward eval_after_forward eval_batch_end".split()
    evaluation = ["eval_standalone_start", "eval_start", *batch, "eval_end", "eval_standalone_end"]
    assert watch.events[-len(evaluation) - 1 :] == [*evaluation, "fit_end"]


def test_an_event_within_an_event_that_would_have_to_wait_says_so(make_trainer: Make) -> None:
    """A plain callback cannot wait for an async one."""
    trainer: Any = None

    class Nest(composer.Callback):
        def fit_end(self, state: Any, logger: Any) -> None:
            trainer.engine.run_event("batch_end")

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            pass

    trainer = make_trainer(callbacks=[Nest()])
    engine = use_engine(trainer, callbacks=[Remote()])
    with pytest.raises(CallbackErrors) as caught:
        engine.run_event("fit_end")

    assert [type(error) for error in caught.value.exceptions] == [SyncUsageError]


# --------------------------------------------------------------------------------------------------- spans, profiler


def test_the_run_has_spans(make_trainer: Make) -> None:
    """A dispatch span for each event, and below it those that ran, under the names of Composer's classes."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trainer = make_trainer(algorithms=[Note([])], callbacks=[Watch()], max_duration="1ba")
    use_engine(trainer, tracer_provider=provider)
    trainer.fit()
    spans = exporter.get_finished_spans()
    dispatches = {span.context.span_id: span.name for span in spans if span.context and "dispatch" in span.name}

    below = [(span.name, dispatches.get(span.parent.span_id, "")) for span in spans if span.parent is not None]
    assert ("algorithm note", "dispatch after_dataloader") in below
    assert ("callback watch", "dispatch batch_end") in below
    assert len(dispatches) == 1 + 2 + len(BATCH) + 1


def run_with_spans(trainer: Any) -> list[tuple[str, str, str]]:
    """Fit, and return the spans but the dispatches and what is below them: name, outcome, and the parent's name."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = use_engine(trainer, tracer_provider=provider)
    with contextlib.suppress(ArithmeticError):
        trainer.fit()
    engine.close()
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans if span.context}
    (run,) = (span.context for span in spans if span.name == "run")
    for span in spans:
        attributes = span.attributes or {}
        if attributes["eventbus.kind"] in ("batch", "epoch", "eval"):
            assert [link.context.span_id for link in span.links] == [run.span_id if run else 0]
    return [
        (span.name, str((span.attributes or {})["eventbus.outcome"]), names[span.parent.span_id] if span.parent else "")
        for span in spans
        if (span.attributes or {})["eventbus.kind"] not in ("dispatch", "algorithm", "callback")
    ]


def test_the_spans_are_those_of_a_training_run(make_trainer: Make) -> None:
    """A short run, linked to by a trace for each epoch and batch, with the work between the halves of a pair in it."""
    spans = run_with_spans(make_trainer(max_duration="1ep"))
    batch = [
        ("dataloader", "ok", "batch"),
        ("forward", "ok", "train_batch"),
        ("loss", "ok", "train_batch"),
        ("backward", "ok", "train_batch"),
        ("train_batch", "ok", "batch"),
        ("batch", "ok", "batch"),
        ("batch", "ok", ""),
    ]

    assert spans == [
        ("run", "ok", ""),
        *batch * 3,
        ("dataloader", "ok", "end of data"),
        ("end of data", "ok", ""),
        ("epoch", "ok", "epoch"),
        ("epoch", "ok", ""),
        ("iteration", "ok", "fit"),
        ("fit", "ok", "run"),
    ]


@pytest.mark.parametrize("event", [THEIRS.AFTER_LOSS, None])
def test_an_error_ends_the_spans_that_are_open(event: Any, make_trainer: Make) -> None:
    """At once if it is a handler's; one of the loop itself as soon as it shows, at the end of the Trainer at last."""

    class Fail(Note):
        def apply(self, event: Any, state: Any, logger: Any) -> int | None:
            raise ArithmeticError

    trainer = make_trainer(max_duration="1ep", algorithms=[] if event is None else [Fail([], event)])
    if event is None:
        trainer.state.model.loss = lambda *args, **kwargs: 1 / 0
    spans = run_with_spans(trainer)

    assert spans[0] == ("run", "ok", "")
    assert spans[1:4] == [
        ("dataloader", "ok", "batch"),
        ("forward", "ok", "train_batch"),
        ("loss", "failed", "train_batch"),
    ]
    assert {outcome for _, outcome, _ in spans[4:]} == {"failed"}
    assert [name for name, _, _ in spans[4:]] == ["train_batch", "batch", "batch", "epoch", "epoch", "iteration", "fit"]


class Handler(profiler.TraceHandler):
    """Notes what a profiler records."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bool]] = []

    def process_duration_event(self, name: str, *, is_start: bool, **rest: Any) -> None:
        self.records.append((name, is_start))


def test_the_profiler_records_what_it_records_in_composers_engine(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event, algorithm and callback markers, starts and ends, at the end of the data too."""

    def record(ours: bool) -> list[tuple[str, bool]]:
        handler = Handler()
        schedule = profiler.cyclic_schedule(wait=0, warmup=0, active=1, repeat=0)
        folder = tmp_path / ("ours" if ours else "theirs")
        watching = profiler.Profiler(schedule, [handler], sys_prof_cpu=False, torch_prof_folder=str(folder))
        trainer = make_trainer(
            algorithms=[Note([]), MixUp([], THEIRS.BEFORE_LOSS)], callbacks=[Count()], profiler=watching
        )
        trainer.fit()
        trainer.close()
        return handler.records

    class Count(composer.Callback):
        HOOKS = ("batch_end", "epoch_end")

        def batch_end(self, state: Any, logger: Any) -> None:
            pass

        def epoch_end(self, state: Any, logger: Any) -> None:
            pass

    theirs = record(ours=False)
    monkeypatch.setattr("composer.trainer.trainer.Engine", ComposerEngine)
    ours = record(ours=True)

    names = {name for name, _ in ours}
    # Composer's calls, and so records, a callback on events that it has no hook for.
    assert ours == [record for record in theirs if not record[0].startswith("callback") or record[0] in names]
    assert {name for name in names if "/Count/" in name} == {f"callback/Count/event/{end}" for end in Count.HOOKS}
    assert {"algorithm/MixUp/event/before_loss", "event/dataloader", "event/fit"} <= names


# ----------------------------------------------------------------------------------------------------------- closing


class Life(composer.Callback):
    """Notes how it is closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def close(self, state: Any, logger: Any) -> None:
        assert isinstance(state, composer.State)
        assert isinstance(logger, loggers.Logger)
        self.calls.append("close")

    def post_close(self) -> None:
        self.calls.append("post_close")


def test_closing_the_trainer_closes_its_callbacks_once(make_trainer: Make) -> None:
    """And another Trainer may have them then; the closed one says what to do."""
    life = Life()
    trainer = make_trainer(callbacks=[life])
    engine = use_engine(trainer)
    trainer.fit()
    trainer.close()
    trainer.close()

    assert life.calls == ["close", "post_close"]
    with pytest.raises(EngineClosedError, match="make a new Engine"):
        engine.run_event("batch_start")
    make_trainer(callbacks=[life])


def test_the_workers_of_the_data_loader_are_shut_down(make_trainer: Make) -> None:
    """As Composer's engine does for persistent ones."""

    class Iterator_:
        stopped = False

        def _shutdown_workers(self) -> None:
            self.stopped = True

    trainer = make_trainer()
    use_engine(trainer)
    trainer.state.train_dataloader._iterator = workers = Iterator_()
    trainer.close()

    assert workers.stopped


def test_an_engine_that_is_dropped_or_survives_to_the_end_is_closed(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composer's programs close nothing themselves."""
    hooks: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda function, *rest: hooks.append(function))
    dropped, surviving = Life(), Life()
    trainer = make_trainer(callbacks=[dropped])
    engine: Any = ComposerEngine(trainer.state, trainer.logger)
    engine.run_event("batch_start")
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    other = make_trainer(callbacks=[surviving])
    use_engine(other)
    for hook in hooks:
        if getattr(hook, "args", None):  # ours
            hook()

    assert gone() is None
    assert dropped.calls == ["close", "post_close"]
    assert surviving.calls == ["close", "post_close"]


# ------------------------------------------------------------------------------------------------------------- misuse


def test_what_is_no_trainer_is_refused() -> None:
    """With what to give instead."""
    with pytest.raises(ConfigurationError, match=r"takes a composer\.Trainer, not a str"):
        use_engine("trainer")


def test_a_trainer_that_has_our_engine_is_refused(make_trainer: Make) -> None:
    """Every event would run twice."""
    trainer = make_trainer()
    use_engine(trainer)
    with pytest.raises(ConfigurationError, match="was called on this Trainer before"):
        use_engine(trainer)


def test_a_trainer_that_is_closed_is_refused(make_trainer: Make) -> None:
    """There is nothing left to run."""
    trainer = make_trainer()
    trainer.close()
    with pytest.raises(ConfigurationError, match="the Trainer is closed"):
        use_engine(trainer)


def test_a_callback_that_is_open_in_another_engine_is_refused(make_trainer: Make) -> None:
    """In one of ours, and in one of Composer's."""
    life = Life()
    trainer = make_trainer(callbacks=[life])
    use_engine(trainer).run_event("batch_start")
    with pytest.raises(CallbackInUseError, match="callback life is open in another engine; close that one"):
        ComposerEngine(trainer.state, trainer.logger).run_event("batch_start")
    with pytest.raises(CallbackInUseError, match="callback Life is open in another trainer; close that one"):
        ComposerEngine(trainer.state, trainer.logger).run_event("init")


def test_an_object_of_composers_is_adapted_once() -> None:
    """So an engine knows it again; what is none of Composer's stays what it is."""
    note = Note([])
    guest = adapt(note)

    assert adapt(note) is adapt(guest) is guest
    assert (isinstance(guest, Note), repr(guest), guest.notes) == (True, repr(note), [])
    assert adapt("plain") == "plain"
    assert not hasattr(adapt(Life()), "batch_end")
