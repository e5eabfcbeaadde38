"""`composer.core.callback`: the base of callbacks, with a hook for every event to call by `super()`."""

from __future__ import annotations

from typing import Any

from eventbus_adapters.composer_api.core.serializable import NamedByClass, Serializable
from eventbus_engine.callback import Callback as OurCallback
from eventbus_engine.callback import empty
from eventbus_engine.event import Event

__all__ = ["Callback"]


@empty
def _nothing(self: Any, state: Any, logger: Any) -> Any:
    """Do nothing on this event."""


class Callback(NamedByClass, OurCallback[Any], Serializable):
    """A callback with Composer's methods: override the hooks of the events that you want, or `run_event` for all.

    Every hook is there already, so that `super().batch_end(state, logger)` works; one that is not overridden costs
    nothing. Hooks may be async, and all the options of `eventbus_engine.Callback` hold, as attributes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


for _event in Event:
    setattr(Callback, _event.value, _nothing)
