"""Run the algorithms of one event: those that match, one after another, in the order that the passes give them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter_ns, time_ns
from typing import Any, TypeAlias

from eventbus_engine._steps import without_loop
from eventbus_engine.entries import AlgorithmEntry
from eventbus_engine.errors import AsyncMatchError
from eventbus_engine.event import EventName
from eventbus_engine.handlers import Occasion, add_note, outcome_of
from eventbus_engine.limits import time_limit
from eventbus_engine.logger import Logger
from eventbus_engine.participants import Course
from eventbus_engine.plan import NO_ORDER, Order
from eventbus_engine.telemetry.spans import EngineTracer, Template, handler_template
from eventbus_engine.trace import Outcome, Trace, Traces, step_of, write_trace

__all__ = ["Offload", "attach_traces", "matches", "run_algorithms"]

Offload: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a plain function off the event loop."""

Arrange: TypeAlias = Callable[[list[AlgorithmEntry], EventName], Order]


async def run_algorithms(course: Course, arrange: Arrange, occasion: Occasion, offload: Offload | None) -> Traces:
    """Run the algorithms that match, in the order that `arrange` gives them, in the caller's task and context.

    Returns:
        What ran, in its order, then what did not.

    Raises:
        Exception: whatever an algorithm, its `match` or a pass raised, with the traces so far as `exc.traces`.
    """
    event, state, logger = occasion.event, occasion.state, occasion.logger
    ran: Traces = {}
    traces: Traces = {}  # of those that did not match, until there are others
    matched: list[AlgorithmEntry] = []
    order = NO_ORDER
    entry: AlgorithmEntry | None = None
    try:
        for entry, match, key, skipped in course.algorithms:
            result = match(event, state)
            if result is True or (result is not False and is_match(entry, result)):
                matched.append(entry)
            else:
                traces[key] = skipped
        entry = None
        order = arrange(matched, event)
        if order.entries:
            await _apply_all(order.entries, ran, occasion, offload)
        if order.dropped or len(order.entries) != len(matched):
            traces = _complete(ran, traces, course.participants.algorithms, order.dropped, event)
        elif ran:
            traces = {**ran, **traces}
    except BaseException as error:
        if entry is not None and isinstance(error, Exception):
            add_note(error, f"in match of algorithm {entry.name} on {event.name}")
        traces = _complete(ran, traces, [*course.participants.algorithms, *order.entries], order.dropped, event)
        attach_traces(error, traces)
        raise
    finally:
        span = occasion.whole
        if span and span.recording and (names := [trace.name for trace in traces.values() if not trace.run]):
            span.set("eventbus.skipped", names)
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


async def _apply_all(
    entries: Sequence[AlgorithmEntry], ran: Traces, occasion: Occasion, offload: Offload | None
) -> None:
    """Run algorithms one after another, and note in the trace of each how that went."""
    event, state, logger = occasion.event, occasion.state, occasion.logger
    dispatch, tracer = occasion.dispatch, occasion.tracer
    now = perf_counter_ns()
    offset = time_ns() - now  # the wall clock once, a monotonic one within
    for position, entry in enumerate(entries):
        error: BaseException | None = None
        exit_code: Any = None
        # Without spans nothing happens between two of them: the end of one is the beginning of the next.
        if tracer is not None:
            occasion.span = span = tracer.open(_template_of(entry, event), order=position) if tracer.spans else None
            now = (span is not None and span.began) or perf_counter_ns()
        occasion.now, occasion.since = entry, now
        started = now
        try:
            if entry.is_async and entry.timeout is None:
                if dispatch is None or dispatch.task_id is None:
                    await occasion.enter_task()
                exit_code = await entry.apply(event, state, logger)
            else:
                exit_code = await _call(entry, occasion, offload)
        except BaseException as raised:
            error = raised
            add_note(error, f"in algorithm {entry.name} on {event.name}")
            raise
        finally:
            now = perf_counter_ns()
            occasion.now = None
            outcome: Outcome = "ok" if error is None else outcome_of(error)
            ran[entry.keys[event]] = trace = write_trace(
                entry.name, event, exit_code, position, outcome, error, started + offset, now - started
            )
            if tracer is not None:
                _end_span(entry, trace, occasion, tracer, now)


def _end_span(entry: AlgorithmEntry, trace: Trace, occasion: Occasion, tracer: EngineTracer, now: int) -> None:
    """End the span of an algorithm, at the time of its trace, or measure it where spans are not wanted."""
    span = occasion.span
    if span is None:
        tracer.measured(_template_of(entry, occasion.event), trace.duration_ns, trace.outcome, trace.error)
        return
    if isinstance(trace.exit_code, int):
        span.set("eventbus.exit_code", trace.exit_code)
    span.end(trace.outcome, trace.error, now)


def _template_of(entry: AlgorithmEntry, event: EventName) -> Template:
    template = entry.templates.get(event)
    if template is None:
        template = entry.templates[event] = handler_template("algorithm", entry.name, event, entry.apply)
    return template


async def _call(entry: AlgorithmEntry, occasion: Occasion, offload: Offload | None) -> Any:
    """Call what is plain, here or off the loop, or has a limit."""
    arguments = occasion.event, occasion.state, occasion.logger
    if entry.is_async:
        await occasion.enter_task()
        with time_limit(entry.timeout or 0, f"algorithm {entry.name} did not finish {occasion.event.name}"):
            return await entry.apply(*arguments)
    if offload is None or without_loop.driven:
        result = entry.apply(*arguments)
    else:
        await occasion.enter_task()
        result = await offload(partial(entry.apply, *arguments))
    if result is not None and isinstance(result, Awaitable):
        await occasion.enter_task()
        return await result
    return result


def _complete(
    ran: Traces,
    unmatched: Traces,
    entries: Sequence[AlgorithmEntry],
    dropped: Mapping[str, str],
    event: EventName,
) -> Traces:
    """What ran, then those of `entries` that did not, each with its reason."""
    traces = dict(ran)
    for entry in entries:
        key = entry.keys[event]
        if key not in traces:
            reason = dropped.get(entry.name) or ("not matched" if key in unmatched else "not reached")
            traces[key] = Trace(entry.name, event, None, None, False, "skipped", reason)
    return traces


def attach_traces(error: BaseException, traces: Traces) -> None:
    """Leave the traces with an exception that leaves the engine; those of the innermost event stay."""
    if isinstance(error, Exception) and getattr(error, "traces", None) is None:
        with suppress(AttributeError, TypeError):  # an exception class that is frozen, or has slots
            error.traces = traces  # type: ignore[attr-defined]
