"""What a training step costs on top of its computation: a loop by hand, our Trainer and other people's, in turns.

All train the same small model on the same batches, of so many samples that a step by hand takes about 1, 5 and 20 ms.
A turn is one `fit` of a few steps; each way has one turn a round, the rounds in an order of their own each. A step is
timed from one request for a batch to the next, whoever makes it; the first ones of a turn are left out. An overhead is
the median over the rounds, with the quartiles, of what a way's median step took longer than the one by hand of the same
round: by the clock, and of the processor's time, of all threads together, which a machine that is busy with something
else does not disturb.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from loops import BY_HAND, WAYS, Job
from tables import Table

Row = tuple[str, float, str, float | None]

SIZES = (1.0, 5.0, 20.0)
"""Milliseconds."""

TURN = 0.15
"""Seconds, of steps by hand."""

WARM_UP, FEWEST, MOST = 4, 12, 60
"""Steps of a turn: those left out, and how many there are at least and at most."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""

LOADS = {"training": True, "training-bare": False}
TITLES = {
    "training": "A training step with 5 algorithms and 5 callbacks",
    "training-bare": "A training step with neither",
}


def measure(*, rounds: int = 31, step_ms: Sequence[float] = ()) -> Iterator[Row | Table]:
    """The time of a step and what it is longer than by hand, each way, for each size; with and without participants.

    Args:
        rounds: turns of each way.
        step_ms: the sizes, in milliseconds; `SIZES` by default.
    """
    threads = torch.get_num_threads()
    _keep_memory()
    torch.set_num_threads(1)  # or the event loop and the peers' helpers would compete with the step for the cores
    try:
        for name, loaded in LOADS.items():
            table, overheads = _compare(name, loaded, rounds, step_ms or SIZES)
            yield table
            for way, by_size in overheads.items():
                for size, overhead in by_size.items():
                    yield f"{way}, {'5 + 5' if loaded else 'bare'}, {size:g} ms: over by hand", overhead, "us", None
    finally:
        torch.set_num_threads(threads)


def _compare(
    name: str, loaded: bool, rounds: int, sizes: Sequence[float]
) -> tuple[Table, dict[str, dict[float, float]]]:
    """One table, and the overheads of what is ours in microseconds."""
    rows: dict[str, list[str]] = {way: [way] for way in WAYS}
    figures: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    ours: dict[str, dict[float, float]] = {}
    head = [""]
    for size in sizes:
        head += [f"{size:g} ms: step, ms", "over by hand, µs", "%", "CPU over by hand, µs"]
        samples = samples_for(size / 1000, loaded)
        turns, missing = take_turns(samples, size, loaded, rounds)
        hand = statistics.median(clock for clock, _ in turns[BY_HAND])
        for way in WAYS:
            if way in missing:
                rows[way] += [missing[way].partition(":")[0], "", "", ""]
                figures[way][f"{size:g} ms"] = {"missing": missing[way]}
                continue
            step = statistics.median(clock for clock, _ in turns[way])
            (low, over, high), (_, processor, _) = (
                _quartiles([mine[i] - base[i] for mine, base in zip(turns[way], turns[BY_HAND], strict=True)])
                for i in (0, 1)
            )
            rows[way].append(f"{step * 1e3:.3f}")
            cells = [f"{over * 1e6:.0f} ({low * 1e6:.0f} to {high * 1e6:.0f})", f"{100 * over / hand:.1f}"]
            rows[way] += ["", "", ""] if way == BY_HAND else [*cells, f"{processor * 1e6:.0f}"]
            figures[way][f"{size:g} ms"] = {"median": step, "overhead": over, "cpu": processor, "turns": turns[way]}
            if way.startswith("eventbus-engine"):
                ours.setdefault(way, {})[size] = over * 1e6
    return Table(name, TITLES[name], head, list(rows.values()), figures), ours


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def _keep_memory() -> None:
    """Have the C library keep what is freed.

    By default it gives large blocks back to the system, more of them in one turn and fewer in the next, and a step then
    takes up to some milliseconds more for the pages it gets anew; that is chance, and hits each way.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def samples_for(seconds: float, loaded: bool) -> int:
    """How many samples make a step of this length by hand on this machine."""
    samples = 16
    for _ in range(6):
        _, took = _turn(BY_HAND, samples, FEWEST, loaded)
        if abs(took - seconds) < 0.1 * seconds:
            break
        samples = max(1, min(int(samples * seconds / took), 8 * samples))
    return samples


def take_turns(
    samples: int, size: float, loaded: bool, rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, str]]:
    """The median step of each turn of each way, in seconds by the clock and of the processor; and what is missing."""
    steps = max(FEWEST, min(MOST, int(TURN * 1000 / size)))
    missing: dict[str, str] = {}
    for way, (_, foreign) in WAYS.items():
        try:
            _turn(way, samples, FEWEST, loaded)
        except Exception as error:
            if not foreign:
                raise
            missing[way] = "not installed" if isinstance(error, ImportError) else f"does not run: {error!r}"
    live = [way for way in WAYS if way not in missing]
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in live}
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(live)
        for way in live:
            turns[way].append(_turn(way, samples, steps, loaded))
    return turns, missing


def _turn(way: str, samples: int, steps: int, loaded: bool) -> tuple[float, float]:
    """The seconds of the median step, the first ones left out, by the clock and of the processor."""
    gc.collect()
    job = Job(samples, steps + WARM_UP, loaded)
    WAYS[way][0](job)
    return job.seconds(WARM_UP - 1)
