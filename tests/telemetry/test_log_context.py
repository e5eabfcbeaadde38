"""structlog records that say which event they were written in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from opentelemetry import trace

from eventbus_engine.bus import EventBus
from eventbus_engine.event import Event, EventName
from eventbus_engine.telemetry.configure import configure
from eventbus_engine.telemetry.logs import add_event_context

pytestmark = pytest.mark.anyio


class Ingest(EventName):
    """A vocabulary without training's time."""

    WRITE = "write"


@pytest.fixture
def log() -> Any:
    """A logger with the processor; `.entries` holds what it wrote."""
    entries = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(None, processors=[add_event_context, entries], wrapper_class=structlog.BoundLogger)
    logger.info("outside")
    assert entries.entries.pop() == {"event": "outside", "log_level": "info"}
    return SimpleNamespace(info=logger.info, entries=entries.entries)


async def test_a_record_written_in_a_handler_carries_event_and_step(log: Any) -> None:
    """Plain and async handlers alike; outside of an event nothing is added."""
    bus = EventBus()
    state = SimpleNamespace(timestamp=SimpleNamespace(batch=2))

    async def handle(envelope: Any) -> None:
        log.info("inside", key="value")

    bus.subscribe(handle)
    bus.subscribe(lambda envelope: log.info("inside", key="value"))
    await bus.publish(Event.BATCH_START, state=state)
    await bus.publish(Event.BATCH_END, state=SimpleNamespace(timestamp=SimpleNamespace(batch=3)))
    log.info("after")
    *inside, after = log.entries

    assert inside == [
        {"event": "inside", "key": "value", "log_level": "info", "bus_event": event, "step": 3}
        for event in ("batch_start", "batch_start", "batch_end", "batch_end")
    ]
    assert after == {"event": "after", "log_level": "info"}


async def test_a_record_of_a_pipeline_has_no_step_and_keeps_its_own_keys(log: Any) -> None:
    """What the caller says beats what the processor knows."""
    bus = EventBus()
    bus.subscribe(lambda envelope: log.info("inside", span_id="mine", step=7))
    bus.subscribe(lambda envelope: log.info("inside"))
    await bus.publish(Ingest.WRITE, state=SimpleNamespace(row=1))

    assert log.entries == [
        {"event": "inside", "log_level": "info", "bus_event": "write", "span_id": "mine", "step": 7},
        {"event": "inside", "log_level": "info", "bus_event": "write"},
    ]


async def test_a_record_carries_the_ids_of_the_span_it_was_written_in(log: Any, tmp_path: Path) -> None:
    """In hexadecimal, as the backends show them: the innermost span, a user's own included."""
    bus = EventBus()
    contexts: list[trace.SpanContext] = []

    def handle(envelope: Any) -> None:
        with trace.get_tracer("user").start_as_current_span("mine") as span:
            contexts.append(span.get_span_context())
            log.info("inside")

    bus.subscribe(handle)
    with configure(path=tmp_path / "spans.jsonl"):
        await bus.publish(Ingest.WRITE)
    (entry,) = log.entries
    (context,) = contexts

    assert (entry["trace_id"], entry["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
