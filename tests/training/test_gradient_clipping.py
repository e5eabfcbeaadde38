"""Gradient clipping: the three bounds, the gradients that the optimizer gets, and the norm that is logged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from eventbus_engine.algorithm import Algorithm, algorithm
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger, LoggerDestination
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import GradientClipping, apply_gradient_clipping
from eventbus_engine.training.algorithms.gradient_clipping import ClippingType

SHAPES = ((4, 3), (4,), (2, 3, 2, 2), ())


def make_module(seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> nn.Module:
    """A matrix, a vector, a kernel and a scalar, with gradients; and a parameter without one."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in SHAPES:
        weight, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        parameters.append(nn.Parameter(weight))
        parameters[-1].grad = gradient * scale
    return nn.ParameterList([*parameters, nn.Parameter(torch.ones(2, dtype=dtype))])


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """Copies of the gradients, in float64."""
    return [p.grad.double().clone() for p in module.parameters() if p.grad is not None]


def norm_reference(values: list[float]) -> float:
    """The L2 norm, one Python float (float64) at a time."""
    return math.sqrt(math.fsum(value * value for value in values))


def units(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What adaptive clipping takes for one unit: a row, a filter, or a whole vector; views of the tensor."""
    return [tensor] if tensor.ndim < 2 else list(tensor)


def adaptive_reference(module: nn.Module, threshold: float) -> list[torch.Tensor]:
    """The paper's rule, unit by unit in float64."""
    clipped = gradients(module)
    weights = [p.detach().double() for p in module.parameters() if p.grad is not None]
    for weight, gradient in zip(weights, clipped, strict=True):
        for unit, own in zip(units(gradient), units(weight), strict=True):
            most = threshold * max(norm_reference(own.flatten().tolist()), 1e-3)
            norm = norm_reference(unit.flatten().tolist())
            if norm > most:
                unit.mul_(most / norm)
    return clipped


@settings(deadline=None)  # torch is slow when it is first called
@given(seed=st.integers(0, 2**32), threshold=st.floats(1e-3, 1e3))
def test_norm_is_that_of_all_gradients_together(seed: int, threshold: float) -> None:
    """One factor for all of them; the norm from before comes back."""
    module = make_module(seed)
    before = gradients(module)
    norm = norm_reference([value for gradient in before for value in gradient.flatten().tolist()])
    actual = apply_gradient_clipping(module, "norm", threshold)
    factor = min(1.0, threshold / norm)

    assert actual is not None
    assert actual.item() == pytest.approx(norm, rel=1e-12)
    for clipped, gradient in zip(gradients(module), before, strict=True):
        # torch divides by the norm and a millionth.
        torch.testing.assert_close(clipped, gradient * factor, rtol=1e-5, atol=0)


@settings(deadline=None)  # torch is slow when it is first called
@given(seed=st.integers(0, 2**32), threshold=st.floats(1e-3, 1e3))
def test_value_bounds_each_element(seed: int, threshold: float) -> None:
    """What lies beyond the threshold is put onto it, the rest is left alone."""
    module = make_module(seed)
    before = gradients(module)

    assert apply_gradient_clipping(module, "value", threshold) is None
    for clipped, gradient in zip(gradients(module), before, strict=True):
        expected = [max(-threshold, min(threshold, value)) for value in gradient.flatten().tolist()]
        assert clipped.flatten().tolist() == expected


@settings(deadline=None)  # torch is slow when it is first called
@given(seed=st.integers(0, 2**32), threshold=st.floats(1e-3, 1e1))
def test_adaptive_equals_the_paper(seed: int, threshold: float) -> None:
    """Each unit is bounded by its own weights."""
    module = make_module(seed)
    expected = adaptive_reference(module, threshold)

    assert apply_gradient_clipping(module, "adaptive", threshold) is None
    for clipped, reference in zip(gradients(module), expected, strict=True):
        torch.testing.assert_close(clipped, reference, rtol=1e-12, atol=0)


def test_adaptive_takes_weights_for_no_smaller_than_a_thousandth() -> None:
    """Units that begin at zero can leave it."""
    module = nn.Linear(2, 2, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    apply_gradient_clipping(module, "adaptive", 0.1)

    assert module.weight.grad is not None
    assert module.weight.grad.norm(dim=1).tolist() == pytest.approx([1e-4, 1e-4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
def test_other_precisions_agree_with_float64(clipping_type: ClippingType, dtype: torch.dtype) -> None:
    """As far as their own digits go, and in their own type."""
    module, reference = make_module(dtype=dtype), make_module(dtype=dtype).double()
    for narrow, wide in zip(module.parameters(), reference.parameters(), strict=True):
        wide.grad = None if narrow.grad is None else narrow.grad.double()
    apply_gradient_clipping(module, clipping_type, 0.1)
    apply_gradient_clipping(reference, clipping_type, 0.1)

    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {dtype}
    for clipped, expected in zip(gradients(module), gradients(reference), strict=True):
        torch.testing.assert_close(clipped, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_norm_too_large_for_half_precision_is_a_number_all_the_same() -> None:
    """float16 ends at 65504: with an infinite norm every gradient would become zero."""
    module = make_module(dtype=torch.float16, scale=2e4)
    expected = norm_reference([value for gradient in gradients(module) for value in gradient.flatten().tolist()])
    actual = apply_gradient_clipping(module, "norm", 1.0)
    after = norm_reference([value for gradient in gradients(module) for value in gradient.flatten().tolist()])

    assert actual is not None
    assert actual.item() == pytest.approx(expected, rel=1e-5)
    assert expected > 65504
    assert after == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
def test_what_is_small_enough_is_left_alone(clipping_type: ClippingType) -> None:
    """Bit for bit; and a parameter without a gradient gets none."""
    module = make_module(scale=1e-9)
    before = gradients(module)
    apply_gradient_clipping(module, clipping_type, 1.0)

    assert all(torch.equal(*pair) for pair in zip(gradients(module), before, strict=True))
    assert [p.grad is None for p in module.parameters()] == [False] * 4 + [True]


def test_a_model_without_gradients_has_the_norm_zero() -> None:
    """As before the first backward pass, or where everything is frozen."""
    assert apply_gradient_clipping(nn.Linear(2, 2), "norm", 1.0) == torch.tensor(0.0)
    assert apply_gradient_clipping(nn.ReLU(), "adaptive", 1.0) is None


@pytest.mark.parametrize("call", [GradientClipping, lambda *options: apply_gradient_clipping(nn.ReLU(), *options)])
def test_arguments_that_do_not_fit_are_refused(call: Callable[..., Any]) -> None:
    """The error names the argument, its value and what would fit; in the function and in the class."""
    for threshold in (0, -1, math.nan, math.inf, "1"):
        with pytest.raises(ConfigurationError, match=r"clipping_threshold=.* \(0, inf\)"):
            call("norm", threshold)
    with pytest.raises(ConfigurationError, match=r"clipping_type='global' is not one of \('norm', 'value', 'adaptive'"):
        call("global", 1.0)


@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
def test_sparse_gradients_are_refused(clipping_type: ClippingType) -> None:
    """The error names the parameter and the way out."""
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True))
    model(torch.tensor([0, 1])).sum().backward()

    with pytest.raises(ConfigurationError, match=r"gradient of 0\.weight is sparse .* sparse=False"):
        apply_gradient_clipping(model, clipping_type, 1.0)


class Norms(LoggerDestination):
    """Keeps the norms that are logged, by step."""

    def __init__(self) -> None:
        self.logged: dict[int, float] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "gradient_clipping/norm" in metrics:
            assert step is not None
            self.logged[step] = metrics["gradient_clipping/norm"]


class Seen(Algorithm[State, Event]):
    """Keeps the gradients on an event."""

    def __init__(self, event: Event, **options: Any) -> None:
        self.event = event
        self.kept: list[list[torch.Tensor]] = []
        for option, value in options.items():
            setattr(self, option, value)

    def match(self, event: Event, state: State) -> bool:
        return event == self.event

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.kept.append(gradients(state.model))


@pytest.mark.anyio
@pytest.mark.parametrize("microbatches", [1, 3])
async def test_the_optimizer_gets_the_clipped_gradient_of_the_whole_batch(
    make_trainer: Callable[..., Trainer], make_model: Callable[..., nn.Module], microbatches: int
) -> None:
    """One SGD step of it is as long as the threshold allows, and the logged norm is that from before."""
    model, norms = make_model(), Norms()
    unclipped = Seen(Event.AFTER_TRAIN_BATCH, run_before=["GradientClipping"])
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    await make_trainer(
        model=model,
        algorithms=[GradientClipping("norm", 0.01), unclipped],
        loggers=[norms],
        microbatches=microbatches,
        max_duration="1ba",
    ).fit()
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    expected = norm_reference([value for gradient in unclipped.kept[0] for value in gradient.flatten().tolist()])

    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)  # the learning rate times the threshold
    assert norms.logged == {1: pytest.approx(expected, rel=1e-5)}
    assert expected > 0.01


@pytest.mark.anyio
@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
async def test_a_generous_threshold_changes_nothing(
    make_trainer: Callable[..., Trainer], make_model: Callable[..., nn.Module], clipping_type: ClippingType
) -> None:
    """Bit for bit; only the norm is logged."""
    plain, clipped, norms = make_model(), make_model(), Norms()
    await make_trainer(model=plain).fit()
    await make_trainer(model=clipped, algorithms=[GradientClipping(clipping_type, 1e6)], loggers=[norms]).fit()

    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), clipped.parameters(), strict=True))
    assert sorted(norms.logged) == ([1, 2, 3, 4, 5, 6] if clipping_type == "norm" else [])


@algorithm(Event.AFTER_TRAIN_BATCH, run_before=["GradientClipping"])
async def sharpen(event: Event, state: State, logger: Logger) -> None:
    """Replaces the gradients, as an algorithm does that backpropagates once more."""
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)


@algorithm(Event.AFTER_TRAIN_BATCH)
def double(event: Event, state: State, logger: Logger) -> None:
    """Changes the gradients, and says nothing about order."""
    for parameter in state.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


@pytest.mark.anyio
@pytest.mark.parametrize("other", [sharpen, double])
@pytest.mark.parametrize("clipping_first", [True, False])
async def test_it_clips_after_everything_that_changes_gradients(
    make_trainer: Callable[..., Trainer], other: Algorithm[Any, Any], clipping_first: bool
) -> None:
    """In either order of registration the bound holds for what the optimizer gets."""
    clipping, seen = GradientClipping("value", 1e-3), Seen(Event.BATCH_END)
    algorithms = [clipping, other] if clipping_first else [other, clipping]
    trainer = make_trainer(algorithms=[*algorithms, seen], max_duration="1ba")
    order = trainer.engine.explain(Event.AFTER_TRAIN_BATCH).order
    await trainer.fit()

    assert order == (other.name, "gradient_clipping")
    assert max(gradient.abs().max().item() for gradient in seen.kept[0]) == pytest.approx(1e-3)


def test_it_runs_after_the_gradients_are_complete() -> None:
    """Of all forty events on one; and where there is a norm to log, on one more."""
    clipping, state = GradientClipping("norm", 1.0), State(nn.Linear(2, 2))
    before = {event for event in Event if clipping.match(event, state)}
    clipping.apply(Event.AFTER_TRAIN_BATCH, state, Logger())
    after = {event for event in Event if clipping.match(event, state)}
    clipping.apply(Event.BATCH_END, state, Logger())

    assert before == {Event.AFTER_TRAIN_BATCH}
    assert after == {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}
    assert {event for event in Event if clipping.match(event, state)} == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
def test_clipping_does_not_wait_for_the_device(clipping_type: ClippingType) -> None:
    """Not one synchronisation, and the numbers of the CPU."""
    module = make_module().cuda()
    for parameter, original in zip(module.parameters(), make_module().parameters(), strict=True):
        parameter.grad = None if original.grad is None else original.grad.cuda()
    expected = make_module()
    apply_gradient_clipping(expected, clipping_type, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_gradient_clipping(module, clipping_type, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    for clipped, reference in zip(gradients(module), gradients(expected), strict=True):
        torch.testing.assert_close(clipped.cpu(), reference, rtol=1e-12, atol=0)
