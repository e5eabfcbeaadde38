"""Which samples of a data set are whose."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import sampler as torch_samplers

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.ranks.job import Job, find_job

__all__ = ["EachOnce", "check_shares", "sampler"]


class EachOnce(DistributedSampler[Any]):
    """Every sample on exactly one rank, in the order of the data set; shares differ by one sample at most."""

    def __iter__(self) -> Iterator[Any]:
        """This rank's: every `num_replicas`-th, from its own."""
        return iter(range(self.rank, _size(self.dataset), self.num_replicas))

    def __len__(self) -> int:
        """How many those are."""
        return len(range(self.rank, _size(self.dataset), self.num_replicas))


def sampler(dataset: Any, *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
    """This rank's share of a data set, as the `sampler=` of a DataLoader; without a job, all of it.

    Shuffled, for training, the shares are of equal size: what does not divide is left out of an epoch, and is in
    others, as each epoch has an order of its own. Batches of all ranks together are those that one rank would have with
    as many times the batch size. In the order of the data set, for evaluation, every sample is on exactly one rank.

    Args:
        dataset: has a length.
        shuffle: for training. Default True.
        seed: of the order, the same on all ranks. Default 0.

    Raises:
        ConfigurationError: the data set has no length, or fewer samples than there are ranks.
    """
    job = find_job() or Job()
    if not isinstance(dataset, Sized):
        raise ConfigurationError(
            f"{type(dataset).__name__} has no length to share out; have it yield this rank's samples only, by "
            f"find_job() and torch.utils.data.get_worker_info(), and leave sampler= out"
        )
    if len(dataset) < job.world_size:
        raise ConfigurationError(
            f"{type(dataset).__name__} has {len(dataset)} samples for {job.world_size} ranks, and each needs one; "
            f"start fewer ranks"
        )
    data: Any = dataset
    if shuffle:
        return DistributedSampler(data, job.world_size, job.rank, shuffle=True, seed=seed, drop_last=True)
    return EachOnce(data, job.world_size, job.rank, shuffle=False, seed=seed)


def check_shares(loader: Any, name: str, job: Job) -> None:
    """Refuse a DataLoader that gives every rank the same samples. Of another iterable only its owner knows.

    Raises:
        ConfigurationError: it has no distributed sampler, or one of another job.
    """
    if job.world_size == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    found = _sampler_of(loader)
    if isinstance(found, DistributedSampler):
        if (found.rank, found.num_replicas) != (job.rank, job.world_size):
            raise ConfigurationError(
                f"{name} has the samples of rank {found.rank} of {found.num_replicas}, but this is {job}; give its "
                f"DataLoader sampler=ranks.sampler(dataset)"
            )
    elif type(found).__module__ == torch_samplers.__name__:
        raise ConfigurationError(
            f"{name} is a DataLoader with a {type(found).__name__}, which would give all {job.world_size} ranks the "
            f"same samples; give it sampler=ranks.sampler(dataset), with shuffle=False to evaluate, instead of shuffle="
        )


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """The one that says which samples; a batch sampler of the user's own may do so itself."""
    batches = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)


def _size(dataset: Any) -> int:
    return len(dataset)
