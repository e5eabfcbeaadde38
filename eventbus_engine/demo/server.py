"""`BatchServer`: the remote service of the demo, a real HTTP server on a free port of the loopback interface."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

__all__ = ["BatchServer"]


class BatchServer:
    """Counts the batches that are posted to it, on threads of its own, until its `with` block ends.

    It takes `POST /batches` with a JSON object that has the number of the batch, from 1, as `batch`.

    Attributes:
        url: where to post.
        posts: the requests that were taken.
        refused: the requests that were not.
        batches: the numbers that have come.
    """

    def __init__(self) -> None:
        self.posts: int = 0
        self.refused: int = 0
        self.batches: set[int] = set()
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        # A client that keeps its connection open must not keep the process from ending.
        self._http.daemon_threads = True
        self.url: str = f"http://127.0.0.1:{self._http.server_address[1]}/batches"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="batch server", daemon=True)

    def take(self, body: bytes) -> bool:
        """Count one request; False if it holds no batch."""
        try:
            batch = json.loads(body)["batch"]
        except (ValueError, TypeError, LookupError):
            batch = None
        with self._lock:
            if not isinstance(batch, int):
                self.refused += 1
                return False
            self.posts += 1
            self.batches.add(batch)
            return True

    def missing(self, batches: int) -> int:
        """How many of the batches from 1 to `batches` have not come."""
        return len(set(range(1, batches + 1)) - self.batches)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _handler_of(server: BatchServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which keeps connections open: a batch costs no handshake
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            taken = self.path == "/batches" and server.take(body)
            self.send_response(200 if taken else 400)
            self.send_header("Content-Length", "0")  # or a client would wait for more
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Standard error belongs to the progress bar."""

    return Handler
