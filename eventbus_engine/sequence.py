"""Run the algorithms of one event: those that match, one after another, in the order that the passes give them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from eventbus_engine.errors import AsyncMatchError
from eventbus_engine.event import EventName
from eventbus_engine.fanout import EVENT, HOOK, Occasion, add_note, outcome_of, time_limit
from eventbus_engine.logger import Logger
from eventbus_engine.participants import AlgorithmEntry
from eventbus_engine.plan import Order
from eventbus_engine.telemetry.spans import Activity, handler_template
from eventbus_engine.trace import Trace, Traces, step_of

__all__ = ["Offload", "attach_traces", "matches", "run_algorithms"]

Offload: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a plain function off the event loop."""

Arrange: TypeAlias = Callable[[list[AlgorithmEntry], EventName], Order]


async def run_algorithms(
    entries: Sequence[AlgorithmEntry],
    arrange: Arrange,
    occasion: Occasion,
    dispatch_span: Activity | None,
    offload: Offload | None,
) -> Traces:
    """Run the algorithms that match, in the order that `arrange` gives them, in the caller's task and context.

    Returns:
        What ran, in its order, then what did not.

    Raises:
        Exception: whatever an algorithm, its `match` or a pass raised, with the traces so far as `exc.traces`.
    """
    event, (state, logger) = occasion.event, occasion.arguments[HOOK]
    traces: Traces = {}
    matched: list[AlgorithmEntry] = []
    unmatched: list[AlgorithmEntry] = []
    order = Order((), {}, ())
    try:
        for entry in entries:
            (matched if matches(entry, event, state) else unmatched).append(entry)
        order = arrange(matched, event)
        for position, entry in enumerate(order.entries):
            trace = traces[f"{entry.name}/{event.name}"] = Trace(entry.name, event, None, position, True, "ok")
            await _apply(entry, trace, occasion, offload)
    except BaseException as error:
        attach_traces(error, traces)
        raise
    finally:
        _complete(traces, entries, unmatched, order, event)
        span = dispatch_span if dispatch_span is not None and dispatch_span.recording else None
        if span is not None and (skipped := [trace.name for trace in traces.values() if not trace.run]):
            span.set("eventbus.skipped", skipped)
        if traces and isinstance(logger, Logger) and logger.takes("log_traces"):
            logger.log_traces(traces, step=step_of(event, state))
    return traces


def matches(entry: AlgorithmEntry, event: EventName, state: Any) -> bool:
    """Whether an algorithm wants to run.

    Raises:
        AsyncMatchError: `match` turned out to be asynchronous.
        Exception: whatever it raised, with a note naming it.
    """
    try:
        result = entry.match(event, state)
        if result is True or result is False:
            return result
        if isinstance(result, Awaitable):
            if isinstance(result, Coroutine):
                result.close()
            raise AsyncMatchError(
                f"{entry.name}.match is async; matching decides the order, so make it a plain function"
            )
        return bool(result)
    except Exception as error:
        add_note(error, f"in match of algorithm {entry.name} on {event.name}")
        raise


async def _apply(entry: AlgorithmEntry, trace: Trace, occasion: Occasion, offload: Offload | None) -> None:
    """Run one algorithm, and note in its trace how that went."""
    span: Activity | None = None
    if occasion.tracer is not None:
        template = entry.templates.get(occasion.event)
        if template is None:
            template = handler_template("algorithm", entry.name, occasion.event, entry.apply)
            entry.templates[occasion.event] = template
        span = occasion.tracer.open(template, order=trace.order)
    trace.start_ns, started = time.time_ns(), time.perf_counter_ns()
    progress = occasion.progress
    progress.kind, progress.since, progress.span, progress.now = "algorithm", started, span, entry.name
    try:
        trace.exit_code = await _call(entry, occasion, offload)
    except BaseException as error:
        trace.error, trace.outcome = error, outcome_of(error)
        add_note(error, f"in algorithm {entry.name} on {occasion.event.name}")
        raise
    finally:
        trace.duration_ns = time.perf_counter_ns() - started
        progress.now = progress.span = None
        if span is not None:
            if isinstance(trace.exit_code, int):
                span.set("eventbus.exit_code", trace.exit_code)
            span.end(trace.outcome, trace.error)


async def _call(entry: AlgorithmEntry, occasion: Occasion, offload: Offload | None) -> Any:
    arguments = occasion.arguments[EVENT]
    if entry.is_async:
        await occasion.enter_task()
        if entry.timeout is None:
            return await entry.apply(*arguments)
        with time_limit(entry.timeout, f"algorithm {entry.name} did not finish {occasion.event.name}"):
            return await entry.apply(*arguments)
    if offload is None:
        result = entry.apply(*arguments)
    else:
        await occasion.enter_task()
        result = await offload(partial(entry.apply, *arguments))
    if result is not None and isinstance(result, Awaitable):
        await occasion.enter_task()
        return await result
    return result


def _complete(
    traces: Traces,
    entries: Sequence[AlgorithmEntry],
    unmatched: Sequence[AlgorithmEntry],
    order: Order,
    event: EventName,
) -> None:
    """Add the algorithms that did not run: in registration order, then what passes added, each with its reason."""
    for entry in [*entries, *order.entries]:
        key = f"{entry.name}/{event.name}"
        if key not in traces:
            reason = order.dropped.get(entry.name) or ("not matched" if entry in unmatched else "not reached")
            traces[key] = Trace(entry.name, event, reason=reason)


def attach_traces(error: BaseException, traces: Traces) -> None:
    """Leave the traces with an exception that leaves the engine; those of the innermost event stay."""
    if isinstance(error, Exception) and getattr(error, "traces", None) is None:
        with suppress(AttributeError, TypeError):  # an exception class that is frozen, or has slots
            error.traces = traces  # type: ignore[attr-defined]
