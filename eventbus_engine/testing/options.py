"""Options given to a stand-in, checked: a typo in a test would pass unnoticed otherwise."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from eventbus_engine.errors import ConfigurationError

__all__ = ["set_options"]


def set_options(participant: object, known: Collection[str], options: dict[str, Any]) -> None:
    """Give a participant its options, as attributes.

    Raises:
        ConfigurationError: one that is not among the known.
    """
    for option, value in options.items():
        if option not in known:
            raise ConfigurationError(
                f"{type(participant).__name__} has no option {option!r}; it takes {', '.join(known)}"
            )
        setattr(participant, option, value)
