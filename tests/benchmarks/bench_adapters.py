"""What an adapter adds to its peer's own loop: microseconds for each event that it publishes.

Each `adapter_<name>.py` beside this file has a `TITLE` and a function `train(job, engine)`, which trains on the batches
of the job by the peer's own loop: bare, where the engine is None, otherwise with our adapter in it. The two take turns,
in an order of their own each round. A step is timed from one request for a batch to the next, the first ones left out;
the engine has a callback that counts the batches. The figure is the median over the rounds of what the median step took
longer with the adapter, by the number of events in a step. A peer that is not installed is left out.
"""

from __future__ import annotations

import gc
import importlib
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from loops import Count, Job
from tables import Table

from eventbus_engine import Callback, Engine
from eventbus_engine.errors import ConfigurationError

Train: TypeAlias = Callable[[Job, Engine[Any] | None], None]

SAMPLES, STEPS, WARM_UP = 16, 60, 10


def measure(*, rounds: int = 31) -> Iterator[tuple[str, float, str, float | None] | Table]:
    """A row for each adapter whose peer is installed, and the table of them.

    Args:
        rounds: turns of each loop.
    """
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for title, train in adapters():
            events = events_in_a_step(train)
            added = statistics.median(added_seconds(train, rounds)) * 1e6
            yield f"{title}: added to a step of {events} events", added, "us", None
            yield f"{title}: added for an event", added / events, "us", None
            rows.append([title, str(events), f"{added:.0f}", f"{added / events:.1f}"])
            figures[title] = {"events": events, "added_us": added}
    finally:
        torch.set_num_threads(threads)
    head = ["", "events in a step", "added to a step, µs", "for an event, µs"]
    yield Table("adapters", "What an adapter adds to its peer's own loop", head, rows, figures)


def adapters() -> Iterator[tuple[str, Train]]:
    """The titles and the functions of those that can be had."""
    for path in sorted(Path(__file__).parent.glob("adapter_*.py")):
        try:
            module = importlib.import_module(path.stem)
        except (ImportError, ConfigurationError):
            continue
        yield module.TITLE, module.train


def events_in_a_step(train: Train) -> int:
    """How many events an engine gets for a batch in the middle of an epoch."""

    class Counter(Callback[Any]):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            self.seen.append(int(state.timestamp.batch))

    counter = Counter()
    train(Job(SAMPLES, 6, loaded=False), Engine(callbacks=[counter]))
    return counter.seen.count(3)


def added_seconds(train: Train, rounds: int) -> list[float]:
    """What the median step of each round took longer."""
    shuffle = random.Random(0).shuffle
    ways = [False, True]
    added: list[float] = []
    for _ in range(rounds):
        shuffle(ways)
        seconds = {with_engine: step_seconds(train, with_engine) for with_engine in ways}
        added.append(seconds[True] - seconds[False])
    return added


def step_seconds(train: Train, with_engine: bool) -> float:
    """The median step of one turn, by the clock."""
    gc.collect()
    job = Job(SAMPLES, STEPS + WARM_UP, loaded=False)
    train(job, Engine(callbacks=[Count()]) if with_engine else None)
    return job.seconds(WARM_UP)[0]
