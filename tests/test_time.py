"""Time, its units and strings, and timestamps."""

from __future__ import annotations

import copy
import json
import operator
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus_engine.errors import TimeFormatError
from eventbus_engine.time import Time, Timestamp, TimeUnit

COUNTED = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]
EVERY_FIELD: dict[str, Any] = {
    "iteration": 1,
    "epoch": 2,
    "batch": 3,
    "sample": 4,
    "token": 5,
    "epoch_in_iteration": 6,
    "token_in_iteration": 7,
    "batch_in_epoch": 8,
    "sample_in_epoch": 9,
    "token_in_epoch": 10,
    "total_wct": timedelta(seconds=11),
    "iteration_wct": timedelta(seconds=12),
    "epoch_wct": timedelta(seconds=13),
    "batch_wct": timedelta(seconds=14),
}

amounts = st.integers(-(10**12), 10**12)
fractions = st.floats(allow_nan=False, allow_infinity=False)
counted_times = st.builds(Time[int], amounts, st.sampled_from(COUNTED))
times = counted_times | st.builds(Time.from_duration, fractions)


def counters(timestamp: Timestamp, *names: str) -> list[int]:
    """Those counters as plain numbers."""
    return [int(getattr(timestamp, name)) for name in names]


# ---------------------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("unit", "value"),
    [
        ("ITERATION", "iter"),
        ("EPOCH", "ep"),
        ("BATCH", "ba"),
        ("SAMPLE", "sp"),
        ("TOKEN", "tok"),
        ("DURATION", "dur"),
        ("SECOND", "sec"),
    ],
)
def test_a_unit_is_found_by_value_and_by_name_in_any_case(unit: str, value: str) -> None:
    """Composer's values, its names, and either in capitals."""
    found = {TimeUnit(text) for text in (value, value.upper(), unit, unit.lower())}

    assert found == {TimeUnit[unit]}
    assert TimeUnit[unit].value == value


@pytest.mark.parametrize("unit", ["epochs", "", 3, None])
def test_an_unknown_unit_is_named_with_those_that_exist(unit: Any) -> None:
    """The message holds the offender and the way out."""
    with pytest.raises(TimeFormatError, match="is not a unit of time; use one of iter, ep, ba") as caught:
        Time(1, unit)

    assert repr(unit) in str(caught.value)


# --------------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("time", "value", "unit"),
    [
        (Time.from_iteration(1), 1, TimeUnit.ITERATION),
        (Time.from_epoch(2), 2, TimeUnit.EPOCH),
        (Time.from_batch(3), 3, TimeUnit.BATCH),
        (Time.from_sample(4), 4, TimeUnit.SAMPLE),
        (Time.from_token(5), 5, TimeUnit.TOKEN),
        (Time.from_duration(0.5), 0.5, TimeUnit.DURATION),
        (Time.from_timedelta(timedelta(minutes=1, seconds=1.9)), 61, TimeUnit.SECOND),
        (Time.from_timedelta("1h1m1s"), 3661, TimeUnit.SECOND),
        (Time(3e4, "tok"), 30_000, TimeUnit.TOKEN),
        (Time(True, "ep"), 1, TimeUnit.EPOCH),
        (Time(1, "dur"), 1.0, TimeUnit.DURATION),
    ],
)
def test_a_time_holds_value_and_unit(time: Time, value: float, unit: TimeUnit) -> None:
    """Durations hold a float, all other units an int, however they were made."""
    assert (time.value, time.unit) == (value, unit)
    assert type(time.value) is (float if unit is TimeUnit.DURATION else int)


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), "5", None, [1]])
def test_a_counted_unit_takes_whole_numbers_only(value: Any) -> None:
    """Half an epoch is no epoch."""
    with pytest.raises(TimeFormatError, match=r"no amount of time in 'ep' \(EPOCH\); it takes a whole number"):
        Time(value, "ep")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 10**400, "0.5", None])
def test_a_duration_takes_finite_numbers_only(value: Any) -> None:
    """A fraction that is no number would compare with nothing."""
    with pytest.raises(TimeFormatError, match=r"no amount of time in 'dur' \(DURATION\); it takes a finite number"):
        Time(value, "dur")


def test_a_time_is_immutable_and_copies_as_itself() -> None:
    """It is shared freely between timestamps, so nobody may change it."""
    time = Time(5, "ep")

    with pytest.raises(AttributeError):
        time.value = 6  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(time)) == copy.deepcopy(time) == time
    assert not hasattr(time, "__dict__")


def test_a_time_says_the_type_of_its_value() -> None:
    """`Time[int]` is the annotation of a counter, and can be called like the class."""
    time = Time[int](5, "ep")

    assert time == Time(5, "ep")


# -------------------------------------------------------------------------------------------------------------- strings


@pytest.mark.parametrize(
    ("timestring", "expected"),
    [
        ("10ba", Time(10, "ba")),
        ("0.5dur", Time(0.5, "dur")),
        (".5dur", Time(0.5, "dur")),
        ("1e3sp", Time(1000, "sp")),
        ("3E4TOK", Time(30_000, "tok")),
        ("1_000_000tok", Time(1_000_000, "tok")),
        ("9007199254740993tok", Time(9007199254740993, "tok")),
        ("-1ep", Time(-1, "ep")),
        ("+2.ep", Time(2, "ep")),
        (" 3 ep ", Time(3, "ep")),
        ("2iter", Time(2, "iter")),
        ("90sec", Time(90, "sec")),
        ("90s", Time(90, "sec")),
        ("1h30m", Time(5400, "sec")),
        ("100h", Time(360_000, "sec")),
        ("2M5S", Time(125, "sec")),
    ],
)
def test_time_strings_are_read(timestring: str, expected: Time) -> None:
    """A number and a unit, or hours, minutes and seconds."""
    actual = Time.from_timestring(timestring)

    assert (actual.value, actual.unit) == (expected.value, expected.unit)


@pytest.mark.parametrize(
    "timestring",
    [
        *("", "ep", "5", "ep5", "5 epochs", "1ep2ba", "1.2.3ba", "five ep", "nandur", "infdur", "1__0ba", "0x1ep"),
        *("h", "1m1h", "1:30", "-1h", "1.5h", "٣ep"),
        *("9" * 5000 + "ba", "9" * 5000 + "h", None, 5, b"5ep"),
    ],
)
def test_a_bad_time_string_is_named_with_an_example(timestring: Any) -> None:
    """Whatever does not parse raises the one error, which says how it is written."""
    with pytest.raises(TimeFormatError, match=r"is no time string; write a number and one of .* such as '10ba'"):
        Time.from_timestring(timestring)


@pytest.mark.parametrize("timestring", ["1.5ep", "1e-3ba", "1e999dur"])
def test_a_time_string_holds_to_the_values_of_its_unit(timestring: str) -> None:
    """It parses, but there is no such time."""
    with pytest.raises(TimeFormatError, match="no amount of time"):
        Time.from_timestring(timestring)


@pytest.mark.parametrize("delta", ["", "1", "90sec", 90, None])
def test_what_is_no_stretch_of_time_is_refused(delta: Any) -> None:
    """`from_timedelta` takes a timedelta, or hours, minutes and seconds."""
    with pytest.raises(TimeFormatError, match="is no stretch of time; use a timedelta"):
        Time.from_timedelta(delta)


@given(times)
def test_time_strings_round_trip(time: Time) -> None:
    """What a time writes reads back as that time, of the same type."""
    actual = Time.from_timestring(time.to_timestring())

    assert actual == time
    assert (actual.unit, type(actual.value)) == (time.unit, type(time.value))
    assert str(time) == time.to_timestring()


@given(times)
def test_repr_round_trips(time: Time) -> None:
    """`repr` is the expression that makes the time."""
    actual = eval(repr(time), {"Time": Time, "TimeUnit": TimeUnit})

    assert actual == time
    assert actual.unit is time.unit


@given(st.text())
def test_no_string_gets_past_the_one_error(text: str) -> None:
    """Any string is a time or a `TimeFormatError`; none breaks the parser."""
    try:
        actual = Time.from_timestring(text)
    except TimeFormatError:
        return

    assert Time.from_timestring(str(actual)) == actual


def test_input_is_a_time_a_string_or_a_number_with_a_unit() -> None:
    """The one reader of what a user hands in, such as `max_duration`."""
    time = Time(5, "ep")

    assert Time.from_input(time) is time
    assert Time.from_input("5ep", "ba") == time
    assert Time.from_input(5, "ep") == time


@pytest.mark.parametrize("value", [5, 0.5, None])
def test_a_number_without_a_unit_is_refused(value: Any) -> None:
    """The error says how to give it one."""
    with pytest.raises(TimeFormatError, match="has no unit; write a time string such as '10ba'"):
        Time.from_input(value)


# ----------------------------------------------------------------------------------------------------------- comparison


@given(amounts, amounts, st.sampled_from(COUNTED))
def test_times_are_ordered_like_their_values(left: int, right: int, unit: TimeUnit) -> None:
    """With a time, its string and a plain number on either side."""
    for holds in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        expected = holds(left, right)
        time, other = Time(left, unit), Time(right, unit)

        assert [holds(time, form) for form in (other, str(other), right, float(right))] == [expected] * 4
        assert [holds(form, other) for form in (str(time), left, float(left))] == [expected] * 3


@given(times, times)
def test_equal_times_hash_alike(left: Time, right: Time) -> None:
    """So times can be keys, those of different units side by side."""
    assert hash(left) == hash(Time(left.value, left.unit))
    assert len({left, right}) == (1 if (left.value, left.unit) == (right.value, right.unit) else 2)


def test_a_counter_compares_with_a_fraction() -> None:
    """`epoch > 2.5` is a fair question, though there is no half epoch."""
    assert Time(3, "ep") > 2.5
    assert not Time(2, "ep") > 2.5


@pytest.mark.parametrize(
    "operation", [operator.eq, operator.lt, operator.add, operator.sub, operator.mod, operator.truediv]
)
@pytest.mark.parametrize("other", [Time(1, "ba"), "1ba"])
def test_units_do_not_mix(operation: Callable[[Any, Any], Any], other: Time | str) -> None:
    """Not even in `==`, whose silent False would hide the mistake."""
    with pytest.raises(TimeFormatError, match="3ep and 1ba do not mix; state both in ep or both in ba"):
        operation(Time(3, "ep"), other)


def test_a_time_times_a_time_needs_a_duration() -> None:
    """There are no square epochs."""
    with pytest.raises(TimeFormatError, match="3ep times 2ep has no unit; multiply by a number or a duration"):
        Time(3, "ep") * "2ep"


@pytest.mark.parametrize(
    "operation",
    [operator.lt, operator.add, operator.sub, operator.mul, operator.truediv, operator.mod],
)
def test_operators_leave_strangers_to_python(operation: Callable[[Any, Any], Any]) -> None:
    """The other operand gets its turn; where it has no answer Python's own TypeError names both types."""
    time = Time(1, "ep")

    with pytest.raises(TypeError, match="Time"):
        operation(time, [])
    with pytest.raises(TypeError, match="Time"):
        operation([], time)
    assert time != []
    assert time != Mock()


# ----------------------------------------------------------------------------------------------------------- arithmetic


@given(amounts, amounts, amounts, st.sampled_from(COUNTED))
def test_sums_obey_the_laws_of_integers(a: int, b: int, c: int, unit: TimeUnit) -> None:
    """Commutative, associative, with an inverse, whatever form the operands have."""
    x, y, z = Time(a, unit), Time(b, unit), Time(c, unit)

    assert x + y == y + x == x + b == a + y == x + str(y) == str(x) + y == Time(a + b, unit)
    assert (x + y) + z == x + (y + z)
    assert x - y == -(y - x) == x - b == a - y == str(x) - y == Time(a - b, unit)
    assert x - x == 0
    assert sum([x, y, z]) == a + b + c


@given(amounts, amounts.filter(bool), st.sampled_from(COUNTED))
def test_remainder_and_ratio_agree_with_integers(a: int, b: int, unit: TimeUnit) -> None:
    """`batch % 10 == 0` works; a time over a time is a fraction of it."""
    x, y = Time(a, unit), Time(b, unit)
    ratio = x / y

    assert x % y == x % b == x % str(y) == Time(a % b, unit)
    assert (ratio.value, ratio.unit) == (a / b, TimeUnit.DURATION)
    assert x / str(y) == ratio


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (Time(3, "ep") * 2, "6ep"),
        (2 * Time(3, "ep"), "6ep"),
        (Time(3, "ep") * 0.5, "1ep"),
        (Time(-3, "ep") * 0.5, "-1ep"),
        (Time(10, "ba") * Time(0.5, "dur"), "5ba"),
        (Time(0.5, "dur") * Time(10, "ba"), "5ba"),
        (Time(0.5, "dur") * "10ba", "5ba"),
        ("0.5dur" * Time(10, "ba"), "5ba"),
        (Time(0.5, "dur") * Time(0.5, "dur"), "0.25dur"),
        (Time(0.5, "dur") * 3, "1.5dur"),
        (Time(7, "ba") / 2, "3ba"),
        (Time(0.5, "dur") / 2, "0.25dur"),
        (Time(0.5, "dur") + 0.25, "0.75dur"),
        (Time(0.75, "dur") % 0.5, "0.25dur"),
        (+Time(3, "ep"), "3ep"),
        (-Time(3, "ep"), "-3ep"),
    ],
)
def test_a_time_scales_and_keeps_its_unit(actual: Time, expected: str) -> None:
    """By a number or a duration, what is left of a whole unit cut off."""
    assert str(actual) == expected


def test_arithmetic_never_leaves_the_values_of_a_unit() -> None:
    """A result that is no time is an error, not a time that is wrong."""
    with pytest.raises(TimeFormatError, match=r"3\.5 is no amount of time in 'ep'"):
        Time(3, "ep") + 0.5
    with pytest.raises(TimeFormatError, match="inf is no amount of time in 'ep'"):
        Time(3, "ep") * float("inf")
    with pytest.raises(ZeroDivisionError):
        Time(3, "ep") / 0


@given(times)
def test_a_time_converts_like_its_value(time: Time) -> None:
    """int, float and truth are those of the number."""
    assert (int(time), float(time), bool(time)) == (int(time.value), float(time.value), bool(time.value))


# ----------------------------------------------------------------------------------------------------------- timestamps


def test_a_fresh_timestamp_is_zero_in_every_unit() -> None:
    """Counters and clocks alike, each counter in the unit of its name."""
    timestamp = Timestamp()

    assert set(timestamp.state_dict().values()) == {0}
    assert list(timestamp.state_dict()) == list(EVERY_FIELD)
    assert timestamp.token_in_iteration.unit is TimeUnit.TOKEN
    assert timestamp.epoch_in_iteration.unit is TimeUnit.EPOCH
    assert timestamp.batch_in_epoch.unit is TimeUnit.BATCH
    assert timestamp.total_wct == timedelta(0)


def test_what_follows_a_timestamp_is_of_its_class() -> None:
    """Of a class derived from it too."""

    class Mine(Timestamp):
        __slots__ = ()

    start = Mine(epoch=1)
    made = [start.copy(batch=1), start.to_next_batch(), start.to_next_epoch(), start.to_next_iteration()]

    assert {type(timestamp) for timestamp in made} == {Mine}


def test_a_batch_counts_everywhere() -> None:
    """In the run, the iteration and the epoch, with its samples, tokens and time."""
    start = Timestamp(**EVERY_FIELD)
    actual = start.to_next_batch(samples=100, tokens=Time(1000, "tok"), duration=timedelta(seconds=10))
    expected = start.copy(
        batch=4,
        batch_in_epoch=9,
        sample=104,
        sample_in_epoch=109,
        token=1005,
        token_in_epoch=1010,
        token_in_iteration=1007,
        total_wct=timedelta(seconds=21),
        iteration_wct=timedelta(seconds=22),
        epoch_wct=timedelta(seconds=23),
        batch_wct=timedelta(seconds=10),
    )

    assert actual == expected
    assert start == Timestamp(**EVERY_FIELD)


def test_an_epoch_starts_what_is_counted_within_it_again() -> None:
    """Its time still goes to the run and the iteration."""
    start = Timestamp(**EVERY_FIELD)
    actual = start.to_next_epoch(tokens=1, duration=timedelta(seconds=1))
    expected = start.copy(
        epoch=3,
        epoch_in_iteration=7,
        token_in_iteration=8,
        batch_in_epoch=0,
        sample_in_epoch=0,
        token_in_epoch=0,
        total_wct=timedelta(seconds=12),
        iteration_wct=timedelta(seconds=13),
        epoch_wct=timedelta(0),
        batch_wct=timedelta(0),
    )

    assert actual == expected


def test_an_iteration_starts_what_is_counted_within_it_again() -> None:
    """And what is counted within its epochs."""
    start = Timestamp(**EVERY_FIELD)
    actual = start.to_next_iteration(duration=timedelta(seconds=1))
    expected = Timestamp(iteration=2, epoch=2, batch=3, sample=4, token=5, total_wct=timedelta(seconds=12))

    assert actual == expected


@given(st.lists(st.lists(st.tuples(st.integers(0, 512), st.integers(0, 9999)), max_size=5), max_size=4))
def test_totals_are_the_sums_of_what_was_counted(run: list[list[tuple[int, int]]]) -> None:
    """Over any run: epochs of batches of samples and tokens, a second a batch."""
    timestamp = Timestamp()
    for epoch in run:
        for samples, tokens in epoch:
            timestamp = timestamp.to_next_batch(samples, tokens, timedelta(seconds=1))
        in_epoch = counters(timestamp, "batch_in_epoch", "sample_in_epoch", "token_in_epoch")

        assert in_epoch == [len(epoch), sum(samples for samples, _ in epoch), sum(tokens for _, tokens in epoch)]

        timestamp = timestamp.to_next_epoch()
    batches = [batch for epoch in run for batch in epoch]

    assert counters(timestamp, "epoch", "batch", "sample", "token") == [
        len(run),
        len(batches),
        sum(samples for samples, _ in batches),
        sum(tokens for _, tokens in batches),
    ]
    assert timestamp.get("sec") == timestamp.total_wct.total_seconds() == len(batches)
    assert timestamp.token_in_iteration == timestamp.token


def test_a_timestamp_answers_in_every_unit() -> None:
    """`get` takes the unit, its value or its name."""
    timestamp = Timestamp(**EVERY_FIELD)
    units = ["iter", "epoch", TimeUnit.BATCH, "sp", "tok", "sec"]

    assert [int(timestamp.get(unit)) for unit in units] == [1, 2, 3, 4, 5, 11]


def test_a_timestamp_does_not_know_the_length_of_the_run() -> None:
    """So it cannot say which fraction of it is done."""
    with pytest.raises(TimeFormatError, match="divide one of its counters by max_duration"):
        Timestamp() < "0.5dur"  # noqa: B015


def test_a_timestamp_compares_in_the_unit_of_the_other() -> None:
    """With a time or its string, on either side."""
    timestamp = Timestamp(epoch=3, batch=30)

    assert timestamp >= "3ep"
    assert timestamp < "4ep"
    assert timestamp > Time(29, "ba")
    assert timestamp <= Time(30, "ba")
    assert timestamp == "30ba"
    assert timestamp != "31ba"
    assert Time(4, "ep") > timestamp
    assert "2ep" < timestamp  # noqa: SIM300
    assert timestamp.epoch > 2
    assert timestamp.batch % 10 == 0


def test_timestamps_are_equal_when_all_their_fields_are() -> None:
    """Two moments have no order of their own, and equality with times rules out a hash."""
    timestamp = Timestamp(**EVERY_FIELD)

    assert timestamp == Timestamp(**EVERY_FIELD)
    assert timestamp != Timestamp(**{**EVERY_FIELD, "batch_wct": timedelta(0)})
    assert timestamp != 3
    with pytest.raises(TypeError, match="Timestamp"):
        timestamp < Timestamp()  # type: ignore[operator]  # noqa: B015
    with pytest.raises(TypeError, match="unhashable"):
        hash(timestamp)


def test_a_timestamp_is_immutable_and_copies_as_itself() -> None:
    """Callbacks may keep it: the run makes new ones."""
    timestamp = Timestamp(**EVERY_FIELD)

    with pytest.raises(AttributeError):
        timestamp.batch = Time(4, "ba")  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(timestamp)) == copy.deepcopy(timestamp) == timestamp
    assert not hasattr(timestamp, "__dict__")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batches": 3}, "'batches' is no field of a timestamp; it has iteration, epoch, batch"),
        (
            {"batch": Time(3, "ep")},
            r"batch=Time\(3, TimeUnit.EPOCH\) is in the wrong unit; give an int, or a Time in ba",
        ),
        ({"batch": 1.5}, r"1.5 is no amount of time in 'ba' \(BATCH\); it takes a whole number"),
        ({"batch_wct": 1.5}, "batch_wct=1.5 is no wall-clock time; give a timedelta"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    """By the constructor and by `copy`."""
    with pytest.raises(TimeFormatError, match=message):
        Timestamp(**fields)
    with pytest.raises(TimeFormatError, match=message):
        Timestamp().copy(**fields)


def test_a_duration_in_seconds_is_refused() -> None:
    """A number could be anything; a timedelta says what it is."""
    with pytest.raises(TimeFormatError, match="give a timedelta"):
        Timestamp().to_next_batch(duration=1.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- state dicts


@given(st.lists(st.integers(0, 2**62), min_size=14, max_size=14))
def test_the_state_survives_json(values: list[int]) -> None:
    """Saved, read back and loaded it is the same moment, to the microsecond."""
    fields = {
        name: timedelta(microseconds=value % 2**50) if name.endswith("_wct") else value
        for name, value in zip(EVERY_FIELD, values, strict=True)
    }
    timestamp = Timestamp(**fields)
    restored = Timestamp()
    restored.load_state_dict(json.loads(json.dumps(timestamp.state_dict())))

    assert restored == timestamp


def test_wall_clock_times_load_as_timedeltas_too() -> None:
    """As Composer's own state holds them."""
    timestamp = Timestamp()
    timestamp.load_state_dict(EVERY_FIELD)

    assert timestamp == Timestamp(**EVERY_FIELD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": None}, "None is no amount of time"),
        ({"batch": 0.5}, "0.5 is no amount of time"),
        ({"epoch_wct": "soon"}, "epoch_wct='soon' is no wall-clock time"),
        ({"epoch_wct": float("inf")}, "epoch_wct=inf is no wall-clock time"),
        ({"epoch_wct": float("nan")}, "epoch_wct=nan is no wall-clock time"),
        ({"era": 1}, "'era' is no field of a timestamp"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    """All of it is checked before any of it is taken over."""
    timestamp = Timestamp(epoch=7)

    with pytest.raises(TimeFormatError, match=message):
        timestamp.load_state_dict(Timestamp().state_dict() | change)
    assert timestamp == Timestamp(epoch=7)


def test_a_state_that_lacks_fields_is_refused() -> None:
    """A counter that silently restarts from 0 would train the run again."""
    with pytest.raises(TimeFormatError, match="the state of a timestamp lacks batch, total_wct;"):
        Timestamp().load_state_dict({name: 0 for name in EVERY_FIELD if name not in ("batch", "total_wct")})
