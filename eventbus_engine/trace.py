"""What an engine did with its algorithms on one event: `Trace`, one per algorithm, and `Traces`, all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from eventbus_engine.event import EventName

__all__ = ["Outcome", "Trace", "Traces", "batches_done", "format_trace", "step_of", "write_trace"]

Outcome: TypeAlias = Literal["ok", "skipped", "failed", "timed_out", "cancelled"]


class _Draft:
    """A trace while it is being written."""

    __slots__ = (
        "duration_ns", "error", "event", "exit_code", "name", "order", "outcome", "reason", "run", "start_ns",
    )  # fmt: skip


@dataclass(slots=True, frozen=True)
class Trace(_Draft):
    """The record of one algorithm on one event. Frozen; `dataclasses.replace` makes a changed copy.

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


def write_trace(
    name: str,
    event: EventName,
    exit_code: int | None,
    order: int,
    outcome: Outcome,
    error: BaseException | None,
    start_ns: int,
    duration_ns: int,
) -> Trace:
    """The trace of an algorithm that ran: written, then frozen, which takes a third of what calling the class does."""
    draft: Any = _Draft()
    draft.name = name
    draft.event = event
    draft.exit_code = exit_code
    draft.order = order
    draft.run = True
    draft.outcome = outcome
    draft.reason = ""
    draft.error = error
    draft.start_ns = start_ns
    draft.duration_ns = duration_ns
    draft.__class__ = Trace
    trace: Trace = draft
    return trace


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
