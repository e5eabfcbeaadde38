"""Who takes part in an engine: its algorithms, callbacks and destinations, checked, named and bound."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

from eventbus_engine._options import (
    free_name,
    is_async_callable,
    name_of,
    read_choice,
    read_option,
    read_timeout,
    unique_names,
)
from eventbus_engine.algorithm import FunctionAlgorithm, check_algorithm
from eventbus_engine.callback import (
    Callback,
    FunctionCallback,
    bind_hook,
    check_callback,
    check_hooks,
    has_lifetime,
    overrides,
    unwrap,
)
from eventbus_engine.errors import CallbackInUseError, ConfigurationError, HandlerTypeError
from eventbus_engine.event import EventName, resolve_event
from eventbus_engine.handlers import EVENT, HOOK, Handler
from eventbus_engine.logger import is_destination
from eventbus_engine.passes import ConflictWarning, check_constraints, find_conflicts
from eventbus_engine.telemetry.spans import Template

__all__ = ["AlgorithmEntry", "CallbackEntry", "Participants"]

log: logging.Logger = logging.getLogger("eventbus_engine")

_open_in: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Which engine each open callback is open in, by the callback's id. Weak: an engine that is gone holds nothing."""


class AlgorithmEntry:
    """An algorithm, its name in traces and what to call."""

    __slots__ = ("_keys", "algorithm", "apply", "is_async", "match", "name", "templates", "timeout")

    def __init__(self, algorithm: Any, name: str) -> None:
        check_algorithm(algorithm)
        self.algorithm: Any = algorithm
        self.name: str = name
        self.match: Callable[[Any, Any], Any] = algorithm.match
        self.apply: Callable[[Any, Any, Any], Any] = algorithm.apply
        self.is_async: bool = is_async_callable(self.apply)
        self.templates: dict[EventName, Template] = {}
        self.timeout: float | None = read_timeout(algorithm, f"algorithm {name}")
        if self.timeout is not None and not self.is_async:
            raise ConfigurationError(plain_timeout(f"algorithm {name}", "apply"))
        self._keys: dict[EventName, str] = {}

    def key(self, event: EventName) -> str:
        """Its key in the traces of an event."""
        key = self._keys.get(event)
        if key is None:
            key = self._keys[event] = f"{self.name}/{event.name}"
        return key


class CallbackEntry:
    """A callback, its name, its options, and how it has been doing."""

    __slots__ = (
        "_opened",
        "_quarantined",
        "callback",
        "changed",
        "delivery",
        "destination",
        "failures",
        "hooks",
        "max_pending",
        "name",
        "on_error",
        "on_full",
        "quarantine_after",
        "snapshot",
        "timeout",
    )

    def __init__(self, callback: Any, name: str, destination: bool, events: type[EventName]) -> None:
        self.callback: Any = callback
        self.name: str = name
        self.destination: bool = destination
        described = f"callback {name}"
        # A destination that is none of ours has no say about it either: telemetry never kills a run.
        default = "log" if destination else "raise"
        has_say = read_option(callback, "on_error", None) is not None
        choices = ("raise", "log", "quarantine")
        self.on_error: str = read_choice(callback, "on_error", choices, described) if has_say else default
        self.quarantine_after: int = read_option(callback, "quarantine_after", 3)
        if not isinstance(self.quarantine_after, int) or self.quarantine_after < 1:
            raise ConfigurationError(
                f"{described} has quarantine_after={self.quarantine_after!r}; give a number of failures, 1 or more"
            )
        self.timeout: float | None = read_timeout(callback, described)
        self.delivery: str = read_choice(callback, "delivery", ("inline", "background"), described)
        self.on_full: str = read_choice(callback, "on_full", ("drop_oldest", "block", "coalesce"), described)
        self.max_pending: int = read_option(callback, "max_pending", 1000)
        if not isinstance(self.max_pending, int) or self.max_pending < 1:
            raise ConfigurationError(
                f"{described} has max_pending={self.max_pending!r}; give a number of events, 1 or more"
            )
        self.snapshot: Sequence[str] = read_option(callback, "snapshot", ())
        if not isinstance(self.snapshot, tuple | list) or not all(isinstance(name, str) for name in self.snapshot):
            raise ConfigurationError(
                f"{described} has snapshot={self.snapshot!r}; give a tuple of names of attributes, as in ('loss',)"
            )
        self.failures: int = 0
        self.changed: Callable[[], None] = _nothing
        self._quarantined: bool = False
        self._opened: bool = False
        bound = {event: self._bind(event) for event in events}
        self.hooks: dict[EventName, Handler] = {event: hook for event, hook in bound.items() if hook is not None}

    @property
    def opened(self) -> bool:
        """Whether its `open`, if it has one, has run to its end."""
        return self._opened

    @opened.setter
    def opened(self, opened: bool) -> None:
        self._opened = opened
        self.changed()

    @property
    def quarantined(self) -> bool:
        """Whether it has been dropped from the run."""
        return self._quarantined

    @quarantined.setter
    def quarantined(self, quarantined: bool) -> None:
        self._quarantined = quarantined
        self.changed()

    @property
    def ready(self) -> bool:
        """Whether it gets events: it is open, and has not been dropped."""
        return self.opened and not self.quarantined

    def _bind(self, event: EventName) -> Handler | None:
        """Its hook for an event, bound; None where it has none."""
        bound = bind_hook(self.callback, event)
        if bound is None:
            return None
        hook, takes_event = bound
        is_async = is_async_callable(hook)
        if self.timeout is not None and not is_async:
            method = "run_event" if takes_event else event.value
            raise ConfigurationError(plain_timeout(f"callback {self.name}", method))
        takes = EVENT if takes_event else HOOK
        # Only failures in a row put it into quarantine.
        heeded = self.on_error == "quarantine"
        return Handler(self.name, hook, takes, is_async=is_async, timeout=self.timeout, owner=self, heeded=heeded)

    def lifetime_handler(self, method: str) -> Handler | None:
        """Its `open` or `close`, bound; None where it has none of its own."""
        bound = overrides(self.callback, method)
        if bound is None:
            return None
        return Handler(self.name, bound, HOOK, is_async=is_async_callable(bound), owner=_Opening(self), heeded=True)

    def opener(self) -> Handler | None:
        """What there is to run before its first event; with nothing to run, it is open from here on."""
        handler = self.lifetime_handler("open")
        self.opened = handler is None
        return handler

    def succeeded(self) -> None:
        """Note that it did not fail: only failures in a row count."""
        self.failures = 0

    def settle(self, error: Exception, event: EventName) -> bool:
        """Decide about a failure: True if the event fails for it, False if it is logged here."""
        if self.on_error == "raise":
            return True
        kind = "destination" if self.destination else "callback"
        self.failures += 1
        if self.on_error == "quarantine" and self.failures >= self.quarantine_after:
            self.quarantined = True
            log.error(
                "%s %s failed %d times in a row, last on %s, and is dropped from the run",
                kind, self.name, self.failures, event.name, exc_info=error,
            )  # fmt: skip
        else:
            log.error("%s %s failed on %s", kind, self.name, event.name, exc_info=error)
        return False

    def claim(self, engine: Any) -> None:
        """Note that the callback is open in this engine.

        Raises:
            CallbackInUseError: it has a lifetime of its own and is open in another engine.
        """
        target = unwrap(self.callback)
        if not has_lifetime(target):
            return
        holder = _open_in.get(id(target))
        if holder is not None and holder is not engine:
            raise CallbackInUseError(
                f"callback {self.name} is open in another engine; close that one first (await engine.close()), or give "
                f"this engine a callback of its own"
            )
        _open_in[id(target)] = engine

    def closes_in(self, engine: Any) -> bool:
        """Whether this engine is to close it: it has opened it, or nobody had to."""
        holder = _open_in.get(id(unwrap(self.callback)), engine)
        return self.opened or (holder is engine and overrides(self.callback, "open") is None)

    def release(self, engine: Any) -> None:
        """Note that the callback is closed, if it was open in this engine."""
        self.opened = False
        if _open_in.get(id(unwrap(self.callback))) is engine:
            del _open_in[id(unwrap(self.callback))]


class Course(NamedTuple):
    """The callbacks with a hook for one event: those it waits for, and those in the background."""

    inline: list[Handler]
    background: list[Handler]


def _nothing() -> None:
    pass


class _Opening:
    """The owner of a callback's `open`: once that has run to its end, the callback is open."""

    __slots__ = ("_entry",)

    def __init__(self, entry: CallbackEntry) -> None:
        self._entry = entry

    def succeeded(self) -> None:
        self._entry.opened = True

    def settle(self, error: Exception, event: EventName) -> bool:
        return self._entry.settle(error, event)


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
        _refuse_twice("algorithm", algorithms)
        _refuse_twice("callback", callbacks)
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


def plain_timeout(described: str, method: str) -> str:
    """The message for a limit on what cannot be interrupted."""
    return (
        f"{described} has a timeout, but {method} is a plain function: it runs on the event loop and cannot be "
        f"interrupted; make it `async def {method}`, or drop the timeout"
    )


def _same(seen: tuple[Any, ...], now: Sequence[Any]) -> bool:
    return len(seen) == len(now) and all(map(is_, seen, now))


def _refuse_twice(kind: str, participants: Sequence[Any]) -> None:
    targets = [unwrap(participant) for participant in participants]
    for i, participant in enumerate(participants):
        if any(targets[i] is other for other in targets[:i]):
            raise ConfigurationError(
                f"{kind} {name_of(participant)} is registered twice; register another instance of it"
            )


def _check_events(participant: Any, events: type[EventName]) -> None:
    """The events named in a decorator have to be of the engine's vocabulary, or the function would never run."""
    target = unwrap(participant)
    if isinstance(target, FunctionAlgorithm | FunctionCallback):
        for event in target.events:
            resolve_event(event, events)
