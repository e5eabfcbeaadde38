"""Callbacks: what watches the run. They run after the algorithms, all at once."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, cast

from typing_extensions import TypeVar

from eventbus_engine._options import (
    MISSING,
    accepts,
    check_call,
    function_name,
    name_of,
    own_method,
    read_events,
    read_option,
    runs_on,
)
from eventbus_engine.errors import ConfigurationError, HandlerTypeError
from eventbus_engine.event import RESERVED_VALUES, EventName
from eventbus_engine.policy import Circuit, Retry

if TYPE_CHECKING:
    from eventbus_engine.spool import Spool

__all__ = [
    "Callback",
    "HookNameWarning",
    "background",
    "bind_hook",
    "callback",
    "check_callback",
    "empty",
    "has_lifetime",
]

StateT = TypeVar("StateT", default=Any)
EventT = TypeVar("EventT", bound=EventName, default=Any)
ResultT = TypeVar("ResultT", default=Any)
CallbackT = TypeVar("CallbackT")

Delivery: TypeAlias = Literal["inline", "background"]
OnError: TypeAlias = Literal["raise", "log", "quarantine"]
OnFull: TypeAlias = Literal["drop_oldest", "block", "coalesce"]


class HookNameWarning(UserWarning):
    """A callback has a method whose name nearly is an event's: it will never be called."""


class Callback(Generic[StateT]):
    """Something that watches the run: logging, timing, progress. It has one hook for each event it wants.

    A hook is a method named like the event's value, taking `(state, logger)`, `def` or `async def`:

        class Remote(Callback):
            async def batch_end(self, state, logger): ...

    Subclass it, or use `@callback`, or pass any object with such methods. Only the events whose hooks exist cost
    anything. Besides the hooks: `open(state, logger)` runs once, before the first event; `close(state, logger)` and
    then `post_close()` run when the engine closes. An `open` that fails is called again before the next event.

    With a method `send_records(records, logger)`, the hooks of a background callback return what there is to send
    (None for nothing), and `send_records` gets that of the events that wait, up to `max_batch` of them at once, each
    a frozen `Record` with its event, snapshot, time and id.

    Options, all class or instance attributes, or arguments of the constructor where the class has none of its own (one
    that has calls `super().__init__(**options)` to take them):

    * `name`: a string; the snake_case of the class by default.
    * `on_error`: `"raise"` (default: the event raises `CallbackErrors` once all callbacks are done), `"log"`, or
      `"quarantine"`: log, and drop the callback after `quarantine_after` failures in a row (default 3).
    * `timeout`: seconds an async hook may take, None for no limit.
    * `delivery`: `"inline"` (default: the event waits for the hook) or `"background"`: a bounded mailbox
      (`max_pending` events, default 1000; `on_full` = `"drop_oldest"`, `"block"` or `"coalesce"`) drained in order by
      a worker of its own, which hands the hook a frozen snapshot of the state: its time, its metrics, and copies of
      the attributes named in `snapshot`.
    * `coalesce_key`: `(event, snapshot) -> key`, a method or a function: which events `"coalesce"` takes for alike.
    * `max_batch`, `max_wait`: how many events go to `send_records` at once (default 100), and the seconds that a
      batch waits to fill up (default 0.0: what waits is sent).
    * `retry`: a `Retry`, for a background callback whose far side may be busy; None (default) for one attempt.
    * `circuit`: a `Circuit`, for a background callback whose far side may be down; None (default) for none.
    * `spool`: a path, or a `Spool`: a file for what `send_records` is to send, until it is sent, be it by the next
      process; None (default) for none.
    * `run_blocking`: whether its plain methods run on a thread of their own, for a client that blocks (default
      False).
    * `blocks_after`: seconds past which a hook that holds up the event loop is reported, once (default 0.1).
    * `every_rank`: whether a logger destination takes part on every rank of a job, not on rank 0 only (default False).

    Raises:
        HandlerTypeError: an argument that is no option.
    """

    name: str | None = None
    on_error: OnError = "raise"
    quarantine_after: int = 3
    timeout: float | None = None
    delivery: Delivery = "inline"
    max_pending: int = 1000
    on_full: OnFull = "drop_oldest"
    snapshot: tuple[str, ...] = ()
    max_batch: int | None = None
    max_wait: float = 0.0
    retry: Retry | None = None
    circuit: Circuit | None = None
    spool: str | PathLike[str] | Spool | None = None
    run_blocking: bool = False
    blocks_after: float = 0.1

    def __init__(self, **options: Any) -> None:
        super().__init__()
        _check_options(options, type(self).__name__)
        for option, value in options.items():
            setattr(self, option, value)

    def run_event(self, event: EventName, state: StateT, logger: Any, /) -> Any:
        """Call the hook of this event, if there is one. Override it to take every event in one place."""
        hook = getattr(self, event.value, None)
        return hook(state, logger) if callable(hook) else None

    def coalesce_key(self, event: EventName, state: StateT, /) -> Hashable:
        """Which events `on_full="coalesce"` takes for alike: those of one key. By default, those of one name."""
        return event

    def open(self, state: StateT, logger: Any, /) -> Any:
        """Acquire what the hooks need. Called once, before the first event. `def` or `async def`."""

    def close(self, state: StateT, logger: Any, /) -> Any:
        """Release it. Called once, when the engine closes; the logger still works. `def` or `async def`."""

    def post_close(self) -> Any:
        """Clean up after every callback has closed. Called only if `close` did not raise. `def` or `async def`."""


class FunctionCallback(Callback[StateT], Generic[StateT, EventT, ResultT]):
    """The callback that `@callback` makes of a function, which stays callable as it was."""

    def __init__(
        self, function: Callable[[EventT, StateT, Any], ResultT], events: frozenset[str], options: Mapping[str, Any]
    ) -> None:
        self.events: frozenset[str] = events
        self.run_event: Any = function
        self.__name__: str = function_name(function)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.name: str | None = self.__name__
        for option, value in options.items():
            setattr(self, option, value)

    def __call__(self, event: EventT, state: StateT, logger: Any) -> ResultT:
        """Call the function."""
        result: ResultT = self.run_event(event, state, logger)
        return result

    def __repr__(self) -> str:
        return f"<callback {self.name}>"


class _WithOptions:
    """Another callback under other options; its hooks, its lifetime and its class are the original's."""

    def __init__(self, wrapped: Any, options: Mapping[str, Any]) -> None:
        self.__wrapped__ = wrapped
        for option in OPTIONS:
            value = options.get(option, read_option(wrapped, option, MISSING))
            if value is not MISSING:
                setattr(self, option, value)
        self.name = options.get("name") or name_of(wrapped)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


OPTIONS = (
    "name",
    "on_error",
    "quarantine_after",
    "timeout",
    "delivery",
    "max_pending",
    "on_full",
    "snapshot",
    "coalesce_key",
    "max_batch",
    "max_wait",
    "retry",
    "circuit",
    "spool",
    "run_blocking",
    "blocks_after",
    "every_rank",
)


def _check_options(options: Mapping[str, Any], where: str) -> None:
    for option in options:
        if option not in OPTIONS:
            raise HandlerTypeError(f"{where} has no option {option!r}; it takes {', '.join(OPTIONS)}")


def callback(
    *events: EventName | str, **options: Any
) -> Callable[[Callable[[EventT, StateT, Any], ResultT]], FunctionCallback[StateT, EventT, ResultT]]:
    """Make a callback of a function `(event, state, logger)`, plain or async.

    Args:
        *events: when to run: members of a vocabulary, their values or their names; none means always.
        **options: the options of `Callback`, by name.

    Raises:
        HandlerTypeError: if the function cannot take three positional arguments, or an option is unknown.
    """
    _check_options(options, "@callback")
    wanted = read_events(events, "@callback")

    def decorate(function: Callable[[EventT, StateT, Any], ResultT]) -> FunctionCallback[StateT, EventT, ResultT]:
        if not callable(function):
            raise HandlerTypeError(f"@callback needs a function (event, state, logger), got {function!r}")
        check_call(function, "event, state, logger", f"@callback function {function_name(function)}")
        return FunctionCallback(function, wanted, options)

    return decorate


def background(callback: CallbackT, **options: Any) -> CallbackT:
    """The same callback delivered in the background, with other options, its class untouched.

    Args:
        callback: any callback.
        **options: the options of `Callback`, by name.

    Raises:
        HandlerTypeError: for an unknown option, or something that is no callback.
    """
    _check_options(options, "background()")
    check_callback(callback)
    return cast("CallbackT", _WithOptions(callback, {"delivery": "background", **options}))


def unwrap(candidate: Any) -> Any:
    """The object whose methods are called: the original behind `background(...)`."""
    while isinstance(candidate, _WithOptions):
        candidate = candidate.__wrapped__
    return candidate


def bind_hook(candidate: Any, event: EventName) -> tuple[Callable[..., Any], bool] | None:
    """What to call for this event, and whether with `(event, state, logger)` instead of `(state, logger)`.

    None where the callback does not care: an event without a hook has to cost nothing.
    """
    target = unwrap(candidate)
    if isinstance(target, FunctionCallback):
        return (target.run_event, True) if runs_on(target.events, event) else None
    takes_all = own_method(target, "run_event", Callback)
    if takes_all is not None:
        return takes_all, True
    hook = getattr(target, event.value, None)
    return (hook, False) if callable(hook) and getattr(hook, "empty", False) is not True else None


def empty(hook: CallbackT) -> CallbackT:
    """Declare that a hook does nothing: it is there for `super()`, and the engine need not call it."""
    hook.empty = True  # type: ignore[attr-defined]
    return hook


def overrides(candidate: Any, method: str) -> Callable[..., Any] | None:
    """The bound `open`, `close` or `post_close` of a callback, None where it is missing or the base's."""
    return own_method(unwrap(candidate), method, Callback)


def sender_of(candidate: Any) -> Callable[..., Any] | None:
    """The bound `send_records` of a callback, None where it has none. A Mock's is made up, and does not count."""
    target = unwrap(candidate)
    if inspect.getattr_static(target, "send_records", MISSING) is MISSING:
        return None
    bound: Callable[..., Any] = target.send_records
    return bound


def has_sender(candidate: Any) -> bool:
    """Whether a callback's hooks return what its `send_records` is to send."""
    return sender_of(candidate) is not None


def has_lifetime(candidate: Any) -> bool:
    """Whether the callback holds something between `open` and `close`, so that one engine at a time may use it."""
    return any(overrides(candidate, method) for method in ("open", "close", "post_close"))


def check_callback(candidate: Any) -> None:
    """Refuse what cannot run as a callback, before anything runs.

    Raises:
        HandlerTypeError: a class, a bare function, or plain data.
    """
    if isinstance(candidate, type):
        raise HandlerTypeError(
            f"{candidate.__name__} is a class, not a callback; pass an instance: {candidate.__name__}()"
        )
    if inspect.isroutine(candidate):
        raise HandlerTypeError(
            f"{candidate!r} is a function, not a callback; decorate it with @callback(...), or subscribe it to the bus"
        )
    if candidate is None or isinstance(candidate, str | bytes | int | float | list | tuple | dict | set):
        raise HandlerTypeError(f"{candidate!r} is no callback; pass an object with hooks named like events")


def refuse_twice(kind: str, participants: Sequence[Any]) -> None:
    """Refuse a participant that would be called twice.

    Raises:
        ConfigurationError: naming it.
    """
    targets = [unwrap(participant) for participant in participants]
    for i, participant in enumerate(participants):
        if any(targets[i] is other for other in targets[:i]):
            raise ConfigurationError(
                f"{kind} {name_of(participant)} is registered twice; register another instance of it"
            )


def check_hooks(candidate: Any, events: type[EventName]) -> None:
    """Check the hooks of a callback against a vocabulary: their signatures, and names that nearly match.

    Raises:
        HandlerTypeError: a hook that cannot take `(state, logger)`, or a `post_close` that needs arguments.
    """
    target = unwrap(candidate)
    name = name_of(candidate)
    for event in events:
        bound = bind_hook(target, event)
        if bound is not None:
            hook, takes_event = bound
            arguments = "event, state, logger" if takes_event else "state, logger"
            check_call(hook, arguments, f"{name}.{'run_event' if takes_event else event.value}")
    for method, arguments in (("open", "state, logger"), ("close", "state, logger"), ("post_close", "")):
        bound_method = overrides(target, method)
        if bound_method is not None:
            check_call(bound_method, arguments, f"{name}.{method}")
    sender = sender_of(target)
    if sender is not None:
        check_call(sender, "records, logger", f"{name}.send_records")
    for method, nearest in _near_misses(type(target), [event.value for event in events]):
        # Where the method is, not where this is called: that is what is to be changed.
        function = getattr(type(target), method)
        code = getattr(inspect.unwrap(function), "__code__", function.__code__)
        warnings.warn_explicit(
            f"{name}.{method} is no hook of {events.__name__}; did you mean {nearest}? "
            f"(a name with a leading underscore is never taken for a hook)",
            HookNameWarning,
            code.co_filename,
            code.co_firstlineno,
            function.__module__,
            function.__globals__.setdefault("__warningregistry__", {}),
        )


def _near_misses(cls: type, values: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Public methods that look like hooks but are none.

    A near miss shares all but a letter or two with an event, be it behind an `on_` as other libraries have it.
    """
    hooks = list(values)
    known = {*hooks, *RESERVED_VALUES, "load_state_dict"}
    for method in dir(cls):
        if method.startswith("_") or method in known:
            continue
        if not inspect.isfunction(inspect.getattr_static(cls, method, None)):
            continue
        for name in (method.lower(), method.lower().removeprefix("on_")):
            nearest = difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
            if nearest and accepts(getattr(cls, method), 3):
                yield method, nearest[0]
                break
