"""The time that is left: exact where every batch and every evaluation takes as long as the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.callbacks import RuntimeEstimator

Build = Callable[..., Trainer]

EVALUATION = [(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long))]


class Stream:
    """A loader of three batches of two samples, six tokens each, that does not know its length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"input_ids": torch.zeros(2, 3, dtype=torch.long)}] * 3)


@pytest.fixture
def build(scripted: Callable[..., nn.Module], clock: Any) -> Build:
    """Builds a run of batches of two seconds, but for the first, of 50, and evaluations of five."""

    def make(
        *callbacks: Any, loader: Any = None, evaluation: Any = EVALUATION, second: float = 2.0, **arguments: Any
    ) -> Trainer:
        model = scripted(clock=clock, seconds=[50.0, second, *[2.0] * 100], evaluation_seconds=5.0)
        return Trainer(
            model,
            list(Stream()) if loader is None else loader,
            evaluation,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
            callbacks=callbacks,
            **arguments,
        )

    return make


def estimates(records: InMemoryLogger) -> dict[int | None, float]:
    """What was logged, by step."""
    return dict(records.data.get("time/remaining_estimate", []))


@pytest.mark.anyio
@pytest.mark.parametrize(("unit", "seconds"), [("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400)])
async def test_the_estimate_is_what_it_then_takes(build: Build, unit: str, seconds: int) -> None:
    """Four epochs of three batches, an evaluation after each; of evaluations it knows from the first one on."""
    records = InMemoryLogger()
    trainer = build(RuntimeEstimator(time_unit=unit), max_duration="4ep", loggers=records)
    await trainer.fit()

    training = {batch: 2.0 * (12 - batch) for batch in range(2, 13)}
    evaluation = {batch: 5.0 * (4 - (batch - 1) // 3) if batch > 3 else 0.0 for batch in range(2, 13)}
    assert estimates(records) == {
        batch: pytest.approx((training[batch] + evaluation[batch]) / seconds, rel=1e-9) for batch in training
    }
    assert records.hyperparameters == {"time/remaining_estimate_unit": unit}


@pytest.mark.anyio
@pytest.mark.parametrize("duration", ["12ba", "24sp", "72tok", "4ep"])
async def test_every_unit_of_the_duration_is_as_good(build: Build, duration: str) -> None:
    """Twelve batches of two samples and six tokens, without evaluation."""
    records = InMemoryLogger()
    await build(RuntimeEstimator(time_unit="seconds"), max_duration=duration, evaluation=None, loggers=records).fit()

    assert estimates(records) == {batch: pytest.approx(2.0 * (12 - batch), abs=1e-9) for batch in range(2, 13)}


@pytest.mark.anyio
async def test_a_duration_in_seconds_is_its_own_estimate(build: Build) -> None:
    """What is left of a minute, of which the first batch took 50 seconds."""
    records = InMemoryLogger()
    await build(RuntimeEstimator(time_unit="seconds"), max_duration="60s", evaluation=None, loggers=records).fit()

    assert estimates(records) == {2: 8.0, 3: 6.0, 4: 4.0, 5: 2.0, 6: 0.0}


@pytest.mark.anyio
async def test_a_clock_that_stands_still_gives_no_estimate(build: Build) -> None:
    """The second batch took no time at all, so there is no rate yet."""
    records = InMemoryLogger()
    estimator = RuntimeEstimator(time_unit="seconds")
    await build(estimator, max_duration="60s", evaluation=None, second=0.0, loggers=records).fit()

    assert estimates(records) == {3: 8.0, 4: 6.0, 5: 4.0, 6: 2.0, 7: 0.0}


@pytest.mark.anyio
async def test_the_length_of_an_epoch_is_learnt_from_the_first(build: Build) -> None:
    """A stream of unknown length has no estimate in its first epoch; then a batch is skipped, and it is right."""
    records = InMemoryLogger()
    trainer = build(
        RuntimeEstimator(time_unit="seconds"), loader=Stream(), max_duration="3ep", evaluation=None, loggers=records
    )
    await trainer.fit()

    assert estimates(records) == {batch: pytest.approx(2.0 * (9 - batch), abs=1e-9) for batch in range(5, 10)}


@pytest.mark.anyio
async def test_evaluations_within_an_epoch_of_unknown_length_count(build: Build) -> None:
    """One after every batch, 9 in all: their distance is known once they can be placed."""
    records = InMemoryLogger()
    trainer = build(
        RuntimeEstimator(time_unit="seconds"), loader=Stream(), max_duration="3ep", eval_interval="1ba", loggers=records
    )
    await trainer.fit()

    # On BATCH_END the evaluation after the batch is still to come.
    assert estimates(records) == {
        batch: pytest.approx(2.0 * (9 - batch) + 5.0 * (10 - batch), abs=1e-9) for batch in range(5, 10)
    }


@pytest.mark.anyio
async def test_evaluations_that_cannot_be_placed_yet_are_left_out(build: Build) -> None:
    """The first batch of the second epoch has a place, the three evaluations before it have none: 56 s for 4 of 9."""
    records = InMemoryLogger()
    estimator = RuntimeEstimator(skip_batches=0, time_unit="seconds")
    await build(estimator, loader=Stream(), max_duration="3ep", eval_interval="1ba", loggers=records).fit()

    assert estimates(records)[4] == pytest.approx(56.0 / 4 * 5)


@pytest.mark.anyio
@pytest.mark.parametrize("skip", [0, 1, 3])
async def test_the_batches_to_skip_are_not_measured(build: Build, skip: int) -> None:
    """The first one takes 50 seconds: it counts only where none is skipped."""
    records = InMemoryLogger()
    estimator = RuntimeEstimator(skip_batches=skip, time_unit="seconds")
    await build(estimator, max_duration="6ba", evaluation=None, loggers=records).fit()

    taken = [50.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert estimates(records) == {
        batch: pytest.approx(sum(taken[skip:batch]) / (batch - skip) * (6 - batch)) for batch in range(skip + 1, 7)
    }


@pytest.mark.anyio
async def test_evaluations_come_in_whole_numbers(build: Build) -> None:
    """Every second of five epochs has one: after the first there is one left, and none after the second."""
    records = InMemoryLogger()
    trainer = build(RuntimeEstimator(time_unit="seconds"), max_duration="5ep", eval_interval="2ep", loggers=records)
    await trainer.fit()
    actual = estimates(records)

    assert [actual[batch] for batch in (6, 7, 12, 13, 15)] == pytest.approx([18.0, 21.0, 11.0, 4.0, 0.0])


@pytest.mark.anyio
async def test_another_fit_goes_on_measuring_in_its_unit_and_begins_anew_in_another(build: Build) -> None:
    """What a batch takes is known; what a batch is of three epochs is not what it is of three batches."""
    records = InMemoryLogger()
    trainer = build(RuntimeEstimator(time_unit="seconds"), max_duration="2ep", evaluation=None, loggers=records)
    async with trainer:
        await trainer.fit()
        await trainer.fit("1ep")
        await trainer.fit("3ba")

    assert estimates(records) == {
        **{batch: pytest.approx(2.0 * (6 - batch), abs=1e-9) for batch in range(2, 7)},
        **{batch: pytest.approx(2.0 * (9 - batch), abs=1e-9) for batch in range(7, 10)},
        **{batch: pytest.approx(2.0 * (12 - batch), abs=1e-9) for batch in range(11, 13)},
    }


@pytest.mark.anyio
async def test_a_resumed_run_estimates_what_the_uninterrupted_one_does(build: Build) -> None:
    """From its first batch on: the pace goes through a checkpoint, as JSON."""

    async def run(*, interrupted: bool) -> dict[int | None, float]:
        records, estimator = InMemoryLogger(), RuntimeEstimator(time_unit="seconds")
        trainer = build(estimator, max_duration="2ep", loggers=records)
        async with trainer:
            await trainer.fit()
            if interrupted:
                other = RuntimeEstimator(time_unit="seconds")
                other.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
                trainer.state.callbacks.remove(estimator)
                trainer.state.callbacks.append(other)
            await trainer.fit("2ep")
        return estimates(records)

    uninterrupted, resumed = await run(interrupted=False), await run(interrupted=True)

    assert list(resumed) == list(range(2, 13))
    assert resumed == uninterrupted


@pytest.mark.anyio
async def test_a_run_that_is_stopped_or_endless_has_no_estimate(build: Build) -> None:
    """There is nothing to estimate by; and an evaluation then is not counted either."""

    class Change(Callback[State]):
        def __init__(self, duration: Any) -> None:
            self.duration = duration

        def batch_start(self, state: State, logger: Any) -> None:
            if int(state.timestamp.batch) == 2:
                state.max_duration = self.duration
            if int(state.timestamp.batch) == 4:
                state.stop_training()

    records = InMemoryLogger()
    await build(Change(None), RuntimeEstimator(), max_duration="4ep", loggers=records).fit()

    assert list(estimates(records)) == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip_batches": -1}, r"skip_batches=-1 has to be a whole number, 0 or more"),
        ({"skip_batches": 1.0}, r"skip_batches=1\.0 has to be a whole number"),
        ({"time_unit": "weeks"}, r"time_unit='weeks' has to be seconds or minutes or hours or days"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    """By name, with what would fit."""
    with pytest.raises(ConfigurationError, match=f"RuntimeEstimator: {message}"):
        RuntimeEstimator(**arguments)


def test_a_state_of_something_else_is_refused() -> None:
    """And leaves the estimator as it was."""
    estimator = RuntimeEstimator()
    before = estimator.state_dict()
    with pytest.raises(ConfigurationError, match=r"RuntimeEstimator cannot go on from a state with nothing in it"):
        estimator.load_state_dict({})

    assert estimator.state_dict() == before
