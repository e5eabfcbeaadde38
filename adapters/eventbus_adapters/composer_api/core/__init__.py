"""`composer.core`: Engine, Event, State, Time, Timestamp, Algorithm, Callback, Trace and the passes.

Left out is what belongs to Composer's Trainer and its data: `DataSpec`, `Evaluator`, `Precision`, `MemoryFormat`,
`TrainerMode` and the helpers around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventbus_adapters.composer_api.core import passes
from eventbus_adapters.composer_api.core.algorithm import Algorithm
from eventbus_adapters.composer_api.core.callback import Callback
from eventbus_adapters.composer_api.core.engine import Engine, Trace, Traces
from eventbus_adapters.composer_api.core.event import Event
from eventbus_adapters.composer_api.core.passes import AlgorithmPass
from eventbus_adapters.composer_api.core.serializable import Serializable
from eventbus_adapters.composer_api.core.time import Time, Timestamp, TimeUnit, ensure_time

if TYPE_CHECKING:
    from eventbus_adapters.composer_api.core.state import State

__all__ = [
    "Algorithm",
    "AlgorithmPass",
    "Callback",
    "Engine",
    "Event",
    "Serializable",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "Traces",
    "ensure_time",
    "passes",
]


def __getattr__(name: str) -> Any:
    """`State`, which needs torch, when it is first asked for: the rest takes a fraction of the time."""
    if name == "State":
        from eventbus_adapters.composer_api.core.state import State

        return State
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
