"""An algorithm or a callback as its engine sees it: checked, named, its options read and its hooks bound."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from eventbus_engine._options import (
    check_call,
    is_async_callable,
    read_choice,
    read_instance,
    read_number,
    read_option,
    read_timeout,
)
from eventbus_engine._steps import without_loop
from eventbus_engine.algorithm import check_algorithm
from eventbus_engine.blocking import HookThread
from eventbus_engine.callback import (
    Callback,
    bind_hook,
    has_lifetime,
    overrides,
    sender_of,
    unwrap,
)
from eventbus_engine.errors import CallbackInUseError, ConfigurationError
from eventbus_engine.event import EventName
from eventbus_engine.handlers import EVENT, HOOK, Handler, told
from eventbus_engine.policy import Circuit, Retry
from eventbus_engine.telemetry.spans import Template

__all__ = ["AlgorithmEntry", "CallbackEntry"]

log: logging.Logger = logging.getLogger("eventbus_engine")

_open_in: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Which engine each open callback is open in, by the callback's id. Weak: an engine that is gone holds nothing."""


class AlgorithmEntry:
    """An algorithm, its name in traces and what to call.

    Attributes:
        keys: its key in the traces of an event, by the event.
    """

    __slots__ = ("algorithm", "apply", "is_async", "keys", "match", "name", "templates", "timeout")

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
        self.keys: dict[EventName, str] = _Keys(name)


class _Keys(dict[EventName, str]):
    """The keys of an algorithm in the traces of events, each made when first asked for."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __missing__(self, event: EventName) -> str:
        key = self[event] = f"{self._name}/{event.name}"
        return key


class CallbackEntry:
    """A callback, its name, its options, and how it has been doing.

    Attributes:
        changed: called whenever it is opened, closed or dropped from the run; set by who keeps count of those ready.
    """

    __slots__ = (
        "_opened",
        "_quarantined",
        "blocks_after",
        "callback",
        "changed",
        "circuit",
        "coalesce_key",
        "delivery",
        "destination",
        "events",
        "failures",
        "hooks",
        "max_batch",
        "max_pending",
        "max_wait",
        "name",
        "on_error",
        "on_full",
        "patient",
        "quarantine_after",
        "retry",
        "sender",
        "snapshot",
        "spool",
        "thread",
        "timeout",
        "told",
    )

    changed: Callable[[], None]

    def __init__(self, callback: Any, name: str, destination: bool, events: type[EventName]) -> None:
        self.callback: Any = callback
        self.name: str = name
        self.events: type[EventName] = events
        self.destination: bool = destination
        described = f"callback {name}"
        # A destination that is none of ours has no say about it either: telemetry never kills a run.
        default = "log" if destination else "raise"
        has_say = read_option(callback, "on_error", None) is not None
        choices = ("raise", "log", "quarantine")
        self.on_error: str = read_choice(callback, "on_error", choices, described) if has_say else default
        self.quarantine_after: int = read_number(
            callback, "quarantine_after", 3, described, what="failures", least=1, whole=True
        )
        self.timeout: float | None = read_timeout(callback, described)
        self.delivery: str = read_choice(callback, "delivery", ("inline", "background"), described)
        self.on_full: str = read_choice(callback, "on_full", ("drop_oldest", "block", "coalesce"), described)
        self.max_pending: int = read_number(
            callback, "max_pending", 1000, described, what="events", least=1, whole=True
        )
        self.snapshot: Sequence[str] = read_option(callback, "snapshot", ())
        if not isinstance(self.snapshot, tuple | list) or not all(isinstance(name, str) for name in self.snapshot):
            raise ConfigurationError(
                f"{described} has snapshot={self.snapshot!r}; give a tuple of names of attributes, as in ('loss',)"
            )
        self.blocks_after: float = read_number(callback, "blocks_after", 0.1, described, what="seconds")
        blocking = read_choice(callback, "run_blocking", (False, True), described)
        self.thread: HookThread | None = HookThread(name) if blocking else None
        self._read_delivery(described)
        self.failures: int = 0
        # The types of exceptions that have been logged of its records, since the last event without one.
        self.told: set[type[Exception]] = set()
        self._quarantined: bool = False
        self._opened: bool = False
        bound = {event: self._bind(event) for event in events}
        self.hooks: dict[EventName, Handler] = {event: hook for event, hook in bound.items() if hook is not None}

    def _read_delivery(self, described: str) -> None:
        """The options that only background delivery has."""
        callback = self.callback
        self.retry: Retry | None = read_instance(callback, "retry", Retry, described)
        self.circuit: Circuit | None = read_instance(callback, "circuit", Circuit, described)
        self.coalesce_key: Callable[[Any, Any], Any] | None = read_option(callback, "coalesce_key", None)
        if getattr(self.coalesce_key, "__func__", None) is Callback.coalesce_key:
            self.coalesce_key = None
        if self.coalesce_key is not None:
            check_call(self.coalesce_key, "event, state", f"coalesce_key of {described}")
        bound = sender_of(callback)
        self.sender: Handler | None = None
        if bound is not None:
            self.sender = self._handler("send_records", bound, HOOK)
        # Whether records that failed are kept for another attempt.
        self.patient: bool = self.sender is None and (self.retry is not None or self.circuit is not None)
        most = 1 if self.sender is None else 100
        if read_option(callback, "max_batch", None) is not None:
            most = read_number(callback, "max_batch", most, described, what="events", least=1, whole=True)
        self.max_batch: int = most
        self.max_wait: float = read_number(callback, "max_wait", 0.0, described, what="seconds")
        self.spool: Any = read_option(callback, "spool", None)
        if self.spool is not None:
            from eventbus_engine.spool.option import check_spool  # on use: SQLite takes its time to load

            check_spool(self.spool, described, has_sender=self.sender is not None)
        if self.sender is None and (most > 1 or self.max_wait):
            raise ConfigurationError(
                f"{described} has max_batch or max_wait, but nothing that takes a batch; give it a method "
                f"send_records(records, logger), and let its hooks return what there is to send"
            )
        if self.delivery == "inline" and (self.sender or self.retry or self.circuit):
            what = "send_records" if self.sender is not None else "retry" if self.retry is not None else "circuit"
            raise ConfigurationError(
                f"{described} has {what}, so make it delivery='background'; if events shall not run ahead of it, with "
                f"max_pending=1 and on_full='block' each waits until the one before it is on its way"
            )

    def placed(self, function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
        """A method of its own as it is to be called, on its thread if it has one, and whether that is async."""
        if is_async_callable(function) or self.thread is None:
            return function, is_async_callable(function)
        return self.thread.wrap(function), True

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
        if takes_event:
            return self._handler("run_event", hook, EVENT)
        return self._handler(event.value, hook, HOOK)

    def _handler(self, method: str, function: Callable[..., Any], takes: int) -> Handler:
        call, is_async = self.placed(function)
        timeout = self.timeout
        if timeout is not None and not is_async:
            if self.sender is None:
                raise ConfigurationError(plain_timeout(f"callback {self.name}", method))
            timeout = None  # it only makes a record; what takes its time is the sending
        return Handler(
            self.name,
            call,
            takes,
            is_async=is_async,
            timeout=timeout,
            owner=self,
            # Only failures in a row put it into quarantine, and in the background they are logged once.
            heeded=self.on_error == "quarantine" or self.delivery == "background",
            blocks_after=self.blocks_after,
        )

    def opener(self) -> Handler | None:
        """What there is to run before its first event; with nothing to run, it is open from here on."""
        bound = overrides(self.callback, "open")
        self.opened = bound is None
        if bound is None:
            return None
        call, is_async = self.placed(bound)
        return Handler(self.name, call, HOOK, is_async=is_async, owner=_Opening(self), heeded=True, opens=True)

    def succeeded(self) -> None:
        """Note that it did not fail: only failures in a row count."""
        self.failures = 0

    def settle(self, error: Exception, when: str) -> bool:
        """Decide about a failure at a `moment`: True if the event fails for it, False if it is logged here."""
        if self.on_error == "raise":
            return True
        kind = "destination" if self.destination else "callback"
        said, traceback = told(error)
        self.failures += 1
        if self.on_error == "quarantine" and self.failures >= self.quarantine_after:
            self.quarantined = True
            log.error(
                "%s %s failed %d times in a row, last %s, and is dropped from the run%s",
                kind, self.name, self.failures, when, said, exc_info=traceback,
            )  # fmt: skip
        else:
            log.error("%s %s failed %s%s", kind, self.name, when, said, exc_info=traceback)
        return False

    def blocked(self, seconds: float, event: EventName) -> None:
        """Report, once, that it has held up the event loop."""
        if without_loop.get() or self.blocks_after == math.inf:
            return
        self.blocks_after = math.inf
        for hook in self.hooks.values():
            hook.blocks_after = math.inf
        log.warning(
            "callback %s held up the event loop for %.2g s on %s, and everything else with it; await what it waits "
            "for (an async client), or have its plain methods run on a thread of their own: run_blocking=True",
            self.name, seconds, event.name,
        )  # fmt: skip

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
        if self.thread is not None:
            self.thread.stop()
        if _open_in.get(id(unwrap(self.callback))) is engine:
            del _open_in[id(unwrap(self.callback))]


class _Opening:
    """The owner of a callback's `open`: once that has run to its end, the callback is open."""

    __slots__ = ("_entry",)

    def __init__(self, entry: CallbackEntry) -> None:
        self._entry = entry

    def succeeded(self) -> None:
        self._entry.opened = True

    def settle(self, error: Exception, when: str) -> bool:
        return self._entry.settle(error, when)


def plain_timeout(described: str, method: str) -> str:
    """The message for a limit on what cannot be interrupted."""
    return (
        f"{described} has a timeout, but {method} is a plain function: it runs on the event loop and cannot be "
        f"interrupted; make it `async def {method}`, or drop the timeout"
    )
