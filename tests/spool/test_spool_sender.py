"""The sender: everything in order and at least once, whatever the far side, the disk and the process do."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import ConfigurationError, SpoolFullError, SpoolRecordError
from eventbus_engine.spool import Record, Spool, SpooledEvent, SpoolSender

Start = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.anyio


class FarSide:
    """Takes events, unless it is down; `held` keeps it from answering."""

    def __init__(self) -> None:
        self.events: list[SpooledEvent] = []
        self.sizes: list[int] = []
        self.attempts: list[list[int | None]] = []
        self.retry_after: float | None = None
        self.down = False
        self.held: anyio.Event | None = None
        self.called = anyio.Event()

    async def take(self, events: Sequence[SpooledEvent]) -> None:
        """What a callback's delivery is."""
        self.called.set()
        self.called = anyio.Event()
        self.attempts.append([event.step for event in events])
        if self.held is not None:
            await self.held.wait()
        if self.down:
            error = ConnectionRefusedError("far side is down")
            error.retry_after = self.retry_after  # type: ignore[attr-defined]
            raise error
        self.events += events
        self.sizes.append(len(events))

    @property
    def steps(self) -> list[int | None]:
        """What arrived."""
        return [event.step for event in self.events]


class TightSpool(Spool):
    """On a disk that can be made full, as the real one is in its own tests."""

    full = False
    room = 0

    def append(self, queue: str, records: Any) -> int:
        """As far as there is room."""
        records = list(records)
        if not self.full:
            return super().append(queue, records)
        stored = super().append(queue, records[: self.room])
        self.room = 0
        raise SpoolFullError("there is no room", self.path, stored)

    def ack(self, queue: str, upto: int) -> int:
        """That needs room too."""
        if self.full:
            raise SpoolFullError("there is no room", self.path)
        return super().ack(queue, upto)


@pytest.fixture
def spool(path: Path) -> Iterator[TightSpool]:
    """One for a test."""
    with TightSpool(path) as spool:
        yield spool


def events(count: int, first: int = 0) -> list[SpooledEvent]:
    """In order, by their step."""
    return [SpooledEvent("batch_end", {"loss": 0.5}, step) for step in range(first, first + count)]


async def test_events_arrive_in_order_and_in_batches(spool: TightSpool) -> None:
    """With their time and their id; the spool is empty after it, and the sender takes no more."""
    far = FarSide()
    sender = SpoolSender(spool, "log", far.take, max_batch=10)
    sent = events(35)
    async with anyio.create_task_group() as group:
        for event in sent:
            assert sender.put(event)
        group.start_soon(sender.run)
        assert await sender.close(60) == (35, 0, 0)
    assert far.events == sent
    assert far.sizes == [10, 10, 10, 5]
    assert not sender.put(sent[0])
    assert spool.stats("log").pending == 0


async def test_a_sender_that_has_nothing_to_do_waits_for_more(spool: TightSpool) -> None:
    """It does not end of itself, and closing waits for what came last."""
    far = FarSide()
    sender = SpoolSender(spool, "log", far.take)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        for event in events(2):
            sender.put(event)
            await sender._idle.wait()
            assert far.steps[-1] == event.step
        assert await sender.close(60) == (2, 0, 0)


async def test_while_the_far_side_is_down_events_are_on_the_disk(
    spool: TightSpool, caplog: pytest.LogCaptureFixture
) -> None:
    """And go first, in order, once it is back. Going down and coming back is logged once each."""
    far = FarSide()
    far.down = True
    sender = SpoolSender(spool, "log", far.take, max_batch=10, retry_wait=0)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        for event in events(20):
            sender.put(event)
        for _ in range(5):
            await far.called.wait()
        while spool.stats("log").pending < 20:
            await far.called.wait()
        far.down = False
        for event in events(20, 20):
            sender.put(event)
        assert await sender.close(60) == (40, 0, 0)
    assert far.steps == list(range(40))
    assert [record.getMessage() for record in caplog.records] == [
        "the events of log cannot be delivered now: ConnectionRefusedError('far side is down')",
        "the events of log are delivered again",
    ]


@pytest.mark.parametrize("ending", ["close", "cancel"])
async def test_what_is_left_at_the_end_is_for_the_next_sender(spool: TightSpool, ending: str) -> None:
    """Under the same id and time, the one that was under way included: closed at its deadline, or cancelled."""
    far, later = FarSide(), FarSide()
    far.held = anyio.Event()
    sent = events(30)
    async with anyio.create_task_group() as group:
        sender = SpoolSender(spool, "log", far.take, max_batch=10)
        group.start_soon(sender.run)
        called = far.called
        for event in sent[:20]:
            sender.put(event)
        await called.wait()
        for event in sent[20:]:
            sender.put(event)
        if ending == "close":
            assert await sender.close(0) == (0, 30, 0)
        else:
            group.cancel_scope.cancel()
    assert far.events == []
    async with anyio.create_task_group() as group:
        sender = SpoolSender(spool, "log", later.take)
        group.start_soon(sender.run)
        assert await sender.close(60) == (30, 0, 0)
    assert later.events == sent


async def test_a_queue_knows_nothing_of_another(spool: TightSpool) -> None:
    """One whose far side is down does not hold up its neighbour."""
    up, down = FarSide(), FarSide()
    down.down = True
    first, second = SpoolSender(spool, "down", down.take), SpoolSender(spool, "up", up.take)
    async with anyio.create_task_group() as group:
        group.start_soon(first.run)
        group.start_soon(second.run)
        for event in events(10):
            first.put(event)
            second.put(event)
        assert await second.close(60) == (10, 0, 0)
        assert await first.close(0) == (0, 10, 0)
    assert up.steps == list(range(10))


async def test_with_the_disk_full_events_are_delivered_from_memory(
    spool: TightSpool, caplog: pytest.LogCaptureFixture
) -> None:
    """After those that are in the spool, and in order; a full disk is logged once. Then the spool goes on."""
    far = FarSide()
    far.held = anyio.Event()
    sender = SpoolSender(spool, "log", far.take, max_batch=4, retry_wait=0)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        called = far.called
        for event in events(6):
            sender.put(event)
        await called.wait()
        spool.full, spool.room = True, 3
        for event in events(10, 6):
            sender.put(event)
        far.held.set()
        while len(far.events) < 16:
            await far.called.wait()
            await anyio.lowlevel.checkpoint()
        spool.full = False
        for event in events(4, 16):
            sender.put(event)
        assert await sender.close(60) == (20, 0, 0)
    assert far.steps == list(range(20))
    assert [record.getMessage() for record in caplog.records] == ["the events of log stay in memory: there is no room"]


async def test_a_batch_from_memory_that_comes_again_is_the_same_batch(spool: TightSpool) -> None:
    """Whatever has come in meanwhile."""
    far = FarSide()
    far.down = spool.full = True
    sender = SpoolSender(spool, "log", far.take, retry_wait=0)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        sender.put_all(events(3))
        while len(far.attempts) < 2:
            await anyio.lowlevel.checkpoint()
        sender.put_all(events(4, 3))
        seen = len(far.attempts)
        while len(far.attempts) < seen + 3:
            await anyio.lowlevel.checkpoint()
        far.down = False
        assert await sender.close(60) == (7, 0, 0)
    assert set(map(tuple, far.attempts[:-1])) == {(0, 1, 2)}
    assert far.sizes == [3, 4]


async def test_a_far_side_that_asks_for_a_pause_gets_it(spool: TightSpool) -> None:
    """However short our own would be."""
    far = FarSide()
    far.down, far.retry_after = True, 3600.0
    sender = SpoolSender(spool, "log", far.take, retry_wait=0)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        sender.put_all(events(1))
        while not far.attempts:
            await anyio.lowlevel.checkpoint()
        sender.put_all(events(1, 1))
        while spool.stats("log").pending < 2:
            await anyio.lowlevel.checkpoint()
        assert len(far.attempts) == 1
        await sender.close(0)


async def test_a_sender_that_is_hurried_gives_up_only_what_is_on_the_disk(spool: TightSpool) -> None:
    """What is in memory would be lost."""
    far = FarSide()
    far.down = spool.full = True
    sender = SpoolSender(spool, "log", far.take, retry_wait=0)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        sender.put_all(events(2))
        sender.hurry()
        while len(far.attempts) < 4:
            await anyio.lowlevel.checkpoint()
        assert not sender.idle
        spool.full = False
        await sender.drain()
        assert await sender.close(60) == (0, 2, 0)


async def test_nothing_to_put_is_nothing_to_wait_for(spool: TightSpool) -> None:
    """A sender that was idle is so still."""
    sender = SpoolSender(spool, "log", FarSide().take)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        await sender.drain()
        sender.put_all([])
        assert sender.idle
        await sender.close(0)


async def test_what_can_neither_be_written_nor_delivered_by_the_end_is_reported_as_lost(spool: TightSpool) -> None:
    """What else could it be."""
    far = FarSide()
    far.down = spool.full = True
    sender = SpoolSender(spool, "log", far.take)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        for event in events(3):
            sender.put(event)
        assert await sender.close(0) == (0, 0, 3)


async def test_a_sender_that_never_ran_writes_down_what_it_was_given(spool: TightSpool) -> None:
    """For the next process, as if it had run."""
    sender = SpoolSender(spool, "log", FarSide().take)
    sender.put(events(1)[0])
    assert await sender.close(0) == (0, 1, 0)


async def test_a_record_that_is_no_event_is_lost_alone(spool: TightSpool, caplog: pytest.LogCaptureFixture) -> None:
    """Counted and named, and never in the way of those behind it."""
    spool.append("log", [Record("odd", 0, b"?")])
    far = FarSide()
    sender = SpoolSender(spool, "log", far.take, max_batch=1)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.run)
        sender.put(events(1)[0])
        assert await sender.close(60) == (1, 0, 1)
    assert "an event of log is lost: record odd of the spool is no event" in caplog.text
    assert spool.stats("log").not_stored == 1


async def test_what_cannot_be_kept_is_refused_at_once(spool: TightSpool) -> None:
    """Where the event comes from, so that it is that callback's failure; and so are limits that make no sense."""
    sender = SpoolSender(spool, "log", FarSide().take)
    with pytest.raises(SpoolRecordError, match="state is a object"):
        sender.put(SpooledEvent("e", {"state": object()}))
    with pytest.raises(SpoolRecordError, match="raise its max_bytes"):
        sender.put(SpooledEvent("e", {"text": "x" * 5 * 2**20}))
    with pytest.raises(ConfigurationError, match=r"max_batch=0, retry_wait=1.0 do not fit"):
        SpoolSender(spool, "log", FarSide().take, max_batch=0)


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, path, every = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
requests = 0

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        global requests
        requests += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = requests % every
        if fault == 1:
            self.answer(500)
            return
        with open(path, "a") as file:
            file.write("".join(json.dumps(event) + "\\n" for event in body))
        if fault == 2:
            self.close_connection = True  # took them, and says nothing
        elif fault == 3:
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Le")
            self.close_connection = True
        else:
            self.answer(200)

    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
print("up", flush=True)
server.serve_forever()
"""

PUBLISHER = """
import json, os, sys, urllib.request
import anyio
from eventbus_engine.spool import Spool, SpooledEvent, SpoolSender

url, path, first, count, seconds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

def post(body):
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=5) as answer:
        answer.read()

async def deliver(events):
    await anyio.to_thread.run_sync(post, [{"id": e.id, "time": e.time, "step": e.step} for e in events])

async def main():
    with Spool(path) as spool:
        sender = SpoolSender(spool, "log", deliver, max_batch=7, retry_wait=0.01)
        async with anyio.create_task_group() as group:
            group.start_soon(sender.run)
            for step in range(first, first + count):
                sender.put(SpooledEvent("batch_end", {}, step))
                await anyio.sleep(0.0005)
                if not sender._fresh and not sender._taken:
                    os.write(1, b"%d\\n" % (step + 1))  # all before this number are on the disk, or delivered
            print(*await sender.close(seconds), flush=True)

anyio.run(main)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_nothing_is_lost_between_a_dying_publisher_and_a_dying_server(
    kills: int, path: Path, tmp_path: Path, start: Start
) -> None:
    """Both killed, again and again; the server also fails, hangs up and answers half. All arrives, in order.

    A repetition carries the id of the original.
    """
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    received = tmp_path / "received"
    url = f"http://127.0.0.1:{port}/log"
    promised: list[tuple[int, int]] = []
    for life in range(kills):
        server = start(SERVER, port, received, 6)
        wait_for_lines(server, 1)
        publisher = start(PUBLISHER, url, path, life * 10**6, 10**6, 0)
        lines = wait_for_lines(publisher, 5 + 17 * life % 50)
        if life % 2:
            server.kill()
            lines += wait_for_lines(publisher, 20)
        publisher.kill()
        server.kill()
        server.wait()
        assert publisher.stdout is not None
        lines += publisher.stdout.readlines()
        promised.append((life * 10**6, int(lines[-1])))
    wait_for_lines(start(SERVER, port, received, 6), 1)
    last = start(PUBLISHER, url, path, kills * 10**6, 50, 60)
    printed, errors = last.communicate()
    assert last.returncode == 0, errors
    assert printed.splitlines()[-1].split()[1:] == ["0", "0"]
    promised.append((kills * 10**6, kills * 10**6 + 50))

    arrived = [json.loads(line) for line in received.read_text().splitlines()]
    # A dict keeps the place of the first of those that have one id.
    steps = list({event["id"]: event["step"] for event in arrived}.values())
    assert steps == sorted(set(steps))
    for begin, end in promised:
        of_this_life = [step for step in steps if begin <= step < begin + 10**6]
        assert of_this_life == list(range(begin, begin + len(of_this_life)))
        assert begin + len(of_this_life) >= end
    times = {event["id"]: set[int]() for event in arrived}
    for event in arrived:
        times[event["id"]].add(event["time"])
    assert len(arrived) > len(steps)
    assert {len(of_one) for of_one in times.values()} == {1}


def wait_for_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Until it has printed so many."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    assert all(lines), process.communicate()[1]
    return lines
