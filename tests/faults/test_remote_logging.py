"""Remote logging between real processes that fail in every way: what was published arrives, in order."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]

SERVER = """
import gzip, json, os, socket, struct, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, path = int(sys.argv[1]), sys.argv[2]
faults = sys.argv[3:]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(gzip.decompress(self.rfile.read(int(self.headers["Content-Length"]))))
        fault = faults.pop(0) if faults else "ok"
        print(fault, flush=True)
        if fault == "503":
            return self.answer(503)
        if fault == "429":
            return self.answer(429, "1")
        # From here on it has taken them, whatever it says about that.
        lines = [[self.path, self.headers["Idempotency-Key"], r["id"], r["metrics"]["n"]] for r in body["records"]]
        with open(path, "a") as file:
            file.write("".join(json.dumps(line) + "\\n" for line in lines))
        if fault == "hang":
            time.sleep(60)
        elif fault == "half":
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Le")
            self.close_connection = True
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif fault == "die":
            os._exit(1)
        else:
            self.answer(200)

    def answer(self, status, retry_after=None):
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass

server = Server(("127.0.0.1", port), Handler)
print("up", flush=True)
server.serve_forever()
"""

PUBLISHER = """
import json, resource, signal, sys, time
import anyio
from eventbus_engine import Circuit, Engine, EventName, Retry
from eventbus_engine.loggers import HttpLogger

url, spool, first, count, seconds, limit, size = *sys.argv[1:3], *map(float, sys.argv[3:])

class Job(EventName):
    STEP = "step"

if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))

def logger(name):
    return HttpLogger(
        f"{url}/{name}", name=name, spool=spool, timeout=0.5, max_wait=0.01, max_batch=20, max_pending=10000,
        retry=Retry(attempts=3, initial=0.01), circuit=Circuit(failures=2, cool_down=0.02),
    )

async def main():
    async with Engine(events=Job, callbacks=[logger("a"), logger("b")]) as engine:
        for n in range(int(first), int(first + count)):
            engine.logger.log_metrics({"n": n, "filler": "x" * int(size)})
            await engine.run_event(Job.STEP)
            print(n, time.monotonic(), flush=True)
            await anyio.sleep(0.001)
        report = await engine.close(seconds)
    print(json.dumps([report.spooled, report.undelivered, report.ok]), flush=True)

anyio.run(main)
"""


MOUNT = ["unshare", "--user", "--map-root-user", "--mount"]
SMALL_DISK = 'mount -t tmpfs -o size="$2" tmpfs "$1" && shift 2 && exec "$@"'


def can_mount(folder: Path) -> bool:
    """Whether a process may have a file system of its own here."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    command = [*MOUNT, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Arrival(NamedTuple):
    """A record that the server took."""

    path: str
    key: str
    id: str
    n: int


class World:
    """A server, a publisher and a spool, each to be started and killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.taken = folder / "taken.jsonl"
        self.spool = folder / "spool.db"
        self.processes: list[subprocess.Popen[str]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, program: str, *arguments: object, disk: str | None = None) -> subprocess.Popen[str]:
        """Start a program; with a disk of that size, and of its own, for the spool."""
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
        process = subprocess.Popen(
            [*MOUNT, "sh", "-c", SMALL_DISK, "sh", str(self.folder), disk, *command] if disk else command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": path},
        )
        self.processes.append(process)
        return process

    def serve(self, *faults: str) -> subprocess.Popen[str]:
        """Start the server, which answers its first requests with these, and the others with 200."""
        server = self.start(SERVER, self.port, self.taken, *faults)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        return server

    def publisher(self, first: int, count: int, seconds: float = 10, **options: Any) -> subprocess.Popen[str]:
        """Start publishing, and close within so many seconds."""
        url, limit, size = options.get("url", self.url), options.get("limit", 0), options.get("size", 0)
        disk: str | None = options.get("disk")
        return self.start(PUBLISHER, url, self.spool, first, count, seconds, limit, size, disk=disk)

    def publish(self, first: int, count: int, seconds: float = 10, **options: Any) -> Any:
        """Publish, and return what was spooled, what was lost, and whether the report is good."""
        out, err = self.publisher(first, count, seconds, **options).communicate(timeout=60)
        return json.loads(out.splitlines()[-1]) if out else err

    def arrivals(self) -> list[Arrival]:
        """What the server took, in order."""
        lines = self.taken.read_text().splitlines() if self.taken.exists() else []
        return [Arrival(*json.loads(line)) for line in lines]

    def check(self, published: set[int]) -> tuple[int, int]:
        """That each logger's records have all arrived, in order, and that repetitions are recognisable.

        Returns:
            How many were lost, which is none, and how many came more than once.
        """
        arrivals, lost = self.arrivals(), 0
        for path in ("/a", "/b"):
            mine = [arrival for arrival in arrivals if arrival.path == path]
            firsts = list({arrival.n: arrival for arrival in mine}.values())
            lost += len(published - {arrival.n for arrival in mine})
            assert [arrival.n for arrival in firsts] == sorted(arrival.n for arrival in firsts)
        assert len({(arrival.path, arrival.n, arrival.id, arrival.key) for arrival in arrivals}) == len(
            {(arrival.path, arrival.n) for arrival in arrivals}
        )
        return lost, len(arrivals) - len({(arrival.path, arrival.n) for arrival in arrivals})

    def end(self) -> None:
        """Kill whatever still runs."""
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One for a test."""
    running = World(tmp_path)
    yield running
    running.end()


def say(what: str, published: int, lost: int, repeated: int) -> None:
    """The number, for whoever runs this with `-s`."""
    print(f"{what}: {published} published to two loggers, {lost} lost, {repeated} repeated")


@pytest.mark.parametrize("fault", ["503", "429", "hang", "half", "reset"])
def test_a_server_that_fails_gets_everything(world: World, fault: str) -> None:
    """Errors, a request to wait, no answer, half an answer, none but a reset: in the middle of the run."""
    world.serve("ok", fault, "ok", fault)
    spooled, lost, ok = world.publish(0, 200)
    missing, repeated = world.check(set(range(200)))
    say(fault, 200, missing, repeated)

    assert (spooled, lost, ok, missing) == ({}, {}, True, 0)


def test_a_server_that_is_killed_within_a_request_gets_everything_when_it_is_back(world: World) -> None:
    """What it had taken comes again, under the same key; what was published meanwhile comes after it."""
    server = world.serve("ok", "ok", "die")
    publisher = world.publisher(0, 600)
    server.wait(timeout=30)
    world.serve()
    out, _ = publisher.communicate(timeout=60)
    missing, repeated = world.check(set(range(600)))
    say("killed and restarted", 600, missing, repeated)

    assert json.loads(out.splitlines()[-1]) == [{}, {}, True]
    assert missing == 0
    assert repeated > 0


def test_a_name_that_does_not_resolve_costs_nothing(world: World) -> None:
    """All is spooled, and goes out when the name is right."""
    spooled, lost, ok = world.publish(0, 100, 0.5, url="http://collector.invalid")

    assert (spooled, lost, ok) == ({"a": 100, "b": 100}, {}, True)
    world.serve()

    assert world.publish(100, 50) == [{}, {}, True]
    assert world.check(set(range(150))) == (0, 0)


@pytest.mark.parametrize("full", [{"limit": 300_000}, {"disk": "400k"}], ids=["quota", "small disk"])
def test_a_full_disk_costs_nothing_while_the_server_takes_records(world: World, full: dict[str, Any]) -> None:
    """They wait in the mailbox, and go out from memory behind what is in the spool; none of them twice without need."""
    if "disk" in full and not can_mount(world.folder):
        pytest.skip("no mount namespaces here")
    world.serve("hang", "hang")
    spooled, lost, ok = world.publish(0, 400, size=2000, **full)
    missing, repeated = world.check(set(range(400)))
    say(f"disk full ({', '.join(full)})", 400, missing, repeated)

    assert (spooled, lost, ok, missing) == ({}, {}, True, 0)
    assert repeated <= 40  # the two batches whose answer did not come


def test_what_was_sent_with_the_disk_full_is_known_to_the_next_process(world: World) -> None:
    """The publisher is killed then. At most the batch that was on its way is sent again, under the same key."""
    server = world.serve("hang", "hang")
    publisher = world.publisher(0, 100_000, limit=300_000, size=2000)
    assert publisher.stdout is not None
    for _ in range(300):
        publisher.stdout.readline()
    while len(world.arrivals()) < 100:
        time.sleep(0.001)
    publisher.kill()
    publisher.wait()
    server.kill()
    server.wait()
    world.serve()

    assert world.publish(100_000, 1) == [{}, {}, True]
    _, repeated = world.check(set())
    assert repeated <= 80


def test_a_full_disk_with_the_server_down_loses_what_it_says(world: World) -> None:
    """What was spooled arrives later; the rest is in the report, to the record."""
    spooled, lost, ok = world.publish(0, 400, 1, limit=300_000, size=2000)
    world.serve()

    assert world.publish(400, 1) == [{}, {}, True]
    arrived = {name: {a.n for a in world.arrivals() if a.path == f"/{name}"} - {400} for name in ("a", "b")}
    assert {name: len(numbers) for name, numbers in arrived.items()} == spooled
    assert {name: 400 - len(numbers) for name, numbers in arrived.items()} == lost
    assert not ok


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_nothing_is_lost_when_the_publisher_is_killed(world: World, kills: int) -> None:
    """At any moment, again and again, the server failing as it pleases: what was published 0.2 s before is there."""
    chance = random.Random(7)
    published: set[int] = set()
    first, total = 0, 0
    for _ in range(kills):
        server = world.serve(*chance.choices(["ok", "503", "429", "hang", "half", "reset"], k=10))
        publisher = world.publisher(first, 100_000)
        seen: list[tuple[int, float]] = []
        reader = threading.Thread(target=_read, args=(publisher, seen))
        reader.start()
        while not seen:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.2, 0.7))
        killed_at = time.monotonic()
        os.kill(publisher.pid, signal.SIGKILL)
        reader.join()
        server.kill()
        server.wait()
        published |= {n for n, at in seen if at <= killed_at - 0.2}
        total += len(seen)
        first = seen[-1][0] + 2  # the last one may have been published and not printed
    world.serve()

    assert world.publish(first, 1) == [{}, {}, True]
    missing, repeated = world.check(published)
    say(f"{kills} times SIGKILL", len(published), missing, repeated)
    assert missing == 0
    assert published


def _read(publisher: subprocess.Popen[str], seen: list[tuple[int, float]]) -> None:
    assert publisher.stdout is not None
    for line in publisher.stdout:
        number, _, at = line.partition(" ")
        if at.endswith("\n"):
            seen.append((int(number), float(at)))
