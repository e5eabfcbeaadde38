"""The stages of an event behind its algorithms: the callbacks beside the rest of the chain, then the destinations."""

from __future__ import annotations

from eventbus_engine.bus import CallNext, Envelope
from eventbus_engine.delivery import Delivery
from eventbus_engine.destinations import delivery_handler
from eventbus_engine.errors import CallbackErrors
from eventbus_engine.fanout import ENVELOPE, HOOK, Handler, Occasion, raise_failures, run_fanout
from eventbus_engine.participants import Participants
from eventbus_engine.sequence import attach_traces
from eventbus_engine.trace import Traces

__all__ = ["merge_traces", "run_callbacks", "run_destinations"]

Failures = list[tuple[Handler, Exception]]


async def run_callbacks(
    participants: Participants,
    occasion: Occasion,
    envelope: Envelope,
    call_next: CallNext,
    delivery: Delivery,
    traces: Traces | None = None,
) -> Traces:
    """Run the callbacks beside the rest of the chain, and then, after algorithms, the destinations.

    Args:
        participants: of the engine.
        occasion: the event as its handlers see it.
        envelope: the event as the chain sees it.
        call_next: the rest of the chain.
        delivery: takes the events of the background callbacks.
        traces: of the algorithms; None if they are still to run (on INIT), and the destinations already have.

    Returns:
        The traces of the engines further down the chain.

    Raises:
        CallbackErrors: of callbacks, subscribers and destinations, once all of them are done.
        Exception: of an algorithm of an engine further down the chain.
    """
    handlers = [hook for hook in participants.callback_hooks[occasion.event] if hook.owner.ready]
    for hook in participants.background_hooks[occasion.event]:
        full = delivery.post(hook, occasion)
        if full is not None:
            handlers.append(full)
    results: list[Traces] = []
    subscribers = getattr(call_next, "handlers_for", None)
    if subscribers is not None:
        handlers += subscribers(envelope)
    else:
        handlers.append(_chain_handler(call_next, results))
    failures = await run_fanout(handlers, occasion) if handlers else []
    if traces is not None:
        failures += await _destination_failures(participants, occasion)
    if failures:
        _raise(failures, occasion, traces or {})
    return results[0] if results else {}


async def run_destinations(participants: Participants, occasion: Occasion) -> None:
    """Hand every destination what was logged for it since the last event, then call its hook.

    Raises:
        CallbackErrors: of destinations that want their failures raised.
    """
    raise_failures(await _destination_failures(participants, occasion), occasion.event)


async def _destination_failures(participants: Participants, occasion: Occasion) -> Failures:
    _, logger = occasion.arguments[HOOK]
    found = [
        delivery_handler(entry, entry.hooks.get(occasion.event), logger)
        for entry in participants.destinations
        if entry.ready
    ]
    handlers = [handler for handler in found if handler is not None]
    return await run_fanout(handlers, occasion) if handlers else []


def _raise(failures: Failures, occasion: Occasion, traces: Traces) -> None:
    """Raise what counts. The failed algorithm of an engine further down propagates as itself, before all else."""
    down = next((error for handler, error in failures if handler.chain and not isinstance(error, CallbackErrors)), None)
    try:
        raise_failures([(handler, error) for handler, error in failures if error is not down], occasion.event)
    except CallbackErrors as error:
        attach_traces(error, traces)
        if down is None:
            raise
        down.add_note(str(error))
    if down is not None:
        attach_traces(down, traces)
        raise down


def _chain_handler(call_next: CallNext, results: list[Traces]) -> Handler:
    """The rest of the chain as one more callback, which leaves its traces in `results`."""

    async def rest(envelope: Envelope) -> None:
        results.append(await call_next(envelope))

    return Handler("the rest of the chain", rest, ENVELOPE, is_async=True, chain=True)


def merge_traces(traces: Traces, others: Traces) -> Traces:
    """Append the traces of another engine, a key that is taken becoming the next free `#n` of it."""
    for key, trace in others.items():
        free, n = key, 2
        name, _, event = key.rpartition("/")
        while free in traces:
            free, n = f"{name.partition('#')[0]}#{n}/{event}", n + 1
        traces[free] = trace
    return traces
