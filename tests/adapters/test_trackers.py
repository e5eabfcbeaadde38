"""The trackers over their real clients: what their own readers find, also when a client is slow, fails or is gone."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

from eventbus_engine import Callback, CloseReport, ConfigurationError, Engine, EventName, Retry

pytestmark = pytest.mark.anyio

Series = dict[str, list[tuple[int, float]]]
"""Metric to its steps and values, in the order in which the tracker's reader finds them."""

ON_ONE_LOOP = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""Where all is up to the client."""

ONCE = Retry(attempts=1)
QUICK = Retry(attempts=5, initial=0.001, maximum=0.001)


class Job(EventName):
    """A vocabulary."""

    STEP = "step"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the clients keep what they keep anywhere; they report to nobody, and leave nothing behind."""
    folder = tmp_path_factory.mktemp("home")
    # In memory where that can be had: MLflow makes a database in hundreds of steps, each waiting for the disk.
    memory = Path("/dev/shm")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as databases,
    ):
        patch.setenv("MLFLOW_TEST_FOLDER", databases)
        patch.setenv("HOME", str(folder))
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_SILENT", "true")
        for name in ("CACHE", "CONFIG", "DATA"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder / name))
        yield folder
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()


# -------------------------------------------------------------------------------------- the trackers, and their readers


class Case(Protocol):
    """A tracker, and how its own reader reads what it has kept."""

    name: str
    infinity: float

    def make(self, folder: Path, **options: Any) -> Any: ...

    def read(self, folder: Path, tracker: Any) -> Series: ...

    def parameters(self, folder: Path, tracker: Any) -> dict[str, Any]: ...


class TensorBoard:
    """Event files, by TensorBoard's event reader."""

    name = "tensorboard"
    infinity = math.inf

    def make(self, folder: Path, **options: Any) -> Any:
        from eventbus_adapters.tensorboard import TensorBoardLogger

        return TensorBoardLogger(folder, **options)

    def events(self, folder: Path) -> Any:
        """All of them."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        guidance = {"scalars": 0, "images": 0, "tensors": 0}
        return EventAccumulator(str(folder), guidance, purge_orphaned_data=False).Reload()

    def read(self, folder: Path, tracker: Any) -> Series:
        events = self.events(folder)
        return {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def parameters(self, folder: Path, tracker: Any) -> dict[str, Any]:
        from tensorboard.plugins.hparams import metadata

        (content,) = self.events(folder).PluginTagToContent("hparams").values()
        found = metadata.parse_session_start_info_plugin_data(content).hparams
        return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


def nested(items: Iterable[Any]) -> dict[str, Any]:
    """Values by their names, as W&B keeps them: of what is in a dict, all the keys on the way to it."""
    found: dict[str, Any] = {}
    for item in items:
        *way, last = [item.key] if item.key else item.nested_key
        inner = found
        for key in way:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return found


class Wandb:
    """Offline files, by W&B's own reader of them."""

    name = "wandb"
    infinity = math.inf

    def make(self, folder: Path, **options: Any) -> Any:
        import wandb

        from eventbus_adapters.wandb import WandbLogger

        settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True)
        return WandbLogger("tests", directory=folder, init={"settings": settings}, **options)

    def records(self, folder: Path) -> list[Any]:
        """All of the records of the one run there, once W&B's process has written the last of them."""
        (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        deadline = time.monotonic() + 30
        while (records := self._scan(path)) == [] or records[-1].WhichOneof("record_type") != "exit":
            assert time.monotonic() < deadline, "the run has no end"
        return records

    def _scan(self, path: Path) -> list[Any]:
        from wandb.proto import wandb_internal_pb2
        from wandb.sdk.internal.datastore import DataStore

        store: Any = DataStore()
        made: Any = wandb_internal_pb2
        records: list[Any] = []
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = made.Record()
            record.ParseFromString(data)
            records.append(record)
        store.close()
        return records

    def rows(self, folder: Path) -> list[dict[str, Any]]:
        """The history."""
        histories = [record.history for record in self.records(folder) if record.WhichOneof("record_type") == "history"]
        return [nested(history.item) for history in histories]

    def read(self, folder: Path, tracker: Any) -> Series:
        series: Series = defaultdict(list)
        for row in self.rows(folder):
            for name in row:
                if not name.startswith(("_", "eventbus/")):
                    series[name].append((row["eventbus/step"], row[name]))
        return dict(series)

    def parameters(self, folder: Path, tracker: Any) -> dict[str, Any]:
        updates = [
            item
            for record in self.records(folder)
            if record.WhichOneof("record_type") == "config"
            for item in record.config.update
        ]
        return {name: value for name, value in nested(updates).items() if name != "_wandb"}


class MLflow:
    """A database, by MLflow's client. One for all tests: it takes seconds to make."""

    name = "mlflow"
    infinity = sys.float_info.max
    numbers = itertools.count()

    @property
    def uri(self) -> str:
        """In the folder of all tests."""
        return f"sqlite:///{Path(os.environ['MLFLOW_TEST_FOLDER']) / 'mlflow.db'}"

    def make(self, folder: Path, **options: Any) -> Any:
        from eventbus_adapters.mlflow import MLflowLogger

        experiment = f"tests {next(self.numbers)}"
        artifacts = {"experiment": experiment, "artifact_location": str(folder / "artifacts")}
        return MLflowLogger(self.uri, **artifacts, **options)

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def read(self, folder: Path, tracker: Any) -> Series:
        names = self.client.get_run(tracker.run_id).data.metrics
        histories = {name: self.client.get_metric_history(tracker.run_id, name) for name in names}
        return {name: [(metric.step, metric.value) for metric in history] for name, history in histories.items()}

    def parameters(self, folder: Path, tracker: Any) -> dict[str, Any]:
        return dict(self.client.get_run(tracker.run_id).data.params)


CASES: list[Case] = [TensorBoard(), Wandb(), MLflow()]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    """Each of them."""
    found: Case = request.param
    return found


# ------------------------------------------------------------------------------------------------------------- the runs


def generators() -> tuple[Any, ...]:
    """The states of the global generators."""
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


def metrics_of(step: int) -> dict[str, Any]:
    """Several metrics, NaN and the infinities among them."""
    special = {3: math.nan, 5: math.inf, 7: -math.inf}
    return {"loss/train": torch.tensor(special.get(step, step / 4)), "lr": 0.5, "seen": np.int64(step * 8)}


def series_of(case: Case, steps: Sequence[int]) -> str:
    """What a reader is to find, as text, in which one NaN is like another."""
    special = {3: math.nan, 5: case.infinity, 7: -case.infinity}
    return shown(
        {
            "loss/train": [(step, special.get(step, step / 4)) for step in steps],
            "lr": [(step, 0.5) for step in steps],
            "seen": [(step, step * 8) for step in steps],
        }
    )


def shown(series: Series) -> str:
    """The same as text."""
    return json.dumps({name: [(step, float(value)) for step, value in series[name]] for name in sorted(series)})


async def run(tracker: Any, steps: Sequence[int], *, then: Callable[[], Any] = lambda: None) -> CloseReport:
    """Log at each step, and do something before closing."""
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        for step in steps:
            engine.logger.log_metrics(metrics_of(step), step)
            await engine.run_event(Job.STEP, object())
        done = then()
        if isinstance(done, Awaitable):
            await done
        return await engine.close(timeout=30)


def found_in(folder: Path, pattern: str) -> list[Path]:
    """The files there."""
    return sorted(folder.glob(pattern))


def crashing(tracker: Any, step: int, error: Exception, times: float = math.inf) -> Any:
    """The tracker, whose client fails whenever it is told of that step, so many times."""
    tell, left = tracker.tell, [times]

    def crash(records: Sequence[dict[str, Any]]) -> None:
        if left[0] > 0 and any(record["step"] == step for record in records):
            left[0] -= 1
            raise error
        tell(records)

    tracker.tell = crash
    return tracker


# ---------------------------------------------------------------------------------------------------- what readers find


async def test_every_metric_is_found_at_its_step_in_order(case: Case, tmp_path: Path) -> None:
    """Each of several a step, with NaN and the infinities; and no client draws from the global generators."""
    before = generators()
    tracker = case.make(tmp_path)

    report = await run(tracker, range(40))

    assert shown(case.read(tmp_path, tracker)) == series_of(case, range(40))
    assert (report.ok, report.deliveries[tracker.name].delivered) == (True, 40)
    assert generators() == before


async def test_a_call_that_crashes_and_passes_costs_nothing(case: Case, tmp_path: Path) -> None:
    """It is made again, from the record on that it crashed at: none is missing, none is there twice."""
    tracker = crashing(case.make(tmp_path, retry=QUICK), 20, OSError("gone"), times=2)

    report = await run(tracker, range(40))

    assert shown(case.read(tmp_path, tracker)) == series_of(case, range(40))
    assert (report.ok, report.deliveries[tracker.name].retried) == (True, 2)


async def test_a_call_that_crashes_for_good_costs_its_own_record(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is behind it arrives, and the report counts one."""
    tracker = crashing(case.make(tmp_path), 20, ValueError("no such thing"))

    report = await run(tracker, range(40))

    assert shown(case.read(tmp_path, tracker)) == series_of(case, [step for step in range(40) if step != 20])
    assert report.undelivered == {tracker.name: 1}
    assert "1 of 40 records were refused: no such thing" in caplog.text


@ON_ONE_LOOP
async def test_what_is_no_number_costs_no_other(case: Case, tmp_path: Path) -> None:
    """The metrics beside it arrive; its record counts as lost."""
    tracker = case.make(tmp_path)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        for step in range(3):
            odd = {"odd": [1, 2], "huge": 10**400} if step == 1 and case.name != "wandb" else {}
            engine.logger.log_metrics({"loss": step, **odd}, step)
        await engine.run_event(Job.STEP)
        report = await engine.close()

    assert case.read(tmp_path, tracker) == {"loss": [(0, 0), (1, 1), (2, 2)]}
    assert report.undelivered == ({} if case.name == "wandb" else {tracker.name: 1})


@ON_ONE_LOOP
async def test_hyperparameters_are_found(case: Case, tmp_path: Path) -> None:
    """As what the tracker has for them; MLflow has words."""
    tracker = case.make(tmp_path)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        engine.logger.log_hyperparameters({"lr": 0.5, "name": "sgd", "nesterov": True})
        await engine.run_event(Job.STEP)

    values: list[Any] = ["0.5", "sgd", "True"] if case.name == "mlflow" else [0.5, "sgd", True]
    assert case.parameters(tmp_path, tracker) == dict(zip(["lr", "name", "nesterov"], values, strict=True))


@ON_ONE_LOOP
async def test_a_record_is_what_was_logged(case: Case, tmp_path: Path) -> None:
    """What happens to a tensor between the logging and the telling does not show."""
    tracker = case.make(tmp_path)
    loss = torch.tensor(1.0)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        engine.logger.log_metrics({"loss": loss}, 1)
        loss.fill_(2.0)
        await engine.run_event(Job.STEP)

    assert case.read(tmp_path, tracker) == {"loss": [(1, 1.0)]}


@ON_ONE_LOOP
async def test_it_can_be_opened_again(case: Case, tmp_path: Path) -> None:
    """By another engine; W&B begins another run then, and keeps a file for each."""
    tracker = case.make(tmp_path)
    await run(tracker, [0])
    await run(tracker, [1])

    if case.name == "wandb":
        assert len(found_in(tmp_path, "wandb/offline-run-*")) == 2
    else:
        assert shown(case.read(tmp_path, tracker)) == series_of(case, [0, 1])


# --------------------------------------------------------------------------------------- clients that are slow, or fail


class Loop:
    """What a training loop sees: the numbers that it draws, and what it does before the client has done anything."""

    def __init__(self) -> None:
        random.seed(1)
        torch.manual_seed(1)
        self.seen: list[float] = []

    async def run(self, callbacks: list[Any], steps: int = 50) -> CloseReport:
        """Draw, and log what was drawn."""
        async with Engine(events=Job, callbacks=callbacks) as engine:
            for step in range(steps):
                self.seen += [random.random(), float(torch.rand(()))]
                engine.logger.log_metrics({"drawn": self.seen[-1]}, step)
                await engine.run_event(Job.STEP, object())
                await anyio.lowlevel.checkpoint()
            for callback in callbacks:
                if (release := getattr(callback, "release", None)) is not None:
                    release.set()
            return await engine.close(timeout=30)


async def test_a_client_that_hangs_keeps_nothing_waiting(case: Case, tmp_path: Path) -> None:
    """The whole run is over before the client has taken its first record; and then it has all of them."""
    bare = Loop()
    await bare.run([])
    tracker = case.make(tmp_path, max_wait=0.0)
    tracker.release, told, tell = threading.Event(), list[float](), tracker.tell

    def hang(records: Sequence[dict[str, Any]]) -> None:
        assert tracker.release.wait(30)
        told.append(len(loop.seen))
        tell(records)

    tracker.tell = hang
    loop = Loop()

    report = await loop.run([tracker])

    assert loop.seen == bare.seen
    assert set(told) == {100}
    assert report.ok
    (found,) = case.read(tmp_path, tracker).values()
    assert [step for step, _ in found] == list(range(50))
    assert [value for _, value in found] == pytest.approx(bare.seen[1::2])


async def test_a_client_that_always_fails_stops_and_changes_nothing(case: Case, tmp_path: Path) -> None:
    """Every record it lost is counted, and its failures are the run's in no way."""
    bare, loop = Loop(), None
    await bare.run([])
    tracker = case.make(tmp_path, retry=ONCE)

    def fail(records: Sequence[dict[str, Any]]) -> None:
        raise OSError("gone")

    tracker.tell = fail
    loop = Loop()

    report = await loop.run([tracker])

    assert loop.seen == bare.seen
    assert (report.undelivered, report.failed) == ({tracker.name: 50}, {})


async def test_a_client_that_cannot_be_opened_stops_and_changes_nothing(case: Case, tmp_path: Path) -> None:
    """Its records are counted as lost, and there is nothing to close."""
    tracker = case.make(tmp_path, retry=ONCE)

    def fail(state: Any, logger: Any) -> None:
        raise OSError("no such host")

    tracker.open = fail

    report = await run(tracker, range(5))

    assert (report.undelivered, report.failed, report.closed) == ({tracker.name: 5}, {}, [])


async def test_a_crowded_mailbox_drops_the_oldest_and_counts_them(case: Case, tmp_path: Path) -> None:
    """A slow client costs records, and never the run its time."""
    tracker = case.make(tmp_path, max_pending=10, max_batch=1, max_wait=0.0)
    release, entered, tell = threading.Event(), threading.Event(), tracker.tell

    def hang(records: Sequence[dict[str, Any]]) -> None:
        entered.set()
        assert release.wait(30)
        tell(records)

    tracker.tell = hang
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        for step in range(40):
            engine.logger.log_metrics({"loss": step}, step)
            await engine.run_event(Job.STEP, object())
            if step == 0:
                assert await anyio.to_thread.run_sync(entered.wait, 30)
        release.set()
        report = await engine.close(timeout=30)

    assert report.undelivered == {tracker.name: 29}
    assert [step for step, _ in case.read(tmp_path, tracker)["loss"]] == [0, *range(30, 40)]


@ON_ONE_LOOP
async def test_a_spool_keeps_what_the_client_did_not_take(case: Case, tmp_path: Path) -> None:
    """For the next process, images included."""
    options = {"retry": ONCE, "spool": tmp_path / "spool.db"}
    down = crashing(case.make(tmp_path / "down", **options), 0, OSError("gone"))
    async with Engine(events=Job, callbacks=[down]) as engine:
        for step in range(3):
            engine.logger.log_metrics(metrics_of(step), step)
            await engine.run_event(Job.STEP, object())
        engine.logger.log_images(torch.zeros(3, 4, 4), "image", step=3)
        await engine.run_event(Job.STEP, object())
        report = await engine.close(timeout=2)

    assert report.spooled == {down.name: 4}

    tracker = case.make(tmp_path / "up", **options)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        report = await engine.close(timeout=30)

    assert (report.ok, report.spooled) == (True, {})
    found = {name: pairs for name, pairs in case.read(tmp_path / "up", tracker).items() if name != "image"}
    assert shown(found) == series_of(case, range(3))


async def test_records_are_made_where_they_are_logged_and_told_on_one_thread(case: Case, tmp_path: Path) -> None:
    """Never on the event loop's."""
    tracker = case.make(tmp_path)
    threads: dict[str, set[str]] = defaultdict(set)

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **fields: Any) -> Any:
            threads[name].add(threading.current_thread().name)
            return method(*arguments, **fields)

        return call

    for name in ("open", "write", "tell", "close"):
        setattr(tracker, name, noting(name, getattr(tracker, name)))

    await run(tracker, range(5))

    own = {f"eventbus-engine-{tracker.name}"}
    assert threads == {"open": own, "write": {threading.current_thread().name}, "tell": own, "close": own}


# ------------------------------------------------------------------------------------------------ images, tables, files


PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def write_weights(folder: Path) -> Path:
    """A file to keep."""
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"weights")
    return folder / "weights.bin"


async def log_media(tracker: Any, folder: Path) -> CloseReport:
    """An image, two more, a table and a file."""
    weights = write_weights(folder)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        engine.logger.log_images(PICTURE, "one", channels_last=True, step=3)
        engine.logger.log_images(torch.tensor(np.moveaxis(PICTURE, -1, 0) / 255).repeat(2, 1, 1, 1), "two", step=4)
        engine.logger.log_table(["x", "y"], [[1, "a|b"]], "rows", step=5)
        engine.logger.upload_file("models/final.bin", weights)
        engine.logger.log_traces({})
        await engine.run_event(Job.STEP, object())
        return await engine.close(timeout=30)


def decoded(image: Any) -> list[Any]:
    """The pixels of a file."""
    from PIL import Image

    with Image.open(image) as opened:
        return list(np.asarray(opened).tolist())


@ON_ONE_LOOP
async def test_tensorboard_shows_images_and_tables(tmp_path: Path) -> None:
    """At their steps, pixel by pixel; a table in Markdown."""
    import io

    case = TensorBoard()
    report = await log_media(case.make(tmp_path), tmp_path / "own")
    events = case.events(tmp_path)

    assert report.ok
    found = {tag: [image.step for image in events.Images(tag)] for tag in events.Tags()["images"]}
    assert found == {"one": [3], "two/0": [4], "two/1": [4]}
    for tag in found:
        assert decoded(io.BytesIO(events.Images(tag)[0].encoded_image_string)) == PICTURE.tolist()
    (text,) = events.Tensors("rows")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (5, "| x | y |\n| --- | --- |\n| 1 | a\\|b |")


# W&B leaves a folder of a table's to the garbage collector.
@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
@ON_ONE_LOOP
async def test_wandb_keeps_images_tables_and_files(tmp_path: Path) -> None:
    """In the files of the run, named by its rows."""
    case = Wandb()
    report = await log_media(case.make(tmp_path), tmp_path / "own")
    one, two, table = case.rows(tmp_path)
    (files,) = found_in(tmp_path, "wandb/offline-run-*/files")

    assert report.ok
    assert [row["eventbus/step"] for row in (one, two, table)] == [3, 4, 5]
    paths = [files / name for name in (*one["one"]["filenames"], *two["two"]["filenames"])]
    assert [decoded(path) for path in paths] == [PICTURE.tolist()] * 3
    assert json.loads((files / table["rows"]["path"]).read_text())["data"] == [[1, "a|b"]]
    assert (files / "models/final.bin").read_bytes() == b"weights"


@ON_ONE_LOOP
async def test_mlflow_keeps_images_tables_and_files(tmp_path: Path) -> None:
    """As artifacts of the run."""
    case = MLflow()
    tracker = case.make(tmp_path)
    report = await log_media(tracker, tmp_path / "own")
    names = [artifact.path for artifact in case.client.list_artifacts(tracker.run_id, "images")]
    (folder,) = found_in(tmp_path, "artifacts/*/artifacts")

    assert report.ok
    pictures = sorted(name for name in names if name.endswith(".png"))
    assert [name.partition("+timestamp")[0] for name in pictures] == [
        "images/one+step+3", "images/two~0+step+4", "images/two~1+step+4",
    ]  # fmt: skip
    assert [decoded(folder / name) for name in pictures] == [PICTURE.tolist()] * 3
    assert json.loads((folder / "tables/rows/step_5.json").read_text()) == {"columns": ["x", "y"], "data": [[1, "a|b"]]}
    assert (folder / "models/final.bin").read_bytes() == b"weights"


@ON_ONE_LOOP
async def test_wandb_shows_masks_with_their_labels(tmp_path: Path) -> None:
    """One for each image of a batch, or one for all."""
    case = Wandb()
    masks = {"truth": torch.ones(2, 4, 4, dtype=torch.int64), "shape": np.zeros((4, 4), dtype=np.int64)}
    async with Engine(events=Job, callbacks=[case.make(tmp_path)]) as engine:
        engine.logger.log_images(torch.zeros(2, 1, 4, 4), "seen", step=1, masks=masks, mask_class_labels={1: "cat"})
        await engine.run_event(Job.STEP)
    ((row),) = case.rows(tmp_path)
    (files,) = found_in(tmp_path, "wandb/offline-run-*/files")

    found = [{name: decoded(files / mask["path"]) for name, mask in each.items()} for each in row["seen"]["all_masks"]]
    assert found == [{"truth": [[1] * 4] * 4, "shape": [[0] * 4] * 4}] * 2


@ON_ONE_LOOP
async def test_what_is_no_image_is_refused_by_its_shape(case: Case, tmp_path: Path) -> None:
    """And costs no other record."""
    tracker = case.make(tmp_path)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        engine.logger.log_images([torch.zeros(5, 4, 4)], "odd", step=1)
        engine.logger.log_metrics({"loss": 1}, 1)
        await engine.run_event(Job.STEP)
        report = await engine.close()

    assert report.undelivered == {tracker.name: 1}
    assert case.read(tmp_path, tracker) == {"loss": [(1, 1)]}


# --------------------------------------------------------------------------------------------------------- each its own


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file of this process may grow larger: a write stops short there, and the next fails."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_tensorboard_writes_whole_events_on_a_full_disk(tmp_path: Path) -> None:
    """What was cut short is not there, and what is written once there is room can be read."""
    case = TensorBoard()
    tracker = case.make(tmp_path)
    tracker.open(None, None)
    (path,) = tmp_path.iterdir()
    tracker.tell([tracker.log_metrics({"loss": 1}, 1)])
    with files_limited_to(path.stat().st_size + 10), pytest.raises(OSError, match="File too large"):
        tracker.tell([tracker.log_metrics({"loss": 2}, 2)])
    tracker.tell([tracker.log_metrics({"loss": 3}, 3)])
    tracker.close(None, None)

    assert case.read(tmp_path, tracker) == {"loss": [(1, 1), (3, 3)]}


def test_tensorboard_leaves_no_file_open_that_it_cannot_begin(tmp_path: Path) -> None:
    """The next attempt begins another."""
    tracker = TensorBoard().make(tmp_path)
    with files_limited_to(5), pytest.raises(OSError, match="File too large"):
        tracker.open(None, None)
    tracker.open(None, None)
    tracker.close(None, None)

    assert len(list(tmp_path.iterdir())) == 2


@ON_ONE_LOOP
async def test_wandb_keeps_a_step_that_goes_back(tmp_path: Path) -> None:
    """W&B would drop a row whose own step does."""
    case = Wandb()
    tracker = case.make(tmp_path)
    await run(tracker, [5, 6, 2])

    assert [step for step, _ in case.read(tmp_path, tracker)["lr"]] == [5, 6, 2]


@ON_ONE_LOOP
async def test_wandb_leaves_nothing_anywhere_else(tmp_path: Path, home: Path) -> None:
    """No file outside its folders, and after `teardown` no process, socket or thread."""
    import wandb

    await run(Wandb().make(tmp_path), range(3))
    wandb.teardown()

    assert {path.name for path in found_in(tmp_path, "*")} == {"wandb"}
    assert {path.name for path in found_in(home, "*")} <= {"CACHE", "CONFIG", "DATA"}
    assert found_in(Path(tempfile.gettempdir()), f"wandb-{os.getpid()}-*") == []
    assert [thread.name for thread in threading.enumerate() if "wandb" in thread.name] == []


@ON_ONE_LOOP
async def test_mlflow_tells_a_batch_in_one_request_and_marks_the_run_finished(tmp_path: Path) -> None:
    """A request for each metric would be too slow for most runs."""
    case = MLflow()
    tracker = case.make(tmp_path, max_wait=30.0, run_name="mine")
    told = list[int]()
    tell = tracker.tell

    def note(records: Sequence[dict[str, Any]]) -> None:
        told.append(len(records))
        tell(records)

    tracker.tell = note
    await run(tracker, range(250))
    info = case.client.get_run(tracker.run_id).info

    assert told == [100, 100, 50]
    assert (info.status, info.run_name) == ("FINISHED", "mine")


@ON_ONE_LOOP
async def test_mlflow_sends_more_metrics_than_it_takes_at_once(tmp_path: Path) -> None:
    """A thousand are the most."""
    case = MLflow()
    tracker = case.make(tmp_path, max_wait=30.0)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        for step in range(100):
            engine.logger.log_metrics({f"m{number}": number for number in range(11)}, step)
            await engine.run_event(Job.STEP)
        report = await engine.close()

    assert report.ok
    assert case.read(tmp_path, tracker) == {f"m{n}": [(step, n) for step in range(100)] for n in range(11)}


@ON_ONE_LOOP
async def test_mlflow_refuses_a_hyperparameter_that_changes(tmp_path: Path) -> None:
    """That is MLflow's rule; it costs that record alone."""
    case = MLflow()
    tracker = case.make(tmp_path)
    async with Engine(events=Job, callbacks=[tracker]) as engine:
        engine.logger.log_hyperparameters({"lr": 0.5})
        engine.logger.log_hyperparameters({"lr": 0.25})
        engine.logger.log_metrics({"loss": 1}, 1)
        await engine.run_event(Job.STEP)
        report = await engine.close()

    assert report.undelivered == {"mlflow_logger": 1}
    assert (case.parameters(tmp_path, tracker), case.read(tmp_path, tracker)) == ({"lr": "0.5"}, {"loss": [(1, 1)]})


def test_mlflow_tries_again_what_may_pass(tmp_path: Path) -> None:
    """A database that is locked, a server that is away; never what it has refused."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, TEMPORARILY_UNAVAILABLE

    local = MLflow().make(tmp_path)
    busy = MlflowException("locked", TEMPORARILY_UNAVAILABLE)
    away = MlflowException("API request failed")
    refused = MlflowException("no", INVALID_PARAMETER_VALUE)

    assert [local.passes(error) for error in (busy, away, refused, OSError(), ValueError())] == [
        True, False, False, True, False,
    ]  # fmt: skip
    from eventbus_adapters.mlflow import MLflowLogger

    assert MLflowLogger("http://127.0.0.1:1").passes(away)


# --------------------------------------------------------------------------------------------------------- typed errors


@pytest.mark.parametrize("peer", ["tensorboard", "wandb", "mlflow"])
def test_a_peer_that_is_missing_is_named_with_the_extra(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the module is imported."""
    for name in [name for name in sys.modules if name == peer or name.startswith(f"{peer}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, peer, None)
    monkeypatch.delitem(sys.modules, f"eventbus_adapters.{peer}", raising=False)

    with pytest.raises(ConfigurationError, match=rf"which cannot be imported here; .*eventbus-engine\[{peer}\]"):
        importlib.import_module(f"eventbus_adapters.{peer}")


def test_a_peer_that_is_too_old_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the destination is made."""
    import mlflow.version
    import wandb

    from eventbus_adapters.mlflow import MLflowLogger
    from eventbus_adapters.wandb import WandbLogger

    monkeypatch.setattr(wandb, "__version__", "0.9.7")
    monkeypatch.setattr(mlflow.version, "VERSION", "2.22.0")

    with pytest.raises(
        ConfigurationError, match=r"wandb 0\.9\.7 is installed, .*goes with 0\.20 or newer; .*eventbus-engine\[wandb\]"
    ):
        WandbLogger()
    with pytest.raises(ConfigurationError, match=r"mlflow 2\.22\.0 is installed, .*eventbus-engine\[mlflow\]"):
        MLflowLogger()


def test_arguments_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """With what can."""
    from eventbus_adapters.wandb import WandbLogger

    mode: Any = "off"
    with pytest.raises(ConfigurationError, match="WandbLogger has mode='off'; use 'online', 'offline' or 'disabled'"):
        WandbLogger(mode=mode)


class Odd(Callback[Any]):
    """A mixin whose hook returns what is no record of a tracker's."""

    def step(self, state: Any, logger: Any) -> Any:
        """A record of a kind of its own."""
        return {"kind": "own", "step": 1, "time": 0.0}


@ON_ONE_LOOP
async def test_a_record_of_an_unknown_kind_is_refused(case: Case, tmp_path: Path) -> None:
    """And so is one that is told while the client is not open; closing that does nothing."""
    tracker = case.make(tmp_path)
    tracker.close(None, None)
    tracker.step = Odd().step
    with pytest.raises(Exception, match="is not open; log while the engine is"):
        tracker.tell([tracker.log_metrics({"loss": 1}, 1)])

    report = await run(tracker, range(2))

    assert report.undelivered == {tracker.name: 2}
    assert [step for step, _ in case.read(tmp_path, tracker)["lr"]] == [0, 1]
