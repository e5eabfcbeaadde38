"""How far a run has come: `TimeUnit`, `Time` (an amount in one unit) and `Timestamp` (all the counters at one moment).

The vocabulary, the units and the time strings are those of MosaicML Composer's `composer.core.time`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypedDict

from typing_extensions import TypeVar, Unpack

from eventbus_engine.errors import TimeFormatError

__all__ = ["Time", "TimeInput", "TimeUnit", "Timestamp"]

NumberT = TypeVar("NumberT", bound=float, covariant=True, default=float)


class TimeUnit(StrEnum):
    """What a `Time` counts. The values are the suffixes of time strings; names are taken too, in any case.

    Raises:
        TimeFormatError: for a unit that does not exist.
    """

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    """Batches trained, that is, optimizer steps."""
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    """The fraction of the run that is done: 0.0 at the start, 1.0 at the end. The one unit with a float value."""
    SECOND = "sec"

    @classmethod
    def _missing_(cls, value: object) -> TimeUnit:
        name = value.lower() if isinstance(value, str) else None
        for unit in cls:
            if name in (unit.value, unit.name.lower()):
                return unit
        raise TimeFormatError(f"{value!r} is not a unit of time; use one of {', '.join(cls)}")


_TIMESTRING = re.compile(
    rf"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*({'|'.join(TimeUnit)})", re.ASCII | re.IGNORECASE
)
_CLOCK = re.compile(r"(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Time(Generic[NumberT]):
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

    value: NumberT
    unit: TimeUnit

    def __init__(self, value: NumberT, unit: TimeUnit | str) -> None:
        unit = TimeUnit(unit)
        object.__setattr__(self, "value", value if type(value) is int and unit != "dur" else _checked(value, unit))
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
        if not isinstance(delta, str) or not (match := _CLOCK.fullmatch(delta.strip())):
            raise TimeFormatError(f"{delta!r} is no stretch of time; use a timedelta, or a string such as '1h30m'")
        hours, minutes, seconds = (_whole(part, delta) for part in match.groups(default="0"))
        return Time(hours * 3600 + minutes * 60 + seconds, TimeUnit.SECOND)

    @classmethod
    def from_timestring(cls, timestring: str) -> Time:
        """Read a number with a unit (`"10ba"`, `"1e3sp"`, `"0.5dur"`), or hours, minutes and seconds (`"1h30m"`).

        Raises:
            TimeFormatError: if the string is neither, or not a string at all.
        """
        text = timestring.strip() if isinstance(timestring, str) else ""
        if _CLOCK.fullmatch(text):
            return cls.from_timedelta(text)
        if not (match := _TIMESTRING.fullmatch(text)):
            raise TimeFormatError(
                f"{timestring!r} is no time string; write a number and one of {', '.join(TimeUnit)}, for example '10ba'"
            )
        digits, unit = match.groups()
        # Not by way of float, which would round large token counts.
        number = _whole(digits, timestring) if digits.lstrip("+-").isdecimal() else float(digits)
        return Time(number, unit)

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
            raise TimeFormatError(f"{value!r} has no unit; write a time string such as '10ba', or Time({value!r}, 'ba')")
        return Time(value, unit)

    def to_timestring(self) -> str:
        """The time string that reads back as this time: `"5ep"`."""
        return f"{self.value}{self.unit.value}"

    __str__ = to_timestring

    def __repr__(self) -> str:
        return f"Time({self.value}, {self.unit.value!r})"

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
            raise TimeFormatError(
                f"{self} and {time} are in different units; state both in {self.unit} or both in {time.unit}"
            )
        return time.value

    def _compare(self, other: object, holds: Callable[[Any, Any], bool]) -> bool:
        return holds(self.value, self._in_unit(other)) if isinstance(other, _OPERANDS) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return self._compare(other, operator.eq)

    def __lt__(self, other: TimeInput) -> bool:
        return self._compare(other, operator.lt)

    def __le__(self, other: TimeInput) -> bool:
        return self._compare(other, operator.le)

    def __gt__(self, other: TimeInput) -> bool:
        return self._compare(other, operator.gt)

    def __ge__(self, other: TimeInput) -> bool:
        return self._compare(other, operator.ge)

    def __add__(self, other: TimeInput) -> Time[NumberT]:
        return self._with(self.value + self._in_unit(other)) if isinstance(other, _OPERANDS) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: TimeInput) -> Time[NumberT]:
        return self._with(self.value - self._in_unit(other)) if isinstance(other, _OPERANDS) else NotImplemented

    def __rsub__(self, other: TimeInput) -> Time[NumberT]:
        return self._with(self._in_unit(other) - self.value) if isinstance(other, _OPERANDS) else NotImplemented

    def __mod__(self, other: TimeInput) -> Time[NumberT]:
        return self._with(self.value % self._in_unit(other)) if isinstance(other, _OPERANDS) else NotImplemented

    def __neg__(self) -> Time[NumberT]:
        return self._with(-self.value)

    def __pos__(self) -> Time[NumberT]:
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
            return self._with(_cut(self.value / other, self.unit))
        return Time(self.value / self._in_unit(other), "dur") if isinstance(other, _OPERANDS) else NotImplemented

    def _scaled(self, factor: float) -> Time[NumberT]:
        return self._with(_cut(self.value * factor, self.unit))

    def _with(self, value: Any) -> Time[NumberT]:
        return Time(value, self.unit)


TimeInput: TypeAlias = Time | str | float
"""What operators and `Time.from_input` take: a time, a time string, or a number in the unit at hand."""

_OPERANDS = (Time, str, int, float)


def _checked(value: Any, unit: TimeUnit) -> float:
    """The value as its unit stores it."""
    try:
        if isinstance(value, float) or unit is TimeUnit.DURATION:
            # A string has no __float__, though float() would read it.
            number = value.__float__()
            if math.isfinite(number) and (unit is TimeUnit.DURATION or number.is_integer()):
                return number if unit is TimeUnit.DURATION else int(number)
        else:
            return operator.index(value)
    except (AttributeError, OverflowError, TypeError):
        pass
    kind = "a finite number" if unit is TimeUnit.DURATION else "a whole number"
    raise TimeFormatError(f"{value!r} {unit} is not possible: a time in {unit.name.lower()}s takes {kind}")


def _cut(value: float, unit: TimeUnit) -> float:
    return value if unit is TimeUnit.DURATION or not math.isfinite(value) else int(value)


def _whole(digits: str, source: str) -> int:
    try:
        return int(digits)
    except ValueError:  # the interpreter's limit on the length of an int in a string
        raise TimeFormatError(f"{source[:20]!r}… has {len(digits)} digits, which is no time; write fewer") from None


class _Fields(TypedDict, total=False):
    iteration: Time[int] | int
    epoch: Time[int] | int
    batch: Time[int] | int
    sample: Time[int] | int
    token: Time[int] | int
    epoch_in_iteration: Time[int] | int
    token_in_iteration: Time[int] | int
    batch_in_epoch: Time[int] | int
    sample_in_epoch: Time[int] | int
    token_in_epoch: Time[int] | int
    total_wct: timedelta
    iteration_wct: timedelta
    epoch_wct: timedelta
    batch_wct: timedelta


_CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
_ZERO = timedelta()
_START: dict[str, Any] = {
    name: _ZERO if name in _CLOCKS else Time(0, name.partition("_in_")[0]) for name in _Fields.__annotations__
}


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

    def __init__(self, **values: Unpack[_Fields]) -> None:
        self._fill({**_START, **values})

    def _fill(self, values: Mapping[str, Any]) -> None:
        checked = {name: _checked_field(name, value) for name, value in values.items()}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def copy(self, **overrides: Unpack[_Fields]) -> Timestamp:
        """A timestamp like this one but for `overrides`, given as to the constructor."""
        return Timestamp(**{**{name: getattr(self, name) for name in _START}, **overrides})  # type: ignore[typeddict-item]

    def to_next_batch(
        self, samples: Time[int] | int = 0, tokens: Time[int] | int = 0, duration: timedelta | None = None
    ) -> Timestamp:
        """One batch further.

        Args:
            samples: how many the batch held, over all ranks.
            tokens: how many the batch held, over all ranks.
            duration: how long it took; default: no time.
        """
        took = _ZERO if duration is None else duration
        return self.copy(
            batch=self.batch + 1,
            batch_in_epoch=self.batch_in_epoch + 1,
            sample=self.sample + samples,
            sample_in_epoch=self.sample_in_epoch + samples,
            token=self.token + tokens,
            token_in_epoch=self.token_in_epoch + tokens,
            token_in_iteration=self.token_in_iteration + tokens,
            total_wct=self.total_wct + took,
            iteration_wct=self.iteration_wct + took,
            epoch_wct=self.epoch_wct + took,
            batch_wct=took,
        )

    def to_next_epoch(self, tokens: Time[int] | int = 0, duration: timedelta | None = None) -> Timestamp:
        """One epoch further: what counts within the epoch starts again from 0.

        Args:
            tokens: how many to add to the iteration, beyond those of its batches.
            duration: time that passed since the last batch; default: none.
        """
        took = _ZERO if duration is None else duration
        return self.copy(
            epoch=self.epoch + 1,
            epoch_in_iteration=self.epoch_in_iteration + 1,
            token_in_iteration=self.token_in_iteration + tokens,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self.total_wct + took,
            iteration_wct=self.iteration_wct + took,
            epoch_wct=_ZERO,
            batch_wct=_ZERO,
        )

    def to_next_iteration(self, duration: timedelta | None = None) -> Timestamp:
        """One iteration further: what counts within the iteration and the epoch starts again from 0.

        Args:
            duration: time that passed since the last batch; default: none.
        """
        return self.copy(
            iteration=self.iteration + 1,
            epoch_in_iteration=0,
            token_in_iteration=0,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self.total_wct + (_ZERO if duration is None else duration),
            iteration_wct=_ZERO,
            epoch_wct=_ZERO,
            batch_wct=_ZERO,
        )
