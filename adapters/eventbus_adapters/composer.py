"""MosaicML Composer on our Engine: `use_engine` for its Trainer, `adapt` for its algorithms, callbacks and loggers.

Importing this module imports Composer, and leaves the process's signal handlers as they are.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from eventbus_adapters._composer_guests import adapt
from eventbus_adapters._composer_peer import OURS, THEIRS, composer
from eventbus_adapters._composer_spans import LoopSpans
from eventbus_adapters._composer_views import Participants, TrainerLogger
from eventbus_engine.engine import Engine
from eventbus_engine.envelope import current
from eventbus_engine.errors import CallbackInUseError, ConfigurationError, SyncUsageError
from eventbus_engine.event import Event, resolve_event
from eventbus_engine.logger import is_destination

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from eventbus_engine.event import EventName
    from eventbus_engine.trace import Traces

__all__ = ["ComposerEngine", "adapt", "use_engine"]


def use_engine(
    trainer: Any,
    *,
    algorithms: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> ComposerEngine:
    """Have a Trainer of Composer's run its events on our Engine, from its next event on.

    Its algorithms, callbacks and loggers stay what and where they are, and passes that were given to it are kept.
    INIT, BEFORE_LOAD and AFTER_LOAD are over by then: its constructor runs them.

    Example:
        >>> trainer = composer.Trainer(model=model, ..., algorithms=[MixUp(), SelectiveBackprop()])
        >>> use_engine(trainer)
        >>> trainer.fit()

    Args:
        trainer: a `composer.Trainer` that has not been closed.
        algorithms: further algorithms of ours, after its own.
        callbacks: further callbacks and destinations of ours, async ones and those in the background too.
        tracer_provider: as in `Engine`.
        meter_provider: as in `Engine`.

    Raises:
        ConfigurationError: it is no Trainer of Composer's, closed, or has our Engine already.
    """
    if not isinstance(trainer, composer.Trainer):
        raise ConfigurationError(f"use_engine takes a composer.Trainer, not a {type(trainer).__name__}")
    before = trainer.engine
    if isinstance(before, ComposerEngine):
        raise ConfigurationError(
            "use_engine was called on this Trainer before, and every event would run twice; give everything to the "
            "first call"
        )
    if before._is_closed:
        raise ConfigurationError("the Trainer is closed; make a new one, and call use_engine on that")
    engine = ComposerEngine(
        trainer.state,
        trainer.logger,
        _own_passes(before.algorithm_passes),
        algorithms=algorithms,
        callbacks=callbacks,
        tracer_provider=tracer_provider,
        meter_provider=meter_provider,
    )
    before._is_closed = True  # or it would close the callbacks as soon as it is collected
    trainer.engine = engine
    return engine


class ComposerEngine:
    """Our Engine, with the interface of Composer's: a Trainer, or a loop over Composer's State, runs its events by it.

    Args:
        state: Composer's. Its algorithms and callbacks take part, live.
        logger: Composer's.
        algorithm_passes: as Composer takes them: they get Composer's events.
        algorithms: further algorithms of ours.
        callbacks: further callbacks and destinations of ours.
        tracer_provider: as in `Engine`.
        meter_provider: as in `Engine`.

    Attributes:
        state: Composer's.
        logger: Composer's.
        engine: ours, to explain an order, listen on its bus, or see what is in flight.
    """

    def __init__(
        self,
        state: Any,
        logger: Any,
        algorithm_passes: Any = None,
        *,
        algorithms: Sequence[Any] = (),
        callbacks: Sequence[Any] = (),
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self.state: Any = state
        self.logger: Any = logger
        others = [each for each in callbacks if is_destination(each)]
        self._participants = Participants(state, adapt, algorithms, callbacks)
        self.engine: Engine[Any] = Engine(
            self._participants,
            TrainerLogger(logger, self._participants, others),
            _with_their_events(algorithm_passes),
            tracer_provider=tracer_provider,
            meter_provider=meter_provider,
        )
        self._spans = LoopSpans(self.engine.tracers, state)
        # Composer's programs do not close their Trainer; the process's end does. This comes before Composer's own.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def algorithm_passes(self) -> list[Any]:
        """All passes, in their order."""
        return self.engine.algorithm_passes

    def register_pass(self, algorithm_pass: Callable[..., Any], index: int = -1) -> None:
        """Add a pass that takes Composer's events, after the others unless given an index."""
        self.engine.register_pass(_with_their_event(algorithm_pass), index)

    def run_event(self, event: Any) -> dict[str, Any]:
        """Run an event, given as Composer's or ours, its value or its name.

        Returns:
            Composer's traces, of what ran, in its order: `{f"{algorithm}/{event}": composer.core.Trace(...)}`.

        Raises:
            UnknownEventError: no such event.
            EngineClosedError: the engine is closed.
            CallbackInUseError: on INIT, a callback is open in another trainer.
            CallbackErrors: callbacks raised.
            Exception: whatever an algorithm raised, with the traces so far as `exc.traces`.
        """
        ours = _resolve(event)
        if ours is Event.INIT:
            self._open()
        if self.state.profiler is None:
            return self._in_their_form(self._run_in_spans(ours))
        marker = self._marker(THEIRS[ours])
        if marker is not None and ours.is_after_event:
            marker.finish()
        traces = self._run_in_spans(ours)
        if marker is not None and ours.is_before_event:
            marker.start()
        return self._in_their_form(traces)

    def run_marker_only_event(self, event: Any) -> None:
        """Start or end what the profiler records for an event, and run nothing: at the end of the data."""
        ours = _resolve(event)
        marker = self._marker(THEIRS[ours])
        if marker is not None:
            (marker.finish if ours.is_after_event else marker.start)()
        if ours is Event.AFTER_DATALOADER:
            self._spans.at_end_of_data()

    def close(self) -> None:
        """Close callbacks and destinations, as `Engine.close` does, and end the data loader's workers."""
        atexit.unregister(self._at_exit)
        if self.engine.closed:
            return
        self._spans.give_up()
        self.engine.sync.close()
        loader = getattr(self.state.train_dataloader, "_iterator", None)
        shut_down = getattr(loader, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def __del__(self) -> None:
        if hasattr(self, "_at_exit"):
            self.close()

    def _run_in_spans(self, event: Event) -> Traces:
        """Run it, within the spans of what it is a part of."""
        self._spans.before(event)
        try:
            traces = self._run(event)
        except BaseException as error:
            self._spans.fail(error)
            raise
        self._spans.after(event)
        return traces

    def _run(self, event: Event) -> Traces:
        """Run it by `engine.sync`, or, from inside a handler, as part of what runs."""
        engine = self.engine
        if current.get() is None or not engine._inside():
            return engine.sync.run_event(event, self.state)
        nested = engine.run_event(event, self.state)
        try:
            nested.send(None)
        except StopIteration as done:
            traces: Traces = done.value
            return traces
        nested.close()
        raise SyncUsageError(
            f"{event.name} was run from inside another event's handler, and somebody async takes part in it, whom a "
            f"plain handler cannot wait for; await engine.run_event(...) in an async handler"
        )

    def _open(self) -> None:
        """Take the callbacks, as Composer's own engine does."""
        taken = composer.core.engine._OPEN_CALLBACKS
        for callback in self.state.callbacks:
            if callback in taken:
                raise CallbackInUseError(
                    f"callback {type(callback).__name__} is open in another trainer; close that one first "
                    f"(trainer.close()), or give this one a callback of its own"
                )
            taken.add(callback)

    def _marker(self, event: Any) -> Any:
        """What the profiler records the time between two halves of a pair by; None for an event that is no half."""
        profiler = self.state.profiler
        if profiler is None or not (event.is_before_event or event.is_after_event):
            return None
        action = composer.profiler.ProfilerAction
        actions = [action.ACTIVE, action.WARMUP]
        if event in composer.core.engine._ALWAYS_RECORD_EVENTS:
            actions.append(action.SKIP)
        return profiler.marker(f"event/{event.canonical_name}", actions=actions)

    def _in_their_form(self, traces: Traces) -> dict[str, Any]:
        ran = [trace for trace in traces.values() if trace.run]
        if not ran:
            return {}
        result: dict[str, Any] = {}
        for trace in ran:
            event = THEIRS[Event(str(trace.event))]
            result[f"{self._participants.named(trace.name)}/{event}"] = composer.core.Trace(
                name=self._participants.class_of(trace.name),
                event=event,
                exit_code=trace.exit_code,
                order=trace.order,
                run=True,
            )
        return result


def _close_at_exit(engine: weakref.ref[ComposerEngine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()


def _resolve(event: Any) -> Event:
    ours = OURS.get(event)
    return ours if ours is not None else resolve_event(event, Event)


# ------------------------------------------------------------------------------------------------------------ passes


def _own_passes(theirs: Sequence[Any]) -> list[Any]:
    """The passes that somebody has given Composer's engine: in front of its defaults, or after ours."""
    known = composer.core.engine._get_default_passes()
    first = min((theirs.index(each) for each in known if each in theirs), default=0)
    return [(each, index if index < first else -1) for index, each in enumerate(theirs) if each not in known]


def _with_their_events(passes: Any) -> Any:
    """Passes in any form that an engine takes, each so that it gets Composer's event."""
    if callable(passes):
        return _with_their_event(passes)
    if isinstance(passes, Iterable):
        return type(passes)(_with_their_events(each) for each in passes)  # type: ignore[call-arg]
    return passes


def _with_their_event(algorithm_pass: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(algorithm_pass)
    def with_their_event(algorithms: Sequence[Any], event: EventName) -> Any:
        result = algorithm_pass(algorithms, THEIRS[Event(event)])
        return [adapt(each) for each in result] if isinstance(result, Sequence) else result

    return with_their_event
