"""Vocabularies: their values, their pairs, and the names that stand for events."""

from __future__ import annotations

import copy
import pickle
import re
from enum import auto
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus_engine import (
    ConfigurationError,
    Engine,
    Event,
    EventBus,
    EventName,
    UnknownEventError,
    VocabularyError,
    algorithm,
)
from eventbus_engine.event import resolve_event

COMPOSER_EVENTS = re.findall(
    r"\w+",
    """
    INIT BEFORE_LOAD AFTER_LOAD FIT_START ITERATION_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START
    BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
    AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END ITERATION_CHECKPOINT FIT_END
    EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
    EVAL_AFTER_ALL EVAL_STANDALONE_START EVAL_STANDALONE_END PREDICT_START PREDICT_BATCH_START PREDICT_BEFORE_FORWARD
    PREDICT_AFTER_FORWARD PREDICT_BATCH_END PREDICT_END
""",
)

PAIRS = {
    "load": ("before_load", "after_load"),
    "fit": ("fit_start", "fit_end"),
    "iteration": ("iteration_start", "iteration_end"),
    "epoch": ("epoch_start", "epoch_end"),
    "dataloader": ("before_dataloader", "after_dataloader"),
    "batch": ("batch_start", "batch_end"),
    "train_batch": ("before_train_batch", "after_train_batch"),
    "forward": ("before_forward", "after_forward"),
    "loss": ("before_loss", "after_loss"),
    "backward": ("before_backward", "after_backward"),
    "eval_all": ("eval_before_all", "eval_after_all"),
    "eval": ("eval_start", "eval_end"),
    "eval_batch": ("eval_batch_start", "eval_batch_end"),
    "eval_forward": ("eval_before_forward", "eval_after_forward"),
    "eval_standalone": ("eval_standalone_start", "eval_standalone_end"),
    "predict": ("predict_start", "predict_end"),
    "predict_batch": ("predict_batch_start", "predict_batch_end"),
    "predict_forward": ("predict_before_forward", "predict_after_forward"),
}

LONE = {"init", "batch_checkpoint", "epoch_checkpoint", "iteration_checkpoint"}


class Ingest(EventName):
    """A vocabulary of a pipeline, with markers at the front, at the end, inside, and without a partner."""

    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"
    ROW_START = "row_start"
    ROW_END = "row_end"
    ROW_BEFORE_PARSE = "row_before_parse"
    ROW_AFTER_PARSE = "row_after_parse"
    BEFORE_RETRY = "before_retry"
    SHUTDOWN_END = "shutdown_end"
    START_OVER = "start_over"
    END_OVER = "end_over"
    BEFORE = "before"
    AFTER = "after"


class Export(EventName):
    """Another vocabulary that shares a value with `Ingest`."""

    BEFORE_WRITE = "before_write"


def vocabulary(name: str, **members: str) -> type[EventName]:
    """A vocabulary made at run time, as any enum can be."""
    made: type[EventName] = cast("Any", EventName)(name, members)
    return made


# ------------------------------------------------------------------------------------------------------- vocabularies


def test_event_has_composers_40_events_with_their_names_and_values() -> None:
    """Who knows Composer's events knows these: every value is the lower case of its name."""
    actual = [(event.name, event.value) for event in Event]

    assert len(actual) == 40
    assert actual == [(name, name.lower()) for name in COMPOSER_EVENTS]


def test_the_base_has_no_members_so_that_it_can_be_subclassed() -> None:
    """An enum with members cannot be extended, and `EventName` is there to be."""
    assert list(EventName) == []


def test_a_member_equals_and_hashes_like_its_value() -> None:
    """A dict keyed by names answers for members, and the other way round."""
    by_name, by_member = {"init": 1}, {str(Event.INIT): 2}

    assert str(Event.INIT) == Event.INIT
    assert by_name[Event.INIT] == 1
    assert by_member["init"] == {Event.INIT: 2}[Event("init")] == 2
    assert f"{Event.INIT}" == "init"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda event: pickle.loads(pickle.dumps(event))])
def test_a_copied_member_is_the_member(copied: object) -> None:
    """Events are compared by identity in places, so that no copy of one may exist."""
    assert callable(copied)
    assert copied(Event.EPOCH_END) is Event.EPOCH_END


@pytest.mark.parametrize("value", ["close", "open", "post_close", "run_event", "state_dict"])
def test_a_value_that_clashes_with_a_callback_method_is_refused(value: str) -> None:
    """A hook of that name could not be told from the method."""
    with pytest.raises(VocabularyError) as caught:
        vocabulary("Clashing", CLASH=value)

    assert str(caught.value) == (
        f"Clashing.CLASH = {value!r} clashes with the method of that name that callbacks have; a value names the "
        f"callback hook, so use another one, for example 'on_{value}'"
    )


@pytest.mark.parametrize(
    ("value", "problem", "suggestion"),
    [
        ("before-write", "is not an identifier", "before_write"),
        ("before write!", "is not an identifier", "before_write"),
        ("2nd", "is not an identifier", "on_2nd"),
        ("", "is not an identifier", "on_class"),
        ("class", "is a keyword of Python", "on_class"),
        ("cl-ose", "is not an identifier", "cl_ose"),
        ("open!", "is not an identifier", "on_open"),
        ("__init__", "clashes with the method of that name that callbacks have", "init"),
    ],
)
def test_a_value_that_cannot_name_a_hook_is_refused_with_one_that_can(
    value: str, problem: str, suggestion: str
) -> None:
    """The message names the member, the reason and a way out that works."""
    with pytest.raises(VocabularyError) as caught:
        vocabulary("Broken", CLASS=value)

    assert str(caught.value).startswith(f"Broken.CLASS = {value!r} {problem}; ")
    assert str(caught.value).endswith(f"for example {suggestion!r}")
    assert vocabulary("Mended", CLASS=suggestion)(suggestion).value == suggestion


def test_auto_gives_values_in_lower_case() -> None:
    """`auto()` is the shortest way to a vocabulary."""

    class Short(EventName):
        BEFORE_STEP = auto()
        AFTER_STEP = auto()

    assert Short.BEFORE_STEP.value == "before_step"
    assert Short.BEFORE_STEP.partner is Short.AFTER_STEP


# -------------------------------------------------------------------------------------------------------------- pairs


def test_every_event_of_training_is_half_of_its_pair_or_alone() -> None:
    """The table of pairs, all 40 events, both ways."""
    actual = {
        event.value: (event.canonical_name, event.partner, event.is_before_event, event.is_after_event)
        for event in Event
    }
    expected: dict[str, tuple[str, Event | None, bool, bool]] = {value: (value, None, False, False) for value in LONE}
    for name, (before, after) in PAIRS.items():
        expected[before] = (name, Event(after), True, False)
        expected[after] = (name, Event(before), False, True)

    assert actual == expected


def test_only_before_and_after_are_mirrored() -> None:
    """`_start` and `_end` are pairs, but their order is never reversed."""
    actual = {event.value for event in Event if event.is_mirrored}

    assert actual == {after for _, after in PAIRS.values() if "after" in after}


@pytest.mark.parametrize(
    ("event", "canonical", "partner"),
    [
        (Ingest.BEFORE_WRITE, "write", Ingest.AFTER_WRITE),
        (Ingest.ROW_END, "row", Ingest.ROW_START),
        (Ingest.ROW_AFTER_PARSE, "row_parse", Ingest.ROW_BEFORE_PARSE),
        (Ingest.BEFORE_RETRY, "before_retry", None),
        (Ingest.SHUTDOWN_END, "shutdown_end", None),
        (Ingest.START_OVER, "start_over", None),
        (Ingest.END_OVER, "end_over", None),
        (Ingest.BEFORE, "before", None),
        (Ingest.AFTER, "after", None),
        (Export.BEFORE_WRITE, "before_write", None),
    ],
)
def test_a_pair_needs_both_halves_in_the_same_vocabulary(
    event: EventName, canonical: str, partner: EventName | None
) -> None:
    """A lone half is no pair, a marker may stand inside a name, and `start`/`end` only mark at the end."""
    actual = event.canonical_name, event.partner, event.is_before_event or event.is_after_event

    assert actual == (canonical, partner, partner is not None)


_WORDS = st.lists(st.sampled_from(["before", "after", "start", "end", "row", "x"]), min_size=1, max_size=4)


@given(st.sets(_WORDS.map("_".join), min_size=1, max_size=12))
def test_in_any_vocabulary_a_half_and_its_partner_agree(values: set[str]) -> None:
    """Random vocabularies: the partner differs in one opposite marker, and is the half on the other side."""
    events = vocabulary("Random", **{f"E{i}": value for i, value in enumerate(sorted(values))})
    opposites = {("before", "after"), ("after", "before"), ("start", "end"), ("end", "start")}
    for event in events:
        assert event.is_before_event + event.is_after_event == (event.partner is not None)
        if event.partner is None:
            assert event.canonical_name == event.value
            continue
        ours, theirs = event.value.split("_"), event.partner.value.split("_")
        differing = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        assert len(differing) == 1
        assert differing[0] in opposites
        assert event.is_before_event == (differing[0][0] in {"before", "start"})
        rest = [a for a, b in zip(ours, theirs, strict=True) if a == b]
        assert event.canonical_name == "_".join(rest)


def test_the_parts_of_training_know_where_they_belong() -> None:
    """`is_eval` and `is_predict` go by the name, as in Composer."""
    assert {event for event in Event if event.is_eval} == {e for e in Event if e.name.startswith("EVAL_")}
    assert {event for event in Event if event.is_predict} == {e for e in Event if e.name.startswith("PREDICT_")}


@pytest.mark.anyio
async def test_an_engine_hears_its_own_vocabulary_alone() -> None:
    """Two engines on one bus, two members with the same value: each is heard by one, and bare names by the first."""
    log: list[tuple[str, EventName]] = []

    def noting(who: str) -> Any:
        return algorithm(name=who)(lambda event, state, logger: log.append((who, event)))

    bus = EventBus()
    Engine(events=Ingest, algorithms=[noting("ingest")], bus=bus)
    Engine(events=Export, algorithms=[noting("export")], bus=bus)
    bus.subscribe(lambda envelope: log.append(("bus", envelope.event)), Export.BEFORE_WRITE)
    for event in (Ingest.BEFORE_WRITE, Export.BEFORE_WRITE, "before_write"):
        await bus.publish(event)

    assert [(who, type(event).__name__) for who, event in log] == [
        ("ingest", "Ingest"),
        ("export", "Export"),
        ("bus", "Export"),
        ("ingest", "Ingest"),
    ]


@pytest.mark.parametrize("offender", ["ingest", Ingest.BEFORE_WRITE, object, None])
def test_an_engine_speaks_a_vocabulary(offender: Any) -> None:
    """Anything but a subclass of `EventName` is refused."""
    with pytest.raises(ConfigurationError) as caught:
        Engine(events=offender)

    assert str(caught.value) == f"events={offender!r} is no vocabulary; subclass EventName and pass the class"


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("event", list(Event))
def test_an_event_is_found_by_member_value_and_name(event: Event) -> None:
    """The three ways to say which event is meant, text in any case."""
    assert resolve_event(event, Event) is event
    assert resolve_event(event.value, Event) is event
    assert resolve_event(event.name, Event) is event
    assert resolve_event(event.name.title(), Event) is event
    assert Event(event.name) is event


def test_a_name_as_it_is_written_comes_before_one_in_another_case() -> None:
    """And an alias is a name, too."""

    class Odd(EventName):
        OVER = "stop"
        STOP = "write_end"
        DONE = "write_end"

    assert resolve_event("STOP", Odd) is Odd.STOP
    assert resolve_event("DONE", Odd) is resolve_event("done", Odd) is Odd.STOP


@pytest.mark.parametrize(
    ("name", "nearest", "hint"),
    [
        ("before_los", ("BEFORE_LOSS", "BEFORE_LOAD"), "did you mean BEFORE_LOSS or BEFORE_LOAD"),
        ("EPOCHEND", ("EPOCH_END",), "did you mean EPOCH_END"),
        ("training_start", ("INIT",), "did you mean INIT?"),
        ("TRAINING_END", ("FIT_END",), "did you mean FIT_END?"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name: str, nearest: tuple[str, ...], hint: str) -> None:
    """A slip of the pen is answered with what was meant; Composer's old names lead to their successors."""
    with pytest.raises(UnknownEventError) as caught:
        resolve_event(name, Event)

    assert str(caught.value).startswith(f"{name!r} is no event of Event; {hint}")
    assert caught.value.nearest[: len(nearest)] == nearest


def test_a_name_near_to_nothing_gets_them_all() -> None:
    """Where there is nothing to guess, the vocabulary is short enough to be listed."""
    with pytest.raises(UnknownEventError) as caught:
        resolve_event("qqq", Export)

    assert str(caught.value) == "'qqq' is no event of Export; it has BEFORE_WRITE"
    assert caught.value.nearest == ()


def test_an_old_name_leads_nowhere_in_a_vocabulary_without_its_successor() -> None:
    """`training_start` means INIT only where there is one; an empty vocabulary says that it is empty."""
    with pytest.raises(UnknownEventError, match=r"'training_start' is no event of Export; it has BEFORE_WRITE"):
        resolve_event("training_start", Export)
    with pytest.raises(UnknownEventError, match=r"'x' is no event of EventName; it has no events"):
        resolve_event("x", EventName)


def test_a_member_of_another_vocabulary_is_refused_though_its_value_is_the_same() -> None:
    """Equal strings are not the same event."""
    with pytest.raises(UnknownEventError) as caught:
        resolve_event(Ingest.BEFORE_WRITE, Export)

    assert str(caught.value) == (
        "Ingest.BEFORE_WRITE is no event of Export; pass one of its members, or the engine that speaks the other "
        "vocabulary: Engine(events=Ingest)"
    )


@pytest.mark.parametrize("offender", [None, 3, Event])
def test_what_is_no_name_at_all_is_refused(offender: object) -> None:
    """Anything else than a member or a string."""
    with pytest.raises(UnknownEventError) as caught:
        resolve_event(offender, Event)

    assert str(caught.value).startswith(f"{offender!r} is no event of Event; pass one of its members")
