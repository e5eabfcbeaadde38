"""The gradient penalty: its gradient, its part of each microbatch, and that no graph outlives it."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import GradientPenalty, LabelSmoothing, gradient_penalty

Batches = list[tuple[Tensor, Tensor]]
MakeBatches = Callable[..., Batches]
MakeModel = Callable[..., nn.Module]
MakeTrainer = Callable[..., Trainer]


def smooth_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny classifier whose gradient is smooth everywhere, so that differences converge to derivatives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(dtype)


def new_batch(seed: int = 0, size: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Samples of 4 features and one of 3 classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(0, 3, (size,), generator=generator)


def gradients_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients of the loss, with their graph."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return list(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))


def norm_of(gradients: list[Tensor]) -> Tensor:
    """The norm of all of them as one vector."""
    norm: Tensor = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
    return norm


def objective(model: nn.Module, batch: tuple[Tensor, Tensor], weight: float) -> Tensor:
    """The loss with its penalty, written out for torch to differentiate."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + weight * norm_of(list(gradients))


# ---------------------------------------------------------------------------------------------------- the function


@given(seed=st.integers(0, 10_000), weight=st.floats(0, 10))
def test_the_gradient_equals_the_finite_differences_of_the_penalty(seed: int, weight: float) -> None:
    """Along a direction at random, over all parameters: one that is wrong anywhere is wrong along nearly all."""
    model, batch = smooth_model(seed), new_batch(seed)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    direction = [torch.randn(parameter.shape, generator=generator, dtype=torch.float64) for parameter in parameters]
    found = gradient_penalty(parameters, gradients_of(model, batch), weight)
    actual = sum(float((gradient * way).sum()) for gradient, way in zip(found, direction, strict=True))
    sides = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, way in zip(parameters, direction, strict=True):
                parameter.add_(step * way)
        sides.append(weight * norm_of(gradients_of(model, batch)).item())

    assert actual == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-5, abs=1e-8 * (1 + weight))


def test_a_gradient_of_zero_has_no_penalty() -> None:
    """The norm has no derivative there; 0 is one of its subgradients, and NaN is none."""
    weight = torch.zeros(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(weight.square().sum(), [weight], create_graph=True)

    assert gradient_penalty([weight], [gradient])[0].tolist() == [0.0, 0.0, 0.0]


def test_a_parameter_that_the_gradients_do_not_depend_on_has_no_penalty() -> None:
    """Nor has its gradient anything to do with the norm."""
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    gradients = torch.autograd.grad(used.pow(3).sum() + unused.sum(), [used, unused], create_graph=True)
    penalties = gradient_penalty([used, unused], gradients, weight=1.0)

    assert penalties[0].abs().sum() > 0
    assert penalties[1].tolist() == [0.0, 0.0, 0.0]


def test_the_caller_may_have_grad_mode_off() -> None:
    """The graph of the gradients is all it takes."""
    model, batch = smooth_model(), new_batch()
    parameters = list(model.parameters())
    expected = gradient_penalty(parameters, gradients_of(model, batch))
    gradients = gradients_of(model, batch)
    with torch.no_grad():
        actual = gradient_penalty(parameters, gradients)

    assert all(one.equal(other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_come_as_close_as_they_can(dtype: torch.dtype) -> None:
    """Each parameter gets a gradient of its own type, within the type's precision of the exact one."""
    model = smooth_model(1, dtype)
    reference = copy.deepcopy(model).double()
    batch = new_batch(1, dtype=dtype)
    actual = gradient_penalty(list(model.parameters()), gradients_of(model, batch), weight=0.5)
    exact = gradient_penalty(
        list(reference.parameters()), gradients_of(reference, (batch[0].double(), batch[1])), weight=0.5
    )
    tolerance = 40 * torch.finfo(dtype).eps

    for gradient, expected in zip(actual, exact, strict=True):
        assert (gradient.dtype, gradient.requires_grad) == (dtype, False)
        torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_norm_of_large_half_precision_gradients_is_finite() -> None:
    """Two numbers of 40000 have a norm of 56569, their squares' sum is past what float16 holds."""
    weight = torch.full((2,), 200.0, dtype=torch.float16, requires_grad=True)
    (gradient,) = torch.autograd.grad((100 * weight.square()).sum(), [weight], create_graph=True)
    (penalty,) = gradient_penalty([weight], [gradient], weight=1.0)

    torch.testing.assert_close(penalty.float(), torch.full((2,), 200 / 2**0.5), rtol=1e-2, atol=0)


@pytest.mark.parametrize("gradients", [[], [torch.ones(2)]])
def test_gradients_without_a_graph_are_refused(gradients: list[Tensor]) -> None:
    """Else nothing would be penalised, and nobody would notice."""
    parameters = [torch.ones(2, requires_grad=True) for _ in gradients]

    with pytest.raises(ConfigurationError, match=r"no gradient depends on .* from backward\(create_graph=True\)"):
        gradient_penalty(parameters, gradients)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), "0.1", None])
def test_a_weight_out_of_range_is_refused(weight: Any) -> None:
    """The error names the owner, the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"GradientPenalty: weight=.* has to be a number in \[0, inf\)"):
        GradientPenalty(weight)
    with pytest.raises(ConfigurationError, match=r"gradient_penalty: weight=.* has to be a number in \[0, inf\)"):
        gradient_penalty([], [], weight)


# ------------------------------------------------------------------------------------------------------ in training


class Look(Callback[State]):
    """Notes the gradients that each batch ends with, and its loss."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []
        self.losses: list[float] = []

    def after_train_batch(self, state: State, logger: Any) -> None:
        """Before the optimizers step."""
        found = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        assert not any(gradient.requires_grad for gradient in found)
        self.gradients.append([gradient.clone() for gradient in found])
        assert state.loss is not None
        self.losses.append(state.loss.item())


@pytest.mark.anyio
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("offload", [True, False])
async def test_training_equals_the_objective_written_out(
    make_trainer: MakeTrainer, microbatches: int, offload: bool
) -> None:
    """Loss and penalty of each microbatch count by its part of the batch; 7 samples in two parts are 4 and 3."""
    data, model, look = [new_batch(seed, size=7) for seed in range(4)], smooth_model(), Look()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    trainer = make_trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="1ep",
        algorithms=[GradientPenalty(0.3)],
        callbacks=[look],
        microbatches=microbatches,
        offload=offload,
    )
    await trainer.fit()
    losses = []
    for inputs, targets in data:
        size = -(-7 // microbatches)
        parts = list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))
        whole = sum((len(part[0]) / 7 * objective(reference, part, 0.3) for part in parts), torch.zeros(()))
        losses.append(functional.cross_entropy(reference(inputs), targets).item())
        for parameter, gradient in zip(
            reference.parameters(), torch.autograd.grad(whole, list(reference.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()

    assert look.losses == pytest.approx(losses, rel=1e-9)
    for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.anyio
async def test_it_penalises_the_loss_that_is_trained(make_trainer: MakeTrainer) -> None:
    """With LabelSmoothing, the smoothed one."""
    model, look, batch = smooth_model(), Look(), new_batch()
    reference = copy.deepcopy(model)
    await make_trainer(
        model=model,
        train_dataloader=[batch],
        max_duration="1ba",
        algorithms=[GradientPenalty(0.3), LabelSmoothing(0.2)],
        callbacks=[look],
    ).fit()
    loss = functional.cross_entropy(reference(batch[0]), batch[1], label_smoothing=0.2)
    parameters = list(reference.parameters())
    gradients = list(torch.autograd.grad(loss, parameters, create_graph=True))
    expected = torch.autograd.grad(loss + 0.3 * norm_of(gradients), parameters)

    for actual, gradient in zip(look.gradients[0], expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-12)


def test_under_a_loss_scale_the_penalty_is_scaled_like_the_loss() -> None:
    """So that unscaling the sum is right for both; and the gradients of an earlier microbatch stay what they were."""
    summed = []
    for scale in (1.0, 1024.0):
        model = smooth_model()
        state = State(model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
        penalty = GradientPenalty(0.3)
        for seed in (0, 1):
            inputs, targets = new_batch(seed)
            penalty.apply(Event.BEFORE_BACKWARD, state, Logger())
            loss = scale * functional.cross_entropy(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert parameter.grad is None
                parameter.grad = gradient
            penalty.apply(Event.AFTER_BACKWARD, state, Logger())
        summed.append([parameter.grad / scale for parameter in model.parameters() if parameter.grad is not None])

    for scaled, plain in zip(summed[1], summed[0], strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-12, atol=1e-15)


@pytest.mark.anyio
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
async def test_it_trains_in_either_precision(make_trainer: MakeTrainer, precision: Any) -> None:
    """Gradients stay in the parameters' own type, and near those of float64."""
    model, look = smooth_model(dtype=torch.float32), Look()
    reference = copy.deepcopy(model).double()
    batch = new_batch(dtype=torch.float32)
    await make_trainer(
        model=model,
        train_dataloader=[batch],
        max_duration="1ba",
        precision=precision,
        algorithms=[GradientPenalty(0.5)],
        callbacks=[look],
    ).fit()
    exact = objective(reference, (batch[0].double(), batch[1]), 0.5)
    tolerance = {"fp32": 1e-5, "amp_bf16": 0.05}[precision]

    for actual, expected in zip(
        look.gradients[0], torch.autograd.grad(exact, list(reference.parameters())), strict=True
    ):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.anyio
async def test_layers_that_do_not_take_part_are_left_alone(make_trainer: MakeTrainer) -> None:
    """One that is frozen gets no gradient; one that the batch does not reach keeps that of the microbatch before."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.head, self.other = nn.Linear(4, 4).double(), smooth_model(), smooth_model(1)
            self.frozen.requires_grad_(False)
            self.calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            outputs: Tensor = (self.head if self.calls == 1 else self.other)(self.frozen(inputs))
            return outputs

    torch.manual_seed(0)
    model, look, batch = Partly(), Look(), new_batch()
    reference = copy.deepcopy(model)
    await make_trainer(
        model=model,
        train_dataloader=[batch],
        max_duration="1ba",
        algorithms=[GradientPenalty(0.5)],
        callbacks=[look],
        microbatches=2,
    ).fit()
    expected: list[Tensor] = []
    for layer, rows in ((reference.head, slice(0, 3)), (reference.other, slice(3, 6))):
        part = reference.frozen(batch[0][rows]), batch[1][rows]
        expected += torch.autograd.grad(0.5 * objective(layer, part, 0.5), list(layer.parameters()))

    assert [parameter.grad for parameter in model.frozen.parameters()] == [None, None]
    assert len(look.gradients[0]) == len(expected)
    for actual, gradient in zip(look.gradients[0], expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.anyio
async def test_a_batch_that_failed_midway_leaves_nothing_behind(make_trainer: MakeTrainer) -> None:
    """After an error in the second of three microbatches, training goes on as if that batch had not been there."""

    class FailsOnce(nn.Module):
        def __init__(self, failing_call: int) -> None:
            super().__init__()
            self.layers, self.calls, self.failing_call = smooth_model(), 0, failing_call

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == self.failing_call:
                raise ArithmeticError
            outputs: Tensor = self.layers(inputs)
            return outputs

    failed, spared = FailsOnce(2), FailsOnce(0)
    options: dict[str, Any] = {"microbatches": 3, "max_duration": "1ba"}
    data = [new_batch(0), new_batch(1)]
    async with make_trainer(
        model=failed, train_dataloader=data, algorithms=[GradientPenalty(0.5)], **options
    ) as trainer:
        with pytest.raises(ArithmeticError):
            await trainer.fit()
        await trainer.fit()
    await make_trainer(model=spared, train_dataloader=data[1:], algorithms=[GradientPenalty(0.5)], **options).fit()

    for actual, expected in zip(failed.parameters(), spared.parameters(), strict=True):
        assert actual.equal(expected)


# ------------------------------------------------------------------------------------------------ what is left over


class Box:
    """What a graph holds in the place of a saved tensor, so that its end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What refers to itself stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("microbatches", [1, 2])
async def test_no_graph_outlives_its_batch(make_trainer: MakeTrainer, microbatches: int) -> None:
    """Gradients with a graph and their parameters would keep each other, and all activations, for good."""
    boxes: list[weakref.ref[Box]] = []
    alive: list[int] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = smooth_model()

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
                outputs: Tensor = self.layers(inputs)
            return outputs

    class Count(Callback[State]):
        def batch_end(self, state: State, logger: Any) -> None:
            state.outputs = None  # they have a graph themselves, which is no circle
            alive.append(sum(box() is not None for box in boxes))

    await make_trainer(
        model=Watched(),
        train_dataloader=[new_batch(seed) for seed in range(3)],
        max_duration="1ep",
        algorithms=[GradientPenalty()],
        callbacks=[Count()],
        microbatches=microbatches,
    ).fit()

    assert len(boxes) >= 3 * microbatches
    assert alive == [0, 0, 0]


@pytest.mark.usefixtures("no_garbage_collection")
def test_parameters_do_not_outlive_their_model() -> None:
    """A gradient with a graph refers to its parameter, in a circle that not even the garbage collector can see."""
    parameters = [weight.requires_grad_() for weight in (torch.ones(2), torch.ones(3))]
    watched = [weakref.ref(parameter) for parameter in parameters]
    state = State(nn.Identity(), optimizers=[torch.optim.SGD(parameters, lr=0.1)])
    penalty = GradientPenalty()
    penalty.apply(Event.BEFORE_BACKWARD, state, Logger())
    loss = sum((parameter.pow(3).sum() for parameter in parameters), torch.zeros(()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        loss.backward(create_graph=True)  # type: ignore[no-untyped-call]
    penalty.apply(Event.AFTER_BACKWARD, state, Logger())
    gradients = [parameter.grad for parameter in parameters]
    with_graph = [gradient is None or gradient.requires_grad for gradient in gradients]
    del state, loss, gradients, parameters

    assert with_graph == [False, False]
    assert [reference() for reference in watched] == [None, None]


@pytest.mark.anyio
async def test_torch_does_not_warn_of_a_circle_that_is_not_there(make_trainer: MakeTrainer) -> None:
    """Neither once nor, where somebody has asked for it, always."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        await make_trainer(algorithms=[GradientPenalty()]).fit()
    finally:
        torch.set_warn_always(always)


def test_it_runs_around_the_backward_pass() -> None:
    """Of all forty events, two; the loop builds a graph for it; and with a weight of 0 there is neither."""
    state = State(nn.Identity())

    assert {event for event in Event if GradientPenalty().match(event, state)} == {
        Event.BEFORE_BACKWARD,
        Event.AFTER_BACKWARD,
    }
    assert not any(GradientPenalty(0).match(event, state) for event in Event)
    assert (GradientPenalty().backwards_create_graph, GradientPenalty(0).backwards_create_graph) == (True, False)


def test_it_names_what_it_does_not_go_with() -> None:
    """The engine warns beside SAM."""
    assert GradientPenalty.conflicts_with == ("SAM",)
