"""Layer freezing: the schedule, what is frozen, and that the optimizers let go of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.loggers.memory import InMemoryLogger
from eventbus_engine.time import Time
from eventbus_engine.training.algorithms import LayerFreezing, freeze_layers
from eventbus_engine.training.state import State


def make_state(batch: Any = None, *, batches: int = 0, model: nn.Module | None = None, **options: Any) -> State:
    """The state of a run of 100 batches, of which `batches` are over."""
    options = {"max_duration": Time(100, "ba"), **options}
    state = State(model or nn.Identity(), **options)
    state.batch = batch
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch()
    return state


def small_model() -> nn.Sequential:
    """Four layers with parameters, one of them nested, and some modules without any."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.ReLU(),
        nn.Sequential(nn.BatchNorm2d(2), nn.Sequential()),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.Linear(4, 3),
    )


def layers_with_parameters(model: nn.Sequential) -> list[nn.Module]:
    """The four, in their order."""
    nested = model[2]
    assert isinstance(nested, nn.Sequential)
    return [model[0], nested[0], model[4], model[5]]


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on fixed data."""
    optimizer.zero_grad()
    model(torch.ones(2, 1, 4, 4)).square().sum().backward()
    optimizer.step()


@settings(deadline=None)  # torch is slow when it is first called
@given(
    now=st.floats(0, 1, allow_subnormal=False),
    start=st.floats(0, 1, allow_subnormal=False),
    level=st.floats(0, 1, allow_subnormal=False),
)
def test_schedule_equals_the_definition(now: float, start: float, level: float) -> None:
    """Nothing up to the start, then linear up to the level, rounded down to layers, never the last."""
    model = small_model()
    depth, share = freeze_layers(model, torch.optim.SGD(model.parameters(), 0.1), now, start, level)
    expected = 0.0 if now <= start else level * (now - start) / (1 - start)
    frozen = [not any(p.requires_grad for p in layer.parameters()) for layer in layers_with_parameters(model)]

    assert share == pytest.approx(expected, rel=1e-15, abs=0)
    assert depth == int(expected * 3)
    assert frozen == [True] * depth + [False] * (4 - depth)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_frozen_layers_stay_put_and_the_rest_still_trains(optimizer_class: Any) -> None:
    """Neither momentum nor weight decay moves a frozen parameter, in whichever group it was."""
    model = small_model()
    layers = layers_with_parameters(model)
    groups = [{"params": list(layer.parameters())} for layer in layers]
    options: dict[str, Any] = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    optimizer = optimizer_class(groups, lr=0.01, weight_decay=0.1, **options)
    train_once(model, optimizer)
    freeze_layers(model, [optimizer], 0.9, freeze_start=0.0, freeze_level=0.8)
    before = [[p.clone() for p in layer.parameters()] for layer in layers]
    train_once(model, optimizer)
    moved = [
        not all(torch.equal(p, old) for p, old in zip(layer.parameters(), olds, strict=True))
        for layer, olds in zip(layers, before, strict=True)
    ]

    assert moved == [False, False, True, True]
    assert all(p.grad is None for layer in layers[:2] for p in layer.parameters())


def test_optimizer_state_can_still_be_saved() -> None:
    """The state of a frozen parameter leaves with it: `state_dict` fails on state without a parameter."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    train_once(model, optimizer)
    freeze_layers(model, optimizer, 1.0, freeze_start=0.0)
    saved = optimizer.state_dict()

    assert saved["param_groups"][0]["params"] == [0, 1]
    assert sorted(saved["state"]) == [0, 1]


def test_freezing_again_is_the_same_as_freezing_once() -> None:
    """Each epoch starts from the first layer; what is frozen stays frozen."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = freeze_layers(model, optimizer, 0.75, freeze_start=0.0)
    second = freeze_layers(model, optimizer, 0.75, freeze_start=0.0)

    assert first == second == (2, 0.75)
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_weights_tied_to_a_layer_that_trains_stay_trainable() -> None:
    """An embedding that is also the output layer's weight is not frozen from under it."""
    embedding, hidden, output = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
    output.weight = embedding.weight
    model = nn.Sequential(embedding, hidden, output)
    depth, _ = freeze_layers(model, torch.optim.SGD(model.parameters(), 0.1), 1.0, freeze_start=0.0)

    assert depth == 2
    assert embedding.weight.requires_grad
    assert not hidden.weight.requires_grad


def test_model_without_parameters_has_nothing_to_freeze() -> None:
    """No layers, no error."""
    assert freeze_layers(nn.ReLU(), [], 1.0, freeze_start=0.0) == (0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"freeze_start": -0.1}, r"freeze_start=-0\.1 .* \[0, 1\]"),
        ({"freeze_start": 1.1}, r"freeze_start=1\.1 .* \[0, 1\]"),
        ({"freeze_level": 2}, r"freeze_level=2 .* \[0, 1\]"),
    ],
)
def test_fractions_out_of_range_are_refused(arguments: dict[str, float], message: str) -> None:
    """The error names the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=message):
        LayerFreezing(**arguments)
    with pytest.raises(ConfigurationError, match=message):
        freeze_layers(nn.Linear(1, 1), [], 0.5, **arguments)


def test_current_duration_out_of_range_is_refused() -> None:
    """A number of epochs given for a fraction is caught."""
    with pytest.raises(ConfigurationError, match=r"current_duration=3 .* \[0, 1\]"):
        freeze_layers(nn.Linear(1, 1), [], 3)


def test_epoch_end_freezes_by_the_elapsed_training_and_logs_it() -> None:
    """Halfway through the second half of the run, half of the freezable layers are frozen."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = make_state(model=model, optimizers=[optimizer], batches=75)
    records = InMemoryLogger()
    LayerFreezing(freeze_level=0.7).apply(Event.EPOCH_END, state, Logger(state, [records]))

    assert records.most_recent_values == {
        "layer_freezing/layers_frozen": 1,
        "layer_freezing/percentage_frozen": 0.35,
    }
    assert len(optimizer.param_groups[0]["params"]) == 6


def test_run_without_a_duration_cannot_be_frozen_by_its_fraction() -> None:
    """The error says what to give the run."""
    state = make_state(model=small_model(), max_duration=None)

    with pytest.raises(ConfigurationError, match=r"LayerFreezing .* max_duration"):
        LayerFreezing().apply(Event.EPOCH_END, state, Logger())


def test_layer_freezing_runs_at_the_end_of_an_epoch_only() -> None:
    """Of all forty events, one; and wrappers are told about missing gradients."""
    state = make_state()

    assert {event for event in Event if LayerFreezing().match(event, state)} == {Event.EPOCH_END}
    assert LayerFreezing().find_unused_parameters is True
