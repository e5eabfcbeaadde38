"""Passes: pure functions over the algorithms that matched an event, which decide the order they run in.

A pass takes the sequence so far and the event, and returns the sequence to run: reordered, shortened or extended.
The engine applies the default ones in this order:

1. `set_filo_order` mirrors the order on the second half of every before/after pair;
2. `apply_pins`, `sort_selective_backprop_first` and `sort_fused_layernorm_last` then put first what has to be
   first, and last what has to be last. Mirror first, then pin: the other way round, the mirror undoes the pin;
3. `apply_constraints` makes `run_before`, `run_after` and `around` hold, whatever the above did;
4. `warn_if_multiple_loss_interpolation` looks at the result.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from eventbus_engine._options import name_of, read_choice, read_option, unique_names
from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import ConfigurationError, CycleError
from eventbus_engine.event import EventName

__all__ = [
    "DEFAULT_PASSES",
    "AlgorithmPass",
    "ConflictWarning",
    "LossInterpolationWarning",
    "apply_constraints",
    "apply_pins",
    "pure",
    "set_filo_order",
    "sort_fused_layernorm_last",
    "sort_selective_backprop_first",
    "sort_to_back",
    "sort_to_front",
    "warn_if_multiple_loss_interpolation",
]

AlgorithmPass: TypeAlias = Callable[[Sequence[Algorithm[Any, Any]], EventName], Sequence[Algorithm[Any, Any]]]

T = TypeVar("T")
PassT = TypeVar("PassT", bound=Callable[..., Any])


class ConflictWarning(UserWarning):
    """Two algorithms were combined although one declares that it conflicts with the other."""


class LossInterpolationWarning(UserWarning):
    """More than one algorithm interpolates the loss, so that their effects multiply."""


def pure(algorithm_pass: PassT) -> PassT:
    """Declare that a pass depends on nothing but its arguments, so that the engine may remember its result."""
    algorithm_pass.pure = True  # type: ignore[attr-defined]
    return algorithm_pass


def is_a(candidate: object, cls: type[Any] | str) -> bool:
    """Whether an object is of a class, which may be given by its name alone.

    By name, a class is recognised anywhere in the MRO, without importing it: so the built-in pins hold for classes
    of that name in other libraries as well.
    """
    if isinstance(cls, str):
        return any(base.__name__ == cls for base in candidate.__class__.__mro__)
    return isinstance(candidate, cls)


def sort_to_front(list_to_sort: Sequence[T], cls: type[Any] | str) -> Sequence[T]:
    """Move what is of a class to the front; otherwise keep the order. A name finds the class in any module."""
    return sorted(list_to_sort, key=lambda item: not is_a(item, cls))


def sort_to_back(list_to_sort: Sequence[T], cls: type[Any] | str) -> Sequence[T]:
    """Move what is of a class to the back; otherwise keep the order. A name finds the class in any module."""
    return sorted(list_to_sort, key=lambda item: is_a(item, cls))


@pure
def set_filo_order(algorithms: Sequence[Algorithm[Any, Any]], event: EventName) -> Sequence[Algorithm[Any, Any]]:
    """First in, last out: reverse the order on the second half of every before/after pair.

    What an algorithm did on the way in, it undoes on the way out, after everything done on top of it is undone.
    `_start` and `_end` events are never reversed.
    """
    return list(reversed(algorithms)) if event.is_mirrored else algorithms


@pure
def apply_pins(algorithms: Sequence[Algorithm[Any, Any]], event: EventName) -> Sequence[Algorithm[Any, Any]]:
    """Move algorithms with `pin = "first"` to the front and with `pin = "last"` to the back, on every event."""
    rank = {"first": 0, None: 1, "last": 2}
    return sorted(algorithms, key=lambda a: rank[read_pin(a)])


def read_pin(algorithm: object) -> str | None:
    """The `pin` option of an algorithm, checked."""
    pin: str | None = read_choice(algorithm, "pin", (None, "first", "last"), f"algorithm {name_of(algorithm)}")
    return pin


@pure
def sort_selective_backprop_first(
    algorithms: Sequence[Algorithm[Any, Any]], event: EventName
) -> Sequence[Algorithm[Any, Any]]:
    """Run SelectiveBackprop before everything else: it must judge the examples before any augmentation."""
    return sort_to_front(algorithms, "SelectiveBackprop")


@pure
def sort_fused_layernorm_last(
    algorithms: Sequence[Algorithm[Any, Any]], event: EventName
) -> Sequence[Algorithm[Any, Any]]:
    """Run FusedLayerNorm after everything else: it must replace the layer norms that other surgery brings in.

    Composer's successor of that class, LowPrecisionLayerNorm, is held last as well.
    """
    return sort_to_back(sort_to_back(algorithms, "LowPrecisionLayerNorm"), "FusedLayerNorm")


@pure
def warn_if_multiple_loss_interpolation(
    algorithms: Sequence[Algorithm[Any, Any]], event: EventName
) -> Sequence[Algorithm[Any, Any]]:
    """Warn if more than one algorithm has `interpolate_loss = True`. The order is left as it is."""
    names = [name_of(a) for a in algorithms if read_option(a, "interpolate_loss", False) is True]
    if len(names) > 1:
        warnings.warn(
            f"{' and '.join(names)} all interpolate the loss, so their effects multiply; set interpolate_loss=False "
            f"on all but one",
            LossInterpolationWarning,
            stacklevel=2,
        )
    return algorithms


@pure
def apply_constraints(algorithms: Sequence[Algorithm[Any, Any]], event: EventName) -> Sequence[Algorithm[Any, Any]]:
    """Make `run_before`, `run_after` and `around` hold, moving as little as possible.

    A stable topological sort: it takes, again and again, the earliest algorithm whose predecessors are all out
    (Kahn, "Topological sorting of large networks", CACM 5(11), 1962, with the position as the priority).

    Raises:
        CycleError: if the constraints contradict each other.
    """
    before = predecessors(algorithms, way_out=event.is_after_event)
    if not before:
        return algorithms
    order: list[Algorithm[Any, Any]] = []
    waiting = list(range(len(algorithms)))
    while waiting:
        ready = next((i for i in waiting if not before.get(i)), None)
        if ready is None:
            raise cycle_error(algorithms, before)
        waiting.remove(ready)
        order.append(algorithms[ready])
        for others in before.values():
            others.discard(ready)
    return order


def predecessors(algorithms: Sequence[Any], *, way_out: bool) -> dict[int, set[int]]:
    """Which positions have to come before which, by the constraints; empty where there are none."""
    before: dict[int, set[int]] = {}
    for i, algorithm in enumerate(algorithms):
        around = read_references(algorithm, "around")
        later = [*read_references(algorithm, "run_before"), *(() if way_out else around)]
        earlier = [*read_references(algorithm, "run_after"), *(around if way_out else ())]
        for reference in later:
            for j in find(algorithms, reference, i):
                before.setdefault(j, set()).add(i)
        for reference in earlier:
            before.setdefault(i, set()).update(find(algorithms, reference, i))
    return {i: others for i, others in before.items() if others}


def read_references(algorithm: object, option: str) -> Collection[Any]:
    """An option that lists other algorithms, checked."""
    references = read_option(algorithm, option, ())
    if isinstance(references, str | bytes) or not isinstance(references, Collection):
        raise ConfigurationError(
            f"algorithm {name_of(algorithm)} has {option}={references!r}; give a tuple of classes or names, "
            f"for example {option} = ('mixup',)"
        )
    for reference in references:
        if not isinstance(reference, str | type) and not callable(getattr(reference, "match", None)):
            raise ConfigurationError(
                f"algorithm {name_of(algorithm)} has {reference!r} in {option}; name algorithms by class or by name"
            )
    return references


def find(algorithms: Sequence[Any], reference: Any, but: int) -> list[int]:
    """The positions a reference (class, name, class name or object) means, never the algorithm that makes it."""
    return [i for i, candidate in enumerate(algorithms) if i != but and _means(reference, candidate)]


def _means(reference: Any, candidate: object) -> bool:
    if isinstance(reference, str):
        return name_of(candidate) == reference or is_a(candidate, reference)
    return isinstance(candidate, reference) if isinstance(reference, type) else candidate is reference


def cycle_error(algorithms: Sequence[Any], before: Mapping[int, set[int]]) -> CycleError:
    """The error for constraints that contradict each other, naming the whole cycle."""
    unique = unique_names(algorithms)
    names = [unique[i] for i in find_cycle(before)]
    names.append(names[0])
    return CycleError(
        f"the ordering constraints contradict each other: {' before '.join(names)}; drop one of the run_before, "
        f"run_after or around that say so",
        names,
    )


def find_cycle(before: Mapping[int, set[int]]) -> list[int]:
    """Positions of which each has to come before the next, and the last before the first; empty if there are none."""
    stuck = dict(before)
    while free := [i for i, others in stuck.items() if not others & stuck.keys()]:
        for i in free:
            del stuck[i]
    if not stuck:
        return []
    # Whatever is stuck has a predecessor that is: following them leads round in the end.
    walk = [min(stuck)]
    while (earlier := min(stuck[walk[-1]] & stuck.keys())) not in walk:
        walk.append(earlier)
    cycle = walk[walk.index(earlier) :][::-1]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def check_constraints(algorithms: Sequence[Any]) -> None:
    """Refuse contradictory or malformed options of all algorithms together, before any event.

    Raises:
        CycleError: naming the whole cycle.
        ConfigurationError: a constraint or pin that cannot be read.
    """
    for algorithm in algorithms:
        read_pin(algorithm)
    for way_out in (False, True):
        before = predecessors(algorithms, way_out=way_out)
        if find_cycle(before):
            raise cycle_error(algorithms, before)


def find_conflicts(algorithms: Sequence[Any]) -> list[tuple[str, str]]:
    """The pairs of algorithms of which one declares a conflict with the other, each pair once."""
    names = unique_names(algorithms)
    pairs: dict[frozenset[int], tuple[str, str]] = {}
    for i, algorithm in enumerate(algorithms):
        for reference in read_references(algorithm, "conflicts_with"):
            for j in find(algorithms, reference, i):
                pairs.setdefault(frozenset((i, j)), (names[i], names[j]))
    return list(pairs.values())


def pass_name(algorithm_pass: Callable[..., Any]) -> str:
    """What to call a pass in errors, traces and plans."""
    while isinstance(algorithm_pass, functools.partial):
        algorithm_pass = algorithm_pass.func
    return str(getattr(algorithm_pass, "__name__", None) or type(algorithm_pass).__name__)


DEFAULT_PASSES: tuple[AlgorithmPass, ...] = (
    set_filo_order,
    apply_pins,
    sort_selective_backprop_first,
    sort_fused_layernorm_last,
    apply_constraints,
    warn_if_multiple_loss_interpolation,
)
