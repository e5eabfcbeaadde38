"""What remote logging costs a run: training steps, and eight callbacks whose endpoints take 200 ms to answer.

A step is forward, backward and optimizer on a thread of their own, as the Trainer has it, then `BATCH_END`, of which
each callback tells its endpoint. The endpoints share a process of their own. The ways to do it take turns, round by
round, so that whatever else the machine does hits all of them alike; a background way is measured from when its first
requests are under way, so that a round begins and ends with the same amount of work put off, and is drained before the
next begins. At the end the endpoints say what they got: every record, once, in order.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import torch
from torch import nn
from torch.nn import functional

from eventbus_engine import Callback, Engine, Event
from eventbus_engine.loggers import HttpLogger
from eventbus_engine.training.worker import ComputeWorker

STEP_SECONDS = (0.005, 0.02)
ROUNDS = 5  # for each of them
MEASURED = 2.4  # seconds of steps: two requests of each callback
WARM_UP = 1.2  # not measured: from then on, requests follow each other
SLOW_ROUNDS = (1, 3)  # of the ways that wait for their endpoints, with a single step, of the shorter ones
LATENCY = 0.2
CALLBACKS = 8
MIN_KEPT = 0.97  # at the longer steps; the shorter ones show where it ends

ENDPOINTS = """
import json, sys
from urllib.parse import urlsplit
from eventbus_engine.testing import FlakyEndpoint
endpoints = [FlakyEndpoint(latency=float(sys.argv[2])) for _ in range(int(sys.argv[1]))]
for endpoint in endpoints:
    endpoint.up()
print(json.dumps([endpoint.url for endpoint in endpoints]), flush=True)
sys.stdin.readline()
arrived = {}
for number, endpoint in enumerate(endpoints):
    for request in endpoint.requests:
        way = arrived.setdefault(request.path.strip("/"), [[] for _ in endpoints])
        way[number].append([record["step"] for record in request.json["records"]])
print(json.dumps(arrived), flush=True)
"""

Row = tuple[str, float, str, float | None]
Arrived = dict[str, list[list[list[int]]]]
"""By way: for each endpoint, the steps that each of its requests told of."""


class Loss(Callback[Any]):
    """Logs the loss, to whatever destinations there are."""

    def batch_end(self, state: Any, logger: Any) -> None:
        """Log it."""
        logger.log_metrics({"loss": state.loss}, step=state.batch)


class Background(Callback[Any]):
    """Sends the loss in batches, in the background."""

    delivery, snapshot = "background", ("batch", "loss")
    max_batch, max_wait = 100, 1.0

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.http = httpx.AsyncClient()

    def batch_end(self, state: Any, logger: Any) -> dict[str, Any]:
        """What there is to send."""
        return {"step": state.batch, "loss": state.loss}

    async def send_records(self, records: Sequence[Any], logger: Any) -> None:
        """Send it."""
        response = await self.http.post(self.url, json={"records": [record.value for record in records]})
        response.raise_for_status()

    async def close(self, state: Any, logger: Any) -> None:
        """Close the connection."""
        await self.http.aclose()


class Inline(Callback[Any]):
    """Sends the loss and waits for the answer; the others of the event run meanwhile."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.http = httpx.AsyncClient()

    async def batch_end(self, state: Any, logger: Any) -> None:
        """Send it."""
        response = await self.http.post(self.url, json={"records": [{"step": state.batch, "loss": state.loss}]})
        response.raise_for_status()

    async def close(self, state: Any, logger: Any) -> None:
        """Close the connection."""
        await self.http.aclose()


class Blocking(Callback[Any]):
    """Sends the loss with a client that blocks, as `requests.post` does; nothing else runs on the loop meanwhile."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.http = httpx.Client()

    def batch_end(self, state: Any, logger: Any) -> None:
        """Send it."""
        response = self.http.post(self.url, json={"records": [{"step": state.batch, "loss": state.loss}]})
        response.raise_for_status()

    def close(self, state: Any, logger: Any) -> None:
        """Close the connection."""
        self.http.close()


class Training:
    """A small network, its batch, and the thread that it is trained on."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # or the step would take every core, and the loop would wait for one
        generator = torch.Generator().manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = torch.randn(4096, 64, generator=generator)
        self.labels = torch.randint(0, 10, (4096,), generator=generator)
        self.samples = 64
        self.worker = ComputeWorker()

    def step(self) -> float:
        """A step, on whichever thread; returns the loss."""
        loss = functional.cross_entropy(self.model(self.inputs[: self.samples]), self.labels[: self.samples])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def calibrate(self, seconds: float) -> None:
        """Choose a batch that makes a step of this length when nothing disturbs it."""
        for _ in range(3):
            best = min(_timed(self.step) for _ in range(10))
            self.samples = min(4096, math.ceil(self.samples * seconds / best))


def _timed(function: Callable[[], object]) -> float:
    # Of this thread alone: what others take of the machine makes a step no larger.
    started = time.thread_time()
    function()
    return time.thread_time() - started


class Way:
    """A way to tell the endpoints, or none.

    Attributes:
        steps: how many there have been.
        times: seconds for a step, of each round.
        cpu: the same, of the processor, on all threads of this process.
        collecting: the same, of Python's garbage collector, which holds up all of them.
    """

    def __init__(self, training: Training, callbacks: Sequence[Any]) -> None:
        self.training = training
        self.state = SimpleNamespace(batch=0, loss=0.0)
        self.engine: Engine[Any] = Engine(self.state, callbacks=callbacks)
        self.times: list[float] = []
        self.cpu: list[float] = []
        self.collecting: list[float] = []

    @property
    def steps(self) -> int:
        """Including those that were not measured."""
        return int(self.state.batch)

    async def round(self, seconds: float, warm_up: float) -> None:
        """Steps for so long, at least one, and before them, not measured, until everybody is at it."""
        if warm_up:
            await self._train(warm_up)
        started, worked = time.perf_counter(), time.process_time()
        with collector_timed() as collecting:
            steps = await self._train(seconds)
        self.times.append((time.perf_counter() - started) / steps)
        self.cpu.append((time.process_time() - worked) / steps)
        self.collecting.append(sum(collecting) / steps)
        while any(counts.waiting for counts in self.engine.deliveries().values()):  # noqa: ASYNC110 -- nothing tells
            await anyio.sleep(0.01)

    async def _train(self, seconds: float) -> int:
        state, training = self.state, self.training
        first, until = state.batch, time.perf_counter() + seconds
        while True:
            state.batch += 1
            state.loss = await training.worker.run(training.step)
            await self.engine.run_event(Event.BATCH_END)
            if time.perf_counter() >= until:
                return int(state.batch - first)


@contextmanager
def collector_timed() -> Iterator[list[float]]:
    """Seconds of each garbage collection in the block."""
    taken: list[float] = []
    began = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            taken.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield taken
    finally:
        gc.callbacks.remove(note)


@contextmanager
def endpoints() -> Iterator[tuple[list[str], Callable[[], Arrived]]]:
    """Their URLs, and what asks them, once, what has arrived."""
    command = [sys.executable, "-c", ENDPOINTS, str(CALLBACKS), str(LATENCY)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as asking, process.stdout as answers:

        def arrived() -> Arrived:
            print(file=asking, flush=True)
            answer: Arrived = json.loads(answers.readline())
            return answer

        try:
            yield json.loads(answers.readline()), arrived
        finally:
            process.kill()
            process.wait()


def measure() -> Iterator[Row]:
    """For each length of a step: the throughput of each way, against that without callbacks, and what arrived."""
    logging.getLogger("eventbus_engine").setLevel(logging.ERROR)  # that some of them block the loop is the point here
    training = Training()
    for seconds in STEP_SECONDS:
        training.calibrate(seconds)
        yield from compare(training, seconds)
    training.worker.close()


def compare(training: Training, seconds: float) -> Iterator[Row]:
    """The rows for one length of a step."""
    with endpoints() as (urls, arrived):
        ways = {
            "no callbacks": Way(training, []),
            "HttpLogger": Way(training, [Loss(), *(HttpLogger(f"{url}HttpLogger") for url in urls)]),
            "background": Way(training, [Background(f"{url}background") for url in urls]),
        }
        slow: dict[str, Way] = {}
        if seconds == STEP_SECONDS[0]:
            slow["inline"] = Way(training, [Inline(f"{url}inline") for url in urls])
            slow["blocking"] = Way(training, [Blocking(f"{url}blocking") for url in urls])
        anyio.run(rounds, list(ways.values()), list(slow.values()))
        label = f"{seconds * 1000:g} ms"
        yield from throughput(label, ways | slow)
        yield from records(label, ways | slow, arrived())


async def rounds(fast: list[Way], slow: list[Way]) -> None:
    """All of them, in turn."""
    async with AsyncExitStack() as stack:
        for way in [*fast, *slow]:
            await stack.enter_async_context(way.engine)
        for number in range(ROUNDS):
            # Which comes first changes, too: what a machine does to the second it does to all.
            for way in [*fast[number % 3 :], *fast[: number % 3]]:
                await way.round(MEASURED, WARM_UP)
            if number in SLOW_ROUNDS:
                for way in slow:
                    await way.round(0, 0)


def throughput(label: str, ways: dict[str, Way]) -> Iterator[Row]:
    """Of each way, and of the background ones against none."""
    alone = ways["no callbacks"]
    limit = 1 / MIN_KEPT if label == f"{STEP_SECONDS[-1] * 1000:g} ms" else None
    for name, way in ways.items():
        yield f"{label}, {name}: steps", 1 / statistics.median(way.times), "1/s", None
    for name in ("HttpLogger", "background"):
        way = ways[name]
        ratio = statistics.median(theirs / none for theirs, none in zip(way.times, alone.times, strict=True))
        added = statistics.median(theirs - none for theirs, none in zip(way.cpu, alone.cpu, strict=True))
        yield f"{label}, {name}: throughput kept", 1 / ratio, "times", None
        yield f"{label}, {name}: throughput without over with", ratio, "times", limit
        # What others on the machine took of a round does not show in the fastest ones.
        yield f"{label}, {name}: likewise, fastest rounds", min(way.times) / min(alone.times), "times", None
        yield f"{label}, {name}: CPU added per record", added / CALLBACKS * 1e6, "us", None
        yield f"{label}, {name}: garbage collection per step", statistics.mean(way.collecting) * 1e6, "us", None


def records(label: str, ways: dict[str, Way], arrived: Arrived) -> Iterator[Row]:
    """What was published, what arrived, and whether it was that, once and in order."""
    for name, way in ways.items():
        if name not in arrived:
            continue
        published = list(range(1, way.steps + 1))
        got = [[step for request in requests for step in request] for requests in arrived[name]]
        yield f"{label}, {name}: records published", way.steps * CALLBACKS, "records", None
        yield f"{label}, {name}: records received", sum(map(len, got)), "records", None
        yield f"{label}, {name}: requests", sum(map(len, arrived[name])), "requests", None
        yield f"{label}, {name}: records lost", sum(len({*published} - {*steps}) for steps in got), "records", 0
        yield f"{label}, {name}: endpoints with another order", sum(steps != published for steps in got), "", 0


if __name__ == "__main__":
    for row in measure():
        print(*row)
