"""`telemetry.watch` says what takes long while it still runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eventbus_engine import Callback, ConfigurationError, Engine, Event, InFlight, telemetry
from eventbus_engine.telemetry.reports import Recording


class Heard(logging.Handler):
    """Keeps the warnings, and lets go of whoever waits for one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.one = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.one.release()


class Looked(Engine[Any]):
    """An engine that counts how often somebody looks at it."""

    def __init__(self, *callbacks: Any, **arguments: Any) -> None:
        super().__init__(callbacks=callbacks, **arguments)
        self.looks: int = 0
        self._looked = threading.Condition()

    def in_flight(self) -> tuple[InFlight, ...]:
        with self._looked:
            self.looks += 1
            self._looked.notify_all()
        return super().in_flight()

    def wait_for_looks(self, count: int) -> None:
        """Return once that many more have begun: all but the last of them are over then."""
        with self._looked:
            due = self.looks + count
            assert self._looked.wait_for(lambda: self.looks >= due, 30)


@pytest.fixture
def heard() -> Iterator[Heard]:
    """What the engine's logger warns of."""
    handler = Heard()
    logging.getLogger("eventbus_engine").addHandler(handler)
    yield handler
    logging.getLogger("eventbus_engine").removeHandler(handler)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_handler_that_blocks_the_loop_is_named_once(backend: str, heard: Heard, tmp_path: Path) -> None:
    """One warning with its stack and one span below its own, while it still runs, however often it is looked at."""
    path = tmp_path / "spans.jsonl"

    class Remote(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            assert heard.one.acquire(timeout=30)
            engine.wait_for_looks(3)

    engine = Looked(Remote())
    with telemetry.configure(path=path), telemetry.watch(engine, slow_after=0.01):
        anyio.run(engine.run_event, Event.BATCH_END, backend=backend)
    spans = {span.name: span for recorded in Recording(path).traces() for span in recorded.spans}
    slow, whole = spans["slow callback remote"], spans["callback remote"]

    (message,) = heard.messages
    assert message.startswith("callback remote has been running on BATCH_END for")
    assert "heard.one.acquire(timeout=30)" in message
    assert slow.parent_id == whole.span_id
    assert slow.attributes["eventbus.kind"] == "slow"


def test_a_span_of_ones_own_is_not_needed(heard: Heard) -> None:
    """Without tracing there is the warning alone, and no thread is left after the block."""

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            assert heard.one.acquire(timeout=30)

    engine = Engine(callbacks=[Remote()])
    with telemetry.watch(engine, slow_after=0.01):
        anyio.run(engine.run_event, Event.BATCH_END)

    assert len(heard.messages) == 1
    assert "eventbus_engine watch" not in [thread.name for thread in threading.enumerate()]


def test_the_spans_go_where_those_of_the_engine_go(heard: Heard) -> None:
    """An engine with a provider of its own is watched through that, though no other is configured."""

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            assert heard.one.acquire(timeout=30)
            engine.wait_for_looks(2)

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, id_generator=telemetry.PrivateIdGenerator())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = Looked(Remote(), tracer_provider=provider)
    with telemetry.watch(engine, slow_after=0.01):
        anyio.run(engine.run_event, Event.BATCH_END)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    slow, whole = spans["slow callback remote"], spans["callback remote"]

    assert slow.parent is not None
    assert whole.context is not None
    assert slow.parent.span_id == whole.context.span_id
    assert whole.start_time is not None
    assert slow.start_time is not None
    assert slow.start_time >= whole.start_time


def test_each_of_two_handlers_of_one_name_is_named(heard: Heard) -> None:
    """Plain subscribers that are called one after the other: the second is no more the first than any other is."""
    engine = Looked()

    def make() -> Any:
        def handle(envelope: Any) -> None:
            assert heard.one.acquire(timeout=30)
            engine.wait_for_looks(2)

        return handle

    for _ in range(2):
        engine.bus.subscribe(make(), Event.BATCH_END)
    with telemetry.watch(engine, slow_after=0.01):
        anyio.run(engine.run_event, Event.BATCH_END)

    assert len(heard.messages) == 2


def test_a_limit_that_is_none_is_refused() -> None:
    """Zero seconds would name everything."""
    with pytest.raises(ConfigurationError, match="slow_after=0"), telemetry.watch(Engine(), slow_after=0):
        pass
