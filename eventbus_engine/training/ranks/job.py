"""The job that this process is a rank of, and what goes wrong between ranks.

torchrun starts the ranks, tells each its number by environment variables, and ends them all when one has failed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from eventbus_engine.errors import ConfigurationError, RankError

__all__ = ["Job", "find_job", "leave_group", "make_group", "naming_rank"]

_made = itertools.count()  # groups in this process

_VARIABLES = ("RANK", "WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """This process among those that train together.

    Attributes:
        rank: its number, from 0.
        world_size: how many there are.
        local_rank: its number among those of its machine, and the index of its CUDA device.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def find_job() -> Job | None:
    """The job of the process group that there is, or else of the environment; None where there is neither.

    Raises:
        ConfigurationError: the environment says something that is no job.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        return Job(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)))
    if not all(name in os.environ for name in _VARIABLES):
        return None
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not rank < size:
        raise ConfigurationError(f"RANK={rank} is not below WORLD_SIZE={size}; start the program with torchrun")
    return Job(rank, size, _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank)


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(
            f"the environment has {name}={text!r}, which is no number of a rank; start the program with torchrun, "
            f"which sets it, or unset it to train on one rank"
        )
    return int(text)


def make_group(job: Job, device: torch.device) -> bool:
    """Join the job's process group, unless there is one already; whether it was made here.

    On CUDA it has gloo beside nccl, for what the ranks tell each other about a batch: numbers that are on the CPU.

    Raises:
        ConfigurationError: the environment does not say where the ranks meet.
    """
    if dist.is_initialized():
        return False
    missing = [name for name in _ADDRESS if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"{job} finds no {' and no '.join(missing)} in its environment, where the ranks are to meet; start the "
            f"program with torchrun, or make the process group yourself"
        )
    # Each group under keys of its own: where the ranks meet, the addresses of the one before are still written down.
    store, _, _ = next(rendezvous("env://", job.rank, job.world_size))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"eventbus_engine/{next(_made)}", store),
        rank=job.rank,
        world_size=job.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    return True


def leave_group() -> None:
    """Take down the process group that `make_group` has made."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def naming_rank(job: Job) -> Iterator[None]:
    """Have a failure say whose it is: one of the connection by a `RankError`, any other in torchrun's report.

    Raises:
        RankError: the others could not be reached any more.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RankError):
            raise
        if _lost_others(error):
            raise RankError(
                f"{job} has lost the others: a collective failed ({_first_line(error)}); that is what another rank's "
                f"end looks like from here, and why it ended is under 'Root Cause' in torchrun's report",
                rank=job.rank,
                world_size=job.world_size,
            ) from error
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().record_exception(error)
        error.add_note(f"on {job}")
        raise


def _lost_others(error: BaseException | None) -> bool:
    """Whether it comes from a collective. gloo's errors have no class of their own, but say where they are from."""
    while error is not None:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error)):
            return True
        error = error.__cause__
    return False


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0]
