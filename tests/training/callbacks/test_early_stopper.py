"""Early stopping: when a run ends, what counts as better, and what a resumed run goes on from."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eventbus_engine.callback import Callback
from eventbus_engine.errors import CallbackErrors, ConfigurationError, TimeFormatError
from eventbus_engine.logger import Logger
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.time import Time
from eventbus_engine.training import Evaluator, State, Trainer
from eventbus_engine.training.callbacks import EarlyStopper

Batches = list[tuple[Tensor, Tensor]]
MakeTrainer = Callable[..., Trainer]
Scripted = Callable[..., nn.Module]

NAN = math.nan
EVALUATION = [(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long))]


@pytest.fixture
def epochs_of(make_trainer: MakeTrainer, scripted: Scripted) -> Callable[..., Any]:
    """Trains with a stopper on scripted metrics, and returns how many epochs of the run's ten it took."""

    async def run(values: Sequence[float], stopper: EarlyStopper, **arguments: Any) -> int:
        model = scripted(values)
        records = InMemoryLogger()
        defaults: dict[str, Any] = {"eval_dataloader": EVALUATION, "max_duration": "10ep", "loggers": records}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = make_trainer(
            model=model, loss=None, optimizers=optimizer, callbacks=[stopper], **defaults | arguments
        )
        await trainer.fit()
        logged = [value for _, value in records.data.get("metrics/eval/loss", [])]
        np.testing.assert_array_equal(logged, [*values, *[0.0] * 10][: len(logged)])
        return int(trainer.state.timestamp.epoch)

    return run


# ------------------------------------------------------------------------------------------------------- in a run


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("values", "patience", "expected"),
    [
        ([0.5, 0.6, 0.7], 1, 3),
        ([0.5, 0.6, 0.4, 0.5, 0.6], 1, 5),
        ([0.5, 0.6], 0, 2),
        ([0.5, 0.5, 0.5, 0.5], 2, 4),
        ([0.5, 0.6, 0.7], "1ep", 3),
        ([0.5, 0.6, 0.7], "3ba", 3),
        ([0.5, 0.6, 0.7], "2ba", 2),
        ([0.5, 0.6, 0.7], Time(18, "sp"), 3),
        ([1.0 - epoch / 10 for epoch in range(10)], 0, 10),
    ],
)
async def test_the_run_ends_when_it_has_gone_on_for_longer_than_patience(
    epochs_of: Callable[..., Any], values: list[float], patience: Any, expected: int
) -> None:
    """Since the best value, in evaluations or in the unit of a time. An epoch is three batches of six samples."""
    actual = await epochs_of(values, EarlyStopper("loss", patience=patience))

    assert actual == expected


@pytest.mark.anyio
async def test_higher_is_better_where_the_name_does_not_say_otherwise(epochs_of: Callable[..., Any]) -> None:
    """Accuracy rises for three epochs and then falls."""
    stopper = EarlyStopper("accuracy", "eval", patience=1)
    actual = await epochs_of([0.1, 0.2, 0.3, 0.2, 0.1], stopper)

    assert (actual, stopper.best) == (5, 0.3)


@pytest.mark.anyio
async def test_nan_is_no_improvement(epochs_of: Callable[..., Any]) -> None:
    """Neither as the first value nor later; and a number is better than none."""
    first, later, never = EarlyStopper("loss"), EarlyStopper("loss"), EarlyStopper("loss")
    actual = [
        await epochs_of([NAN, NAN, 0.5, 0.6, 0.7], first, max_duration="5ep"),
        await epochs_of([0.5, NAN, NAN, 0.1], later),
        await epochs_of([NAN] * 9, never),
    ]

    assert actual == [5, 3, 3]
    assert (first.best, later.best, never.best) == (0.5, 0.5, None)


@pytest.mark.anyio
async def test_a_better_value_has_to_be_further_away_than_min_delta(epochs_of: Callable[..., Any]) -> None:
    """From the best one, not from the one before: creeping is not improving."""
    actual = await epochs_of([1.0, 0.875, 0.75, 0.625], EarlyStopper("loss", min_delta=0.25, patience=1))
    enough = await epochs_of([1.0, 0.7, 0.4, 0.1, 0.1], EarlyStopper("loss", min_delta=0.25, patience=0))

    assert (actual, enough) == (3, 5)


@pytest.mark.anyio
async def test_the_training_loss_is_the_mean_over_the_epoch(
    make_trainer: MakeTrainer, make_model: Callable[..., nn.Module], batches: Batches
) -> None:
    """Without any evaluation. With a learning rate of 0 it stays what it is, so the second epoch is one too many."""
    stopper = EarlyStopper("loss", "train", patience=0)
    model = make_model()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(inputs), targets).item() for inputs, targets in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = make_trainer(model=model, optimizers=optimizer, max_duration="5ep", callbacks=[stopper])
    await trainer.fit()

    assert int(trainer.state.timestamp.epoch) == 2
    assert stopper.best == pytest.approx(sum(losses) / 3, rel=1e-12)


@pytest.mark.anyio
async def test_every_epoch_has_a_mean_of_its_own(make_trainer: MakeTrainer) -> None:
    """Two epochs of three batches with the losses 1 to 6: their means are 2 and 5."""
    losses = iter(range(1, 7))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum() * 0.0 + next(losses)

    stopper = EarlyStopper("loss", "train", comp=operator.gt, patience=0)
    await make_trainer(loss=loss, callbacks=[stopper]).fit()

    assert stopper.best == 5.0


@pytest.mark.anyio
async def test_evaluations_outside_of_training_do_not_count(epochs_of: Callable[..., Any], scripted: Scripted) -> None:
    """Asking a finished model for its accuracy, three times, is no reason to stop anything."""
    stopper = EarlyStopper("loss", patience=0)
    model = scripted([0.5, 0.5, 0.5])
    trainer = Trainer(
        model,
        [EVALUATION[0]],
        EVALUATION,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        max_duration="2ep",
        callbacks=[stopper],
    )
    async with trainer:
        for _ in range(3):
            await trainer.eval()

    assert (stopper.best, trainer.state.max_duration) == (None, Time(2, "ep"))


@pytest.mark.anyio
async def test_another_fit_after_the_stop_trains_on(make_trainer: MakeTrainer, scripted: Scripted) -> None:
    """Who asks for more gets another evaluation, and more if that is better."""
    model = scripted([0.5, 0.6, 0.1, 0.2])
    trainer = make_trainer(
        model=model,
        loss=None,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        eval_dataloader=EVALUATION,
        max_duration="9ep",
        callbacks=[EarlyStopper("loss", patience=0)],
    )
    async with trainer:
        await trainer.fit()
        first = int(trainer.state.timestamp.epoch)
        await trainer.fit("9ep")

    assert (first, int(trainer.state.timestamp.epoch)) == (2, 4)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("stopper", "missing"),
    [
        (EarlyStopper("f1"), "metrics/eval/f1"),
        (EarlyStopper("accuracy", "other"), "metrics/other/accuracy"),
    ],
)
async def test_a_metric_that_does_not_exist_is_an_error_that_names_those_there_are(
    make_trainer: MakeTrainer, batches: Batches, stopper: EarlyStopper, missing: str
) -> None:
    """At once, if the evaluator has been through; an evaluator that never was is missed at the end."""
    trainer = make_trainer(eval_dataloader=batches, callbacks=[stopper])
    with pytest.raises(CallbackErrors) as raised:
        await trainer.fit()

    (error,) = raised.value.exceptions
    assert isinstance(error, ConfigurationError)
    assert str(error) == (
        f"EarlyStopper: there is no metric '{missing}'; give, as dataloader_label= and monitor=, the label and the "
        f"name in one of metrics/eval/accuracy, metrics/eval/loss"
    )
    assert int(trainer.state.timestamp.epoch) == (1 if stopper.monitor == "f1" else 2)


@pytest.mark.anyio
async def test_a_run_that_never_evaluates_is_none_of_its_business(make_trainer: MakeTrainer, batches: Batches) -> None:
    """It may be the first of several fits."""
    trainer = make_trainer(eval_dataloader=batches, eval_interval="9ep", callbacks=[EarlyStopper("f1")])
    await trainer.fit()

    assert int(trainer.state.timestamp.epoch) == 2


@pytest.mark.anyio
async def test_it_watches_its_own_evaluator_of_several(make_trainer: MakeTrainer, scripted: Scripted) -> None:
    """One look for each round of evaluations, at the label it was given: the others may do as they like."""
    looks: list[dict[str, float]] = []

    class Look(Callback[State]):
        def eval_after_all(self, state: State, logger: Any) -> None:
            looks.append(dict(state.metrics))

    # By turns: the first evaluator gets worse and worse, the second one, to be watched, better and better.
    model = scripted([value for epoch in range(4) for value in (epoch / 10, 1 - epoch / 10)])
    trainer = make_trainer(
        model=model,
        loss=None,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        eval_dataloader=[Evaluator(EVALUATION, "worse"), Evaluator(EVALUATION, "better")],
        max_duration="4ep",
        callbacks=[EarlyStopper("loss", "better", patience=0), Look()],
    )
    await trainer.fit()

    assert [look["metrics/better/loss"] for look in looks] == [1.0, 0.9, 0.8, 0.7]


@pytest.mark.anyio
async def test_a_resumed_run_ends_where_the_uninterrupted_one_does(
    make_trainer: MakeTrainer, scripted: Scripted
) -> None:
    """The best value and the time since go through a checkpoint, as JSON."""
    values = [0.5, 0.6, 0.7, 0.8, 0.9]

    async def run(*, interrupted: bool, patience: Any) -> int:
        model = scripted(values)
        trainer = make_trainer(
            model=model,
            loss=None,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
            eval_dataloader=EVALUATION,
            max_duration="2ep",
            callbacks=[stopper := EarlyStopper("loss", patience=patience)],
        )
        async with trainer:
            await trainer.fit()
            if interrupted:
                other = EarlyStopper("loss", patience=patience)
                other.load_state_dict(json.loads(json.dumps(stopper.state_dict())))
                trainer.state.callbacks.remove(stopper)
                trainer.state.callbacks.append(other)
            await trainer.fit("8ep")
        return int(trainer.state.timestamp.epoch)

    for patience, expected in ((2, 4), ("3ba", 3)):
        actual = [await run(interrupted=interrupted, patience=patience) for interrupted in (False, True)]
        assert actual == [expected, expected]


# ------------------------------------------------------------------------------------------------------- the rule


def first_stop(values: Sequence[float], patience: int, min_delta: float) -> int | None:
    """The definition for losses: the first look that is more than `patience` looks behind the best one before it."""
    for now in range(len(values)):
        best, best_at = math.inf, 0
        for at in range(now + 1):
            if values[at] < best and (best == math.inf or best - values[at] > min_delta):
                best, best_at = values[at], at
        if now - best_at > patience:
            return now
    return None


@given(
    values=st.lists(st.one_of(st.just(NAN), st.integers(-20, 20).map(float)), max_size=12),
    patience=st.integers(0, 4),
    min_delta=st.sampled_from([0.0, 1.0, 2.5]),
)
def test_it_stops_where_the_definition_says(values: list[float], patience: int, min_delta: float) -> None:
    """Whatever the metric does."""
    state = State(nn.Identity(), max_duration=Time(100, "ba"))
    stopper = EarlyStopper("loss", min_delta=min_delta, patience=patience)
    stopped: list[int] = []
    for look, value in enumerate(values):
        state.timestamp = state.timestamp.to_next_batch()
        state.metrics = {"metrics/eval/loss": value}
        stopper.eval_after_all(state, Logger())
        if state.timestamp >= Time(100, "ba") if state.max_duration is None else state.timestamp >= state.max_duration:
            stopped.append(look)
            break

    expected = first_stop(values, patience, min_delta)
    assert stopped == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [("loss", 0.5), ("MeanSquaredError", 0.5), ("LanguagePerplexity", 0.5), ("accuracy", 1.5), ("f1", 1.5)],
)
def test_the_name_says_whether_lower_is_better(monitor: str, expected: float) -> None:
    """Of 1.0, 0.5 and 1.5, one is best."""
    assert best_of(EarlyStopper(monitor), monitor) == expected


@pytest.mark.parametrize("comp", [torch.less, torch.lt, np.less, operator.lt, lambda value, best: value < best])
def test_a_comparison_may_come_from_anywhere(comp: Any) -> None:
    """Torch's own take nothing but tensors; here they compare numbers."""
    assert best_of(EarlyStopper("accuracy", comp=comp), "accuracy") == 0.5


@pytest.mark.parametrize("comp", [torch.greater, torch.gt, np.greater, operator.gt])
def test_a_comparison_overrules_the_name(comp: Any) -> None:
    """A loss to be maximised."""
    assert best_of(EarlyStopper("loss", comp=comp), "loss") == 1.5


def best_of(stopper: EarlyStopper, monitor: str) -> float | None:
    """The best of 1.0, 0.5 and 1.5."""
    state = State(nn.Identity(), max_duration=Time(100, "ba"))
    for value in (1.0, 0.5, 1.5):
        state.metrics = {f"metrics/eval/{monitor}": value}
        stopper.eval_after_all(state, Logger())
    return stopper.best


def test_an_evaluator_whose_turn_it_is_not_is_waited_for() -> None:
    """It may have an interval of its own: a round without it says nothing, neither good nor bad."""
    state = State(nn.Identity(), max_duration=Time(100, "ba"))
    stopper = EarlyStopper("loss", "slow", patience=0)
    for round_ in range(1, 5):
        state.timestamp = state.timestamp.to_next_batch()
        state.metrics = {"metrics/fast/loss": 1.0} | ({} if round_ % 2 else {"metrics/slow/loss": 1.0 / round_})
        stopper.eval_after_all(state, Logger())
    stopper.fit_end(state, Logger())

    assert (stopper.best, state.max_duration) == (0.25, Time(100, "ba"))


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"monitor": ""}, ConfigurationError, r"monitor='' has to be a name"),
        ({"monitor": "loss", "dataloader_label": 3}, ConfigurationError, r"dataloader_label=3 has to be a name"),
        ({"monitor": "accuracy", "dataloader_label": "train"}, ConfigurationError, r"give monitor='loss'"),
        ({"monitor": "loss", "comp": "less"}, ConfigurationError, r"comp='less' has to be a function"),
        ({"monitor": "loss", "min_delta": -1.0}, ConfigurationError, r"min_delta=-1\.0 has to be a number in \[0, "),
        ({"monitor": "loss", "min_delta": NAN}, ConfigurationError, r"min_delta=nan"),
        ({"monitor": "loss", "patience": -1}, ConfigurationError, r"patience=-1 has to be a whole number, 0 or more"),
        ({"monitor": "loss", "patience": True}, ConfigurationError, r"patience=True has to be a whole number"),
        ({"monitor": "loss", "patience": 1.5}, ConfigurationError, r"patience=1\.5 has to be a whole number"),
        ({"monitor": "loss", "patience": "0.5dur"}, ConfigurationError, r"patience is 0\.5dur; give it in ep, ba"),
        ({"monitor": "loss", "patience": "0ep"}, ConfigurationError, r"patience is 0ep; give more"),
        ({"monitor": "loss", "patience": "soon"}, TimeFormatError, r"'soon' is no time string"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """By name, with what would fit."""
    with pytest.raises(error, match=message):
        EarlyStopper(**arguments)


def test_a_state_of_something_else_is_refused() -> None:
    """And leaves the stopper as it was."""
    stopper = EarlyStopper("loss")
    before = stopper.state_dict()
    with pytest.raises(ConfigurationError, match=r"EarlyStopper cannot go on from a state with best in it"):
        stopper.load_state_dict({"best": 1.0})
    with pytest.raises(TimeFormatError, match="lacks"):
        stopper.load_state_dict({**before, "best": 1.0, "best_at": {}})

    assert stopper.state_dict() == before


def test_a_fresh_state_can_be_loaded() -> None:
    """A checkpoint may be older than the first evaluation."""
    stopper = EarlyStopper("loss")
    stopper.load_state_dict(EarlyStopper("loss").state_dict())

    assert stopper.best is None
