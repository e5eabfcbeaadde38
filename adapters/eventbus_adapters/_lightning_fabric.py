"""A loop that is written by hand with Lightning's `Fabric`: `torch_loop`, which knows `fabric.backward` as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from eventbus_adapters._torch_loops import TorchLoop, blocking
from eventbus_adapters.torch_loop import Instrumentation, instrument
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError

__all__ = ["FabricInstrumentation", "instrument_fabric"]


class FabricInstrumentation:
    """What `instrument_fabric` returns: the context manager of one run of the loop."""

    def __init__(self, fabric: Any, loop: Instrumentation) -> None:
        self._fabric = fabric
        self._instrumentation = loop

    def __enter__(self) -> TorchLoop:
        if "backward" in vars(self._fabric):
            raise ConfigurationError(
                "a loop is used twice: its fabric is in one already; leave that one before you enter the next"
            )
        loop = self._instrumentation.__enter__()
        original = self._fabric.backward

        @functools.wraps(original)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            blocking(loop._backward(tensor, args, kwargs, original))

        self._fabric.backward = backward
        return loop

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        del self._fabric.backward
        self._instrumentation.__exit__(kind, error, tb)


def instrument_fabric(
    engine: Engine[Any],
    fabric: Any,
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    dataloader: Iterable[Any],
    loss: Callable[..., Any] | None = None,
    **options: Any,
) -> FabricInstrumentation:
    """Publish the events of a training loop that somebody has written with Fabric.

    Example:
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> loader = fabric.setup_dataloaders(loader)
        >>> with instrument_fabric(engine, fabric, model, optimizer, loader, F.cross_entropy) as loop:
        ...     for inputs, targets in loop:  # in place of `loader`
        ...         optimizer.zero_grad()
        ...         fabric.backward(loop.loss(model(inputs), targets))  # in place of `F.cross_entropy`
        ...         optimizer.step()

    As `eventbus_adapters.torch_loop.instrument`, which says more; and `fabric.backward(anything)` publishes
    BEFORE_BACKWARD and AFTER_BACKWARD while the block lasts.

    Args:
        engine: publishes the events; whoever made it closes it.
        fabric: whose `backward` the loop calls.
        model: what `fabric.setup` returned.
        optimizers: one or several, what `fabric.setup` returned.
        dataloader: what `fabric.setup_dataloaders` returned.
        loss: a function, for `loop.loss`; the calls of an `nn.Module` count wherever they are made.
        **options: of `instrument`.

    Raises:
        ConfigurationError: an argument does not fit; it says which, and what would.
        TimeFormatError: `max_duration` does not parse.
    """
    if isinstance(fabric, type) or not all(callable(getattr(fabric, name, None)) for name in ("backward", "setup")):
        raise ConfigurationError(f"fabric is {fabric!r}; give the Fabric(...) whose backward() the loop calls")
    bare = [getattr(optimizer, "optimizer", optimizer) for optimizer in _listed(optimizers)]
    return FabricInstrumentation(fabric, instrument(engine, model, bare, dataloader, loss, **options))


def _listed(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
