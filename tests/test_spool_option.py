"""`spool=`: what a background callback is to send is on the disk first, then on its way, then forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from eventbus_engine import (
    Callback,
    Circuit,
    ConfigurationError,
    DeliveryError,
    Engine,
    EventName,
    LoggerDestination,
    Record,
    Retry,
    SnapshotError,
    SpoolFullError,
    SpoolInUseError,
    Timestamp,
    background,
)
from eventbus_engine.loggers import HttpLogger
from eventbus_engine.spool import Spool
from eventbus_engine.testing import FlakyEndpoint


class Job(EventName):
    """A vocabulary."""

    STEP = "step"


class State:
    """What the events are about."""

    number = 0
    secret = object()


class FarSide(Callback[Any]):
    """Sends numbers to a far side that is up, or fails with an error, or does not answer."""

    delivery = "background"
    snapshot = ("number",)

    def __init__(self, error: Exception | None = None, **options: Any) -> None:
        super().__init__(**{"name": "far", **options})
        self.error = error
        self.hangs = False
        self.batches: list[list[Record]] = []
        self.calls = 0
        self.called = anyio.Event()

    def step(self, state: Any, logger: Any) -> Any:
        """What there is to send."""
        return {"number": state.number}

    async def send_records(self, records: Sequence[Record], logger: Any) -> None:
        """Take a batch, or do not."""
        self.calls += 1
        self.called.set()
        if self.hangs:
            await anyio.sleep_forever()
        if self.error is not None:
            raise self.error
        self.batches.append(list(records))

    async def arrived(self, count: int) -> None:
        """Wait until so many records have."""
        await until(lambda: len(self.records) >= count)

    @property
    def records(self) -> list[Record]:
        """What has arrived."""
        return [record for batch in self.batches for record in batch]

    @property
    def numbers(self) -> list[int]:
        """The same, by its numbers."""
        return [record.value["number"] for record in self.records]


async def publish(engine: Engine[Any], *numbers: int) -> None:
    """One event for each."""
    assert engine.state is not None
    for engine.state.number in numbers:
        await engine.run_event(Job.STEP)


async def until(holds: Callable[[], bool]) -> None:
    """Look again and again, for what nobody tells of."""
    while not holds():  # noqa: ASYNC110 -- there is no event for it
        await anyio.sleep(0.001)


async def stored(spool: Spool, count: int, queue: str = "far") -> None:
    """Wait until so many records are in the spool."""
    await until(lambda: spool.stats(queue).pending == count)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the spool is: in a folder that is still to be made."""
    return tmp_path / "run" / "spool.db"


@pytest.mark.anyio
async def test_what_is_delivered_is_gone_from_the_spool(path: Path) -> None:
    """In order, in batches, each counted once; the file is closed with the engine."""
    far = FarSide(spool=str(path), max_batch=10)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, *range(35))
        report = await engine.close()
    counts = report.deliveries["far"]

    assert far.numbers == list(range(35))
    assert all(len(batch) <= 10 for batch in far.batches)
    assert (counts.delivered, counts.waiting, counts.spooled, report.spooled) == (35, 0, 0, {})
    assert report.ok
    with Spool(path) as spool:
        assert spool.stats("far").pending == 0


@pytest.mark.anyio
async def test_a_record_is_on_the_disk_while_the_far_side_does_not_answer(tmp_path: Path) -> None:
    """All of them, whatever the batch on its way, and whether it waits to fill up."""
    far = FarSide(max_batch=2, max_wait=3600)
    far.hangs = True
    with Spool(tmp_path / "spool.db") as spool:
        async with Engine(State(), events=Job, callbacks=[background(far, spool=spool)]) as engine:
            await publish(engine, *range(7))
            await far.called.wait()
            await stored(spool, 7)
            report = await engine.close(timeout=0.01)

        assert (report.spooled, report.undelivered, report.ok) == ({"far": 7}, {}, True)
        assert spool.stats("far").pending == 7


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [{}, {"retry": Retry(attempts=2, initial=0, jitter=0)}, {"circuit": Circuit(failures=1, cool_down=3600)}],
    ids=["none", "retry", "circuit"],
)
async def test_what_could_not_be_delivered_goes_first_in_the_next_process(path: Path, options: Any) -> None:
    """Before what is newer, with its own time, id and snapshot, be it given up on, held back, or never tried."""
    first = FarSide(ConnectionError("down"), spool=path, max_batch=4, **options)
    async with Engine(State(), events=Job, callbacks=[first]) as engine:
        await publish(engine, *range(10))
        await first.called.wait()
        report = await engine.close()

    assert (report.spooled, report.undelivered, report.ok) == ({"far": 10}, {}, True)
    # Nothing is lost by giving up before the deadline, so it was not waited for.
    assert report.deliveries["far"].retried <= 3
    again = FarSide(spool=path)
    async with Engine(State(), events=Job, callbacks=[again]) as engine:
        assert engine.deliveries()["far"].spooled == 10
        await publish(engine, 10)
        await engine.close()

    assert again.numbers == list(range(11))
    assert [record.state.number for record in again.records] == list(range(11))
    assert [record.event for record in again.records] == [Job.STEP] * 11
    assert [record.time for record in again.records] == sorted(record.time for record in again.records)
    assert len({record.id for record in again.records}) == 11
    with pytest.raises(SnapshotError, match="declare it"):
        _ = again.records[0].state.secret


@pytest.mark.anyio
async def test_what_nobody_declared_costs_no_record(path: Path) -> None:
    """A timestamp of the state's own kind, or metrics, are left out of the spool, and reading them says so."""
    far = FarSide(spool=path, snapshot=("number", "later"))
    state = SimpleNamespace(number=1, timestamp=datetime.now(UTC), metrics={"a": 1})
    async with Engine(state, events=Job, callbacks=[far]) as engine:
        await engine.run_event(Job.STEP)
        await far.arrived(1)
        await engine.run_event(Job.STEP, SimpleNamespace(number=2, timestamp=Timestamp(batch=7)))
        report = await engine.close()
    (first, second) = far.records

    assert report.ok
    assert (first.state.number, second.state.timestamp) == (1, "7ba")
    for name in ("timestamp", "metrics"):
        with pytest.raises(SnapshotError) as caught:
            getattr(first.state, name)
        assert str(caught.value) == (
            f"background callback far read state.{name}, which its snapshot does not hold: out of a spool come a "
            f"Timestamp and what is declared; declare it: snapshot = ('number', 'later', '{name}')"
        )
    with pytest.raises(SnapshotError, match=r"read state\.later, which the state did not have at the event"):
        _ = first.state.later


@pytest.mark.anyio
async def test_what_is_left_is_sent_without_any_event(path: Path) -> None:
    """As soon as the engine is entered."""
    async with Engine(State(), events=Job, callbacks=[FarSide(ConnectionError("down"), spool=path)]) as engine:
        await publish(engine, 1)
    far = FarSide(spool=path)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await far.called.wait()
        await engine.close()

    assert far.numbers == [1]


@pytest.mark.anyio
async def test_a_batch_is_repeated_as_it_was(path: Path) -> None:
    """By the next process too, though there is more to send by then: so its key is the same."""
    first = FarSide(spool=path, max_batch=100)
    first.hangs = True
    async with Engine(State(), events=Job, callbacks=[first]) as engine:
        await publish(engine, 0)
        await first.called.wait()
        await publish(engine, 1, 2, 3)
        await engine.close(timeout=0)
    again = FarSide(spool=path, max_batch=100)
    async with Engine(State(), events=Job, callbacks=[again]):
        pass

    assert [[record.value["number"] for record in batch] for batch in again.batches] == [[0], [1, 2, 3]]


@pytest.mark.anyio
async def test_what_the_far_side_never_takes_is_lost_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logged, counted, and out of the way of what is behind it."""
    far = FarSide(DeliveryError("no such run"), spool=path, max_batch=1)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 1)
        await far.called.wait()
        await until(lambda: engine.deliveries()["far"].failed == 1)
        far.error = None
        await publish(engine, 2)
        report = await engine.close()

    assert far.numbers == [2]
    assert (report.undelivered, report.unraised, report.spooled) == ({"far": 1}, {"far": 1}, {})
    assert "background callback far failed while sending: no such run" in caplog.messages


@pytest.mark.anyio
async def test_a_value_that_cannot_be_kept_is_a_failure_of_its_event(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says which, and what to do; the others are sent."""

    class Odd(FarSide):
        def step(self, state: Any, logger: Any) -> Any:
            return {"number": object() if state.number == 1 else state.number}

    far = Odd(spool=path)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 0, 1, 2)
        report = await engine.close()

    assert far.numbers == [0, 2]
    assert report.undelivered == {"far": 1}
    assert "number'] is a object, which a spool cannot keep" in caplog.text


@pytest.mark.anyio
async def test_an_event_with_nothing_to_send_is_delivered_at_once(path: Path) -> None:
    """It never sees the disk."""

    class Silent(FarSide):
        def step(self, state: Any, logger: Any) -> Any:
            return None

    async with Engine(State(), events=Job, callbacks=[Silent(spool=path)]) as engine:
        await publish(engine, 0, 1)
        report = await engine.close()

    assert report.deliveries["far"].delivered == 2


@pytest.mark.anyio
@pytest.mark.parametrize(("on_error", "dropped"), [("log", 0), ("quarantine", 2)])
async def test_a_hook_that_fails_costs_its_own_event(path: Path, on_error: Any, dropped: int) -> None:
    """And those behind it, if the callback is dropped for it: that counts to the event."""

    class Failing(FarSide):
        def step(self, state: Any, logger: Any) -> Any:
            if state.number == 1:
                raise ValueError("unlucky")
            return super().step(state, logger)

    far = Failing(spool=path, on_error=on_error, quarantine_after=1)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 0, 1, 2, 3)
        report = await engine.close()

    counts = report.deliveries["far"]
    assert (counts.failed, counts.dropped, counts.spooled + counts.delivered) == (1, dropped, 3 - dropped)


@pytest.mark.anyio
async def test_a_callback_that_is_dropped_leaves_what_it_had_to_the_next_process(path: Path) -> None:
    """It is called no more; what comes after that is lost, and counted."""
    far = FarSide(ConnectionError("down"), spool=path, on_error="quarantine", quarantine_after=1)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 0, 1)
        await far.called.wait()
        await until(lambda: engine._delivery.mailboxes != {} and engine._roster.latest.entries[0].quarantined)
        calls = far.calls
        await publish(engine, 2)
        report = await engine.close()

    assert (far.calls, far.numbers) == (calls, [])
    assert report.spooled == {"far": 2}


@pytest.mark.anyio
async def test_a_spool_that_is_closed_too_early_is_no_reason_not_to_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was not written is lost, and counted; the callbacks are closed."""
    spool = Spool(tmp_path / "spool.db")
    far = FarSide(ConnectionError("down"), spool=spool)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 0)
        await far.called.wait()
        await stored(spool, 1)
        spool.close()
        await publish(engine, 1)
        report = await engine.close(timeout=1)

    assert (report.closed, report.undelivered) == (["far"], {"far": 1})
    assert "is closed; open it again" in caplog.text


def test_a_hook_that_outlives_the_closing_stores_nothing_any_more(path: Path) -> None:
    """It holds up its thread; its event has been counted as lost by then."""
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(FarSide):
        def step(self, state: Any, logger: Any) -> Any:
            entered.set()
            go_on.wait(10)
            return super().step(state, logger)

    engine = Engine(State(), events=Job, callbacks=[Stuck(spool=path)])
    engine.sync.run_event(Job.STEP)
    entered.wait()
    report = engine.sync.close(timeout=0.01)
    go_on.set()

    assert report.undelivered == {"far": 1}
    assert report.spooled == {}


@pytest.mark.anyio
async def test_nothing_waits_for_opening(path: Path) -> None:
    """`open` may fail for as long as the far side is down: what the hooks make is in the spool."""

    class Opening(FarSide):
        async def open(self, state: Any, logger: Any) -> None:
            self.called.set()
            raise ConnectionError("down")

    far = Opening(spool=path)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 0, 1, 2)
        await far.called.wait()
        report = await engine.close()

    assert (report.spooled, report.undelivered) == ({"far": 3}, {})


@pytest.mark.anyio
async def test_callbacks_share_a_file_and_nothing_else(path: Path) -> None:
    """One whose far side is down does not hold up its neighbour."""
    down, up = FarSide(ConnectionError("down"), spool=path), FarSide(name="up", spool=path)
    async with Engine(State(), events=Job, callbacks=[down, up]) as engine:
        await publish(engine, 0, 1, 2)
        report = await engine.close()

    assert up.numbers == [0, 1, 2]
    assert report.spooled == {"far": 3}


@pytest.mark.anyio
async def test_what_is_logged_last_of_all_is_spooled_too(path: Path) -> None:
    """By another callback that closes, in the order of logging, behind what is in the spool."""

    class Last(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"number": 2})

    class Destination(LoggerDestination):
        name, delivery, max_batch = "far", "background", 1
        error: Exception | None = ConnectionError("down")

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.seen: list[Any] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
            return metrics

        async def send_records(self, records: Sequence[Record], logger: Any) -> None:
            if self.error is not None:
                raise self.error
            self.seen += [record.value["number"] for record in records]

    async with Engine(State(), events=Job, callbacks=[Destination(spool=path), Last()]) as engine:
        for number in range(2):
            engine.logger.log_metrics({"number": number})
            await engine.run_event(Job.STEP)
        far = next(callback for callback in engine.logger.destinations)
        far.opened = True
        report = await engine.close()
    again = Destination(spool=path)
    again.error = None
    async with Engine(State(), events=Job, callbacks=[again, Last()]) as engine:
        second = await engine.close()

    assert (report.spooled, report.undelivered) == ({"far": 3}, {})
    assert again.seen == [0, 1, 2, 2]
    assert second.ok


class TightSpool(Spool):
    """On a disk that takes nothing more, once told so."""

    full = False

    def append(self, queue: str, records: Any) -> int:
        """Store them if there is room."""
        if self.full:
            raise SpoolFullError("there is no room", self.path, 0)
        return super().append(queue, records)


@pytest.mark.anyio
async def test_a_full_disk_delivers_from_memory_and_never_loses_in_silence(tmp_path: Path) -> None:
    """While the far side is up nothing is lost; with that down too, the mailbox bounds what waits, and counts."""
    far = FarSide(max_batch=2, max_pending=3)
    with TightSpool(tmp_path / "spool.db") as spool:
        spool.full = True
        async with Engine(State(), events=Job, callbacks=[background(far, spool=spool)]) as engine:
            for number in range(5):
                await publish(engine, number)
                await far.arrived(number + 1)
            far.error = ConnectionError("down")
            await publish(engine, *range(5, 20))
            report = await engine.close(timeout=0.3)

    assert far.numbers == list(range(5))
    assert report.deliveries["far"].delivered == 5
    assert report.undelivered == {"far": 15}


@pytest.mark.anyio
async def test_cancellation_spools_what_it_leaves(path: Path) -> None:
    """As closing does: it is the same."""
    far = FarSide(ConnectionError("down"), spool=path)
    with anyio.CancelScope() as scope:
        async with Engine(State(), events=Job, callbacks=[far]) as engine:
            await publish(engine, 0, 1, 2)
            scope.cancel()
            await anyio.sleep_forever()
    with Spool(path) as spool:
        assert spool.stats("far").pending == 3


@pytest.mark.anyio
async def test_send_records_may_close_the_engine(path: Path) -> None:
    """It marks the closing and returns, as from any handler."""

    class Closing(FarSide):
        async def send_records(self, records: Sequence[Record], logger: Any) -> None:
            self.pending = (await engine.close()).pending
            await super().send_records(records, logger)

    far = Closing(spool=path)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 1)
        await far.called.wait()

    assert (far.pending, far.numbers) == (True, [1])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spool": 3}, "callback far has spool=3; give a path, a Spool, or None"),
        ({"spool": "x", "delivery": "inline"}, "make it delivery='background'"),
    ],
)
async def test_a_spool_that_makes_no_sense_is_refused(options: Any, message: str) -> None:
    """Before the run, with the cure."""
    with pytest.raises(ConfigurationError, match=message):
        Engine(State(), events=Job, callbacks=[FarSide(**options)])


@pytest.mark.anyio
async def test_a_spool_needs_something_that_sends() -> None:
    """What is in it would stay there."""

    class Watcher(Callback[Any]):
        delivery, spool = "background", "x"

        def step(self, state: Any, logger: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="nothing that sends what is in it; give it a method send_records"):
        Engine(State(), events=Job, callbacks=[Watcher()])


@pytest.mark.anyio
async def test_a_spool_that_cannot_be_opened_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    """Nobody would notice later on; and the engine closes what it had."""
    with Spool(tmp_path / "spool.db"), pytest.raises(SpoolInUseError):
        async with Engine(State(), events=Job, callbacks=[FarSide(spool=tmp_path / "spool.db")]):
            raise AssertionError("entered")
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="check that path"):
        async with Engine(State(), events=Job, callbacks=[FarSide(spool=tmp_path / "file" / "spool.db")]):
            raise AssertionError("entered")


@pytest.mark.anyio
async def test_a_callback_that_comes_later_waits_for_its_spool(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Held by another for a while: its events wait in its mailbox, and it says so once."""
    far = FarSide(spool=path)
    state = State()
    state.callbacks = []  # type: ignore[attr-defined]
    path.parent.mkdir()
    with Spool(path):
        async with Engine(state, events=Job) as engine:
            state.callbacks.append(far)  # type: ignore[attr-defined]
            await publish(engine, 1)
            await until(lambda: "SpoolInUseError" in caplog.text)
            report = await engine.close(timeout=0.5)

    assert (report.undelivered, far.numbers) == ({"far": 1}, [])


def test_engine_sync_spools_too(path: Path) -> None:
    """On its thread."""
    for error, expected in ((ConnectionError("down"), []), (None, [0, 1, 2, 0, 1, 2])):
        far = FarSide(error, spool=path)
        engine = Engine(State(), events=Job, callbacks=[far])
        assert engine.state is not None
        for engine.state.number in range(3):
            engine.sync.run_event(Job.STEP)
        report = engine.sync.close()

        assert (far.numbers, report.spooled) == (expected, {} if error is None else {"far": 3})


@pytest.mark.anyio
async def test_an_http_logger_goes_on_where_the_last_one_ended(path: Path) -> None:
    """What it logged while the service was down arrives first, in order, each record once."""
    with FlakyEndpoint() as endpoint:
        endpoint.down()
        async with Engine(State(), events=Job, callbacks=[HttpLogger(endpoint.url, spool=path)]) as engine:
            for number in range(5):
                engine.logger.log_metrics({"number": number})
                await engine.run_event(Job.STEP)
            report = await engine.close(timeout=0.5)
        endpoint.up()
        async with Engine(State(), events=Job, callbacks=[HttpLogger(endpoint.url, spool=path)]) as engine:
            engine.logger.log_metrics({"number": 5})
            await engine.run_event(Job.STEP)
        arrived = [record for request in endpoint.requests for record in request.json["records"]]

    assert (report.spooled, report.ok) == ({"http_logger": 5}, True)
    assert [record["metrics"]["number"] for record in arrived] == list(range(6))
    assert len({record["id"] for record in arrived}) == 6


@pytest.mark.anyio
async def test_closing_does_not_wait_for_an_event_with_nothing_to_send(path: Path) -> None:
    """The last one, that is: it has changed nothing."""

    class Seldom(FarSide):
        def step(self, state: Any, logger: Any) -> Any:
            return super().step(state, logger) if state.number == 1 else None

    far = Seldom(spool=path)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 1)
        await far.arrived(1)
        await publish(engine, 2)
        await until(lambda: engine.deliveries()["far"].delivered == 2)
        with anyio.fail_after(30):
            report = await engine.close(timeout=60)

    assert (report.ok, report.deliveries["far"].delivered) == (True, 2)


@pytest.mark.anyio
async def test_a_value_that_cannot_be_kept_costs_its_own_event_and_no_other(path: Path) -> None:
    """Whatever goes wrong in writing it down."""

    class Odd(FarSide):
        def step(self, state: Any, logger: Any) -> Any:
            return {"number": 10**5000 if state.number == 1 else state.number}

    far = Odd(spool=path, on_error="log")
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        await publish(engine, 0, 1, 2)
        report = await engine.close()

    assert (far.numbers, report.undelivered) == ([0, 2], {"far": 1})


@pytest.mark.anyio
async def test_what_is_logged_last_is_counted_if_the_spool_never_opened(tmp_path: Path) -> None:
    """And closing raises nothing."""

    class Last(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"last": 1})

    class Remote(LoggerDestination):
        delivery = "background"

        def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
            return metrics

        async def send_records(self, records: Sequence[Record], logger: Any) -> None:
            raise AssertionError("nothing is to be sent")

    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"no database" * 500)
    remote = Remote(spool=foreign)
    engine = Engine(State(), events=Job, callbacks=[remote, Last()])
    engine.logger.log_metrics({"first": 1})
    await anyio.to_thread.run_sync(engine.sync.run_event, Job.STEP)
    report = await anyio.to_thread.run_sync(engine.sync.close, 1)

    assert report.undelivered == {"remote": 2}


@pytest.mark.anyio
async def test_engines_that_share_a_spool_need_callbacks_of_different_names(path: Path) -> None:
    """Each would send what the other has to: the second one is refused, until the first is closed."""
    path.parent.mkdir()
    with Spool(path) as spool:
        first, second, third = (Engine(State(), events=Job, callbacks=[FarSide(spool=spool)]) for _ in range(3))
        async with first:
            with pytest.raises(SpoolInUseError, match=r"the queue 'far' of the spool .* is read already"):
                async with second:
                    raise AssertionError("it is not to be entered")
            await publish(first, 1)
        async with third:
            await publish(third, 2)
            report = await third.close()

    assert report.deliveries["far"].delivered == 1


@pytest.mark.anyio
async def test_a_spool_that_cannot_be_looked_into_is_free_for_the_next_attempt(path: Path) -> None:
    """Nobody reads a queue whose reader has failed to begin."""

    class Unreadable(Spool):
        failures = 1

        def stats(self, queue: str) -> Any:
            self.failures -= 1
            if self.failures >= 0:
                raise SpoolFullError("not now", self.path)
            return super().stats(queue)

    path.parent.mkdir()
    with Unreadable(path) as spool:
        for number in range(2):
            far = FarSide(spool=spool)
            engine = Engine(State(), events=Job, callbacks=[far])
            if number == 0:
                with pytest.raises(SpoolFullError, match="not now"):
                    await engine.__aenter__()
                continue
            async with engine:
                await publish(engine, 1)
            assert far.numbers == [1]


@pytest.mark.anyio
async def test_of_a_batch_of_which_a_part_is_refused_that_part_is_counted(tmp_path: Path) -> None:
    """The rest was delivered."""
    far = FarSide(DeliveryError("one was wrong", lost=1), spool=tmp_path / "spool.db", max_batch=3, max_wait=60.0)
    async with Engine(State(), events=Job, callbacks=[far]) as engine:
        for _ in range(3):
            await engine.run_event(Job.STEP)
        report = await engine.close()
    counts = report.deliveries["far"]

    assert (counts.delivered, counts.failed, counts.spooled) == (2, 1, 0)
    assert report.undelivered == {"far": 1}
