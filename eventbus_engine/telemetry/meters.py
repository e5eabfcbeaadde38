"""Who is measured, and by whom: the seam between an engine and its metrics, free while nobody asked for any.

The API for metrics is not imported here. Who wants metrics has imported it; an engine looks whether it is there.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

    from eventbus_engine.engine import Engine
    from eventbus_engine.telemetry.metrics import EngineMetrics
    from eventbus_engine.telemetry.spans import EngineTracer

__all__ = ["CONFIGURED", "MeterSource", "global_meter_provider"]

_LOOK_EVERY = 32
"""Events between two looks for a global provider: the API takes most of a microsecond to say that there is none."""


class _Configured:
    """What `telemetry.configure` has set up, while it is."""

    __slots__ = ("metrics",)

    def __init__(self) -> None:
        self.metrics: EngineMetrics | None = None


CONFIGURED = _Configured()


class MeterSource:
    """Where an engine's metrics go: to its own provider, or to the global one once there is one.

    Args:
        engine: the engine.
        provider: a provider of the engine's own; None follows the global one.

    Attributes:
        found: the provider's own metrics, None while there is no provider.
        look_in: events until it looks for a global provider again; 0 once it has found one.
    """

    __slots__ = ("_engine", "_inner", "_metrics", "_timer", "found", "look_in")

    def __init__(self, engine: Engine[Any], provider: MeterProvider | None) -> None:
        self._engine = weakref.ref(engine)
        # An engine's own, or the global one's; for good, as the API lets that be set once.
        self.found: EngineMetrics | None = _metrics_of(provider) if provider is not None else None
        self.look_in: int = 0
        self._metrics: EngineMetrics | None = None
        self._inner: EngineTracer | None = None
        self._timer: EngineTracer | None = None

    def around(self, tracer: EngineTracer | None) -> EngineTracer | None:
        """What opens spans with this tracer and measures them; the tracer itself while nobody asked for metrics."""
        metrics = self.found or CONFIGURED.metrics
        if metrics is None and (metrics := self._look()) is None:
            return tracer
        if metrics is not self._metrics or tracer is not self._inner:
            self._switch(metrics, tracer)
        return self._timer

    def _look(self) -> EngineMetrics | None:
        if self.look_in:
            self.look_in -= 1
            return None
        provider = global_meter_provider()
        if provider is None:
            self.look_in = _LOOK_EVERY
        else:
            self.found = _metrics_of(provider)
        return self.found

    def _switch(self, metrics: EngineMetrics, tracer: EngineTracer | None) -> None:
        engine = self._engine()
        assert engine is not None  # noqa: S101 -- it is running an event
        self._timer = metrics.timer(engine, tracer)
        self._metrics, self._inner = metrics, tracer

    def settle(self) -> None:
        """The engine has been closed: note what it has lost."""
        engine = self._engine()
        if self._metrics is not None and engine is not None:
            self._metrics.queues.settle(engine)


def _metrics_of(provider: MeterProvider) -> EngineMetrics:
    from eventbus_engine.telemetry.metrics import metrics_of

    return metrics_of(provider)


def global_meter_provider() -> MeterProvider | None:
    """The global provider; None while there is none."""
    api = sys.modules.get("opentelemetry.metrics")
    if api is None:
        return None
    provider: MeterProvider = api.get_meter_provider()
    # What the API returns while none is set is its own, and has no public name.
    return None if type(provider).__module__.startswith("opentelemetry.metrics.") else provider
