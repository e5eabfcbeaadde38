"""`engine.explain`: what would run, in which order, and who decided so."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from eventbus_engine import Algorithm, Engine, EngineClosedError, Event, EventName, Move, Plan, UnknownEventError

pytestmark = pytest.mark.anyio


class Base(Algorithm[Any, Any]):
    def __init__(self, **options: Any) -> None:
        self.applied = 0
        for option, value in options.items():
            setattr(self, option, value)

    def match(self, event: EventName, state: Any) -> bool:
        return state is None

    def apply(self, event: EventName, state: Any, logger: Any) -> None:
        self.applied += 1


class A(Base): ...


class B(Base): ...


class C(Base): ...


class SelectiveBackprop(Base): ...


class Never(Base):
    def match(self, event: EventName, state: Any) -> bool:
        return False


def test_a_plan_tells_the_order_and_who_moved_what_from_where() -> None:
    """Every move of every pass, in the order of the passes; what stays where it is was moved by nobody."""
    engine = Engine(algorithms=[A(), SelectiveBackprop(), B(), Never()])

    plan = engine.explain(Event.AFTER_DATALOADER)

    assert plan == Plan(
        event=Event.AFTER_DATALOADER,
        matched=("a", "selective_backprop", "b"),
        order=("selective_backprop", "b", "a"),
        moves=(
            Move("set_filo_order", "a", 0, 2),
            Move("set_filo_order", "b", 2, 0),
            Move("sort_selective_backprop_first", "b", 0, 1),
            Move("sort_selective_backprop_first", "selective_backprop", 1, 0),
        ),
        skipped={"never": "not matched"},
    )


def test_a_move_reads_as_pass_algorithm_from_to() -> None:
    """Counted from 0; a pass that drops moves to nowhere, one that adds moves from nowhere."""
    extra = C()

    def swap(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
        return [extra, *algorithms[1:]]

    plan = Engine(algorithms=[A(), B()], algorithm_passes=swap).explain("INIT")

    assert plan.order == ("c", "b")
    assert plan.moves == (("swap", "a", 0, None), ("swap", "c", None, 0))
    assert plan.skipped == {"a": "dropped by swap"}


def test_a_match_that_raises_is_named() -> None:
    """As it is when the event runs."""

    class Picky(A):
        def match(self, event: EventName, state: Any) -> bool:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        Engine(algorithms=[Picky()]).explain("INIT")

    assert caught.value.__notes__ == ["in match of algorithm picky on INIT"]


def test_what_one_pass_drops_another_may_bring_back() -> None:
    """Only what is out in the end is skipped."""

    def drop(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
        return algorithms[1:]

    def restore(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
        return [*algorithms, first]

    first = A()
    plan = Engine(algorithms=[first, B()], algorithm_passes=[drop, restore]).explain(Event.INIT)

    assert plan.order == ("b", "a")
    assert plan.skipped == {}


def test_a_plan_prints_as_a_table() -> None:
    """Position, algorithm, who moved it from where; then what is skipped, and why."""

    def drop_b(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
        return [a for a in algorithms if not isinstance(a, B)]

    algorithms = [A(), SelectiveBackprop(), B(), C(), Never()]
    engine = Engine(algorithms=algorithms, algorithm_passes=drop_b)

    assert str(engine.explain(Event.AFTER_LOSS)).splitlines() == [
        "Event.AFTER_LOSS",
        "   algorithm           why",
        "0  selective_backprop  set_filo_order: 1 -> 2; sort_selective_backprop_first: 2 -> 0",
        "1  c                   set_filo_order: 3 -> 0; sort_selective_backprop_first: 0 -> 1",
        "2  a                   set_filo_order: 0 -> 3; drop_b: 3 -> 2",
        "-  never               not matched",
        "-  b                   dropped by drop_b",
    ]


def test_what_nobody_moved_is_as_registered() -> None:
    """And an addition comes from outside."""
    extra = C()
    engine = Engine(algorithms=[A()], algorithm_passes=lambda algorithms, event: [*algorithms, extra])

    assert str(engine.explain(Event.INIT)).splitlines() == [
        "Event.INIT",
        "   algorithm  why",
        "0  a          as registered",
        "1  c          <lambda>: out -> 1",
    ]


def test_a_plan_of_nothing_is_an_empty_table() -> None:
    """No algorithms, no rows."""
    assert str(Engine().explain("batch_end")).splitlines() == ["Event.BATCH_END", "  algorithm  why"]


def test_explaining_runs_nothing_but_matches_and_passes() -> None:
    """Nor does it open anything; another state is asked about by giving it."""
    algorithm = A()
    engine = Engine(algorithms=[algorithm])

    assert engine.explain(Event.INIT).order == ("a",)
    assert engine.explain(Event.INIT, "nothing").order == ()
    assert engine.explain(Event.INIT, "nothing").skipped == {"a": "not matched"}
    assert algorithm.applied == 0
    with pytest.raises(UnknownEventError, match="'initt' is no event of Event; did you mean INIT"):
        engine.explain("initt")


async def test_a_plan_is_what_then_happens() -> None:
    """On every event, with the live participants of a state."""
    state = SimpleNamespace(algorithms=[A(run_after=("b",)), B(pin="last"), C(), Never()])
    engine = Engine(state)
    for event in Event:
        if event is Event.EPOCH_END:
            state.algorithms.append(SelectiveBackprop())
        plan = engine.explain(event)
        traces = await engine.run_event(event)

        assert plan.order == tuple(trace.name for trace in traces.values() if trace.run)
        assert plan.skipped == {trace.name: trace.reason for trace in traces.values() if not trace.run}


async def test_a_plan_can_be_had_after_closing() -> None:
    """Looking is always allowed; running is not."""
    engine = Engine(algorithms=[A()])
    await engine.close()

    assert engine.explain(Event.INIT).order == ("a",)
    with pytest.raises(EngineClosedError):
        await engine.run_event(Event.INIT)
