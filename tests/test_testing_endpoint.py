"""`FlakyEndpoint`: it does what its script says, and keeps what it was sent."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from eventbus_engine import ConfigurationError
from eventbus_engine.testing import Answer, FlakyEndpoint, run_with_fake_clock


class Client:
    """A plain client that keeps its connection."""

    def __init__(self, endpoint: FlakyEndpoint, timeout: float | None = 5.0) -> None:
        address = endpoint.url.removeprefix("http://").rstrip("/")
        self.connection = http.client.HTTPConnection(address, timeout=timeout)

    def send(
        self, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST", **options: Any
    ) -> http.client.HTTPResponse:
        """Send a request; the answer with its body read."""
        self.connection.request(method, "/records?run=1", body, headers or {}, **options)
        response = self.connection.getresponse()
        response.body = response.read()  # type: ignore[attr-defined]
        return response


@pytest.fixture
def endpoint() -> Iterator[FlakyEndpoint]:
    """One that takes everything, unless a test says otherwise."""
    with FlakyEndpoint() as running:
        yield running


@pytest.fixture
def client(endpoint: FlakyEndpoint) -> Iterator[Client]:
    """A client of it."""
    made = Client(endpoint)
    yield made
    made.connection.close()


def test_statuses_come_as_the_script_says_then_as_then_says(endpoint: FlakyEndpoint, client: Client) -> None:
    """One entry for each request; more may be appended while it runs."""
    endpoint.script.extend([500, 429])
    endpoint.then = 204
    statuses = [client.send().status for _ in range(3)]
    endpoint.script.append(503)

    assert [*statuses, client.send().status] == [500, 429, 204, 503]


def test_an_answer_has_headers_and_a_body(endpoint: FlakyEndpoint, client: Client) -> None:
    """`Retry-After` among them, in seconds or as a date."""
    endpoint.script.extend(
        [
            Answer(429, {"X-Why": "quota"}, b"slow down", retry_after=2),
            Answer(503, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"),
        ]
    )
    first, second = client.send(), client.send()

    assert (first.status, first.headers["X-Why"], first.body) == (429, "quota", b"slow down")  # type: ignore[attr-defined]
    assert first.headers["Retry-After"] == "2"
    assert second.headers["Retry-After"] == "Wed, 21 Oct 2015 07:28:00 GMT"


def test_requests_are_kept_whole(endpoint: FlakyEndpoint, client: Client) -> None:
    """Method, path, headers whatever their case, and the body: unpacked, and in one piece if it came in chunks."""
    client.send(b'{"n": 1}', {"Idempotency-Key": "a"})
    client.send(gzip.compress(b'{"n": 1}\n{"n": 2}\n'), {"Content-Encoding": "gzip"}, "PUT")
    client.send(iter([b'{"n"', b": 3}"]), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
    client.send(method="GET")
    first, second, third, fourth = endpoint.requests

    assert (first.method, first.path, first.headers["idempotency-key"]) == ("POST", "/records?run=1", "a")
    assert (first.headers["X-Missing"], first.json) == (None, {"n": 1})
    assert (second.method, second.lines) == ("PUT", [{"n": 1}, {"n": 2}])
    assert third.json == {"n": 3}
    assert (fourth.method, fourth.body) == ("GET", b"")
    assert first.time <= second.time <= third.time <= fourth.time


@pytest.mark.parametrize(
    ("fault", "error"),
    [("half", http.client.IncompleteRead), ("reset", ConnectionResetError), ("hang", TimeoutError)],
)
def test_faults_come_after_the_whole_request(endpoint: FlakyEndpoint, fault: str, error: type[Exception]) -> None:
    """The server has it, the client does not know: what idempotency keys are for. The next connection is fine."""
    endpoint.script.append(fault)
    client = Client(endpoint, timeout=0.05 if fault == "hang" else 5.0)
    with pytest.raises(error):
        client.send(json.dumps([1]))
    client.connection.close()
    client.connection.timeout = 5.0
    client.send(json.dumps([2]))
    client.connection.close()

    assert [request.json for request in endpoint.requests] == [[1], [2]]


def test_latency_is_before_the_answer_and_after_the_request(endpoint: FlakyEndpoint, client: Client) -> None:
    """While it lasts the request is there and the answer is not; `down` does not wait for its end."""
    endpoint.latency = 3600
    answers: list[Any] = []

    def send() -> None:
        try:
            client.send(b"1")
        except (ConnectionError, http.client.HTTPException) as error:
            answers.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    endpoint.wait_for(1)

    assert answers == []
    endpoint.down()
    sender.join(5)

    assert len(answers) == 1


def test_an_answer_may_have_a_latency_of_its_own() -> None:
    """It counts instead of the endpoint's."""
    with FlakyEndpoint(latency=3600, script=[Answer(201, latency=0)]) as endpoint:
        client = Client(endpoint)

        assert client.send().status == 201
        client.connection.close()


def test_down_refuses_and_breaks_connections_and_up_is_on_the_same_port(endpoint: FlakyEndpoint) -> None:
    """As a server that is killed and started again; either of them twice changes nothing."""
    client = Client(endpoint)
    client.send(b"1")
    url = endpoint.url
    endpoint.down()
    endpoint.down()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        client.send(b"2")
    client.connection.close()
    with pytest.raises(ConnectionRefusedError):
        client.send(b"3")
    client.connection.close()
    endpoint.up()
    endpoint.up()
    client.send(b"4")
    client.connection.close()

    assert endpoint.url == url
    assert [request.body for request in endpoint.requests] == [b"1", b"4"]


def test_nobody_gets_the_port_while_it_is_down(endpoint: FlakyEndpoint) -> None:
    """It stays bound, so that `up` cannot fail over somebody else's server."""
    endpoint.down()
    port = int(endpoint.url.rstrip("/").rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_a_request_that_breaks_off_is_none(endpoint: FlakyEndpoint) -> None:
    """Only what has arrived whole counts."""
    port = int(endpoint.url.rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
        connection.shutdown(socket.SHUT_WR)

        assert connection.recv(1) == b""
    assert endpoint.requests == []


def test_waiting_in_vain_says_what_came(endpoint: FlakyEndpoint, client: Client) -> None:
    """The message is what a failed test shows."""
    with pytest.raises(TimeoutError, match=r"1 requests did not arrive at http://127.* within 0 s; these did: none"):
        endpoint.wait_for(1, timeout=0)
    client.send()
    with pytest.raises(TimeoutError, match=r"these did: POST /records\?run=1"):
        endpoint.wait_for(2, timeout=0)

    assert len(endpoint.wait_for(1)) == 1


@pytest.mark.anyio
async def test_async_tests_wait_without_holding_up_the_loop(endpoint: FlakyEndpoint, client: Client) -> None:
    """The client runs on it."""

    async def send() -> None:
        await anyio.to_thread.run_sync(client.send)

    async with anyio.create_task_group() as group:
        group.start_soon(send)

        assert len(await endpoint.arrived(1)) == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_waiting_takes_real_time_under_a_fake_clock(endpoint: FlakyEndpoint, client: Client, backend: str) -> None:
    """A clock that jumps does not jump over a request that is on its way."""

    async def send() -> None:
        await anyio.to_thread.run_sync(client.send)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await endpoint.arrived(1)

    run_with_fake_clock(main, backend=backend)

    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("entry", ["hung", 99, True, None, Answer(600)])
def test_an_entry_that_is_no_answer_is_refused(entry: Any) -> None:
    """At once, with what there is."""
    with pytest.raises(ConfigurationError, match=r"is no answer of an endpoint; use a status from 200 to 599, 'hang'"):
        FlakyEndpoint(script=[200, entry])
    with pytest.raises(ConfigurationError, match="is no answer"):
        FlakyEndpoint(then=entry)
