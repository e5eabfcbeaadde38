"""From a hand-written PyTorch loop to ordered algorithms, callbacks and traces: `instrument`.

The loop stays its author's. What it iterates, calls and steps is watched through torch's public hooks, and every point
at which an algorithm or a callback may join in becomes an event of the engine. A hook cannot await, so in an async
loop the same points are calls to await.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import anyio
import torch
from torch import nn

from eventbus_adapters._torch_loops import AsyncTorchLoop, Subject, TorchLoop, blocking
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training.arguments import DURATION_UNITS, check_device, check_duration, check_optimizers
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.state import State
from eventbus_engine.training.worker import ComputeWorker, InlineWorker, Worker

__all__ = ["AsyncTorchLoop", "Instrumentation", "LoopState", "TorchLoop", "instrument"]

_in_use: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines, models and optimizers of the loops under way: in two of them, everything would be published twice."""


@dataclass(eq=False)
class LoopState(State):
    """The state of a loop whose engine has none: that of the Trainer, without participants, which stay the engine's."""

    algorithms: Any = field(default=None, init=False)
    callbacks: Any = field(default=None, init=False)


def instrument(
    engine: Engine[Any],
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    dataloader: Iterable[Any] | AsyncIterable[Any],
    loss: Callable[..., Any] | None = None,
    *,
    device: str | torch.device | None = None,
    max_duration: str | int | Time | None = None,
    run_name: str | None = None,
    hooks: bool = True,
) -> Instrumentation:
    """Publish the events of a training loop that somebody has written by hand.

    Example:
        >>> with instrument(engine, model, optimizer, loader, F.cross_entropy) as loop:
        ...     for epoch in range(3):
        ...         for inputs, targets in loop:  # in place of `loader`
        ...             optimizer.zero_grad()
        ...             loss = loop.loss(model(inputs), targets)  # in place of `F.cross_entropy`
        ...             loss.backward()
        ...             optimizer.step()

    `async with` makes it an `AsyncTorchLoop`. What algorithms make of the batch, the outputs and the loss reaches the
    loop; without algorithms its losses are the bare loop's, bit for bit. More in `docs/adapters/torch_loop.md`.

    Args:
        engine: publishes the events; whoever made it closes it. Its state, if it has one, becomes the loop's and goes
            on counting; if not, it gets a new `LoopState`, and INIT is published first.
        model: its calls are the forward passes, if they compute gradients. Give the wrapper that the loop calls.
        optimizers: one or several; the first to step ends the training on the batch (AFTER_TRAIN_BATCH).
        dataloader: iterated anew for every epoch. An async iterable takes an async loop.
        loss: a function, for `loop.loss`; the calls of an `nn.Module` count wherever they are made.
        device: where batches are moved to; by default where the model's parameters are.
        max_duration: what algorithms that go by the fraction of training take for the whole: `"3ep"`. It ends nothing.
        run_name: by default the time and a few random letters.
        hooks: False leaves the model, the loss and the optimizers alone: the loop's methods, or explicit pairs
            (`engine.sync.pair(Event.BEFORE_FORWARD)`), publish instead.

    Raises:
        ConfigurationError: an argument does not fit; it says which, and what would.
        TimeFormatError: `max_duration` does not parse.
    """
    check_subject(engine, model, loss)
    return Instrumentation(
        engine=engine,
        model=model,
        optimizers=check_optimizers(optimizers),
        source=BatchSource(dataloader, "dataloader"),
        loss=loss,
        device=check_device(device, model),
        max_duration=None if max_duration is None else check_duration("max_duration", max_duration, DURATION_UNITS),
        run_name=run_name,
        hooks=hooks,
    )


@dataclass(eq=False, kw_only=True)
class Instrumentation(Subject):
    """What `instrument` returns: the context manager, plain and async, of one run of the loop."""

    max_duration: Time | None
    run_name: str | None
    _loop: TorchLoop | AsyncTorchLoop | None = field(default=None, init=False)
    _worker: Worker | None = field(default=None, init=False)
    _offload: Any = field(default=None, init=False)

    def __enter__(self) -> TorchLoop:
        if isinstance(self.source.loader, AsyncIterable):
            raise ConfigurationError("dataloader is async; use `async with instrument(...)` and `async for`")
        self._acquire()
        try:
            loop = self._loop = self._make_loop(self._take_state(InlineWorker()))
            loop._attach()
            blocking(loop._start(self._first_events()))
            self._check_model()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return loop

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if isinstance(self._loop, TorchLoop):
                try:
                    blocking(self._loop._stop(error))
                finally:
                    self._loop._detach()
        finally:
            self._release()

    async def __aenter__(self) -> AsyncTorchLoop:
        self._acquire()
        try:
            state = self._take_state(ComputeWorker())
            if self._worker is not None:
                self.engine.offload = state.compute  # plain algorithms compute, too
            loop = self._loop = AsyncTorchLoop(self, state)
            await loop._start(self._first_events())
            self._check_model()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return loop

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if isinstance(self._loop, AsyncTorchLoop):
                try:
                    await self._loop._stop(error)
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._loop._detach()
        finally:
            self._release()

    def _make_loop(self, state: Any) -> TorchLoop:
        return TorchLoop(self, state)

    def _first_events(self) -> tuple[Event, ...]:
        own = isinstance(self.engine.state, LoopState)
        return (Event.INIT, Event.FIT_START) if own else (Event.FIT_START,)

    def _check_model(self) -> None:
        """The loop's code goes on calling the model that it has."""
        if isinstance(self.engine.state, LoopState) and self.engine.state.model is not self.model:
            raise ConfigurationError(
                "an algorithm replaced the model on INIT, but the loop's code still has the old one; give the engine "
                "a state, Engine(State(model, ...)), publish INIT, and then instrument state.model"
            )

    def _take_state(self, worker: Worker) -> Any:
        """The engine's own state, or a new one for it."""
        engine = self.engine
        if engine.state is not None and not isinstance(engine.state, LoopState):
            self._complete(engine.state)
            return engine.state
        self._worker = worker
        engine.state = LoopState(
            self.model,
            optimizers=self.optimizers,
            train_dataloader=self.source.loader,
            loss_fn=self.loss,
            max_duration=self.max_duration,
            device=self.device,
            run_name=self.run_name or _new_name(),
            worker=worker,
        )
        if isinstance(engine.logger, Logger):
            engine.logger = engine.logger.bound_to(engine.state)
        return engine.state

    def _complete(self, state: Any) -> None:
        if self.max_duration is not None or self.run_name is not None:
            raise ConfigurationError(
                "max_duration= and run_name= are for the state that a loop makes, but the engine has one of its own; "
                "set them there"
            )
        made = {"timestamp": Timestamp(), "run_name": _new_name(), "batch": None, "outputs": None, "loss": None}
        try:
            for name, value in made.items():
                if not hasattr(state, name):
                    setattr(state, name, value)
        except AttributeError as error:
            raise ConfigurationError(
                f"the engine's state, a {type(state).__name__}, cannot take the loop's batch, outputs, loss and "
                f"timestamp; leave it out, or give the engine a training State"
            ) from error

    def _acquire(self) -> None:
        parts = [("engine", self.engine), ("model", self.model), *(("optimizer", each) for each in self.optimizers)]
        taken = next((name for name, part in parts if part in _in_use), None)
        if taken is not None or self._loop is not None:
            what = "this instrument(...) has been entered before" if taken is None else f"its {taken} is in one already"
            raise ConfigurationError(
                f"a loop is used twice: {what}, and every event would be published twice; make a loop for each run, "
                f"and leave one before you enter the next"
            )
        _in_use.update(part for _, part in parts)
        self._offload = self.engine.offload

    def _release(self) -> None:
        _in_use.difference_update([self.engine, self.model, *self.optimizers])
        self.engine.offload = self._offload
        if self._worker is not None:
            self._worker.close()


def check_subject(engine: Engine[Any], model: object, loss: object) -> None:
    """Refuse what cannot be watched, or not on this engine.

    Raises:
        ConfigurationError: naming it.
    """
    if not isinstance(engine, Engine):
        raise ConfigurationError(f"engine is {engine!r}; give an Engine of ours, an instance: Engine(algorithms=[...])")
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {type(model).__name__}; give the torch.nn.Module that the loop calls")
    if loss is not None and not callable(loss):
        raise ConfigurationError(f"loss is a {type(loss).__name__}; give what the loop computes it with, a function")
    if engine.events is not Event:
        raise ConfigurationError(
            f"the engine's events are {engine.events.__name__}, but a loop publishes those of training; give it an "
            f"engine of its own, with events=Event, the default"
        )


def _new_name() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
