"""`HttpLogger` against a real server: what is sent, in which order, and what becomes of it when the server fails."""

from __future__ import annotations

import gc
import json
import math
import random
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import anyio
import anyio.to_thread
import httpx
import numpy as np
import pytest
import torch

from eventbus_engine import (
    Callback,
    Circuit,
    ConfigurationError,
    DeliveryError,
    Engine,
    Event,
    EventName,
    HandlerTypeError,
    Record,
    Retry,
    Trace,
)
from eventbus_engine.loggers import HttpLogger
from eventbus_engine.testing import Answer, FlakyEndpoint, Request, run_with_fake_clock

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Job(EventName):
    """A vocabulary."""

    RUN = "run"


class Watched(HttpLogger):
    """Says when so many records are through, or so many attempts have failed."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.name = "remote"
        self.through = self.failures = 0
        self.failure: DeliveryError | None = None
        self._changed = anyio.Event()

    async def send_records(self, records: Sequence[Record], logger: Any) -> None:
        """Send, and count."""
        try:
            await super().send_records(records, logger)
            self.through += len(records)
        except DeliveryError as error:
            self.failures += 1
            self.failure = error
            raise
        finally:
            self._changed.set()

    async def wait(self, through: int = 0, failures: int = 0) -> None:
        """Wait, without a timer that a fake clock would jump to."""
        while self.through < through or self.failures < failures:
            self._changed = anyio.Event()
            await self._changed.wait()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyEndpoint]:
    """One that takes everything, unless a test says otherwise, and no proxy before it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with FlakyEndpoint() as running:
        yield running


QUICK = Retry(attempts=1000, initial=0.01, maximum=0.01)
"""For faults that take real time."""


async def log_numbers(engine: Engine[Any], *numbers: Any) -> None:
    """Log each on an event of its own."""
    for number in numbers:
        engine.logger.log_metrics({"n": number}, step=1)
        await engine.run_event(Job.RUN)


def errors(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Any]]:
    """What the engine has logged as errors, and the tracebacks with them."""
    records = [record for record in caplog.records if record.name == "eventbus_engine"]
    return [(record.getMessage(), record.exc_info) for record in records]


def records_of(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """All records, in the order of their arrival."""
    return [record for request in requests for record in request.json["records"]]


def numbers_of(requests: Sequence[Request]) -> list[Any]:
    """The numbers that have arrived, in order."""
    return [record["metrics"]["n"] for record in records_of(requests)]


def keys_of(requests: Sequence[Request]) -> list[str]:
    """The idempotency key of each request."""
    return [str(request.headers["Idempotency-Key"]) for request in requests]


# --------------------------------------------------------------------------------------------------------- what is sent


@pytest.mark.anyio
async def test_every_kind_is_one_record_in_json(endpoint: FlakyEndpoint) -> None:
    """With a unique id, the run, the time of logging, the kind and the step; compressed, and with the token."""
    remote = HttpLogger(endpoint.url + "runs", auth="secret", headers={"X-Team": "a"}, run_id="digits", log_traces=True)
    traces = {"mixup/RUN": Trace("mixup", Event.INIT, 0, 0, True)}
    began = datetime.now(UTC)
    async with Engine(events=Job, callbacks=[remote]) as engine:
        engine.logger.log_hyperparameters({"lr": 0.1})
        engine.logger.log_metrics({"loss": torch.tensor(0.5, requires_grad=True), "seen": np.int64(64)}, step=3)
        engine.logger.log_table(["x"], [(np.float32(0.25),)], name="rows", step=3)
        engine.logger.log_traces(traces, step=4)
        engine.logger.log_images(torch.zeros(3, 4, 4))
        engine.logger.upload_file("model.pt", "model.pt")
        await engine.run_event(Job.RUN)
    (request,) = endpoint.requests
    records = request.json["records"]
    times = [datetime.fromisoformat(record.pop("time")) for record in records]
    ids = [record.pop("id") for record in records]
    trace = records[3]["traces"].pop("mixup/RUN")

    assert records == [
        {"run": "digits", "kind": "hyperparameters", "step": None, "hyperparameters": {"lr": 0.1}},
        {"run": "digits", "kind": "metrics", "step": 3, "metrics": {"loss": 0.5, "seen": 64}},
        {"run": "digits", "kind": "table", "step": 3, "name": "rows", "columns": ["x"], "rows": [[0.25]]},
        {"run": "digits", "kind": "traces", "step": 4, "traces": {}},
    ]
    assert (trace["name"], trace["event"], trace["outcome"]) == ("mixup", "init", traces["mixup/RUN"].outcome)
    assert [began, *times] == sorted([began, *times])
    assert len(set(ids)) == len(ids)
    assert (request.method, request.path) == ("POST", "/runs")
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Content-Encoding"] == "gzip"
    assert (request.headers["Authorization"], request.headers["X-Team"]) == ("Bearer secret", "a")


@pytest.mark.anyio
async def test_ndjson_is_one_record_per_line(endpoint: FlakyEndpoint) -> None:
    """Uncompressed if asked; traces only if asked."""
    remote = HttpLogger(endpoint.url, format="ndjson", gzip=False)
    async with Engine(events=Job, callbacks=[remote]) as engine:
        engine.logger.log_metrics({"a": 1})
        engine.logger.log_traces({"mixup/RUN": Trace("mixup")})
        engine.logger.log_metrics({"b": "ü"})
        await engine.run_event(Job.RUN)
    (request,) = endpoint.requests

    assert [(line["metrics"], line["run"]) for line in request.lines] == [
        ({"a": 1}, remote.run_id),
        ({"b": "ü"}, remote.run_id),
    ]
    assert request.body.endswith(b"}\n")
    assert request.headers["Content-Type"] == "application/x-ndjson"
    assert request.headers["Content-Encoding"] is None


@pytest.mark.anyio
async def test_floats_that_json_lacks_are_strings(endpoint: FlakyEndpoint) -> None:
    """The body is strict JSON; `float()` reads them back."""

    def no_constants(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    async with Engine(events=Job, callbacks=[HttpLogger(endpoint.url)]) as engine:
        await log_numbers(engine, math.nan, torch.tensor(math.inf), [np.float64(-math.inf)])
    for request in endpoint.requests:
        json.loads(request.body, parse_constant=no_constants)

    assert numbers_of(endpoint.requests) == ["NaN", "Infinity", ["-Infinity"]]


@pytest.mark.anyio
async def test_a_value_that_json_cannot_hold_holds_up_nothing(endpoint: FlakyEndpoint) -> None:
    """Neither a number too large to write, nor a step that is no plain int: it is sent once, with the others."""
    step: Any = np.int64(7)
    async with Engine(events=Job, callbacks=[HttpLogger(endpoint.url)]) as engine:
        await log_numbers(engine, 1, 10**5000, -(10**5000), 4)
        engine.logger.log_metrics({"n": 5}, step=step)
        await engine.run_event(Job.RUN)
        report = await engine.close()

    assert report.ok
    assert numbers_of(endpoint.requests) == [1, "<int of 16610 bits>", "-<int of 16610 bits>", 4, 5]
    assert records_of(endpoint.requests)[-1]["step"] == 7


class Hooked(HttpLogger):
    """Sends records that its hook makes, some of which are none."""

    makes_record = True

    def run(self, state: Any, logger: Any) -> Any:
        """Return a record whose values JSON cannot hold, or what is no record."""
        return {**self.write("own", 3), "x": object()} if self.makes_record else 7


@pytest.mark.anyio
@pytest.mark.parametrize("format", ["json", "ndjson"])
async def test_a_record_that_cannot_be_written_costs_no_other(
    endpoint: FlakyEndpoint, format: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It arrives without its values, and says why."""
    remote = Hooked(endpoint.url, format=format, run_id="r")
    async with Engine(events=Job, callbacks=[remote]) as engine:
        engine.logger.log_metrics({"n": 1}, step=1)
        await engine.run_event(Job.RUN)
        report = await engine.close()
    (request,) = endpoint.requests
    rows = request.json["records"] if format == "json" else [json.loads(row) for row in request.body.splitlines()]
    bad = next(row for row in rows if row["kind"] == "own")

    assert report.ok
    assert [row["metrics"] for row in rows if row["kind"] == "metrics"] == [{"n": 1}]
    why = "TypeError: Object of type object is not JSON serializable"
    assert (bad["run"], bad["step"], bad["error"], "x" in bad) == ("r", None, why, False)
    (line,) = errors(caplog)
    assert line[0].endswith(f"record {bad['id']} is sent without its values, which are none of JSON: {why}")


@pytest.mark.anyio
async def test_what_is_no_record_is_not_tried_again(endpoint: FlakyEndpoint) -> None:
    """It would be in the way of all that is behind it."""
    hooked = Hooked(endpoint.url, max_batch=1)
    hooked.makes_record = False
    async with Engine(events=Job, callbacks=[hooked]) as engine:
        await engine.run_event(Job.RUN)
        report = await engine.close()

    assert (report.undelivered, report.deliveries["hooked"].retried) == ({"hooked": 1}, 0)
    assert endpoint.requests == []


@pytest.mark.anyio
async def test_a_record_is_what_was_logged(endpoint: FlakyEndpoint) -> None:
    """What happens to a tensor, a dict or a row between the logging and the sending does not show."""
    loss, rows = torch.tensor(1.0), [[1]]
    async with Engine(events=Job, callbacks=[HttpLogger(endpoint.url)]) as engine:
        engine.logger.log_metrics({"n": loss})
        engine.logger.log_table(["x"], rows)
        loss.fill_(2.0)
        rows[0][0] = 2
        await engine.run_event(Job.RUN)
    metrics, table = records_of(endpoint.requests)

    assert (metrics["metrics"], table["rows"]) == ({"n": 1.0}, [[1]])


# --------------------------------------------------------------------------------------------------- batches, and order


def scenario(
    backend: str,
    body: Callable[[Engine[Any], Watched], Awaitable[None]],
    endpoint: FlakyEndpoint,
    **options: Any,
) -> tuple[Any, Watched]:
    """Run with a clock that jumps, and so without a limit on the requests; the report of closing, and the logger."""

    async def main() -> tuple[Any, Watched]:
        remote = Watched(endpoint.url, timeout=None, **options)
        async with Engine(events=Job, callbacks=[remote]) as engine:
            await body(engine, remote)
            return await engine.close(), remote

    return run_with_fake_clock(main, backend=backend)


@BACKENDS
def test_records_of_many_events_share_a_batch(endpoint: FlakyEndpoint, backend: str) -> None:
    """Full ones go at once, the rest after `max_wait`; in order, none lost, each with a key of its own."""

    async def body(engine: Engine[Any], remote: Watched) -> None:
        await log_numbers(engine, *range(250))
        await remote.wait(through=200)
        before = anyio.current_time()
        await remote.wait(through=250)

        assert anyio.current_time() - before <= 0.5

    report, _ = scenario(backend, body, endpoint, max_batch=100, max_wait=0.5)

    assert [len(request.json["records"]) for request in endpoint.requests] == [100, 100, 50]
    assert numbers_of(endpoint.requests) == list(range(250))
    assert len(set(keys_of(endpoint.requests))) == 3
    assert report.ok


@BACKENDS
def test_a_batch_that_is_not_full_waits_for_max_wait_and_no_longer(endpoint: FlakyEndpoint, backend: str) -> None:
    """A record need not wait for the next one."""

    async def body(engine: Engine[Any], remote: Watched) -> None:
        before = anyio.current_time()
        await log_numbers(engine, 1)
        await remote.wait(through=1)

        assert anyio.current_time() - before == pytest.approx(7)

    scenario(backend, body, endpoint, max_wait=7)

    assert numbers_of(endpoint.requests) == [1]


@BACKENDS
def test_what_is_logged_while_a_batch_waits_goes_with_it(endpoint: FlakyEndpoint, backend: str) -> None:
    """And does not prolong the waiting."""

    async def body(engine: Engine[Any], remote: Watched) -> None:
        before = anyio.current_time()
        await log_numbers(engine, 1)
        await anyio.sleep(4)
        await log_numbers(engine, 2)
        await remote.wait(through=2)

        assert anyio.current_time() - before == pytest.approx(7)

    scenario(backend, body, endpoint, max_wait=7)

    assert [len(request.json["records"]) for request in endpoint.requests] == [2]


def test_engine_sync_delivers_it_on_its_thread(endpoint: FlakyEndpoint) -> None:
    """A program without an event loop logs just as well."""
    engine = Engine(events=Job, callbacks=[HttpLogger(endpoint.url, max_wait=3600)])
    for number in range(3):
        engine.logger.log_metrics({"n": number})
        engine.sync.run_event(Job.RUN)
    report = engine.sync.close()

    assert numbers_of(endpoint.requests) == [0, 1, 2]
    assert report.ok


@pytest.mark.anyio
async def test_close_sends_what_is_left(endpoint: FlakyEndpoint) -> None:
    """Without waiting for more, and what other callbacks log while they close included; it can be opened again."""

    class Last(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"n": 3})

    remote = HttpLogger(endpoint.url, max_wait=3600)
    for _ in range(2):
        async with Engine(events=Job, callbacks=[remote, Last()]) as engine:
            await log_numbers(engine, 1, 2)
            report = await engine.close()

        assert report.ok
    records = records_of(endpoint.requests)

    assert [record["metrics"]["n"] for record in records] == [1, 2, 3] * 2
    assert len({record["id"] for record in records}) == 6


@pytest.mark.anyio
async def test_what_is_logged_last_of_all_is_tried_until_the_deadline(endpoint: FlakyEndpoint) -> None:
    """As everything else; what does not get through in time stands in the report."""

    class Last(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"n": 2})

    for answer, undelivered in ((Answer(503), {}), (Answer(503, retry_after=60), {"remote": 1})):
        endpoint.script.extend([200, answer])
        remote = HttpLogger(endpoint.url, name="remote", retry=QUICK)
        async with Engine(events=Job, callbacks=[remote, Last()]) as engine:
            await log_numbers(engine, 1)
            report = await engine.close()

        assert report.undelivered == undelivered


# --------------------------------------------------------------------------------------------------------------- faults


@BACKENDS
def test_a_batch_is_sent_until_it_is_through_under_the_same_key(endpoint: FlakyEndpoint, backend: str) -> None:
    """Errors of the server, half an answer, a reset: each may hide that it was taken. Nothing overtakes it."""
    endpoint.script.extend([500, "half", "reset", 503, 429, 408, 425, 200])

    async def body(engine: Engine[Any], remote: Watched) -> None:
        await log_numbers(engine, 1, 2)
        await remote.wait(failures=1)
        await log_numbers(engine, 3)
        await remote.wait(through=3)

    report, remote = scenario(backend, body, endpoint)
    *attempts, last = endpoint.requests

    assert len(attempts) == 8
    assert {(request.headers["Idempotency-Key"], request.body) for request in attempts} == {
        (attempts[0].headers["Idempotency-Key"], attempts[0].body)
    }
    assert (numbers_of(attempts[:1]), numbers_of([last])) == ([1, 2], [3])
    assert last.headers["Idempotency-Key"] != attempts[0].headers["Idempotency-Key"]
    assert (report.ok, remote.failures) == (True, 7)


@BACKENDS
def test_retry_after_is_honoured(endpoint: FlakyEndpoint, backend: str) -> None:
    """So long, instead of the shorter backoff."""
    endpoint.script.extend([Answer(429, retry_after=30), Answer(503, retry_after=12)])

    async def body(engine: Engine[Any], remote: Watched) -> None:
        before = anyio.current_time()
        await log_numbers(engine, 1)
        await remote.wait(through=1)

        assert anyio.current_time() - before == pytest.approx(42)

    scenario(backend, body, endpoint, max_wait=0)

    assert numbers_of(endpoint.requests) == [1, 1, 1]


@BACKENDS
def test_a_batch_is_given_up_as_its_retry_says(endpoint: FlakyEndpoint, backend: str) -> None:
    """After so many attempts, its pauses doubling; lost, and counted."""
    endpoint.then = 500
    times: list[float] = []

    async def body(engine: Engine[Any], remote: Watched) -> None:
        await log_numbers(engine, 1, 2, 3)
        for failures in range(1, 6):
            await remote.wait(failures=failures)
            times.append(anyio.current_time())

    report, remote = scenario(backend, body, endpoint, retry=Retry(attempts=5, jitter=0))

    assert [after - before for before, after in pairwise(times)] == pytest.approx([0.5, 1, 2, 4])
    assert (remote.failures, report.undelivered) == (5, {"remote": 3})


@BACKENDS
def test_a_service_that_stays_down_is_left_alone_and_asked_again(endpoint: FlakyEndpoint, backend: str) -> None:
    """By default nothing is given up on for it: the records wait for the next probe."""
    endpoint.script.extend([503] * 12)

    async def body(engine: Engine[Any], remote: Watched) -> None:
        await log_numbers(engine, 1, 2, 3)
        await remote.wait(through=3)

        assert engine.deliveries()["remote"].openings == 1

    report, remote = scenario(backend, body, endpoint)

    assert (remote.failures, report.ok, len(set(keys_of(endpoint.requests)))) == (12, True, 1)


@pytest.mark.anyio
async def test_a_server_that_is_down_gets_everything_when_it_is_back(endpoint: FlakyEndpoint) -> None:
    """Killed under an open connection, refusing, back on the same port: in order, none lost."""
    remote = Watched(endpoint.url, max_wait=0, retry=QUICK, circuit=None)
    async with Engine(events=Job, callbacks=[remote]) as engine:
        await log_numbers(engine, 1)
        await remote.wait(through=1)
        endpoint.down()
        await log_numbers(engine, *range(2, 50))
        await remote.wait(failures=2)
        endpoint.up()
        await remote.wait(through=49)
        report = await engine.close()

    assert numbers_of(endpoint.requests) == list(range(1, 50))
    assert report.ok


@pytest.mark.anyio
async def test_a_server_that_never_answers_is_tried_again(endpoint: FlakyEndpoint) -> None:
    """After `timeout`, under the same key: it may have taken the batch."""
    endpoint.script.append("hang")
    async with Engine(events=Job, callbacks=[HttpLogger(endpoint.url, timeout=0.1, retry=QUICK)]) as engine:
        await log_numbers(engine, 1)
        await endpoint.arrived(2)
        report = await engine.close()

    assert len(set(keys_of(endpoint.requests))) == 1
    assert report.ok


@BACKENDS
@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_any_other_answer_is_final(
    endpoint: FlakyEndpoint, status: int, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once with the status and what the server said, the whole batch counted; the next batch is sent."""
    endpoint.script.append(Answer(status, body=b"no such run " * 100))

    async def body(engine: Engine[Any], remote: Watched) -> None:
        await log_numbers(engine, 1, 2, 3)
        await remote.wait(failures=1)
        await log_numbers(engine, 4)
        await remote.wait(through=1)

    report, remote = scenario(backend, body, endpoint)
    failure = remote.failure

    assert failure is not None
    assert errors(caplog)[0] == ("destination remote failed on RUN: " + str(failure), None)
    assert str(failure).startswith(f"{endpoint.url} answered {status} ")
    assert "no such run" in str(failure)
    assert len(str(failure)) < 300
    assert (failure.retryable, failure.retry_after) == (False, None)
    assert [numbers_of([request]) for request in endpoint.requests] == [[1, 2, 3], [4]]
    assert (remote.failures, report.undelivered) == (1, {"remote": 3})


@pytest.mark.anyio
async def test_what_close_cannot_send_is_said(endpoint: FlakyEndpoint) -> None:
    """Past its deadline nothing is waited for; the report has the number, and the client is closed."""
    endpoint.then = "hang"
    remote = HttpLogger(endpoint.url, name="remote", max_batch=3, max_wait=3600)
    async with Engine(events=Job, callbacks=[remote]) as engine:
        await log_numbers(engine, 1, 2, 3)
        await endpoint.arrived(1)
        report = await engine.close(timeout=0.01)

    assert (report.ok, report.undelivered) == (False, {"remote": 3})
    with pytest.raises(DeliveryError, match="is not open; log while the engine is"):
        await remote.send_records([], None)


@pytest.mark.anyio
async def test_cancelled_in_the_middle_of_the_body_it_leaves_nothing_behind() -> None:
    """Not even an async generator that is collected unfinished, which trio warns about; warnings are errors here."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        remote = HttpLogger(f"http://127.0.0.1:{deaf.getsockname()[1]}", gzip=False, timeout=None)
        remote.open(None, None)
        async with anyio.create_task_group() as group:
            # More than the buffers of a connection hold.
            record = Record(None, None, datetime.now(UTC), "1", {"id": "1", "filler": "x" * 16_000_000})
            group.start_soon(remote.send_records, [record], None)
            connection, _ = await anyio.to_thread.run_sync(deaf.accept)
            with connection:
                await anyio.to_thread.run_sync(connection.recv, 1)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
    await remote.close(None, None)
    gc.collect()


@BACKENDS
def test_nothing_is_drawn_from_the_global_generators(endpoint: FlakyEndpoint, backend: str) -> None:
    """Ids, keys and the jitter of retries come from elsewhere."""
    endpoint.script.extend([500, "reset", Answer(429, retry_after=1)])
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 -- the global one

    async def body(engine: Engine[Any], remote: Watched) -> None:
        await log_numbers(engine, 1, 2, 3)
        await remote.wait(through=3)

    scenario(backend, body, endpoint)
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 -- the global one

    assert before[0] == after[0]
    assert [np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True)] == [True] * 5
    assert torch.equal(before[2], after[2])


@pytest.mark.anyio
async def test_a_full_mailbox_loses_what_it_counts(endpoint: FlakyEndpoint) -> None:
    """Every record has arrived or stands in the report."""
    endpoint.script.append(Answer(200, latency=0.1))
    remote = HttpLogger(endpoint.url, name="remote", max_wait=0, max_pending=3)
    async with Engine(events=Job, callbacks=[remote]) as engine:
        await log_numbers(engine, 0)
        await endpoint.arrived(1)
        await log_numbers(engine, *range(1, 11))
        report = await engine.close()
    arrived = numbers_of(endpoint.requests)

    assert arrived == sorted(arrived)
    assert (arrived[0], arrived[-3:]) == (0, [8, 9, 10])
    assert report.undelivered.get("remote", 0) == 11 - len(arrived)


# ---------------------------------------------------------------------------------------------------- client, arguments


@pytest.mark.anyio
async def test_a_client_of_the_users_own_is_used_and_stays_open(endpoint: FlakyEndpoint) -> None:
    """With its headers, its proxies, its certificates."""
    async with httpx.AsyncClient(headers={"X-Mine": "yes"}) as client:
        async with Engine(events=Job, callbacks=[HttpLogger(endpoint.url, client=client)]) as engine:
            await log_numbers(engine, 1)

        assert not client.is_closed
    (request,) = endpoint.requests

    assert request.headers["X-Mine"] == "yes"


@pytest.mark.anyio
async def test_a_transport_that_breaks_loses_its_batch_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """What is no failure of the network is not tried again."""

    class Broken(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise ValueError("broken")

    async with httpx.AsyncClient(transport=Broken()) as client:
        remote = HttpLogger("http://nowhere/?key=hunter2", client=client, name="remote")
        async with Engine(events=Job, callbacks=[remote]) as engine:
            await log_numbers(engine, 1)
            report = await engine.close()

    assert report.undelivered == {"remote": 1}
    assert "http://nowhere/ could not be reached: ValueError: broken" in caplog.text
    assert "hunter2" not in caplog.text
    message, traceback = errors(caplog)[0]
    assert message == "destination remote failed on RUN"
    assert traceback is not None


@pytest.mark.anyio
async def test_a_server_that_never_answers_is_logged_in_a_line(
    endpoint: FlakyEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the client was waiting is of no interest either."""
    endpoint.then = "hang"
    remote = Watched(endpoint.url, timeout=0.05, retry=None)
    async with Engine(events=Job, callbacks=[remote]) as engine:
        await log_numbers(engine, 1)
        await engine.close()

    assert errors(caplog)[0] == (
        "destination remote failed on RUN: callback remote did not finish RUN within 0.05 s",
        None,
    )


@BACKENDS
@pytest.mark.parametrize("down", [True, False])
def test_an_outage_is_logged_in_a_line_for_each_thing_that_happens(
    endpoint: FlakyEndpoint, backend: str, down: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What is wrong is on the far side: where in the client it came to light is of no interest."""
    said = f"{endpoint.url} answered 503 Service Unavailable"
    if down:
        endpoint.down()
        said = f"{endpoint.url} could not be reached: ConnectError: "
    endpoint.then = 503

    async def body(engine: Engine[Any], remote: Watched) -> None:
        await log_numbers(engine, 1)
        await remote.wait(failures=2)
        await log_numbers(engine, 2)
        await remote.wait(failures=4)

    scenario(backend, body, endpoint, retry=Retry(attempts=2), circuit=Circuit(failures=4))

    first, second, *_ = errors(caplog)
    assert first[0].startswith(f"destination remote failed on RUN: {said}")
    assert second[0].startswith(
        "background callback remote failed 4 times in a row: its circuit is open, its events wait, and one is tried "
        f"every 30 s: {said}"
    )
    assert (first[1], second[1]) == (None, None)


@pytest.mark.parametrize(
    ("url", "options", "error", "message"),
    [
        ("localhost:1", {}, ConfigurationError, "needs a scheme, http or https"),
        ("http://user:hunter2@host", {}, ConfigurationError, "pass them as a header"),
        ("http://host", {"format": "xml"}, ConfigurationError, "format='xml'; use 'json' or 'ndjson'"),
        ("http://host", {"max_batch": 0}, ConfigurationError, "max_batch=0; give a number of events, 1 or more"),
        ("http://host", {"max_wait": -1}, ConfigurationError, "max_wait=-1; give a number of seconds"),
        ("http://host", {"timeout": 0}, ConfigurationError, "timeout=0; give seconds as a positive number"),
        ("http://host", {"headers": {"X": "a\nb"}}, ConfigurationError, "header 'X' cannot stand"),
        ("http://host", {"auth": "a\nb"}, ConfigurationError, "header 'Authorization' cannot stand"),
        ("http://host", {"delivery": "inline"}, ConfigurationError, "max_pending=1 and on_full='block' each waits"),
        ("http://host", {"max_size": 1}, HandlerTypeError, "HttpLogger has no option 'max_size'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    url: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """By name, and without repeating a secret."""
    with pytest.raises(error, match=message) as refused:
        Engine(events=Job, callbacks=[HttpLogger(url, **options)])

    assert "hunter2" not in str(refused.value)


def test_without_httpx_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the loggers needs nothing of it."""
    monkeypatch.setitem(sys.modules, "httpx", None)

    with pytest.raises(ConfigurationError, match=r'the extra "http": pip install "eventbus-engine\[http\]"'):
        HttpLogger("http://host")


FIRST_REQUEST = """
import sys
import anyio
from eventbus_engine import Engine
from eventbus_engine.loggers import HttpLogger
from eventbus_engine.testing import FlakyEndpoint

async def main(url):
    remote = HttpLogger(url)
    before = set(sys.modules)
    async with Engine(callbacks=[remote]) as engine:
        engine.logger.log_metrics({"loss": 0.5})
        await engine.run_event("batch_end")
        assert (await engine.close()).ok
    print(*sorted(set(sys.modules) - before))

with FlakyEndpoint() as endpoint:
    anyio.run(main, endpoint.url, backend=sys.argv[1])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_first_request_loads_no_module(backend: str) -> None:
    """That would hold up the event loop, for a quarter of a second on a busy machine: all is loaded when it is made."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FIRST_REQUEST, backend], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
