"""What a background callback does about a far side that is slow, busy or down: retries, a circuit, batches."""

from __future__ import annotations

import itertools
import logging
import random
import time
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from eventbus_engine import (
    Callback,
    Circuit,
    ConfigurationError,
    DeliveryCounts,
    DeliveryError,
    Engine,
    Event,
    EventName,
    HandlerTypeError,
    LoggerDestination,
    Record,
    Retry,
    background,
)
from eventbus_engine.testing import FakeAlgorithm, FakeCallback, backend_options

pytestmark = pytest.mark.anyio

NOT_ALL: Any = ("OSError",)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both event loops, each with a clock that jumps: the pauses take no time, and are measured exactly."""
    return request.param, backend_options(request.param)


class State:
    """A state, changed in place."""

    number = 0


class BusyError(ConnectionError):
    """The far side says when to come back."""

    retry_after: float | None = None


class FarSide(Callback[Any]):
    """A background callback whose far side fails on demand; notes when it was called, and with what."""

    delivery = "background"
    snapshot = ("number",)

    def __init__(self, *failures: Exception | None, down: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.failures = list(failures)
        self.down = down
        self.calls: list[tuple[float, int]] = []
        self.arrived: list[int] = []

    async def batch_end(self, state: Any, logger: Any) -> None:
        """Fail as told, else take the event."""
        self.calls.append((anyio.current_time(), state.number))
        error = self.failures.pop(0) if self.failures else None
        if self.down or error is not None:
            raise error or ConnectionError("down")
        self.arrived.append(state.number)


async def publish(engine: Engine[Any], count: int, start: int = 0) -> None:
    """Publish so many events about a state that is changed in place."""
    for number in range(start, start + count):
        state: Any = engine.state
        state.number = number
        await engine.run_event(Event.BATCH_END)


def pauses(far: FarSide) -> list[float]:
    """The seconds between the calls."""
    times = [time for time, _ in far.calls]
    return [round(b - a, 6) for a, b in itertools.pairwise(times)]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the engine logged."""
    return [record.getMessage() for record in caplog.records if record.name == "eventbus_engine"]


EXACT: dict[str, Any] = {"initial": 1.0, "maximum": 5.0, "jitter": 0.0}

# -------------------------------------------------------------------------------------------------------------- options


async def test_options_may_be_arguments_of_the_constructor() -> None:
    """Where a class has none of its own, and where it hands them on; what is no option is refused, by name."""

    class Bare(Callback[Any]):
        async def batch_end(self, state: Any, logger: Any) -> None: ...

    bare, far = Bare(delivery="background", max_pending=3, name="bare"), FarSide(max_pending=4)

    assert (bare.delivery, bare.max_pending, bare.name, far.max_pending) == ("background", 3, "bare", 4)
    assert (Bare.delivery, Bare.max_pending) == ("inline", 1000)
    with pytest.raises(HandlerTypeError, match="Bare has no option 'mailbox'; it takes name, on_error"):
        Bare(mailbox=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retry": 3}, "has retry=3; give a Retry, or None"),
        ({"circuit": True}, "has circuit=True; give a Circuit, or None"),
        ({"max_batch": 0}, "has max_batch=0; give a number of events, 1 or more"),
        ({"max_wait": -1}, "has max_wait=-1; give a number of seconds, 0 or more"),
        ({"max_batch": 5}, "has max_batch or max_wait, but nothing that takes a batch; give it a method send_records"),
        ({"max_wait": 1.0}, "has max_batch or max_wait, but nothing that takes a batch"),
        ({"coalesce_key": len}, "has to take"),
        ({"run_blocking": "yes"}, "has run_blocking='yes'; use False or True"),
        ({"blocks_after": None}, "has blocks_after=None; give a number of seconds, 0 or more"),
        ({"delivery": "inline", "retry": Retry()}, "has retry, so make it delivery='background'"),
        ({"delivery": "inline", "circuit": Circuit()}, "has circuit, so make it delivery='background'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """At construction, by the callback's name, with what would do."""
    with pytest.raises(ConfigurationError, match="far_side") as caught:
        Engine(callbacks=[FarSide(**options)])

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Retry(attempts=0), "Retry has attempts=0; give a whole number of 1 or more"),
        (lambda: Retry(attempts=True), "Retry has attempts=True; give a whole number of 1 or more"),
        (lambda: Retry(initial=-1), "Retry has initial=-1; give a number of 0 or more"),
        (lambda: Retry(maximum=float("inf")), "Retry has maximum=inf; give a number of 0 or more"),
        (lambda: Retry(jitter=2), "Retry has jitter=2; give a number from 0 to 1"),
        (
            lambda: Retry(on=NOT_ALL),
            "Retry has on=('OSError',); give a tuple of classes of exceptions, as in (OSError,)",
        ),
        (lambda: Circuit(failures=0), "Circuit has failures=0; give a whole number of 1 or more"),
        (lambda: Circuit(cool_down=-1), "Circuit has cool_down=-1; give a number of 0 or more"),
    ],
)
def test_a_policy_checks_its_numbers(make: Any, message: str) -> None:
    """Where it is made."""
    with pytest.raises(ConfigurationError) as caught:
        make()

    assert str(caught.value) == message


# -------------------------------------------------------------------------------------------------------------- retries


async def test_an_event_is_sent_again_until_it_is_through(caplog: pytest.LogCaptureFixture) -> None:
    """With pauses that double up to the maximum; the events behind it wait, in order, and nothing is logged."""
    far = FarSide(*[ConnectionError("busy")] * 4, retry=Retry(attempts=5, **EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 3)
        report = await engine.close(timeout=100)
        counts = engine.deliveries()

    # Closing makes the first pause short.
    assert far.arrived == [0, 1, 2]
    assert [number for _, number in far.calls] == [0, 0, 0, 0, 0, 1, 2]
    assert counts == report.deliveries == {"far_side": DeliveryCounts(delivered=3, retried=4)}
    assert (report.ok, messages(caplog)) == (True, [])


async def test_the_pauses_double_up_to_the_maximum() -> None:
    """Exactly, without jitter; `retry_after` makes one longer, also beyond the maximum."""
    asks, odd = BusyError(), BusyError()
    asks.retry_after, odd.retry_after = 20.0, float("nan")
    down = ConnectionError("down")
    far = FarSide(down, down, down, down, asks, odd, retry=Retry(attempts=7, **EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 1)
        await anyio.sleep(100)

    assert pauses(far) == [1, 2, 4, 5, 20, 5]
    assert far.arrived == [0]


async def test_the_last_attempt_is_the_one_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    """After it the event has failed, once; the next one gets attempts of its own."""
    far = FarSide(*[ConnectionError("down")] * 3, retry=Retry(attempts=3, **EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 2)
        await anyio.sleep(100)
        report = await engine.close()

    assert (far.arrived, engine.deliveries()["far_side"]) == ([1], DeliveryCounts(1, failed=1, retried=2))
    assert messages(caplog) == ["background callback far_side failed on BATCH_END"]
    assert (report.unraised, report.undelivered, report.ok) == ({"far_side": 1}, {}, False)


@pytest.mark.parametrize(
    "error", [ValueError("not covered"), type("Refused", (ConnectionError,), {"retryable": False})("no")]
)
async def test_what_another_attempt_would_not_change_is_not_tried_again(error: Exception) -> None:
    """Neither what `on` does not name, nor what says so itself."""
    far = FarSide(error, retry=Retry(on=(OSError,), **EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 2)

    assert [number for _, number in far.calls] == [0, 1]


async def test_each_attempt_has_the_whole_timeout() -> None:
    """And each that outlives it is counted, and stands in the report."""
    calls: list[float] = []

    async def hang(event: Any, state: Any, logger: Any) -> None:
        calls.append(anyio.current_time())
        if len(calls) < 3:
            await anyio.sleep_forever()

    far = FakeCallback(name="far", hook=hang, delivery="background", timeout=2.0, retry=Retry(**EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await engine.run_event("init")
        await anyio.sleep(50)
        report = await engine.close()

    assert [round(b - a, 3) for a, b in itertools.pairwise(calls)] == [3, 4]
    assert report.deliveries["far"] == DeliveryCounts(delivered=1, retried=2, timed_out=2)


async def test_open_is_retried_like_a_hook() -> None:
    """The event that was to be the first is not lost over it."""

    class Opened(FarSide):
        attempts = 0

        async def open(self, state: Any, logger: Any) -> None:
            self.attempts += 1
            if self.attempts < 3:
                raise ConnectionError("down")

    far = Opened(retry=Retry(**EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 2)
        await anyio.sleep(50)

    assert (far.attempts, far.arrived) == (3, [0, 1])


async def test_jitter_only_shortens_and_draws_from_no_global_generator() -> None:
    """A run whose logger retries draws the random numbers of one whose logger does not."""
    numpy = pytest.importorskip("numpy", reason="what is tested is that its generator stays where it is")
    torch = pytest.importorskip("torch", reason="likewise")
    far = FarSide(*[ConnectionError("down")] * 20, retry=Retry(attempts=30, initial=1.0, maximum=1.0, jitter=0.5))
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 1)
        await anyio.sleep(50)

    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert all(0.5 <= pause <= 1 for pause in pauses(far))
    assert len(set(pauses(far))) > 1


async def test_a_failing_far_side_is_logged_once_for_each_kind_of_failure(caplog: pytest.LogCaptureFixture) -> None:
    """However many events it costs; a success in between begins anew."""
    down, full = ConnectionError("down"), OSError("full")
    far = FarSide(down, down, full, down, None, down, on_error="log")
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 7)
        report = await engine.close()

    assert messages(caplog) == ["background callback far_side failed on BATCH_END"] * 3
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        ConnectionError,
        OSError,
        ConnectionError,
    ]
    assert (report.deliveries["far_side"].failed, report.ok) == (5, True)


# -------------------------------------------------------------------------------------------------------------- circuit


async def test_an_open_circuit_leaves_the_far_side_alone_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Events wait; one goes out as a probe after each cool-down; when it is through the rest follows, in order."""
    far = FarSide(down=True, retry=Retry(attempts=3, **EXACT), circuit=Circuit(failures=2, cool_down=10.0))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 5)
        await anyio.sleep(5)
        opened = engine.deliveries()["far_side"]
        await anyio.sleep(30)
        far.down = False
        await anyio.sleep(10)

        assert opened == DeliveryCounts(waiting=5, retried=1, circuit="open", openings=1)
        assert pauses(far) == [1, 10, 10, 10, 10, 0, 0, 0, 0]
        assert [number for _, number in far.calls] == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]
        assert far.arrived == [0, 1, 2, 3, 4]
        assert engine.deliveries()["far_side"] == DeliveryCounts(delivered=5, retried=5, openings=1)
        assert (await engine.close()).ok

    assert messages(caplog) == [
        (
            "background callback far_side failed 2 times in a row: its circuit is open, its events wait, and one is "
            "tried every 10 s"
        ),
        "background callback far_side works again: its circuit is closed",
    ]


async def test_while_the_circuit_is_open_the_mailbox_keeps_its_bound() -> None:
    """What it drops for that is counted, as ever."""
    far = FarSide(down=True, circuit=Circuit(failures=1, cool_down=10.0), max_pending=2)
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 1)
        await anyio.sleep(1)
        await publish(engine, 5, start=1)
        far.down = False
        await anyio.sleep(20)
        report = await engine.close()

    assert (far.arrived, report.undelivered) == ([0, 4, 5], {"far_side": 3})


async def test_a_probe_that_is_under_way_shows() -> None:
    """The state is `probing` until the far side has answered."""
    seen: list[str] = []

    class Looking(FarSide):
        async def batch_end(self, state: Any, logger: Any) -> None:
            seen.append(engine.deliveries()["looking"].circuit)
            await super().batch_end(state, logger)

    far = Looking(ConnectionError("down"), circuit=Circuit(failures=1, cool_down=10.0))
    engine = Engine(State(), callbacks=[far])
    async with engine:
        await publish(engine, 1)
        await anyio.sleep(20)

    assert seen == ["closed", "probing"]


async def test_a_programming_error_does_not_open_the_circuit() -> None:
    """It says nothing about the far side."""
    bad = type("Refused", (ValueError,), {"retryable": False})("no")
    far = FarSide(bad, bad, bad, circuit=Circuit(failures=1))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 4)

    assert (far.arrived, engine.deliveries()["far_side"].openings) == ([3], 0)


# -------------------------------------------------------------------------------------------------------------- closing


@pytest.mark.parametrize("policy", [{"retry": Retry(30, **EXACT)}, {"circuit": Circuit(1, 60.0)}])
async def test_closing_tries_at_once_what_waits_for_another_attempt(policy: dict[str, Any]) -> None:
    """The far side may be back by now."""
    far = FarSide(ConnectionError("down"), **policy)
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 3)
        await anyio.sleep(0.5)
        before = anyio.current_time()
        report = await engine.close()

        assert (anyio.current_time() - before, report.ok, far.arrived) == (0, True, [0, 1, 2])


@pytest.mark.parametrize("policy", [{"retry": Retry(30, initial=60, jitter=0)}, {"circuit": Circuit(1, 60.0)}])
async def test_closing_tries_until_its_deadline_however_long_the_pauses_are(policy: dict[str, Any]) -> None:
    """A far side that comes back in time is not missed; each pause is half of the time that is left."""
    far = FarSide(*[ConnectionError("down")] * 3, **policy)
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 3)
        await anyio.sleep(0.5)
        before = anyio.current_time()
        report = await engine.close(timeout=10)

        assert anyio.current_time() - before == 7.5
    assert (far.arrived, report.ok) == ([0, 1, 2], True)


async def test_closing_ends_by_its_deadline_if_the_far_side_stays_down() -> None:
    """It reports what was left, and closes the rest in the time there is."""
    far = FarSide(down=True, circuit=Circuit(failures=1, cool_down=60.0))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 3)
        await anyio.sleep(0.5)
        before = anyio.current_time()
        report = await engine.close(timeout=10)

        assert 9.8 < anyio.current_time() - before < 10
    assert (report.undelivered, report.closed, report.ok) == ({"far_side": 3}, ["far_side"], False)
    assert report.deliveries["far_side"].waiting == 0
    assert report.deliveries["far_side"].retried == 8


async def test_closing_keeps_to_a_pause_that_the_far_side_asked_for() -> None:
    """And does not wait if that would be over too late."""
    error = ConnectionError("busy")
    error.retry_after = 11.0  # type: ignore[attr-defined]
    far = FarSide(*[error] * 9, retry=Retry(9, **EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 3)
        await anyio.sleep(0.5)
        before = anyio.current_time()
        report = await engine.close(timeout=10)

        assert anyio.current_time() == before
    assert (report.undelivered, report.deliveries["far_side"].retried) == ({"far_side": 3}, 1)


async def test_closing_goes_on_trying_within_its_deadline() -> None:
    """With the pauses of the policy."""
    far = FarSide(*[ConnectionError("down")] * 3, retry=Retry(9, **EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 1)
        report = await engine.close(timeout=8)

    assert (far.arrived, report.ok) == ([0], True)


def test_it_holds_without_an_event_loop_too() -> None:
    """The worker lives on the loop thread of `engine.sync`."""
    far = FarSide(ConnectionError("down"), retry=Retry(initial=0.0))
    engine = Engine(State(), callbacks=[far])
    engine.sync.run_event(Event.BATCH_END)
    report = engine.sync.close()

    assert (far.arrived, report.deliveries) == ([0], {"far_side": DeliveryCounts(delivered=1, retried=1)})


# -------------------------------------------------------------------------------------------------------------- batches


class Batching(Callback[Any]):
    """Sends what its hooks return, together."""

    delivery = "background"
    snapshot = ("number",)

    def __init__(self, *failures: Exception | None, **options: Any) -> None:
        super().__init__(**options)
        self.failures = list(failures)
        self.batches: list[tuple[float, list[Any]]] = []
        self.records: list[Record] = []

    def batch_end(self, state: Any, logger: Any) -> Any:
        """What there is to send: nothing for every tenth event."""
        if state.number == 13:
            raise ValueError("unlucky")
        return state.number if state.number % 10 else None

    async def send_records(self, records: list[Record], logger: Any) -> None:
        """Send them."""
        self.batches.append((anyio.current_time(), [record.value for record in records]))
        error = self.failures.pop(0) if self.failures else None
        if error is not None:
            raise error
        self.records += records


async def test_what_waits_is_sent_together() -> None:
    """Up to `max_batch` of it, in order, each with its event, snapshot, time and id; an empty batch is not sent."""
    batching = Batching(max_batch=3)
    before = datetime.now(UTC)
    async with Engine(State(), callbacks=[batching]) as engine:
        await publish(engine, 1)
        await publish(engine, 7, start=4)

    # The first one came in alone or with others, as the event loop had it: their order is all that is promised.
    assert [record.value for record in batching.records] == [4, 5, 6, 7, 8, 9]
    assert max(len(values) for _, values in batching.batches) <= 3
    assert len({record.id for record in batching.records}) == 6
    assert all(record.event is Event.BATCH_END for record in batching.records)
    assert [record.state.number for record in batching.records] == [4, 5, 6, 7, 8, 9]
    times = [record.time for record in batching.records]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= datetime.now(UTC)
    assert engine.deliveries()["batching"] == DeliveryCounts(delivered=8)


async def test_a_batch_waits_to_fill_up() -> None:
    """For `max_wait` seconds, or until it is full, or the engine closes."""
    batching = Batching(max_batch=3, max_wait=5.0)
    async with Engine(State(), callbacks=[batching]) as engine:
        started = anyio.current_time()
        await publish(engine, 2, start=1)
        await anyio.sleep(7)
        await publish(engine, 4, start=3)
        await anyio.sleep(1)
        await engine.close()

    assert [(time - started, values) for time, values in batching.batches] == [
        (5, [1, 2]),
        (7, [3, 4, 5]),
        (8, [6]),
    ]


async def test_nothing_to_send_is_not_sent() -> None:
    """An event whose hook returns None is done with."""
    batching = Batching()
    async with Engine(State(), callbacks=[batching]) as engine:
        await publish(engine, 1)

    assert (batching.batches, engine.deliveries()) == ([], {"batching": DeliveryCounts(delivered=1)})


async def test_a_hook_that_fails_costs_its_own_record() -> None:
    """The rest of the batch is sent, and counted as delivered."""
    batching = Batching()
    async with Engine(State(), callbacks=[batching]) as engine:
        await publish(engine, 3, start=12)

    assert [record.value for record in batching.records] == [12, 14]
    assert engine.deliveries()["batching"] == DeliveryCounts(delivered=2, failed=1)


async def test_a_batch_is_sent_again_as_it_was() -> None:
    """The same records under the same ids, so that the far side can tell."""
    seen: list[list[str]] = []

    class Seen(Batching):
        async def send_records(self, records: list[Record], logger: Any) -> None:
            seen.append([record.id for record in records])
            await super().send_records(records, logger)

    batching = Seen(ConnectionError("down"), retry=Retry(**EXACT), max_wait=1.0)
    async with Engine(State(), callbacks=[batching]) as engine:
        await publish(engine, 3, start=1)
        await anyio.sleep(3)
        await publish(engine, 1, start=5)

    assert seen[0] == seen[1]
    assert [record.value for record in batching.records] == [1, 2, 3, 5]


async def test_a_batch_that_fails_fails_for_each_of_its_events(caplog: pytest.LogCaptureFixture) -> None:
    """Each is counted; what happened is logged once."""
    batching = Batching(ConnectionError("down"), max_wait=1.0)
    async with Engine(State(), callbacks=[batching]) as engine:
        await publish(engine, 4, start=12)
        await anyio.sleep(2)

    assert engine.deliveries()["batching"] == DeliveryCounts(failed=4)
    assert messages(caplog) == ["background callback batching failed on BATCH_END"] * 2


async def test_a_batch_that_hangs_is_ended_by_the_timeout() -> None:
    """The limit is for the sending: a plain hook that makes the record needs none."""

    class Hanging(Batching):
        async def send_records(self, records: list[Record], logger: Any) -> None:
            await anyio.sleep_forever()

    async with Engine(State(), callbacks=[Hanging(timeout=2.0)]) as engine:
        await publish(engine, 1, start=1)
        await anyio.sleep(5)

    assert engine.deliveries()["hanging"] == DeliveryCounts(failed=1, timed_out=1)


def test_batches_need_the_background_and_the_right_arguments() -> None:
    """Said at construction."""

    class Wrong(Batching):
        send_records: Any = lambda self, records: None

    with pytest.raises(HandlerTypeError, match=r"wrong.send_records has to take \(records, logger\)"):
        Engine(callbacks=[Wrong()])
    with pytest.raises(ConfigurationError, match="has send_records, so make it delivery='background'"):
        Engine(callbacks=[Batching(delivery="inline")])
    assert Engine(callbacks=[background(Batching(delivery="inline"))])


class Rows(LoggerDestination):
    """A destination whose `log_*` methods make records, for its `send_records`."""

    delivery = "background"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent: list[list[Any]] = []
        self.records: list[Record] = []
        self.down = False

    def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
        """A row."""
        return dict(metrics)

    async def log_hyperparameters(self, hyperparameters: Any) -> Any:
        """A row, made when it is its turn."""
        if "bad" in hyperparameters:
            raise ValueError("bad")
        return dict(hyperparameters)

    def epoch_end(self, state: Any, logger: Any) -> Any:
        """Another."""
        return "epoch"

    async def send_records(self, records: list[Record], logger: Any) -> None:
        """Send them."""
        if self.down:
            raise ConnectionError("down")
        self.sent.append([record.value for record in records])
        self.records += records


def _log(event: Any, state: Any, logger: Any) -> None:
    logger.log_metrics({"loss": 1})
    logger.log_hyperparameters({"lr": 2})
    logger.log_hyperparameters({"bad": 3})


async def test_a_destinations_records_go_into_the_batch_with_their_event(caplog: pytest.LogCaptureFixture) -> None:
    """What its `log_*` methods return, in order, before what its hook does; what is logged at the end goes out too."""

    class Last(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"last": 4})

    class Plain(LoggerDestination):
        delivery = "background"

        def __init__(self) -> None:
            self.sent: list[Any] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
            return dict(metrics)

        def send_records(self, records: list[Record], logger: Any) -> None:
            self.sent += [record.value for record in records]

    rows, plain = Rows(max_wait=1.0), Plain()
    async with Engine(State(), algorithms=[FakeAlgorithm(apply=_log)], callbacks=[rows, Last(), plain]) as engine:
        await engine.run_event("epoch_end")
        await engine.run_event("fit_end")
        report = await engine.close()

    assert plain.sent == [{"loss": 1}, {"loss": 1}, {"last": 4}]
    first = [{"loss": 1}, {"lr": 2}]
    assert [value for values in rows.sent for value in values] == [*first, "epoch", *first, {"last": 4}]
    assert [record.event for record in rows.records][-2:] == [Event.FIT_END, None]
    assert len({record.id for record in rows.records}) == 6
    assert messages(caplog).count("destination rows failed in making a record") == 1
    assert report.undelivered == {"rows": 2}


class Partly(Callback[Any]):
    """Sends numbers to a far side that refuses those above ten, and says how many those were."""

    delivery, snapshot = "background", ("number",)

    def batch_end(self, state: Any, logger: Any) -> Any:
        """What there is to send."""
        return state.number

    def send_records(self, records: list[Record], logger: Any) -> None:
        """Send them."""
        lost = sum(record.value > 10 for record in records)
        if lost:
            raise DeliveryError("above ten", lost=lost)


async def test_of_a_batch_of_which_a_part_failed_that_part_is_counted() -> None:
    """The rest was delivered."""
    state = State()
    async with Engine(state, callbacks=[Partly(max_wait=30.0)]) as engine:
        for state.number in (1, 11, 2, 12, 3):
            await engine.run_event("batch_end")
        report = await engine.close()
    counts = report.deliveries["partly"]

    assert (counts.delivered, counts.failed, counts.dropped, counts.waiting) == (3, 2, 0, 0)
    assert report.undelivered == {"partly": 2}


async def test_of_what_is_logged_last_the_part_that_failed_is_counted() -> None:
    """There is no event for it."""

    class Last(Rows):
        async def send_records(self, records: list[Record], logger: Any) -> None:
            raise DeliveryError("one was wrong", lost=1)

    async with Engine(callbacks=[Last(name="last")]) as engine:
        for number in range(3):
            engine.logger.log_metrics({"n": number})
        report = await engine.close()

    assert report.undelivered == {"last": 1}


async def test_what_cannot_be_sent_at_the_end_is_counted() -> None:
    """Record by record."""

    class Last(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None:
            for number in range(3):
                logger.log_metrics({"last": number})

    rows = Rows()
    rows.down = True
    async with Engine(State(), callbacks=[rows, Last()]) as engine:
        await engine.run_event("init")
        report = await engine.close()

    assert report.undelivered == {"rows": 3}


async def test_a_destination_of_one_record_at_a_time_goes_on_where_it_failed() -> None:
    """With a retry, none is sent twice and none left out; after the last attempt, what is left is counted."""
    sent: list[int] = []
    failures = [ConnectionError("down")] * 3

    class OneByOne(LoggerDestination):
        async def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if metrics["number"] == 2 and failures:
                raise failures.pop()
            sent.append(metrics["number"])

    def log(event: Any, state: Any, logger: Any) -> None:
        for number in range(1, 5):
            logger.log_metrics({"number": number})

    for attempts, expected, lost in ((4, [1, 2, 3, 4], {}), (3, [1], {"one_by_one": 3})):
        sent.clear()
        failures[:] = [ConnectionError("down")] * 3
        far = OneByOne(delivery="background", retry=Retry(attempts, **EXACT))
        async with Engine(State(), algorithms=[FakeAlgorithm(apply=log)], callbacks=[far]) as engine:
            await engine.run_event("fit_end")
            await anyio.sleep(20)
            report = await engine.close()

        assert (sent, report.undelivered) == (expected, lost)


# ------------------------------------------------------------------------------------------------------------- coalesce


async def test_coalesce_by_a_key_of_the_callbacks_own() -> None:
    """Of those alike the newest stays, at its own place in the line."""
    gate, entered = anyio.Event(), anyio.Event()

    class Slow(Callback[Any]):
        delivery, on_full, max_pending, snapshot = "background", "coalesce", 3, ("number",)

        def __init__(self) -> None:
            self.seen: list[int] = []

        def coalesce_key(self, event: EventName, state: Any) -> Any:
            return state.number % 2

        async def batch_end(self, state: Any, logger: Any) -> None:
            entered.set()
            await gate.wait()
            self.seen.append(state.number)

    slow = Slow()
    async with Engine(State(), callbacks=[slow]) as engine:
        await publish(engine, 1)
        await entered.wait()
        for number in (1, 2, 4, 6, 8, 3):
            await publish(engine, 1, start=number)
        gate.set()
        report = await engine.close()

    assert Callback[Any]().coalesce_key(Event.INIT, None) is Event.INIT
    assert (slow.seen, report.undelivered) == ([0, 6, 8, 3], {"slow": 3})


async def test_a_key_that_fails_is_the_callbacks_own_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Not the run's: the event is lost, counted and logged."""
    far = FarSide(on_full="coalesce", coalesce_key=lambda event, state: [state.number])
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 2)
        report = await engine.close()

    assert (far.arrived, report.undelivered) == ([], {"far_side": 2})
    assert messages(caplog)[0] == "background callback far_side failed on BATCH_END"


async def test_counting_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """An engine whose background callbacks all do well logs nothing."""
    caplog.set_level(logging.DEBUG, "eventbus_engine")
    async with Engine(State(), callbacks=[FarSide(retry=Retry(), circuit=Circuit())]) as engine:
        await publish(engine, 3)
        assert (await engine.close()).ok

    assert messages(caplog) == []


class Slow(Rows):
    """Makes each of its records when it is its turn; the third one never gets made."""

    async def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
        """A row."""
        if metrics["n"] == 3:
            await anyio.sleep_forever()
        return metrics["n"]

    def batch_end(self, state: Any, logger: Any) -> Any:
        """Fails."""
        raise ValueError("unlucky")


@pytest.mark.parametrize("count", [3, 6])
async def test_what_is_made_is_sent_and_the_rest_is_counted_to_the_record(count: int) -> None:
    """Though the hook behind the records fails, or one of them takes too long."""
    slow = Slow(timeout=1.0)
    async with Engine(State(), callbacks=[slow]) as engine:
        for number in range(count):
            engine.logger.log_metrics({"n": number})
        await engine.run_event("batch_end")
        report = await engine.close()

    assert slow.sent == [[0, 1, 2]]
    counts = report.deliveries["slow"]
    # Of six: the one in the making, two behind it, and the hook that was never called.
    assert (counts.delivered, counts.failed, counts.dropped) == (3, 1, 0 if count == 3 else 3)
    assert report.undelivered == {"slow": 1 if count == 3 else 4}


async def test_a_batch_waits_for_no_more_than_the_mailbox_holds() -> None:
    """Events that fill it up would be lost while their worker waited for more of them."""
    batching = Batching(max_pending=3, max_batch=100, max_wait=3600.0)
    async with Engine(State(), callbacks=[batching]) as engine:
        await publish(engine, 3, start=1)
        await anyio.wait_all_tasks_blocked()

        assert [values for _, values in batching.batches] == [[1, 2, 3]]


async def test_an_event_that_waits_for_room_does_not_wait_for_a_batch() -> None:
    """Each goes out as soon as the one before it is through."""
    batching = Batching(max_pending=1, on_full="block", max_wait=3600.0)
    async with Engine(State(), callbacks=[batching]) as engine:
        before = anyio.current_time()
        await publish(engine, 5, start=1)
        await anyio.wait_all_tasks_blocked()

        assert anyio.current_time() == before
        assert [value for _, values in batching.batches for value in values] == [1, 2, 3, 4, 5]


class OddError(Exception):
    """Cannot even be asked."""

    @property
    def retry_after(self) -> float:
        """Fails."""
        raise KeyError("no header")


async def test_what_nobody_has_foreseen_is_no_reason_to_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, counted, and the next event is delivered."""
    far = FarSide(OddError(), retry=Retry(3, **EXACT))
    async with Engine(State(), callbacks=[far]) as engine:
        await publish(engine, 2)
        report = await engine.close()

    assert (far.arrived, report.deliveries["far_side"].failed) == ([1], 1)
    assert messages(caplog) == ["background callback far_side could not be delivered to"]


class Publishing(Callback[Any]):
    """Plain, and notes when it is called."""

    delivery, snapshot = "background", ("number",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[int] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        """Note it."""
        self.seen.append(state.number)


@pytest.mark.parametrize("pending", [10, 10_000_000])
async def test_a_program_that_never_suspends_has_its_events_delivered(pending: int) -> None:
    """All that runs is plain, so that nothing else gives the event loop a turn, be the mailbox full or not."""
    callback = Publishing(max_pending=pending)
    async with Engine(State(), callbacks=[callback]) as engine:
        for engine.state.number in range(1_000_000):  # type: ignore[union-attr]
            await engine.run_event("batch_end")
            if callback.seen:
                break

    assert callback.seen


async def test_a_worker_whose_hooks_never_suspend_leaves_others_their_turns() -> None:
    """However many events there are for it."""
    turns: list[int] = []

    class Busy(Publishing):
        def batch_end(self, state: Any, logger: Any) -> None:
            super().batch_end(state, logger)
            until = time.perf_counter() + 0.005
            while time.perf_counter() < until:
                pass

    busy = Busy()

    async def watch() -> None:
        while len(busy.seen) < 40:
            turns.append(len(busy.seen))
            await checkpoint()

    async with Engine(State(), callbacks=[busy]) as engine, anyio.create_task_group() as group:
        await publish(engine, 40)
        group.start_soon(watch)

    assert len(set(turns)) > 5
