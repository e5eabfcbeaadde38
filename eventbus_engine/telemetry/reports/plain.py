"""Attribute values in the JSON of other formats."""

from __future__ import annotations

import base64
import math
from typing import Any

__all__ = ["SAFE_INTEGERS", "plain"]

SAFE_INTEGERS = range(-(2**53) + 1, 2**53)
"""The integers a JavaScript program reads back as they are; both of the viewers are such programs."""


def plain(value: Any) -> Any:
    """The value as `json.dumps` takes it: bytes in base64, and as text the numbers that JSON or JavaScript lack."""
    match value:
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case float() if not math.isfinite(value):
            return str(value)
        case bool():
            return value
        case int() if value not in SAFE_INTEGERS:
            return str(value)
        case list():
            return [plain(item) for item in value]
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case _:
            return value
