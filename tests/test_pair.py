"""`engine.pair`: the halves of a pair around a block."""

from __future__ import annotations

from typing import Any

import pytest

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    ConfigurationError,
    Engine,
    Event,
    EventName,
    UnknownEventError,
)

pytestmark = pytest.mark.anyio


class Flow(EventName):
    """A vocabulary with a pair and a single."""

    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"
    FLUSH = "flush"


class Note(Algorithm[Any, Any]):
    """Notes event and state; fails on one event if told so."""

    def __init__(self, log: list[Any], fails_on: EventName | None = None) -> None:
        self.log = log
        self.fails_on = fails_on

    def match(self, event: EventName, state: Any) -> bool:
        """Run always."""
        return True

    def apply(self, event: EventName, state: Any, logger: Any) -> int:
        """Note."""
        self.log.append((event, state))
        if event is self.fails_on:
            raise LookupError(event.name)
        return 3


async def test_rule_3_pair_publishes_both_halves_around_the_block() -> None:
    """The first before, the second after, about the state given; both traces can be looked at."""
    log: list[Any] = []
    engine = Engine("own", events=Flow, algorithms=[Note(log)])

    async with engine.pair(Flow.BEFORE_WRITE, "record") as pair:
        log.append("block")
        assert [*pair.before] == ["note/BEFORE_WRITE"]
        assert pair.after == {}
    async with engine.pair("before_write"):
        log.append("block")

    assert log == [
        (Flow.BEFORE_WRITE, "record"),
        "block",
        (Flow.AFTER_WRITE, "record"),
        (Flow.BEFORE_WRITE, "own"),
        "block",
        (Flow.AFTER_WRITE, "own"),
    ]
    assert pair.after["note/AFTER_WRITE"].exit_code == 3


async def test_rule_3_pair_second_half_only_if_the_block_succeeded() -> None:
    """The block's exception propagates as itself, whatever kind it is."""
    log: list[Any] = []
    engine = Engine(events=Flow, algorithms=[Note(log)])

    for error in (ValueError("block"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            async with engine.pair(Flow.BEFORE_WRITE):
                raise error
        assert caught.value is error

    assert [event for event, _ in log] == [Flow.BEFORE_WRITE, Flow.BEFORE_WRITE]


async def test_rule_3_pair_whose_first_half_fails() -> None:
    """The block does not run."""
    log: list[Any] = []
    engine = Engine(events=Flow, algorithms=[Note(log, fails_on=Flow.BEFORE_WRITE)])

    with pytest.raises(LookupError, match="BEFORE_WRITE"):
        async with engine.pair(Flow.BEFORE_WRITE):
            log.append("block")

    assert log == [(Flow.BEFORE_WRITE, None)]


async def test_rule_3_pair_whose_second_half_fails() -> None:
    """Its failure comes out of the block, an algorithm's as itself, a callback's in a group."""

    class Fails(Callback[Any]):
        def after_write(self, state: Any, logger: Any) -> None:
            raise ValueError

    algorithm = Engine(events=Flow, algorithms=[Note([], fails_on=Flow.AFTER_WRITE)])
    callback = Engine(events=Flow, callbacks=[Fails()])

    with pytest.raises(LookupError, match="AFTER_WRITE"):
        async with algorithm.pair(Flow.BEFORE_WRITE):
            pass
    with pytest.raises(CallbackErrors):
        async with callback.pair(Flow.BEFORE_WRITE):
            pass


async def test_rule_3_pair_can_be_abandoned() -> None:
    """There was nothing between the halves after all, a loader at its end, say: the second is left out."""
    log: list[Any] = []
    engine = Engine(events=Flow, algorithms=[Note(log)])

    async with engine.pair(Flow.BEFORE_WRITE) as pair:
        pair.abandon()

    assert [event for event, _ in log] == [Flow.BEFORE_WRITE]
    assert pair.after == {}


async def test_rule_3_pairs_nest() -> None:
    """On one state, within each other and within a handler."""
    log: list[Any] = []
    engine = Engine(object(), events=Event, algorithms=[])
    engine.bus.subscribe(lambda envelope: log.append(envelope.event.name))

    async with engine.pair(Event.EPOCH_START), engine.pair(Event.BATCH_START), engine.pair(Event.BEFORE_FORWARD):
        pass

    assert log == ["EPOCH_START", "BATCH_START", "BEFORE_FORWARD", "AFTER_FORWARD", "BATCH_END", "EPOCH_END"]


def test_rule_3_pair_needs_a_first_half() -> None:
    """A second half, a single event and an unknown one are refused, each with the cure."""
    engine = Engine(events=Flow)

    with pytest.raises(
        ConfigurationError, match="AFTER_WRITE is not the first half of a pair; use its first half, BEFORE_WRITE"
    ):
        engine.pair(Flow.AFTER_WRITE)
    with pytest.raises(ConfigurationError, match="FLUSH is not the first half of a pair; use run_event"):
        engine.pair("flush")
    with pytest.raises(UnknownEventError, match="did you mean BEFORE_WRITE"):
        engine.pair("before_writ")
