"""`Ranks`: what a run does together with those of the other ranks; alone, each of it is nothing.

What is a collective is called by the training thread only, and at the same points of the run on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from eventbus_engine._options import read_option
from eventbus_engine.errors import BatchError, CheckpointError, ConfigurationError
from eventbus_engine.logger import is_destination
from eventbus_engine.training.generators import seed_generators
from eventbus_engine.training.ranks.job import Job, find_job, leave_group, make_group, naming_rank
from eventbus_engine.training.ranks.parallel import (
    Replicas,
    check_optimized,
    check_same_model,
    equalise,
    shard,
    share_buffers,
)

__all__ = ["Agreement", "Parallelism", "Ranks"]

Parallelism: TypeAlias = Literal["ddp", "fsdp"]
"""`ddp`: every rank has the whole model, and gradients are averaged. `fsdp`: every rank has a part of the model."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know about the batch that each has just fetched.

    Attributes:
        over: one of them is to train no more.
        exhausted: one of them has no batch.
        samples: in the batches of all.
        tokens: in the batches of all.
        share: this rank's part of the samples, times the number of ranks: the weight of its mean loss, and of its
            gradient, in a mean over ranks. 1.0 where all have as many.
    """

    over: bool
    exhausted: bool
    samples: int
    tokens: int
    share: float = 1.0

    @property
    def ends(self) -> bool:
        """Whether there is nothing to train on now."""
        return self.over or self.exhausted


class Ranks:
    """This process among the ranks of its job.

    Args:
        parallelism: how to train together; None for `"ddp"` where the job has more than one rank.

    Attributes:
        job: which rank this is.
        parallelism: None where the run has nothing to do with others.
        joined: whether it has met them.

    Raises:
        ConfigurationError: there is no job, or the parallelism is none.
    """

    def __init__(self, parallelism: Any = None) -> None:
        if parallelism not in (None, *get_args(Parallelism)):
            raise ConfigurationError(f"parallelism={parallelism!r}; give 'ddp' or 'fsdp', or leave it out")
        job = find_job()
        if job is None and parallelism is not None:
            raise ConfigurationError(
                f"parallelism={parallelism!r}, but this process is no rank of a job; start the program with "
                f"`torchrun --nproc-per-node=N program.py`, or leave parallelism= out to train on one rank"
            )
        self.job: Job = job or Job()
        self.parallelism: Parallelism | None = parallelism or ("ddp" if self.job.world_size > 1 else None)
        self._replicas = Replicas()
        self.joined: bool = False
        self._made = False
        self._device = self._small = torch.device("cpu")

    @property
    def together(self) -> bool:
        """Whether there is anything to do with others."""
        return self.parallelism is not None

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all."""
        return self.job.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """The device of this rank: of several alike in a machine, its own."""
        if self.together and device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.job.local_rank)
        return device

    def speaking(self, callbacks: Iterable[Any]) -> list[Any]:
        """Those that take part here: destinations on rank 0 only, unless they have `every_rank = True`."""
        return [
            callback
            for callback in callbacks
            if self.leads or not is_destination(callback) or read_option(callback, "every_rank", False) is True
        ]

    def check_algorithms(self, algorithms: Iterable[Any]) -> None:
        """Refuse those that differentiate gradients.

        Raises:
            ConfigurationError: there is one.
        """
        for item in algorithms if self.together else ():
            if read_option(item, "backwards_create_graph", False) is True:
                raise ConfigurationError(
                    f"{type(item).__name__} differentiates the gradients, which torch averages over ranks only as "
                    f"they are, without a graph: each rank would train by a penalty of its own; train on one rank, or "
                    f"leave it out"
                )

    def failures(self) -> AbstractContextManager[None]:
        """Have what fails inside name this rank."""
        return naming_rank(self.job)

    # ------------------------------------------------------------------------------- collectives, when a run begins

    def join(self, device: torch.device) -> None:
        """Meet the others, in a process group that is made if there is none."""
        if self.joined:
            return
        self._made = make_group(self.job, device)
        self.joined, self._device = True, device
        # What the ranks tell each other are numbers of the CPU, so that no device is waited for, if there is a way.
        self._small = torch.device("cpu") if "cpu:gloo" in dist.get_backend_config() else device

    def leave(self) -> None:
        """Take the process group down, if it was made here."""
        self._replicas.forget()
        if self._made:
            leave_group()
        self.joined = self._made = False

    def set_up(self, model: nn.Module, optimizers: Sequence[Optimizer], seed: int | None) -> None:
        """The same model on all, cut up if it is to be; and, from the seed, random numbers of each rank's own."""
        check_optimized(model, optimizers)
        check_same_model(model, self.gather)
        equalise(model)
        if self.parallelism == "fsdp":
            shard(model, optimizers, self._device)
        if seed is not None and self.job.rank > 0:
            # What a rank draws for its own samples must not be what the others draw for theirs.
            seed_generators((seed + self.job.rank) % 2**32)

    def hand_down(self, message: Mapping[str, str] | None = None) -> dict[str, str]:
        """The message of rank 0, on every rank."""
        text = json.dumps(dict(message or {})).encode()
        size = torch.tensor([len(text)], device=self._small)
        dist.broadcast(size, 0)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.leads:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        data = data.to(self._small)
        dist.broadcast(data, 0)
        heard: dict[str, str] = json.loads(bytes(data.tolist()))
        return heard

    def check_lengths(self, length: int | None) -> None:
        """Refuse epochs of different lengths: by them learning rates move, and so would the ranks' models, apart.

        Args:
            length: batches in an epoch of this rank's; None where that is not known.

        Raises:
            ConfigurationError: on all ranks alike.
        """
        lengths = self.gather(-1 if length is None else length)
        if len(set(lengths)) > 1:
            told = ", ".join("unknown" if batches < 0 else str(batches) for batches in lengths)
            raise ConfigurationError(
                f"the train_dataloaders of ranks 0 to {self.job.world_size - 1} have epochs of {told} batches; give "
                f"each as many, as sampler=ranks.sampler(dataset) does"
            )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Have a checkpoint that one rank cannot load refused on all, where the others would go on without it.

        Raises:
            CheckpointError: naming the ranks that say why, on those that have nothing to say themselves.
        """
        failure = None
        try:
            yield
        except CheckpointError as error:
            failure = error
        failed = self.gather(failure is not None) if self.together else []
        if failure is not None:
            raise failure
        if any(failed):
            told = ", ".join(str(rank) for rank, failure in enumerate(failed) if failure)
            raise CheckpointError(
                f"rank {told} cannot load the checkpoint, and says why; have all ranks see the same, whole one"
            )

    # ---------------------------------------------------------------------------------- collectives, batch by batch

    def agree(self, *, over: bool = False, exhausted: bool = False, samples: int = 0, tokens: int = 0) -> Agreement:
        """Tell the others about this rank's batch, and hear about theirs."""
        if not self.together:
            return Agreement(over, exhausted, samples, tokens)
        told = torch.tensor([over, exhausted, samples, tokens], dtype=torch.int64, device=self._small)
        dist.all_reduce(told)
        overs, exhausteds, all_samples, all_tokens = told.tolist()
        share = samples * self.job.world_size / all_samples if all_samples else 1.0
        return Agreement(overs > 0, exhausteds > 0, all_samples, all_tokens, share)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sum([float(flag)])[0] > 0

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean over ranks of each."""
        return [value / self.job.world_size for value in self.sum(values)]

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each."""
        told = torch.tensor(values, dtype=torch.float64, device=self._small)
        dist.all_reduce(told)
        summed: list[float] = told.tolist()
        return summed

    def gather(self, value: int) -> list[int]:
        """The value of each rank."""
        told = torch.zeros(self.job.world_size, dtype=torch.int64, device=self._small)
        told[self.job.rank] = value
        dist.all_reduce(told)
        values: list[int] = told.tolist()
        return values

    def check_parts(self, parts: int) -> None:
        """Refuse batches cut into fewer parts on one rank than on another, where a forward pass is one of all.

        Raises:
            BatchError: on all ranks alike.
        """
        counts = self.gather(parts)
        if len(set(counts)) > 1:
            raise BatchError(
                f"the batches of the ranks are cut into {', '.join(map(str, counts))} microbatches, and with "
                f"parallelism='fsdp' they pass through the model together; give batches of equal size "
                f"(drop_last=True), or microbatches=1"
            )

    def prepare(
        self,
        model: nn.Module,
        algorithms: Sequence[Any],
        options: Mapping[str, Any] | None,
        *,
        last: bool,
    ) -> Callable[..., Any] | None:
        """Make ready for a forward pass of training, with the gradients of the batch averaged in the last one's.

        Args:
            model: the model.
            algorithms: that say whether they leave parameters unused.
            options: of `torch.compile`; None not to compile.
            last: whether this microbatch is the last.

        Returns:
            What to call instead of the model; None for nothing else.
        """
        self.check_algorithms(algorithms)
        if self.parallelism == "ddp":
            unused = any(read_option(item, "find_unused_parameters", False) is True for item in algorithms)
            return self._replicas.around(model, unused, last, options)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        return None

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, so that all evaluate the same model."""
        with torch.no_grad():
            share_buffers(model)

    @property
    def in_step(self) -> bool:
        """Whether a forward pass is one only if all ranks make it."""
        return self.parallelism == "fsdp"
