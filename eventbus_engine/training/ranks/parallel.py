"""How a model is spread over ranks: the same one on each, or cut up among them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from eventbus_engine.errors import ConfigurationError

__all__ = ["Replicas", "check_optimized", "check_same_model", "equalise", "share_buffers", "shard"]


class Replicas:
    """`DistributedDataParallel` around a model, made anew when other parameters than before are to be trained.

    DDP fixes at its construction whose gradients it averages: one that is frozen later would have it fail, and one that
    is thawed would go its own way on each rank, unnoticed.
    """

    def __init__(self) -> None:
        self._made_for: tuple[object, ...] = ()
        self._made: tuple[DistributedDataParallel, Callable[..., Any]] | None = None

    def around(
        self, model: nn.Module, unused: bool, last: bool, options: Mapping[str, Any] | None
    ) -> Callable[..., Any]:
        """What to call for the next forward pass. A collective operation where it is made anew.

        Args:
            model: the model.
            unused: whether a forward pass may leave out parameters (`find_unused_parameters`).
            last: whether gradients are averaged in this one's backward pass: it is the last of its batch.
            options: of `torch.compile`; None not to compile.
        """
        trained = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
        needed = (model, unused, trained)
        if needed != self._made_for:
            self.forget()  # the old one has hooks on the parameters
            replica = DistributedDataParallel(model, find_unused_parameters=unused)
            self._made = replica, replica if options is None else torch.compile(replica, **options)
            self._made_for = needed
        assert self._made is not None  # noqa: S101 -- made above
        replica, runner = self._made
        # What its no_sync() sets, which cannot be held open over the events between forward and backward.
        replica.require_backward_grad_sync = last
        return runner

    def forget(self) -> None:
        """Let go of it, so that its group can be taken down."""
        self._made_for, self._made = (), None


def check_same_model(model: nn.Module, gather: Callable[[int], list[int]]) -> None:
    """Refuse ranks with models of different shape, which would wait for each other's tensors forever.

    Args:
        model: this rank's.
        gather: a number of each rank's.

    Raises:
        ConfigurationError: on all ranks alike.
    """
    layout = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _named_tensors(model)])
    marks = gather(int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7]))
    others = [str(rank) for rank, mark in enumerate(marks) if mark != marks[0]]
    if others:
        raise ConfigurationError(
            f"the model of rank {', '.join(others)} has other parameters or buffers than that of rank 0; build the "
            f"same {type(model).__name__} on every rank, and have algorithms change it alike"
        )


def equalise(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, but for those that are cut up already."""
    for _, tensor in _named_tensors(model):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.detach(), 0)


def share_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, in one message for each type: running statistics are each rank's own."""
    alike: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for buffer in model.buffers():
        alike[buffer.dtype].append(buffer.detach())
    for buffers in alike.values():
        message = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(message, 0)
        parts = torch.split(message, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def check_optimized(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse to step parameters outside of the model, whose gradients nobody would average over the ranks.

    Raises:
        ConfigurationError: an optimizer has one.
    """
    known = set(model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} steps a parameter of shape {tuple(parameter.shape)} that is not "
                        f"in the model, so that each rank would train it on its own; make it part of "
                        f"{type(model).__name__}, or make the optimizer after what has replaced the parameter"
                    )


def shard(model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Cut a model up among the ranks by FSDP2 (`fully_shard`), in place, each of its children for itself.

    It has new parameters afterwards, DTensors. They take the places of the old ones in the optimizers, which would
    otherwise go on stepping what is no part of the model any more; state of the old ones is cut up likewise. A model
    that has been cut up already stays so.

    Args:
        model: the same on every rank.
        optimizers: of its parameters.
        device: of the run.
    """
    if not isinstance(model, FSDPModule):
        before = dict(model.named_parameters())
        mesh = DeviceMesh(device.type, list(range(dist.get_world_size())))
        for part in _parts(model):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        replaced = {before[name]: parameter for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            _exchange(optimizer, replaced)
    assert isinstance(model, FSDPModule)  # noqa: S101 -- made one in place
    # The model itself would else stay whole behind a forward pass, with other parameters than the optimizers have, for
    # whoever looks at it then: an algorithm, a checkpoint behind an evaluation.
    model.set_reshard_after_forward(True, recurse=False)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The children to cut up each for itself. One that shares parameters with another has to stay with the rest."""
    children = [child for child in _callable_children(model) if any(True for _ in child.parameters())]
    owners = Counter(chain.from_iterable(set(child.parameters()) for child in children))
    owners.update(model.parameters(recurse=False))
    return (child for child in children if all(owners[parameter] == 1 for parameter in child.parameters()))


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Children, and in place of a container that nobody calls (a ModuleList) what is in it."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable_children(child)
        else:
            yield child


def _exchange(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [replaced[parameter] for parameter in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            kept = optimizer.state.pop(old)
            optimizer.state[new] = {name: _like(value, old, new) for name, value in kept.items()}


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """A value of an optimizer's state, cut up as the parameter is if it has one element for each of the parameter's."""
    if isinstance(value, Tensor) and value.shape == old.shape and isinstance(new, DTensor) and old.ndim:
        return distribute_tensor(value, new.device_mesh, new.placements)
    return value


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
