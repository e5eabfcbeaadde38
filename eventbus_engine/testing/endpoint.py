"""`FlakyEndpoint`: a real HTTP server on the loopback interface that is slow, fails and goes away as a test says."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable
from functools import partial
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import anyio.to_thread

from eventbus_engine.testing.exchange import Answer, Exchange, Request, read_answer

__all__ = ["FlakyEndpoint"]

# How long `down` may wait for the thread that accepts connections; it looks that often whether it is to stop.
_POLL = 0.02


class FlakyEndpoint:
    """A real HTTP/1.1 server on a free port of the loopback interface, on threads of its own, for tests of a client.

    It keeps every request and answers from a script, one entry for each request in the order of their arrival:

    * a number: that status;
    * `Answer(429, retry_after=2)`: a status with headers, a body, or a latency of its own;
    * `"hang"`: take the request and never answer;
    * `"half"`: promise a body, send a part of it and hang up;
    * `"reset"`: take the request and reset the connection.

    When the script is over, everything is answered with `then`.

        with FlakyEndpoint(latency=0.2, script=[500, "reset"]) as endpoint:
            client.post(endpoint.url, json={"loss": 1.0})
            assert endpoint.wait_for(3)[2].json == {"loss": 1.0}

    The `with` block works in plain and in async tests. An async test waits with `await endpoint.arrived(3)`, since
    `wait_for` would hold up the event loop that the client runs on.

    Args:
        latency: seconds before each answer.
        script: the answers to the first requests.
        then: the answer to all others.

    Attributes:
        url: where to send; it stays the same over `down` and `up`.
        requests: those that have arrived whole, in order.
        script: what is left of the script. More may be appended at any time.
        then: as above. May be changed at any time; so may `latency`.

    Raises:
        ConfigurationError: an entry of the script that is none of these.
    """

    def __init__(
        self, *, latency: float = 0.0, script: Iterable[int | str | Answer] = (), then: int | str | Answer = 200
    ) -> None:
        self.latency: float = latency
        self.script: deque[int | str | Answer] = deque(script)
        self.then: int | str | Answer = then
        for entry in (*self.script, then):
            read_answer(entry)
        self.requests: list[Request] = []
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._over = threading.Event()
        self._server: _Server | None = None
        # Bound and not listening: it refuses connections, and nobody else gets the port.
        self._socket = _bind(0)
        self._address: tuple[str, int] = self._socket.getsockname()[:2]
        self.url: str = f"http://127.0.0.1:{self._address[1]}/"

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()
        self._socket.close()

    def up(self) -> None:
        """Listen, on the same port as ever. Nothing happens if it listens already."""
        if self._server is None:
            self._over = threading.Event()
            self._server = _Server(self, self._socket, self._over)

    def down(self) -> None:
        """Refuse connections, and break those that are open, as a server does that is killed."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self._over.set()
        server.stop()
        with self._changed:
            connections = list(self._connections)
        for connection in connections:
            _break(connection)
        self._socket = _bind(self._address[1])

    def wait_for(self, count: int, timeout: float = 5.0) -> list[Request]:
        """Wait, on this thread, until so many requests have arrived since the beginning.

        Args:
            count: how many.
            timeout: seconds.

        Returns:
            All that have arrived.

        Raises:
            TimeoutError: fewer did; it lists them.
        """
        with self._changed:
            if self._changed.wait_for(lambda: len(self.requests) >= count, timeout):
                return list(self.requests)
        came = ", ".join(f"{request.method} {request.path}" for request in self.requests) or "none"
        raise TimeoutError(f"{count} requests did not arrive at {self.url} within {timeout:g} s; these did: {came}")

    async def arrived(self, count: int, timeout: float = 5.0) -> list[Request]:
        """As `wait_for`, for async tests. It waits in real time, whatever the clock of the event loop."""
        return await anyio.to_thread.run_sync(partial(self.wait_for, count, timeout), abandon_on_cancel=True)

    def _take(self, request: Request) -> Answer:
        """Keep a request, and say what to answer."""
        with self._changed:
            entry = self.script.popleft() if self.script else self.then
            self.requests.append(request)
            self._changed.notify_all()
        answer = read_answer(entry)
        latency = self.latency if answer.latency is None else answer.latency
        return answer._replace(latency=latency)

    def _track(self, connection: socket.socket, *, is_open: bool) -> None:
        with self._changed:
            if is_open:
                self._connections.add(connection)
            else:
                self._connections.discard(connection)


class _Server(ThreadingHTTPServer):
    """What listens between an `up` and the next `down`."""

    daemon_threads = True

    def __init__(self, endpoint: FlakyEndpoint, listener: socket.socket, over: threading.Event) -> None:
        super().__init__(("127.0.0.1", 0), partial(Exchange, endpoint._take, over), bind_and_activate=False)
        self.socket.close()
        self.socket: socket.socket = listener
        self._endpoint = endpoint
        self.server_activate()
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL,), name="flaky endpoint", daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._endpoint._track(request, is_open=True)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._endpoint._track(request, is_open=False)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that hangs up is what tests are about."""

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def _bind(port: int) -> socket.socket:
    bound = socket.socket()
    # Connections that have just ended do not keep the port from being used again.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _break(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # It has ended by itself in the meantime.
