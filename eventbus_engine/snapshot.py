"""Snapshots: what a background callback gets to see of a state that has long moved on."""

from __future__ import annotations

import copy
import gc
from collections import deque
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from eventbus_engine.errors import SnapshotError
from eventbus_engine.handlers import Occasion
from eventbus_engine.time import Time, Timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


_CURE = "let the state be an object, such as a dataclass or types.SimpleNamespace(**state), and name them in snapshot="

_NOT_THERE = "which the state did not have at the event"


class Snapshot:
    """What a background callback gets for the state: copies of what it declared, as they were at the event.

    The `timestamp` and the `metrics` are there without being declared, if the state has them and they can be copied;
    out of a spool comes only the timestamp, if it is a `Timestamp` or a `Time`. Reading anything else is a
    `SnapshotError`. The keys of a dict are no attributes, so a state that is a dict shows nothing.

    What callbacks do to what they read shows to no other: each has its own copy, made when it first reads it. Only
    tensors and arrays, which are copied once per event, are the same for all.
    """

    __slots__ = ("_declared", "_keyed", "_missing", "_name", "_own", "_values")

    _declared: tuple[str, ...]
    _keyed: bool
    _missing: Mapping[str, str]
    _name: str
    _own: dict[str, Any]
    _values: Mapping[str, Any]

    def __init__(
        self,
        name: str,
        declared: tuple[str, ...],
        values: Mapping[str, Any],
        keyed: bool = False,
        missing: Mapping[str, str] | None = None,
    ) -> None:
        object.__setattr__(self, "_declared", declared)
        object.__setattr__(self, "_keyed", keyed)
        object.__setattr__(self, "_missing", missing or {})
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_own", {})
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy, pickle and the like, before there is anything to look up in
            raise AttributeError(name)
        if name in self._values:
            own = self._own
            return own[name] if name in own else own.setdefault(name, thaw(self._values[name]))
        raise SnapshotError(f"background callback {self._name} read state.{name}, {self._why_not(name)}")

    def _why_not(self, name: str) -> str:
        if self._keyed:
            return f"but the state is a dict, and a snapshot is of attributes; {_CURE}"
        if name in self._missing:
            return self._missing[name]
        if name in self._declared:
            return _NOT_THERE
        declare = f"declare it: snapshot = {(*self._declared, name)!r}"
        if name in _UNASKED:
            return f"which its snapshot does not hold: out of a spool come a Timestamp and what is declared; {declare}"
        return f"which its snapshot does not hold; {declare}"

    def __getitem__(self, key: object) -> Any:
        raise SnapshotError(
            f"background callback {self._name} read state[{key!r}], but a snapshot has attributes and no keys; {_CURE}"
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise SnapshotError(
            f"background callback {self._name} set state.{name}, but its snapshot is frozen; change the state in an "
            f"algorithm"
        )

    def __delattr__(self, name: str) -> None:
        raise SnapshotError(f"background callback {self._name} deleted state.{name}, but its snapshot is frozen")

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self._name, self._declared, self._values, self._keyed, self._missing)

    def __repr__(self) -> str:
        return f"<Snapshot for {self._name}: {', '.join(self._values)}>"


def kept_values(snapshot: Snapshot) -> dict[str, Any]:
    """What is kept of a snapshot that outlives the process: what was declared, and its time.

    A time that nobody declared is kept only if it is one of ours, which every spool can keep.
    """
    kept = {name: value for name, value in snapshot._values.items() if name in snapshot._declared}
    time = snapshot._values.get("timestamp")
    return {"timestamp": time, **kept} if isinstance(time, Time | Timestamp) else kept


class _Failure(NamedTuple):
    """Stands for what could not be read or copied."""

    error: Exception


def take_snapshot(entry: CallbackEntry, occasion: Occasion) -> Snapshot:
    """Copy what the callback declared, each attribute once per event however many callbacks ask for it.

    Raises:
        SnapshotError: what it declared cannot be read or copied. What nobody declared is left out then.
    """
    state = occasion.state
    if occasion.copies is None:
        occasion.copies = {}
    copies = occasion.copies
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in (*_UNASKED, *entry.snapshot):
        if name not in copies:
            copies[name] = _copy_of(state, name)
        copied = copies[name]
        if copied is _ABSENT:
            missing[name] = _NOT_THERE
        elif not isinstance(copied, _Failure):
            values[name] = copied
        elif name not in entry.snapshot:
            missing[name] = f"which could not be copied at the event: {_shown(copied.error)}"
        else:
            raise SnapshotError(
                f"background callback {entry.name} has {name!r} in snapshot=, but state.{name} cannot be copied: "
                f"{_shown(copied.error)}; leave it out, and put what the callback needs of it into an attribute of "
                f"numbers, strings or tensors"
            ) from copied.error
    return Snapshot(entry.name, tuple(entry.snapshot), values, isinstance(state, dict), missing)


_ABSENT = object()


def _copy_of(state: Any, name: str) -> Any:
    try:
        value = getattr(state, name, _ABSENT)
        return value if value is _ABSENT else freeze(value)
    except Exception as error:
        return _Failure(error)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_ATOMS = frozenset({str, int, float, bool, bytes, type(None), Time})
"""What cannot change."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, SimpleNamespace)


def freeze(value: Any) -> Any:
    """A copy that the original's future does not show in.

    Tensors are detached from their graph first, wherever they are in it: a graph cannot be copied. The parameters of a
    module, which have none, stay parameters.
    """
    if _is_tensor(value):
        return value.detach().clone()
    return _copy(value, _detached)


def thaw(value: Any) -> Any:
    """A copy of what is frozen, for one callback; with the same tensors and arrays."""
    return value if _is_leaf(value) else _copy(value, lambda leaf, _: leaf)


def _detached(leaf: Any, within_object: bool) -> Any:
    """The copy of a tensor; None for what can be copied with all the rest."""
    if not _is_tensor(leaf) or (within_object and getattr(leaf, "is_leaf", False)):
        return None
    return leaf.detach().clone()


def _copy(value: Any, copy_leaf: Callable[[Any, bool], Any]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is Timestamp:
        return value.copy()
    # Nearly all metrics are no deeper than this.
    if kind is dict and _ATOMS.issuperset(map(type, value.values())):
        return value.copy()
    copies = {id(leaf): copy_leaf(leaf, within) for leaf, within in leaves_of(value)}
    return copy.deepcopy(value, {key: leaf for key, leaf in copies.items() if leaf is not None})


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "clone") and not isinstance(value, type)


def _is_leaf(value: Any) -> bool:
    return _is_tensor(value) or (hasattr(value, "__array__") and not isinstance(value, type))


def leaves_of(value: Any) -> list[tuple[Any, bool]]:
    """The tensors and arrays in a value, as deep as a copy goes, and whether they are in an object, too."""
    leaves: list[tuple[Any, bool]] = []
    seen: set[int] = set()
    stack = [(value, False)]
    while stack:
        item, within = stack.pop()
        if type(item) in _ATOMS or id(item) in seen:
            continue
        seen.add(id(item))
        if _is_leaf(item):
            leaves.append((item, within))
        elif isinstance(item, _CONTAINERS):
            stack += [(inner, within) for inner in gc.get_referents(item)]
        elif _copied_by_attribute(type(item)):
            stack += [(inner, True) for inner in gc.get_referents(item)]
    return leaves


def _copied_by_attribute(cls: type) -> bool:
    """Whether a copy of such an object is one of its attributes. Types, modules and functions are not copied at all."""
    return (
        cls.__module__ != "builtins"
        and not issubclass(cls, type)
        and not hasattr(cls, "__deepcopy__")
        and cls.__reduce__ is object.__reduce__
        and cls.__reduce_ex__ is object.__reduce_ex__
    )
