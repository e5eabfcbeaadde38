"""Programs run as processes of their own, the endpoints they send to, and what they leave in their files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eventbus_engine.telemetry.reports import RecordedSpan, Recording

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Endpoint:
    """Where a program sends its spans, and how many requests or connections came."""

    url: str
    visits: list[str] = field(default_factory=list)


@pytest.fixture
def environment() -> dict[str, str]:
    """The variables for a program: those of the tests, without any that switch tracing on or set it up."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACE"))}
    paths = [str(REPOSITORY), str(REPOSITORY / "adapters"), kept.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program: its text, its arguments, further variables. Whatever still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_program(program: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | variables,
        )
        started.append(process)
        return process

    yield start_program
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def spans_in() -> Callable[[Path], list[RecordedSpan]]:
    """Read all spans of a file, as the reports do."""

    def read(path: Path) -> list[RecordedSpan]:
        return [span for recorded in Recording(path).traces() for span in recorded.spans]

    return read


def serve(status: int) -> Iterator[Endpoint]:
    """A server that answers every request with one status."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            endpoint.visits.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield endpoint
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def live() -> Iterator[Endpoint]:
    """An endpoint that takes everything."""
    yield from serve(200)


@pytest.fixture
def overloaded() -> Iterator[Endpoint]:
    """An endpoint that answers 503, which asks for another try."""
    yield from serve(503)


@pytest.fixture
def refusing() -> Iterator[Endpoint]:
    """An endpoint where nobody listens. The port stays bound, so that nobody will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield Endpoint(f"http://127.0.0.1:{bound.getsockname()[1]}")


@pytest.fixture
def black_hole() -> Iterator[Endpoint]:
    """An endpoint that accepts connections and never answers."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            while True:
                try:
                    held.append(listener.accept()[0])
                except OSError:
                    return
                endpoint.visits.append("connection")

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield endpoint
        # Closing alone does not wake a thread that waits in accept.
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()


@pytest.fixture
def endpoints(live: Endpoint, overloaded: Endpoint, refusing: Endpoint, black_hole: Endpoint) -> dict[str, Endpoint]:
    """All of them, by name."""
    return {"live": live, "overloaded": overloaded, "refusing": refusing, "black hole": black_hole}
