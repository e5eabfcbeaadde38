"""`composer.core.algorithm`: the base of algorithms, as Composer has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from eventbus_adapters.composer_api.core.serializable import NamedByClass, Serializable
from eventbus_engine.algorithm import Algorithm as OurAlgorithm
from eventbus_engine.event import Event

__all__ = ["Algorithm"]


class Algorithm(NamedByClass, OurAlgorithm[Any, Event], Serializable, ABC):
    """An algorithm with Composer's methods. `match` and `apply` have to be there, or it cannot be made.

    All the options of `eventbus_engine.Algorithm` hold: constraints, pins, an async `apply`. It goes by the name of its
    class, in traces as in constraints.

    Raises:
        TypeError: `match` or `apply` is missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def state_dict(self) -> dict[str, Any]:
        """How it was made, for the checkpoint."""
        return {"repr": repr(self)}

    @abstractmethod
    def match(self, event: Event, state: Any) -> bool:
        """Whether to run on this event, given the state."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, event: Event, state: Any, logger: Any) -> Any:
        """Change the state in place; what it returns is the `exit_code` of the trace. `def` or `async def`."""
        raise NotImplementedError
