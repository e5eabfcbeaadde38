"""Stand-ins for what plugs into an engine: `FakeCallback`, `FakeAlgorithm`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeAlias

from eventbus_engine._options import is_async_callable, read_events, runs_on
from eventbus_engine.algorithm import OPTIONS, Algorithm
from eventbus_engine.testing.options import set_options
from eventbus_engine.testing.recorder import Record, Recorder

if TYPE_CHECKING:
    from eventbus_engine.event import EventName

__all__ = ["FakeAlgorithm", "FakeCallback"]

Function: TypeAlias = Callable[[Any, Any, Any], Any]
"""`(event, state, logger) -> result`, plain or async."""

Match: TypeAlias = "bool | EventName | str | Collection[EventName | str] | Callable[[Any, Any], bool]"
"""When a fake algorithm runs: always or never, on these events, or where a plain `(event, state)` says so."""


class FakeCallback(Recorder):
    """A recorder that also does something, and counts how often it was opened and closed.

    Args:
        *events: which to take; none means all.
        name: its name.
        hook: what to do on each of them, plain or async.
        look: as for `Recorder`.
        **options: the options of `Callback`.

    Attributes:
        opened: how often `open` was called; `closed` and `post_closed` likewise.
    """

    def __init__(
        self,
        *events: EventName | str,
        name: str = "fake",
        hook: Function | None = None,
        look: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*events, name=name, look=look, **options)
        self.opened: int = 0
        self.closed: int = 0
        self.post_closed: int = 0
        # As an attribute: whether a hook is async is read off what is called.
        self.run_event: Any = self._call_async if is_async_callable(hook) else self._call
        self._hook = hook or _do_nothing

    def _call(self, event: EventName, state: Any, logger: Any) -> Any:
        Recorder.run_event(self, event, state, logger)
        return self._hook(event, state, logger) if runs_on(self._wanted, event) else None

    async def _call_async(self, event: EventName, state: Any, logger: Any) -> None:
        Recorder.run_event(self, event, state, logger)
        if runs_on(self._wanted, event):
            await self._hook(event, state, logger)

    def open(self, state: Any, logger: Any) -> None:
        """Count it."""
        self.opened += 1

    def close(self, state: Any, logger: Any) -> None:
        """Count it."""
        self.closed += 1

    def post_close(self) -> None:
        """Count it."""
        self.post_closed += 1


class FakeAlgorithm(Algorithm[Any, Any]):
    """An algorithm that does what it is told and records its calls.

    Args:
        name: its name in traces.
        match: when to run: True (default) for always, events, or a plain function `(event, state)`.
        apply: what to do, plain or async.
        exit_code: what to return, unless `apply` returns something itself.
        **options: the options of `Algorithm`: `run_before`, `pin`, `timeout` and so on.

    Attributes:
        records: one for each call, in order.

    Raises:
        ConfigurationError: an option that algorithms do not have.
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        match: Match = True,
        apply: Function | None = None,
        exit_code: int | None = None,
        **options: Any,
    ) -> None:
        self.records: list[Record] = []
        self.exit_code = exit_code
        self._match = match if isinstance(match, bool) or callable(match) else _wanted(match)
        self._apply = apply or _do_nothing
        # As an attribute: whether an algorithm is async is read off what is called.
        self.apply: Any = self._call_async if is_async_callable(apply) else self._call
        set_options(self, OPTIONS, {"name": name, **options})

    def match(self, event: EventName, state: Any, /) -> bool:
        """As `match` says."""
        if isinstance(self._match, bool):
            return self._match
        return self._match(event, state) if callable(self._match) else runs_on(self._match, event)

    def _call(self, event: EventName, state: Any, logger: Any) -> Any:
        self.records.append(Record(event, state))
        result = self._apply(event, state, logger)
        return self.exit_code if result is None else result

    async def _call_async(self, event: EventName, state: Any, logger: Any) -> Any:
        self.records.append(Record(event, state))
        result = await self._apply(event, state, logger)
        return self.exit_code if result is None else result


def _do_nothing(event: EventName, state: Any, logger: Any) -> Any:
    return None


def _wanted(match: str | Collection[str]) -> frozenset[str]:
    return read_events([match] if isinstance(match, str) else match, "match=") or frozenset({""})
