"""Run the algorithms of one event: those that match, one after another, in the order that the passes give them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter_ns, time_ns
from typing import Any, TypeAlias

from eventbus_engine.entries import AlgorithmEntry
from eventbus_engine.errors import AsyncMatchError
from eventbus_engine.event import EventName
from eventbus_engine.handlers import EVENT, Occasion, add_note, outcome_of
from eventbus_engine.limits import time_limit
from eventbus_engine.logger import Logger
from eventbus_engine.plan import Order
from eventbus_engine.telemetry.spans import Activity, Template, handler_template
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
    event, state, logger = occasion.arguments[EVENT]
    traces: Traces = {}
    matched: list[AlgorithmEntry] = []
    unmatched: list[AlgorithmEntry] = []
    order = Order((), {}, ())
    left: Sequence[AlgorithmEntry] = unmatched
    entry: AlgorithmEntry | None = None
    try:
        for entry in entries:
            result = entry.match(event, state)
            if result is True or (result is not False and is_match(entry, result)):
                matched.append(entry)
            else:
                unmatched.append(entry)
        entry = None
        order = arrange(matched, event)
        if order.entries:
            # The wall clock once, a monotonic one within.
            offset = time_ns() - perf_counter_ns()
            for position, one in enumerate(order.entries):
                trace = traces[one.key(event)] = Trace(one.name, event, None, position, True, "ok")
                await _apply(one, trace, offset, occasion, offload)
        if order.dropped:
            left = entries
    except BaseException as error:
        if entry is not None and isinstance(error, Exception):
            add_note(error, f"in match of algorithm {entry.name} on {event.name}")
        left = [*entries, *order.entries]
        attach_traces(error, traces)
        raise
    finally:
        if left:
            _complete(traces, left, unmatched, order.dropped, event)
        span = dispatch_span if dispatch_span is not None and dispatch_span.recording else None
        if span is not None and (skipped := [trace.name for trace in traces.values() if not trace.run]):
            span.set("eventbus.skipped", skipped)
        if traces and isinstance(logger, Logger) and logger.destinations and logger.takes("log_traces"):
            logger.log_traces(traces, step=step_of(event, state))
    return traces


def matches(entry: AlgorithmEntry, event: EventName, state: Any) -> bool:
    """Whether an algorithm wants to run.

    Raises:
        AsyncMatchError: `match` turned out to be asynchronous.
        Exception: whatever it raised, with a note naming it.
    """
    try:
        return is_match(entry, entry.match(event, state))
    except Exception as error:
        add_note(error, f"in match of algorithm {entry.name} on {event.name}")
        raise


def is_match(entry: AlgorithmEntry, result: object) -> bool:
    """Whether what a `match` returned is true.

    Raises:
        AsyncMatchError: it turned out to be asynchronous.
    """
    if isinstance(result, Awaitable):
        if isinstance(result, Coroutine):
            result.close()
        raise AsyncMatchError(f"{entry.name}.match is async; matching decides the order, so make it a plain function")
    return bool(result)


async def _apply(entry: AlgorithmEntry, trace: Trace, offset: int, occasion: Occasion, offload: Offload | None) -> None:
    """Run one algorithm, and note in its trace how that went."""
    tracer, span = occasion.tracer, None
    if tracer is not None and tracer.spans:
        template = entry.templates.get(occasion.event) or _template_of(entry, occasion)
        span = tracer.open(template, order=trace.order)
    occasion.now, occasion.span = entry, span
    occasion.since = started = perf_counter_ns()
    trace.start_ns = started + offset
    try:
        if entry.is_async and entry.timeout is None:
            if occasion.dispatch is None or occasion.dispatch.task_id is None:
                await occasion.enter_task()
            trace.exit_code = await entry.apply(*occasion.arguments[EVENT])
        else:
            trace.exit_code = await _call(entry, occasion, offload)
    except BaseException as error:
        trace.error, trace.outcome = error, outcome_of(error)
        add_note(error, f"in algorithm {entry.name} on {occasion.event.name}")
        raise
    finally:
        trace.duration_ns = perf_counter_ns() - started
        occasion.now = None
        if span is not None:
            if isinstance(trace.exit_code, int):
                span.set("eventbus.exit_code", trace.exit_code)
            span.end(trace.outcome, trace.error)
        elif tracer is not None:
            tracer.measured(_template_of(entry, occasion), trace.duration_ns, trace.outcome, trace.error)


def _template_of(entry: AlgorithmEntry, occasion: Occasion) -> Template:
    template = entry.templates.get(occasion.event)
    if template is None:
        template = handler_template("algorithm", entry.name, occasion.event, entry.apply)
        entry.templates[occasion.event] = template
    return template


async def _call(entry: AlgorithmEntry, occasion: Occasion, offload: Offload | None) -> Any:
    """Call what is plain, here or off the loop, or has a limit."""
    arguments = occasion.arguments[EVENT]
    if entry.is_async:
        await occasion.enter_task()
        with time_limit(entry.timeout or 0, f"algorithm {entry.name} did not finish {occasion.event.name}"):
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
    left: Sequence[AlgorithmEntry],
    unmatched: Sequence[AlgorithmEntry],
    dropped: Mapping[str, str],
    event: EventName,
) -> None:
    """Add those of `left` that did not run, each with its reason."""
    out = unmatched if left is unmatched else frozenset(unmatched)
    for entry in left:
        key = entry.key(event)
        if key not in traces:
            reason = dropped.get(entry.name) or ("not matched" if out is left or entry in out else "not reached")
            traces[key] = Trace(entry.name, event, None, None, False, "skipped", reason)


def attach_traces(error: BaseException, traces: Traces) -> None:
    """Leave the traces with an exception that leaves the engine; those of the innermost event stay."""
    if isinstance(error, Exception) and getattr(error, "traces", None) is None:
        with suppress(AttributeError, TypeError):  # an exception class that is frozen, or has slots
            error.traces = traces  # type: ignore[attr-defined]
