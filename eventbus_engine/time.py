"""How far a run has come: `TimeUnit`, `Time` (an amount in one unit) and `Timestamp` (all the counters at one moment).

The vocabulary, the units and the time strings are those of MosaicML Composer's `composer.core.time`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import total_ordering
from typing import Any, ClassVar, Generic, Self, TypeAlias

from typing_extensions import TypeVar

from eventbus_engine._units import TimeUnit, check_value, cut_value, read_clock, read_timestring
from eventbus_engine.errors import TimeFormatError

__all__ = ["Time", "TimeInput", "TimeUnit", "Timestamp"]

NumberT_co = TypeVar("NumberT_co", bound=float, covariant=True, default=float)


@total_ordering
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Time(Generic[NumberT_co]):
    """An amount of time in one unit, immutable: `Time(5, "ep")` is five epochs.

    Compares with, and adds to, times of its own unit, their strings, and plain numbers, which are taken to be in its
    unit: `timestamp.epoch > 30`. A number or a `DURATION` scales it, fractions cut off: `Time(3, "ep") * 0.5` is
    `Time(1, "ep")`. One time divided by another of its unit is a `DURATION`.

    Attributes:
        value: an int, or a float for `DURATION`.
        unit: what it counts.

    Args:
        value: the amount; whole unless the unit is `DURATION`, and finite.
        unit: a `TimeUnit`, or its value or name.

    Raises:
        TimeFormatError: for a value or unit that does not fit; from operators, for units that do not mix.
    """

    # Not the decorator's slots=True, whose class breaks on the attribute that `Time[int](5, "ep")` tries to set.
    __slots__ = ("unit", "value")
    value: NumberT_co
    unit: TimeUnit

    def __init__(self, value: NumberT_co, unit: TimeUnit | str) -> None:
        unit = unit if type(unit) is TimeUnit else TimeUnit(unit)
        object.__setattr__(self, "value", check_value(value, unit))
        object.__setattr__(self, "unit", unit)

    @classmethod
    def from_iteration(cls, iteration: int) -> Time[int]:
        """That many iterations."""
        return Time(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: int) -> Time[int]:
        """That many epochs."""
        return Time(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: int) -> Time[int]:
        """That many batches."""
        return Time(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: int) -> Time[int]:
        """That many samples."""
        return Time(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: int) -> Time[int]:
        """That many tokens."""
        return Time(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> Time[float]:
        """That fraction of the run, 0.0 to 1.0."""
        return Time(duration, TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, delta: timedelta | str) -> Time[int]:
        """The whole seconds in a `timedelta`, or in hours, minutes and seconds such as `"1h30m"` or `"90s"`.

        Raises:
            TimeFormatError: if it is neither.
        """
        if isinstance(delta, timedelta):
            return Time(delta // timedelta(seconds=1), TimeUnit.SECOND)
        if not isinstance(delta, str) or (seconds := read_clock(delta)) is None:
            raise TimeFormatError(f"{delta!r} is no stretch of time; use a timedelta, or a string such as '1h30m'")
        return Time(seconds, TimeUnit.SECOND)

    @classmethod
    def from_timestring(cls, timestring: str) -> Time:
        """Read a number with a unit (`"10ba"`, `"1e3sp"`, `"0.5dur"`), or hours, minutes and seconds (`"1h30m"`).

        Raises:
            TimeFormatError: if the string is neither, or not a string at all.
        """
        if not isinstance(timestring, str) or (parts := read_timestring(timestring)) is None:
            raise TimeFormatError(
                f"{timestring!r} is no time string; write a number and one of {', '.join(TimeUnit)}, such as '10ba'"
            )
        return Time(*parts)

    @classmethod
    def from_input(cls, value: TimeInput, unit: TimeUnit | str | None = None) -> Time:
        """Read a `Time`, a time string, or a number in `unit`.

        Raises:
            TimeFormatError: for anything else, and for a number without a `unit`.
        """
        if isinstance(value, Time):
            return value
        if isinstance(value, str):
            return cls.from_timestring(value)
        if unit is None:
            raise TimeFormatError(f"{value!r} has no unit; write a time string such as '10ba', or a Time")
        return Time(value, unit)

    def to_timestring(self) -> str:
        """The time string that reads back as this time: `"5ep"`."""
        return f"{self.value}{self.unit.value}"

    __str__ = to_timestring

    def __repr__(self) -> str:
        return f"Time({self.value}, TimeUnit.{self.unit.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Time, (self.value, self.unit)

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def _in_unit(self, other: TimeInput) -> float:
        """The value of `other`, which has to be in this time's unit."""
        if isinstance(other, (int, float)):
            return other
        time = Time.from_input(other)
        if time.unit is not self.unit:
            raise TimeFormatError(f"{self} and {time} do not mix; state both in {self.unit} or both in {time.unit}")
        return time.value

    def __eq__(self, other: object) -> bool:
        return self.value == self._in_unit(other) if isinstance(other, _OPERANDS) else NotImplemented

    def __lt__(self, other: TimeInput) -> bool:
        return self.value < self._in_unit(other) if isinstance(other, _OPERANDS) else NotImplemented

    def __add__(self, other: TimeInput) -> Time[NumberT_co]:
        return self._with(self.value + self._in_unit(other)) if isinstance(other, _OPERANDS) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: TimeInput) -> Time[NumberT_co]:
        return self._with(self.value - self._in_unit(other)) if isinstance(other, _OPERANDS) else NotImplemented

    def __rsub__(self, other: TimeInput) -> Time[NumberT_co]:
        return self._with(self._in_unit(other) - self.value) if isinstance(other, _OPERANDS) else NotImplemented

    def __mod__(self, other: TimeInput) -> Time[NumberT_co]:
        return self._with(self.value % self._in_unit(other)) if isinstance(other, _OPERANDS) else NotImplemented

    def __neg__(self) -> Time[NumberT_co]:
        return self._with(-self.value)

    def __pos__(self) -> Time[NumberT_co]:
        return self

    def __mul__(self, other: TimeInput) -> Time:
        if isinstance(other, (int, float)):
            return self._scaled(other)
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        factor = Time.from_input(other)
        if factor.unit is TimeUnit.DURATION:
            return self._scaled(factor.value)
        if self.unit is TimeUnit.DURATION:
            return factor._scaled(self.value)
        raise TimeFormatError(f"{self} times {factor} has no unit; multiply by a number or a duration such as '0.5dur'")

    __rmul__ = __mul__

    def __truediv__(self, other: TimeInput) -> Time:
        if isinstance(other, (int, float)):
            return self._with(cut_value(self.value / other, self.unit))
        return Time(self.value / self._in_unit(other), "dur") if isinstance(other, _OPERANDS) else NotImplemented

    def _scaled(self, factor: float) -> Time[NumberT_co]:
        return self._with(cut_value(self.value * factor, self.unit))

    def _with(self, value: Any) -> Time[NumberT_co]:
        return Time(value, self.unit)


TimeInput: TypeAlias = Time | str | float
"""What operators and `Time.from_input` take: a time, a time string, or a number in the unit at hand."""

_OPERANDS = (Time, str, int, float)


@total_ordering
@dataclass(frozen=True, slots=True, init=False, eq=False)
class Timestamp:
    """Where a run stands: what has been counted since its start, and within the current iteration and epoch.

    Immutable; `to_next_batch`, `to_next_epoch`, `to_next_iteration` and `copy` make the next one. Counters are of
    things finished: during the first batch `batch` is 0. Compared with a `Time` or a time string it answers for the
    counter of that unit: `timestamp >= "3ep"`.

    Args:
        values: any of the attributes by name, 0 where left out; a counter as a `Time` of its unit or an int.

    Attributes:
        iteration, epoch, batch, sample, token: counted since the start of the run.
        epoch_in_iteration, token_in_iteration: counted since the start of the iteration.
        batch_in_epoch, sample_in_epoch, token_in_epoch: counted since the start of the epoch.
        total_wct, iteration_wct, epoch_wct: wall-clock time of the run, the iteration, the epoch, as `timedelta`.
        batch_wct: wall-clock time of the last batch.

    Raises:
        TimeFormatError: for a name that is no attribute, or a value that does not fit it.
    """

    iteration: Time[int]
    epoch: Time[int]
    batch: Time[int]
    sample: Time[int]
    token: Time[int]
    epoch_in_iteration: Time[int]
    token_in_iteration: Time[int]
    batch_in_epoch: Time[int]
    sample_in_epoch: Time[int]
    token_in_epoch: Time[int]
    total_wct: timedelta
    iteration_wct: timedelta
    epoch_wct: timedelta
    batch_wct: timedelta

    def __init__(self, **values: FieldInput) -> None:
        self._fill({**_START, **values})

    def _fill(self, values: Mapping[str, Any]) -> None:
        checked = [(name, _check_field(name, value)) for name, value in values.items()]
        for name, value in checked:
            object.__setattr__(self, name, value)

    def copy(self, **overrides: FieldInput) -> Self:
        """A timestamp like this one but for `overrides`, given as to the constructor."""
        return type(self)(**{name: getattr(self, name) for name in _START} | overrides)

    def _advance(self, duration: timedelta | None, **overrides: FieldInput) -> Self:
        took = _ZERO if duration is None else _check_field("batch_wct", duration)
        clocks = {name: getattr(self, name) + took for name in ("total_wct", "iteration_wct", "epoch_wct")}
        advanced, values = object.__new__(type(self)), clocks | {"batch_wct": took} | overrides
        for name in _START:  # of a timestamp, all of them, so that none needs another check
            object.__setattr__(advanced, name, values[name] if name in values else getattr(self, name))
        return advanced

    def to_next_batch(
        self, samples: Time[int] | int = 0, tokens: Time[int] | int = 0, duration: timedelta | None = None
    ) -> Self:
        """One batch further.

        Args:
            samples: how many the batch held, over all ranks.
            tokens: how many the batch held, over all ranks.
            duration: how long it took; default: no time.
        """
        return self._advance(
            duration,
            batch=self.batch + 1,
            batch_in_epoch=self.batch_in_epoch + 1,
            sample=self.sample + samples,
            sample_in_epoch=self.sample_in_epoch + samples,
            token=self.token + tokens,
            token_in_epoch=self.token_in_epoch + tokens,
            token_in_iteration=self.token_in_iteration + tokens,
        )

    def to_next_epoch(self, tokens: Time[int] | int = 0, duration: timedelta | None = None) -> Self:
        """One epoch further: what counts within the epoch starts again from 0.

        Args:
            tokens: how many to add to the iteration, beyond those of its batches.
            duration: time that passed since the last batch; default: none.
        """
        return self._advance(
            duration,
            epoch=self.epoch + 1,
            epoch_in_iteration=self.epoch_in_iteration + 1,
            token_in_iteration=self.token_in_iteration + tokens,
            **_EPOCH_START,
        )

    def to_next_iteration(self, duration: timedelta | None = None) -> Self:
        """One iteration further: what counts within the iteration and the epoch starts again from 0.

        Args:
            duration: time that passed since the last batch; default: none.
        """
        return self._advance(
            duration,
            iteration=self.iteration + 1,
            **{name: _START[name] for name in ("epoch_in_iteration", "token_in_iteration", "iteration_wct")},
            **_EPOCH_START,
        )

    def get(self, unit: TimeUnit | str) -> Time[int]:
        """The counter of that unit; for `SECOND` the whole seconds of `total_wct`.

        Raises:
            TimeFormatError: for `DURATION`, which needs to know how long the run will be.
        """
        unit = TimeUnit(unit)
        if unit is TimeUnit.SECOND:
            return Time.from_timedelta(self.total_wct)
        if unit is TimeUnit.DURATION:
            raise TimeFormatError(
                "a timestamp does not know how long the run will be; divide one of its counters by max_duration"
            )
        return getattr(self, unit.name.lower())  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return all(getattr(self, name) == getattr(other, name) for name in _START)
        return self.get(Time.from_input(other).unit) == other if isinstance(other, (Time, str)) else NotImplemented

    # Equal to times and strings of every unit at once, which no hash can honour.
    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __lt__(self, other: Time | str) -> bool:
        return self.get(Time.from_input(other).unit) < other if isinstance(other, (Time, str)) else NotImplemented

    def state_dict(self) -> dict[str, int | float]:
        """All attributes by name as plain numbers, the wall-clock times in seconds: ready for JSON."""
        values = ((name, getattr(self, name)) for name in _START)
        return {name: value.value if isinstance(value, Time) else value.total_seconds() for name, value in values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. The one change in place, for a run that resumes.

        Args:
            state: an attribute's value by its name; wall-clock times in seconds, or as `timedelta`.

        Raises:
            TimeFormatError: for a name too many or missing, or a value that does not fit; nothing is changed then.
        """
        if missing := [name for name in _START if name not in state]:
            raise TimeFormatError(f"the state of a timestamp lacks {', '.join(missing)}; it takes all of state_dict()")
        self._fill({name: _as_clock(value) if name.endswith("_wct") else value for name, value in state.items()})


FieldInput: TypeAlias = Time[int] | int | timedelta
"""What a field of a `Timestamp` is made from: a counter of a `Time` or an int, a wall-clock time of a `timedelta`."""

_ZERO = timedelta()
_START: dict[str, Any] = {
    field.name: _ZERO if field.name.endswith("_wct") else Time(0, field.name.partition("_in_")[0])
    for field in fields(Timestamp)
}
_EPOCH_START: dict[str, FieldInput] = {
    name: start for name, start in _START.items() if name.endswith("_in_epoch") or name in ("epoch_wct", "batch_wct")
}


def _as_clock(value: Any) -> Any:
    try:
        return timedelta(seconds=value)
    except (OverflowError, TypeError, ValueError):
        return value


def _check_field(name: str, value: Any) -> Any:
    start = _START.get(name)
    if start is None:
        raise TimeFormatError(f"{name!r} is no field of a timestamp; it has {', '.join(_START)}")
    if isinstance(start, timedelta):
        if isinstance(value, timedelta):
            return value
        raise TimeFormatError(f"{name}={value!r} is no wall-clock time; give a timedelta")
    counter = Time.from_input(value, start.unit)
    if counter.unit is not start.unit:
        raise TimeFormatError(f"{name}={value!r} is in the wrong unit; give an int, or a Time in {start.unit}")
    return counter
