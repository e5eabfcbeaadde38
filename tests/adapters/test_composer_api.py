"""What `composer_api` does beyond what the program in `composer/test_core_program.py` asks of it and of Composer."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from eventbus_adapters import composer_api
from eventbus_adapters.composer_api import core
from eventbus_adapters.composer_api.core import (
    Algorithm,
    Callback,
    Engine,
    Event,
    State,
    Time,
    Timestamp,
    Trace,
    ensure_time,
)
from eventbus_adapters.composer_api.core.engine import OpenCallbackError
from eventbus_adapters.composer_api.core.passes import sort_fused_layernorm_last, sort_low_precision_layernorm_last
from eventbus_adapters.composer_api.loggers import Logger, LoggerDestination
from eventbus_engine import CallbackInUseError, ConfigurationError, SyncUsageError, UnknownEventError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training.algorithms import LabelSmoothing


def make_state(**arguments: Any) -> State:
    """A state that lacks nothing."""
    given: dict[str, Any] = {"max_duration": "2ep", **arguments}
    return State(torch.nn.Linear(2, 2), 7, "run", "cpu", **given)


def make_engine(*callbacks: Any, algorithms: Any = ()) -> Engine:
    """An engine over these participants."""
    state = make_state(algorithms=algorithms, callbacks=callbacks)
    return Engine(state, Logger(state, [each for each in callbacks if isinstance(each, LoggerDestination)]))


class Note(Algorithm):
    """Runs always, and logs that."""

    def match(self, event: Event, state: Any) -> bool:
        return True

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        logger.log_metrics({"noted": 1.0})


# ---------------------------------------------------------------------------------------------------------- the names


def test_composer_itself_is_not_imported_and_torch_only_for_a_state() -> None:
    """What stands in for it starts in a fraction of the time, and installs no handlers of signals."""
    program = (
        "import signal, sys; before = signal.getsignal(signal.SIGTERM);"
        "from eventbus_adapters.composer_api.core import Engine; import eventbus_adapters.composer_api.loggers;"
        "assert not {'composer', 'torch'} & set(sys.modules);"
        "assert signal.getsignal(signal.SIGTERM) is before"
    )

    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", [composer_api, core], ids=["composer_api", "core"])
def test_a_state_is_there_by_name_and_nothing_else_is(module: Any) -> None:
    """Only `State` waits until it is asked for."""
    assert module.State is State
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        _ = module.Trainer
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_pass_for_layer_norms_has_both_its_names() -> None:
    """Composer has called it so at one time, and so at another."""
    assert sort_low_precision_layernorm_last is sort_fused_layernorm_last


def test_there_is_a_hook_for_every_event_and_none_costs_anything() -> None:
    """Those that are not overridden are known to do nothing."""

    class Watch(Callback):
        def batch_end(self, state: Any, logger: Any) -> None: ...

    engine = make_engine(Watch()).engine

    assert [event for event in Event if not callable(getattr(Callback, event.value))] == []
    assert engine._roster.latest.heard == {Event.BATCH_END}


def test_participants_go_by_the_name_of_their_class_unless_they_have_another() -> None:
    """As in Composer's traces."""

    class Named(Note):
        name = "mine"

    traces = make_engine(algorithms=[Note(), Note(), Named()]).run_event("batch_end")

    assert list(traces) == ["Note/BATCH_END", "Note#2/BATCH_END", "mine/BATCH_END"]


# --------------------------------------------------------------------------------------------------------- the engine


def test_the_engine_underneath_explains() -> None:
    """What Composer has not is one attribute away."""
    engine = make_engine(algorithms=[Note()])

    assert engine.engine.explain("batch_end").order == ("Note",)


def test_state_and_logger_can_be_replaced() -> None:
    """Their participants take part from then on."""
    engine, state = make_engine(), make_state(algorithms=[Note()])

    engine.state, engine.logger = state, Logger(state)

    assert (engine.state, engine.logger.destinations) == (state, [])
    assert list(engine.run_event("batch_end")) == ["Note/BATCH_END"]


def test_a_pair_in_a_list_is_a_pass_and_its_index() -> None:
    """Composer takes it as well as the tuple."""

    def keep(algorithms: Any, event: Any) -> Any:
        return algorithms

    state = make_state()
    engine = Engine(state, Logger(state), [keep, 0])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]

    assert engine.algorithm_passes[0] is keep


def test_async_participants_take_part_in_an_event_that_blocks() -> None:
    """Nothing has to be plain."""
    seen: list[str] = []

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append("sent")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make_engine(Remote())
        engine.run_event(Event.BATCH_END)
        engine.close()

    assert seen == ["sent"]


def test_an_async_participant_cannot_take_part_in_an_event_run_by_a_handler() -> None:
    """It cannot be waited for there; the error says what to do, and the engine goes on."""
    seen: list[str] = []

    class Remote(Callback):
        async def eval_start(self, state: Any, logger: Any) -> None:
            await anyio.sleep_forever()

        def batch_start(self, state: Any, logger: Any) -> None:
            seen.append("batch_start")

    class Evaluate(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            engine.run_event("eval_start")

    engine = make_engine(Remote(), Evaluate())
    with pytest.raises(SyncUsageError, match=r"await engine\.engine\.run_event"):
        engine.run_event("batch_end")
    engine.run_event("batch_start")

    assert seen == ["batch_start"]


def test_of_several_failures_the_first_is_raised_and_has_the_others_in_its_notes() -> None:
    """Whoever catches an exception of a callback catches what the first of them raised."""

    class Broken(Callback):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def batch_end(self, state: Any, logger: Any) -> None:
            raise self.error

    with pytest.raises(KeyError) as caught:
        make_engine(Broken(KeyError("first")), Broken(OSError("second"))).run_event("batch_end")

    assert "besides, another callback raised OSError('second')" in caught.value.__notes__


def test_closing_from_inside_a_handler_closes_once_the_event_is_over() -> None:
    """And only once."""
    calls: list[str] = []

    class Stop(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            engine.close()
            calls.append("batch_end")

        def close(self, state: Any, logger: Any) -> None:
            calls.append("close")

    engine = make_engine(Stop())
    engine.run_event("batch_end")
    engine.close()

    assert calls == ["batch_end", "close"]


def test_an_open_callback_is_refused_by_a_typed_error_that_says_what_to_do() -> None:
    """Of this package's tree as well as a RuntimeError; the engine that has it may begin again."""
    callback = Callback()
    first, second = make_engine(callback), make_engine(callback)
    first.run_event("init")
    first.run_event("init")

    with pytest.raises(OpenCallbackError, match=r"Callback is still open in another engine; close\(\) that one first"):
        second.run_event("init")
    assert issubclass(OpenCallbackError, CallbackInUseError)


def test_a_marker_of_an_unknown_event_is_refused() -> None:
    """Though it would run nothing."""
    with pytest.raises(UnknownEventError, match="AFTER_DATALOADER"):
        make_engine().run_marker_only_event("after_dataloder")


# ----------------------------------------------------------------------------------------------------------- debugging


def spans_of(sampler: Sampler, caplog: pytest.LogCaptureFixture) -> tuple[list[str], list[str]]:
    """What is said, and the names of the spans, of an event that is debugged."""

    class Watch(Callback):
        def batch_end(self, state: Any, logger: Any) -> None: ...

    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = make_engine(Watch(), algorithms=[Note()])
    engine.engine.tracers._own = provider
    caplog.set_level(logging.DEBUG, logger="eventbus_adapters.composer_api")
    engine.run_event("batch_end")
    said = [record.message.rpartition(": ")[2] for record in caplog.records if "[event=" in record.message]
    return said, [span.name for span in exporter.get_finished_spans()]


@pytest.mark.filterwarnings("ignore:.*draws.*random")
@pytest.mark.parametrize(
    ("sampler", "spans"),
    [(ALWAYS_ON, ["algorithm Note", "callback Watch", "dispatch batch_end"]), (ALWAYS_OFF, [])],
    ids=["sampled", "not sampled"],
)
def test_debugging_leaves_the_spans_as_they_are(
    sampler: Sampler, spans: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is said and recorded; what is not sampled is said all the same."""
    monkeypatch.setenv("ENGINE_DEBUG", "1")

    said, recorded = spans_of(sampler, caplog)

    assert said == ["Running event", "Running algorithm Note", "Running callback Watch"]
    assert recorded == spans


# ------------------------------------------------------------------------------------------------------------- loggers


class Keep(LoggerDestination):
    """A destination in Composer's way, whose parameters have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def log_metrics(self, numbers: Any, batch: Any) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.records.append((numbers, batch))

    def log_traces(self, traces: Any) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.records.append(traces)


def test_destinations_of_both_kinds_get_what_they_expect() -> None:
    """Composer's get their arguments by position and traces as numbers, the package's get traces."""
    theirs, ours = Keep(), InMemoryLogger(log_traces=True)
    state = make_state(algorithms=[Note()])
    logger = Logger(state, theirs)
    logger.add_destination(ours)

    traces = Engine(state, logger).run_event("batch_end")

    assert theirs.records == [({"noted": 1.0}, 0), {"algorithm_traces/Note/Event.BATCH_END": 1}]
    assert (ours.data, ours.traces) == ({"noted": [(0, 1.0)]}, [(0, traces)])


def test_a_destination_that_fails_stops_nothing_unless_it_is_told_to(caplog: pytest.LogCaptureFixture) -> None:
    """Telemetry never kills a run."""

    class Broken(LoggerDestination):
        def batch_end(self, state: Any, logger: Any) -> None:
            raise OSError("disk full")

    make_engine(Broken()).run_event("batch_end")
    strict = Broken()
    strict.on_error = "raise"

    with pytest.raises(OSError, match="disk full"):
        make_engine(strict).run_event("batch_end")
    assert "destination Broken failed on BATCH_END" in caplog.text


def test_braces_that_mean_nothing_stay_in_the_name_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the run and the ranks are filled in."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    seen: list[Any] = []

    class Files(LoggerDestination):
        def upload_file(self, **given: Any) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append((given["remote_file_name"], given["file_path"]))

    Logger(make_state(), Files()).upload_file("{run_name}-{local_rank}-{epoch}", "/x")

    assert seen == [("run-3-{epoch}", Path("/x"))]


# ------------------------------------------------------------------------------------------------------ time and state


def test_a_timestamp_stays_one_of_composers() -> None:
    """Through all that makes another one."""
    start = Timestamp()
    made = [start.copy(), start.to_next_batch(), start.to_next_epoch(), start.to_next_iteration()]

    assert {type(timestamp) for timestamp in made} == {Timestamp}


def test_ensure_time_reads_what_from_input_reads() -> None:
    """A number in the unit that is given."""
    assert ensure_time(3, "ba") == Time(3, "ba")


def test_algorithms_of_the_package_run_on_a_state_of_composers() -> None:
    """It is one of the package's."""
    state = make_state(algorithms=[LabelSmoothing(0.2)])
    state.batch, state.outputs = (torch.zeros(1, 2), torch.tensor([0])), torch.zeros(1, 2)
    engine = Engine(state, Logger(state))

    engine.run_event("before_loss")
    smoothed = state.batch[1]
    engine.run_event("after_loss")

    assert torch.allclose(smoothed, torch.tensor([[0.9, 0.1]]))
    assert state.batch[1].tolist() == [0]


def test_what_belongs_to_composers_trainer_is_refused() -> None:
    """Sharding, that is."""
    with pytest.raises(ConfigurationError, match="shard the model yourself"):
        make_state(parallelism_config={})


def test_a_length_needs_a_loader() -> None:
    """There is nothing to be long."""
    with pytest.raises(ConfigurationError, match="call set_dataloader first"):
        make_state().dataloader_len = 3


def test_a_loader_whose_length_raises_has_none() -> None:
    """As that of a DataLoader over a stream."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

        def __len__(self) -> int:
            raise NotImplementedError

    state = make_state(dataloader=torch.utils.data.DataLoader(Stream()), dataloader_label="train")

    assert state.dataloader_len is None


def test_a_blank_trace_is_the_packages() -> None:
    """With more than Composer's to it."""
    assert Trace().outcome == "skipped"
