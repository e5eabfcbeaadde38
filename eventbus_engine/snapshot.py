"""Snapshots: what a background callback gets to see of a state that has long moved on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from eventbus_engine.errors import SnapshotError
from eventbus_engine.handlers import HOOK, Occasion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eventbus_engine.participants import CallbackEntry

__all__ = ["Snapshot", "take_snapshot"]


class Snapshot:
    """What a background callback gets for the state: copies of what it declared, as they were at the event.

    The `timestamp` is there without being declared, if the state has one. Reading anything else is a `SnapshotError`.
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
        if name in ("timestamp", *self._declared):
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


def take_snapshot(entry: CallbackEntry, occasion: Occasion) -> Snapshot:
    """Copy what the callback declared, each attribute once per event however many callbacks ask for it.

    Raises:
        Exception: an attribute cannot be read or copied.
    """
    state, _ = occasion.arguments[HOOK]
    if occasion.copies is None:
        occasion.copies = {}
    copies = occasion.copies
    taken = [name for name in ("timestamp", *entry.snapshot) if hasattr(state, name)]
    for name in taken:
        if name not in copies:
            copies[name] = freeze(getattr(state, name))
    return Snapshot(entry.name, tuple(entry.snapshot), {name: copies[name] for name in taken})


def freeze(value: Any) -> Any:
    """A copy that the original's future does not show in.

    A tensor is detached from its graph first, also one inside a list, tuple or dict: a graph cannot be copied.
    """
    if hasattr(value, "detach") and hasattr(value, "clone"):
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(freeze(item) for item in value)
    if type(value) is dict:
        return {key: freeze(item) for key, item in value.items()}
    return copy.deepcopy(value)
