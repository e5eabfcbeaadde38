"""Recordings to report on: of a real engine, and of spans made up for what no engine does on demand."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from opentelemetry.sdk.trace import TracerProvider

from eventbus_engine import Algorithm, Callback, Engine, Event, telemetry

Json = dict[str, Any]


class Smoothing(Algorithm):
    """Runs on both halves of LOSS."""

    name = "smoothing"

    def match(self, event: Any, state: Any) -> bool:
        return event in (Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Any, state: Any, logger: Any) -> int:
        return 7


class Mixing(Smoothing):
    """The same, under another name."""

    name = "mixing"


class Idle(Algorithm):
    """Never runs."""

    name = "idle"

    def match(self, event: Any, state: Any) -> bool:
        return False

    def apply(self, event: Any, state: Any, logger: Any) -> None: ...


class Meeting(Callback):
    """One of two callbacks that are not done before the other one has started, so that their spans overlap."""

    def __init__(self, name: str, mine: anyio.Event, theirs: anyio.Event) -> None:
        self.name = name
        self._mine = mine
        self._theirs = theirs

    async def after_loss(self, state: Any, logger: Any) -> None:
        self._mine.set()
        await self._theirs.wait()


class Fragile(Callback):
    """Fails whenever it is called."""

    name = "fragile"
    on_error = "log"

    def batch_end(self, state: Any, logger: Any) -> None:
        raise ValueError("no such batch")


async def run_engine() -> None:
    """A pair with two algorithms and two concurrent callbacks, a failure, and a callback in the background."""
    one, two = anyio.Event(), anyio.Event()

    class Remote(Callback):
        name = "remote"
        delivery = "background"

        async def batch_end(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()

    engine = Engine(
        algorithms=[Smoothing(), Mixing(), Idle()],
        callbacks=[Meeting("one", one, two), Meeting("two", two, one), Fragile(), Remote()],
    )
    async with engine:
        async with engine.pair(Event.BEFORE_LOSS):
            pass
        await engine.run_event(Event.BATCH_END)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Run an async function while its spans go to a file; `prepare` gets the provider first."""

    def run(
        main: Callable[[], Awaitable[None]],
        name: str = "spans.jsonl",
        prepare: Callable[[TracerProvider], None] | None = None,
        backend: str = "asyncio",
    ) -> Path:
        path = tmp_path / "run" / name
        with telemetry.configure(service_name="tests", path=path) as provider:
            if prepare is not None:
                assert isinstance(provider, TracerProvider)
                prepare(provider)
            anyio.run(main, backend=backend)
        return path

    return run


@pytest.fixture
def recorded(record: Callable[..., Path]) -> Path:
    """The file of `run_engine`."""
    return record(run_engine)


@pytest.fixture
def main_program() -> Callable[[], Awaitable[None]]:
    """What `recorded` has recorded, to run again."""
    return run_engine


@pytest.fixture
def span() -> Callable[..., Json]:
    """Make a span in OTLP JSON. Ids are small numbers, `at` is a pair of times in nanoseconds."""

    def make(number: int, parent: int = 0, at: tuple[int, int] = (1_000, 2_000), trace: int = 1, **fields: Any) -> Json:
        attributes = [
            {"key": key, "value": value if isinstance(value, dict) else {"stringValue": value}}
            for key, value in fields.pop("attributes", {}).items()
        ]
        return {
            "traceId": f"{trace:032x}",
            "spanId": f"{number:016x}",
            **({"parentSpanId": f"{parent:016x}"} if parent else {}),
            "name": f"span {number}",
            "startTimeUnixNano": str(at[0]),
            "endTimeUnixNano": str(at[1]),
            "attributes": attributes,
            **fields,
        }

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of OTLP JSON lines: a line for each list of spans, all of one resource."""

    def make(*lines: Iterable[Json], name: str = "spans.jsonl", service: str = "tests") -> Path:
        path = tmp_path / name
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
        requests = [
            {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]} for spans in lines
        ]
        path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
        return path

    return make
