"""Log values as plain Python, taken out of tensors and arrays without knowing their libraries: `plain`, `jsonable`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date
from enum import Enum
from typing import Any

__all__ = ["jsonable", "plain"]


def plain(value: Any) -> Any:
    """The value as None, bool, int, float, str, list and dict, copied, so that later changes do not show.

    Tensors and arrays (anything with `tolist`) become numbers or nested lists, enumerations their values, dataclasses
    dicts, sets lists, dates ISO 8601 strings. Keys become strings, and so does everything else. Floats stay what they
    are, NaN and the infinities included.
    """
    return _plain(value, _as_it_is)


def _as_it_is(value: float) -> Any:
    return value if isinstance(value, int) else float(value)


def jsonable(value: Any) -> Any:
    """The plain value, with the strings "NaN", "Infinity" and "-Infinity" for the floats that JSON lacks.

    An int of more than 4096 bits, which Python may refuse to write, becomes a string that says how many it has.
    """
    return _plain(value, _finite)


def _finite(value: float) -> Any:
    if isinstance(value, int):
        return (
            value
            if value.bit_length() <= _MOST_BITS
            else f"{'-' if value < 0 else ''}<int of {value.bit_length()} bits>"
        )
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_MOST_BITS = 4096

_PLAIN = frozenset({type(None), bool, str})


def _plain(value: Any, number: Callable[[float], Any]) -> Any:
    kind = type(value)
    if kind in _PLAIN:  # nearly everything is, or is one of the next two
        return value
    if kind is float or kind is int:
        return number(value)
    if kind is dict:
        return {key if type(key) is str else str(plain(key)): _plain(item, number) for key, item in value.items()}
    return _convert(value, number)


def _convert(value: Any, number: Callable[[float], Any]) -> Any:
    """What is none of the common types, but perhaps a subclass of one."""
    match value:
        case Enum():
            return _plain(value.value, number)
        case str():
            return value
        # A subclass, as numpy.float64 is one of float, would show its own name in every line.
        case int():
            return number(int(value))
        case float():
            return number(value)
        case Mapping():
            return {str(plain(key)): _plain(item, number) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, number) for item in value]
        case AbstractSet():
            return [_plain(item, number) for item in sorted(value, key=repr)]
        case date():
            return value.isoformat()
        case os.PathLike():
            return os.fspath(value)
        case BaseException():
            return f"{type(value).__name__}: {value}"
        case _:
            return _unpack(value, number)


def _unpack(value: Any, number: Callable[[float], Any]) -> Any:
    """What no pattern matched: dataclasses, tensors, arrays, and all that is left."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), number) for field in dataclasses.fields(value)}
    unpack = getattr(value, "tolist", None)
    unpacked = unpack() if callable(unpack) else None
    # Anything may claim to have the method; a mock has all of them.
    return _plain(unpacked, number) if isinstance(unpacked, bool | int | float | str | list) else str(value)
