"""MixUp: the combination, its distribution, its private randomness, and targets that follow their microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm, algorithm
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time
from eventbus_engine.training.algorithms import MixUp, mixup_batch
from eventbus_engine.training.state import State
from eventbus_engine.training.trainer import Trainer


def make_state(batch: Any = None, *, batches: int = 0, model: nn.Module | None = None, **options: Any) -> State:
    """The state of a run of 100 batches, of which `batches` are over."""
    options = {"max_duration": Time(100, "ba"), **options}
    state = State(model or nn.Identity(), **options)
    state.batch = batch
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch()
    return state


def mixed_reference(rows: list[list[float]], partners: list[int], mixing: float) -> list[list[float]]:
    """The definition, one Python float (float64) at a time."""
    return [
        [(1.0 - mixing) * own + mixing * other for own, other in zip(row, rows[partner], strict=True)]
        for row, partner in zip(rows, partners, strict=True)
    ]


@settings(deadline=None)  # torch is slow when it is first called
@given(data=st.data(), samples=st.integers(1, 6), mixing=st.floats(0, 1, allow_subnormal=False))
def test_mixture_equals_the_definition(data: st.DataObject, samples: int, mixing: float) -> None:
    """Inputs are combined with their partners; the partners' targets come back beside the weight."""
    finite = st.floats(-1e3, 1e3, allow_subnormal=False)
    rows = data.draw(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=samples, max_size=samples))
    partners = data.draw(st.permutations(range(samples)))
    target = torch.arange(samples)
    actual, permuted, used = mixup_batch(
        torch.tensor(rows, dtype=torch.float64), target, mixing=mixing, indices=torch.tensor(partners)
    )
    expected = torch.tensor(mixed_reference(rows, partners, mixing), dtype=torch.float64)

    torch.testing.assert_close(actual, expected, rtol=1e-15, atol=1e-12)
    assert permuted.tolist() == partners
    assert used == mixing


@settings(deadline=None)  # torch is slow when it is first called
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_shape_and_precision_are_kept(shape: list[int], dtype: torch.dtype) -> None:
    """Whatever the number of dimensions; targets keep theirs too."""
    target = torch.zeros(shape[0], 2, dtype=torch.int32)
    mixed, permuted, _ = mixup_batch(torch.ones(shape, dtype=dtype), target, generator=torch.Generator())

    assert (list(mixed.shape), mixed.dtype) == (shape, dtype)
    assert (permuted.shape, permuted.dtype) == (target.shape, target.dtype)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_coefficient_is_a_folded_beta(alpha: float) -> None:
    """Mean and spread of `z` over many draws are those of Beta(alpha, alpha), folded at 1/2."""
    generator = torch.Generator().manual_seed(7)
    one = torch.zeros(1, 1)
    draws = [mixup_batch(one, one, alpha=alpha, generator=generator)[2] for _ in range(4000)]
    second_moment = sum((draw - 0.5) ** 2 for draw in draws) / len(draws)

    assert all(0 <= draw <= 0.5 for draw in draws)
    # Folding keeps the distance from 1/2, so its mean square is the variance of the Beta distribution.
    assert second_moment == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)


def test_alpha_zero_mixes_nothing() -> None:
    """The limit of the distribution: each sample on its own."""
    inputs = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    mixed, _, mixing = mixup_batch(inputs, torch.arange(5), alpha=0)

    assert mixing == 0
    assert torch.equal(mixed, inputs)


def test_a_generator_fixes_the_draws_and_spares_the_global_one() -> None:
    """Same seed, same mixture; the global generator does not move."""
    inputs, target = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    before = torch.get_rng_state()
    first = mixup_batch(inputs, target, generator=torch.Generator().manual_seed(3))
    second = mixup_batch(inputs, target, generator=torch.Generator().manual_seed(3))
    other = mixup_batch(inputs, target, generator=torch.Generator().manual_seed(4))

    assert torch.equal(first[0], second[0])
    assert first[2] == second[2] != other[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf, "0.2"])
def test_alpha_out_of_range_is_refused(alpha: Any) -> None:
    """The error names the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"MixUp: alpha=.* \[0, inf\)"):
        MixUp(alpha=alpha)
    with pytest.raises(ConfigurationError, match=r"alpha=.* \[0, inf\)"):
        mixup_batch(torch.zeros(2, 1), torch.zeros(2), alpha=alpha)


@pytest.mark.parametrize("mixing", [-0.1, 1.1, math.nan])
def test_mixing_out_of_range_is_refused(mixing: float) -> None:
    """A combination with a weight outside [0, 1] is not convex."""
    with pytest.raises(ConfigurationError, match=r"mixing=.* \[0, 1\]"):
        mixup_batch(torch.zeros(2, 1), torch.zeros(2), mixing=mixing)


def test_partners_and_targets_have_to_be_as_many_as_the_samples() -> None:
    """The error names the shapes."""
    with pytest.raises(ConfigurationError, match=r"shape \(2,\), not \(3,\)"):
        mixup_batch(torch.zeros(2, 1), torch.zeros(2), indices=torch.tensor([0, 1, 0]))
    with pytest.raises(BatchError, match=r"as many targets as inputs, got \(3,\) and \(2, 1\)"):
        mixup_batch(torch.zeros(2, 1), torch.zeros(3))


class Recorder(nn.Linear):
    """A model of 2 features and 3 classes, and its loss; keeps what both of them were given."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(2, 3, dtype=torch.float64)
        self.inputs: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.inputs.append(input)
        return super().forward(input)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.targets.append(targets)
        return functional.cross_entropy(outputs, targets)


LABELS = [0, 1, 2, 1, 0, 2, 2]


def make_trainer(model: Recorder, algorithms: Sequence[Algorithm[Any, Any]], **options: Any) -> Trainer:
    """A run of three batches of seven samples."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(7, 2, generator=generator, dtype=torch.float64), torch.tensor(LABELS)) for _ in range(3)]
    defaults: dict[str, Any] = {"loss": model.loss, "max_duration": "3ba", "seed": 2}
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return Trainer(model, batches, optimizers=optimizer, algorithms=algorithms, **defaults | options)


@pytest.mark.anyio
@pytest.mark.parametrize("microbatches", [1, 3])
async def test_targets_are_mixed_as_their_inputs_are(microbatches: int) -> None:
    """The whole batch is mixed at once; partners come from other microbatches, too."""
    model, mixup = Recorder(), MixUp(alpha=1.0)
    trainer = make_trainer(model, [mixup], microbatches=microbatches, max_duration="1ba")
    inputs, _ = trainer.state.train_dataloader[0]
    await trainer.fit()
    partners, one_hot = mixup.indices.tolist(), torch.eye(3, dtype=torch.float64)[LABELS]
    expected = [
        torch.tensor(mixed_reference(rows.tolist(), partners, mixup.mixing), dtype=torch.float64)
        for rows in (inputs, one_hot)
    ]

    assert 0 < mixup.mixing <= 0.5
    assert sorted(partners) == [0, 1, 2, 3, 4, 5, 6]
    assert any(sample // 3 != partner // 3 for sample, partner in enumerate(partners))
    assert [len(part) for part in model.inputs] == {1: [7], 3: [3, 3, 1]}[microbatches]
    torch.testing.assert_close(torch.cat(model.inputs), expected[0])
    torch.testing.assert_close(torch.cat(model.targets), expected[1])


@pytest.mark.anyio
async def test_neither_microbatches_nor_the_mode_change_what_is_learnt() -> None:
    """Gradients of the parts add up, and cross-entropy is linear in the targets: all six runs are one."""
    weights = []
    for microbatches in (1, 2, 3):
        for interpolate_loss in (False, True):
            model = Recorder()
            mixup = MixUp(alpha=1.0, interpolate_loss=interpolate_loss)
            await make_trainer(model, [mixup], microbatches=microbatches).fit()
            weights.append(model.weight.detach())
    unmixed = Recorder()
    await make_trainer(unmixed, []).fit()

    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(unmixed.weight, weights[0], atol=1e-3)


@pytest.mark.anyio
async def test_microbatches_may_be_chosen_after_the_mixing() -> None:
    """The loop cuts the batch after BATCH_START, so the partners are cut no earlier."""

    @algorithm(Event.BATCH_START)
    def halve(event: Event, state: State, logger: Logger) -> None:
        state.microbatches = 2

    model = Recorder()
    await make_trainer(model, [MixUp(), halve]).fit()

    assert [len(targets) for targets in model.targets] == [4, 3] * 3


@pytest.mark.anyio
@pytest.mark.parametrize("interpolate_loss", [False, True])
@pytest.mark.parametrize(("microbatches", "due"), [(1, 7), (2, 4)])
async def test_samples_dropped_after_the_mixing_are_noticed(
    microbatches: int, due: int, interpolate_loss: bool
) -> None:
    """The rest would meet the targets of other samples; the error says what has to run first."""

    @algorithm(Event.AFTER_DATALOADER)
    def keep_three(event: Event, state: State, logger: Logger) -> None:
        state.batch = tuple(part[:3] for part in state.batch)

    algorithms = [keep_three, MixUp(interpolate_loss=interpolate_loss)]  # mirrored on the way out
    trainer = make_trainer(Recorder(), algorithms, microbatches=microbatches)

    with pytest.raises(BatchError, match=rf"Tensor\[{due}\] is due; let what drops samples run before MixUp"):
        await trainer.fit()


@pytest.mark.anyio
async def test_targets_made_dense_before_the_mixing_are_noticed() -> None:
    """Their partners are class indices still; the error says where the other algorithm belongs."""

    @algorithm(Event.BEFORE_LOSS)
    def harden(event: Event, state: State, logger: Logger) -> None:
        state.batch_set_item(1, functional.one_hot(state.batch_get_item(1), 3))

    with pytest.raises(BatchError, match=r"target is Tensor\[7, 3\], .* dense after MixUp on BEFORE_LOSS"):
        await make_trainer(Recorder(), [harden, MixUp()]).fit()


def test_more_microbatches_than_the_state_says_are_noticed() -> None:
    """A loop that cuts the batch into more parts than the state says gets an error, not partners at random."""
    state = make_state(batch=(torch.zeros(2, 1), torch.tensor([0, 1])))
    mixup = MixUp()
    mixup.apply(Event.AFTER_DATALOADER, state, Logger())
    state.batch = (torch.zeros(1, 1), torch.tensor([0]))

    with pytest.raises(BatchError, match=r"Tensor\[1\], but of the batch that MixUp has mixed Tensor\[2\] is due"):
        mixup.apply(Event.BEFORE_LOSS, state, Logger())


class FailsOnce(Recorder):
    """Its loss raises when it is called for the time that is given, counted from 0."""

    def __init__(self, failing_call: int) -> None:
        super().__init__()
        self.failing_call = failing_call

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = super().loss(outputs, targets)
        if len(self.targets) - 1 == self.failing_call:
            raise ArithmeticError
        return value


@pytest.mark.anyio
@pytest.mark.parametrize(("interpolate_loss", "failing_call"), [(False, 1), (True, 2), (True, 3)])
async def test_a_batch_that_failed_midway_leaves_nothing_behind(interpolate_loss: bool, failing_call: int) -> None:
    """After an error in the second of three microbatches, training goes on as if that batch had not been there."""

    def options() -> dict[str, Any]:
        mixup = MixUp(alpha=1.0, interpolate_loss=interpolate_loss)
        return {"algorithms": [mixup], "microbatches": 3, "max_duration": "2ba"}

    failed, spared = FailsOnce(failing_call), Recorder()
    async with make_trainer(failed, **options()) as trainer:
        with pytest.raises(ArithmeticError):
            await trainer.fit()
        await trainer.fit()
    trainer = make_trainer(spared, **options())
    del trainer.state.train_dataloader[0]
    await trainer.fit()

    assert torch.equal(failed.weight, spared.weight)


def test_a_batch_that_cannot_be_mixed_does_not_get_the_last_ones_partners() -> None:
    """Whoever trains on it all the same trains on it as it is."""
    state = make_state(batch=(torch.zeros(2, 1), torch.tensor([0, 1])))
    state.outputs = torch.zeros(2, 2)
    mixup = MixUp()
    mixup.apply(Event.AFTER_DATALOADER, state, Logger())
    mixup.apply(Event.BEFORE_LOSS, state, Logger())
    labels = torch.tensor([1, 1])
    state.batch = ([torch.zeros(2, 1)], labels)
    with pytest.raises(BatchError, match="the input to be one tensor"):
        mixup.apply(Event.AFTER_DATALOADER, state, Logger())
    for event in (Event.BEFORE_LOSS, Event.AFTER_LOSS):
        mixup.apply(event, state, Logger())

        assert state.batch_get_item(1) is labels


def test_joining_in_the_middle_of_a_batch_changes_nothing() -> None:
    """The inputs were not mixed, so the targets are not."""
    labels = torch.tensor([0, 1])
    state = make_state(batch=(torch.zeros(2, 1), labels))
    mixup = MixUp()
    for event in (Event.BEFORE_LOSS, Event.AFTER_LOSS):
        mixup.apply(event, state, Logger())

        assert state.batch_get_item(1) is labels


@pytest.mark.parametrize(
    ("interpolate_loss", "expected"),
    [
        (False, {Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS}),
        (True, {Event.AFTER_DATALOADER, Event.BEFORE_BACKWARD}),
    ],
)
def test_mixup_runs_where_its_mode_needs_it(interpolate_loss: bool, expected: set[Event]) -> None:
    """Of all forty events, three or two; and the flag is a plain bool for passes to read."""
    state = make_state()
    mixup = MixUp(interpolate_loss=interpolate_loss)

    assert {event for event in Event if mixup.match(event, state)} == expected
    assert mixup.interpolate_loss is interpolate_loss


def test_draws_belong_to_the_seed_and_the_batch() -> None:
    """A run that resumes at a batch, or tries it again, draws what the first one drew there."""

    def coefficients(mixup: MixUp, seed: int, batches: list[int]) -> list[float]:
        drawn = []
        for batch in batches:
            state = make_state(batch=(torch.zeros(4, 1), torch.zeros(4)), seed=seed, batches=batch)
            mixup.apply(Event.AFTER_DATALOADER, state, Logger())
            drawn.append(mixup.mixing)
        return drawn

    before = torch.get_rng_state()
    whole = coefficients(MixUp(), 1, [0, 1, 1, 2])

    assert len(set(whole)) == 3
    assert whole[1] == whole[2]
    assert coefficients(MixUp(), 1, [2]) == whole[3:]
    assert coefficients(MixUp(), 2, [0, 1, 1, 2]) != whole
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_are_no_single_tensor_are_refused() -> None:
    """The error says what came and how to point at the tensor."""
    state = make_state(batch=([torch.zeros(2), torch.zeros(2)], torch.zeros(2)))

    with pytest.raises(BatchError, match=r"MixUp needs the input to be one tensor, got list\(.*\); point input_key"):
        MixUp().apply(Event.AFTER_DATALOADER, state, Logger())


def test_a_batch_without_a_sample_dimension_is_refused() -> None:
    """There is nothing to pair."""
    state = make_state(batch=(torch.tensor(1.0), torch.tensor(1)))

    with pytest.raises(BatchError, match=r"as many targets as inputs, got \(\) and \(\)"):
        MixUp().apply(Event.AFTER_DATALOADER, state, Logger())


def test_mixup_names_itself_and_its_conflict() -> None:
    """Traces say `mixup`, not `mix_up`; the engine warns beside CutMix."""
    assert MixUp.name == "mixup"
    assert MixUp.conflicts_with == ("CutMix",)
