"""The passes as the pure functions that they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from eventbus_engine import ConfigurationError, Event, EventName, LossInterpolationWarning, passes
from eventbus_engine.algorithm import Algorithm
from eventbus_engine.passes import (
    DEFAULT_PASSES,
    apply_constraints,
    apply_pins,
    find_conflicts,
    find_cycle,
    is_a,
    pass_name,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)


class MixUp: ...


class SelectiveBackprop: ...


class Derived(SelectiveBackprop): ...


class FusedLayerNorm: ...


class LowPrecisionLayerNorm: ...


def named(*names: str, **options: Any) -> list[Any]:
    """Things of these names, all with these options."""
    return [SimpleNamespace(name=name, **options) for name in names]


def test_every_default_pass_says_that_it_is_pure() -> None:
    """The engine remembers an order only if all passes depend on nothing but their arguments."""
    assert [getattr(p, "pure", False) for p in DEFAULT_PASSES] == [True] * 6


@pytest.mark.parametrize("algorithm_pass", DEFAULT_PASSES)
def test_a_pass_leaves_its_argument_alone(algorithm_pass: Any) -> None:
    """Pure functions return another list, or the same one untouched."""
    given: list[Any] = [
        SimpleNamespace(name="x", run_after=("y",)),
        MixUp(),
        SimpleNamespace(name="y", pin="last"),
        FusedLayerNorm(),
        SelectiveBackprop(),
    ]
    before = list(given)

    result = algorithm_pass(given, Event.AFTER_LOSS)

    assert given == before
    assert sorted(map(id, result)) == sorted(map(id, given))


@pytest.mark.parametrize("algorithm_pass", DEFAULT_PASSES)
def test_a_pass_takes_an_empty_sequence(algorithm_pass: Any) -> None:
    """Most events have no algorithm that matches."""
    assert list(algorithm_pass((), Event.INIT)) == []


def test_the_public_passes_have_the_names_that_others_import() -> None:
    """All of them take algorithms and an event; the two helpers take a list and a class."""
    for name in (
        "set_filo_order",
        "sort_fused_layernorm_last",
        "sort_selective_backprop_first",
        "apply_pins",
        "apply_constraints",
        "warn_if_multiple_loss_interpolation",
    ):
        assert list(inspect.signature(getattr(passes, name)).parameters) == ["algorithms", "event"]
    for name in ("sort_to_front", "sort_to_back"):
        assert list(inspect.signature(getattr(passes, name)).parameters) == ["list_to_sort", "cls"]


def test_sorting_to_front_and_back_keeps_the_order_otherwise() -> None:
    """By class, subclasses included, or by the name of a class."""
    first, second, third = SelectiveBackprop(), MixUp(), Derived()
    given = [second, first, third]

    assert list(sort_to_front(given, SelectiveBackprop)) == [first, third, second]
    assert list(sort_to_front(given, "SelectiveBackprop")) == [first, third, second]
    assert list(sort_to_back(given, MixUp)) == [first, third, second]
    assert list(sort_to_back([first, second, third], "SelectiveBackprop")) == [second, first, third]
    assert list(sort_to_front([3, "a", 2.0, "b"], str)) == ["a", "b", 3, 2.0]


def test_a_mock_of_a_class_counts_as_one() -> None:
    """By name as by class: what `isinstance` says goes."""
    mock = Mock(spec=SelectiveBackprop)

    assert is_a(mock, SelectiveBackprop)
    assert is_a(mock, "SelectiveBackprop")
    assert not is_a(Mock(), "SelectiveBackprop")
    given: list[Any] = [MixUp(), mock]
    assert sort_selective_backprop_first(given, Event.INIT) == given[::-1]


def test_filo_reverses_on_the_second_half_only() -> None:
    """And returns the very sequence where there is nothing to do."""
    given: Any = named("a", "b", "c")

    assert [a.name for a in set_filo_order(given, Event.AFTER_LOSS)] == ["c", "b", "a"]
    assert set_filo_order(given, Event.BEFORE_LOSS) is given
    assert set_filo_order(given, Event.EPOCH_END) is given


def test_pins_go_to_their_ends_and_keep_their_order() -> None:
    """First, unpinned, last."""
    given: Any = [*named("l", "m", pin="last"), *named("a"), *named("f", "g", pin="first"), *named("b", pin=None)]

    assert [a.name for a in apply_pins(given, Event.INIT)] == ["f", "g", "a", "b", "l", "m"]


def test_the_layer_norms_go_last_the_fused_one_last_of_all() -> None:
    """Composer's LowPrecisionLayerNorm too."""
    given: Any = [FusedLayerNorm(), LowPrecisionLayerNorm(), MixUp()]

    actual = [type(a).__name__ for a in sort_fused_layernorm_last(given, Event.INIT)]

    assert actual == ["MixUp", "LowPrecisionLayerNorm", "FusedLayerNorm"]


def test_constraints_that_say_nothing_return_the_very_sequence() -> None:
    """Absent ones, and none at all."""
    given: Any = [*named("a", run_before=("gone",)), *named("b")]

    assert apply_constraints(given, Event.INIT) is given


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({}, []),
        ({1: {0}, 2: {1}}, []),
        ({0: {1}, 1: {0}}, [0, 1]),
        ({1: {0}, 2: {1, 4}, 3: {2}, 4: {3}}, [2, 3, 4]),
        ({0: {2}, 1: {0}, 2: {1}, 3: {2}}, [0, 1, 2]),
        ({5: {3, 4}, 4: {5}}, [4, 5]),
    ],
)
def test_a_cycle_is_found_where_there_is_one(before: dict[int, set[int]], expected: list[int]) -> None:
    """Of the positions on it alone, from the earliest on; what only leads to it is left out."""
    assert find_cycle(before) == expected


def test_conflicts_are_found_once_a_pair() -> None:
    """Whoever declares them, and whatever is not there does not count."""
    given = [
        *named("a", conflicts_with=("b", "gone")),
        *named("b", conflicts_with=["a"]),
        *named("c", conflicts_with={"c"}),
        *named("c"),
    ]

    assert find_conflicts(given) == [("a", "b"), ("c", "c#2")]


def test_interpolating_the_loss_twice_warns() -> None:
    """Naming all who do."""
    given: Any = [*named("a", "b", interpolate_loss=True), *named("c", interpolate_loss=False)]

    with pytest.warns(LossInterpolationWarning, match="a and b all interpolate the loss, so their effects multiply"):
        result = warn_if_multiple_loss_interpolation(given, Event.BEFORE_LOSS)

    assert result is given


def test_interpolating_the_loss_once_does_not_warn() -> None:
    """Nor does the made-up attribute of a Mock, nor anything but True."""
    given: Any = [*named("a", interpolate_loss=True), *named("b", interpolate_loss="yes"), Mock(), Mock()]

    assert warn_if_multiple_loss_interpolation(given, Event.BEFORE_LOSS) is given


def test_a_pass_is_called_by_its_name() -> None:
    """A function's, that inside a partial, or the class of a callable object."""

    class Shuffle:
        def __call__(self, algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
            return algorithms

    assert pass_name(set_filo_order) == "set_filo_order"
    assert pass_name(functools.partial(set_filo_order)) == "set_filo_order"
    assert pass_name(Shuffle()) == "Shuffle"


def test_a_pin_and_a_constraint_are_checked_where_they_are_read() -> None:
    """A pass used on its own says as much as the engine."""
    with pytest.raises(ConfigurationError, match="algorithm a has pin='top'; use None or 'first' or 'last'"):
        apply_pins(named("a", pin="top"), Event.INIT)
    with pytest.raises(ConfigurationError, match="algorithm a has run_before='b'; give a tuple"):
        apply_constraints(named("a", run_before="b"), Event.INIT)


def test_the_option_of_a_base_algorithm_is_empty() -> None:
    """Nothing is constrained unasked."""
    base = Algorithm[Any, Any]()

    assert (base.run_before, base.run_after, base.around, base.conflicts_with, base.pin) == ((), (), (), (), None)
