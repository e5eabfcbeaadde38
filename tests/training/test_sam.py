"""SAM: the climb, the way back, the second pass, and what it leaves to the optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import SAM, LabelSmoothing, MixUp, perturb, restore, smooth_labels
from eventbus_engine.training.algorithms._common import dense_targets

Batches = list[tuple[Tensor, Tensor]]
MakeBatches = Callable[..., Batches]
MakeModel = Callable[..., nn.Module]
MakeTrainer = Callable[..., Trainer]


def weights(*gradients: Tensor | None) -> list[Tensor]:
    """Weights in the shapes of their gradients, and of three elements where there is none."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for gradient in gradients:
        like = torch.zeros(3) if gradient is None else gradient
        weight = torch.randn(like.shape, generator=generator).to(like.dtype).requires_grad_()
        weight.grad = gradient
        made.append(weight)
    return made


def values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, to compare with later."""
    return [tensor.detach().clone() for tensor in tensors]


def equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether they are the same, bit for bit."""
    return all(one.detach().equal(other) for one, other in zip(actual, expected, strict=True))


# --------------------------------------------------------------------------------------------------- the functions


@given(rho=st.floats(0, 10), seed=st.integers(0, 1000), size=st.floats(1e-8, 1e8))
def test_the_climb_equals_the_definition_and_goes_back_exactly(rho: float, seed: int, size: float) -> None:
    """Along the gradient of all weights together, by rho; those without a gradient stay."""
    generator = torch.Generator().manual_seed(seed)
    one, other = (size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3), (4,)))
    moved = weights(one, None, other)
    before = values(moved)
    norm = sum(float(element) ** 2 for gradient in (one, other) for element in gradient.flatten()) ** 0.5
    way = rho / (norm + 1e-12)
    kept = perturb(moved, rho)
    after = values(moved)
    restore(kept)

    for actual, start, gradient in zip(after, before, (one, torch.zeros(3), other), strict=True):
        torch.testing.assert_close(actual, start + way * gradient, rtol=1e-12, atol=1e-12)
    assert equal(moved, before)
    assert len(kept) == 2


def test_the_climb_is_as_long_as_rho_says() -> None:
    """And epsilon is added to the norm."""
    (weight,) = weights(torch.tensor([3.0, 4.0]))
    start = weight.detach().clone()
    restore(perturb([weight], rho=2.0))
    perturb([weight], rho=2.0, epsilon=5.0)

    torch.testing.assert_close(weight.detach() - start, torch.tensor([0.6, 0.8]))


def test_nothing_to_climb_by_leaves_the_weights() -> None:
    """No gradient, or one of zero."""
    (weight,) = weights(torch.zeros(2))
    before = values([weight])
    perturb([weight])

    assert equal([weight], before)
    assert perturb(weights(None)) == []
    assert perturb([]) == []


@pytest.mark.parametrize("size", [1e-7, 1.0, 4e4])
def test_half_precision_neither_overflows_nor_divides_by_zero(size: float) -> None:
    """The norm of two numbers of 40000, and the scale of a tiny gradient, are past what float16 holds."""
    (weight,) = weights(torch.tensor([size, size], dtype=torch.float16))
    start = values([weight])[0].float()
    perturb([weight], rho=2**0.5)

    assert weight.dtype == torch.float16
    torch.testing.assert_close(weight.detach().float() - start, torch.ones(2), rtol=0.05, atol=1e-3)


def test_layers_may_differ_in_their_types() -> None:
    """The norm is taken over all of them, in the widest; each weight keeps its own."""
    types = (torch.bfloat16, torch.float32, torch.float64)
    moved = weights(*(torch.full((3,), 2.0, dtype=dtype) for dtype in types))
    before = values(moved)
    perturb(moved, rho=3.0)

    assert tuple(weight.dtype for weight in moved) == types
    for weight, start in zip(moved, before, strict=True):
        torch.testing.assert_close(weight.detach() - start, torch.ones_like(start), rtol=0.02, atol=0.01)


def test_sparse_gradients_are_followed() -> None:
    """Rows that are met more than once count with their sum; the others stay."""
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 1, 3])).sum().backward()
    perturb(table.parameters(), rho=10**0.5)
    moved = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]])

    torch.testing.assert_close(table.weight.detach() - before, moved)


class Exhausting(Tensor):
    """A gradient for which there is no memory left to scale it in, though for its norm there is."""

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.ndim:
            raise torch.OutOfMemoryError
        return super().to(*args, **kwargs)


def test_a_climb_that_fails_midway_is_undone() -> None:
    """The weights that had moved by then are back where they were."""
    moved = weights(torch.ones(2), torch.ones(3).as_subclass(Exhausting))
    before = values(moved)

    with pytest.raises(torch.OutOfMemoryError):
        perturb(moved)
    assert equal(moved, before)


# ------------------------------------------------------------------------------------------------------- in training


class Look(Callback[State]):
    """Notes weights, gradients and losses at the end of each batch's training, before the optimizers step."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.gradients: list[list[Tensor]] = []
        self.losses: list[float] = []

    def after_train_batch(self, state: State, logger: Any) -> None:
        """Callbacks come after the algorithms."""
        parameters = list(state.model.parameters())
        self.weights.append(values(parameters))
        self.gradients.append(values([parameter.grad for parameter in parameters if parameter.grad is not None]))
        assert state.loss is not None
        assert not state.loss.requires_grad
        self.losses.append(state.loss.item())


def doubled(batches: Batches) -> Batches:
    """The same in float64, so that the order of additions does not show."""
    return [(inputs.double(), targets) for inputs, targets in batches]


def train_by_hand(model: nn.Module, batches: Batches, rho: float, interval: int = 1) -> list[float]:
    """Two passes and a step, written out; the losses of the first passes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, (inputs, targets) in enumerate(batches, start=1):
        parameters = list(model.parameters())
        loss = functional.cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(loss, parameters)
        losses.append(loss.item())
        if number % interval == 0:
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            nearby = [
                (weight + rho * gradient / norm).detach().requires_grad_()
                for weight, gradient in zip(parameters, gradients, strict=True)
            ]
            names = [name for name, _ in model.named_parameters()]
            outputs = torch.func.functional_call(model, dict(zip(names, nearby, strict=True)), (inputs,))
            gradients = torch.autograd.grad(functional.cross_entropy(outputs, targets), nearby)
        for weight, gradient in zip(parameters, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    return losses


@pytest.mark.anyio
@pytest.mark.parametrize(("interval", "microbatches"), [(1, 1), (1, 2), (1, 4), (2, 1), (4, 3)])
@pytest.mark.parametrize("offload", [True, False])
async def test_training_equals_two_passes_written_by_hand(
    make_trainer: MakeTrainer,
    make_model: MakeModel,
    make_batches: MakeBatches,
    interval: int,
    microbatches: int,
    offload: bool,
) -> None:
    """Over several steps, on every batch or every second or fourth one, in parts or whole."""
    data, model, look = doubled(make_batches(6)), make_model().double(), Look()
    reference = copy.deepcopy(model)
    trainer = make_trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="1ep",
        algorithms=[SAM(rho=0.5, interval=interval)],
        callbacks=[look],
        microbatches=microbatches,
        offload=offload,
    )
    await trainer.fit()
    losses = train_by_hand(reference, data, rho=0.5, interval=interval)

    assert look.losses == pytest.approx(losses, rel=1e-9)
    for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.anyio
async def test_the_optimizers_find_the_weights_where_they_were(
    make_trainer: MakeTrainer, make_model: MakeModel
) -> None:
    """Bit for bit, while the second pass saw others; and the outputs are those of the first pass, as the loss is."""
    model, look = make_model(), Look()
    before = values(list(model.parameters()))
    seen: list[tuple[list[Tensor], Tensor]] = []

    class Watch(Callback[State]):
        def after_forward(self, state: State, logger: Any) -> None:
            seen.append((values(list(state.model.parameters())), state.outputs))

        def batch_end(self, state: State, logger: Any) -> None:
            assert state.outputs is seen[0][1]

    await make_trainer(model=model, max_duration="1ba", algorithms=[SAM(rho=0.1)], callbacks=[look, Watch()]).fit()
    climbed = sum(float((new - old).square().sum()) for new, old in zip(seen[1][0], before, strict=True)) ** 0.5

    assert len(seen) == 2
    assert equal(seen[0][0], before)
    assert climbed == pytest.approx(0.1, rel=1e-4)
    assert equal(look.weights[0], before)


@pytest.mark.anyio
async def test_the_second_pass_fires_the_events_of_its_microbatches(make_trainer: MakeTrainer) -> None:
    """Inside AFTER_TRAIN_BATCH, which the callbacks get when it is over."""
    fired: list[str] = []

    class Record(Callback[State]):
        def run_event(self, event: Any, state: State, logger: Any) -> None:
            fired.append(event.name)

    await make_trainer(max_duration="1ba", algorithms=[SAM()], callbacks=[Record()], microbatches=2).fit()
    microbatch = [f"{half}_{name}" for name in ("FORWARD", "LOSS", "BACKWARD") for half in ("BEFORE", "AFTER")]

    assert fired[fired.index("BEFORE_TRAIN_BATCH") : fired.index("BATCH_END")] == [
        "BEFORE_TRAIN_BATCH",
        *microbatch * 4,
        "AFTER_TRAIN_BATCH",
    ]


class Normalized(nn.Module):
    """A classifier with batch normalization, which counts what it sees."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.hidden = nn.Linear(4, 8)
            self.norm = nn.BatchNorm1d(8, momentum=momentum)
            self.output = nn.Linear(8, 3)
        self.calls = 0
        self.failing_call = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Raises at the call that is given, counted from 1, past its normalization."""
        self.calls += 1
        hidden = self.norm(self.hidden(inputs))
        if self.calls == self.failing_call:
            raise ArithmeticError
        outputs: Tensor = self.output(functional.relu(hidden))
        return outputs


@pytest.mark.anyio
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("microbatches", [1, 2])
async def test_running_statistics_count_the_first_pass_only(
    make_trainer: MakeTrainer, batches: Batches, momentum: float | None, microbatches: int
) -> None:
    """Also as a cumulative average, which has no momentum to switch off."""
    model, plain = Normalized(momentum), Normalized(momentum)
    await make_trainer(model=model, max_duration="1ba", algorithms=[SAM(rho=1.0)], microbatches=microbatches).fit()
    for part in torch.split(batches[0][0], 6 // microbatches):
        plain(part)

    assert model.calls == 2 * microbatches
    assert equal(list(model.buffers()), list(plain.buffers()))


@pytest.mark.anyio
@pytest.mark.parametrize("offload", [True, False])
async def test_a_second_pass_that_fails_puts_the_weights_back(make_trainer: MakeTrainer, offload: bool) -> None:
    """The error is the model's own, and what was counted is what the first pass counted."""
    model, plain = Normalized(), Normalized()
    model.failing_call = 2
    before = values(list(model.parameters()))
    trainer = make_trainer(model=model, algorithms=[SAM(rho=1.0)], offload=offload)
    plain(trainer.state.train_dataloader[0][0])

    with pytest.raises(ArithmeticError):
        await trainer.fit()
    assert equal(list(model.parameters()), before)
    assert equal(list(model.buffers()), list(plain.buffers()))


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["before_forward", "after_forward", "after_backward"])
async def test_a_second_pass_that_is_cancelled_puts_the_weights_back(
    make_trainer: MakeTrainer, make_model: MakeModel, where: str
) -> None:
    """Wherever it is when the cancellation arrives."""
    model = make_model()
    before = values(list(model.parameters()))
    passes: list[str] = []
    climbed: list[bool] = []
    scope = anyio.CancelScope()

    class Cancel(Callback[State]):
        async def run_event(self, event: Any, state: State, logger: Any) -> None:
            if event != where:
                return
            passes.append(event)
            if len(passes) == 2:
                climbed.append(not equal(list(model.parameters()), before))
                scope.cancel()
                await anyio.sleep_forever()

    trainer = make_trainer(model=model, algorithms=[SAM(rho=1.0)], callbacks=[Cancel()])
    with scope:
        await trainer.fit()

    assert (scope.cancelled_caught, climbed) == (True, [True])
    assert equal(list(model.parameters()), before)


@pytest.mark.anyio
async def test_a_cancellation_during_the_climb_puts_the_weights_back(
    make_trainer: MakeTrainer, make_model: MakeModel
) -> None:
    """The thread finishes what it has begun, and nobody is there to be told by it what to undo."""
    model = make_model()
    before = values(list(model.parameters()))
    scope = anyio.CancelScope()
    climbed: list[bool] = []

    class Interrupted(SAM):
        def _climb(self, state: State, kept: Any) -> None:
            anyio.from_thread.run_sync(scope.cancel, token=token)
            super()._climb(state, kept)
            climbed.append(not equal(list(model.parameters()), before))

    trainer = make_trainer(model=model, algorithms=[Interrupted(rho=1.0)])
    token = anyio.lowlevel.current_token()
    with scope:
        await trainer.fit()

    assert (scope.cancelled_caught, climbed) == (True, [True])
    assert equal(list(model.parameters()), before)


# ---------------------------------------------------------------------------------------------------- in company


class GradientClipping(Algorithm[State, Event]):
    """Clips the norm of the gradients at one."""

    def match(self, event: Event, state: State) -> bool:
        """When they are complete."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Any) -> None:
        """With torch's own function."""
        nn.utils.clip_grad_norm_(state.model.parameters(), 0.01)


@pytest.mark.anyio
@pytest.mark.parametrize("sam_first", [True, False])
async def test_the_gradients_of_the_second_pass_are_clipped(make_trainer: MakeTrainer, sam_first: bool) -> None:
    """In either order of registration: the optimizers get the clipped ones, in the direction from nearby."""
    clipped, unclipped = Look(), Look()
    algorithms = [SAM(rho=0.5), GradientClipping()][:: 1 if sam_first else -1]
    await make_trainer(max_duration="1ba", algorithms=algorithms, callbacks=[clipped]).fit()
    await make_trainer(max_duration="1ba", algorithms=[SAM(rho=0.5)], callbacks=[unclipped]).fit()
    actual, full = (torch.cat([g.flatten() for g in look.gradients[0]]) for look in (clipped, unclipped))

    assert actual.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert full.norm().item() > 0.02
    torch.testing.assert_close(actual / actual.norm(), full / full.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.anyio
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("interpolate_loss", [False, True])
async def test_both_passes_see_the_same_mixed_and_smoothed_batch(
    make_trainer: MakeTrainer, make_model: MakeModel, batches: Batches, microbatches: int, interpolate_loss: bool
) -> None:
    """MixUp deals out the partners' targets once more, and LabelSmoothing finds the labels again."""
    data, model, look = doubled(batches), make_model().double(), Look()
    reference = copy.deepcopy(model)
    mixup = MixUp(alpha=1.0, interpolate_loss=interpolate_loss)
    smoothing = [] if interpolate_loss else [LabelSmoothing(0.2)]
    trainer = make_trainer(
        model=model,
        train_dataloader=data,
        max_duration="1ba",
        algorithms=[SAM(rho=0.5), mixup, *smoothing],
        callbacks=[look],
        microbatches=microbatches,
    )
    await trainer.fit()
    inputs, targets = data[0]
    mixed = (1 - mixup.mixing) * inputs + mixup.mixing * inputs[mixup.indices]
    logits = torch.zeros(6, 3, dtype=torch.float64)
    own, other = dense_targets(logits, targets), dense_targets(logits, targets[mixup.indices])
    dense = (1 - mixup.mixing) * own + mixup.mixing * other
    dense = smooth_labels(logits, dense, 0.2) if smoothing else dense
    train_by_hand(reference, [(mixed, dense)], rho=0.5)

    for actual, weight in zip(look.gradients[0], reference.parameters(), strict=True):
        torch.testing.assert_close(actual, weight.grad, rtol=1e-9, atol=1e-12)
    assert trainer.state.batch[1].equal(targets)


@pytest.mark.anyio
async def test_it_trains_in_bfloat16_autocast(make_trainer: MakeTrainer) -> None:
    """The second pass is under the run's precision like the first."""
    types: list[torch.dtype] = []

    class Watch(Callback[State]):
        def after_forward(self, state: State, logger: Any) -> None:
            types.append(state.outputs.dtype)

    await make_trainer(max_duration="1ba", precision="amp_bf16", algorithms=[SAM()], callbacks=[Watch()]).fit()

    assert types == [torch.bfloat16] * 2


@pytest.mark.anyio
async def test_only_what_the_optimizers_step_is_moved(make_trainer: MakeTrainer, make_model: MakeModel) -> None:
    """The head is trained; the rest has gradients, but is no part of the search."""
    model = make_model()
    body, head = model.get_submodule("0"), model.get_submodule("2")
    before = values(list(body.parameters()))
    moved: list[bool] = []

    class Watch(Callback[State]):
        def after_forward(self, state: State, logger: Any) -> None:
            moved.append(not equal(list(body.parameters()), before))

    await make_trainer(
        model=model,
        optimizers=torch.optim.SGD(head.parameters(), lr=0.1),
        max_duration="1ba",
        algorithms=[SAM(rho=1.0)],
        callbacks=[Watch()],
    ).fit()

    assert moved == [False, False]


# --------------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rho": -0.1}, r"rho=-0\.1 has to be a number in \[0, inf\)"),
        ({"rho": float("nan")}, r"rho=nan has to be a number in \[0, inf\)"),
        ({"epsilon": 0}, r"epsilon=0 has to be a number in \(0, inf\)"),
        ({"epsilon": "tiny"}, r"epsilon='tiny' has to be a number in \(0, inf\)"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The error names the owner, the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=f"SAM: {message}"):
        SAM(**arguments)
    with pytest.raises(ConfigurationError, match=f"perturb: {message}"):
        perturb([], **arguments)


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "2ba"])
def test_an_interval_is_a_number_of_batches(interval: Any) -> None:
    """One or more."""
    with pytest.raises(ConfigurationError, match=r"SAM: interval=.* has to be a whole number of batches, 1 or more"):
        SAM(interval=interval)


def test_it_runs_after_every_nth_batch_has_trained() -> None:
    """Of all forty events, one; on batches 3, 6, … counted from 1; and not at all with a rho of 0."""
    state = State(nn.Identity())
    due = []
    for _ in range(7):
        due.append(SAM(interval=3).match(Event.AFTER_TRAIN_BATCH, state))
        state.timestamp = state.timestamp.to_next_batch()

    assert due == [False, False, True, False, False, True, False]
    assert {event for event in Event if SAM().match(event, state)} == {Event.AFTER_TRAIN_BATCH}
    assert not any(SAM(rho=0).match(event, state) for event in Event)


def test_it_names_what_it_does_not_go_with() -> None:
    """The engine warns beside GradientPenalty."""
    assert SAM.conflicts_with == ("GradientPenalty",)
