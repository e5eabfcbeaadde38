"""The spans of a Trainer of Composer's that last for several of its events: the run, its units of work, the pairs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from eventbus_engine.errors import TrainingError
from eventbus_engine.event import Event
from eventbus_engine.handlers import outcome_of
from eventbus_engine.telemetry.spans import TracerSource, event_template
from eventbus_engine.training.tracing import RunTracing, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LoopSpans"]

_RUNS = (Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START)
_UNITS = {
    Event.EPOCH_START: "epoch",
    Event.BEFORE_DATALOADER: "batch",
    Event.EVAL_BEFORE_ALL: "eval",
    Event.EVAL_STANDALONE_START: "eval",
    Event.PREDICT_START: "predict",
}
_LAST = {
    Event.EPOCH_CHECKPOINT: "epoch",
    Event.BATCH_END: "batch",
    Event.BATCH_CHECKPOINT: "resumed",
    Event.EVAL_AFTER_ALL: "eval",
    Event.EVAL_STANDALONE_END: "eval",
    Event.PREDICT_END: "predict",
}
_RUN_ENDS = (Event.FIT_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END)


class LoopSpans:
    """Opens and ends spans as the events of a loop come by, which calls out each of them for itself.

    Args:
        tracers: the engine's.
        state: Composer's, for its name and its timestamp.
    """

    def __init__(self, tracers: TracerSource, state: Any) -> None:
        self._tracers = tracers
        rank = os.environ.get("RANK", "")
        self._tracing = RunTracing(tracers, state, int(rank) if rank.isdigit() else 0)
        self._open: list[tuple[str, ExitStack]] = []
        self._batch: Unit | None = None

    def before(self, event: Event) -> None:
        """An event is about to run."""
        if not self._open and self._tracers.get() is None:
            return
        if event is Event.FIT_START:
            self.give_up()  # what an earlier fit has left
        if event in _RUNS and not self._is_open("run"):
            self._enter("run", self._tracing.run())
        if (unit := _UNITS.get(event)) is not None:
            opened = self._enter(unit, self._tracing.unit(unit))
            if unit == "batch":
                self._batch = opened
        if event is Event.BATCH_CHECKPOINT and self._batch is not None:
            self._enter("resumed", self._batch.resumed())
        if event.partner is not None and event.is_before_event:
            self._enter(event.canonical_name, self._pair(event))

    def after(self, event: Event) -> None:
        """An event has run."""
        if not self._open:
            return
        if event.partner is not None and event.is_after_event:
            self._leave(event.canonical_name)
        if event in _LAST:
            self._leave(_LAST[event])
        if event in _RUN_ENDS and self._open and self._open[-1][0] == "run":
            self._leave("run")

    def at_end_of_data(self) -> None:
        """There was no batch left to fetch: what was begun for it was none."""
        if self._is_open("batch"):
            if self._batch is not None:
                self._batch.rename("end of data")
            self._leave("batch")

    def fail(self, error: BaseException) -> None:
        """The loop ends by an error: so does whatever is open."""
        while self._open:
            _, span = self._open.pop()
            with suppress(type(error)):
                span.__exit__(type(error), error, error.__traceback__)
        self._batch = None

    def give_up(self) -> None:
        """End what an error of the loop itself, between two events, has left open."""
        if self._open:
            self.fail(TrainingError("left without an end: the loop has ended between two of its events"))

    def _is_open(self, name: str) -> bool:
        return any(known == name for known, _ in self._open)

    def _enter(self, name: str, context: AbstractContextManager[Any]) -> Any:
        stack = ExitStack()
        entered = stack.enter_context(context)
        self._open.append((name, stack))
        return entered

    def _leave(self, name: str) -> None:
        """End the span of that name, and those inside of it that nobody has ended."""
        while self._is_open(name):
            found, span = self._open.pop()
            span.close()
            if found == name:
                break

    @contextmanager
    def _pair(self, event: Event) -> Iterator[None]:
        tracer = self._tracers.get()
        if tracer is None:
            yield
            return
        span = tracer.open(event_template("pair", event))
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            span.end(outcome_of(failure), failure)
