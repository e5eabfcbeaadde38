"""A collector on the loopback, endpoints that fail in every way, and spans to send to them."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eventbus_engine.telemetry.ids import PrivateIdGenerator


@dataclass
class Received:
    """A request that the collector got."""

    path: str
    headers: Message
    body: bytes
    peer: tuple[str, int]
    at: float


@dataclass
class Answer:
    """What the collector is to answer."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang_up: bool = False


class Collector:
    """A real HTTP/1.1 server on a free port that answers from a script, then with 200."""

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.script: list[Answer] = []
        self.got_one = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                peer = (str(self.client_address[0]), int(self.client_address[1]))
                collector.requests.append(Received(self.path, self.headers, body, peer, time.monotonic()))
                answer = collector.script.pop(0) if collector.script else Answer()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)
                self.close_connection = self.close_connection or answer.hang_up
                collector.got_one.set()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: the tests read `requests`."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that takes everything, unless its `script` says otherwise."""
    with Collector() as running:
        yield running


@pytest.fixture
def answer() -> type[Answer]:
    """The type of the entries in `collector.script`."""
    return Answer


@pytest.fixture
def refusing_url() -> str:
    """An endpoint where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def silent_url() -> Iterator[str]:
    """An endpoint that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def unreachable_url() -> Iterator[str]:
    """An endpoint that does not even complete the TCP handshake: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"
        for filler in fillers:
            filler.close()


@pytest.fixture
def make_spans() -> Callable[[int], list[ReadableSpan]]:
    """Make any number of ended spans of one provider."""

    def make(count: int) -> list[ReadableSpan]:
        kept = InMemorySpanExporter()
        provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(kept))
        tracer = provider.get_tracer("tests", "1")
        for number in range(count):
            tracer.start_span(f"span {number}", attributes={"number": number}).end()
        return list(kept.get_finished_spans())

    return make


@pytest.fixture
def untouched_randomness() -> Iterator[None]:
    """Fail the test if anything draws from the global `random`."""
    before = random.getstate()
    yield
    assert random.getstate() == before


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of whoever runs the tests do not count."""
    import os

    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
