"""Composer's algorithms, callbacks and destinations as participants of ours, themselves unchanged."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from eventbus_adapters._composer_peer import THEIRS, composer
from eventbus_adapters._composer_views import logger_of, state_of, traces_to_log
from eventbus_engine._options import MISSING, name_of, own_method, read_option
from eventbus_engine.algorithm import OPTIONS, Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.event import Event
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.trace import Traces

__all__ = ["ComposerAlgorithm", "ComposerCallback", "ComposerDestination", "Guest", "adapt"]

_guests: weakref.WeakValueDictionary[int, Guest] = weakref.WeakValueDictionary()
"""The one guest of each object of Composer's, by its id, so that an engine knows it again. A guest keeps its object."""


def adapt(participant: Any) -> Any:
    """An algorithm, callback or logger destination of Composer's as one of ours; the same one every time.

    What is none of Composer's is returned as it is. In an engine whose state is not Composer's, it gets the engine's
    state and logger in Composer's form.

    Example:
        >>> trainer = Trainer(model, loader, max_duration="3ep", algorithms=[adapt(composer.algorithms.BlurPool())])
    """
    known = _guests.get(id(participant))
    if known is not None and known.theirs is participant:
        return known
    if isinstance(participant, Algorithm | Callback):
        return participant  # a guest, too
    kind = next((kind for theirs, kind in _KINDS if isinstance(participant, theirs)), None)
    if kind is None:
        return participant
    guest = _guests[id(participant)] = kind(participant)
    return guest


class Guest:
    """Stands for one of Composer's objects: it has its class, for passes that ask for that, and its attributes.

    Args:
        theirs: the object.

    Attributes:
        name: the snake_case of its class.
    """

    theirs: Any
    name: str | None

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.name = name_of(theirs)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.theirs)

    def __getattr__(self, name: str) -> Any:
        if name in _HOOKS or name == "theirs":
            raise AttributeError(name)
        return getattr(self.theirs, name)

    def __repr__(self) -> str:
        return repr(self.theirs)

    def _marker(self, kind: str, event: Any, state: Any) -> AbstractContextManager[Any]:
        """What the profiler of Composer's state records the call by."""
        if state.profiler is None:
            return nullcontext()
        of = type(self.theirs).__name__
        marker: AbstractContextManager[Any] = state.profiler.marker(
            f"{kind}/{of}/event/{event.value}", categories=[event.value, of]
        )
        return marker


_HOOKS = frozenset(event.value for event in Event)


class ComposerAlgorithm(Guest, Algorithm[Any, Event]):
    """An algorithm of Composer's. What it has of our algorithms' options counts: `run_before`, `pin` and the rest."""

    def __init__(self, theirs: Any) -> None:
        super().__init__(theirs)
        for option in (*OPTIONS, "interpolate_loss", "required_on_load"):
            value = read_option(theirs, option, MISSING)
            if value is not MISSING:
                setattr(self, option, value)

    def match(self, event: Event, state: Any, /) -> bool:
        """Ask it, with Composer's event and state."""
        matched: bool = self.theirs.match(THEIRS[event], state_of(state))
        return matched

    def apply(self, event: Event, state: Any, logger: Any, /) -> int | None:
        """Run it, with Composer's event, state and logger."""
        theirs, state = THEIRS[event], state_of(state)
        with self._marker("algorithm", theirs, state):
            exit_code: int | None = self.theirs.apply(theirs, state, logger_of(logger, state))
        return exit_code


class ComposerCallback(Guest, Callback[Any]):
    """A callback of Composer's: it has the hooks that the callback overrides, so that the others cost nothing."""

    def __init__(self, theirs: Any) -> None:
        super().__init__(theirs)
        base = composer.core.Callback
        if own_method(theirs, "run_event", base) is not None:
            self.run_event = self._run  # type: ignore[assignment,method-assign]
            return
        for event in Event:
            hook = own_method(theirs, event.value, base)
            if hook is not None:
                setattr(self, event.value, functools.partial(self._call, hook, THEIRS[event]))

    def _run(self, event: Event, state: Any, logger: Any) -> None:
        theirs = THEIRS[event]
        self._call(functools.partial(self.theirs.run_event, theirs), theirs, state, logger)

    def _call(self, hook: Callable[[Any, Any], Any], event: Any, state: Any, logger: Any) -> None:
        state = state_of(state)
        with self._marker("callback", event, state):
            hook(state, logger_of(logger, state))

    def close(self, state: Any, logger: Any) -> None:
        """Close it."""
        state = state_of(state)
        self.theirs.close(state, logger_of(logger, state))

    def post_close(self) -> None:
        """Close what it has left open for the others' closing; from then on, another trainer may have it."""
        self.theirs.post_close()
        composer.core.engine._OPEN_CALLBACKS.discard(self.theirs)


class ComposerDestination(ComposerCallback, LoggerDestination):
    """A destination of Composer's."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """As it does."""
        self.theirs.log_metrics(metrics, step)

    def log_hyperparameters(self, hyperparameters: Any) -> None:
        """As it does."""
        self.theirs.log_hyperparameters(hyperparameters)

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """What ran, in Composer's form, which has no step."""
        ran = traces_to_log(traces)
        if ran:
            self.theirs.log_traces(ran)

    def log_table(self, columns: Any, rows: Any, name: str = "Table", step: int | None = None) -> None:
        """As it does."""
        self.theirs.log_table(columns, rows, name, step)

    def log_images(self, images: Any, *options: Any, **named: Any) -> None:
        """As it does."""
        self.theirs.log_images(images, *options, **named)

    def upload_file(self, state: Any, remote_file_name: str, file_path: Any, *, overwrite: bool = False) -> None:
        """As it does."""
        self.theirs.upload_file(state_of(state), remote_file_name, file_path, overwrite=overwrite)


_KINDS: list[tuple[Any, type[Any]]] = [
    (composer.core.Algorithm, ComposerAlgorithm),
    (composer.loggers.LoggerDestination, ComposerDestination),
    (composer.core.Callback, ComposerCallback),
]
