"""`telemetry.watch` says what takes long while it still runs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from eventbus_engine import Callback, ConfigurationError, Engine, Event, telemetry
from eventbus_engine.telemetry.reports import Recording


class Heard(logging.Handler):
    """Keeps the warnings, and lets go of whoever waits for the first."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.first = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.first.set()


@pytest.fixture
def heard() -> Any:
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
            assert heard.first.wait(30)
            threading.Event().wait(0.05)  # several looks more

    engine = Engine(callbacks=[Remote()])
    with telemetry.configure(path=path), telemetry.watch(engine, slow_after=0.01):
        anyio.run(engine.run_event, Event.BATCH_END, backend=backend)
    spans = {span.name: span for recorded in Recording(path).traces() for span in recorded.spans}
    slow, whole = spans["slow callback remote"], spans["callback remote"]

    (message,) = heard.messages
    assert message.startswith("callback remote has been running on BATCH_END for")
    assert "heard.first.wait(30)" in message
    assert slow.parent_id == whole.span_id
    assert slow.attributes["eventbus.kind"] == "slow"


def test_a_span_of_ones_own_is_not_needed(heard: Heard) -> None:
    """Without tracing there is the warning alone, and no thread is left after the block."""

    class Remote(Callback):
        async def batch_end(self, state: Any, logger: Any) -> None:
            assert heard.first.wait(30)

    engine = Engine(callbacks=[Remote()])
    with telemetry.watch(engine, slow_after=0.01):
        anyio.run(engine.run_event, Event.BATCH_END)

    assert len(heard.messages) == 1
    assert "eventbus_engine watch" not in [thread.name for thread in threading.enumerate()]


def test_a_limit_that_is_none_is_refused() -> None:
    """Zero seconds would name everything."""
    with pytest.raises(ConfigurationError, match="slow_after=0"), telemetry.watch(Engine(), slow_after=0):
        pass
