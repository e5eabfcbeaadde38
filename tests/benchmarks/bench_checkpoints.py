"""What a save costs a training loop beyond the copy of the tensors: ours, torch.save inline, and DCP's async_save.

All train the same model on the same batches with the same Trainer; one saves nothing, and one copies the tensors to
memory that the process has already and does no more. A turn is some steps, and a save after the first of them, which
is written while the others run. Each way has one turn a round, the rounds in an order of their own each.

There are two figures. The loop waits from the end of the step to the beginning of the next; and the whole turn takes
longer, for that and for what is written beside it. Each is the median over the rounds of what it is more than in the
turn of the same round that saves nothing; beyond the copy, than in the one that copies.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from tables import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.functional import cross_entropy

from eventbus_engine import Callback
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.callbacks import CheckpointSaver

Row = tuple[str, float, str, float | None]

WIDTH, LAYERS, SAMPLES = 1024, 4, 256
"""4 M parameters: with Adam's moments 50 MB."""

STEPS, AT = 6, 1
"""Of a turn, and after which of them it saves."""

LIMIT = 5.0
"""Percent of a step, beyond the copy."""

NOTHING, COPY, OURS = "no save", "a copy of the tensors", "CheckpointSaver"


def measure(*, rounds: int = 31) -> Iterator[Row | Table]:
    """The cost of a save each way, in milliseconds and in percent of a step.

    Args:
        rounds: turns of each way.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # or what is written beside the step would compete with it for the cores
    folder = Path(tempfile.mkdtemp())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # async_save says that this is one process
            turns = anyio.run(_take_turns, folder, rounds)
    finally:
        shutil.rmtree(folder)
        torch.set_num_threads(threads)
    step = statistics.median(turn for _, turn in turns[NOTHING]) / STEPS
    rows, figures = list[list[str]](), dict[str, Any]()
    for way, taken in turns.items():
        over = {other: _over(taken, turns[other]) for other in (NOTHING, COPY)}
        (waits, longer), beyond = over[NOTHING], over[COPY]
        cells = [waits * 1e3, longer * 1e3, beyond[0] * 1e3, beyond[1] * 1e3, *(100 * part / step for part in beyond)]
        shown = {NOTHING: 0, COPY: 2}.get(way, 6)
        rows.append([way, *(f"{cell:.1f}" if at < shown else "" for at, cell in enumerate(cells))])
        figures[way] = {"waits": waits, "longer": longer, "beyond_copy": beyond, "turns": taken}
    for at, what in enumerate(("the loop waits", "a turn is longer")):
        percent = 100 * figures[OURS]["beyond_copy"][at] / step
        yield f"a save, beyond the copy: {what}", percent, "% step", LIMIT
    head = ["", "the loop waits, ms", "a turn is longer, ms", "beyond the copy: waits", "longer", "% of a step", "%"]
    yield Table(
        "checkpoints", f"What a save of 50 MB costs a loop of steps of {step * 1e3:.0f} ms", head, rows, figures
    )


def _over(mine: list[tuple[float, float]], base: list[tuple[float, float]]) -> list[float]:
    """Medians over the rounds of what was more, of each figure."""
    return [statistics.median(one[at] - other[at] for one, other in zip(mine, base, strict=True)) for at in (0, 1)]


async def _take_turns(folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Of each way, the seconds that the loop waited in each turn, and those of the turn."""
    savers = {
        NOTHING: Callback(),
        COPY: Copy(),
        OURS: CheckpointSaver(folder / "ours", f"{STEPS}ba", keep=1),
        "torch.save, inline": Inline(folder / "inline"),
        "torch.distributed.checkpoint.async_save": Async(folder / "async"),
    }
    clocks = {way: Clock() for way in savers}
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in savers}
    async with AsyncExitStack() as stack:
        trainers = {way: await stack.enter_async_context(_trainer(savers[way], clocks[way])) for way in savers}
        for trainer in trainers.values():
            await trainer.fit(f"{2 * STEPS - AT}ba")  # warm up, and end so that the saves come after step AT
        order, shuffle = list(savers), random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(order)
            for way in order:
                await trainers[way].fit(f"{STEPS}ba")
                turns[way].append(clocks[way].read())
    return turns


def _trainer(saver: Callback[State], clock: Clock) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 10
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    return Trainer(
        model,
        [batch] * 1000,
        loss=cross_entropy,
        optimizers=torch.optim.Adam(model.parameters()),
        max_duration="1ba",
        callbacks=[clock, saver],
    )


class Clock(Callback[State]):
    """When the batches of a turn began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[float] = []
        self._ended: list[float] = []

    def batch_start(self, state: State, logger: Any) -> None:
        """What was saved after the one before is over, as far as the loop waits for it."""
        self._begun.append(time.perf_counter())

    def batch_end(self, state: State, logger: Any) -> None:
        """What is saved comes next."""
        self._ended.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        """The seconds that the loop waited after step `AT` of the latest turn, and those of the turn."""
        begun, ended = self._begun[-STEPS:], self._ended[-STEPS:]
        return begun[AT] - ended[AT - 1], ended[-1] - begun[0]


class Other(Callback[State]):
    """Saves as often as the saver does, and like it is through with it when `fit` ends."""

    def batch_checkpoint(self, state: State, logger: Any) -> Awaitable[None] | None:
        """Save if it is time to."""
        return self.save(state) if int(state.timestamp.batch) % STEPS == 0 else None

    async def save(self, state: State) -> None:
        """In its way."""
        raise NotImplementedError


class Copy(Other):
    """Copies the tensors, to the same memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []

    async def save(self, state: State) -> None:
        """On the training thread."""
        await state.compute(self.copy, list(_tensors(state)))

    def copy(self, tensors: list[Tensor]) -> None:
        """All of them."""
        self.memory = self.memory or [torch.empty_like(tensor) for tensor in tensors]
        with torch.no_grad():
            for memory, tensor in zip(self.memory, tensors, strict=True):
                memory.copy_(tensor)


class Inline(Other):
    """The training waits until all is on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    async def save(self, state: State) -> None:
        """On the training thread."""
        await state.compute(torch.save, _state_dict(state), self.path)


class Async(Other):
    """DCP copies the tensors, and a thread of its own writes them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.saving: Future[Any] | None = None

    async def save(self, state: State) -> None:
        """One at a time, as it asks for."""
        await self.finish()
        shutil.rmtree(self.path, ignore_errors=True)
        self.saving = await state.compute(self.begin, _state_dict(state))

    def begin(self, state_dict: dict[str, Any]) -> Future[Any]:
        """On the training thread."""
        saving: Any = async_save(state_dict, checkpoint_id=self.path, no_dist=True)
        assert isinstance(saving, Future)
        return saving

    async def fit_end(self, state: State, logger: Any) -> None:
        """Not beside the next turn."""
        await self.finish()

    async def finish(self) -> None:
        """Wait for the thread."""
        if self.saving is not None:
            await anyio.to_thread.run_sync(self.saving.result)


def _state_dict(state: State) -> dict[str, Any]:
    return {"model": state.model.state_dict(), "optimizer": state.optimizers[0].state_dict()}


def _tensors(state: State) -> Iterator[Tensor]:
    yield from state.model.state_dict().values()
    for kept in state.optimizers[0].state.values():
        yield from (value for value in kept.values() if isinstance(value, Tensor))
