"""Composer's state, logger and traces for its objects, whatever engine they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

from eventbus_adapters._composer_loop import LoggerOfOurs, StateOfOurs
from eventbus_adapters._composer_peer import THEIRS, composer
from eventbus_engine._options import unique_names
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger, LoggerDestination
from eventbus_engine.trace import Traces
from eventbus_engine.training.state import State

__all__ = ["Destination", "Live", "Participants", "TrainerLogger", "logger_of", "state_of", "traces_to_log"]

STATE: Any = composer.core.State


class Participants:
    """Composer's state as the state of an engine of ours: the same, but for who takes part.

    Args:
        state: Composer's. Its lists stay live.
        adapt: makes a participant of ours of one of Composer's.
        algorithms: further ones, after those of the state.
        callbacks: likewise.
    """

    def __init__(
        self, state: Any, adapt: Callable[[Any], Any], algorithms: Iterable[Any], callbacks: Iterable[Any]
    ) -> None:
        own = {
            "theirs": state,
            "_algorithms": Live(adapt, algorithms),
            "_callbacks": Live(adapt, callbacks),
        }
        vars(self).update(own)

    @property
    def algorithms(self) -> Sequence[Any]:
        """All algorithms, in registration order."""
        everybody: Sequence[Any] = vars(self)["_algorithms"].now(self.theirs.algorithms)
        return everybody

    @property
    def callbacks(self) -> Sequence[Any]:
        """All callbacks and destinations, in registration order."""
        everybody: Sequence[Any] = vars(self)["_callbacks"].now(self.theirs.callbacks)
        return everybody

    def class_of(self, name: str) -> str:
        """The name of the class of the algorithm that is called so in our traces."""
        algorithm = self.named(name)
        return name if algorithm is name else str(algorithm.__class__.__name__)

    def named(self, name: str) -> Any:
        """The algorithm that is called so in our traces; the name itself for one that a pass has added."""
        return vars(self)["_algorithms"].named(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["theirs"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.theirs, name, value)


class Live:
    """A list of Composer's, and who else takes part, adapted anew when it has changed."""

    def __init__(self, adapt: Callable[[Any], Any], others: Iterable[Any]) -> None:
        self._adapt = adapt
        self._others = [adapt(other) for other in others]
        self._seen: list[Any] = []
        self._everybody: list[Any] = self._others
        self._names = dict(zip(unique_names(self._everybody), self._everybody, strict=True))

    def now(self, theirs: Sequence[Any]) -> Sequence[Any]:
        """Theirs and the others, as participants of ours."""
        seen = self._seen
        # It is asked on every event.
        if len(seen) != len(theirs) or not all(map(is_, seen, theirs)):
            self._seen = list(theirs)
            self._everybody = [*map(self._adapt, theirs), *self._others]
            self._names = dict(zip(unique_names(self._everybody), self._everybody, strict=True))
        return self._everybody

    def named(self, name: str) -> Any:
        """The participant that is called so in our traces; the name itself for one that a pass has added."""
        return self._names.get(name, name)


class Destination(LoggerDestination):
    """Composer's logger as a destination of ours, so that all its destinations get what participants of ours log."""

    name = "composer"

    def __init__(self, theirs: Any, participants: Participants) -> None:
        self.theirs = theirs
        self._participants = participants

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """As it does."""
        self.theirs.log_metrics(metrics, step)

    def log_hyperparameters(self, hyperparameters: Any) -> None:
        """As it does."""
        self.theirs.log_hyperparameters(hyperparameters)

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """What ran, in Composer's form."""
        ran = traces_to_log(traces, self._participants.class_of)
        if ran:
            self.theirs.log_traces(ran)

    def log_table(self, *arguments: Any, **named: Any) -> None:
        """As it does."""
        self.theirs.log_table(*arguments, **named)

    def log_images(self, *arguments: Any, **named: Any) -> None:
        """As it does."""
        self.theirs.log_images(*arguments, **named)

    def upload_file(self, state: Any, remote_file_name: str, file_path: Any, *, overwrite: bool = False) -> None:
        """As it does, with its own state."""
        self.theirs.upload_file(remote_file_name, file_path, overwrite=overwrite)


class TrainerLogger(Logger):
    """The logger of an engine in Composer's Trainer: Composer's objects get Composer's, which is `theirs`."""

    def __init__(self, theirs: Any, participants: Participants, destinations: Iterable[Any]) -> None:
        # Without a destination, events that nobody has a hook for cost next to nothing.
        logs = [Destination(theirs, participants)] if theirs.destinations else []
        super().__init__(participants, [*logs, *destinations])
        self.theirs: Any = theirs


def traces_to_log(traces: Traces, class_of: Callable[[str], str] = str) -> dict[str, int]:
    """The traces of what ran, as Composer's engine logs them."""
    return {
        f"algorithm_traces/{class_of(trace.name)}/{THEIRS[Event(str(trace.event))]}": 1
        for trace in traces.values()
        if trace.run
    }


def state_of(state: Any) -> Any:
    """A state in Composer's form.

    Raises:
        ConfigurationError: it is neither Composer's nor that of a training loop of ours.
    """
    if isinstance(state, STATE):
        return state
    if isinstance(state, Participants):
        return state.theirs
    if not isinstance(state, State):
        raise ConfigurationError(
            f"one of Composer's objects was to run on a {type(state).__name__}; give the engine Composer's State, or "
            f"that of the Trainer"
        )
    return _view_of(state, StateOfOurs)


def logger_of(logger: Any, state: Any) -> Any:
    """A logger in Composer's form, for a state of Composer's."""
    if isinstance(logger, TrainerLogger):
        return logger.theirs
    if not isinstance(logger, Logger):
        return logger
    return _view_of(logger, LoggerOfOurs, state)


def _view_of(ours: State | Logger, kind: type[Any], *arguments: Any) -> Any:
    """What stands for a state or a logger of ours; it is kept there, and so goes with it."""
    view = vars(ours).get("_in_composers_form")
    if view is None:
        view = vars(ours)["_in_composers_form"] = kind(ours, *arguments)
    return view
