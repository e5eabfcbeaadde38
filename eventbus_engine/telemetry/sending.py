"""How OTLP leaves the process, whatever its signal: `HttpSender` by HTTP, `LineFile` into a file of JSON lines."""

from __future__ import annotations

import gzip
import http.client
import itertools
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.endpoint import (
    Endpoint,
    Signal,
    read_retry_after,
    resolve_compression,
    resolve_headers,
    resolve_timeout,
)

__all__ = ["HttpSender", "LineFile", "NotDeliveredError"]

_RETRYABLE_STATUS = frozenset({429, 502, 503, 504})
"""What the OTLP specification lets a client send again. Everything else would be refused again."""
_FIRST_BACKOFF = 0.5
_MAX_BACKOFF = 5.0
_MAX_RESPONSE_BYTES = 64 * 1024


class NotDeliveredError(Exception):
    """A batch was not delivered; the message says why."""


class HttpSender:
    """Posts requests in protobuf over a connection that is kept, and tries again what is worth it.

    Args:
        signal: `traces` or `metrics`: whose standard variables, and whose path, are meant.
        endpoint: see `OtlpHttpExporter`, as are the others.
        headers: likewise.
        timeout: likewise.
        compression: likewise.

    Attributes:
        url: where it posts to.
        closed: set by `interrupt`.

    Raises:
        ConfigurationError: an argument, or the endpoint in the environment, cannot be used.
    """

    def __init__(
        self,
        signal: Signal,
        endpoint: str | None,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        compression: str | None,
    ) -> None:
        self._endpoint = Endpoint.resolve(endpoint, signal)
        self._timeout = resolve_timeout(timeout, signal)
        self._gzip = resolve_compression(compression, signal) == "gzip"
        self._headers = {
            "Content-Type": "application/x-protobuf",
            "User-Agent": "eventbus-engine (OTLP exporter, Python)",
            **({"Content-Encoding": "gzip"} if self._gzip else {}),
            **resolve_headers(headers, signal),
        }
        self._tls = self._endpoint.tls_context(signal)
        self.url: str = self._endpoint.url
        self.closed: threading.Event = threading.Event()
        self.own_process()

    def own_process(self) -> None:
        """Start afresh in a forked child."""
        self._random = random.Random(int.from_bytes(os.urandom(32), "big"))
        # The child would share the parent's socket, and mix its bytes into the parent's requests.
        self._connection = self._endpoint.connection(self._tls)

    def interrupt(self) -> None:
        """Take no more, and wake whoever is sending."""
        self.closed.set()
        connected = self._connection.sock
        if connected is not None:
            # Unlike close(), shutdown() wakes the thread that waits for an answer on this socket.
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the connection. Not while somebody is sending."""
        self._connection.close()

    def send(self, body: bytes) -> bytes:
        """Post a request until it is taken, and return the body of the answer.

        Raises:
            NotDeliveredError: it was refused, the time was over, or `interrupt` came before.
            OSError: the certificate of the server does not fit.
        """
        if self._gzip:
            body = gzip.compress(body)
        deadline = time.monotonic() + self._timeout
        backoffs = self._backoffs()
        while True:
            try:
                status, reason, retry_after, answer = self._post(body, deadline)
            except ssl.SSLCertVerificationError:
                raise
            except (OSError, http.client.HTTPException) as exc:
                problem, retry_after = f"{type(exc).__name__}: {exc}", None
            else:
                if 200 <= status < 300:
                    return answer
                problem = f"HTTP {status} {reason}"
                if status not in _RETRYABLE_STATUS:
                    raise NotDeliveredError(problem)
            wait = next(backoffs) if retry_after is None else retry_after
            if time.monotonic() + wait >= deadline and not self.closed.is_set():
                raise NotDeliveredError(f"{problem}; another attempt would exceed the timeout of {self._timeout:g} s")
            if self.closed.wait(wait):
                raise NotDeliveredError("shut down")

    def _post(self, body: bytes, deadline: float) -> tuple[int, str, float | None, bytes]:
        """One request: the status and its phrase, the seconds of `Retry-After`, and the answer's body."""
        reused = self._connection.sock is not None
        try:
            return self._request(body, deadline)
        except ConnectionError:
            # Servers close idle connections whenever they like; only a fresh one that fails is news.
            if not reused or self.closed.is_set():
                raise
            return self._request(body, deadline)

    def _request(self, body: bytes, deadline: float) -> tuple[int, str, float | None, bytes]:
        connection = self._connection
        remaining = max(deadline - time.monotonic(), 0.001)
        try:
            if connection.sock is None:
                connection.timeout = remaining
                connection.connect()
                if self.closed.is_set():
                    raise NotDeliveredError("shut down")
            else:
                connection.sock.settimeout(remaining)
            connection.request("POST", self._endpoint.target, body, self._headers)
            response = connection.getresponse()
            answer = response.read(_MAX_RESPONSE_BYTES)
            if not response.isclosed():
                # More than anyone reads. What is left would stand in front of the next answer.
                connection.close()
        except BaseException:
            connection.close()
            raise
        return response.status, response.reason, read_retry_after(response.headers.get("Retry-After")), answer

    def _backoffs(self) -> Iterator[float]:
        for attempt in itertools.count():
            yield min(_FIRST_BACKOFF * 2**attempt, _MAX_BACKOFF) * self._random.uniform(0.8, 1.2)


class LineFile:
    """A file that lines are appended to, each in the hands of the operating system when `append` returns.

    Raises:
        ConfigurationError: the file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._within_a_line = _ends_within_a_line(path)
            # Unbuffered: a buffer would be copied by a fork, and its content written twice.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - it lives as long as its exporter
        except OSError as exc:
            raise ConfigurationError(
                f"cannot write spans to {os.fspath(path)!r}: {exc}; give a path in a directory you may write to"
            ) from exc

    def append(self, line: str) -> None:
        """Append a line, given without its end."""
        # A lone surrogate in an attribute has no UTF-8 form; better a question mark than a lost batch.
        start = b"\n" if self._within_a_line else b""
        rest = memoryview(start + line.encode("utf-8", errors="replace") + b"\n")
        while rest:
            # Until it is out to its end, this line is another that has none.
            rest, self._within_a_line = rest[self._file.write(rest) :], True
        self._within_a_line = False

    def close(self) -> None:
        """Close the file. Safe to call again."""
        self._file.close()


def _ends_within_a_line(path: str | os.PathLike[str]) -> bool:
    """Whether the last line of a file has no end: a process was killed in the middle of it."""
    if not os.path.isfile(path) or not os.path.getsize(path):  # noqa: PTH113, PTH202 -- a device has no lines
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
