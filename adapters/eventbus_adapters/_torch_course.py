"""The course of a hand-written PyTorch loop: which event follows which, and what reaches the loop's own code.

Written once, as coroutines, for blocking and for async loops. They await nothing but what the subclass publishes and
computes: where that goes through `engine.sync`, none of them ever suspends, so that it can be run to its end on the
spot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.training.data import count_samples, count_tokens, describe
from eventbus_engine.training.source import EXHAUSTED, BatchSource
from eventbus_engine.training.tracing import RunTracing

__all__ = ["SECTIONS", "Batches", "Course", "Plain", "Scope", "count"]

T = TypeVar("T")

SECTIONS = {
    Event.BEFORE_FORWARD: "outputs",
    Event.BEFORE_LOSS: "loss",
    Event.BEFORE_BACKWARD: "",
    Event.EVAL_BEFORE_FORWARD: "outputs",
    Event.PREDICT_BEFORE_FORWARD: "outputs",
}
"""The calls that work on a batch consists of, and the attribute of the state that takes what the call returns."""


class Scope(Protocol):
    """An async context manager."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> bool | None: ...


class Plain:
    """A plain context manager as an async one."""

    def __init__(self, manager: AbstractContextManager[Any]) -> None:
        self._manager = manager

    async def __aenter__(self) -> Any:
        return self._manager.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        return self._manager.__exit__(kind, error, tb)


class Batches:
    """One iteration over the loop: an epoch."""

    def __init__(self) -> None:
        self.begun = self.over = False


class Unfinished(Exception):  # noqa: N818 -- it names what a span shows
    """On the span of something that has raised, in a loop that caught it and went on."""


class Course:
    """A run, its epochs, and the batches and calls within them, each with its events and its span.

    Args:
        state: gets `batch`, `outputs`, `loss` and `timestamp`.
        source: of the batches.
        device: where the batches are moved to.
        tracing: opens the spans of the run, the epochs and the batches.
    """

    _way_out = (
        "call with the parts of the batch and the outputs as they are (instrument(device=...) moves batches), or with "
        "those in loop.state.batch and loop.state.outputs"
    )

    def __init__(self, state: Any, source: BatchSource, device: torch.device, tracing: RunTracing) -> None:
        self.state = state
        self._source = source
        self._device = device
        self._tracing = tracing
        self._open: list[tuple[str, Scope, Any]] = []  # the name, the scope, and what entering it gave
        self._parts = Parts(state)
        self._batches: Batches | None = None
        self._samples, self._tokens, self._lap = 0, 0, 0.0

    # ------------------------------------------------------------------------------- where the two kinds of loop differ

    async def _publish(self, event: Event) -> None:
        raise NotImplementedError

    def _pair(self, event: Event) -> Scope:
        raise NotImplementedError

    async def _compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        raise NotImplementedError

    def _in_batch(self) -> bool:
        """Whether what is called now, and within no other call, belongs to the batch in progress."""
        return self._is_open(Event.BATCH_START) and not any(self._is_open(section) for section in SECTIONS)

    def _trains(self) -> bool:
        """Whether a call made now is a part of the training on the batch in progress."""
        return self._in_batch()

    def _section(self, event: Event) -> Event | None:
        """The section of the batch that such a call is, if it were made now; None if it is none."""
        return event if self._trains() else None

    # ------------------------------------------------------------------------------ scopes: run, epoch, batch, section

    def _is_open(self, name: str) -> bool:
        return any(name == opened for opened, _, _ in self._open)

    async def _enter(self, name: str, scope: Scope) -> Any:
        entered = await scope.__aenter__()
        self._open.append((name, scope, entered))
        return entered

    async def _leave(self, name: str, error: BaseException | None = None) -> None:
        """Leave a scope. One still open inside it has failed: of the same error, or of one that the loop caught."""
        opened = "" if self._is_open(name) else name
        while opened != name:
            opened, scope, _ = self._open.pop()
            raised = error
            if raised is None and opened != name:
                raised = Unfinished(f"{opened} raised, and the loop went on")
            if raised is None:
                await scope.__aexit__(None, None, None)
            else:
                await scope.__aexit__(type(raised), raised, raised.__traceback__)

    # ---------------------------------------------------------------------------------------------- the run, its epochs

    async def _start(self, first: tuple[Event, ...]) -> None:
        await self._enter("run", Plain(self._tracing.run()))
        for event in first:
            await self._publish(event)

    async def _stop(self, error: BaseException | None) -> None:
        """End what is open: with its events if the loop has come to its end, without them if it has failed."""
        try:
            if error is None:
                await self._end_epoch()
                await self._publish(Event.FIT_END)
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._leave("run", error)

    async def _next(self, batches: Batches) -> Any:
        """The next batch of an epoch, or `EXHAUSTED`. What is open of the one before is ended first."""
        if batches.over:
            return EXHAUSTED
        if not self._is_open("run"):
            raise ConfigurationError("this loop is over; iterate it inside its `with instrument(...)` block")
        if not batches.begun:
            batches.begun, self._batches = True, batches
            await self._begin_epoch()
        elif batches is not self._batches:
            raise ConfigurationError(
                "a loop is used twice: another iteration over it has begun since this one; finish one before the next"
            )
        await self._end_batch()
        if await self._begin_batch():
            return self.state.batch
        batches.over = True
        await self._end_epoch()
        return EXHAUSTED

    async def _begin_epoch(self) -> None:
        await self._end_epoch()  # one that was left by a `break`
        await self._enter("epoch", Plain(self._tracing.unit("epoch")))
        await self._publish(Event.EPOCH_START)

    async def _end_epoch(self) -> None:
        if not self._is_open("epoch"):
            return
        await self._end_batch()
        await self._source.aclose()  # the next one begins at the beginning, also after a `break`
        self.state.timestamp = self.state.timestamp.to_next_epoch()
        await self._publish(Event.EPOCH_END)
        await self._publish(Event.EPOCH_CHECKPOINT)
        await self._leave("epoch")

    # --------------------------------------------------------------------------------------------------------- batches

    async def _begin_batch(self) -> bool:
        """Fetch a batch; False if there is none left."""
        await self._begin_fetch()
        batch = await self._source.fetch(self._compute, self._device)
        if batch is EXHAUSTED:
            await self._give_up_batch("end of data")
            return False
        await self._take(batch)
        return True

    async def _begin_fetch(self) -> None:
        self._lap = time.perf_counter()
        await self._enter("batch", Plain(self._tracing.unit("batch")))
        await self._enter(Event.BEFORE_DATALOADER, self._pair(Event.BEFORE_DATALOADER))

    async def _give_up_batch(self, name: str) -> None:
        """What has begun as a batch is none after all, but what the name says: end it without its second halves."""
        while self._is_open("batch"):
            opened, _, entered = self._open[-1]
            if opened == "batch":
                entered.rename(name)
            else:
                entered.abandon()
            await self._leave(opened)

    async def _take(self, batch: Any) -> None:
        """Here is the batch that was fetched."""
        await self._end_fetch(batch)
        await self._begin_train_batch()

    async def _end_fetch(self, batch: Any) -> None:
        self.state.batch = batch
        self._samples, self._tokens = count(batch)
        await self._leave(Event.BEFORE_DATALOADER)

    async def _begin_train_batch(self) -> None:
        await self._enter(Event.BATCH_START, self._pair(Event.BATCH_START))
        await self._enter(Event.BEFORE_TRAIN_BATCH, self._pair(Event.BEFORE_TRAIN_BATCH))
        self._parts.learn(self.state.batch, "batch")

    async def _end_train_batch(self) -> None:
        """The gradients are there: an optimizer is about to step, or the batch is over."""
        if self._is_open(Event.BEFORE_TRAIN_BATCH):
            if isinstance(self.state.loss, Tensor):
                self.state.loss = self.state.loss.detach()
            await self._leave(Event.BEFORE_TRAIN_BATCH)

    async def _end_batch(self) -> None:
        self._parts.forget()
        if self._is_open(Event.BATCH_START):
            await self._end_train_batch()
            lap = timedelta(seconds=time.perf_counter() - self._lap)
            self.state.timestamp = self.state.timestamp.to_next_batch(self._samples, self._tokens, duration=lap)
            await self._leave(Event.BATCH_START)
            await self._publish(Event.BATCH_CHECKPOINT)
        if self._is_open("batch"):
            await self._leave("batch")

    # ------------------------------------------------------------------------------------------------- calls in a batch

    async def _call(self, event: Event, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call a function as a section of the batch."""
        section = self._section(event)
        if section is None:
            return await self._compute(function, *args, **kwargs)
        args, kwargs = await self._begin(section, args, kwargs)
        try:
            result = await self._compute(function, *args, **kwargs)
        except BaseException as error:
            await self._leave(section, error)
            raise
        return await self._end(section, result)

    async def _begin(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Publish the first half; the arguments to call with, which are what the algorithms have left of these."""
        roots = ("batch", "outputs") if SECTIONS[event] else ()
        before = [getattr(self.state, root) for root in roots]
        await self._enter(event, self._pair(event))
        try:
            reached = {root for value in (*args, *kwargs.values()) for root in self._parts.roots(value)}
            for root, value in zip(roots, before, strict=True):
                if getattr(self.state, root) is not value and root not in reached:
                    raise BatchError(
                        f"an algorithm changed state.{root} on {event.name}, but nothing that the loop calls with is a "
                        f"part of it, so the change would be lost; {self._way_out}"
                    )
            now = self._parts.now
            return tuple(now(value) for value in args), {name: now(value) for name, value in kwargs.items()}
        except BaseException as error:
            await self._leave(event, error)
            raise

    async def _end(self, event: Event, result: Any) -> Any:
        """Publish the second half; what the algorithms have made of the result."""
        attribute = SECTIONS[event]
        if not attribute:
            await self._leave(event)
            return result
        setattr(self.state, attribute, result)
        await self._leave(event)
        result = getattr(self.state, attribute)
        self._parts.learn(result, attribute)
        return result

    async def _backward(
        self,
        loss: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        # The class's own function: on the tensor itself, `backward` may lead back here.
        backward: Callable[..., Any] = torch.Tensor.backward,
    ) -> None:
        if self._trains():
            self.state.loss = loss
            self._parts.learn(loss, "loss")
        await self._call(Event.BEFORE_BACKWARD, backward, (loss, *args), kwargs)

    async def _begin_step(self) -> None:
        await self._end_train_batch()
        await self._enter("optimizer", Plain(self._tracing.section("optimizer")))


class Parts:
    """What the loop's code holds of the state, known by identity, and what stands at the same place now."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._places: dict[int, tuple[object, list[tuple[Any, ...]]]] = {}

    def learn(self, value: Any, root: str) -> None:
        """The loop gets `state.<root>`, and may take it apart."""
        for part, path in _walk(value, (root,)):
            # The part is kept with its places, or its id could become another's.
            self._places.setdefault(id(part), (part, []))[1].append(path)

    def forget(self) -> None:
        """The next batch has other parts."""
        self._places.clear()

    def roots(self, value: object) -> list[str]:
        """The attributes of the state that it is a part of."""
        return [path[0] for path in self._places.get(id(value), (None, []))[1]]

    def now(self, value: Any) -> Any:
        """What the algorithms have put in its place; itself, if nothing, or if it is no part of the state.

        Raises:
            BatchError: its place is gone.
        """
        for path in self._places.get(id(value), (None, []))[1]:
            found = getattr(self._state, path[0])
            for key in path[1:]:
                try:
                    found = found[key]
                except (LookupError, TypeError) as error:
                    raise BatchError(
                        f"an algorithm made state.{path[0]} into {describe(found)}, which has no item {key!r}, but "
                        f"the loop calls with it; leave in it what the loop uses"
                    ) from error
            if found is not value:
                return found
        return value


def _walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """A value, what is in it, and where. Numbers and strings are left out: equal ones may be identical."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if items != () or hasattr(value, "__dict__"):
        yield value, path
    for key, item in items:
        yield from _walk(item, (*path, key))


def count(batch: Any) -> tuple[int, int]:
    """Samples and tokens; a loop may train on what has nothing to count."""
    try:
        return count_samples(batch), count_tokens(batch)
    except BatchError:
        return 0, 0
