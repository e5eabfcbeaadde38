"""Which samples are whose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from eventbus_engine import ConfigurationError
from eventbus_engine.training.loader_state import set_epoch
from eventbus_engine.training.ranks import Job, sampler
from eventbus_engine.training.ranks.sampler import check_shares

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job of whoever runs the tests does not count."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def shares(size: int, world: int, *, epoch: int = 0, **arguments: Any) -> list[list[int]]:
    """What each rank gets of a data set."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(world):
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(world))
            share = sampler(range(size), **arguments)
            share.set_epoch(epoch)
            assert len(list(share)) == len(share)
            found.append(list(share))
    return found


@given(world=st.integers(1, 5), more=st.integers(0, 30))
def test_in_order_every_sample_is_on_exactly_one_rank(world: int, more: int) -> None:
    """So that an evaluation counts none twice and misses none; shares differ by one at most."""
    found = shares(world + more, world, shuffle=False)

    assert sorted(index for share in found for index in share) == list(range(world + more))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(world=st.integers(1, 5), more=st.integers(0, 30), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_shuffled_shares_are_equal_and_together_one_ranks_order(world: int, more: int, seed: int, epoch: int) -> None:
    """In turn, rank by rank, but for what does not divide."""
    found = shares(world + more, world, seed=seed, epoch=epoch)
    [whole] = shares(world + more, 1, seed=seed, epoch=epoch)

    together = [index for turn in zip(*found, strict=True) for index in turn]
    assert together == whole[: len(together)]
    assert len(whole) - len(together) < world


def test_each_epoch_has_an_order_of_its_own() -> None:
    """The same one on every rank, or samples would be seen twice."""
    assert shares(20, 2, epoch=0) != shares(20, 2, epoch=1)


@pytest.mark.parametrize("wrong", [iter(()), object()])
def test_data_without_a_length_is_refused(wrong: Any) -> None:
    """It has to be shared out by whoever makes it."""
    with pytest.raises(ConfigurationError, match="has no length to share out"):
        sampler(wrong)


def test_fewer_samples_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would have nothing to do."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    with pytest.raises(ConfigurationError, match="range has 3 samples for 4 ranks"):
        sampler(range(3))


class Own(Sampler[int]):
    """A sampler of the user's own, who knows what it does."""

    def __iter__(self) -> Iterator[int]:
        return iter([0, 1])

    def __len__(self) -> int:
        return 2


class Streamed(IterableDataset[int]):
    """Yields what it likes on each rank."""

    def __iter__(self) -> Iterator[int]:
        return iter([0])


class Data(Dataset[int]):
    """Eight samples."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 8


class Batches(Sampler[list[int]]):
    """A sampler of batches of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1]])

    def __len__(self) -> int:
        return 2


JOB = Job(1, 2, 1)
DATA = Data()


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(2)],
        DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 1)),
        DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 1), 2, drop_last=False)),
        DataLoader(DATA, batch_size=None, sampler=DistributedSampler(DATA, 2, 1)),
        DataLoader(DATA, sampler=Own()),
        DataLoader(DATA, batch_sampler=Batches()),
        DataLoader(Streamed()),
    ],
)
def test_what_gives_each_rank_its_share_is_taken(loader: Any) -> None:
    """Torch's sampler for it, whatever is the user's own, and what is no DataLoader."""
    check_shares(loader, "train_dataloader", JOB)


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(DATA), "train_dataloader is a DataLoader with a SequentialSampler, which would give all 2 ranks"),
        (DataLoader(DATA, shuffle=True), "with a RandomSampler"),
        (DataLoader(DATA, batch_size=None), "with a SequentialSampler"),
        (
            DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)),
            "has the samples of rank 0 of 2, but this is rank 1 of 2",
        ),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 4, 1)), "has the samples of rank 1 of 4"),
    ],
)
def test_what_gives_all_ranks_the_same_is_refused_with_the_sampler_to_use(loader: Any, told: str) -> None:
    """By name, and only where there are several ranks."""
    check_shares(loader, "train_dataloader", Job())
    with pytest.raises(ConfigurationError, match=told) as caught:
        check_shares(loader, "train_dataloader", JOB)

    assert "sampler=ranks.sampler(dataset)" in str(caught.value)


def test_a_sampler_hears_which_epoch_it_is() -> None:
    """Also inside a batch sampler; other loaders have none."""
    inner: DistributedSampler[int] = DistributedSampler(DATA, 2, 1)
    set_epoch(DataLoader(DATA, batch_sampler=BatchSampler(inner, 2, drop_last=False)), 3)
    set_epoch(DataLoader(DATA), 3)
    set_epoch([], 3)

    assert inner.epoch == 3
