"""Schedulers by time strings: the formulas, the units, and what they do to the optimizers of a run."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError, TimeFormatError
from eventbus_engine.time import Time
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.learning_rates import set_learning_rates, step_schedulers
from eventbus_engine.training.schedulers import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
    TimedScheduler,
)

MakeModel = Callable[..., nn.Module]
MakeTrainer = Callable[..., Trainer]
Schedule = Callable[[State], float]

EPOCHS, LENGTH = 5, 8
TOTAL = EPOCHS * LENGTH


class Stream:
    """A loader that does not know its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def make_state(max_duration: str | None = f"{EPOCHS}ep", loader: Any = "a list") -> State:
    """The state at the start of a run of five epochs of eight batches of four samples."""
    state = State(
        nn.Linear(1, 1),
        train_dataloader=[0] * LENGTH if loader == "a list" else loader,
        max_duration=None if max_duration is None else Time.from_timestring(max_duration),
    )
    state.optimizers.append(SGD(state.model.parameters(), lr=0.5))
    return state


def moments(state: State, batches: int = TOTAL) -> Iterator[int]:
    """Move the state through a run, and yield how many batches are over; the last time after the last of them."""
    for batch in range(batches):
        yield batch
        state.timestamp = state.timestamp.to_next_batch(samples=4, tokens=40, duration=timedelta(seconds=0.25))
        if state.timestamp.batch_in_epoch == LENGTH:
            state.timestamp = state.timestamp.to_next_epoch()
    yield batches


def course(schedule: Schedule, state: State | None = None) -> list[float]:
    """The factors from before the first batch to after the last."""
    state = state or make_state()
    return [schedule(state) for _ in moments(state)]


# --------------------------------------------------------------------------------------------------------- formulas


def cosine(x: float, low: float) -> float:
    """Half a cosine from 1 at 0 to `low` at 1."""
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * x))


def restarts(t: int, first: int, growth: int, low: float) -> float:
    """Cosines of `first`, `first * growth`, … batches, one after another."""
    begin, length = 0, first
    while t >= begin + length:
        begin, length = begin + length, length * growth
    return cosine((t - begin) / length, low)


def warm(t: int, warmup: int, after: float) -> float:
    """The line of the warm-up, then `after`."""
    return t / warmup if t < warmup else after


FORMULAS: dict[str, tuple[TimedScheduler, Callable[[int], float]]] = {
    "constant": (ConstantScheduler(0.3, "12ba"), lambda t: 0.3 if t < 12 else 1.0),
    "constant, the whole run": (ConstantScheduler(), lambda t: 1.0),
    "step": (StepScheduler("2ep", gamma=0.5), lambda t: 0.5 ** (t // 16)),
    "step of a fraction": (StepScheduler("0.1dur"), lambda t: 0.1 ** (t // 4)),
    "milestones": (
        MultiStepScheduler(["2ep", "0.8dur", "37ba"], gamma=0.2),
        lambda t: 0.2 ** ((t >= 16) + (t >= 32) + (t >= 37)),
    ),
    "linear": (LinearScheduler(), lambda t: 1 - t / 40),
    "linear, other ends": (LinearScheduler(0.2, 3.0, "25ba"), lambda t: 0.2 + 2.8 * min(t / 25, 1)),
    "exponential": (ExponentialScheduler(0.7), lambda t: 0.7 ** (t / 8)),
    "exponential by samples": (ExponentialScheduler(0.9, "6sp"), lambda t: 0.9 ** (4 * t / 6)),
    "cosine": (CosineAnnealingScheduler(), lambda t: cosine(t / 40, 0.0)),
    "cosine, cut short": (CosineAnnealingScheduler("3ep", 0.1), lambda t: cosine(min(t / 24, 1), 0.1)),
    "restarts": (CosineAnnealingWarmRestartsScheduler("5ba"), lambda t: restarts(t, 5, 1, 0.0)),
    "longer restarts": (CosineAnnealingWarmRestartsScheduler("5ba", 2, 0.2), lambda t: restarts(t, 5, 2, 0.2)),
    "polynomial": (PolynomialScheduler(3), lambda t: (1 - t / 40) ** 3),
    "polynomial, cut short": (
        PolynomialScheduler(0.5, "0.5dur", 0.1),
        lambda t: 0.1 + 0.9 * (1 - min(t / 20, 1)) ** 0.5,
    ),
    "warm-up, constant": (ConstantWithWarmupScheduler("10ba", 0.8), lambda t: 0.8 * warm(t, 10, 1.0) if t < 40 else 1),
    "warm-up, linear": (
        LinearWithWarmupScheduler("1ep", 0.6, 0.1),
        lambda t: 0.6 * t / 8 if t < 8 else 0.6 - 0.5 * (t - 8) / 32,
    ),
    "warm-up, milestones": (
        MultiStepWithWarmupScheduler("10ba", ["2ep", "0.9dur"]),
        lambda t: warm(t, 10, 0.1 ** ((t >= 16) + (t >= 36))),
    ),
    "warm-up, cosine": (
        CosineAnnealingWithWarmupScheduler("0.1dur", alpha_f=0.05),
        lambda t: warm(t, 4, cosine((t - 4) / 36, 0.05)),
    ),
    "warm-up, cosine, cut short": (
        CosineAnnealingWithWarmupScheduler("3ba", "20ba"),
        lambda t: warm(t, 3, cosine(min((t - 3) / 17, 1), 0.0)),
    ),
    "warm-up, polynomial": (
        PolynomialWithWarmupScheduler("10ba"),
        lambda t: warm(t, 10, (1 - (t - 10) / 30) ** 2),
    ),
    "no warm-up": (LinearWithWarmupScheduler("0ba"), lambda t: 1 - t / 40),
}


@pytest.mark.parametrize(("schedule", "formula"), FORMULAS.values(), ids=FORMULAS.keys())
def test_schedule_equals_its_formula_over_a_whole_run(schedule: Schedule, formula: Callable[[int], float]) -> None:
    """Written down here once more, in batches, whatever units the schedule was given in."""
    assert course(schedule) == pytest.approx([formula(t) for t in range(TOTAL + 1)], rel=1e-12, abs=1e-15)


TORCHS: dict[str, tuple[TimedScheduler, Callable[[Any], Any]]] = {
    "StepLR": (StepScheduler("7ba", 0.5), lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
    "MultiStepLR": (MultiStepScheduler(["5ba", "3ep"]), lambda o: lr_scheduler.MultiStepLR(o, [5, 24])),
    "ConstantLR": (ConstantScheduler(0.25, "9ba"), lambda o: lr_scheduler.ConstantLR(o, 0.25, 9)),
    "LinearLR": (LinearScheduler(0.2, 0.9, "30ba"), lambda o: lr_scheduler.LinearLR(o, 0.2, 0.9, 30)),
    "ExponentialLR": (ExponentialScheduler(0.9, "1ba"), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "CosineAnnealingLR": (CosineAnnealingScheduler(), lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL)),
    "CosineAnnealingWarmRestarts": (
        CosineAnnealingWarmRestartsScheduler("5ba", 2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    ),
    "PolynomialLR": (PolynomialScheduler(2), lambda o: lr_scheduler.PolynomialLR(o, TOTAL, 2.0)),
}


@pytest.mark.parametrize(("schedule", "torchs"), TORCHS.values(), ids=TORCHS.keys())
def test_schedule_equals_torchs_own_where_they_are_the_same(schedule: Schedule, torchs: Callable[[Any], Any]) -> None:
    """Torch's, stepped with every batch, go through the same learning rates."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    stepped = torchs(optimizer)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        stepped.step()

    assert course(schedule)[:TOTAL] == pytest.approx(rates, rel=1e-9, abs=1e-12)


@given(fraction=st.integers(1, 99), batches=st.integers(1, 2000))
def test_a_fraction_of_the_run_is_reached_with_the_first_batch_past_it(fraction: int, batches: int) -> None:
    """Exactly: 0.7 of ten batches, or 0.29 of a hundred, are no whole numbers in binary."""
    state = make_state(f"{batches}ba")
    schedule = MultiStepScheduler([f"{fraction / 100}dur"])
    due = -(-fraction * batches // 100)
    factors = []
    for batch in (due - 1, due):
        state.timestamp = state.timestamp.copy(batch=batch)
        factors.append(schedule(state))

    assert factors == [1.0, 0.1]


def test_cycles_may_grow_by_any_factor() -> None:
    """Torch's grow by whole numbers only; after 4 and 6 batches the third cycle has 9."""
    factors = course(CosineAnnealingWarmRestartsScheduler("4ba", t_mult=1.5))

    assert [factors[t] for t in (0, 4, 10, 19)] == [1.0] * 4
    assert factors[7] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in FORMULAS.values()], ids=FORMULAS.keys())
def test_past_the_end_a_schedule_stays_defined(schedule: Schedule) -> None:
    """A run may go past its max_duration by a part of a batch, and a second fit goes on from there."""
    state = make_state()
    state.timestamp = state.timestamp.copy(epoch=EPOCHS + 1, batch=TOTAL + 8, sample=4 * TOTAL + 32, batch_in_epoch=3)

    assert 0 <= schedule(state) <= 3


def test_a_warm_up_longer_than_the_run_is_all_there_is() -> None:
    """A run cut short for a trial climbs as far as it gets."""
    state = make_state("10ba")
    schedule = CosineAnnealingWithWarmupScheduler("20ba")

    assert [schedule(state) for _ in moments(state, 10)] == pytest.approx([t / 20 for t in range(11)])


# ------------------------------------------------------------------------------------------------------------ units


@pytest.mark.parametrize("max_duration", ["5ep", "40ba", "160sp", "1600tok", "10s"])
def test_a_run_may_be_measured_in_any_unit(max_duration: str) -> None:
    """It moves with the batches in all of them: time is counted in parts of an epoch and of a second."""
    actual = course(LinearScheduler(), make_state(max_duration))

    assert actual == pytest.approx([1 - t / 40 for t in range(TOTAL + 1)], rel=1e-12, abs=1e-15)


def test_a_loader_of_unknown_length_is_enough_where_nothing_has_to_be_converted() -> None:
    """Milestones at the end of an epoch, and times in the unit of max_duration."""
    for schedule, max_duration in [
        (MultiStepScheduler(["2ep", "30ba", "0.8dur"]), "5ep"),
        (StepScheduler("2ep"), "40ba"),
        (CosineAnnealingWithWarmupScheduler("6ba"), "40ba"),
        (MultiStepWithWarmupScheduler("12ba", ["2ep"]), "5ep"),
    ]:
        assert course(schedule, make_state(max_duration, Stream())) == course(schedule, make_state(max_duration))


@pytest.mark.parametrize(
    ("schedule", "max_duration", "message"),
    [
        (
            LinearScheduler(),
            "5ep",
            r"schedule of 1\.0dur .*length \(__len__\), or give 1\.0dur and max_duration in batch",
        ),
        (ExponentialScheduler(0.9), "40ba", r"schedule of 1ep .* does not say how many"),
        (
            CosineAnnealingWithWarmupScheduler("1ep"),
            "40ba",
            r"after 1ep and ends at 1\.0dur .* in ep and ba; .* length",
        ),
        (MultiStepScheduler(["0.5dur"]), "5ep", r"schedule of 0\.5dur moves with the batches of an epoch"),
    ],
)
def test_an_epoch_of_unknown_length_cannot_be_converted(schedule: Schedule, max_duration: str, message: str) -> None:
    """The error says what to give, before the first batch."""
    loaders: list[Any] = [Stream(), [], None]
    for loader in loaders:
        with pytest.raises(ConfigurationError, match=message):
            schedule(make_state(max_duration, loader))


def test_units_that_nothing_connects_are_refused() -> None:
    """Nobody knows how many samples a batch will have."""
    with pytest.raises(ConfigurationError, match=r"after 20sp and ends at 1\.0dur .* in sp and ba; give both in ba"):
        CosineAnnealingWithWarmupScheduler("20sp")(make_state("40ba"))


def test_a_fraction_of_a_run_without_an_end_is_refused() -> None:
    """The error says what to give the run."""
    with pytest.raises(ConfigurationError, match=r"1\.0dur is a fraction of the run: give the run a max_duration"):
        LinearScheduler()(make_state(None))


def test_a_run_that_is_stopped_before_its_first_batch_is_over() -> None:
    """`stop_training` sets max_duration to nothing."""
    state = make_state()
    state.stop_training()

    assert LinearScheduler(1.0, 0.25)(state) == 0.25


# -------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepScheduler("0ba"), r"StepScheduler: step_size=0ba has to be more than 0, in ep, ba,"),
        (lambda: StepScheduler("2iter"), r"StepScheduler: step_size=2iter has to be more than 0, in ep, ba,"),
        (lambda: StepScheduler("2ba", gamma=-1), r"StepScheduler: gamma=-1 has to be a number in \[0, inf\)"),
        (lambda: MultiStepScheduler(["1ba", "-2ba"]), r"MultiStepScheduler: milestones=-2ba has to be more than 0"),
        (lambda: ConstantScheduler(math.nan), r"ConstantScheduler: alpha=nan has to be a number"),
        (lambda: LinearScheduler(alpha_f=math.inf), r"LinearScheduler: alpha_f=inf has to be a number"),
        (lambda: ExponentialScheduler("0.9"), r"ExponentialScheduler: gamma='0.9' has to be a number"),  # type: ignore[arg-type]
        (lambda: CosineAnnealingScheduler(alpha_f=-0.1), r"CosineAnnealingScheduler: alpha_f=-0\.1"),
        (lambda: CosineAnnealingWarmRestartsScheduler("2ba", 0.5), r"t_mult=0\.5 has to be a number in \[1, inf\)"),
        (lambda: PolynomialScheduler(-2), r"PolynomialScheduler: power=-2 has to be a number"),
        (
            lambda: LinearWithWarmupScheduler("-1ba"),
            r"LinearWithWarmupScheduler: t_warmup=-1ba has to be 0 or more, in",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    """The error names the class, the argument, its value and the range."""
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("time", ["ten batches", "10", 10, None, 0.5])
def test_a_time_needs_its_unit(time: Any) -> None:
    """A bare number could be anything."""
    with pytest.raises(TimeFormatError):
        CosineAnnealingScheduler(time)


def test_one_milestone_needs_no_list() -> None:
    """A string is not taken for a list of characters."""
    assert MultiStepScheduler("3ba").milestones == [Time(3, "ba")]


# ------------------------------------------------------------------------------------------- what optimizers are set


def rates(state: State) -> list[float]:
    """The learning rate of every group of every optimizer."""
    return [float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups]


def test_every_group_is_scaled_from_its_own_rate() -> None:
    """Of every optimizer, again and again, and from one that was zero on the way."""
    state = make_state()
    weight, bias = state.model.parameters()
    state.optimizers[:] = [
        SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.3}]),
        Adam([weight], lr=0.7),
    ]
    state.schedulers = [ConstantScheduler(0.0, "1ba"), lambda state: 2.0]
    seen = []
    for _ in moments(state, 2):
        set_learning_rates(state)
        seen.append(rates(state))

    assert seen == [[0.0, 0.0, 0.0], [0.2, 0.6, 1.4], [0.2, 0.6, 1.4]]


def test_a_group_that_joins_later_is_scaled_from_the_rate_it_comes_with() -> None:
    """As when layers are unfrozen."""
    state = make_state()
    state.schedulers = [lambda state: 0.5]
    set_learning_rates(state)
    state.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.2})
    state.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    for _ in range(2):
        set_learning_rates(state)

    assert rates(state) == [0.25, 0.1, 0.25]


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    """A compiled step has captured it."""
    state = make_state()
    rate = torch.tensor(0.5)
    state.optimizers[:] = [Adam(state.model.parameters(), lr=rate, foreach=False)]
    state.schedulers = [LinearScheduler(t_max="4ba")]
    seen = []
    for _ in moments(state, 3):
        set_learning_rates(state)
        seen.append(rate.item())

    assert state.optimizers[0].param_groups[0]["lr"] is rate
    assert seen == [0.5, 0.375, 0.25, 0.125]


def test_without_timed_schedulers_the_rates_are_left_alone() -> None:
    """Nothing is written into the groups either."""
    state = make_state()
    before = dict(state.optimizers[0].param_groups[0])
    set_learning_rates(state)

    assert state.optimizers[0].param_groups[0] == before


@pytest.mark.parametrize("factor", [None, "0.5", math.nan, math.inf, -0.1, 1j])
def test_what_is_no_factor_is_refused(factor: Any) -> None:
    """The error names the scheduler and what it returned."""
    state = make_state()

    def broken(state: State) -> Any:
        return factor

    state.schedulers = [broken]

    with pytest.raises(
        ConfigurationError, match=r"the scheduler <function .*broken.* returned .*; it has to return the"
    ):
        set_learning_rates(state)


def test_torchs_schedulers_and_timed_ones_multiply_on_one_optimizer() -> None:
    """Each step of torch's starts from what torch's left, not from what the timed one made of it, be it zero."""
    state = make_state()
    halve = lr_scheduler.ExponentialLR(state.optimizers[0], 0.5)
    state.schedulers = [halve, LinearScheduler(0.0, 1.0, "4ba")]
    seen = []
    for batch in moments(state, 6):
        set_learning_rates(state)
        seen += rates(state)
        if batch % 2:
            state.optimizers[0].step()
            step_schedulers(state)

    torchs, timed = (1, 1, 0.5, 0.5, 0.25, 0.25, 0.125), (0, 0.25, 0.5, 0.75, 1, 1, 1)

    assert seen == [0.5 * one * other for one, other in zip(torchs, timed, strict=True)]


def test_torchs_schedulers_keep_their_hands_off_other_optimizers() -> None:
    """One optimizer has both, the other the timed one alone, from its initial rate, whatever its rate is by now."""
    state = make_state()
    other = Adam([nn.Parameter(torch.zeros(1))], lr=0.01)
    other.param_groups[0]["initial_lr"] = 0.8
    state.optimizers.append(other)
    state.schedulers = [lr_scheduler.LinearLR(state.optimizers[0], 0.5), lambda state: 0.25]
    set_learning_rates(state)

    assert rates(state) == [0.5 * 0.5 * 0.25, 0.8 * 0.25]


# -------------------------------------------------------------------------------------------------------- in a run


class Watch(Callback[State]):
    """Notes the learning rate that each batch begins with and is stepped with."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.stepped: list[float] = []

    def batch_start(self, state: State, logger: Any) -> None:
        """Before anything of the batch has happened."""
        self.begun += rates(state)

    def after_train_batch(self, state: State, logger: Any) -> None:
        """Right before the optimizers step."""
        self.stepped += rates(state)


@pytest.mark.anyio
@pytest.mark.parametrize("every_batch", [False, True])
@pytest.mark.parametrize("offload", [False, True])
async def test_timed_schedulers_act_on_every_batch_from_the_first_on(
    make_trainer: MakeTrainer, every_batch: bool, offload: bool
) -> None:
    """A warm-up from zero holds for batch 0; `step_schedulers_every_batch` is about torch's."""
    watch = Watch()
    trainer = make_trainer(
        max_duration="2ep",
        schedulers=CosineAnnealingWithWarmupScheduler("1ep"),
        step_schedulers_every_batch=every_batch,
        offload=offload,
        callbacks=[watch],
    )
    await trainer.fit()
    expected = [0.1 * warm(t, 3, cosine((t - 3) / 3, 0.0)) for t in range(6)]

    assert watch.begun == watch.stepped == pytest.approx(expected, rel=1e-12)


@pytest.mark.anyio
async def test_a_run_is_trained_as_with_torchs_own_scheduler(make_trainer: MakeTrainer, make_model: MakeModel) -> None:
    """The same weights, up to the last digits of the recursion by which torch computes its rates."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.3)
    await make_trainer(
        model=model,
        optimizers=optimizer,
        schedulers=lr_scheduler.CosineAnnealingLR(optimizer, 6),
        step_schedulers_every_batch=True,
    ).fit()
    other = make_model()
    await make_trainer(
        model=other, optimizers=SGD(other.parameters(), lr=0.3), schedulers=CosineAnnealingScheduler()
    ).fit()

    for actual, expected in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.anyio
async def test_torchs_schedulers_step_with_the_epoch_beside_timed_ones(
    make_trainer: MakeTrainer, make_model: MakeModel
) -> None:
    """And the rate that EPOCH_END sees is already the one of the next epoch."""
    model, watch = make_model(), Watch()
    optimizer = SGD(model.parameters(), lr=1.0)
    ended: list[float] = []

    class Look(Callback[State]):
        def epoch_end(self, state: State, logger: Any) -> None:
            ended.extend(rates(state))

    await make_trainer(
        model=model,
        optimizers=optimizer,
        schedulers=[lr_scheduler.StepLR(optimizer, 1, 0.5), LinearScheduler()],
        callbacks=[watch, Look()],
    ).fit()
    torchs = [1, 1, 1, 0.5, 0.5, 0.5]

    assert watch.begun == pytest.approx([rate * (1 - t / 6) for t, rate in enumerate(torchs)], rel=1e-12)
    assert ended == pytest.approx([0.5 * 0.5, 0.0])


@pytest.mark.anyio
async def test_a_run_that_resumes_goes_on_with_the_rates_of_the_uninterrupted_one(
    make_trainer: MakeTrainer, make_model: MakeModel
) -> None:
    """All it takes is the optimizer's own state and the timestamp: the scheduler has nothing to save."""

    def make(watch: Watch) -> Trainer:
        model = make_model()
        optimizer = SGD([{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (1, 2, 3, 4), strict=True)])
        return make_trainer(
            model=model,
            optimizers=optimizer,
            schedulers=[PolynomialWithWarmupScheduler("2ba"), lambda state: 0.5],
            max_duration="3ep",
            callbacks=[watch],
        )

    whole, first, second = Watch(), Watch(), Watch()
    await make(whole).fit()
    before = make(first)
    before.state.max_duration = Time(3, "ep")

    class Stop(Callback[State]):
        def epoch_checkpoint(self, state: State, logger: Any) -> None:
            state.stop_training()

    before.state.callbacks.append(Stop())
    await before.fit()
    after = make(second)
    after.state.optimizers[0].load_state_dict(before.state.optimizers[0].state_dict())
    after.state.timestamp.load_state_dict(before.state.timestamp.state_dict())
    await after.fit()

    assert len(first.begun) == 4 * 3
    assert first.begun + second.begun == whole.begun


@pytest.mark.anyio
async def test_fit_refuses_a_schedule_it_cannot_know_before_it_trains(make_trainer: MakeTrainer) -> None:
    """The weights are still the initial ones."""

    class Batches:
        async def __aiter__(self) -> AsyncIterator[tuple[Tensor, Tensor]]:
            await anyio.lowlevel.checkpoint()
            yield torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)

    trainer = make_trainer(train_dataloader=Batches(), schedulers=LinearScheduler())
    before = [parameter.clone() for parameter in trainer.state.model.parameters()]

    with pytest.raises(ConfigurationError, match="train_dataloader does not say how many"):
        await trainer.fit()
    for actual, expected in zip(trainer.state.model.parameters(), before, strict=True):
        assert actual.equal(expected)


async def warm_up(state: State) -> float:
    """An async function in the place of a scheduler."""
    return 1.0


@pytest.mark.parametrize("scheduler", [StepScheduler, lr_scheduler.StepLR, warm_up, "cosine", 3])
def test_what_is_no_scheduler_is_refused(make_trainer: MakeTrainer, scheduler: Any) -> None:
    """A class, an async function, or anything that is neither stepped nor called."""
    with pytest.raises(ConfigurationError, match=r"is no scheduler; give instances of .* or plain functions \(state\)"):
        make_trainer(schedulers=scheduler)
