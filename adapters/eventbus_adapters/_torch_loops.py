"""The two kinds of instrumented loop: a blocking one, watched through torch's hooks, and an async one, which awaits."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from eventbus_adapters._torch_course import Batches, Course, Plain, Scope
from eventbus_engine.bus import current_envelope
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.training.source import EXHAUSTED, BatchSource
from eventbus_engine.training.state import State
from eventbus_engine.training.tracing import RunTracing
from eventbus_engine.training.worker import InlineWorker

__all__ = ["AsyncTorchLoop", "Subject", "TorchLoop", "blocking"]

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Subject:
    """What is instrumented; `eventbus_adapters.torch_loop.instrument` describes each of them."""

    engine: Engine[Any]
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    source: BatchSource
    loss: Callable[..., Any] | None
    device: torch.device
    hooks: bool


class _Loop(Course):
    """A loop of one kind or the other.

    Attributes:
        state: the engine's, kept up to date by the loop: `batch`, `outputs`, `loss` and `timestamp`.
    """

    def __init__(self, subject: Subject, state: Any) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        super().__init__(state, subject.source, subject.device, RunTracing(subject.engine.tracers, state, rank))
        self._engine, self._model, self._loss, self._hooks = subject.engine, subject.model, subject.loss, subject.hooks
        self._optimizers = subject.optimizers

    def __len__(self) -> int:
        return len(self._source.loader)

    def _loss_function(self) -> Callable[..., Any]:
        if self._loss is None:
            raise ConfigurationError(
                "this loop has no loss to call; give it one, instrument(..., loss=F.cross_entropy), or compute it "
                "inside an explicit pair, BEFORE_LOSS, and set loop.state.loss there"
            )
        return self._loss

    async def _step(self) -> None:
        """Step the optimizers."""
        counts = self._in_batch()
        if counts:
            await self._begin_step()
        try:
            for optimizer in self._optimizers:
                await self._compute(optimizer.step)
        except BaseException as error:
            if counts:
                await self._leave("optimizer", error)
            raise
        if counts:
            await self._leave("optimizer")


class TorchLoop(_Loop):
    """A blocking loop; iterating it is an epoch.

    Its events go through `engine.sync`. The calls of the model, of the loss if that is a module, `loss.backward()` on
    what `loop.loss` returned, and `optimizer.step()` publish by themselves while a batch is in progress and gradients
    are computed; what an evaluation or an algorithm calls does not. The methods do the same without hooks.
    """

    def __init__(self, subject: Subject, state: Any) -> None:
        super().__init__(subject, state)
        # A loop may itself run in a handler of another engine; what counts is whether another handler runs in it.
        self._outer = current_envelope()
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        self._losses: list[weakref.ref[Tensor]] = []
        self._stepping: Any = None

    def __iter__(self) -> Iterator[Any]:
        return _PlainBatches(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model between BEFORE_FORWARD and AFTER_FORWARD; its outputs, as the algorithms leave them."""
        return blocking(self._call(Event.BEFORE_FORWARD, self._model, args, kwargs))

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loss between BEFORE_LOSS and AFTER_LOSS; what it returns, as the algorithms leave it.

        Raises:
            ConfigurationError: `instrument` was given no loss.
            BatchError: a change by an algorithm does not reach it.
        """
        loss = blocking(self._call(Event.BEFORE_LOSS, self._loss_function(), args, kwargs))
        self._watch_backward(loss)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward(...)` between BEFORE_BACKWARD and AFTER_BACKWARD, for what was made of a loss: `loss / 4`."""
        blocking(self._backward(loss, args, kwargs))

    def step(self) -> None:
        """Step the optimizers."""
        blocking(self._step())

    async def _publish(self, event: Event) -> None:
        self._engine.sync.run_event(event, self.state)

    def _pair(self, event: Event) -> Scope:
        return Plain(self._engine.sync.pair(event, self.state))

    async def _compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)

    def _is_here(self) -> bool:
        """Whether it is the loop that is running now, and not a handler, or another thread."""
        return threading.get_ident() == self._thread and current_envelope() is self._outer

    def _in_batch(self) -> bool:
        return self._is_here() and super()._in_batch()

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self._in_batch()

    async def _end_batch(self) -> None:
        await super()._end_batch()
        self._unwatch_losses()

    # ----------------------------------------------------------------------------------------------------------- hooks

    def _attach(self) -> None:
        if not self._hooks:
            return
        self._watch(self._model, Event.BEFORE_FORWARD)
        if isinstance(self._loss, nn.Module):
            self._watch(self._loss, Event.BEFORE_LOSS)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _watch(self, module: nn.Module, event: Event) -> None:
        watch = _Watch(self, event)
        self._handles.append(module.register_forward_pre_hook(watch.before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(watch.after, with_kwargs=True, always_call=True))

    def _watch_backward(self, loss: Any) -> None:
        """Have `loss.backward()` publish as well: torch has no hook around a whole backward pass."""
        if self._hooks and isinstance(loss, Tensor) and loss.requires_grad and self._trains():
            known = weakref.ref(loss)  # a strong one would be a cycle, which keeps the graph until it is collected

            def backward(*args: Any, **kwargs: Any) -> None:
                taken = known()
                assert taken is not None  # noqa: S101 -- its own attribute is being called
                self.backward(taken, *args, **kwargs)

            vars(loss)["backward"] = backward
            self._losses.append(known)

    def _unwatch_losses(self) -> None:
        for known in self._losses:
            loss = known()
            if loss is not None:
                vars(loss).pop("backward", None)
        self._losses.clear()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._in_batch() and not self._is_open("optimizer"):
            self._stepping = optimizer
            blocking(self._begin_step())

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._stepping:  # not one that the step of another calls, or `step` here
            self._stepping = None
            blocking(self._leave("optimizer"))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unwatch_losses()
        self._parts.forget()
        blocking(self._source.aclose())


class _Watch:
    """The hooks on one module, each call of which is a section of the batch."""

    def __init__(self, loop: TorchLoop | None, event: Event) -> None:
        self._loop = loop
        self._event = event
        self._calls: list[tuple[Event | None, BaseException | None]] = []

    def __reduce__(self) -> Any:
        """A copy of the module, for a moving average or for a file, is not watched."""
        return _Watch, (None, self._event)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        section = None if self._loop is None else self._loop._section(self._event)
        self._calls.append((section, sys.exception()))
        if self._loop is None or section is None:
            return None
        return blocking(self._loop._begin(section, args, kwargs))

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        section, outer = self._calls.pop() if self._calls else (None, None)
        # If BEFORE_… has failed, there is a call, but no section.
        if self._loop is None or section is None or not self._loop._is_open(section):
            return None
        error = sys.exception()
        if error is not None and error is not outer:  # torch calls this while the module's own error propagates
            blocking(self._loop._leave(section, error))
            return None
        result = blocking(self._loop._end(section, result))
        if self._event == Event.BEFORE_LOSS:
            self._loop._watch_backward(result)
        return result


class AsyncTorchLoop(_Loop):
    """An async loop; iterating it with `async for` is an epoch.

    Awaits its events, and computes on a thread of its own, so that the event loop keeps beating: call
    the model, the loss, the backward pass and the optimizers by its methods. Called directly they publish nothing.
    """

    def __init__(self, subject: Subject, state: Any) -> None:
        super().__init__(subject, state)
        self._inline = InlineWorker()

    def __aiter__(self) -> AsyncIterator[Any]:
        return _AsyncBatches(self)

    async def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model between BEFORE_FORWARD and AFTER_FORWARD; its outputs, as the algorithms leave them."""
        return await self._call(Event.BEFORE_FORWARD, self._model, args, kwargs)

    async def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loss between BEFORE_LOSS and AFTER_LOSS; what it returns, as the algorithms leave it.

        Raises:
            ConfigurationError: `instrument` was given no loss.
            BatchError: a change by an algorithm does not reach it.
        """
        return await self._call(Event.BEFORE_LOSS, self._loss_function(), args, kwargs)

    async def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward(...)` between BEFORE_BACKWARD and AFTER_BACKWARD."""
        await self._backward(loss, args, kwargs)

    async def step(self) -> None:
        """Step the optimizers."""
        await self._step()

    async def _publish(self, event: Event) -> None:
        await self._engine.run_event(event, self.state)

    def _pair(self, event: Event) -> Scope:
        return self._engine.pair(event, self.state)

    async def _compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if isinstance(self.state, State):
            return await self.state.compute(function, *args, **kwargs)
        return await self._inline.run(lambda: function(*args, **kwargs))

    async def _detach(self) -> None:
        self._parts.forget()
        await self._source.aclose()


class _PlainBatches(Batches, Iterator[Any]):
    def __init__(self, loop: TorchLoop) -> None:
        super().__init__()
        self._loop = loop

    def __next__(self) -> Any:
        batch = blocking(self._loop._next(self))
        if batch is EXHAUSTED:
            raise StopIteration
        return batch


class _AsyncBatches(Batches, AsyncIterator[Any]):
    def __init__(self, loop: AsyncTorchLoop) -> None:
        super().__init__()
        self._loop = loop

    async def __anext__(self) -> Any:
        batch = await self._loop._next(self)
        if batch is EXHAUSTED:
            raise StopAsyncIteration
        return batch


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not suspend, as none does whose events go through `engine.sync`."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("a blocking loop was made to wait")
