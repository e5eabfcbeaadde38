"""One connection to a `FlakyEndpoint`: what it is asked, and what it answers or fails to."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from eventbus_engine.errors import ConfigurationError

__all__ = ["Answer", "Exchange", "Request", "read_answer"]

FAULTS = ("hang", "half", "reset")


class Answer(NamedTuple):
    """What an endpoint answers.

    Attributes:
        status: the HTTP status, or `"hang"`, `"half"` or `"reset"` for an answer that does not come whole.
        headers: name to value.
        body: as it is sent.
        retry_after: seconds or an HTTP date, for the header of that name.
        latency: seconds before it comes; None for the endpoint's own.
    """

    status: int | str = 200
    headers: Mapping[str, str] = {}
    body: bytes = b""
    retry_after: float | str | None = None
    latency: float | None = None


def read_answer(entry: object) -> Answer:
    """What an entry of a script stands for.

    Raises:
        ConfigurationError: nothing.
    """
    answer = entry if isinstance(entry, Answer) else Answer(entry)  # type: ignore[arg-type]
    status = answer.status
    if status in FAULTS or (isinstance(status, int) and not isinstance(status, bool) and 200 <= status <= 599):
        return answer
    raise ConfigurationError(
        f"{status!r} is no answer of an endpoint; use a status from 200 to 599, 'hang', 'half', 'reset' or an Answer"
    )


@dataclass(frozen=True)
class Request:
    """A request that has arrived whole.

    Attributes:
        method: `"POST"` and so on.
        path: with the query.
        headers: name to value; reading them ignores case, and gives None where there is none.
        body: decoded: of a chunked request in one piece, of a compressed one (gzip) unpacked.
        time: when, in seconds of `time.monotonic`.
    """

    method: str
    path: str
    headers: Message
    body: bytes
    time: float

    @property
    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        """The body, read as JSON lines (NDJSON)."""
        return [json.loads(line) for line in self.body.splitlines()]


class Exchange(BaseHTTPRequestHandler):
    """Reads requests and answers them, one after another, until the connection ends."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    close_connection: bool

    def __init__(self, take: Callable[[Request], Answer], over: threading.Event, *arguments: Any) -> None:
        self._take_request = take
        self._over = over
        super().__init__(*arguments)

    def _exchange(self) -> None:
        body = self._read_body()
        answer = self._take_request(Request(self.command, self.path, self.headers, body, time.monotonic()))
        if self._over.wait(answer.latency) or answer.status == "hang":
            self._over.wait()
            self.close_connection = True
        elif answer.status == "reset":
            # Zero seconds of lingering: closing sends a reset instead of the usual end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif answer.status == "half":
            self._answer(Answer(200), b"the first half, ", missing=100)
            self.close_connection = True
        else:
            self._answer(answer, answer.body)

    # What http.server looks for.
    do_DELETE: Callable[..., None] = _exchange  # noqa: N815
    do_GET: Callable[..., None] = _exchange  # noqa: N815
    do_PATCH: Callable[..., None] = _exchange  # noqa: N815
    do_POST: Callable[..., None] = _exchange  # noqa: N815
    do_PUT: Callable[..., None] = _exchange  # noqa: N815

    def _read_body(self) -> bytes:
        body = b""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        else:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            if len(body) < size:
                raise ConnectionError("the client has hung up in the middle of its request")
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, answer: Answer, body: bytes, missing: int = 0) -> None:
        assert isinstance(answer.status, int)  # noqa: S101 -- the faults are dealt with
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.retry_after is not None:
            self.send_header("Retry-After", str(answer.retry_after))
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: a test reads `requests`."""
