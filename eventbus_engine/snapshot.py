"""Snapshots: what a background callback gets to see of a state that has long moved on."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from eventbus_engine.errors import SnapshotError
from eventbus_engine.handlers import HOOK, Occasion
from eventbus_engine.time import Time, Timestamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eventbus_engine.entries import CallbackEntry
    from eventbus_engine.event import EventName

__all__ = ["Record", "Snapshot", "kept_values", "take_snapshot"]


class Record(NamedTuple):
    """One thing to send, as `send_records` gets it.

    Attributes:
        event: where it comes from; None for what was logged after the last event.
        state: the event's snapshot, None without an event.
        time: when the event was published, in UTC.
        id: unique, and the same for every attempt to send it: the key by which the far side can tell a repetition.
        value: what the hook, or the `log_*` method, has returned.
    """

    event: EventName | None
    state: Any
    time: datetime
    id: str
    value: Any


_UNASKED = ("timestamp", "metrics")
"""What every snapshot holds: when it was, and how well it went so far."""


class Snapshot:
    """What a background callback gets for the state: copies of what it declared, as they were at the event.

    The `timestamp` and the `metrics` are there without being declared, if the state has them. Reading anything else
    is a `SnapshotError`.
    """

    __slots__ = ("_declared", "_name", "_values")

    _declared: tuple[str, ...]
    _name: str
    _values: Mapping[str, Any]

    def __init__(self, name: str, declared: tuple[str, ...], values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_declared", declared)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy, pickle and the like, before there is anything to look up in
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if name in (*_UNASKED, *self._declared):
            raise SnapshotError(
                f"background callback {self._name} read state.{name}, which the state did not have at the event"
            )
        raise SnapshotError(
            f"background callback {self._name} read state.{name}, which its snapshot does not hold; declare it: "
            f"snapshot = {(*self._declared, name)!r}"
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise SnapshotError(
            f"background callback {self._name} set state.{name}, but its snapshot is frozen; change the state in an "
            f"algorithm"
        )

    def __delattr__(self, name: str) -> None:
        raise SnapshotError(f"background callback {self._name} deleted state.{name}, but its snapshot is frozen")

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self._name, self._declared, self._values)

    def __repr__(self) -> str:
        return f"<Snapshot for {self._name}: {', '.join(self._values)}>"


def kept_values(snapshot: Snapshot) -> dict[str, Any]:
    """What is kept of a snapshot that outlives the process: its time, and what was declared."""
    names = ("timestamp", *snapshot._declared)
    return {name: value for name, value in snapshot._values.items() if name in names}


_FROZEN = (str, int, float, bytes, type(None), Time, Timestamp)


def take_snapshot(entry: CallbackEntry, occasion: Occasion) -> Snapshot:
    """Copy what the callback declared, each attribute once per event however many callbacks ask for it.

    Raises:
        Exception: an attribute cannot be read or copied.
    """
    state, _ = occasion.arguments[HOOK]
    if occasion.copies is None:
        occasion.copies = {}
    copies = occasion.copies
    taken = [name for name in (*_UNASKED, *entry.snapshot) if hasattr(state, name)]
    for name in taken:
        if name not in copies:
            copies[name] = freeze(getattr(state, name))
    return Snapshot(entry.name, tuple(entry.snapshot), {name: copies[name] for name in taken})


def freeze(value: Any) -> Any:
    """A copy that the original's future does not show in.

    A tensor is detached from its graph first, also one inside a list, tuple or dict: a graph cannot be copied.
    """
    if isinstance(value, _FROZEN):
        return value
    if hasattr(value, "detach") and hasattr(value, "clone"):
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(freeze(item) for item in value)
    if type(value) is dict:
        return {key: freeze(item) for key, item in value.items()}
    return copy.deepcopy(value)
