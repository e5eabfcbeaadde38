"""The public names as a user's program has them: run by pytest, and checked by mypy and pyright.

`assert_type` says what the type checkers have to infer; an ignore that they do not need is an error in both, so that
the lines that carry one are proof that misuse is seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_type

import pytest

from eventbus_engine import (
    Algorithm,
    AlgorithmPass,
    Callback,
    CallNext,
    CloseReport,
    Engine,
    Envelope,
    Event,
    EventBus,
    EventName,
    Logger,
    LoggerDestination,
    Middleware,
    Pair,
    Plan,
    Subscription,
    Time,
    Timestamp,
    TimeUnit,
    Trace,
    Traces,
    algorithm,
    background,
    callback,
    current_envelope,
    passes,
)
from eventbus_engine.algorithm import FunctionAlgorithm
from eventbus_engine.callback import FunctionCallback

pytestmark = pytest.mark.anyio


class Ingest(EventName):
    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"


@dataclass
class Record:
    """The state of a pipeline is its record."""

    row: str = "a b"
    seen: list[str] = field(default_factory=list)
    timestamp: Timestamp = field(default_factory=Timestamp)


# --------------------------------------------------------------------------------------------------------- algorithms


class Upper(Algorithm[Record, Ingest]):
    """Typed in state and vocabulary."""

    run_before = ("clean",)
    pin = "first"

    def match(self, event: Ingest, state: Record) -> bool:
        return event is Ingest.BEFORE_WRITE

    def apply(self, event: Ingest, state: Record, logger: Logger) -> int:
        state.row = state.row.upper()
        return len(state.row)


class Later(Algorithm[Record, Ingest]):
    """An async apply, constraints by class."""

    run_after = (Upper,)
    timeout = 1.5

    def match(self, event: Ingest, state: Record) -> bool:
        return bool(state.row)

    async def apply(self, event: Ingest, state: Record, logger: Logger) -> None:
        state.seen.append(event.name)


class Untyped(Algorithm):
    """Without parameters, everything is allowed, as in Composer."""

    def match(self, event: Event, state: Any) -> bool:
        return True

    def apply(self, event: Event, state: Any, logger: Any) -> None: ...


class WrongMatch(Algorithm[Record, Ingest]):
    """Asynchronous matching is an error before the program runs."""

    async def match(self, event: Ingest, state: Record) -> bool:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return True


class WrongPin(Algorithm[Record, Ingest]):
    """So is a pin that does not exist."""

    pin = "middle"  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


@algorithm(Ingest.BEFORE_WRITE, run_after=(Upper,))
async def clean(event: Ingest, record: Record, logger: Logger) -> int:
    """A decorated coroutine function."""
    record.row = record.row.strip()
    return len(record.row)


@algorithm("after_write")
def count(event: Ingest, record: Record, logger: Logger) -> int:
    """A decorated plain function."""
    return len(record.row)


@algorithm()
def loose(event, record, logger):  # type: ignore[no-untyped-def]
    """A decorated function without annotations."""
    return 3


async def test_algorithms() -> None:
    """A decorated function is an algorithm of its state and vocabulary, and callable as before."""
    record, logger = Record(), Logger()

    assert_type(count, FunctionAlgorithm[Record, Ingest, int])
    assert_type(count(Ingest.AFTER_WRITE, record, logger), int)
    typed: Algorithm[Record, Ingest] = clean
    assert_type(typed.match(Ingest.BEFORE_WRITE, record), bool)
    assert_type(Upper().apply(Ingest.BEFORE_WRITE, record, logger), int)
    assert_type(typed.find_unused_parameters, bool)
    assert_type(typed.required_on_load(), bool)
    count(Event.INIT, record, logger)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(await clean(Ingest.BEFORE_WRITE, record, logger), int)

    assert loose(Ingest.BEFORE_WRITE, record, logger) == 3


# ---------------------------------------------------------------------------------------------------------- callbacks


class Remote(Callback):
    """As in the README: untyped state, two options on one line."""

    delivery, snapshot = "background", ("loss",)

    async def open(self, state: Any, logger: Any) -> None: ...

    async def batch_end(self, state: Any, logger: Any) -> None: ...

    async def close(self, state: Any, logger: Any) -> None: ...


class Audit(Callback[Record]):
    """Typed in its state; plain and async hooks."""

    on_error = "quarantine"

    def __init__(self) -> None:
        self.rows: list[str] = []

    def before_write(self, state: Record, logger: Logger) -> None:
        self.rows.append(state.row)

    async def after_write(self, state: Record, logger: Logger) -> None:
        logger.log_metrics({"length": len(state.row)})

    async def post_close(self) -> None: ...


class Everything(Callback[Record]):
    """Takes every event in one place."""

    async def run_event(self, event: EventName, state: Record, logger: Logger) -> None: ...


class WrongDelivery(Callback[Record]):
    """An option that does not exist is an error before the program runs."""

    delivery = "later"  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


class Memory(LoggerDestination):
    """An async destination."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, Any]] = []

    async def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.metrics.append(metrics)

    def log_traces(self, traces: Traces, step: int | None = None) -> None: ...


@callback(Ingest.AFTER_WRITE, on_error="log")
async def report(event: Ingest, record: Record, logger: Logger) -> None:
    """A decorated coroutine function."""
    logger.log_metrics({"row": record.row}, step=3)


def test_callbacks() -> None:
    """`background` gives back the class that it was given."""
    typed: Callback[Record] = report
    untyped: FunctionCallback = report
    audit = background(Audit(), max_pending=10)
    assert_type(audit, Audit)
    assert_type(audit.rows, list[str])
    assert_type(typed.timeout, float | None)

    assert untyped.name == "report"
    assert audit.delivery == "background"


# ------------------------------------------------------------------------------------------------------------- engine


def keep(algorithms: Sequence[Algorithm[Any, Any]], event: EventName) -> Sequence[Algorithm[Any, Any]]:
    """A pass of one's own."""
    return passes.sort_to_front(algorithms, Upper)


async def test_an_engine() -> None:
    """Its state, its results, its pairs, its plans."""
    audit, memory, record = Audit(), Memory(), Record()
    own_pass: AlgorithmPass = keep
    engine = Engine(
        record,
        algorithm_passes=[own_pass, (keep, 0)],
        algorithms=[clean, count, Upper(), Later()],
        callbacks=[audit, Everything(), report, memory],
        events=Ingest,
    )
    assert_type(engine, Engine[Record])
    async with engine as entered:
        assert_type(entered, Engine[Record])
        assert_type(engine.state, Record | None)
        traces = await engine.run_event("BEFORE_WRITE")
        assert_type(traces, dict[str, Trace])
        async with engine.pair(Ingest.BEFORE_WRITE, record) as section:
            assert_type(section, Pair)
            assert_type(section.before, dict[str, Trace])
        plan = engine.explain(Ingest.AFTER_WRITE)
        assert_type(plan, Plan)
        assert_type(plan.order, tuple[str, ...])
        for move in plan.moves:
            assert_type(move.from_position, int | None)
        engine.register_pass(passes.set_filo_order, index=0)
        engine.register_pass(lambda algorithms, event: list(reversed(algorithms)))
        report_of_closing = await engine.close()
    assert_type(report_of_closing, CloseReport)

    assert next(iter(traces)) == "upper/BEFORE_WRITE"
    assert audit.rows == ["A B", "A B"]


def test_an_engine_knows_its_logger_and_its_state() -> None:
    """What is misspelt there is seen. Without a state of its own it takes any records, or those it is told."""
    pipeline = Engine(events=Ingest)
    assert_type(pipeline, Engine[Any])
    assert_type(pipeline.logger, Logger)
    of_records: Engine[Record] = Engine(events=Ingest)
    assert_type(of_records.state, Record | None)

    with pytest.raises(AttributeError):
        pipeline.logger.log_metric({})  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_pass_that_forgets_to_return_is_seen() -> None:
    """It could only raise PassError later."""

    def forgetful(algorithms: Sequence[Algorithm[Any, Any]], event: EventName) -> None: ...

    Engine(algorithm_passes=forgetful)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------------------------- bus


async def timed(envelope: Envelope, call_next: CallNext) -> Traces:
    """A middleware is an async function."""
    return await call_next(envelope)


class Counting:
    """Or an object with such a `__call__`."""

    count = 0

    async def __call__(self, envelope: Envelope, call_next: CallNext) -> Traces:
        self.count += 1
        return await call_next(envelope)


async def test_a_bus() -> None:
    """Handlers plain and async, middleware, subscriptions."""
    seen: list[EventName] = []

    async def asynchronous(envelope: Envelope) -> None:
        seen.append(envelope.event)

    def plain(envelope: Envelope) -> None:
        inside = current_envelope()
        assert_type(inside, Envelope | None)
        assert inside is envelope

    counting = Counting()
    middleware: list[Middleware] = [timed, counting]
    bus = EventBus(middleware)
    bus.use(Engine(events=Ingest))
    subscription = bus.subscribe(asynchronous, Ingest.BEFORE_WRITE, "after_write", once=True)
    assert_type(subscription, Subscription)
    with bus.subscribe(plain, when=lambda envelope: envelope.state is not None) as inner:
        assert_type(inner, Subscription)
        assert_type(await bus.publish(Ingest.BEFORE_WRITE, 3, state=Record(), key="k"), dict[str, Trace])
    subscription.cancel()
    expecting: Callable[..., Awaitable[Envelope]] = bus.expect
    assert callable(expecting)

    assert (seen, counting.count) == ([Ingest.BEFORE_WRITE], 1)


def test_events_and_time() -> None:
    """A member keeps its vocabulary; time compares and counts."""
    assert_type(Ingest.BEFORE_WRITE.partner, Ingest | None)
    assert_type(Event.EPOCH_END.canonical_name, str)
    assert_type(Event.EPOCH_END.is_eval, bool)
    stamp = Timestamp().to_next_batch(4)
    assert_type(stamp, Timestamp)
    assert_type(stamp.batch > 0, bool)

    assert Time(5, TimeUnit.EPOCH) == Time(5, "ep")
    assert Ingest.BEFORE_WRITE.partner is Ingest.AFTER_WRITE
