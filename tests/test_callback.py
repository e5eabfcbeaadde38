"""Callbacks: their hooks, `@callback`, `background`, their options, and what is refused."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import anyio.lowlevel
import pytest

from eventbus_engine import (
    Callback,
    ConfigurationError,
    Engine,
    Event,
    EventName,
    HandlerTypeError,
    HookNameWarning,
    LoggerDestination,
    UnknownEventError,
    background,
    callback,
)
from eventbus_engine.callback import bind_hook, empty, has_lifetime, overrides, unwrap
from eventbus_engine.logger import is_destination

pytestmark = pytest.mark.anyio


class Ingest(EventName):
    BEFORE_WRITE = "before_write"
    AFTER_WRITE = "after_write"
    SNAPSHOT = "snapshot"


class Recording(Callback[Any]):
    def __init__(self, **options: Any) -> None:
        self.log: list[Any] = []
        for option, value in options.items():
            setattr(self, option, value)


# --------------------------------------------------------------------------------------------------------------- hooks


async def test_a_hook_is_a_method_named_like_the_event() -> None:
    """`def` or `async def`, called with state and logger, on its event alone."""

    class Two(Recording):
        def batch_start(self, state: Any, logger: Any) -> None:
            self.log.append(("batch_start", state, logger))

        async def batch_end(self, state: Any, logger: Any) -> None:
            await anyio.lowlevel.checkpoint()
            self.log.append(("batch_end", state, logger))

    two = Two()
    engine = Engine("the state", callbacks=[two])
    for event in Event:
        await engine.run_event(event)

    assert two.log == [("batch_start", "the state", engine.logger), ("batch_end", "the state", engine.logger)]


async def test_overriding_run_event_takes_every_event_in_one_place() -> None:
    """In a class, on an instance, and calling the base's for the hook."""

    class Every(Recording):
        def run_event(self, event: EventName, state: Any, logger: Any) -> Any:
            self.log.append(event)
            return super().run_event(event, state, logger)

        async def epoch_end(self, state: Any, logger: Any) -> None:
            self.log.append("hook")

    every, plain, one = Every(), Recording(), Mock()
    plain.run_event = one  # type: ignore[method-assign]
    engine = Engine(callbacks=[every, plain])
    for event in (Event.EPOCH_START, Event.EPOCH_END):
        await engine.run_event(event)

    assert every.log == [Event.EPOCH_START, Event.EPOCH_END, "hook"]
    assert [made.args[0] for made in one.call_args_list] == [Event.EPOCH_START, Event.EPOCH_END]


def test_the_bases_run_event_calls_the_hook_if_there_is_one() -> None:
    """An attribute of that name that cannot be called is no hook: `snapshot` is an option, not the event's."""

    class One(Recording):
        def before_write(self, state: Any, logger: Any) -> str:
            return f"{state} {logger}"

    assert One().run_event(Ingest.BEFORE_WRITE, "state", "logger") == "state logger"
    assert One().run_event(Ingest.AFTER_WRITE, "state", "logger") is None
    assert One().run_event(Ingest.SNAPSHOT, "state", "logger") is None


def test_a_hook_that_is_declared_empty_is_there_to_call_and_not_bound() -> None:
    """A base may offer hooks for `super()`, and they cost nothing."""

    class Base:
        @empty
        def before_write(self, state: Any, logger: Any) -> str:
            return "nothing"

        def after_write(self, state: Any, logger: Any) -> None: ...

    assert Base().before_write(None, None) == "nothing"
    assert [bool(bind_hook(Base(), event)) for event in (Ingest.BEFORE_WRITE, Ingest.AFTER_WRITE)] == [False, True]


def test_rule_4_8_a_callback_that_does_not_override_an_event_is_not_there() -> None:
    """No hook is bound, so that nothing can be called."""

    class One(Recording):
        def epoch_end(self, state: Any, logger: Any) -> None: ...

    bound = {event: bind_hook(One(), event) for event in Event}

    assert {event for event, hook in bound.items() if hook is not None} == {Event.EPOCH_END}
    assert all(bind_hook(Callback(), event) is None for event in Event)


async def test_a_mock_is_a_callback() -> None:
    """Its `run_event` is called on every event, and none of its made-up attributes is taken for an option."""
    mock, magic, spec = Mock(), MagicMock(), Mock(spec=Callback)
    engine = Engine("the state", callbacks=[mock, magic, spec])
    for event in (Event.INIT, Event.FIT_START):
        await engine.run_event(event)

    expected = [call(event, "the state", engine.logger) for event in (Event.INIT, Event.FIT_START)]
    assert mock.run_event.call_args_list == expected
    assert magic.run_event.call_args_list == expected
    assert spec.run_event.call_args_list == expected
    assert (await engine.close()).closed == ["mock", "magic_mock", "mock#2"]


async def test_anything_with_a_hook_is_a_callback() -> None:
    """No base class needed: a class, a namespace."""
    log: list[str] = []

    class Shaped:
        async def init(self, state: Any, logger: Any) -> None:
            log.append("shaped")

    await Engine(callbacks=[Shaped(), SimpleNamespace(init=lambda state, logger: log.append("space"))]).run_event(
        "init"
    )

    assert log == ["shaped", "space"]


async def test_a_vocabulary_of_ones_own_has_its_own_hooks() -> None:
    """The events of training mean nothing to it, nor do its own to another's engine."""

    class Audit(Recording):
        async def before_write(self, record: Any, logger: Any) -> None:
            self.log.append(record)

        def init(self, state: Any, logger: Any) -> None:
            self.log.append("never")

    audit = Audit()
    await Engine(events=Ingest, callbacks=[audit]).run_event(Ingest.BEFORE_WRITE, "row")

    assert audit.log == ["row"]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Recording, "Recording is a class, not a callback; pass an instance: Recording()"),
        (print, "<built-in function print> is a function, not a callback; decorate it with @callback(...), or"),
        (None, "None is no callback; pass an object with hooks named like events"),
        ("audit", "'audit' is no callback; pass an object with hooks named like events"),
        ([Recording()], "[<"),
    ],
)
def test_what_is_no_callback_is_refused_at_registration(given: Any, message: str) -> None:
    """With the way out."""
    with pytest.raises(HandlerTypeError) as caught:
        Engine(callbacks=[given])

    assert str(caught.value).startswith(message)


def test_an_object_without_any_hook_is_refused_unless_it_derives_from_callback() -> None:
    """An algorithm among the callbacks would silently do nothing."""

    class NoHook:
        def apply(self, event: Any, state: Any, logger: Any) -> None: ...

    with pytest.raises(HandlerTypeError) as caught:
        Engine(callbacks=[NoHook()])
    Engine(
        callbacks=[Callback(), SimpleNamespace(log_metrics=print), SimpleNamespace(close=lambda state, logger: None)]
    )

    assert "is no callback: it has no hook for any event of Event; name its methods like events" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "function", "message"),
    [
        ("batch_end", lambda self, state: None, "c.batch_end has to take (state, logger)"),
        ("batch_end", lambda self, event, state, logger: None, "c.batch_end has to take (state, logger)"),
        ("run_event", lambda self, state, logger: None, "c.run_event has to take (event, state, logger)"),
        ("open", lambda self: None, "c.open has to take (state, logger)"),
        ("close", lambda self: None, "c.close has to take (state, logger)"),
        ("post_close", lambda self, state, logger: None, "c.post_close has to take ()"),
    ],
)
def test_a_hook_with_the_wrong_signature_is_refused_at_registration(
    method: str, function: Callable[..., Any], message: str
) -> None:
    """Not on the first event, hours later."""
    cls = type("C", (Recording,), {method: function})

    with pytest.raises(HandlerTypeError) as caught:
        Engine(callbacks=[cls()])

    assert str(caught.value) == message


def test_a_hook_that_is_a_generator_is_refused() -> None:
    """It would be called, and nothing of it would run."""

    class C(Recording):
        def batch_end(self, state: Any, logger: Any) -> Any:
            yield

    with pytest.raises(HandlerTypeError, match=r"c\.batch_end is a generator"):
        Engine(callbacks=[C()])


@pytest.mark.parametrize(
    ("method", "nearest"),
    [
        ("batch_ends", "batch_end"),
        ("epoch_strat", "epoch_start"),
        ("on_batch_end", "batch_end"),
        ("on_init", "init"),
        ("on_fit_end", "fit_end"),
        ("on_epoch_strat", "epoch_start"),
        ("BATCH_END", "batch_end"),
        ("befor_loss", "before_loss"),
        ("eval_batch_ended", "eval_batch_end"),
    ],
)
def test_rule_4_8_a_hook_name_that_nearly_matches_warns(method: str, nearest: str) -> None:
    """A hook that is misspelt would silently never run."""
    cls = type("C", (Recording,), {method: lambda self, state, logger: None})

    with pytest.warns(HookNameWarning) as caught:
        Engine(callbacks=[cls()])

    (warning,) = caught
    assert str(warning.message) == (
        f"c.{method} is no hook of Event; did you mean {nearest}? "
        f"(a name with a leading underscore is never taken for a hook)"
    )


def test_rule_4_8_the_warning_points_at_the_method_and_comes_once() -> None:
    """Which is what has to be renamed, wherever it was registered."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count(*arguments: Any) -> Any: ...

        return count

    class C(Recording):
        @counted
        def batch_ends(self, state: Any, logger: Any) -> None: ...

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        Engine(callbacks=[C()])
        Engine(callbacks=[C()])

    (warning,) = caught
    lines, first = inspect.getsourcelines(C)
    assert warning.filename == __file__
    assert "@counted" in lines[warning.lineno - first]


def test_rule_4_8_a_name_that_only_sounds_alike_does_not_warn() -> None:
    """Helpers with other arguments, private ones, static ones, data, the methods every callback has, real hooks."""

    class C(LoggerDestination):
        batch_starts = 3

        def batch_ends(self) -> None: ...

        def _batch_ends(self, state: Any, logger: Any) -> None: ...

        @staticmethod
        def epoch_ends(a: Any, b: Any, c: Any) -> None: ...

        def batch_end(self, state: Any, logger: Any) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

        def describe(self, a: Any, b: Any) -> None: ...

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Engine(callbacks=[C()])

    assert caught == []


def test_rule_4_8_the_names_are_those_of_the_engines_vocabulary() -> None:
    """A near miss in one is nothing in another."""
    cls = type("C", (Recording,), {"before_writes": lambda self, state, logger: None})

    with pytest.warns(HookNameWarning, match=r"c\.before_writes is no hook of Ingest; did you mean before_write\?"):
        Engine(callbacks=[cls()], events=Ingest)
    Engine(callbacks=[cls()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "callback recording has on_error='ignore'; use 'raise' or 'log' or 'quarantine'"),
        ({"quarantine_after": 0}, "callback recording has quarantine_after=0; give a number of failures, 1 or more"),
        ({"timeout": -1}, "callback recording has timeout=-1; give seconds as a positive number, or None"),
        ({"delivery": "later"}, "callback recording has delivery='later'; use 'inline' or 'background'"),
        ({"on_full": "drop"}, "callback recording has on_full='drop'; use 'drop_oldest' or 'block' or 'coalesce'"),
        ({"max_pending": 0}, "callback recording has max_pending=0; give a number of events, 1 or more"),
        ({"snapshot": "loss"}, "callback recording has snapshot='loss'; give a tuple of names of attributes, as in"),
    ],
)
def test_a_bad_option_is_refused_at_registration(options: dict[str, Any], message: str) -> None:
    """By the name of the callback, with the value and what would do."""
    with pytest.raises(ConfigurationError) as caught:
        Engine(callbacks=[Recording(**options)])

    assert str(caught.value).startswith(message)


def test_a_callback_given_twice_is_refused_in_whatever_wrapping() -> None:
    """It would be opened twice, and called twice."""
    one = Recording()
    for given in ([one, one], [one, background(one)]):
        with pytest.raises(ConfigurationError, match="callback recording is registered twice; register another"):
            Engine(callbacks=given)


async def test_callbacks_that_come_and_go_keep_names_of_their_own() -> None:
    """Who stays keeps its name, and who comes gets one that is free."""

    class Other(Recording): ...

    first, second, third = Recording(), Recording(), Recording()
    state = SimpleNamespace(callbacks=[first, second])
    engine = Engine(state)
    await engine.run_event(Event.INIT)
    state.callbacks[:] = [second, third, Other()]
    await engine.run_event(Event.FIT_START)

    assert set((await engine.close()).closed) == {"recording", "recording#2", "recording#3", "other"}


# ------------------------------------------------------------------------------------------------------- the decorator


async def test_a_decorated_function_is_called_on_its_events_alone() -> None:
    """With event, state and logger, plain or async; no event stands for all."""
    log: list[tuple[str, EventName]] = []

    @callback(Event.BATCH_END, "EPOCH_END")
    async def some(event: EventName, state: Any, logger: Any) -> None:
        log.append(("some", event))

    @callback()
    def every(event: EventName, state: Any, logger: Any) -> None:
        log.append(("every", event))

    engine = Engine(callbacks=[some, every])
    for event in (Event.BATCH_START, Event.BATCH_END, Event.EPOCH_END):
        await engine.run_event(event)

    assert log == [
        ("every", Event.BATCH_START),
        ("some", Event.BATCH_END),
        ("every", Event.BATCH_END),
        ("some", Event.EPOCH_END),
        ("every", Event.EPOCH_END),
    ]


def test_a_decorated_function_stays_what_it_was() -> None:
    """Callable, with its name, its documentation and its options."""

    @callback("batch_end", on_error="log", timeout=2)
    async def audit(event: EventName, state: Any, logger: Any) -> None:
        """Write it down."""

    @callback()
    def double(event: EventName, state: int, logger: Any) -> int:
        return 2 * state

    assert double(Event.INIT, 4, None) == 8
    assert (audit.__name__, audit.name, audit.__doc__, repr(audit)) == (
        "audit",
        "audit",
        "Write it down.",
        "<callback audit>",
    )
    assert (audit.on_error, audit.timeout) == ("log", 2)


def test_misuse_of_the_decorator_is_refused_where_it_happens() -> None:
    """Without its parentheses, with an unknown option, over what cannot take an event, a state and a logger."""

    def function(event: EventName, state: Any, logger: Any) -> None: ...

    def hook(state: Any, logger: Any) -> None: ...

    decorator: Any = callback
    misuses: list[tuple[Any, str]] = [
        (lambda: decorator(function), "@callback takes events, not <function"),
        (lambda: decorator(pin="first"), "@callback has no option 'pin'; it takes name, on_error, quarantine_after"),
        (lambda: decorator()(3), "@callback needs a function (event, state, logger), got 3"),
        (lambda: decorator()(hook), "@callback function hook has to take (event, state, logger)"),
    ]
    for misuse, message in misuses:
        with pytest.raises(HandlerTypeError) as caught:
            misuse()
        assert str(caught.value).startswith(message)
    with pytest.raises(UnknownEventError, match="'batchend' is no event of Event; did you mean BATCH_END"):
        Engine(callbacks=[callback("batchend")(function)])


# ---------------------------------------------------------------------------------------------------------- background


def test_background_is_the_same_callback_with_other_options() -> None:
    """Its class, its options and its attributes are the original's; the original is not touched."""

    class Remote(Recording):
        snapshot = ("loss",)
        max_pending = 5

        async def batch_end(self, state: Any, logger: Any) -> None:
            self.log.append(state)

        def close(self, state: Any, logger: Any) -> str:
            return "closed"

    remote = Remote(on_error="quarantine")
    wrapped = background(remote, max_pending=7, on_full="block")

    assert isinstance(wrapped, Remote)
    assert wrapped.log is remote.log
    assert wrapped.close(None, None) == "closed"
    assert (wrapped.delivery, wrapped.max_pending, wrapped.on_full) == ("background", 7, "block")
    assert (wrapped.snapshot, wrapped.on_error, wrapped.name) == (("loss",), "quarantine", "remote")
    assert (remote.delivery, remote.max_pending, remote.on_full, remote.name) == ("inline", 5, "drop_oldest", None)
    assert (Remote.delivery, Remote.max_pending) == ("inline", 5)
    assert repr(wrapped) == repr(remote)
    assert unwrap(background(wrapped)) is remote
    assert background(wrapped, name="other").name == "other"
    assert background(wrapped).max_pending == 7


def test_background_binds_the_hooks_of_the_original() -> None:
    """And knows its lifetime, and whether it is a destination."""

    class Remote(LoggerDestination):
        def batch_end(self, state: Any, logger: Any) -> None: ...

        def open(self, state: Any, logger: Any) -> None: ...

    remote = Remote()
    wrapped = background(remote)
    hook = bind_hook(wrapped, Event.BATCH_END)

    assert hook == (remote.batch_end, False)
    assert overrides(wrapped, "open") == remote.open
    assert has_lifetime(wrapped)
    assert not has_lifetime(background(Recording()))
    assert is_destination(wrapped)
    assert wrapped.on_error == "log"


def test_background_sets_no_option_that_nobody_gave() -> None:
    """A destination of no base class still only logs its failures, a Mock still has no options."""

    class Shaped:
        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        def batch_end(self, state: Any, logger: Any) -> None: ...

    assert vars(background(Shaped())).keys() == {"__wrapped__", "delivery", "name"}
    assert vars(background(Mock())).keys() == {"__wrapped__", "delivery", "name"}


def test_background_copies_and_misses_attributes_like_any_object() -> None:
    """A wrapper that answers for another object must not run in circles when it is empty."""
    wrapped = background(Recording())

    with pytest.raises(AttributeError, match="no_such_thing"):
        wrapped.no_such_thing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        wrapped.__no_such_thing__  # type: ignore[attr-defined]  # noqa: B018
    assert copy.copy(wrapped).log is wrapped.log


def test_background_refuses_what_is_no_callback_and_unknown_options() -> None:
    """Where it happens."""
    with pytest.raises(HandlerTypeError, match=r"background\(\) has no option 'mailbox'; it takes name, on_error"):
        background(Recording(), mailbox=3)
    with pytest.raises(HandlerTypeError, match="Recording is a class, not a callback"):
        background(Recording)


# ------------------------------------------------------------------------------------------------------------ lifetime


async def test_open_runs_once_before_the_first_event_of_any_vocabulary() -> None:
    """Then the hooks; close and post_close when the engine closes."""

    class Held(Recording):
        async def open(self, record: Any, logger: Any) -> None:
            self.log.append(f"open {record}")

        def before_write(self, record: Any, logger: Any) -> None:
            self.log.append(f"write {record}")

        def close(self, record: Any, logger: Any) -> None:
            self.log.append("close")

        async def post_close(self) -> None:
            self.log.append("post_close")

    held = Held()
    async with Engine(events=Ingest, callbacks=[held]) as engine:
        assert held.log == []
        await engine.run_event(Ingest.AFTER_WRITE, "a")
        await engine.run_event(Ingest.BEFORE_WRITE, "b")

    assert held.log == ["open a", "write b", "close", "post_close"]


def test_the_bases_lifetime_does_nothing() -> None:
    """It is there to be overridden, and is never called by the engine."""
    base = Callback[Any]()

    assert (base.open(None, None), base.close(None, None), base.post_close()) == (None, None, None)
    assert not has_lifetime(base)
