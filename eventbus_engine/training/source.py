"""Where batches come from: a loader, sync or async, gone through one epoch after another.

A sync loader is asked on the training thread, and whoever wants it to work ahead gives it workers of its own
(`DataLoader(num_workers=...)`). An async one has a task that fetches the next batch while torch computes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeAlias

import anyio
import torch
from anyio.abc import TaskGroup
from torch.utils.data import DataLoader, IterableDataset

from eventbus_engine._steps import need_loop
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.data import move
from eventbus_engine.training.position import EXHAUSTED, Position

__all__ = ["EXHAUSTED", "BatchSource"]

log: logging.Logger = logging.getLogger("eventbus_engine")

Compute: TypeAlias = Callable[..., Awaitable[Any]]
"""`await compute(function, *args)`: `State.compute`."""


class BatchSource:
    """Fetches batches from a loader, a sync or an async iterable, one epoch after another.

    An epoch that was left in the middle goes on where it was left; an exhausted one is followed by the next.

    Args:
        loader: anything that can be iterated again for each epoch: a `DataLoader`, a list of batches.
        name: what to call it in errors.

    Attributes:
        position: where in the loader's data it is, and how to get there again.

    Raises:
        ConfigurationError: the loader cannot be iterated.
    """

    def __init__(self, loader: Any, name: str) -> None:
        if not isinstance(loader, Iterable | AsyncIterable) and not hasattr(loader, "__getitem__"):
            raise ConfigurationError(
                f"{name} is a {type(loader).__name__}, which cannot be iterated; give a DataLoader, a list of batches, "
                f"or any other iterable or async iterable"
            )
        self.loader: Any = loader
        self.position: Position = Position(loader)
        self.name: str = name
        self._iterator: Any = None
        self._tasks: TaskGroup | None = None
        self._context: Context | None = None

    @property
    def is_async(self) -> bool:
        """Whether its loader is awaited, on the event loop."""
        return isinstance(self.loader, AsyncIterable)

    @property
    def length(self) -> int | None:
        """Batches in an epoch, None where the loader does not know."""
        try:
            length: int = len(self.loader)
        except TypeError:
            return None
        return length

    def prefetch_in(self, tasks: TaskGroup | None) -> None:
        """From here on, let an async loader work one batch ahead, in a task of this group and in this context."""
        self._tasks, self._context = tasks, copy_context()

    async def fetch(self, compute: Compute, device: torch.device) -> Any:
        """The next batch, on `device`, or `EXHAUSTED`. Sync loaders run under `compute`, async ones are awaited."""
        if not self.is_async:
            return await compute(self._next, device)
        await need_loop()
        if self._iterator is None:
            self._iterator = await self._begin_async(device)
        with self._forgetting_what_failed():
            batch = await anext(self._iterator, EXHAUSTED)
        if self._is_over(batch):
            return EXHAUSTED
        # Where nothing is copied to a device, a trip to the training thread would cost more than it does there.
        return move(batch, device) if device.type == "cpu" else await compute(move, batch, device)

    def _next(self, device: torch.device) -> Any:
        if self._iterator is None:
            self._iterator = self._begin(device)
        with self._forgetting_what_failed():
            batch = next(self._iterator, EXHAUSTED)
        return EXHAUSTED if self._is_over(batch) else move(batch, device)

    def _begin(self, device: torch.device) -> Any:
        """Begin an epoch, or go to where a checkpoint was in it."""
        way = self.position.begin(device)
        if way is None:
            return iter(self.loader)
        with self.position.returning(device) as itself:
            iterator = iter(self.loader)
            while not (itself or way.over):
                way.pass_by(next(iterator, EXHAUSTED))
        return iterator

    async def _begin_async(self, device: torch.device) -> Any:
        way = self.position.begin(device)
        if way is None:
            return self._open_async()
        with self.position.returning(device):
            iterator = self._open_async()
            try:
                while not way.over:
                    way.pass_by(await anext(iterator, EXHAUSTED))
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await _close(iterator)
                raise
        return iterator

    def _open_async(self) -> Any:
        return aiter(self.loader) if self._tasks is None else self._prefetch(self._tasks)

    def _prefetch(self, tasks: TaskGroup) -> _Prefetch:
        ahead = _Prefetch()
        context = self._context or copy_context()
        # Not in the caller's: the first batch's span would be the parent of all that the loader does.
        _ = context.copy().run(tasks.start_soon, ahead.run, self.loader)
        return ahead

    def _is_over(self, batch: Any) -> bool:
        """Whether there was none; else it counts."""
        if batch is EXHAUSTED:
            self._forget()
            return True
        self.position.count()
        return False

    def _forget(self) -> None:
        self._iterator = None
        self.position.end()

    @contextmanager
    def _forgetting_what_failed(self) -> Iterator[None]:
        """A generator that has raised is spent, and would pass for one that has reached its end: begin anew instead."""
        try:
            yield
        except BaseException as error:
            # A task that works ahead is not hurt by the cancellation of who waits for it.
            if isinstance(error, Exception) or not isinstance(self._iterator, _Prefetch):
                self._forget()
            raise

    async def finish(self, compute: Compute) -> None:
        """Let go of an epoch that is known to be at its end.

        A DataLoader hears of it first: what its sampler draws when it is asked for more, it draws in every epoch.
        """
        if isinstance(self.loader, DataLoader) and not isinstance(self.loader.dataset, IterableDataset):
            await compute(next, self._iterator or iter(()), None)
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of an epoch left in the middle, its worker processes or its async generator included."""
        iterator = self._iterator
        self._forget()
        await _close(iterator)


async def _close(iterator: Any) -> None:
    if isinstance(iterator, _Prefetch):
        await iterator.aclose()
    else:
        await _let_go(iterator)


async def _let_go(iterator: Any) -> None:
    """Close an async generator left in the middle. That it fails at that is logged: its batches were good."""
    try:
        if inspect.isasyncgen(iterator):
            await iterator.aclose()
    except Exception as error:
        log.error("an async loader failed as it was closed", exc_info=error)


class _Prefetch(AsyncIterator[Any]):
    """An epoch of an async loader, gone through by a task of its own: it has one batch ready, and waits to hand it on.

    The one task also keeps to what async generators ask for: a scope or a group opened in one is left in that task.
    """

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[Any](0)
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._error: Exception | None = None

    async def run(self, loader: AsyncIterable[Any]) -> None:
        """What the task does."""
        iterator: Any = None
        try:
            with self._scope:
                iterator = aiter(loader)
                async for batch in iterator:
                    await self._send.send(batch)
        except Exception as error:
            self._error = error
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    await _let_go(iterator)
            finally:
                self._send.close()
                self._ended.set()

    async def __anext__(self) -> Any:
        try:
            return await self._receive.receive()
        except anyio.EndOfStream:
            self._receive.close()
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Stop, and wait until the loader has let go."""
        self._scope.cancel()
        await self._ended.wait()
        self._receive.close()
