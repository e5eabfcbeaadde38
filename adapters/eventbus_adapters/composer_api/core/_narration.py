"""ENGINE_DEBUG: the engine says on the log what it is about to run. It is told where spans are opened."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from opentelemetry.trace import Link, NoOpTracer

from eventbus_engine.telemetry.spans import Activity, ApiTracer, EngineTracer, Template, TracerSource

if TYPE_CHECKING:
    from eventbus_engine.engine import Engine
    from eventbus_engine.telemetry.meters import MeterSource

__all__ = ["Narration"]

_SILENT = ApiTracer(NoOpTracer())
"""Opens what comes to nothing, where nobody keeps spans."""


class Narration(TracerSource):
    """Where an engine gets its tracer from, with a narrator before it while ENGINE_DEBUG is set.

    Args:
        engine: whose state says how far the run is.
        log: where to say it.
    """

    __slots__ = ("_engine", "_log")

    def __init__(self, engine: Engine[Any], log: logging.Logger) -> None:
        super().__init__(None)
        self._engine = engine
        self._log = log

    def observer(self, meters: MeterSource) -> EngineTracer | None:
        """What opens spans, and says so if asked to."""
        tracer = super().observer(meters)
        return _Narrator(tracer, self._say) if os.environ.get("ENGINE_DEBUG") else tracer

    def _say(self, template: Template) -> None:
        event = str(template.attributes["eventbus.event"])
        state = self._engine.state
        counted = [("ep", "timestamp", "epoch"), ("ba", "timestamp", "batch")]
        if event.startswith(("eval", "predict")):
            kind = event.partition("_")[0]
            counted.append((f"{kind}_ba", f"{kind}_timestamp", "batch"))
        place = "".join(f"[{label}={int(getattr(getattr(state, clock), unit))}]" for label, clock, unit in counted)
        what = "event" if template.kind == "dispatch" else template.name
        self._log.debug("%s[event=%s]: Running %s", place, event.upper(), what)


class _Narrator(EngineTracer):
    """Says what is opened, and opens it."""

    __slots__ = ("_say", "_tracer")

    def __init__(self, tracer: EngineTracer | None, say: Callable[[Template], None]) -> None:
        self._tracer = tracer or _SILENT
        self._say = say

    def open(
        self, template: Template, *, order: int | None = None, links: Sequence[Link] = (), root: bool = False
    ) -> Activity:
        """Say it, and open it."""
        self._say(template)
        activity = self._tracer.open(template, order=order, links=links, root=root)
        return cast("Activity", _Narrated(activity, self._tracer, self._say))


class _Narrated:
    """An activity whose children are narrated too, whether they are recorded or not."""

    __slots__ = ("_activity", "_say", "_tracer")

    def __init__(self, activity: Activity, tracer: EngineTracer, say: Callable[[Template], None]) -> None:
        self._activity, self._tracer, self._say = activity, tracer, say

    def below(self, tracer: EngineTracer) -> EngineTracer:
        """The narrator, before what the children would be opened with."""
        return _Narrator(self._activity.below(self._tracer), self._say)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._activity, name)
