"""Which algorithms run on an event, in which order, and why: the passes applied, with a record of what each did."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from eventbus_engine._options import accepts, free_name, name_of
from eventbus_engine.entries import AlgorithmEntry
from eventbus_engine.errors import ConfigurationError, PassError
from eventbus_engine.event import EventName
from eventbus_engine.handlers import add_note
from eventbus_engine.passes import DEFAULT_PASSES, AlgorithmPass, pass_name

__all__ = ["NO_ORDER", "Move", "Order", "Plan", "arrange", "collect_passes"]


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


NO_ORDER = Order((), {}, ())
"""That of no algorithms at all."""


def arrange(
    matched: Sequence[AlgorithmEntry],
    event: EventName,
    passes: Sequence[AlgorithmPass],
    registered: Sequence[AlgorithmEntry] = (),
) -> Order:
    """Apply the passes, one after another, to the algorithms that matched.

    Args:
        matched: in registration order.
        event: the event.
        passes: in their order.
        registered: all the algorithms there are; a pass that adds one of those adds it under its name.

    Raises:
        PassError: a pass returned something else than a sequence of algorithms.
        Exception: whatever a pass raised, with a note naming it.
    """
    entries = {id(entry.algorithm): entry for entry in (*registered, *matched)}
    sequence: list[Any] = [entry.algorithm for entry in matched]
    dropped: dict[str, str] = {}
    moves: list[Move] = []
    for algorithm_pass in passes:
        name = pass_name(algorithm_pass)
        try:
            result: object = algorithm_pass(list(sequence), event)  # a copy: a pass may well sort in place
        except Exception as error:
            add_note(error, f"in pass {name} on {event.name}")
            raise
        after = _check_result(result, name, event)
        if len(after) == len(sequence) and all(a is b for a, b in zip(after, sequence, strict=True)):
            continue
        _enter(after, name, event, entries)
        _compare(sequence, after, name, entries, moves, dropped)
        sequence = after
    return Order(tuple(entries[id(algorithm)] for algorithm in sequence), dropped, tuple(moves))


def _check_result(result: object, name: str, event: EventName) -> list[Any]:
    """The list of what a pass returned, unless that is no sequence."""
    if result is None:
        raise PassError(f"pass {name} returned None on {event.name}; return the algorithms to run, reordered or not")
    if inspect.iscoroutine(result):
        result.close()
        raise PassError(
            f"pass {name} returned a coroutine on {event.name}; a pass decides the order: make it a plain def"
        )
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise PassError(
            f"pass {name} returned {type(result).__name__} on {event.name}; it has to return a list of algorithms"
        )
    return list(result)


def _enter(after: Sequence[Any], name: str, event: EventName, entries: dict[int, AlgorithmEntry]) -> None:
    """Enter what a pass has added, unless that is no algorithm, or there twice."""
    seen: set[int] = set()
    for algorithm in after:
        if id(algorithm) in seen:
            raise PassError(f"pass {name} returned {algorithm!r} twice on {event.name}; every algorithm runs once")
        seen.add(id(algorithm))
        if id(algorithm) not in entries:
            free = free_name(name_of(algorithm), {entry.name for entry in entries.values()})
            try:
                entries[id(algorithm)] = AlgorithmEntry(algorithm, free)
            except ConfigurationError as error:
                raise PassError(f"pass {name} returned {algorithm!r} on {event.name}: {error}") from error


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


PassesArgument: TypeAlias = (
    AlgorithmPass | tuple[AlgorithmPass, int] | Sequence["AlgorithmPass | tuple[AlgorithmPass, int]"] | None
)
"""The forms of `algorithm_passes=`: one pass, a `(pass, index)`, or a list of those."""


def collect_passes(given: PassesArgument) -> list[AlgorithmPass]:
    """The default passes and the user's: one pass, a list, a `(pass, index)`, or a list of those.

    Raises:
        ConfigurationError: anything else.
    """
    passes = list(DEFAULT_PASSES)
    items: Iterable[Any] = () if given is None else given if _is_list(given) else (given,)  # type: ignore[assignment]
    for item in items:
        algorithm_pass, index = item if _is_indexed(item) else (item, -1)
        insert_pass(passes, algorithm_pass, index)
    return passes


def _is_list(given: object) -> bool:
    return isinstance(given, Iterable) and not callable(given) and not _is_indexed(given)


def _is_indexed(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and callable(item[0]) and not callable(item[1])


def insert_pass(passes: list[AlgorithmPass], algorithm_pass: Callable[..., Any], index: int) -> None:
    """Put a pass at an index, -1 for the end.

    Raises:
        ConfigurationError: it cannot be called with `(algorithms, event)`, or the index is no number.
    """
    if not callable(algorithm_pass) or isinstance(algorithm_pass, type) or not accepts(algorithm_pass, 2):
        raise ConfigurationError(
            f"{algorithm_pass!r} is no pass; give a function (algorithms, event) -> algorithms, or (function, index)"
        )
    if not isinstance(index, int):
        raise ConfigurationError(f"index={index!r} of pass {pass_name(algorithm_pass)} has to be a number")
    if index == -1:
        passes.append(algorithm_pass)
    else:
        passes.insert(index, algorithm_pass)
