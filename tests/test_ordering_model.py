"""Random algorithms, constraints, pins, passes and events against a model that decides by trying every order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eventbus_engine import CycleError, Engine, Event, EventName
from eventbus_engine.passes import apply_constraints

CLASSES = ("Alpha", "Beta", "Gamma", "Delta", "SelectiveBackprop", "FusedLayerNorm", "LowPrecisionLayerNorm")
SNAKE = ("alpha", "beta", "gamma", "delta", "selective_backprop", "fused_layer_norm", "low_precision_layer_norm")
NAMES: dict[str, str] = dict(zip(CLASSES, SNAKE, strict=True))


class Ingest(EventName):
    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"
    ROW_START = "row_start"
    ROW_END = "row_end"
    AFTER_ALL = "after_all"


class Part:
    """An algorithm of no particular base."""

    def __init__(self, matched: bool = True, **options: Any) -> None:
        self.matched = matched
        self.log: list[Any] = []
        for option, value in options.items():
            setattr(self, option, value)

    def match(self, event: EventName, state: Any) -> bool:
        return self.matched

    def apply(self, event: EventName, state: Any, logger: Any) -> None:
        self.log.append(self)


KINDS: dict[str, type[Part]] = {name: type(name, (Part,), {}) for name in CLASSES}

# ---------------------------------------------------------------------------------------------------------- the model


@dataclass
class Model:
    """What has to run on an event, and why the rest does not, worked out in the simplest way."""

    registered: list[Part]
    event: EventName
    passes: list[Any]
    order: list[Part] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def run(self) -> bool:
        """Apply the passes in turn; False where the constraints cannot be met."""
        self.order = [part for part in self.registered if part.matched]
        self.reasons = {id(part): "not matched" for part in self.registered if not part.matched}
        for step in self.passes:
            if step == "constraints":
                sorted_ = earliest_first(self.order, way_out=self.event.name.endswith("_END") or self.mirrored)
                if sorted_ is None:
                    return False
                self.order = sorted_
            elif isinstance(step, str):
                self.order = getattr(self, step)()
            else:
                after = list(step(list(self.order), self.event))
                self.reasons |= {id(p): f"dropped by {step.__name__}" for p in self.order if p not in after}
                self.reasons = {key: why for key, why in self.reasons.items() if key not in map(id, after)}
                self.order = after
        return True

    @property
    def mirrored(self) -> bool:
        name = self.event.name
        return "AFTER" in name and name.replace("AFTER", "BEFORE") in type(self.event).__members__

    def filo(self) -> list[Part]:
        return self.order[::-1] if self.mirrored else self.order

    def pins(self) -> list[Part]:
        groups: dict[Any, list[Part]] = {"first": [], None: [], "last": []}
        for part in self.order:
            groups[getattr(part, "pin", None)].append(part)
        return groups["first"] + groups[None] + groups["last"]

    def backprop(self) -> list[Part]:
        chosen = [part for part in self.order if type(part).__name__ == "SelectiveBackprop"]
        return chosen + [part for part in self.order if part not in chosen]

    def norms(self) -> list[Part]:
        rank = {"LowPrecisionLayerNorm": 1, "FusedLayerNorm": 2}
        return sorted(self.order, key=lambda part: rank.get(type(part).__name__, 0))


def means(reference: Any, part: Part) -> bool:
    """Whether a reference is the class of a part, its class name or its name."""
    name = type(part).__name__
    return reference is type(part) or reference in {name, NAMES[name]}


def edges(parts: Sequence[Part], *, way_out: bool) -> Iterator[tuple[int, int]]:
    """The positions that have to come in this order."""
    for (i, one), (j, other) in itertools.permutations(enumerate(parts), 2):
        before, after, around = (
            any(means(reference, other) for reference in getattr(one, option, ()))
            for option in ("run_before", "run_after", "around")
        )
        if before or (around and not way_out):
            yield i, j
        if after or (around and way_out):
            yield j, i


def earliest_first(parts: list[Part], *, way_out: bool) -> list[Part] | None:
    """Of all orders that satisfy the constraints the first one by position; None where there is none."""
    wanted = list(edges(parts, way_out=way_out))
    for order in itertools.permutations(range(len(parts))):  # in lexicographic order, so the first is the smallest
        if all(order.index(i) < order.index(j) for i, j in wanted):
            return [parts[i] for i in order]
    return None


# --------------------------------------------------------------------------------------------------------- the passes


def untouched(parts: Sequence[Any], event: EventName) -> Sequence[Any]:
    """Return the very sequence it got."""
    return parts


def copied(parts: Sequence[Any], event: EventName) -> Sequence[Any]:
    """Return an equal sequence."""
    return tuple(parts)


def turned(parts: Any, event: EventName) -> Sequence[Any]:
    """Reverse in place."""
    parts.reverse()
    same: Sequence[Any] = parts
    return same


def rotated(parts: Sequence[Any], event: EventName) -> Sequence[Any]:
    """Move the first one to the end."""
    return [*parts[1:], *parts[:1]]


def dropping_betas(parts: Sequence[Any], event: EventName) -> Sequence[Any]:
    """Drop by kind."""
    return [part for part in parts if type(part).__name__ != "Beta"]


def dropping_the_last(parts: Sequence[Any], event: EventName) -> Sequence[Any]:
    """Drop by position."""
    return parts[:-1]


def adding(extra: Part) -> Callable[..., Sequence[Any]]:
    """A pass that puts one more part in front."""

    def adding_one(parts: Sequence[Any], event: EventName) -> Sequence[Any]:
        return parts if extra in parts else [extra, *parts]

    return adding_one


# ---------------------------------------------------------------------------------------------------------- the tests

REFERENCES = st.lists(st.sampled_from([*CLASSES, *SNAKE, *KINDS.values()]), max_size=1).map(tuple)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """An algorithm, most often without constraints, so that not everything is a cycle."""
    options: dict[str, Any] = {
        option: draw(REFERENCES) for option in ("run_before", "run_after", "around") if draw(st.integers(0, 3)) == 0
    }
    options["pin"] = draw(st.sampled_from([None, None, "first", "last"]))
    return KINDS[draw(st.sampled_from(CLASSES))](matched=draw(st.integers(0, 4)) > 0, **options)


PASSES = st.one_of(
    st.sampled_from([untouched, copied, turned, rotated, dropping_betas, dropping_the_last]), parts().map(adding)
)
EVENTS: st.SearchStrategy[EventName] = st.sampled_from([*Event, *Ingest])
MODEL_OF_THE_DEFAULTS = ["filo", "pins", "backprop", "norms", "constraints", untouched]


def has_cycle(registered: list[Part]) -> bool:
    """Whether no order satisfies the constraints, on the way in or out."""
    return any(earliest_first(registered, way_out=way_out) is None for way_out in (False, True))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(parts(), max_size=5),
    st.lists(st.tuples(PASSES, st.integers(-1, 6)), max_size=3),
    EVENTS,
    st.sampled_from(["asyncio", "trio"]),
)
def test_rule_4_the_order_is_the_models(
    registered: list[Part], passes: list[tuple[Any, int]], event: EventName, backend: str
) -> None:
    """What runs, in which order, under which names, and why the rest does not: all of it is the model's."""
    if has_cycle(registered):
        with pytest.raises(CycleError):
            Engine(algorithms=registered, events=type(event))
        return
    engine = Engine(algorithms=registered, algorithm_passes=passes, events=type(event))
    steps: list[Any] = list(MODEL_OF_THE_DEFAULTS)
    for user_pass, index in passes:
        steps.insert(len(steps) if index == -1 else index, user_pass)
    model = Model(registered, event, steps)
    log: list[Part] = []

    async def run() -> Any:
        return await engine.run_event(event)

    if not model.run():  # an algorithm that a pass has added closed a cycle
        with pytest.raises(CycleError):
            anyio.run(run, backend=backend)
        return
    for part in [*registered, *model.order]:
        part.log = log

    traces = anyio.run(run, backend=backend)

    plan = engine.explain(event)
    assert log == model.order
    ran = [trace for trace in traces.values() if trace.run]
    assert [trace.order for trace in ran] == list(range(len(model.order)))
    assert list(traces.values())[: len(ran)] == ran
    assert list(traces) == [f"{trace.name}/{event.name}" for trace in traces.values()]
    counted = unique([type(part).__name__ for part in registered])
    named = zip(counted, registered, strict=True)
    skipped = {name: model.reasons[id(part)] for name, part in named if id(part) in model.reasons}
    assert [(trace.name, trace.reason) for trace in traces.values() if not trace.run] == list(skipped.items())
    assert plan.order == tuple(trace.name for trace in ran)
    assert {name: why for name, why in plan.skipped.items() if name in skipped} == skipped


def unique(classes: list[str]) -> list[str]:
    """`alpha`, `alpha#2` and so on, in order."""
    return [
        NAMES[name] if (n := classes[: i + 1].count(name)) == 1 else f"{NAMES[name]}#{n}"
        for i, name in enumerate(classes)
    ]


@settings(deadline=None, max_examples=300)
@given(st.lists(parts(), max_size=6), st.sampled_from([Event.BATCH_START, Event.AFTER_LOSS, Event.EPOCH_END]))
@example([], Event.INIT)
def test_rule_4_5_the_stable_sort_is_the_first_of_all_orders_that_fit(registered: list[Part], event: Event) -> None:
    """Taking the earliest that is free, again and again, is the same as the first order by position that fits."""
    expected = earliest_first(registered, way_out=event is not Event.BATCH_START)
    if expected is None:
        with pytest.raises(CycleError) as caught:
            apply_constraints(registered, event)  # type: ignore[arg-type]
        check_cycle(caught.value.cycle, registered, way_out=event is not Event.BATCH_START)
    else:
        assert list(apply_constraints(registered, event)) == expected  # type: ignore[arg-type, comparison-overlap]


def check_cycle(cycle: tuple[str, ...], registered: list[Part], *, way_out: bool) -> None:
    """Every step of the cycle is a constraint, and it comes back to where it began."""
    names = unique([type(part).__name__ for part in registered])
    wanted = {(names[i], names[j]) for i, j in edges(registered, way_out=way_out)}
    assert cycle[0] == cycle[-1]
    assert set(itertools.pairwise(cycle)) <= wanted
    assert len(set(cycle)) == len(cycle) - 1


@settings(deadline=None, max_examples=60)
@given(st.lists(parts(), min_size=1, max_size=4), st.data())
def test_rule_4_the_order_follows_the_participants_of_a_live_state(registered: list[Part], data: st.DataObject) -> None:
    """Algorithms come, go and change places between events, and every event sees those of its moment."""
    state = SimpleNamespace(algorithms=[])
    engine = Engine(state)
    for _ in range(4):
        state.algorithms[:] = data.draw(st.lists(st.sampled_from(registered), unique_by=id))
        event = data.draw(st.sampled_from(list(Event)))
        model = Model(state.algorithms, event, MODEL_OF_THE_DEFAULTS)
        if has_cycle(state.algorithms):
            with pytest.raises(CycleError):
                engine.explain(event)
            continue
        assert model.run()
        names = unique([type(part).__name__ for part in state.algorithms])
        expected = [names[[id(p) for p in state.algorithms].index(id(part))] for part in model.order]
        assert list(engine.explain(event).order) == expected
