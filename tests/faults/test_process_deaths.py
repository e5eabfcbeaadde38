"""However a process ends, the spans of its last events are in the file, or are known to be the last second's."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from eventbus_engine.telemetry.reports import RecordedSpan
from eventbus_engine.telemetry.reports.model import ERROR

EVENTS = 100

DISPATCHES = """
import os, signal, sys, time
import anyio
from eventbus_engine import Algorithm, Engine, Event, telemetry

path, ending = sys.argv[1:]

class Step(Algorithm):
    hang = False
    def match(self, event, state):
        return True
    async def apply(self, event, state, logger):
        if self.hang:
            print("hanging", flush=True)
            await anyio.sleep_forever()

async def dispatch():
    step = Step()
    engine = Engine(algorithms=[step])
    for _ in range(100):
        await engine.run_event(Event.BATCH_END)
        if ending == "SIGKILL":
            print(time.time_ns(), flush=True)
            await anyio.sleep(0.02)  # so that the run is longer than the flush interval
    if ending == "exception":
        raise ZeroDivisionError
    if ending == "sys.exit":
        sys.exit(3)
    if ending == "SIGKILL":
        print(time.time_ns(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if ending in ("SIGINT", "SIGTERM"):
        step.hang = True
        await engine.run_event(Event.EPOCH_END)

with telemetry.configure(path=path, handle_sigterm=ending == "SIGTERM"):
    anyio.run(dispatch)
"""

CRASH = """
import sys, threading
from eventbus_engine import Callback, Engine, Event, telemetry

hanging = threading.Event()

class Remote(Callback):
    def epoch_end(self, state, logger):
        hanging.set()
        threading.Event().wait()

engine = Engine(callbacks=[Remote()])
with telemetry.configure(path=sys.argv[1]):
    for _ in range(100):
        engine.sync.run_event(Event.BATCH_END)
    threading.Thread(target=engine.sync.run_event, args=(Event.EPOCH_END,), daemon=True).start()
    hanging.wait()
    raise ZeroDivisionError
"""

FORKS = """
import os, sys, threading
import anyio
from opentelemetry import trace
from eventbus_engine import Engine, Event, telemetry

(path,) = sys.argv[1:]
engine = Engine()
tracer = trace.get_tracer("user")
children = []

async def dispatch(count, fork_every=None):
    for number in range(count):
        await engine.run_event(Event.BATCH_END)
        if fork_every and number % fork_every == 0:
            child = os.fork()
            if child == 0:
                tracer.start_span("child").end()
                os._exit(0 if provider.force_flush(10_000) else 2)
            children.append(child)

with telemetry.configure(path=path) as provider:
    anyio.run(dispatch, 100, 4)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""

LOADER = """
import os, sys
import anyio, torch
from opentelemetry import trace
from torch.utils.data import DataLoader, Dataset
from eventbus_engine import Engine, Event, telemetry

(path,) = sys.argv[1:]
torch.set_num_threads(1)
engine = Engine()

class Traced(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        with trace.get_tracer("user").start_as_current_span("load") as span:
            span.set_attribute("index", index)
        assert provider.force_flush(10_000)
        return torch.tensor(float(index))

async def train():
    total = 0.0
    for epoch in range(2):
        for batch in DataLoader(Traced(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
            await engine.run_event(Event.BATCH_END)
            total += float(batch.sum())
    return total

with telemetry.configure(path=path) as provider:
    print(anyio.run(train))
"""

Start = Callable[..., subprocess.Popen[str]]
SpansIn = Callable[[Path], list[RecordedSpan]]

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def names_of(spans: list[RecordedSpan]) -> Counter[str]:
    """How many spans there are of each name, having seen that none is there twice."""
    assert len({span.span_id for span in spans}) == len(spans)
    return Counter(span.name for span in spans)


@pytest.mark.parametrize(("ending", "code"), [("normal", 0), ("exception", 1), ("sys.exit", 3)])
def test_a_process_that_ends_by_itself_loses_nothing(
    ending: str, code: int, start: Start, spans_in: SpansIn, tmp_path: Path
) -> None:
    """At its end, by an exception that nobody catches, by sys.exit."""
    path = tmp_path / "spans.jsonl"
    process = start(DISPATCHES, path, ending)
    _, logged = process.communicate(timeout=60)

    assert process.returncode == code, logged
    assert names_of(spans_in(path)) == {"dispatch batch_end": EVENTS, "algorithm step": EVENTS}


def test_an_interrupted_process_loses_nothing(start: Start, spans_in: SpansIn, tmp_path: Path) -> None:
    """Ctrl-C while a handler hangs: the event it interrupts is there as well, as a cancelled one."""
    path = tmp_path / "spans.jsonl"
    process = start(DISPATCHES, path, "SIGINT")
    assert process.stdout is not None
    hanging = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, logged = process.communicate(timeout=60)
    spans = spans_in(path)
    interrupted = [span for span in spans if span.attributes["eventbus.event"] == "epoch_end"]

    assert hanging == "hanging\n"
    assert process.returncode == -signal.SIGINT, logged
    assert names_of(spans) == {
        "dispatch batch_end": EVENTS,
        "dispatch epoch_end": 1,
        "algorithm step": EVENTS + 1,
    }
    assert [span.attributes["eventbus.outcome"] for span in interrupted] == ["cancelled", "cancelled"]


def hung(spans: list[RecordedSpan]) -> set[str]:
    """The spans that had not ended, having seen that they say so."""
    found = [span for span in spans if span.attributes.get("eventbus.in_flight")]
    assert all(span.status.code == ERROR for span in found)
    return {span.name for span in found}


def test_a_terminated_process_loses_nothing_with_the_handler(start: Start, spans_in: SpansIn, tmp_path: Path) -> None:
    """SIGTERM while a handler hangs: all of it is there, the open spans marked as such, and the process dies of it."""
    path = tmp_path / "spans.jsonl"
    process = start(DISPATCHES, path, "SIGTERM")
    assert process.stdout is not None
    hanging = process.stdout.readline()
    process.terminate()
    _, logged = process.communicate(timeout=60)
    spans = spans_in(path)

    assert hanging == "hanging\n"
    assert process.returncode == -signal.SIGTERM, logged
    assert names_of(spans) == {"dispatch batch_end": EVENTS, "dispatch epoch_end": 1, "algorithm step": EVENTS + 1}
    assert hung(spans) == {"dispatch epoch_end", "algorithm step"}


def test_a_crash_while_a_handler_hangs_shows_where(start: Start, spans_in: SpansIn, tmp_path: Path) -> None:
    """An error that nobody catches, with a handler hanging on another thread: its open span is in the file."""
    path = tmp_path / "spans.jsonl"
    process = start(CRASH, path)
    _, logged = process.communicate(timeout=60)
    spans = spans_in(path)

    assert process.returncode == 1, logged
    assert names_of(spans) == {"dispatch batch_end": EVENTS, "dispatch epoch_end": 1, "callback remote": 1}
    assert hung(spans) == {"dispatch epoch_end", "callback remote"}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_loses_at_most_the_last_second(start: Start, spans_in: SpansIn, tmp_path: Path) -> None:
    """What ended before the last flush interval is in the file, and the reports read it."""
    path = tmp_path / "spans.jsonl"
    process = start(DISPATCHES, path, "SIGKILL")
    printed, _ = process.communicate(timeout=60)
    *ends, killed = map(int, printed.split())
    # The interval, and half a second for a machine that is busy with other things.
    due = sum(end < killed - 1_500_000_000 for end in ends)
    names = names_of(spans_in(path))

    assert process.returncode == -signal.SIGKILL
    assert len(ends) == EVENTS
    assert 0 < due <= names["dispatch batch_end"] <= EVENTS
    assert 0 < due <= names["algorithm step"] <= EVENTS


@needs_fork
def test_forked_children_neither_duplicate_nor_deadlock(start: Start, spans_in: SpansIn, tmp_path: Path) -> None:
    """25 forks in the middle of exports: each child delivers its own span, the parent its 100, and nothing twice."""
    path = tmp_path / "spans.jsonl"
    process = start(FORKS, path, OTEL_BSP_SCHEDULE_DELAY="1")
    printed, logged = process.communicate(timeout=60)

    assert process.returncode == 0, logged
    assert printed == f"{[0] * 25}\n"
    assert names_of(spans_in(path)) == {"dispatch batch_end": EVENTS, "child": 25}


@needs_fork
def test_dataloader_workers_neither_duplicate_nor_deadlock(start: Start, spans_in: SpansIn, tmp_path: Path) -> None:
    """Workers forked from a traced loop write what they load, the loop its events, for two epochs of 50 batches."""
    path = tmp_path / "spans.jsonl"
    process = start(LOADER, path, OTEL_BSP_SCHEDULE_DELAY="1")
    printed, logged = process.communicate(timeout=60)
    spans = spans_in(path)

    assert process.returncode == 0, logged
    assert float(printed) == 2 * sum(range(100))
    assert names_of(spans) == {"dispatch batch_end": EVENTS, "load": 200}
    assert Counter(span.attributes["index"] for span in spans if span.name == "load") == dict.fromkeys(range(100), 2)
