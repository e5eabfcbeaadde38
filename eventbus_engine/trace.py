"""What an engine did with its algorithms on one event: `Trace`, one per algorithm, and `Traces`, all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from eventbus_engine.event import EventName

__all__ = ["Outcome", "Trace", "Traces", "batches_done", "format_trace", "new_trace", "step_of"]

Outcome: TypeAlias = Literal["ok", "skipped", "failed", "timed_out", "cancelled"]


@dataclass(slots=True)
class Trace:
    """The record of one algorithm on one event.

    Attributes:
        name: the algorithm's name, `#2` and so on appended for a second one of that name.
        event: the event, None in a blank record.
        exit_code: what `apply` returned.
        order: the position among those that ran, from 0; None if it did not run.
        run: whether `apply` was called.
        outcome: `ok`, `skipped`, `failed`, `timed_out` or `cancelled`.
        reason: why it did not run: `not matched`, `dropped by <pass>` or `not reached`.
        error: the exception that ended it.
        start_ns: when it started, nanoseconds since the epoch; 0 if it did not run.
        duration_ns: how long it ran, in nanoseconds of a monotonic clock.
    """

    name: str = ""
    event: EventName | None = None
    exit_code: int | None = None
    order: int | None = None
    run: bool = False
    outcome: Outcome = "skipped"
    reason: str = ""
    error: BaseException | None = None
    start_ns: int = 0
    duration_ns: int = 0


new_trace: Callable[[type[Trace]], Trace] = object.__new__
"""A Trace to be filled in, by who makes a great many."""

Traces: TypeAlias = dict[str, Trace]
"""Ordered: first what ran, in its order, then what did not. The key is `<name>/<EVENT>`: `layer_freezing/EPOCH_END`."""

# Where the loop has already counted the batch in progress by the time the event fires.
_BATCH_COUNTED = frozenset(
    {
        "batch_end",
        "batch_checkpoint",
        "epoch_end",
        "epoch_checkpoint",
        "iteration_end",
        "iteration_checkpoint",
        "fit_end",
    }
)


def batches_done(state: Any) -> int | None:
    """The number of batches trained so far, by the state's `timestamp`; None where it has no such thing.

    A record of a pipeline may well have a `timestamp` that is something else altogether.
    """
    batch = getattr(getattr(state, "timestamp", None), "batch", None)
    try:
        return None if batch is None else int(batch)
    except (TypeError, ValueError):
        return None


def step_of(event: EventName, state: Any) -> int | None:
    """The step of a log line: 0 at INIT, then the batch in progress, counted from 1.

    The first BATCH_START is step 1, the EPOCH_END of a three-batch epoch step 3. Evaluation and prediction report
    the last batch trained.

    Returns:
        None where the state has no `timestamp`, as the records of a pipeline.
    """
    done = batches_done(state)
    if done is None or event.value == "init":
        return None if done is None else 0
    counted = event.value in _BATCH_COUNTED or event.value.startswith(("eval", "predict"))
    return done if counted else done + 1


def format_trace(key: str, trace: Trace, step: int | None) -> str:
    """The log line of a trace: `[STEP=3][layer_freezing/EPOCH_END=1]`, `=0` where it did not run."""
    prefix = "" if step is None else f"[STEP={step}]"
    return f"{prefix}[{key}={int(trace.run)}]"
