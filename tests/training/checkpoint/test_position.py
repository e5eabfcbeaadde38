"""Where in its data a run was, with loaders of all kinds, and what happens when they are no longer the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from eventbus_engine.callback import Callback
from eventbus_engine.errors import CallbackErrors, CheckpointError
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.checkpoint import take_snapshot, write_snapshot
from eventbus_engine.training.checkpoint.contents import collect
from eventbus_engine.training.position import EXHAUSTED, Position, Way

# Of torch about Python's fork, of torchdata about torch, and of both about streams that have no length.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:Length of IterableDataset"),
]

CPU = torch.device("cpu")
BATCHES, SIZE = 3, 4


class KilledError(Exception):
    """What ends a run in the middle."""


class Losses(Callback[State]):
    """Notes every loss; at one event after one batch it keeps a checkpoint, and ends the run."""

    def __init__(self, event: Event | None = None, batch: int = 0, path: Path = Path()) -> None:
        super().__init__()
        self.event, self.batch, self.path = event, batch, path
        self.values: list[float] = []

    async def run_event(self, event: Any, state: State, logger: Any) -> None:
        """On every event."""
        if event == Event.BATCH_END:
            assert state.loss is not None
            self.values.append(state.loss.item())
        if event == self.event and state.timestamp.batch == self.batch:
            write_snapshot(await state.compute(lambda: take_snapshot(collect(state, state._source))), self.path)
            raise KilledError


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Sample `n` holds `n` and noise from torch's global generator, which is a worker's own in a worker."""

    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return BATCHES * SIZE - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return index / 10 + self.noise * torch.rand(4), torch.tensor(index % 3)


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """Draws its order when it is iterated."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = Numbers()
        yield from (numbers[index] for index in torch.randperm(len(numbers)).tolist())


class Shuffled:
    """An async loader with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(9)

    def __len__(self) -> int:
        return BATCHES

    async def __aiter__(self) -> AsyncIterator[tuple[Tensor, Tensor]]:
        for _ in range(BATCHES):
            yield torch.randn(SIZE, 4, generator=self.generator), torch.arange(SIZE) % 3


def seeded() -> torch.Generator:
    """A generator to give to a loader."""
    return torch.Generator().manual_seed(9)


def distributed() -> DataLoader[Any]:
    """Shuffles by the number of the epoch."""
    data = Numbers()
    return DataLoader(data, batch_size=SIZE, sampler=DistributedSampler(data, num_replicas=1, rank=0))


def batch_list() -> list[tuple[Tensor, Tensor]]:
    """Batches that are there."""
    return [(torch.full((SIZE, 4), float(n)), torch.arange(SIZE) % 3) for n in range(BATCHES)]


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Numbers(), batch_size=SIZE, shuffle=True),
    "own generator": lambda: DataLoader(Numbers(), batch_size=SIZE, shuffle=True, generator=seeded()),
    "workers": lambda: DataLoader(Numbers(), batch_size=SIZE, shuffle=True, num_workers=1),
    "workers that stay": lambda: DataLoader(
        Numbers(0.0), batch_size=SIZE, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Streamed(), batch_size=SIZE),
    "distributed": distributed,
    "torchdata": lambda: StatefulDataLoader(Numbers(0.0), batch_size=SIZE, shuffle=True),
    "torchdata, own generator": lambda: StatefulDataLoader(
        Numbers(0.0), batch_size=SIZE, shuffle=True, generator=seeded()
    ),
    "torchdata, workers": lambda: StatefulDataLoader(Numbers(0.0), batch_size=SIZE, shuffle=True, num_workers=1),
    "torchdata, stream": lambda: StatefulDataLoader(Streamed(), batch_size=SIZE),
    "async": Shuffled,
    "async, on trio": Shuffled,
    "list": batch_list,
}


def make_trainer(loader: Any, *callbacks: Any, **options: Any) -> Trainer:
    """A trainer of a model with dropout, to which every number drawn too many or too few makes a difference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    defaults: dict[str, Any] = {"max_duration": "3ep", "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
    return Trainer(model, loader, loss=functional.cross_entropy, callbacks=callbacks, **defaults | options)


def run(kind: str, *callbacks: Any, **options: Any) -> None:
    """Train to the end. What a loader draws does not depend on the event loop, so most run on one."""
    loader = LOADERS[kind]()
    try:
        anyio.run(make_trainer(loader, *callbacks, **options).fit, backend="trio" if "trio" in kind else "asyncio")
    finally:
        if getattr(loader, "persistent_workers", False):
            loader._iterator = None  # left to the garbage collector, torch waits for workers that it has not told


def losses_of(kind: str, **options: Any) -> list[float]:
    """Of all of a run, or of what is left of it."""
    losses = Losses()
    run(kind, losses, **options)
    return losses.values


CUTS = [
    (Event.EPOCH_START, 0),
    (Event.BATCH_CHECKPOINT, BATCHES + 1),
    (Event.BATCH_CHECKPOINT, 2 * BATCHES),
    (Event.EPOCH_CHECKPOINT, BATCHES),
]
# Processes take their time to start: with them, most are left to the long runs.
QUICK = {("workers", CUTS[1]), ("workers that stay", CUTS[3]), ("torchdata, workers", CUTS[1])}
CASES = [
    pytest.param(kind, *cut, marks=[] if "workers" not in kind or (kind, cut) in QUICK else [pytest.mark.soak])
    for kind in LOADERS
    for cut in CUTS
]


@pytest.mark.parametrize(("kind", "event", "batch"), CASES)
def test_a_resumed_run_sees_the_batches_that_were_left(kind: str, event: Event, batch: int, tmp_path: Path) -> None:
    """Inside an epoch, at its end before and after it is counted, and before the first batch."""
    torch.manual_seed(1)
    whole = losses_of(kind)
    torch.manual_seed(1)
    first = Losses(event, batch, tmp_path / "cut")
    with pytest.raises(CallbackErrors):
        run(kind, first)
    torch.manual_seed(2)
    rest = losses_of(kind, load_path=tmp_path / "cut")

    assert (first.values, rest) == (whole[:batch], whole[batch:])


@pytest.mark.parametrize("kind", ["shuffled", "torchdata", "workers that stay", "async"])
def test_a_run_may_be_cut_again_before_and_after_its_first_batch(kind: str, tmp_path: Path) -> None:
    """A checkpoint of a run that has just resumed is as good as the one that it resumed from."""
    torch.manual_seed(1)
    whole = losses_of(kind)
    torch.manual_seed(1)
    path = None
    for event, batch in [(Event.BATCH_CHECKPOINT, 4), (Event.FIT_START, 4), (Event.BATCH_CHECKPOINT, 5)]:
        cut = tmp_path / f"{event}-{batch}"
        with pytest.raises(CallbackErrors):
            run(kind, Losses(event, batch, cut), load_path=path)
        path = cut
        torch.manual_seed(batch)

    assert losses_of(kind, load_path=path) == whole[5:]


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "torchdata", "async"])
def test_a_run_that_ended_with_an_epoch_may_go_on(kind: str, tmp_path: Path) -> None:
    """As if it had been meant to from the beginning."""
    torch.manual_seed(1)
    whole = losses_of(kind)
    torch.manual_seed(1)
    with pytest.raises(CallbackErrors):
        run(kind, Losses(Event.FIT_END, BATCHES, tmp_path / "end"), max_duration="1ep")

    assert losses_of(kind, load_path=tmp_path / "end") == whole[BATCHES:]


@pytest.mark.anyio
async def test_batches_of_another_size_go_on_after_the_samples_that_were_trained_on(tmp_path: Path) -> None:
    """Two batches of four are behind, which is four of two."""
    seen: list[Tensor] = []

    class Seen(Callback[State]):
        def batch_start(self, state: State, logger: Any) -> None:
            seen.append(state.batch[0][:, 0])

    loader = DataLoader(Numbers(0.0), batch_size=4)
    with pytest.raises(CallbackErrors):
        await make_trainer(loader, Losses(Event.BATCH_CHECKPOINT, 2, tmp_path / "cut")).fit()
    await make_trainer(DataLoader(Numbers(0.0), batch_size=2), Seen(), load_path=tmp_path / "cut").fit("1ep")

    assert torch.cat(seen[:2]).mul(10).round().tolist() == [8.0, 9.0, 10.0]


@pytest.mark.anyio
async def test_data_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    """What was trained on is not there any more."""
    with pytest.raises(CallbackErrors):
        await make_trainer(batch_list(), Losses(Event.BATCH_CHECKPOINT, 2, tmp_path / "cut")).fit()

    with pytest.raises(CheckpointError, match="ended after 1 batches of an epoch in which the checkpoint is at 2"):
        await make_trainer(batch_list()[:1], load_path=tmp_path / "cut").fit()


@pytest.mark.anyio
async def test_an_async_loader_that_has_become_shorter_is_let_go(tmp_path: Path) -> None:
    """It is refused as any other, and closed."""
    closed: list[bool] = []

    class Short(Shuffled):
        async def __aiter__(self) -> AsyncIterator[tuple[Tensor, Tensor]]:
            try:
                for batch in itertools.islice(batch_list(), 1):
                    yield batch
            finally:
                closed.append(True)

    with pytest.raises(CallbackErrors):
        await make_trainer(Shuffled(), Losses(Event.BATCH_CHECKPOINT, 2, tmp_path / "cut")).fit()
    with pytest.raises(CheckpointError, match="ended after 1 batches"):
        await make_trainer(Short(), load_path=tmp_path / "cut").fit()

    assert closed == [True]


@pytest.mark.anyio
async def test_the_skip_leaves_the_generators_as_they_are(tmp_path: Path) -> None:
    """What the data sets draw on the way, they have drawn before."""
    drawn: list[float] = []

    class Draw(Callback[State]):
        async def run_event(self, event: Any, state: State, logger: Any) -> None:
            if event in (Event.FIT_START, Event.AFTER_DATALOADER):
                drawn.append(random.random())

    random.seed(5)
    with pytest.raises(CallbackErrors):
        await make_trainer(batch_list(), Losses(Event.BATCH_CHECKPOINT, 2, tmp_path / "cut")).fit()
    expected = [random.random(), random.random()]
    await make_trainer(batch_list(), Draw(), load_path=tmp_path / "cut").fit("1ba")

    assert drawn == expected


# --------------------------------------------------------------------------------------------------- other ranks


def go_through(position: Position, loader: Any) -> list[Any]:
    """What is left of the epoch, as a source has it."""
    way = position.begin(CPU)
    if way is None:
        return list(loader)
    with position.returning(CPU) as itself:
        iterator = iter(loader)
        while not (itself or way.over):
            way.pass_by(next(iterator, EXHAUSTED))
    return list(iterator)


@pytest.mark.parametrize(("samples", "left"), [(0, 3), (8, 2), (12, 1), (16, 1), (24, 0), (99, 0)])
def test_with_another_number_of_ranks_samples_are_counted(samples: int, left: int) -> None:
    """Of all ranks: with two, a batch of four stands for eight; one that some of them have begun is passed by."""
    loader: DataLoader[Any] = DataLoader(range(12), batch_size=4)  # type: ignore[arg-type]
    position = Position(loader)
    position.load_state_dict(Position(loader).state_dict(), samples, ranks=2, others=True)
    expected = list(loader)[3 - left :] if samples else list(loader)

    assert [batch.tolist() for batch in go_through(position, loader)] == [batch.tolist() for batch in expected]


def test_a_rank_that_there_was_not_goes_by_samples_and_its_own_numbers() -> None:
    """It has no generators to take over."""
    loader: DataLoader[Any] = DataLoader(range(12), batch_size=4)  # type: ignore[arg-type]
    position = Position(loader)
    position.load_state_dict(None, 16, ranks=2, others=True)
    torch.manual_seed(3)
    rest = go_through(position, loader)
    drawn = torch.rand(())
    torch.manual_seed(3)

    assert ([batch.tolist() for batch in rest], drawn) == ([[8, 9, 10, 11]], torch.rand(()))


def test_a_position_not_yet_taken_up_can_be_saved() -> None:
    """By samples, it stays one by samples."""
    position = Position(batch_list())
    position.load_state_dict(None, 16, ranks=2, others=True)

    assert position.state_dict()["batches"] is None


def test_a_way_is_over_when_the_samples_are_behind() -> None:
    """Or when there are no more batches; a count of batches has to be met."""
    by_samples, by_batches = Way(None, 5, 1), Way(2, 0, 1)
    by_samples.pass_by(torch.zeros(4))
    assert not by_samples.over
    by_samples.pass_by(EXHAUSTED)
    assert (by_samples.over, by_samples.passed, by_batches.over) == (True, 1, False)
    with pytest.raises(CheckpointError, match="load_weights_only=True"):
        by_batches.pass_by(EXHAUSTED)


@pytest.mark.parametrize(
    "damage",
    [
        {"batches": -1},
        {"batches": "2"},
        {"own": {"": torch.zeros(3)}},
        {"start": {"global": {}, "own": {}, "warm": False}},
        {"start": {"global": {"python": (3, torch.zeros(2), None), "torch": torch.zeros(2)}, "own": {}}},
    ],
)
def test_what_is_no_position_is_refused(damage: dict[str, Any]) -> None:
    """Before anything goes there."""
    position = Position(DataLoader(Numbers(), generator=seeded()))
    with pytest.raises((ValueError, TypeError, LookupError, RuntimeError)):
        position.check(position.state_dict() | damage)


def test_a_generator_that_is_handed_on_is_kept_once() -> None:
    """A DataLoader gives its own to its sampler."""
    saved = Position(DataLoader(Numbers(), shuffle=True, generator=seeded())).state_dict()

    assert list(saved["own"]) == [""]
