"""A callback that keeps what it gets: `Recorder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from eventbus_engine._options import read_events, runs_on
from eventbus_engine.callback import OPTIONS, Callback
from eventbus_engine.testing.options import set_options

if TYPE_CHECKING:
    from eventbus_engine.event import EventName

__all__ = ["Record", "Recorder"]


class Record(NamedTuple):
    """One call: the event, the state (the very object), and what a recorder's `look` made of it then."""

    event: EventName
    state: Any
    seen: Any = None


class Recorder(Callback[Any]):
    """A callback that keeps a record of every event it gets.

    Args:
        *events: which to take: members, values or names; none means all.
        name: its name in spans and logs.
        look: makes of the state what a test wants to compare later, since the state itself goes on changing.
        **options: the options of `Callback`.

    Attributes:
        records: one for each event, in order.

    Raises:
        ConfigurationError: an option that callbacks do not have.
    """

    def __init__(
        self,
        *events: EventName | str,
        name: str | None = None,
        look: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self.records: list[Record] = []
        self._wanted = read_events(events, type(self).__name__)
        self._look = look
        self._arrived: list[anyio.Event] = []
        set_options(self, OPTIONS, {"name": name, **options})

    @property
    def events(self) -> list[EventName]:
        """The events, in order."""
        return [record.event for record in self.records]

    @property
    def names(self) -> list[str]:
        """Their values, in order: `["init", "fit_start"]`."""
        return [record.event.value for record in self.records]

    @property
    def seen(self) -> list[Any]:
        """What `look` made of the states, in order."""
        return [record.seen for record in self.records]

    def run_event(self, event: EventName, state: Any, logger: Any) -> Any:
        """Record the event."""
        if runs_on(self._wanted, event):
            self.records.append(Record(event, state, None if self._look is None else self._look(state)))
            for arrived in self._arrived:
                arrived.set()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.records.clear()

    async def wait_for(self, event: EventName | str, count: int = 1) -> Record:
        """Wait until an event has come, counting those that are recorded already.

        Args:
            event: a member, its value or its name.
            count: the how many-th to wait for, from 1.

        Returns:
            Its record.
        """
        wanted = read_events([event], "wait_for")
        while True:
            found = [record for record in self.records if runs_on(wanted, record.event)]
            if len(found) >= count:
                return found[count - 1]
            arrived = anyio.Event()
            self._arrived.append(arrived)
            try:
                await arrived.wait()
            finally:
                self._arrived.remove(arrived)
