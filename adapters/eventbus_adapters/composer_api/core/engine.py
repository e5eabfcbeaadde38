"""`composer.core.engine`: the engine with Composer's constructor, and a `run_event` that blocks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from eventbus_adapters.composer_api.core._narration import Narration
from eventbus_engine.engine import Engine as AsyncEngine
from eventbus_engine.errors import CallbackErrors, CallbackInUseError, EngineClosedError, SyncUsageError
from eventbus_engine.event import Event, resolve_event
from eventbus_engine.handlers import add_note
from eventbus_engine.passes import AlgorithmPass
from eventbus_engine.plan import PassesArgument
from eventbus_engine.trace import Trace, Traces

__all__ = ["Engine", "OpenCallbackError", "Trace", "Traces"]

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""The callbacks that an engine has begun with and not closed yet."""


class OpenCallbackError(CallbackInUseError, RuntimeError):
    """A new engine was to begin with a callback that another one has not closed yet."""


class Engine:
    """Runs the algorithms and callbacks of a state, with Composer's signatures, on the engine of this package.

    The participants are the state's `algorithms` and `callbacks`, live. Events block; async handlers take part all the
    same. It closes itself when it is collected as garbage and when the interpreter exits, once.

    With the environment variable ENGINE_DEBUG set, it logs on this module's logger, at level DEBUG, what it runs.

    Args:
        state: with lists `algorithms` and `callbacks`.
        logger: what handlers log to; its destinations take part.
        algorithm_passes: passes besides the default ones: one, a `(pass, index)`, or a list of those.

    Attributes:
        engine: the engine of the package underneath, for what Composer has not: `explain`, `bus`, `in_flight`, `sync`.

    Raises:
        ConfigurationError: something cannot take part, is there twice, or contradicts something else.
    """

    def __init__(self, state: Any, logger: Any, algorithm_passes: PassesArgument = None) -> None:
        self.engine: AsyncEngine[Any] = AsyncEngine(state, logger, _as_passes(algorithm_passes))
        self.engine.tracers = Narration(self.engine, log)
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        # Called by `close`, by the garbage collector or at exit: whichever is first, and only then.
        self._close = weakref.finalize(self, _close, self.engine, self._begun)

    @property
    def state(self) -> Any:
        """What events are about."""
        return self.engine.state

    @state.setter
    def state(self, state: Any) -> None:
        self.engine.state = state

    @property
    def logger(self) -> Any:
        """What handlers log to."""
        return self.engine.logger

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.engine.logger = logger

    @property
    def algorithm_passes(self) -> list[AlgorithmPass]:
        """The passes, in their order."""
        return self.engine.algorithm_passes

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass, after the others unless given an index.

        Raises:
            ConfigurationError: it cannot be called.
        """
        self.engine.register_pass(algorithm_pass, index)

    def run_event(self, event: Event | str) -> Traces:
        """Run the algorithms and callbacks of an event; on INIT the loggers and callbacks first. Blocks.

        Called from one of its handlers it runs the event within the other one, if all its participants are plain.

        Returns:
            What the algorithms did, by `<name>/<EVENT>`: first what ran, in order, then what did not.

        Raises:
            UnknownEventError: no such event.
            EngineClosedError: the engine is closed.
            OpenCallbackError: INIT, and another engine has not closed one of the callbacks.
            SyncUsageError: called from a handler, and one of the participants is async.
            Exception: whatever an algorithm raised, or the first of the callbacks; the others are in its notes.
        """
        member = resolve_event(event, Event)
        if member is Event.INIT and not self.engine.closed:
            self._begin()
        try:
            if self.engine._inside():
                return _finish(self.engine.run_event(member))
            return self.engine.sync.run_event(member)
        except CallbackErrors as errors:
            failures = errors
        # Outside the `except`, so that its own cause and context stay what they were.
        first, *others = failures.exceptions
        for other in others:
            add_note(first, f"besides, another callback raised {other!r}")
        raise first

    def run_marker_only_event(self, event: Event | str) -> None:
        """Check that the event could be run. There are no markers here: spans show what a profiler's would.

        Raises:
            UnknownEventError: no such event.
            EngineClosedError: the engine is closed.
        """
        member = resolve_event(event, Event)
        if self.engine.closed:
            raise EngineClosedError(f"{member.name} was marked, but the engine is closed; make a new Engine")

    def close(self) -> None:
        """Close every callback, then `post_close` those whose `close` did not raise. Twice is no error.

        Exceptions are logged as errors. Called from one of its handlers, it closes once that event has been handled.
        """
        if self.engine._inside():
            _finish(self.engine.close())
        else:
            self._close()

    def _begin(self) -> None:
        """Take the callbacks, all of them or none.

        Raises:
            OpenCallbackError: another engine has one of them.
        """
        callbacks = list(self.state.callbacks)
        for callback in callbacks:
            if callback in _OPEN and callback not in self._begun:
                raise OpenCallbackError(
                    f"{type(callback).__name__} is still open in another engine; close() that one first, or give this "
                    f"one a callback of its own"
                )
        _OPEN.update(callbacks)
        self._begun.update(callbacks)


def _close(engine: AsyncEngine[Any], begun: weakref.WeakSet[Any]) -> None:
    try:
        engine.sync.close()
    finally:
        for callback in begun:
            _OPEN.discard(callback)


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that need not wait for anything, being part of what runs already.

    Raises:
        SyncUsageError: it does.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise SyncUsageError(
        "a handler has run an event in which something async takes part, which cannot be waited for here; make that "
        "handler async, and await engine.engine.run_event(...) in it"
    )


def _as_passes(given: Any) -> PassesArgument:
    """A `[pass, index]` as a tuple: Composer takes it as well."""
    is_pair = isinstance(given, list) and len(given) == 2 and isinstance(given[1], int)
    passes: PassesArgument = tuple(given) if is_pair else given
    return passes
