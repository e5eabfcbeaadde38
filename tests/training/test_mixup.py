"""MixUp: the combination, its distribution, its private randomness, and targets that come out as they went in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time
from eventbus_engine.training.algorithms import MixUp, mixup_batch
from eventbus_engine.training.state import State


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


def test_loss_sees_mixed_targets_and_finds_the_labels_afterwards() -> None:
    """Inputs are mixed for the forward pass, targets for the loss alone."""
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 1, 0])
    state = make_state(batch=(inputs, labels))
    mixup = MixUp(alpha=1.0)
    mixup.apply(Event.BEFORE_FORWARD, state, Logger())
    forward = state.batch_get_item(0)
    state.outputs = torch.zeros(5, 3)
    mixup.apply(Event.BEFORE_LOSS, state, Logger())
    during = state.batch_get_item(1)
    mixup.apply(Event.AFTER_LOSS, state, Logger())
    partners = mixup.indices.tolist()
    one_hot = [[float(c == label) for c in range(3)] for label in labels.tolist()]

    assert 0 < mixup.mixing <= 0.5
    assert sorted(partners) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(forward, torch.tensor(mixed_reference(inputs.tolist(), partners, mixup.mixing)))
    torch.testing.assert_close(during, torch.tensor(mixed_reference(one_hot, partners, mixup.mixing)))
    assert state.batch_get_item(1) is labels


def test_after_loss_alone_changes_nothing() -> None:
    """Nothing was mixed in, so nothing is put back."""
    labels = torch.tensor([0, 1])
    state = make_state(batch=(torch.zeros(2, 1), labels))
    MixUp().apply(Event.AFTER_LOSS, state, Logger())

    assert state.batch_get_item(1) is labels


def test_interpolated_loss_equals_the_loss_of_interpolated_targets() -> None:
    """Cross-entropy is linear in the targets, so both ways give one number."""
    losses = []
    for interpolate_loss in (False, True):
        generator = torch.Generator().manual_seed(0)
        inputs, outputs = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        state = make_state(batch=(inputs, torch.tensor([0, 1, 2, 3, 2, 1])), loss_fn=functional.cross_entropy)
        mixup = MixUp(alpha=1.0, interpolate_loss=interpolate_loss)
        for event in (Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
            if event == Event.BEFORE_LOSS:
                state.outputs = outputs
            elif event == Event.AFTER_LOSS:
                state.loss = functional.cross_entropy(outputs, state.batch_get_item(1))
            if mixup.match(event, state):
                mixup.apply(event, state, Logger())
        assert state.loss is not None
        losses.append(float(state.loss))

    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] != pytest.approx(float(functional.cross_entropy(outputs, state.batch_get_item(1))), rel=1e-3)


@pytest.mark.parametrize(
    ("interpolate_loss", "expected"),
    [
        (False, {Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS}),
        (True, {Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD}),
    ],
)
def test_mixup_runs_where_its_mode_needs_it(interpolate_loss: bool, expected: set[Event]) -> None:
    """Of all forty events, three or two; and the flag is a plain bool for passes to read."""
    state = make_state()
    mixup = MixUp(interpolate_loss=interpolate_loss)

    assert {event for event in Event if mixup.match(event, state)} == expected
    assert mixup.interpolate_loss is interpolate_loss


def test_draws_belong_to_the_seed_and_the_batch() -> None:
    """Each microbatch differs; a run that resumes at a batch draws what the first one drew there."""

    def coefficients(mixup: MixUp, seed: int, batches: list[int], microbatches: int = 2) -> list[float]:
        drawn = []
        for batch in batches:
            state = make_state(batch=(torch.zeros(4, 1), torch.zeros(4)), seed=seed, batches=batch)
            for _ in range(microbatches):
                mixup.apply(Event.BEFORE_FORWARD, state, Logger())
                drawn.append(mixup.mixing)
        return drawn

    before = torch.get_rng_state()
    whole = coefficients(MixUp(), 1, [0, 1, 2])

    assert len(set(whole)) == 6
    assert coefficients(MixUp(), 1, [2]) == whole[4:]
    assert coefficients(MixUp(), 2, [0, 1, 2]) != whole
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_are_no_single_tensor_are_refused() -> None:
    """The error says what came and how to point at the tensor."""
    state = make_state(batch=([torch.zeros(2), torch.zeros(2)], torch.zeros(2)))

    with pytest.raises(BatchError, match=r"MixUp needs the input to be one tensor, got list\(.*\); point input_key"):
        MixUp().apply(Event.BEFORE_FORWARD, state, Logger())


def test_mixup_names_itself_and_its_conflict() -> None:
    """Traces say `mixup`, not `mix_up`; the engine warns beside CutMix."""
    assert MixUp.name == "mixup"
    assert MixUp.conflicts_with == ("CutMix",)
