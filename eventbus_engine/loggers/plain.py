"""Log values as plain Python, taken out of tensors and arrays without knowing their libraries: `plain`, `jsonable`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
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
    match value:
        case Enum():
            return plain(value.value)
        case None | bool() | str():
            return value
        # A subclass, as numpy.float64 is one of float, would show its own name in every line.
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {str(plain(key)): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case AbstractSet():
            return [plain(item) for item in sorted(value, key=repr)]
        case date():
            return value.isoformat()
        case os.PathLike():
            return os.fspath(value)
        case BaseException():
            return f"{type(value).__name__}: {value}"
        case _:
            return _unpack(value)


def jsonable(value: Any) -> Any:
    """The plain value, with the strings "NaN", "Infinity" and "-Infinity" for the floats that JSON lacks."""
    return _without_constants(plain(value))


def _without_constants(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_constants(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_constants(item) for item in value]
    return value


def _unpack(value: Any) -> Any:
    """What no pattern matched: dataclasses, tensors, arrays, and all that is left."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    unpack = getattr(value, "tolist", None)
    unpacked = unpack() if callable(unpack) else None
    # Anything may claim to have the method; a mock has all of them.
    return plain(unpacked) if isinstance(unpacked, bool | int | float | str | list) else str(value)
