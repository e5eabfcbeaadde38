"""The stages of an event behind its algorithms: the callbacks beside the rest of the chain, then the destinations."""

from __future__ import annotations

import logging

from eventbus_engine.bus import CallNext, Envelope
from eventbus_engine.delivery import Delivery
from eventbus_engine.destinations import delivery_handler
from eventbus_engine.errors import CallbackErrors
from eventbus_engine.fanout import HOOK, Handler, Occasion, raise_failures, run_fanout
from eventbus_engine.participants import Participants
from eventbus_engine.sequence import attach_traces
from eventbus_engine.trace import Traces

__all__ = ["merge_traces", "run_callbacks"]

log = logging.getLogger("eventbus_engine")

Failures = list[tuple[Handler, Exception]]


async def run_callbacks(
    participants: Participants,
    occasion: Occasion,
    envelope: Envelope,
    call_next: CallNext,
    delivery: Delivery,
    traces: Traces | None = None,
) -> Traces:
    """Run the callbacks beside the rest of the chain, and the destinations: after them, but before them on INIT.

    Args:
        participants: of the engine.
        occasion: the event as its handlers see it.
        envelope: the event as the chain sees it.
        call_next: the rest of the chain.
        delivery: takes the events of the background callbacks.
        traces: of the algorithms; None on INIT, where they are still to run.

    Returns:
        The traces of the engines further down the chain.

    Raises:
        CallbackErrors: of callbacks, subscribers and destinations, once all of them are done.
        Exception: of an algorithm of an engine further down the chain.
    """
    failures: Failures = []
    if traces is None:
        failures += await _run_destinations(participants, occasion)
    handlers = [hook for hook in participants.callback_hooks[occasion.event] if hook.owner.ready]
    for hook in participants.background_hooks[occasion.event]:
        full = delivery.post(hook, occasion)
        if full is not None:
            handlers.append(full)
    chain = _Chain(call_next, envelope)
    subscribers = getattr(call_next, "handlers_for", None)
    if subscribers is not None:
        handlers += subscribers(envelope)
    failures += await run_fanout(handlers, occasion, chain.run if subscribers is None else None)
    if traces is not None:
        failures += await _run_destinations(participants, occasion)
    if failures or chain.failure is not None:
        order = {id(entry): i for i, entry in enumerate(participants.entries)}
        failures.sort(key=lambda failure: order.get(id(failure[0].owner), len(order)))
        _raise(failures, chain, occasion, traces or {})
    return chain.traces


async def _run_destinations(participants: Participants, occasion: Occasion) -> Failures:
    """Hand every destination what was logged for it since the last event, then call its hook."""
    _, logger = occasion.arguments[HOOK]
    found = [
        delivery_handler(entry, entry.hooks.get(occasion.event), logger)
        for entry in participants.destinations
        if entry.ready
    ]
    handlers = [handler for handler in found if handler is not None]
    return await run_fanout(handlers, occasion) if handlers else []


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


def _raise(failures: Failures, chain: _Chain, occasion: Occasion, traces: Traces) -> None:
    """Raise what counts. The failed algorithm of an engine further down propagates as itself, before all else."""
    down = chain.failure
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
