"""The names of `composer.core` and `composer.loggers` on this engine, without Composer: only the import changes.

`composer.core` becomes `eventbus_adapters.composer_api.core`, `composer.loggers` becomes
`eventbus_adapters.composer_api.loggers`; what `composer` itself exports of them is here. Composer is not imported.
`docs/adapters/composer.md` lists what is different, and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventbus_adapters.composer_api import core, loggers
from eventbus_adapters.composer_api.core import Algorithm, Callback, Engine, Event, Time, Timestamp, TimeUnit
from eventbus_adapters.composer_api.loggers import Logger

if TYPE_CHECKING:
    from eventbus_adapters.composer_api.core import State

__all__ = [
    "Algorithm",
    "Callback",
    "Engine",
    "Event",
    "Logger",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "core",
    "loggers",
]


def __getattr__(name: str) -> Any:
    """`State`, which needs torch, when it is first asked for."""
    if name == "State":
        return core.State
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
