"""Fetching batches from loaders: again and again, and from async ones a batch ahead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.source import EXHAUSTED, BatchSource

CPU = torch.device("cpu")
IMAGES = torch.arange(12.0).reshape(6, 2)


async def compute(function: Callable[..., Any], *args: Any) -> Any:
    """What `State.compute` is to a source."""
    return function(*args)


class Stream:
    """An async iterable of two batches."""

    async def __aiter__(self) -> AsyncIterator[Tensor]:
        yield IMAGES
        yield IMAGES + 1


@pytest.mark.anyio
@pytest.mark.parametrize("loader", [[IMAGES, IMAGES + 1], Stream()], ids=["sync", "async"])
async def test_a_source_goes_through_the_loader_again_and_again(loader: Any) -> None:
    """`EXHAUSTED` once at the end of each epoch, then from the start."""
    source = BatchSource(loader, "train_dataloader")
    fetched = [await source.fetch(compute, CPU) for _ in range(5)]
    await source.aclose()
    actual = [item if item is EXHAUSTED else item[0, 0].item() for item in fetched]

    assert repr(actual) == "[0.0, 1.0, EXHAUSTED, 0.0, 1.0]"


@pytest.mark.anyio
async def test_a_loader_that_fails_does_not_pass_for_an_exhausted_one() -> None:
    """A generator that has raised ends; the next fetch has to start anew instead."""

    class Flaky:
        def __init__(self) -> None:
            self.failed = False

        def __iter__(self) -> Iterator[Tensor]:
            yield IMAGES
            if not self.failed:
                self.failed = True
                raise OSError("disk gone")

    source = BatchSource(Flaky(), "train_dataloader")
    await source.fetch(compute, CPU)
    with pytest.raises(OSError, match="disk gone"):
        await source.fetch(compute, CPU)
    actual = await source.fetch(compute, CPU)

    assert actual is not EXHAUSTED


@pytest.mark.anyio
async def test_closing_a_source_closes_its_async_generator() -> None:
    """An epoch left in the middle must not leave a generator to the garbage collector."""
    closed = False

    class Closing:
        async def __aiter__(self) -> AsyncIterator[Tensor]:
            nonlocal closed
            try:
                yield IMAGES
            finally:
                closed = True

    source = BatchSource(Closing(), "train_dataloader")
    await source.fetch(compute, CPU)
    await source.aclose()

    assert closed


def test_the_length_of_a_source_is_the_loaders_or_unknown() -> None:
    """An endless stream has none."""
    actual = BatchSource([IMAGES], "a").length, BatchSource(Stream(), "b").length

    assert actual == (1, None)


def test_a_loader_that_cannot_be_iterated_is_refused() -> None:
    """By the name of the argument that it came as."""
    with pytest.raises(ConfigurationError, match="train_dataloader is a int, which cannot be iterated"):
        BatchSource(3, "train_dataloader")


@pytest.mark.anyio
async def test_an_async_loader_works_one_batch_ahead() -> None:
    """While a batch is being trained on, the next one is fetched, and no more than that."""
    asked: list[int] = []

    class Counting:
        async def __aiter__(self) -> AsyncIterator[Tensor]:
            for number in range(4):
                asked.append(number)
                yield IMAGES + number

    source, ahead, fetched = BatchSource(Counting(), "train_dataloader"), list[int](), list[Any]()
    async with anyio.create_task_group() as tasks:
        source.prefetch_in(tasks)
        await source.fetch(compute, CPU)
        await anyio.wait_all_tasks_blocked()  # what computes takes its time
        ahead = list(asked)
        fetched = [await source.fetch(compute, CPU) for _ in range(4)]
        await source.aclose()

    assert (ahead, len(asked)) == ([0, 1], 4)
    assert [item if item is EXHAUSTED else item[0, 0].item() for item in fetched] == [1.0, 2.0, 3.0, EXHAUSTED]


@pytest.mark.anyio
async def test_what_fails_ahead_fails_when_its_batch_is_asked_for() -> None:
    """As itself, in its turn; the next fetch starts anew."""

    class Flaky:
        async def __aiter__(self) -> AsyncIterator[Tensor]:
            yield IMAGES
            raise OSError("disk gone")

    source, actual = BatchSource(Flaky(), "train_dataloader"), None
    async with anyio.create_task_group() as tasks:
        source.prefetch_in(tasks)
        await source.fetch(compute, CPU)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(OSError, match="disk gone"):
            await source.fetch(compute, CPU)
        actual = await source.fetch(compute, CPU)
        await source.aclose()

    assert actual is IMAGES


@pytest.mark.anyio
async def test_a_cancelled_fetch_loses_no_batch() -> None:
    """The loader goes on working for whoever asks next."""
    ready = anyio.Event()

    class Slow:
        async def __aiter__(self) -> AsyncIterator[Tensor]:
            await ready.wait()
            yield IMAGES

    source, actual = BatchSource(Slow(), "train_dataloader"), None
    async with anyio.create_task_group() as tasks:
        source.prefetch_in(tasks)
        with anyio.move_on_after(0):
            await source.fetch(compute, CPU)
        ready.set()
        actual = await source.fetch(compute, CPU)
        await source.aclose()

    assert actual is IMAGES


@pytest.mark.anyio
async def test_closing_waits_until_the_loader_has_let_go() -> None:
    """Also in the middle of what it does ahead, and it may await in its clean-up; the group ends without it."""
    log: list[str] = []

    class Closing:
        async def __aiter__(self) -> AsyncIterator[Tensor]:
            try:
                while True:
                    yield IMAGES
            finally:
                await anyio.lowlevel.checkpoint()
                log.append("let go")

    source = BatchSource(Closing(), "train_dataloader")
    async with anyio.create_task_group() as tasks:
        source.prefetch_in(tasks)
        await source.fetch(compute, CPU)
        await source.aclose()
        log.append("closed")

    assert log == ["let go", "closed"]


@pytest.mark.anyio
async def test_a_loader_that_fails_in_its_clean_up_is_let_go_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Whether it works ahead or not; its error is logged."""

    class Failing:
        async def __aiter__(self) -> AsyncIterator[Tensor]:
            try:
                while True:
                    yield IMAGES
            finally:
                raise OSError("disk gone")

    ahead, behind = BatchSource(Failing(), "train_dataloader"), BatchSource(Failing(), "train_dataloader")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            ahead.prefetch_in(tasks)
            for source in (ahead, behind):
                await source.fetch(compute, CPU)
                await source.aclose()

    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["disk gone"] * 2
