"""Selective backprop: the schedule, the choice and its weights, and a model left as it was."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from eventbus_engine.errors import BatchError, ConfigurationError, HandlerTypeError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger, LoggerDestination
from eventbus_engine.time import Time
from eventbus_engine.trace import Traces
from eventbus_engine.training.algorithms import (
    MixUp,
    SelectiveBackprop,
    select_using_loss,
    should_selective_backprop,
)
from eventbus_engine.training.state import State
from eventbus_engine.training.trainer import Trainer
from eventbus_engine.training.worker import ComputeWorker


def make_state(batch: Any = None, *, batches: int = 0, model: nn.Module | None = None, **options: Any) -> State:
    """The state of a run of 100 batches, of which `batches` are over."""
    options = {"max_duration": Time(100, "ba"), **options}
    state = State(model or nn.Identity(), **options)
    state.batch = batch
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch()
    return state


def identity(inputs: torch.Tensor) -> torch.Tensor:
    """A model whose output is its input, so that a test chooses the losses."""
    return inputs


def squares(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Squared error, several per sample."""
    return functional.mse_loss(outputs, targets, reduction=reduction)


def weights_reference(samples: int, keep: float) -> list[float]:
    """The weight of each rank, easiest first: the percentile of its middle to the power 1/keep - 1."""
    return [((rank + 0.5) / samples) ** (1 / keep - 1) for rank in range(samples)]


def inclusion_reference(weights: list[float], count: int) -> list[float]:
    """The probability of each rank to be among `count` successive draws without replacement, by enumeration."""
    chances = [0.0] * len(weights)
    for order in itertools.permutations(range(len(weights)), count):
        left, chance = sum(weights), 1.0
        for rank in order:
            chance *= weights[rank] / left
            left -= weights[rank]
        for rank in order:
            chances[rank] += chance
    return chances


@settings(deadline=None)  # torch is slow when it is first called
@given(
    now=st.floats(0, 1),
    batch=st.integers(0, 50),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    interrupt=st.integers(0, 5),
)
def test_schedule_equals_the_definition(now: float, batch: int, bounds: list[float], interrupt: int) -> None:
    """Within the interval, end excluded, and every `interrupt`-th batch left whole."""
    start, end = bounds
    whole = set(range(interrupt - 1, 51, interrupt)) if interrupt else set()
    expected = not (now < start or now >= end or batch in whole)

    assert should_selective_backprop(now, batch, start, end, interrupt) is expected


@settings(deadline=None)  # torch is slow when it is first called
@given(samples=st.integers(1, 40), keep=st.floats(0.05, 1), seed=st.integers(0, 2**32))
def test_choice_equals_a_float64_reference(samples: int, keep: float, seed: int) -> None:
    """Losses, ranks and weights computed one by one, with the same draw of ranks, keep the same samples."""
    values = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    targets = torch.zeros(samples, 2, dtype=torch.float64)
    kept, kept_targets = select_using_loss(
        values, targets, identity, squares, keep, generator=torch.Generator().manual_seed(seed)
    )
    losses = [sum(v * v for v in row) / 2 for row in values.tolist()]
    easiest_first = sorted(range(samples), key=losses.__getitem__)
    count = max(1, int(keep * samples))
    expected = list(range(samples))
    if count < samples:
        weights = torch.tensor(weights_reference(samples, keep), dtype=torch.float64)
        ranks = torch.multinomial(weights, count, generator=torch.Generator().manual_seed(seed)).tolist()
        expected = sorted(easiest_first[rank] for rank in ranks)

    assert torch.equal(kept, values[expected])
    assert kept_targets.shape == (count, 2)


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
def test_hard_samples_are_kept_as_often_as_their_weight_says(keep: float) -> None:
    """Over many draws, each rank is kept with the probability that enumeration gives it."""
    samples, draws = 4, 3000
    generator = torch.Generator().manual_seed(5)
    values = torch.tensor([[3.0], [1.0], [4.0], [2.0]])
    counts = dict.fromkeys([1.0, 2.0, 3.0, 4.0], 0)
    for _ in range(draws):
        kept, _ = select_using_loss(values, torch.zeros(4, 1), identity, squares, keep, generator=generator)
        for value in kept.flatten().tolist():
            counts[value] += 1
    expected = inclusion_reference(weights_reference(samples, keep), int(keep * samples))

    assert [counts[v] / draws for v in sorted(counts)] == pytest.approx(expected, abs=0.035)


def test_every_form_of_loss_gives_the_same_choice() -> None:
    """With the keyword, bound or not, as a module, and as a function that only knows the mean."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(12, 3, generator=generator), torch.randint(3, (12,), generator=generator)

    def mean_only(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets)

    class Wrapped(nn.Module):
        def forward(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
            return functional.cross_entropy(outputs, targets, reduction=reduction)

    module = nn.CrossEntropyLoss()
    forms: list[Callable[..., Any]] = [
        functional.cross_entropy,
        functools.partial(functional.cross_entropy, reduction="sum"),
        module,
        Wrapped(),
        mean_only,
    ]
    choices = [
        select_using_loss(logits, labels, identity, form, generator=torch.Generator().manual_seed(1))[0]
        for form in forms
    ]

    assert all(torch.equal(choice, choices[0]) for choice in choices)
    assert module.reduction == "mean"


def test_loss_without_a_signature_is_called_once_per_sample() -> None:
    """A builtin tells nothing about its parameters; with one sample at a time it still ranks them."""
    values, targets = torch.tensor([3.0, 1.0, 2.0]), torch.ones(3)
    choices = [
        select_using_loss(values, targets, identity, form, 0.7, generator=torch.Generator().manual_seed(seed))[0]
        for form in (torch.dot, lambda outputs, targets, reduction: outputs * targets)
        for seed in range(5)
    ]

    assert all(torch.equal(*pair) for pair in zip(choices[:5], choices[5:], strict=True))


def test_shrunken_inputs_rank_but_full_ones_are_kept() -> None:
    """The extra pass sees half the size, the result has the full one."""
    seen = []

    def model(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(inputs.shape))
        return inputs.mean(dim=(1, 2, 3))

    images = torch.rand(6, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    kept, targets = select_using_loss(images, torch.zeros(6), model, squares, scale_factor=0.5)

    assert seen == [(6, 2, 4, 4)]
    assert (kept.shape, targets.shape) == ((3, 2, 8, 8), (3,))


def test_keeping_all_computes_nothing() -> None:
    """The very same tensors come back, and the model is not called."""

    def model(inputs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called")

    values, targets = torch.zeros(4, 1), torch.zeros(4, 1)
    kept = select_using_loss(values, targets, model, squares, keep=1)

    assert kept[0] is values
    assert kept[1] is targets


def test_model_is_left_as_it_was() -> None:
    """Modes per submodule, running statistics, gradients and the global generator: untouched; also after an error."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    values, targets = torch.ones(4, 3), torch.zeros(4, 3)
    select_using_loss(values, targets, model, squares, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="shape"):
        select_using_loss(torch.ones(4, 2), targets, model, squares, generator=torch.Generator())

    assert modes == [True, True, False, True]
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_kept_samples_carry_gradients_back() -> None:
    """Only the selection goes without a graph; the samples themselves keep theirs."""
    values = torch.arange(4.0).reshape(4, 1).requires_grad_()
    kept, _ = select_using_loss(values, torch.zeros(4, 1), identity, squares)
    kept.sum().backward()  # type: ignore[no-untyped-call]

    assert values.grad is not None
    assert int(values.grad.sum()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": -0.1}, r"start=-0\.1 .* \[0, 1\]"),
        ({"end": 1.1}, r"end=1\.1 .* \[0\.5, 1\]"),
        ({"start": 0.6, "end": 0.4}, r"end=0\.4 .* \[0\.6, 1\]"),
        ({"keep": 0}, r"keep=0 .* \(0, 1\]"),
        ({"keep": math.nan}, r"keep=nan .* \(0, 1\]"),
        ({"scale_factor": 2}, r"scale_factor=2 .* \(0, 1\]"),
        ({"interrupt": -1}, r"interrupt=-1 .* 0 or more"),
        ({"interrupt": 1.5}, r"interrupt=1\.5 .* whole number"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The error names the argument, its value and the range."""
    with pytest.raises(ConfigurationError, match=message):
        SelectiveBackprop(**arguments)


@pytest.mark.parametrize("scale_factor", [0, 1.5])
def test_scale_out_of_range_is_refused_by_the_function_too(scale_factor: float) -> None:
    """Only shrinking makes sense."""
    with pytest.raises(ConfigurationError, match=r"select_using_loss: scale_factor=.* \(0, 1\]"):
        select_using_loss(torch.zeros(4, 1), torch.zeros(4, 1), identity, squares, scale_factor=scale_factor)


def test_what_cannot_be_ranked_is_refused() -> None:
    """Each error says what is wrong with the loss, the input or the number of targets."""
    values, targets = torch.zeros(4, 1), torch.zeros(4, 1)

    with pytest.raises(HandlerTypeError, match=r"loss_fun has to be callable, got 'mse'"):
        select_using_loss(values, targets, identity, "mse")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"3, 4 or 5 dimensions, .*, got \(4, 1\)"):
        select_using_loss(values, targets, identity, squares, scale_factor=0.5)
    with pytest.raises(BatchError, match=r"as many targets as inputs, got \(3, 1\) and \(4, 1\)"):
        select_using_loss(values, targets[:3], identity, squares)
    with pytest.raises(BatchError, match=r"one loss for each of the 4 samples; .* shape \(\)"):
        select_using_loss(values, targets, identity, lambda outputs, targets, reduction: outputs.sum())
    with pytest.raises(BatchError, match=r"the model's output to be one tensor, got tuple"):
        select_using_loss(values, targets, lambda inputs: (inputs, inputs), lambda outputs, targets: outputs[0])


class ReadsBatches(nn.Module):
    """A model that takes whole batches and brings its own loss; it remembers where and how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, bool, bool, torch.Size]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the images' means."""
        images: torch.Tensor = batch["images"]
        self.calls.append((threading.get_ident(), self.training, torch.is_grad_enabled(), images.shape))
        return images.mean(dim=(1, 2, 3))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the weighted squared error."""
        error: torch.Tensor = batch["weights"] * (outputs - batch["values"]).square()
        return error.mean()


class ReducesOnDemand(ReadsBatches):
    """The same with a loss that knows the keyword."""

    def loss(self, outputs: torch.Tensor, batch: Any, reduction: str = "mean") -> torch.Tensor:
        """Return the weighted squared error, reduced or not."""
        error: torch.Tensor = batch["weights"] * (outputs - batch["values"]).square()
        return error if reduction == "none" else error.mean()


@pytest.mark.anyio
@pytest.mark.parametrize("model_class", [ReadsBatches, ReducesOnDemand])
async def test_extra_forward_pass_runs_off_the_event_loop(model_class: type[ReadsBatches]) -> None:
    """On the worker's thread, in eval mode and without gradients, on the batch that the model will see."""
    worker, model = ComputeWorker(), model_class()
    batch: dict[str, Any] = {
        "images": torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 1, 4, 4),
        "values": torch.zeros(8),
        "weights": torch.arange(8.0),
        "names": "eight",
        "scale": torch.tensor(3.0),
    }
    state = make_state(batch, model=model, worker=worker, batches=60)
    algorithm = SelectiveBackprop(scale_factor=0.5, input_key="images", target_key="values")
    await algorithm.apply(Event.AFTER_DATALOADER, state, Logger())
    worker.close()
    (thread, training, grad, seen), *more = model.calls
    kept = [int(weight) for weight in state.batch["weights"]]

    assert more == []
    assert thread != threading.get_ident()
    assert (training, grad, model.training, torch.is_grad_enabled()) == (False, False, True, True)
    assert seen == (8, 1, 2, 2)
    assert len(kept) == 4
    assert torch.equal(state.batch["images"], batch["images"][kept])
    assert state.batch["values"].shape == (4,)
    assert (state.batch["names"], float(state.batch["scale"])) == ("eight", 3.0)
    assert len(batch["weights"]) == 8


@pytest.mark.anyio
async def test_choice_belongs_to_the_seed_and_the_batch() -> None:
    """A run that resumes at a batch keeps what the first one kept; the global generator does not move."""

    async def kept(seed: int, batch: int) -> list[int]:
        data = {"input": torch.arange(32.0).reshape(32, 1), "label": torch.zeros(32, 1)}
        state = make_state(batch=data, model=nn.Identity(), loss_fn=squares, seed=seed, batches=batch)
        await SelectiveBackprop(input_key="input", target_key="label").apply(Event.AFTER_DATALOADER, state, Logger())
        return [int(x) for x in state.batch_get_item("input").flatten()]

    before = torch.get_rng_state()

    assert await kept(1, 4) == await kept(1, 4)
    assert await kept(1, 4) != await kept(1, 5)
    assert await kept(1, 4) != await kept(2, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.anyio
async def test_a_single_sample_is_kept() -> None:
    """A batch never becomes empty; a batch of one stays as it is."""
    values, targets = torch.zeros(1, 1), torch.zeros(1, 1)
    state = make_state(batch=(values, targets), model=nn.Identity(), loss_fn=squares, batches=60)
    await SelectiveBackprop(keep=0.1).apply(Event.AFTER_DATALOADER, state, Logger())

    assert state.batch_get_item(0) is values


@pytest.mark.anyio
async def test_a_run_trains_on_pruned_batches_while_it_is_due() -> None:
    """Of eight batches, every other one between start and end is pruned; all samples still count as seen."""
    sizes = []

    class Counting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.training:
                sizes.append(len(input))
            return super().forward(input)

    model = Counting(1, 1)
    trainer = Trainer(
        model,
        [(torch.arange(6.0).reshape(6, 1), torch.zeros(6, 1))] * 8,
        loss=squares,
        optimizers=torch.optim.SGD(model.parameters(), 0.01),
        max_duration="8ba",
        algorithms=[SelectiveBackprop(start=0.25, end=0.75)],
        seed=3,
    )
    await trainer.fit()

    assert sizes == [6, 6, 3, 6, 3, 6, 6, 6]
    assert int(trainer.state.timestamp.sample) == 48


class Watched(nn.Linear):
    """Keeps the inputs it was given, those of the extra forward pass apart from those it trains on."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.ranked: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (self.trained if self.training else self.ranked).append(input)
        return super().forward(input)


class RanOn(LoggerDestination):
    """Keeps the names of the algorithms that ran on an event, in the order they ran in."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.orders: list[list[str]] = []

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        ran = [trace.name for trace in traces.values() if trace.event == self.event and trace.run]
        if ran:
            self.orders.append(ran)


@pytest.mark.anyio
async def test_it_ranks_the_samples_before_mixup_mixes_them() -> None:
    """Registered after MixUp, it runs ahead of it all the same: the extra forward pass sees what the loader gave."""
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(6, 2, generator=generator) for _ in range(3)]
    model, mixup, ran = Watched(), MixUp(alpha=1.0), RanOn(Event.AFTER_DATALOADER)
    trainer = Trainer(
        model,
        [(inputs, torch.zeros(6, 1)) for inputs in clean],
        loss=squares,
        optimizers=torch.optim.SGD(model.parameters(), 0.01),
        max_duration="3ba",
        algorithms=[mixup, SelectiveBackprop(start=0.0, end=1.0, interrupt=0)],
        loggers=[ran],
        seed=3,
    )
    await trainer.fit()
    rows = {tuple(row) for inputs in clean for row in inputs.tolist()}

    assert ran.orders == [["selective_backprop", "mixup"]] * 3
    assert all(torch.equal(ranked, inputs) for ranked, inputs in zip(model.ranked, clean, strict=True))
    assert [len(inputs) for inputs in model.trained] == [3, 3, 3]
    assert not rows.issuperset(tuple(row) for inputs in model.trained for row in inputs.tolist())


def test_it_matches_after_the_data_loader_on_due_batches_only() -> None:
    """Of all forty events, one; within the interval; never with keep=1."""
    due = make_state(batches=60)
    early = make_state(batches=20)
    interrupted = make_state(batches=61)

    assert {event for event in Event if SelectiveBackprop().match(event, due)} == {Event.AFTER_DATALOADER}
    assert SelectiveBackprop().match(Event.AFTER_DATALOADER, early) is False
    assert SelectiveBackprop().match(Event.AFTER_DATALOADER, interrupted) is False
    assert SelectiveBackprop(interrupt=0).match(Event.AFTER_DATALOADER, interrupted) is True
    assert SelectiveBackprop(keep=1).match(Event.AFTER_DATALOADER, due) is False


def test_run_without_a_duration_has_no_schedule() -> None:
    """The error says what to give the run."""
    state = make_state(max_duration=None)

    with pytest.raises(ConfigurationError, match=r"SelectiveBackprop .* max_duration"):
        SelectiveBackprop().match(Event.AFTER_DATALOADER, state)
