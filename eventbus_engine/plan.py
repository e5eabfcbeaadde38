"""Which algorithms run on an event, in which order, and why: the passes applied, with a record of what each did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eventbus_engine.algorithm import check_algorithm
from eventbus_engine.errors import ConfigurationError, PassError
from eventbus_engine.event import EventName
from eventbus_engine.participants import AlgorithmEntry, unique_names
from eventbus_engine.passes import DEFAULT_PASSES, AlgorithmPass, pass_name

__all__ = ["Move", "Order", "Plan", "arrange", "collect_passes"]


class Move(NamedTuple):
    """A pass that moved an algorithm: from which position to which, counted from 0; None is outside the order."""

    algorithm_pass: str
    algorithm: str
    from_position: int | None
    to_position: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine would do with its algorithms on an event, and why.

    Attributes:
        event: the event.
        matched: the names of the algorithms that match, in registration order.
        order: their names in the order they would run in.
        moves: what each pass moved, in the order of the passes.
        skipped: name to reason, of those that would not run: `not matched` or `dropped by <pass>`.
    """

    event: EventName
    matched: tuple[str, ...]
    order: tuple[str, ...]
    moves: tuple[Move, ...]
    skipped: dict[str, str]

    def __str__(self) -> str:
        rows = [("", "algorithm", "why")]
        for position, name in enumerate(self.order):
            moved = [
                f"{move.algorithm_pass}: {_position(move.from_position)} -> {_position(move.to_position)}"
                for move in self.moves
                if move.algorithm == name
            ]
            rows.append((str(position), name, "; ".join(moved) or "as registered"))
        rows += [("-", name, reason) for name, reason in self.skipped.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:>{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join([f"{type(self.event).__name__}.{self.event.name}", *lines])


def _position(position: int | None) -> str:
    return "out" if position is None else str(position)


class Order(NamedTuple):
    """The result of the passes: entries to run, what was dropped by which pass, and the moves."""

    entries: tuple[AlgorithmEntry, ...]
    dropped: dict[str, str]
    moves: tuple[Move, ...]


def arrange(matched: Sequence[AlgorithmEntry], event: EventName, passes: Sequence[AlgorithmPass]) -> Order:
    """Apply the passes, one after another, to the algorithms that matched.

    Raises:
        PassError: a pass returned something else than a sequence of algorithms.
        Exception: whatever a pass raised, with a note naming it.
    """
    entries = {id(entry.algorithm): entry for entry in matched}
    sequence: Sequence[Any] = [entry.algorithm for entry in matched]
    dropped: dict[str, str] = {}
    moves: list[Move] = []
    for algorithm_pass in passes:
        name = pass_name(algorithm_pass)
        try:
            result = algorithm_pass(sequence, event)
        except Exception as error:
            error.add_note(f"in pass {name} on {event.name}")
            raise
        if result is sequence:
            continue
        _check_result(result, name, event, entries)
        _compare(sequence, result, name, entries, moves, dropped)
        sequence = list(result)
    return Order(tuple(entries[id(algorithm)] for algorithm in sequence), dropped, tuple(moves))


def _check_result(result: Any, name: str, event: EventName, entries: dict[int, AlgorithmEntry]) -> None:
    """Refuse what is no sequence of algorithms; enter those that the pass has added."""
    if result is None:
        raise PassError(f"pass {name} returned None on {event.name}; it has to return the sequence to run, reordered or not")
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise PassError(
            f"pass {name} returned {type(result).__name__} on {event.name}; it has to return a list of algorithms"
        )
    seen: set[int] = set()
    for algorithm in result:
        if id(algorithm) in seen:
            raise PassError(f"pass {name} returned {algorithm!r} twice on {event.name}; every algorithm runs once")
        seen.add(id(algorithm))
        if id(algorithm) not in entries:
            try:
                check_algorithm(algorithm)
                taken = [entry.algorithm for entry in entries.values()]
                entries[id(algorithm)] = AlgorithmEntry(algorithm, unique_names([*taken, algorithm])[-1])
            except ConfigurationError as error:
                raise PassError(f"pass {name} returned {algorithm!r} on {event.name}, which is no algorithm") from error


def _compare(
    before: Sequence[Any],
    after: Sequence[Any],
    name: str,
    entries: dict[int, AlgorithmEntry],
    moves: list[Move],
    dropped: dict[str, str],
) -> None:
    """Record what a pass moved, dropped and added."""
    old = {id(algorithm): i for i, algorithm in enumerate(before)}
    new = {id(algorithm): i for i, algorithm in enumerate(after)}
    for key in [*old, *(key for key in new if key not in old)]:
        source, target = old.get(key), new.get(key)
        if source == target:
            continue
        moves.append(Move(name, entries[key].name, source, target))
        if target is None:
            dropped[entries[key].name] = f"dropped by {name}"
        else:
            dropped.pop(entries[key].name, None)


PassesArgument = AlgorithmPass | tuple[AlgorithmPass, int] | Sequence["AlgorithmPass | tuple[AlgorithmPass, int]"] | None


def collect_passes(given: PassesArgument) -> list[AlgorithmPass]:
    """The default passes and the user's: one pass, a list, a `(pass, index)`, or a list of those.

    Raises:
        ConfigurationError: anything else.
    """
    passes = list(DEFAULT_PASSES)
    if given is None:
        return passes
    items: list[Any] = [given] if callable(given) or _is_indexed(given) else list(given)  # type: ignore[arg-type]
    for item in items:
        if _is_indexed(item):
            insert_pass(passes, *item)
        else:
            insert_pass(passes, item, -1)
    return passes


def _is_indexed(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and callable(item[0]) and isinstance(item[1], int)


def insert_pass(passes: list[AlgorithmPass], algorithm_pass: Callable[..., Any], index: int) -> None:
    """Put a pass at an index, -1 for the end.

    Raises:
        ConfigurationError: it cannot be called, or the index is no number.
    """
    if not callable(algorithm_pass) or isinstance(algorithm_pass, type):
        raise ConfigurationError(
            f"{algorithm_pass!r} is no pass; give a function (algorithms, event) -> algorithms, or (function, index)"
        )
    if not isinstance(index, int):
        raise ConfigurationError(f"index={index!r} of pass {pass_name(algorithm_pass)} has to be a number")
    if index == -1:
        passes.append(algorithm_pass)
    else:
        passes.insert(index, algorithm_pass)
