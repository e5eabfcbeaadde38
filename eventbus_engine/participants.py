"""Who takes part in an engine: its algorithms, callbacks and destinations, checked, named and bound."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

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
from eventbus_engine.handlers import HOOK, Handler
from eventbus_engine.limits import check_step
from eventbus_engine.logger import is_destination
from eventbus_engine.passes import ConflictWarning, check_constraints, find_conflicts
from eventbus_engine.trace import Trace

__all__ = ["Course", "Participants"]

log: logging.Logger = logging.getLogger("eventbus_engine")


class Course:
    """The way of one event through the participants, worked out once.

    Args:
        participants: whose callbacks these are.
        event: the event.

    Attributes:
        algorithms: all of them, each with its `match`, its key in the traces, and its trace where it does not match.
        inline: the callbacks with a hook for it that it waits for.
        background: those with a hook for it in the background.
        inline_alone: whether those inline are all there is besides the algorithms, and come behind them.
        first: the plain hooks that those inline begin with, each with what to call with `(state, logger)`.
        closely: whether to look at the clock after each of those, rather than after all of them.
        patience: seconds past which one of those inline may have held up the event loop.
    """

    __slots__ = (
        "_event",
        "_has_been_slow",
        "algorithms",
        "background",
        "closely",
        "first",
        "inline",
        "inline_alone",
        "participants",
        "patience",
    )

    def __init__(self, participants: Participants, event: EventName) -> None:
        self.participants: Participants = participants
        self.algorithms: list[tuple[AlgorithmEntry, Callable[[Any, Any], Any], str, Trace]] = [
            (entry, entry.match, entry.keys[event], Trace(entry.name, event, reason="not matched"))
            for entry in participants.algorithms
        ]
        self.inline: list[Handler] = [hook for hook in participants.inline_hooks(event) if hook.owner.ready]
        self.background: list[Handler] = participants.background_hooks(event)
        self.inline_alone: bool = not (self.background or participants.destinations or event == "init")
        plain = itertools.takewhile(lambda hook: not (hook.is_async or hook.heeded), self.inline)
        self.first: list[tuple[Handler, Callable[[Any, Any], Any]]] = [
            (hook, hook.call if hook.takes == HOOK else partial(hook.call, event)) for hook in plain
        ]
        self.closely: bool = True
        self.patience: float = min((hook.blocks_after for hook in self.inline), default=math.inf)
        self._event = event
        self._has_been_slow = False

    def took(self, seconds: float) -> None:
        """Hear how long its first hooks have taken together, and decide how closely to look the next time.

        A look at the clock costs as much as calling a hook. So once they have all been quick, one is enough for all of
        them, until it says that something was slow.
        """
        if seconds > self.patience:
            if not self.closely and len(self.first) == 1:
                check_step(self.first[0][0], self._event, seconds)
            self.closely = self._has_been_slow = True
        elif not self._has_been_slow:
            self.closely = False


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
        self._seen = (*self.seen_algorithms, *self.seen_callbacks, *self.seen_destinations)
        self._sizes = len(self.seen_algorithms), len(self.seen_callbacks), len(self._seen)
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
        self.all_opened: bool = all(entry.opened for entry in self.entries)
        self._inline = [entry for entry in watching if entry.delivery == "inline"]
        self._background = [entry for entry in watching if entry.delivery == "background"]
        self.courses: dict[EventName, Course] = {}
        everything = self.algorithms or self.destinations
        self.heard: frozenset[EventName] = frozenset(
            event for event in events if everything or any(event in entry.hooks for entry in self.entries)
        )
        for entry in self.entries:
            entry.changed = self.courses.clear
        self._warn_of_conflicts()

    def course(self, event: EventName) -> Course:
        """Who has a hook for an event and gets it. Worked out once, until somebody is opened, closed or dropped."""
        course = self.courses.get(event)
        if course is None:
            course = self.courses[event] = Course(self, event)
        return course

    def inline_hooks(self, event: EventName) -> list[Handler]:
        """Those for an event of the callbacks that it waits for, destinations aside."""
        return _hooks_of(self._inline, event)

    def background_hooks(self, event: EventName) -> list[Handler]:
        """Those for an event of the callbacks in the background."""
        return _hooks_of(self._background, event)

    def changed(self, algorithms: Sequence[Any], callbacks: Sequence[Any], destinations: Sequence[Any]) -> bool:
        """Whether these are others than the ones seen, by identity."""
        # All in one, because it is asked on every event of an engine whose state brings them.
        now = (*algorithms, *callbacks, *destinations)
        return (len(algorithms), len(callbacks), len(now)) != self._sizes or not all(map(is_, self._seen, now))

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


def _check_events(participant: Any, events: type[EventName]) -> None:
    """The events named in a decorator have to be of the engine's vocabulary, or the function would never run."""
    target = unwrap(participant)
    if isinstance(target, FunctionAlgorithm | FunctionCallback):
        for event in target.events:
            resolve_event(event, events)
