"""The three programs that the package is for, as a user would write them, against real databases and real servers."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from eventbus_engine import Callback, Engine, EventName, algorithm, telemetry
from eventbus_engine.testing import Recorder

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@dataclass
class Post:
    """A request that a server got."""

    path: str
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


@dataclass
class Server:
    """A real HTTP server on the loopback. It answers once its gate is open."""

    posts: list[Post] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    """Up and answering."""
    answers = Server()
    answers.gate.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            answers.posts.append(Post(self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            answers.gate.wait(30)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the tests read `posts`."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers.url = f"http://127.0.0.1:{http.server_address[1]}/v1/traces"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield answers
    answers.gate.set()
    http.shutdown()
    thread.join()
    http.server_close()


# ----------------------------------------------------------------------------------------------------- 1. a pipeline


class Ingest(EventName):
    """Its vocabulary."""

    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"


@dataclass(eq=False)
class Record:
    """One record on its way."""

    number: int
    row: str


async def scrub(row: str) -> str:
    """Clean a row, elsewhere."""
    return await anyio.to_thread.run_sync(str.strip, row)


@algorithm(Ingest.BEFORE_WRITE)
async def clean(event: EventName, record: Record, logger: Any) -> None:
    """The algorithm of the program."""
    record.row = await scrub(record.row)


class Database:
    """A table in a file, behind a lock, since sqlite writes one row at a time."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, check_same_thread=False)
        self.connection.execute("create table rows (number integer primary key, row text)")
        self.lock = anyio.Lock()

    async def write(self, record: Record) -> None:
        """Insert a row."""
        async with self.lock:
            await anyio.to_thread.run_sync(
                self.connection.execute, "insert into rows values (?, ?)", (record.number, record.row)
            )

    def rows(self) -> list[tuple[int, str]]:
        """All rows, and the end of it."""
        rows = self.connection.execute("select number, row from rows order by number").fetchall()
        self.connection.close()
        return rows


class Audit(Callback):
    """Notes what was written, and when it was opened and closed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def open(self, record: Record, logger: Any) -> None:
        """Once, before the first record."""
        self.lines.append("open")

    async def after_write(self, record: Record, logger: Any) -> None:
        """Each record that was written."""
        self.lines.append(record.row)

    async def close(self, record: Record, logger: Any) -> None:
        """Once, at the end."""
        self.lines.append("close")


@BACKENDS
def test_a_pipeline(backend: str, tmp_path: Path) -> None:
    """Clean a record, write it, audit it: many at once, each in its order, and a write that fails is not audited."""
    audit, seen = Audit(), Recorder(look=lambda record: record.number)

    async def main() -> list[tuple[int, str]]:
        db = Database(tmp_path / "rows.db")

        async def ingest(rec: Record) -> None:
            async with engine.pair(Ingest.BEFORE_WRITE, rec):
                await db.write(rec)

        async with Engine(events=Ingest, algorithms=[clean], callbacks=[audit, seen]) as engine:
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(ingest, Record(number, f"  row {number}  "))
            with pytest.raises(sqlite3.IntegrityError):
                await ingest(Record(7, "a second one"))
        return db.rows()

    rows = anyio.run(main, backend=backend)
    of_seven = [name for name, number in zip(seen.names, seen.seen, strict=True) if number == 7]

    assert rows == [(number, f"row {number}") for number in range(20)]
    assert (audit.lines[0], audit.lines[-1], len(audit.lines)) == ("open", "close", 22)
    assert sorted(audit.lines[1:-1]) == sorted(row for _, row in rows)
    assert of_seven == ["before_write", "after_write", "before_write"]


# --------------------------------------------------------------------------------------- 2. a training run, in Jaeger


def test_a_training_run_in_jaeger(server: Server) -> None:
    """Digits, MixUp and SelectiveBackprop; what arrives at the endpoint shows what ran, when, and in which order."""
    torch = pytest.importorskip("torch", reason="it trains a model")
    datasets = pytest.importorskip("sklearn.datasets", reason="it trains on scikit-learn's digits")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="it reads OTLP")
    import torch.nn.functional as F  # noqa: N812
    from torch.utils.data import DataLoader, TensorDataset

    from eventbus_engine.training import Trainer
    from eventbus_engine.training.algorithms import MixUp, SelectiveBackprop

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = datasets.load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(images[:1024], labels[:1024]), batch_size=128, shuffle=True)
    eval_loader = DataLoader(TensorDataset(images[1024:], labels[1024:]), batch_size=256)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    URL = server.url  # noqa: N806

    with telemetry.configure(service_name="digits", endpoint=URL):
        trainer = Trainer(
            model,
            train_loader,
            eval_loader,
            loss=F.cross_entropy,
            optimizers=opt,
            max_duration="3ep",
            algorithms=[MixUp(), SelectiveBackprop()],
        )
        anyio.run(trainer.fit)

    spans, services = [], set[str]()
    for post in server.posts:
        received = service.ExportTraceServiceRequest.FromString(post.body)
        for resource_spans in received.resource_spans:
            services |= {a.value.string_value for a in resource_spans.resource.attributes if a.key == "service.name"}
            spans += [span for scope in resource_spans.scope_spans for span in scope.spans]
    by_parent: dict[bytes, list[Any]] = {}
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        by_parent.setdefault(span.parent_span_id, []).append(span)
    loaded = [span for span in spans if span.name == "dispatch after_dataloader"]
    orders = [[s.name for s in by_parent.get(span.span_id, []) if s.name.startswith("algorithm")] for span in loaded]

    assert services == {"digits"}
    roots = [span.name for span in by_parent[b""]]
    assert (roots.count("run"), roots.count("batch"), roots.count("epoch"), len(loaded)) == (1, 24, 3, 24)
    assert ["algorithm selective_backprop", "algorithm mixup"] in orders
    assert all(order in (["algorithm selective_backprop", "algorithm mixup"], ["algorithm mixup"]) for order in orders)
    assert not [span.name for span in spans if span.status.code != 0]
    assert trainer.state.metrics["metrics/eval/accuracy"] > 0.7


# --------------------------------------------------------------------------------------------------- 3. a remote logger


@dataclass(eq=False)
class Clock:
    """How far training is."""

    batch: int = 0


@dataclass(eq=False)
class State:
    """As much of a training state as the program reads."""

    timestamp: Clock = field(default_factory=Clock)
    loss: float = 0.0
    model: object = field(default_factory=object)


def remote_logger(url: str, **options: Any) -> Callback:
    """The callback of the program, with the address it logs to."""
    httpx = pytest.importorskip("httpx", reason="it posts with httpx")
    URL = url  # noqa: N806

    class Remote(Callback):
        delivery, snapshot = "background", ("loss",)

        async def open(self, state: Any, logger: Any) -> None:
            self.http = httpx.AsyncClient()

        async def batch_end(self, state: Any, logger: Any) -> None:
            await self.http.post(URL, json={"batch": int(state.timestamp.batch), "loss": float(state.loss)})

        async def close(self, state: Any, logger: Any) -> None:
            await self.http.aclose()

    remote = Remote()
    for option, value in options.items():
        setattr(remote, option, value)
    return remote


EXPECTED = [{"batch": batch, "loss": batch / 8} for batch in range(1, 31)]


async def train(engine: Engine[Any], state: State) -> None:
    """Thirty batches, each changing the state in place."""
    for batch in range(1, 31):
        state.timestamp.batch, state.loss = batch, batch / 8
        await engine.run_event("batch_end")


@BACKENDS
def test_a_remote_logger(backend: str, server: Server) -> None:
    """The service hangs until the run is over, and gets everything all the same: in order, as it was then."""
    server.gate.clear()

    async def main() -> Any:
        state = State()
        async with Engine(state, callbacks=[remote_logger(server.url)]) as engine:
            with anyio.fail_after(10):
                await train(engine, state)
            assert len(server.posts) <= 1
            server.gate.set()
            return await engine.close()

    report = anyio.run(main, backend=backend)

    assert (report.ok, report.closed) == (True, ["remote"])
    assert [post.json for post in server.posts] == EXPECTED


@BACKENDS
def test_a_remote_logger_whose_service_is_gone(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """The run neither slows nor stops; each failure is logged, and nothing is called undelivered that was tried."""

    async def main() -> Any:
        state = State()
        remote = remote_logger("http://127.0.0.1:9/refused", on_error="quarantine", quarantine_after=5)
        async with Engine(state, callbacks=[remote]) as engine:
            await train(engine, state)
            return await engine.close()

    report = anyio.run(main, backend=backend)

    assert (report.undelivered, report.closed) == ({"remote": 25}, ["remote"])
    assert "callback remote failed 5 times in a row, last on BATCH_END, and is dropped from the run" in caplog.messages


def test_a_remote_logger_in_a_program_without_a_loop(server: Server) -> None:
    """The same callback, and `engine.sync`."""
    state = State()
    engine = Engine(state, callbacks=[remote_logger(server.url)])
    for batch in range(1, 31):
        state.timestamp.batch, state.loss = batch, batch / 8
        engine.sync.run_event("batch_end")
    report = engine.sync.close()

    assert report.ok
    assert [post.json for post in server.posts] == EXPECTED


def test_a_remote_logger_of_a_real_training_run(server: Server) -> None:
    """Tensors are detached before they leave the step, so that the loss of each batch arrives as it was."""
    torch = pytest.importorskip("torch", reason="it trains a model")
    import torch.nn.functional as F  # noqa: N812

    from eventbus_engine.training import Trainer

    torch.set_num_threads(1)
    losses: list[float] = []

    class Losses(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            losses.append(float(state.loss))

    model = torch.nn.Linear(4, 2)
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(5)]
    trainer = Trainer(
        model,
        batches,
        loss=F.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        callbacks=[remote_logger(server.url), Losses()],
    )
    anyio.run(trainer.fit)

    assert [post.json for post in server.posts] == [
        {"batch": batch, "loss": loss} for batch, loss in enumerate(losses, start=1)
    ]
    assert len(losses) == 10
