"""The units of time, the numbers they go with, and how both are written in time strings."""

from __future__ import annotations

import math
import operator
import re
from enum import StrEnum
from typing import Any

from eventbus_engine.errors import TimeFormatError

__all__ = ["TimeUnit", "check_value", "cut_value", "read_clock", "read_timestring"]


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


def read_timestring(text: str) -> tuple[float, TimeUnit] | None:
    """The number and the unit of `"10ba"`, or the seconds of `"1h30m"`; None if the string is no such thing."""
    if (seconds := read_clock(text)) is not None:
        return seconds, TimeUnit.SECOND
    if not (match := _TIMESTRING.fullmatch(text.strip())):
        return None
    try:
        # A whole number does not go by way of float, which would round large token counts.
        number = int(match[1]) if match[1].lstrip("+-").replace("_", "").isdecimal() else float(match[1])
    except ValueError:  # misplaced underscores, or more digits than the interpreter reads
        return None
    return number, TimeUnit(match[2])


def read_clock(text: str) -> int | None:
    """The seconds in hours, minutes and seconds, such as `"1h30m"`; None if the string is no such thing."""
    if not (match := _CLOCK.fullmatch(text.strip())):
        return None
    try:
        hours, minutes, seconds = map(int, match.groups(default="0"))
    except ValueError:  # more digits than the interpreter reads
        return None
    return hours * 3600 + minutes * 60 + seconds


def check_value(value: Any, unit: TimeUnit) -> float:
    """The value as its unit stores it: a finite float for `DURATION`, an int for all others.

    Raises:
        TimeFormatError: if it is not a number, or not whole where it has to be.
    """
    try:
        if unit is not TimeUnit.DURATION and not isinstance(value, float):
            return int(operator.index(value))
        # Not float(value), which would read strings.
        number = float(value.__float__())
        if unit is TimeUnit.DURATION and math.isfinite(number):
            return number
        if number.is_integer():
            return int(number)
    except (AttributeError, OverflowError, TypeError):
        pass
    kind = "finite number" if unit is TimeUnit.DURATION else "whole number"
    raise TimeFormatError(f"{value!r} is no amount of time in {unit.value!r} ({unit.name}); it takes a {kind}")


def cut_value(value: float, unit: TimeUnit) -> float:
    """A scaled value with its fraction cut off, where the unit has none."""
    return value if unit is TimeUnit.DURATION or not math.isfinite(value) else int(value)
