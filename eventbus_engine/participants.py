"""Who takes part in an engine: its algorithms, callbacks and destinations, checked, named and bound."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from eventbus_engine._options import (
    free_name,
    name_of,
    unique_names,
)
from eventbus_engine.algorithm import FunctionAlgorithm
from eventbus_engine.callback import (
    Callback,
    FunctionCallback,
    check_callback,
    check_hooks,
    has_lifetime,
    refuse_twice,
    unwrap,
)
from eventbus_engine.entries import AlgorithmEntry, CallbackEntry
from eventbus_engine.errors import HandlerTypeError
from eventbus_engine.event import EventName, resolve_event
from eventbus_engine.handlers import Handler
from eventbus_engine.logger import is_destination
from eventbus_engine.passes import ConflictWarning, check_constraints, find_conflicts

__all__ = ["Course", "Participants"]

log: logging.Logger = logging.getLogger("eventbus_engine")


class Course(NamedTuple):
    """The callbacks with a hook for one event: those it waits for, and those in the background."""

    inline: list[Handler]
    background: list[Handler]


class Participants:
    """The algorithms and callbacks of an engine at one moment.

    Args:
        algorithms: in registration order.
        callbacks: in registration order, destinations among them.
        destinations: further destinations, of the engine's logger.
        events: the engine's vocabulary.
        before: the participants until now: who stays keeps its history.

    Raises:
        ConfigurationError: something cannot take part, is there twice, or contradicts something else.
    """

    def __init__(
        self,
        algorithms: Sequence[Any],
        callbacks: Sequence[Any],
        destinations: Sequence[Any],
        events: type[EventName],
        before: Participants | None = None,
    ) -> None:
        self.seen_algorithms: tuple[Any, ...] = tuple(algorithms)
        self.seen_callbacks: tuple[Any, ...] = tuple(callbacks)
        self.seen_destinations: tuple[Any, ...] = tuple(destinations)
        self.warned: set[frozenset[str]] = before.warned if before is not None else set()
        everybody = [*callbacks, *(d for d in destinations if not any(d is c for c in callbacks))]
        refuse_twice("algorithm", algorithms)
        refuse_twice("callback", callbacks)
        names = unique_names(algorithms)
        self.algorithms: list[AlgorithmEntry] = [AlgorithmEntry(a, n) for a, n in zip(algorithms, names, strict=True)]
        check_constraints(algorithms)
        for algorithm in algorithms:
            _check_events(algorithm, events)
        seen = [*before.entries, *before.departed] if before is not None else []
        known = {id(entry.callback): entry for entry in seen}
        self.entries: list[CallbackEntry] = []
        taken = {entry.name for entry in seen}
        for callback in everybody:
            entry = known.get(id(callback))
            if entry is None:
                check_callback(callback)
                _check_events(callback, events)
                check_hooks(callback, events)
                entry = CallbackEntry(callback, free_name(name_of(callback), taken), is_destination(callback), events)
                if not (entry.hooks or entry.destination or isinstance(callback, Callback) or has_lifetime(callback)):
                    raise HandlerTypeError(
                        f"{callback!r} is no callback: it has no hook for any event of {events.__name__}; "
                        f"name its methods like events, or derive it from Callback"
                    )
            self.entries.append(entry)
        # Who has left the run while open, or while its worker may still open it, is to be closed with it.
        left = [entry for entry in seen if entry not in self.entries]
        self.departed: list[CallbackEntry] = [e for e in left if e.opened or e.delivery == "background"]
        self.destinations: list[CallbackEntry] = [entry for entry in self.entries if entry.destination]
        watching = [entry for entry in self.entries if not entry.destination]
        inline = [entry for entry in watching if entry.delivery == "inline"]
        background = [entry for entry in watching if entry.delivery == "background"]
        self.all_opened: bool = all(entry.opened for entry in self.entries)
        self._inline = inline
        self._background = background
        self._courses: dict[EventName, Course] = {}
        everything = self.algorithms or self.destinations
        self.heard: frozenset[EventName] = frozenset(
            event for event in events if everything or any(event in entry.hooks for entry in self.entries)
        )
        for entry in self.entries:
            entry.changed = self._courses.clear
        self._warn_of_conflicts()

    def course(self, event: EventName) -> Course:
        """Who has a hook for an event and gets it. Worked out once, until somebody is opened, closed or dropped."""
        course = self._courses.get(event)
        if course is None:
            inline = [hook for hook in _hooks_of(self._inline, event) if hook.owner.ready]
            course = self._courses[event] = Course(inline, _hooks_of(self._background, event))
        return course

    def changed(self, algorithms: Sequence[Any], callbacks: Sequence[Any], destinations: Sequence[Any]) -> bool:
        """Whether these are others than the ones seen, by identity."""
        return not (
            _same(self.seen_algorithms, algorithms)
            and _same(self.seen_callbacks, callbacks)
            and _same(self.seen_destinations, destinations)
        )

    def _warn_of_conflicts(self) -> None:
        for pair in find_conflicts(self.seen_algorithms):
            if frozenset(pair) not in self.warned:
                self.warned.add(frozenset(pair))
                warnings.warn(
                    f"{pair[0]} conflicts with {pair[1]}, and both are registered; drop one of them",
                    ConflictWarning,
                    stacklevel=4,
                )


def _hooks_of(entries: Sequence[CallbackEntry], event: EventName) -> list[Handler]:
    return [entry.hooks[event] for entry in entries if event in entry.hooks]


def _same(seen: tuple[Any, ...], now: Sequence[Any]) -> bool:
    return len(seen) == len(now) and all(map(is_, seen, now))


def _check_events(participant: Any, events: type[EventName]) -> None:
    """The events named in a decorator have to be of the engine's vocabulary, or the function would never run."""
    target = unwrap(participant)
    if isinstance(target, FunctionAlgorithm | FunctionCallback):
        for event in target.events:
            resolve_event(event, events)
