"""Who takes part in an engine now, and in which order its passes put the algorithms."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eventbus_engine._options import read_option
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import Logger
from eventbus_engine.participants import Course, Participants
from eventbus_engine.passes import AlgorithmPass
from eventbus_engine.plan import NO_ORDER, Order, arrange, collect_passes

if TYPE_CHECKING:
    from eventbus_engine.engine import Engine
    from eventbus_engine.entries import AlgorithmEntry
    from eventbus_engine.event import EventName

__all__ = ["DEFAULT_PASSES", "Roster"]

DEFAULT_PASSES: list[AlgorithmPass] = collect_passes(None)


class Roster:
    """The participants of an engine: from its state's own lists, live, where it has such lists, else as given.

    Args:
        engine: whose state, logger, vocabulary and passes it goes by.
        algorithms: as given to the engine.
        callbacks: likewise.
        own_logger: whether the engine's logger follows its callbacks.

    Attributes:
        latest: the participants as last seen.
    """

    def __init__(
        self, engine: Engine[Any], algorithms: Sequence[Any], callbacks: Sequence[Any], *, own_logger: bool
    ) -> None:
        self._engine = engine
        self._given = {"algorithms": list(algorithms), "callbacks": list(callbacks)}
        self._own_logger = own_logger
        self._state_checked: Any = self._given
        self._theirs: set[str] = set()
        self._passes: list[AlgorithmPass] = []
        self._all_pure = True
        self._orders: dict[tuple[Any, ...], Order] = {}
        self._turn = threading.RLock()
        # For which of them, and which version of the logger, `latest` is right without another look; none so far.
        self._logger: Any = self
        self._state: Any = None
        self._version: int = -1
        self.latest: Participants = self._gather(None)

    def course(self, event: EventName) -> Course:
        """The course of an event through the participants as they are now. Raises what `now` does."""
        engine, logger = self._engine, self._logger
        if logger is engine.logger and self._state is engine.state and self._version == logger.version:
            course = self.latest.courses.get(event)
            if course is not None:
                return course
        return self.now().course(event)

    def now(self) -> Participants:
        """The participants now.

        Raises:
            ConfigurationError: something cannot take part, is there twice, or contradicts something else.
        """
        engine, logger = self._engine, self._logger
        if logger is engine.logger and self._state is engine.state and self._version == logger.version:
            return self.latest
        state: Any = engine.state
        latest = self.latest
        if self._state_checked is state and len(self._theirs) == 2:
            algorithms, callbacks = state.algorithms, state.callbacks  # as every event of a training run
        else:
            algorithms, callbacks = self._live("algorithms"), self._live("callbacks")
        if latest.changed(algorithms, callbacks, self._destinations()):
            latest = self._renew()
        # What was given to the engine stays, and a logger of ours says when its destinations change.
        if type(engine.logger) is Logger and not self._theirs:
            self._logger, self._state, self._version = engine.logger, engine.state, engine.logger.version
        return latest

    def _renew(self) -> Participants:
        # Two threads must not make two entries of one callback: each would open it.
        with self._turn:
            if self.latest.changed(self._live("algorithms"), self._live("callbacks"), self._destinations()):
                self.latest = self._gather(self.latest)
                self._orders.clear()
            return self.latest

    def order(self, matched: list[AlgorithmEntry], event: EventName) -> Order:
        """The order of these algorithms, from memory where every pass depends on nothing else."""
        passes = self._engine.algorithm_passes
        if not matched and passes == DEFAULT_PASSES:
            return NO_ORDER
        if self._passes != passes:
            self._passes = list(passes)
            self._all_pure = all(getattr(one, "pure", False) is True for one in passes)
            self._orders.clear()
        if not self._all_pure:
            return arrange(matched, event, passes, self.latest.algorithms)
        key = event, *matched
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = arrange(matched, event, passes, self.latest.algorithms)
        return order

    def _live(self, kind: str) -> Sequence[Any]:
        """The participants of a kind now: the state's own list where it has one, else the constructor's."""
        state = self._engine.state
        if self._state_checked is not state:
            self._state_checked = state
            self._theirs = {k for k in self._given if isinstance(read_option(state, k, None), Sequence)}
        given = self._given[kind]
        if kind not in self._theirs:
            return given
        theirs: Sequence[Any] = getattr(state, kind)
        if given:
            raise ConfigurationError(
                f"{kind} were given to the engine, and its state has {kind} of its own; pass them in one place"
            )
        return theirs

    def _gather(self, before: Participants | None) -> Participants:
        algorithms, callbacks = self._live("algorithms"), self._live("callbacks")
        if self._own_logger:
            self._engine.logger.follow(callbacks, before.seen_callbacks if before is not None else ())
        return Participants(algorithms, callbacks, self._destinations(), self._engine.events, before)

    def _destinations(self) -> Sequence[Any]:
        """The destinations of the logger now."""
        logger = self._engine.logger
        if isinstance(logger, Logger):
            logger.staged = True
            return logger.destinations
        listed = read_option(logger, "destinations", ())
        return listed if isinstance(listed, Sequence) else ()
