"""What a user's own tests need: a recorder, a check of the order, fakes of what plugs into an engine, a fake clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import anyio

from eventbus_engine._options import is_async_callable, name_of, read_events, read_option, runs_on, snake_case
from eventbus_engine.algorithm import OPTIONS as ALGORITHM_OPTIONS
from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import OPTIONS as CALLBACK_OPTIONS
from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from eventbus_engine.event import EventName
    from eventbus_engine.trace import Traces

__all__ = [
    "FakeAlgorithm",
    "FakeCallback",
    "FakeClock",
    "Record",
    "Recorder",
    "assert_order",
    "backend_options",
    "run_with_fake_clock",
]

T = TypeVar("T")

Function: TypeAlias = Callable[[Any, Any, Any], Any]
"""`(event, state, logger) -> result`, plain or async."""

Match: TypeAlias = "bool | EventName | str | Collection[EventName | str] | Callable[[Any, Any], bool]"
"""When a fake algorithm runs: always or never, on these events, or where a plain `(event, state)` says so."""


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
        _set_options(self, CALLBACK_OPTIONS, {"name": name, **options})

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
        _set_options(self, ALGORITHM_OPTIONS, {"name": name, **options})

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


def _set_options(participant: object, known: Collection[str], options: dict[str, Any]) -> None:
    for option, value in options.items():
        if option not in known:
            raise ConfigurationError(
                f"{type(participant).__name__} has no option {option!r}; it takes {', '.join(known)}"
            )
        setattr(participant, option, value)


def assert_order(traces: Traces, *algorithms: str | type[Any] | Algorithm[Any, Any]) -> None:
    """Check that these algorithms ran, one after another in this order. Others may have run in between.

    Args:
        traces: what `run_event` returned.
        *algorithms: names, classes, or the algorithms themselves, in the order expected.

    Raises:
        AssertionError: with the actual order, and why the others did not run.
    """
    __tracebackhide__ = True
    expected = [_trace_name(algorithm) for algorithm in algorithms]
    actual = [trace.name for trace in traces.values() if trace.run]
    rest = iter(actual)
    if not all(name in rest for name in expected):
        skipped = [f"{trace.name} ({trace.reason})" for trace in traces.values() if not trace.run]
        raise AssertionError(
            f"expected order: {', '.join(expected)}\n"
            f"  actual order: {', '.join(actual) or 'nothing ran'}\n"
            f"   did not run: {', '.join(skipped) or 'none'}"
        )


def _trace_name(algorithm: str | type[Any] | Algorithm[Any, Any]) -> str:
    if isinstance(algorithm, str):
        return algorithm
    if not isinstance(algorithm, type):
        return name_of(algorithm)
    name = read_option(algorithm, "name", None)
    return name if isinstance(name, str) else snake_case(algorithm.__name__)


class FakeClock(asyncio.SelectorEventLoop):
    """An asyncio event loop whose time stands still while there is something to do, and jumps to the next timer.

    So a test of timeouts and back-offs takes no time, and measures what it would have taken exactly. It starts at 0.
    Threads and sockets keep their own time: what waits for them and for a timer at once gets the timer.

    Example:
        >>> async def sleeper() -> float:
        ...     await anyio.sleep(3600)
        ...     return anyio.current_time()
        >>> anyio.run(sleeper, backend_options={"loop_factory": FakeClock})
        3600.0
    """

    def __init__(self) -> None:
        self._fake_time = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Seconds since the loop was made, all of them jumped over."""
        return self._fake_time

    def _jump(self, seconds: float) -> None:
        self._fake_time += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for sockets as others do, but lets a clock jump instead of waiting for a time."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._jump(timeout)
        return ready


def backend_options(backend: str) -> dict[str, Any]:
    """The options that give an anyio backend a clock that jumps.

    For `anyio.run(..., backend_options=...)`, or for anyio's pytest plugin:

        @pytest.fixture(params=["asyncio", "trio"])
        def anyio_backend(request):
            return request.param, backend_options(request.param)

    Args:
        backend: `"asyncio"` or `"trio"`.

    Raises:
        ConfigurationError: another one.
    """
    if backend == "asyncio":
        return {"loop_factory": FakeClock}
    if backend == "trio":
        from trio.testing import MockClock

        return {"clock": MockClock(autojump_threshold=0)}
    raise ConfigurationError(f"there is no fake clock for backend {backend!r}; use 'asyncio' or 'trio'")


def run_with_fake_clock(function: Callable[..., Awaitable[T]], *args: Any, backend: str = "asyncio") -> T:
    """Run an async function on an event loop of its own, with a clock that jumps.

    Args:
        function: the async function.
        *args: its positional arguments.
        backend: `"asyncio"` or `"trio"`.
    """
    options = backend_options(backend)
    if backend == "trio":
        import trio

        return trio.run(function, *args, **options)  # older versions of anyio forget the options of trio
    return anyio.run(function, *args, backend=backend, backend_options=options)
