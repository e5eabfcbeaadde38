"""Throughput: counted over a sliding window, in training time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.callbacks import SpeedMonitor

SECONDS = [9.0, 0.5, 2.0, 0.25, 1.0, 4.0]
SIZES = [6, 6, 2]
EVALUATION = [(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long))]


def make_trainer(scripted: Callable[..., nn.Module], clock: Any, batches: list[Any], **arguments: Any) -> Trainer:
    """A run of two epochs of three batches that take so many seconds each, with an evaluation of 100 s after each."""
    model = scripted(clock=clock, seconds=SECONDS, evaluation_seconds=100.0)
    defaults: dict[str, Any] = {"max_duration": "2ep", "optimizers": torch.optim.SGD(model.parameters(), lr=0.0)}
    return Trainer(model, batches, EVALUATION, **defaults | arguments)


def tensors() -> list[Tensor]:
    """Batches of 6, 6 and 2 samples."""
    return [torch.zeros(size, 1) for size in SIZES]


@pytest.mark.anyio
@pytest.mark.parametrize("window", [1, 2, 100])
async def test_rates_are_those_of_the_window(scripted: Callable[..., nn.Module], clock: Any, window: int) -> None:
    """Of as many batches as there are up to its size, but for the first; evaluation takes none of the time."""
    records = InMemoryLogger()
    trainer = make_trainer(scripted, clock, tensors(), callbacks=[SpeedMonitor(window)], loggers=records)
    await trainer.fit()

    spans = [range(max(1, batch - window + 1), batch + 1) for batch in range(1, 6)]
    expected = {
        "throughput/batches_per_sec": [len(span) / sum(SECONDS[i] for i in span) for span in spans],
        "throughput/samples_per_sec": [
            sum(SIZES[i % 3] for i in span) / sum(SECONDS[i] for i in span) for span in spans
        ],
    }
    actual = {name: records.get_timeseries(name)[name] for name in records.data if name.startswith("throughput/")}

    assert records.get_timeseries("throughput/batches_per_sec")["step"] == [2, 3, 4, 5, 6]
    assert actual == {name: pytest.approx(rates, rel=1e-12) for name, rates in expected.items()}


@pytest.mark.anyio
async def test_tokens_are_counted_where_there_are_any(scripted: Callable[..., nn.Module], clock: Any) -> None:
    """The elements of `input_ids`."""
    records = InMemoryLogger()
    batches = [{"input_ids": torch.zeros(size, 8, dtype=torch.long)} for size in SIZES]
    trainer = make_trainer(scripted, clock, batches, callbacks=[SpeedMonitor(1)], loggers=records)
    await trainer.fit()

    expected = [8 * SIZES[i % 3] / SECONDS[i] for i in range(1, 6)]
    assert records.get_timeseries("throughput/tokens_per_sec")["throughput/tokens_per_sec"] == pytest.approx(expected)


@pytest.mark.anyio
async def test_each_fit_is_measured_by_itself(scripted: Callable[..., nn.Module], clock: Any) -> None:
    """Its first batch warms up again; what passed between the fits belongs to neither."""
    records = InMemoryLogger()
    trainer = make_trainer(scripted, clock, tensors(), callbacks=[SpeedMonitor()], loggers=records, max_duration="3ba")
    async with trainer:
        await trainer.fit()
        clock.advance(1000.0)
        await trainer.fit("3ba")

    series = records.get_timeseries("throughput/batches_per_sec")
    assert series["step"] == [2, 3, 5, 6]
    assert series["throughput/batches_per_sec"] == pytest.approx([1 / 0.5, 2 / 2.5, 1 / 1.0, 2 / 5.0])


@pytest.mark.anyio
async def test_a_clock_that_stands_still_gives_no_rate(scripted: Callable[..., nn.Module], clock: Any) -> None:
    """Rather than an infinite one, or an error."""
    model = scripted(clock=clock, seconds=[0.0] * 6)
    records = InMemoryLogger()
    trainer = Trainer(
        model,
        tensors(),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        max_duration="2ep",
        callbacks=[SpeedMonitor()],
        loggers=records,
    )
    await trainer.fit()

    assert set(records.data) == {"loss/train/total"}


@pytest.mark.anyio
async def test_callbacks_take_training_time(scripted: Callable[..., nn.Module], clock: Any) -> None:
    """What is slow in a run shows, whatever it is: here a callback that takes 7 seconds on BATCH_CHECKPOINT."""

    class Slow(Callback[State]):
        def batch_checkpoint(self, state: State, logger: Any) -> None:
            clock.advance(7.0)

    records = InMemoryLogger()
    trainer = make_trainer(scripted, clock, tensors(), callbacks=[SpeedMonitor(1), Slow()], loggers=records)
    await trainer.fit()

    expected = [1 / (seconds + 7.0) for seconds in SECONDS[1:]]
    series = records.get_timeseries("throughput/batches_per_sec")
    assert series["throughput/batches_per_sec"] == pytest.approx(expected)


@pytest.mark.parametrize("window", [0, -1, 2.5, "10", True])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    """By name."""
    with pytest.raises(ConfigurationError, match=r"SpeedMonitor: window_size=.* has to be a whole number, 1 or more"):
        SpeedMonitor(window)
