"""The rules of order, on every event and in every order of registration."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus_engine import (
    Algorithm,
    ConfigurationError,
    ConflictWarning,
    CycleError,
    Engine,
    Event,
    EventName,
    LossInterpolationWarning,
    PassError,
    algorithm,
)

pytestmark = pytest.mark.anyio

MIRRORED = {
    Event.AFTER_LOAD,
    Event.AFTER_DATALOADER,
    Event.AFTER_FORWARD,
    Event.AFTER_LOSS,
    Event.AFTER_BACKWARD,
    Event.AFTER_TRAIN_BATCH,
    Event.EVAL_AFTER_FORWARD,
    Event.EVAL_AFTER_ALL,
    Event.PREDICT_AFTER_FORWARD,
}
WAYS_OUT = {*MIRRORED, *(event for event in Event if event.name.endswith("_END"))}


class Ingest(EventName):
    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"
    ROW_START = "row_start"
    ROW_END = "row_end"
    AFTER_ALL = "after_all"


class Always(Algorithm[Any, Any]):
    """Matches everything and notes its name."""

    def __init__(self, ran: list[str] | None = None, **options: Any) -> None:
        self.ran = [] if ran is None else ran
        for option, value in options.items():
            setattr(self, option, value)

    def match(self, event: EventName, state: Any) -> bool:
        return True

    async def apply(self, event: EventName, state: Any, logger: Any) -> None:
        self.ran.append(type(self).__name__)


class A(Always): ...


class B(Always): ...


class C(Always): ...


class D(Always): ...


class MixUp(Always): ...


class CutMix(Always): ...


class SelectiveBackprop(Always): ...


class FusedLayerNorm(Always): ...


class LowPrecisionLayerNorm(Always): ...


def ran(traces: dict[str, Any]) -> list[str]:
    """The names of what ran, in the order of the traces."""
    return [trace.name for trace in traces.values() if trace.run]


# ------------------------------------------------------------------------------------------------------ 1: sequential


async def test_rule_4_1_the_next_algorithm_starts_when_the_one_before_has_returned() -> None:
    """Eight algorithms, async and plain ones, each suspended several times: none overlaps another."""
    log: list[str] = []

    def make(i: int) -> Any:
        async def asynchronous(event: EventName, state: Any, logger: Any) -> None:
            log.append(f"{i} begins")
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            log.append(f"{i} ends")

        def plain(event: EventName, state: Any, logger: Any) -> None:
            log.extend((f"{i} begins", f"{i} ends"))

        return algorithm(name=f"number_{i}")(plain if i % 3 == 0 else asynchronous)

    await Engine(algorithms=[make(i) for i in range(8)]).run_event(Event.BATCH_START)

    assert log == [f"{i} {what}" for i in range(8) for what in ("begins", "ends")]


async def test_rule_4_1_only_what_matches_runs() -> None:
    """`match` is asked once per event, in registration order, before anything runs."""
    log: list[str] = []

    class Choosy(Always):
        def match(self, event: EventName, state: Any) -> bool:
            log.append(f"match {self.name}")
            return self.name != "b"

        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            log.append(f"apply {self.name}")

    await Engine(algorithms=[Choosy(name=name) for name in "abc"]).run_event("batch_end")

    assert log == ["match a", "match b", "match c", "apply a", "apply c"]


# ---------------------------------------------------------------------------------------------- 2: passes


def test_rule_4_2_the_default_passes_in_their_order() -> None:
    """Filo, the pins, the constraints, the warning."""
    actual = [getattr(p, "__name__", "") for p in Engine().algorithm_passes]

    assert actual == [
        "set_filo_order",
        "apply_pins",
        "sort_selective_backprop_first",
        "sort_fused_layernorm_last",
        "apply_constraints",
        "warn_if_multiple_loss_interpolation",
    ]


def reverse(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
    """A pass that reverses."""
    return list(reversed(algorithms))


def drop_first(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
    """A pass that drops."""
    return algorithms[1:]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [0]),
        ([], [0]),
        (reverse, [0, reverse]),
        ([reverse, drop_first], [0, reverse, drop_first]),
        ((reverse, drop_first), [0, reverse, drop_first]),
        ((reverse, 0), [reverse, 0]),
        ((reverse, -1), [0, reverse]),
        ([(reverse, 0), (drop_first, 0)], [drop_first, reverse, 0]),
        ([(reverse, -1), drop_first], [0, reverse, drop_first]),
        ([drop_first, (reverse, 0)], [reverse, 0, drop_first]),
    ],
)
def test_rule_4_2_algorithm_passes_in_all_of_composers_forms(given: Any, expected: list[Any]) -> None:
    """One pass, a list, `(pass, index)`, a list of those; 0 stands for the default ones."""
    defaults = Engine().algorithm_passes

    actual = Engine(algorithm_passes=given).algorithm_passes

    assert actual == [p for part in expected for p in (defaults if part == 0 else [part])]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "3 is no pass"),
        ("filo", "'f' is no pass"),
        ([3], "3 is no pass"),
        ([None], "None is no pass"),
        (A, "<class '.*A'> is no pass"),
        ([(reverse, "first")], r"index='first' of pass reverse has to be a number"),
        ((reverse, None), r"index=None of pass reverse has to be a number"),
        ((reverse, 0, 1), r"0 is no pass; give a function \(algorithms, event\) -> algorithms, or \(function, index\)"),
        (lambda algorithms: algorithms, "is no pass"),
    ],
)
def test_rule_4_2_what_is_no_pass_is_refused_at_construction(given: Any, message: str) -> None:
    """By name, with the forms that there are."""
    with pytest.raises(ConfigurationError, match=message):
        Engine(algorithm_passes=given)


async def test_rule_4_2_a_users_pass_runs_after_the_default_ones() -> None:
    """So it has the last word, against pins and constraints too."""
    engine = Engine(algorithms=[A(), B(pin="first"), C(run_after=("B",))], algorithm_passes=reverse)

    assert ran(await engine.run_event(Event.BATCH_START)) == ["c", "a", "b"]


async def test_rule_4_2_a_users_pass_with_an_index_runs_where_it_says() -> None:
    """Before the default ones, it cannot undo them."""
    engine = Engine(algorithms=[A(), B(pin="first"), C()], algorithm_passes=(reverse, 0))

    assert ran(await engine.run_event(Event.BATCH_START)) == ["b", "c", "a"]
    assert ran(await engine.run_event(Event.AFTER_LOSS)) == ["b", "a", "c"]


async def test_rule_4_2_a_registered_pass_counts_from_the_next_event_on() -> None:
    """Also where the order of the event was worked out before."""
    engine = Engine(algorithms=[A(), B(), C()])
    before = ran(await engine.run_event(Event.BATCH_START))
    engine.register_pass(drop_first)
    engine.register_pass(reverse, index=0)

    assert before == ["a", "b", "c"]
    assert ran(await engine.run_event(Event.BATCH_START)) == ["b", "a"]
    with pytest.raises(ConfigurationError, match="'x' is no pass"):
        engine.register_pass("x")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- 3: mirror first, then pin


@pytest.mark.parametrize("registered", list(itertools.permutations([MixUp, SelectiveBackprop, CutMix])))
async def test_rule_4_3_mirror_first_then_pin(registered: Sequence[type[Always]]) -> None:
    """SelectiveBackprop runs first on every event, AFTER_DATALOADER above all; the others are mirrored around it."""
    engine = Engine(algorithms=[cls() for cls in registered])
    others = [cls.__name__ for cls in registered if cls is not SelectiveBackprop]
    for event in Event:
        names = [key.split("/")[0] for key in await engine.run_event(event)]
        expected = list(reversed(others)) if event in MIRRORED else others

        assert names == ["selective_backprop", *({"MixUp": "mix_up", "CutMix": "cut_mix"}[name] for name in expected)]


async def test_rule_4_3_the_headline_example() -> None:
    """[MixUp, SelectiveBackprop, CutMix] becomes [SelectiveBackprop, CutMix, MixUp] on AFTER_DATALOADER."""
    log: list[str] = []
    engine = Engine(algorithms=[MixUp(log), SelectiveBackprop(log), CutMix(log)])

    await engine.run_event(Event.AFTER_DATALOADER)

    assert log == ["SelectiveBackprop", "CutMix", "MixUp"]


@pytest.mark.parametrize("registered", list(itertools.permutations([A, FusedLayerNorm, B, LowPrecisionLayerNorm])))
async def test_rule_4_3_a_fused_layernorm_runs_last(registered: Sequence[type[Always]]) -> None:
    """On INIT, where it has to be, and on every other event; Composer's successor of it just before."""
    log: list[str] = []
    engine = Engine(algorithms=[cls(log) for cls in registered])
    others = [cls.__name__ for cls in registered if cls in {A, B}]
    for event in Event:
        log.clear()
        await engine.run_event(event)
        expected = list(reversed(others)) if event in MIRRORED else others

        assert log == [*expected, "LowPrecisionLayerNorm", "FusedLayerNorm"]


@pytest.mark.parametrize("registered", list(itertools.permutations("fghl")))
async def test_rule_4_3_pins_hold_on_every_event(registered: Sequence[str]) -> None:
    """First and last stay so on both halves of a pair; among themselves the pinned are mirrored like the others."""
    log: list[str] = []
    pins = {"f": "first", "g": "first", "h": None, "l": "last"}
    kinds = {name: type(name, (Always,), {}) for name in "fghl"}
    engine = Engine(algorithms=[kinds[name](log, pin=pins[name]) for name in registered])
    first = [name for name in registered if name in "fg"]
    for event in Event:
        log.clear()
        await engine.run_event(event)

        assert log == [*(reversed(first) if event in MIRRORED else first), "h", "l"]


@pytest.mark.parametrize("name", ["SelectiveBackprop", "FusedLayerNorm", "LowPrecisionLayerNorm"])
async def test_rule_4_6_the_built_in_pins_know_a_class_by_its_name_in_the_mro(name: str) -> None:
    """A class of that name from anywhere, and whatever derives from it under another name."""

    class Foreign:
        def match(self, event: EventName, state: Any) -> bool:
            return True

        def apply(self, event: EventName, state: Any, logger: Any) -> None: ...

    derived = type("Derived", (type(name, (Foreign,), {"__module__": "composer.algorithms"}),), {})()
    engine = Engine(algorithms=[A(), derived, B()])
    for event in Event:
        names = ran(await engine.run_event(event))

        assert names.index("derived") == (0 if name == "SelectiveBackprop" else 2)


# ------------------------------------------------------------------------------------------------------------- 4: filo


@pytest.mark.parametrize("registered", list(itertools.permutations([A, B, C, D])))
async def test_rule_4_4_filo_on_every_pair(registered: Sequence[type[Always]]) -> None:
    """BEFORE_LOSS runs ABCD and AFTER_LOSS DCBA, and so for every before/after pair; `_start`/`_end` never."""
    log: list[str] = []
    engine = Engine(algorithms=[cls(log) for cls in registered])
    order = [cls.__name__ for cls in registered]
    for event in Event:
        log.clear()
        await engine.run_event(event)

        assert log == (list(reversed(order)) if event in MIRRORED else order)


async def test_rule_4_4_filo_in_a_vocabulary_of_ones_own() -> None:
    """Both halves have to be there: a lone `after` mirrors nothing."""
    engine = Engine(algorithms=[A(), B(), C()], events=Ingest)

    actual = {event.value: "".join(ran(await engine.run_event(event))) for event in Ingest}

    assert actual == {
        "before_write": "abc",
        "after_write": "cba",
        "row_start": "abc",
        "row_end": "abc",
        "after_all": "abc",
    }


# ------------------------------------------------------------------------------------------------------ 5: constraints


@pytest.mark.parametrize("registered", list(itertools.permutations("abcd")))
async def test_rule_4_5_run_before_and_run_after_hold_on_every_event(registered: Sequence[str]) -> None:
    """Literally: the mirror does not turn them round."""
    options: dict[str, dict[str, Any]] = {"a": {"run_before": (B,)}, "d": {"run_after": ("c",)}}
    kinds: dict[str, type[Always]] = {"a": A, "b": B, "c": C, "d": D}
    engine = Engine(algorithms=[kinds[name](**options.get(name, {})) for name in registered])
    for event in Event:
        names = ran(await engine.run_event(event))

        assert names.index("a") < names.index("b")
        assert names.index("c") < names.index("d")


@pytest.mark.parametrize("registered", list(itertools.permutations([A, B, C])))
async def test_rule_4_5_around_is_before_on_the_way_in_and_after_on_the_way_out(
    registered: Sequence[type[Always]],
) -> None:
    """Whatever the registration says; an event that is no half of a pair counts as the way in."""
    engine = Engine(algorithms=[cls(around=(B,)) if cls is A else cls() for cls in registered])
    for event in Event:
        names = ran(await engine.run_event(event))

        assert (names.index("a") > names.index("b")) == (event in WAYS_OUT)


async def test_rule_4_5_a_name_means_the_class_its_name_or_a_base() -> None:
    """By class, by snake_case name, by class name, by the object itself; subclasses are meant too."""

    class Special(B): ...

    @algorithm()
    def loose(event: EventName, state: Any, logger: Any) -> None: ...

    for reference in (B, "special", "Special", "B"):
        engine = Engine(algorithms=[Special(), A(run_before=(reference,))])
        assert ran(await engine.run_event(Event.INIT)) == ["a", "special"]
    engine = Engine(algorithms=[loose, A(run_before=(loose,))])
    assert ran(await engine.run_event(Event.INIT)) == ["a", "loose"]


async def test_rule_4_5_an_absent_one_is_no_error() -> None:
    """A constraint on what is not registered, or did not match, holds by itself; so does one on itself."""

    class Never(Always):
        def match(self, event: EventName, state: Any) -> bool:
            return False

    everyone = ("nobody", D, "Never")
    engine = Engine(algorithms=[A(run_before=everyone, run_after=("Gone", A)), Never(), B(around=everyone)])

    assert ran(await engine.run_event(Event.AFTER_LOSS)) == ["b", "a"]


async def test_rule_4_5_constraints_beat_pins_and_filo() -> None:
    """What has to come before what is pinned first, comes first."""
    engine = Engine(algorithms=[A(pin="first"), B(), C(run_before=("a",)), SelectiveBackprop(run_after=(B,))])
    # The pins make it [selective_backprop, a, b, c], where b comes before c and sets selective_backprop free;
    # mirrored, they make it [selective_backprop, a, c, b], where c comes before b and sets a free.
    expected = {False: ["b", "selective_backprop", "c", "a"], True: ["c", "a", "b", "selective_backprop"]}
    for event in Event:
        assert ran(await engine.run_event(event)) == expected[event in MIRRORED]


async def test_rule_4_5_the_sort_is_stable() -> None:
    """It takes the earliest whose predecessors are out: what is bound by nothing does not move."""
    engine = Engine(algorithms=[A(run_after=("d",)), B(), C(), D()])

    assert ran(await engine.run_event(Event.INIT)) == ["b", "c", "d", "a"]
    assert ran(await engine.run_event(Event.AFTER_LOSS)) == ["d", "c", "b", "a"]


def test_rule_4_5_a_cycle_is_refused_at_construction_by_its_whole_length() -> None:
    """Through run_before and run_after alike, and only what is on the cycle is named."""
    algorithms = [A(run_before=("b",)), D(run_before=("a",)), C(run_before=(A,)), B(run_before=("c",))]

    with pytest.raises(CycleError) as caught:
        Engine(algorithms=algorithms)

    assert caught.value.cycle == ("a", "b", "c", "a")
    assert str(caught.value) == (
        "the ordering constraints contradict each other: a before b before c before a; drop one of the run_before, "
        "run_after or around that say so"
    )


def test_rule_4_5_a_cycle_on_the_way_out_alone_is_refused_at_construction() -> None:
    """`around` turns round on the way out, and has to fit there as well."""
    with pytest.raises(CycleError) as caught:
        Engine(algorithms=[A(around=("b",), run_before=("b",)), B()])

    assert caught.value.cycle in {("a", "b", "a"), ("b", "a", "b")}


def test_rule_4_5_a_cycle_between_two_of_a_kind_tells_them_apart() -> None:
    """By the names that they have in the traces."""
    with pytest.raises(CycleError) as caught:
        Engine(algorithms=[A(run_before=("a",)), A(run_before=("a",))])

    assert set(caught.value.cycle) == {"a", "a#2"}


async def test_rule_4_5_a_cycle_is_refused_when_the_participants_change() -> None:
    """The event that finds it raises; once it is gone, the engine goes on."""
    state = SimpleNamespace(algorithms=[A(run_before=("b",)), B()])
    engine = Engine(state)
    await engine.run_event(Event.INIT)
    state.algorithms.append(C(run_before=(A,), run_after=(B,)))

    with pytest.raises(CycleError) as caught:
        await engine.run_event(Event.BATCH_START)
    state.algorithms.pop()

    assert set(caught.value.cycle) == {"a", "b", "c"}
    assert len(caught.value.cycle) == 4
    assert ran(await engine.run_event(Event.BATCH_START)) == ["a", "b"]


@pytest.mark.parametrize("option", ["run_before", "run_after", "around", "conflicts_with"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mixup", "algorithm a has {option}='mixup'; give a tuple of classes or names, for example {option} = "),
        (MixUp, "algorithm a has {option}=<class '.*MixUp'>; give a tuple of classes or names"),
        (iter(["mixup"]), "algorithm a has {option}=<list_iterator .*>; give a tuple of classes or names"),
        ((None,), "algorithm a has None in {option}; name algorithms by class or by name"),
        ((3,), "algorithm a has 3 in {option}; name algorithms by class or by name"),
    ],
)
def test_rule_4_5_a_constraint_that_cannot_be_read_is_refused(option: str, value: Any, message: str) -> None:
    """A string is a sequence of letters, and an iterator can be read only once."""
    with pytest.raises(ConfigurationError, match=message.format(option=option)):
        Engine(algorithms=[A(**{option: value})])


def test_rule_4_5_a_bad_pin_is_refused() -> None:
    """Anything but None, "first" or "last"."""
    with pytest.raises(ConfigurationError) as caught:
        Engine(algorithms=[A(pin="middle")])

    assert str(caught.value) == "algorithm a has pin='middle'; use None or 'first' or 'last'"


async def test_rule_4_5_conflicts_with_warns_once_naming_both() -> None:
    """At construction; not again on events, nor when the participants change; both saying so is still one conflict."""
    state = SimpleNamespace(algorithms=[A(conflicts_with=("b", D)), B(conflicts_with=(A,)), C()])
    with pytest.warns(ConflictWarning) as caught:
        engine = Engine(state)
    state.algorithms.reverse()
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        await engine.run_event(Event.INIT)
        await engine.run_event(Event.FIT_START)

    assert [str(w.message) for w in caught] == ["a conflicts with b, and both are registered; drop one of them"]
    assert later == []

    state.algorithms.append(D())
    with pytest.warns(ConflictWarning, match="a conflicts with d, and both are registered"):
        await engine.run_event(Event.BATCH_START)


async def test_more_than_one_interpolation_of_the_loss_warns() -> None:
    """Naming all of them; the order stays as it is."""
    engine = Engine(algorithms=[A(interpolate_loss=True), B(), C(interpolate_loss=True)])

    with pytest.warns(LossInterpolationWarning, match="a and c all interpolate the loss"):
        traces = await engine.run_event(Event.BEFORE_LOSS)

    assert ran(traces) == ["a", "b", "c"]


# ---------------------------------------------------------------------------------------------------------- 6: passes


async def test_rule_4_6_a_pass_may_reorder_drop_and_add() -> None:
    """And the traces tell: what was added has a name of its own, what was dropped names the pass."""
    extra = A()

    def rearrange(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
        return [extra, *reversed(algorithms[1:])]

    engine = Engine(algorithms=[A(), B(), C()], algorithm_passes=rearrange)

    traces = await engine.run_event(Event.INIT)

    assert list(traces) == ["a#2/INIT", "c/INIT", "b/INIT", "a/INIT"]
    assert [trace.order for trace in traces.values()] == [0, 1, 2, None]
    assert traces["a/INIT"].reason == "dropped by rearrange"


async def test_rule_4_6_a_pass_may_sort_in_place() -> None:
    """What it returns counts, and is compared with what it was given, not with what it made of that."""

    def in_place(algorithms: Any, event: EventName) -> Any:
        algorithms.reverse()
        algorithms.pop()
        return algorithms

    engine = Engine(algorithms=[A(), B(), C()], algorithm_passes=in_place)

    traces = await engine.run_event(Event.INIT)

    assert [(trace.name, trace.reason) for trace in traces.values()] == [
        ("c", ""),
        ("b", ""),
        ("a", "dropped by in_place"),
    ]


async def test_rule_4_6_a_pass_may_add_one_that_did_not_match() -> None:
    """It keeps the name it is registered under, and stands in the traces once."""

    class Never(Always):
        def match(self, event: EventName, state: Any) -> bool:
            return False

    first, second = Never(name="n"), Never(name="n")
    engine = Engine(algorithms=[first, second, A()], algorithm_passes=lambda algorithms, event: [*algorithms, second])

    traces = await engine.run_event(Event.INIT)

    assert [(trace.name, trace.run, trace.reason) for trace in traces.values()] == [
        ("a", True, ""),
        ("n#2", True, ""),
        ("n", False, "not matched"),
    ]
    assert engine.explain(Event.INIT).skipped == {"n": "not matched"}


async def test_rule_4_6_what_is_added_gets_a_name_that_nobody_has() -> None:
    """Neither one that matched, nor one that did not."""

    class Never(Always):
        def match(self, event: EventName, state: Any) -> bool:
            return False

    engine = Engine(
        algorithms=[Never(name="n"), A(name="n")], algorithm_passes=lambda algorithms, event: [*algorithms, extra]
    )
    extra = A(name="n")

    traces = await engine.run_event(Event.INIT)

    assert [(trace.name, trace.run) for trace in traces.values()] == [("n#2", True), ("n#3", True), ("n", False)]


async def async_pass(algorithms: Any, event: EventName) -> Any:
    """A pass that would let others run before the order is known."""
    return algorithms


BAD_PASSES: list[tuple[Any, str]] = [
    (lambda algorithms, event: None, "returned None on INIT; return the algorithms to run, reordered or not"),
    (lambda algorithms, event: (a for a in algorithms), "returned generator on INIT; it has to return a list"),
    (lambda algorithms, event: "ab", "returned str on INIT; it has to return a list of algorithms"),
    (lambda algorithms, event: b"", "returned bytes on INIT; it has to return a list of algorithms"),
    (lambda algorithms, event: set(algorithms), "returned set on INIT; it has to return a list of algorithms"),
    (lambda algorithms, event: 3, "returned int on INIT; it has to return a list of algorithms"),
    (lambda algorithms, event: [*algorithms, 3], "returned 3 on INIT: 3 is no algorithm: it has no callable match"),
    (lambda algorithms, event: [A], "is a class, not an algorithm; pass an instance: A()"),
    (lambda algorithms, event: [*algorithms, algorithms[0]], "twice on INIT; every algorithm runs once"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_PASSES)
async def test_rule_4_6_a_pass_that_returns_no_algorithms_is_named(bad: Any, message: str) -> None:
    """A typed error with the pass, the event and what it returned; nothing has run."""
    log: list[str] = []
    bad.__name__ = "my_pass"
    engine = Engine(algorithms=[A(log), B(log)], algorithm_passes=bad)

    with pytest.raises(PassError) as caught:
        await engine.run_event(Event.INIT)

    assert str(caught.value).startswith("pass my_pass returned ")
    assert message in str(caught.value)
    assert log == []
    assert [trace.reason for trace in caught.value.traces.values()] == ["not reached", "not reached"]


async def test_rule_4_6_an_async_pass_is_named_and_leaves_no_coroutine_behind() -> None:
    """Passes decide the order before anything may suspend."""
    engine = Engine(algorithms=[A()], algorithm_passes=async_pass)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    with pytest.raises(PassError) as caught:
        await engine.run_event(Event.INIT)

    assert str(caught.value) == (
        "pass async_pass returned a coroutine on INIT; a pass decides the order: make it a plain def"
    )


async def test_rule_4_6_a_pass_that_raises_raises_as_itself_with_a_note() -> None:
    """The note names the pass and the event."""

    def broken(algorithms: Any, event: EventName) -> Any:
        raise ZeroDivisionError("no")

    engine = Engine(algorithms=[A()], algorithm_passes=broken)

    with pytest.raises(ZeroDivisionError) as caught:
        await engine.run_event(Event.INIT)

    assert caught.value.__notes__ == ["in pass broken on INIT"]


# ---------------------------------------------------------------------------------------------------------- 7: traces


async def test_rule_4_7_what_ran_comes_first_then_what_did_not_with_its_reason() -> None:
    """In their order, and in registration order; two of a kind are counted."""

    class Odd(Always):
        def match(self, event: EventName, state: Any) -> bool:
            return False

    class Failing(Always):
        async def apply(self, event: EventName, state: Any, logger: Any) -> None:
            raise RuntimeError("no")

    def drop_c(algorithms: Sequence[Any], event: EventName) -> Sequence[Any]:
        return [a for a in algorithms if not isinstance(a, C)]

    kinds = [Odd(), A(), C(), A(), Failing(), B(), Odd()]
    engine = Engine(algorithms=kinds, algorithm_passes=drop_c)

    with pytest.raises(RuntimeError) as caught:
        await engine.run_event(Event.INIT)

    traces: Any = getattr(caught.value, "traces", None)
    assert [(key, trace.order, trace.outcome, trace.reason) for key, trace in traces.items()] == [
        ("a/INIT", 0, "ok", ""),
        ("a#2/INIT", 1, "ok", ""),
        ("failing/INIT", 2, "failed", ""),
        ("odd/INIT", None, "skipped", "not matched"),
        ("c/INIT", None, "skipped", "dropped by drop_c"),
        ("b/INIT", None, "skipped", "not reached"),
        ("odd#2/INIT", None, "skipped", "not matched"),
    ]
    assert [trace.event for trace in traces.values()] == [Event.INIT] * 7
    assert caught.value.__notes__ == ["in algorithm failing on INIT"]


async def test_rule_4_7_after_a_match_that_raises_nobody_was_reached() -> None:
    """Only who was asked and said no is "not matched"."""

    class No(Always):
        def match(self, event: EventName, state: Any) -> bool:
            return False

    class Broken(Always):
        def match(self, event: EventName, state: Any) -> bool:
            raise LookupError("no")

    with pytest.raises(LookupError) as caught:
        await Engine(algorithms=[No(), A(), Broken(), B()]).run_event(Event.INIT)

    traces: Any = getattr(caught.value, "traces", None)
    assert [(trace.name, trace.reason) for trace in traces.values()] == [
        ("no", "not matched"),
        ("a", "not reached"),
        ("broken", "not reached"),
        ("b", "not reached"),
    ]
    assert caught.value.__notes__ == ["in match of algorithm broken on INIT"]


async def test_rule_4_7_a_trace_holds_the_exit_code_and_the_times() -> None:
    """What `apply` returned, when it started, and how long it took."""

    @algorithm()
    async def coded(event: EventName, state: Any, logger: Any) -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    trace = (await Engine(algorithms=[coded]).run_event(Event.INIT))["coded/INIT"]

    assert (trace.run, trace.exit_code, trace.outcome, trace.error) == (True, 7, "ok", None)
    assert trace.start_ns > 0
    assert trace.duration_ns > 0
