"""Composer's algorithms, callbacks and loggers in our Trainer, and how Composer itself is imported."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

composer: Any = pytest.importorskip("composer", reason="Composer has its own environment", exc_type=ImportError)

from eventbus_adapters._composer_peer import load_composer  # noqa: E402
from eventbus_adapters.composer import adapt  # noqa: E402
from eventbus_engine import Engine, Event, LoggerDestination  # noqa: E402
from eventbus_engine.errors import ConfigurationError  # noqa: E402
from eventbus_engine.time import Time, Timestamp  # noqa: E402
from eventbus_engine.training import State, Trainer  # noqa: E402

pytestmark = pytest.mark.anyio

algorithms: Any = importlib.import_module("composer.algorithms")
callbacks: Any = importlib.import_module("composer.callbacks")
loggers: Any = importlib.import_module("composer.loggers")


def model_and_batches() -> tuple[Any, DataLoader[Any]]:
    """A classifier of Composer's, and three batches for it."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    return (
        composer.models.ComposerClassifier(module, num_classes=3),
        DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12) % 3), batch_size=4),
    )


def made() -> list[Any]:
    """Algorithms that draw no random numbers."""
    return [
        algorithms.LabelSmoothing(0.1),
        algorithms.GradientClipping(clipping_type="norm", clipping_threshold=0.05),
        algorithms.EMA(half_life="2ba"),
    ]


async def test_algorithms_do_in_our_trainer_what_they_do_in_composers() -> None:
    """The same weights and learning rates after two epochs, bit for bit; and the loggers have them."""
    model, batches = model_and_batches()
    memory = loggers.InMemoryLogger()
    guests = [callbacks.SpeedMonitor(window_size=2), callbacks.LRMonitor(), memory]
    ours = Trainer(
        model,
        batches,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        algorithms=[adapt(each) for each in made()],
        callbacks=[adapt(each) for each in guests],
    )
    await ours.fit()

    other, batches = model_and_batches()
    theirs = composer.Trainer(
        model=other,
        train_dataloader=batches,
        optimizers=torch.optim.SGD(other.parameters(), lr=0.1),
        max_duration="2ep",
        algorithms=made(),
        progress_bar=False,
        device="cpu",
    )
    theirs.fit()
    theirs.close()

    weights = {name: value for name, value in model.state_dict().items() if "metric" not in name}
    expected = theirs.state.model.state_dict()
    assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == []
    assert [float(value) for _, value in memory.data["lr-SGD/group0"]] == [0.1] * 6
    assert [int(at.batch) for at, _ in memory.data["lr-SGD/group0"]] == [1, 2, 3, 4, 5, 6]
    assert "throughput/batches_per_sec" in memory.data


async def test_a_callback_of_composers_can_stop_our_trainer() -> None:
    """What it writes to Composer's State is ours; times go to and fro."""

    class Stop(composer.Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            assert isinstance(state, composer.State)
            assert state.timestamp is state.timestamp
            if state.timestamp >= "2ba":
                state.stop_training()

        def fit_end(self, state: Any, logger: Any) -> None:
            state.eval_timestamp = composer.core.Timestamp(batch=5)
            state.note = "its own"

    model, batches = model_and_batches()
    trainer = Trainer(
        model,
        batches,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="100ba",
        callbacks=[adapt(Stop())],
    )
    await trainer.fit()

    assert int(trainer.state.timestamp.batch) == 2
    assert trainer.state.max_duration == Time(2, "ba")
    assert trainer.state.eval_timestamp == Timestamp(batch=5)
    assert not hasattr(trainer.state, "note")


async def test_a_duration_may_be_written_as_a_string() -> None:
    """Composer's State takes one."""

    class Shorten(composer.Algorithm):
        def match(self, event: Any, state: Any) -> bool:
            return bool(event == composer.Event.BATCH_END)

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            state.max_duration = "2ba"

    model, batches = model_and_batches()
    trainer = Trainer(
        model,
        batches,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="3ba",
        algorithms=[adapt(Shorten())],
    )
    await trainer.fit()

    assert int(trainer.state.timestamp.batch) == 2


async def test_what_is_logged_reaches_the_destinations_of_both() -> None:
    """Whoever logs it: Composer's callback, our callback, the engine its traces."""

    class Theirs(loggers.LoggerDestination):
        def __init__(self) -> None:
            self.got: list[tuple[str, Any]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.got.append(("metrics", metrics))

        def log_hyperparameters(self, hyperparameters: Any) -> None:
            self.got.append(("hyperparameters", hyperparameters))

        def log_traces(self, traces: Any) -> None:
            self.got.append(("traces", traces))

        def log_table(self, columns: Any, rows: Any, name: str = "Table", step: int | None = None) -> None:
            self.got.append(("table", (columns, rows, name)))

        def log_images(self, images: Any, name: str, channels_last: bool, *rest: Any, **named: Any) -> None:
            self.got.append(("images", (images, channels_last)))

        def upload_file(self, state: Any, remote_file_name: str, file_path: Any, *, overwrite: bool = False) -> None:
            assert isinstance(state, composer.State)
            self.got.append(("file", (remote_file_name, str(file_path), overwrite)))

        def can_upload_files(self) -> bool:
            return True

    class Ours(LoggerDestination):
        def __init__(self) -> None:
            self.got: list[Any] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.got.append(metrics)

    class Log(composer.Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            assert isinstance(logger, loggers.Logger)
            assert logger.destinations == (theirs,)
            assert logger.has_file_upload_destination()
            logger.log_metrics({"a": 1})
            logger.log_hyperparameters({"b": 2})
            logger.log_table(["c"], [[3]], "t")
            logger.log_images([4], channels_last=True)
            logger.upload_file("{run_name}.txt", "/tmp/a")
            logger.log_traces({"d": 1})

    theirs, ours = Theirs(), Ours()
    smoothing = algorithms.LabelSmoothing(0.1)
    model, _ = model_and_batches()
    state = State(model, run_name="mine", algorithms=[adapt(smoothing)], callbacks=[adapt(Log()), adapt(theirs), ours])
    engine = Engine(state)
    await engine.run_event(Event.FIT_START)
    state.batch, state.outputs = (torch.zeros(2, 4), torch.tensor([0, 1])), torch.zeros(2, 3)
    await engine.run_event(Event.BEFORE_LOSS)
    await engine.close()

    assert theirs.got == [
        ("metrics", {"a": 1}),
        ("hyperparameters", {"b": 2}),
        ("table", (["c"], [[3]], "t")),
        ("images", ([4], True)),
        ("file", ("mine.txt", "/tmp/a", False)),
        ("traces", {"d": 1}),
        ("traces", {"algorithm_traces/label_smoothing/Event.BEFORE_LOSS": 1}),
    ]
    assert ours.got == [{"a": 1}]
    assert state.batch[1].shape == (2, 3)


async def test_a_state_that_composers_objects_cannot_use_is_refused() -> None:
    """A pipeline's record is no state of training."""
    engine = Engine(object(), algorithms=[adapt(algorithms.LabelSmoothing(0.1))])

    with pytest.raises(ConfigurationError, match="was to run on a object; give the engine Composer's State"):
        await engine.run_event(Event.BEFORE_LOSS)


async def test_our_engine_takes_a_logger_that_is_none_of_ours() -> None:
    """Composer's objects get it as it is."""

    class Log(composer.Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            got.append(logger)

    got: list[Any] = []
    logger = types.SimpleNamespace()
    engine = Engine(State(torch.nn.Linear(1, 1), callbacks=[adapt(Log())]), logger)
    await engine.run_event(Event.FIT_START)

    assert got == [logger]


def test_a_gpu_is_a_gpu_to_composer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its State is given Composer's device."""
    views = importlib.import_module("eventbus_adapters._composer_loop")
    monkeypatch.setattr(composer.devices, "DeviceGPU", lambda index: ("gpu", index))

    assert views._device(torch.device("cuda", 1)) == ("gpu", 1)
    assert isinstance(views._device(torch.device("cpu")), composer.devices.DeviceCPU)


# ------------------------------------------------------------------------------------------------------------- import


def of_version(version: str) -> types.ModuleType:
    """A module that says so."""
    module = types.ModuleType("composer")
    module.__version__ = version  # type: ignore[attr-defined]
    return module


def test_another_version_of_composer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the one to install."""
    monkeypatch.setitem(sys.modules, "composer", of_version("0.28.0"))
    with pytest.raises(ConfigurationError, match=r"mosaicml 0\.28\.0 is installed, .*goes with 0\.32 up to"):
        load_composer()


def test_a_composer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra to install."""
    monkeypatch.setitem(sys.modules, "composer", None)
    with pytest.raises(ConfigurationError, match=r"cannot be imported here .*eventbus-engine\[composer\]"):
        load_composer()


@pytest.mark.parametrize("on_main", [True, False])
def test_importing_composer_leaves_the_signal_handlers(on_main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine takes SIGINT and SIGTERM as it is imported; on another thread it cannot."""

    def importing(name: str) -> types.ModuleType:
        if on_main:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
        return of_version("0.32.9")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(importlib, "import_module", importing)
    call: Callable[[], Any] = load_composer
    if on_main:
        call()
    else:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    assert signal.getsignal(signal.SIGTERM) is before
