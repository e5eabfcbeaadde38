"""The stages of an event behind its algorithms: the callbacks beside the rest of the chain, then the destinations."""

from __future__ import annotations

import logging

from eventbus_engine._steps import need_loop, without_loop
from eventbus_engine.bus import CallNext, Terminal
from eventbus_engine.delivery import Delivery, Room
from eventbus_engine.destinations import delivery_handler, discard
from eventbus_engine.envelope import Envelope
from eventbus_engine.errors import CallbackErrors, DeadlockError
from eventbus_engine.fanout import FanOut, begin_course, run_fanout
from eventbus_engine.handlers import Handler, Occasion, raise_failures
from eventbus_engine.logger import Logger
from eventbus_engine.participants import Participants
from eventbus_engine.sequence import attach_traces
from eventbus_engine.trace import Traces

__all__ = ["finish_callbacks", "merge_traces", "run_callbacks"]

log: logging.Logger = logging.getLogger("eventbus_engine")

Failures = list[tuple[Handler, Exception]]


async def finish_callbacks(fan: FanOut, participants: Participants, traces: Traces) -> None:
    """Run what is left of the callbacks, where that is all there is behind the algorithms.

    Raises:
        CallbackErrors: once all of them are done.
    """
    if failures := await fan.finish():
        _raise(_in_order(failures, participants), None, fan.occasion, traces)


async def run_callbacks(
    participants: Participants,
    occasion: Occasion,
    call_next: CallNext,
    delivery: Delivery,
    traces: Traces | None = None,
) -> Traces:
    """Run the callbacks beside the rest of the chain, and the destinations: after them, but before them on INIT.

    Args:
        participants: of the engine.
        occasion: the event.
        call_next: the rest of the chain.
        delivery: takes the events of the background callbacks.
        traces: of the algorithms; None on INIT, where they are still to run.

    Returns:
        The traces of the engines further down the chain.

    Raises:
        CallbackErrors: of callbacks, subscribers and destinations, once all of them are done.
        DeadlockError: the event waits for room in a mailbox whose callback waits for the event.
        Exception: of an algorithm of an engine further down the chain.
    """
    failures: Failures = []
    full: list[Room] = []
    if without_loop.driven and _has_work(participants, occasion, call_next):
        await need_loop()
    if traces is None:
        failures += await _run_destinations(participants, occasion, delivery, full)
    course = participants.course(occasion.event)
    for hook in course.background:
        full += delivery.post(hook.owner, hook, occasion)
    chain: _Chain | None = None
    if isinstance(call_next, Terminal):
        fan = begin_course(course, [*course.inline, *call_next.handlers_for(occasion.envelope)], occasion)
        failures += [] if fan is None else await fan.finish()
    else:
        chain = _Chain(call_next, occasion.envelope)
        failures += await run_fanout(course.inline, occasion, chain.run)
    if traces is not None and participants.destinations:
        failures += await _run_destinations(participants, occasion, delivery, full)
    # Last, so that a full mailbox holds up the next event of its publisher and nothing of this one.
    down: Exception | None = await _wait_for_room(full, occasion) if full else None
    if chain is not None:
        down = down or chain.failure
    if failures or down is not None:
        _raise(_in_order(failures, participants), down, occasion, traces or {})
    return {} if chain is None else chain.traces


def _has_work(participants: Participants, occasion: Occasion, call_next: CallNext) -> bool:
    """Whether there is anything behind the algorithms of an event: it belongs on the event loop."""
    course, logger = participants.course(occasion.event), occasion.logger
    if course.inline or course.background or not isinstance(call_next, Terminal) or call_next.bus._subscriptions:
        return True
    return any(
        occasion.event in entry.hooks or not isinstance(logger, Logger) or logger.pending(entry.callback)
        for entry in participants.destinations
    )


async def _run_destinations(
    participants: Participants, occasion: Occasion, delivery: Delivery, full: list[Room]
) -> Failures:
    """Hand every destination what was logged for it since the last event, then call its hook."""
    logger = occasion.logger
    handlers: list[Handler] = []
    for entry in participants.destinations:
        if entry.quarantined:
            discard(entry, logger)
            continue
        hook = entry.hooks.get(occasion.event)
        pending = logger.pending(entry.callback) if isinstance(logger, Logger) else None
        if hook is None and not pending:
            continue
        if entry.delivery == "background":
            # It takes the records along, so that the mailbox bounds them too.
            full += delivery.post(entry, hook, occasion, pending)
        elif entry.opened:
            handler = delivery_handler(entry, hook, pending, pending, []) if pending else hook
            assert handler is not None  # noqa: S101 -- one of the two there is
            handlers.append(handler)
    return await run_fanout(handlers, occasion) if handlers else []


async def _wait_for_room(full: list[Room], occasion: Occasion) -> DeadlockError | None:
    await occasion.enter_task()
    try:
        for room in full:
            await room()
    except DeadlockError as error:
        return error
    return None


class _Chain:
    """The rest of the middleware chain: what came of it."""

    def __init__(self, call_next: CallNext, envelope: Envelope) -> None:
        self.traces: Traces = {}
        self.failure: Exception | None = None
        self._call_next = call_next
        self._envelope = envelope

    async def run(self) -> None:
        """Run it; its failure waits until the callbacks beside it are done."""
        try:
            self.traces = await self._call_next(self._envelope)
        except Exception as error:
            self.failure = error


def _in_order(failures: Failures, participants: Participants) -> Failures:
    """In the order of registration, the plain subscribers last."""
    order = {id(entry): i for i, entry in enumerate(participants.entries)}
    return sorted(failures, key=lambda failure: order.get(id(failure[0].owner), len(order)))


def _raise(failures: Failures, down: Exception | None, occasion: Occasion, traces: Traces) -> None:
    """Raise what counts. A deadlock, or what failed further down the chain, propagates as itself, before all else."""
    others = down.exceptions if isinstance(down, CallbackErrors) else ()
    try:
        raise_failures(failures, occasion.event, others)
    except CallbackErrors as error:
        attach_traces(error, traces)
        if down is None or others:
            raise
        log.error("%s, besides an error that propagates", error.message, exc_info=error)
    if down is not None:
        attach_traces(down, traces)
        raise down


def merge_traces(traces: Traces, others: Traces) -> Traces:
    """Add the traces of another engine: what ran stays before what did not, a taken key becomes the next free `#n`."""
    if not others:
        return traces
    merged = dict(traces)
    for key, trace in others.items():
        free, n = key, 2
        name, _, event = key.rpartition("/")
        while free in merged:
            free, n = f"{name.partition('#')[0]}#{n}/{event}", n + 1
        merged[free] = trace
    return dict(sorted(merged.items(), key=lambda item: not item[1].run))
