"""Reading options, hooks and names off objects that are not ours."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest

from eventbus_engine import Algorithm, Callback, ConfigurationError, Event, HandlerTypeError
from eventbus_engine._options import (
    accepts,
    check_call,
    free_name,
    function_name,
    is_async_callable,
    name_of,
    own_method,
    read_choice,
    read_events,
    read_option,
    read_timeout,
    runs_on,
    snake_case,
    unique_names,
)


class Slotted:
    __slots__ = ("pin",)

    def __init__(self) -> None:
        self.pin = "last"


class Computed:
    @property
    def timeout(self) -> float:
        return 2.5


async def coroutine_function(*arguments: object) -> None:
    """Suspends never."""


def plain_function(*arguments: object) -> None:
    """Does nothing."""


class AsyncCallable:
    async def __call__(self) -> None: ...

    async def method(self) -> None: ...


class PlainCallable:
    def __call__(self) -> None: ...


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("mock", [Mock(), MagicMock(), AsyncMock(), Mock(spec=Algorithm), MagicMock(spec=Callback)])
@pytest.mark.parametrize("option", ["pin", "timeout", "run_before", "on_error", "name", "interpolate_loss"])
def test_a_mocks_made_up_attributes_are_no_options(mock: Mock, option: str) -> None:
    """A Mock has every attribute it is asked for; none of them was set by anybody."""
    assert read_option(mock, option, "default") == "default"


def test_an_option_that_was_set_on_a_mock_counts() -> None:
    """Set by attribute or by constructor."""
    mock = Mock(pin="first")
    mock.timeout = 3.0

    assert (read_option(mock, "pin", None), read_option(mock, "timeout", None)) == ("first", 3.0)


def test_an_option_counts_wherever_it_really_is() -> None:
    """In the instance, its slots, its class, a base of that, or behind a property."""
    assert read_option(Slotted(), "pin", None) == "last"
    assert read_option(SimpleNamespace(pin="first"), "pin", None) == "first"
    assert read_option(Computed(), "timeout", None) == 2.5
    assert read_option(Algorithm(), "run_before", None) == ()
    assert read_option(object(), "pin", "default") == "default"


@pytest.mark.parametrize("seconds", [None, 1, 0.25, math.inf])
def test_a_timeout_is_a_positive_number_of_seconds(seconds: float | None) -> None:
    """Or None, for no limit."""
    assert read_timeout(SimpleNamespace(timeout=seconds), "algorithm x") == seconds


@pytest.mark.parametrize("seconds", [0, -1, math.nan, True, "1"])
def test_a_bad_timeout_is_refused_by_its_owners_name(seconds: object) -> None:
    """The message names the offender, the value and what would do."""
    with pytest.raises(ConfigurationError) as caught:
        read_timeout(SimpleNamespace(timeout=seconds), "algorithm x")

    assert str(caught.value) == f"algorithm x has timeout={seconds!r}; give seconds as a positive number, or None"


def test_a_choice_outside_its_set_is_refused_with_the_set() -> None:
    """The first of the choices is the default."""
    choices = ("raise", "log", "quarantine")

    assert read_choice(object(), "on_error", choices, "callback x") == "raise"
    assert read_choice(SimpleNamespace(on_error="log"), "on_error", choices, "callback x") == "log"
    with pytest.raises(ConfigurationError) as caught:
        read_choice(SimpleNamespace(on_error="ignore"), "on_error", choices, "callback x")
    assert str(caught.value) == "callback x has on_error='ignore'; use 'raise' or 'log' or 'quarantine'"


# -------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (coroutine_function, True),
        (functools.partial(functools.partial(coroutine_function, 1), 2), True),
        (AsyncCallable(), True),
        (functools.partial(AsyncCallable()), True),
        (AsyncCallable().method, True),
        (AsyncCallable().__call__, True),
        (plain_function, False),
        (functools.partial(plain_function), False),
        (PlainCallable(), False),
        (PlainCallable().__call__, False),
        (Mock(), False),
        (len, False),
    ],
)
def test_an_async_callable_is_told_from_a_plain_one(function: Any, expected: bool) -> None:
    """Through partials, methods, and objects whose `__call__` is a coroutine function."""
    assert is_async_callable(function) is expected


def test_a_method_of_ones_own_is_told_from_the_base_classs() -> None:
    """In a subclass, on an instance, on an object without that base, on a Mock; and not where it is missing."""

    class Overriding(Callback[Any]):
        def close(self, state: Any, logger: Any) -> None: ...

    class Foreign:
        close = 3

        def open(self, state: Any, logger: Any) -> None: ...

    on_instance: Any = Callback()
    on_instance.close = plain_function
    mock = Mock()

    assert own_method(Callback(), "close", Callback) is None
    assert own_method(Overriding(), "open", Callback) is None
    assert own_method(Foreign(), "close", Callback) is None
    assert own_method(Foreign(), "post_close", Callback) is None
    assert own_method(Overriding(), "close", Callback) is not None
    assert own_method(Foreign(), "open", Callback) is not None
    assert own_method(on_instance, "close", Callback) is plain_function
    assert own_method(mock, "close", Callback) is mock.close


@pytest.mark.parametrize(
    ("function", "count", "expected"),
    [
        (lambda a, b: None, 2, True),
        (lambda a, b: None, 3, False),
        (lambda a, b, c=1: None, 2, True),
        (lambda *a: None, 9, True),
        (lambda a, *, b: None, 1, False),
        (Mock(), 3, True),
        (dict.get, 2, True),
        (3, 1, True),  # no signature can be read: let the call itself tell
        (type, 1, True),
    ],
)
def test_what_can_be_called_with_so_many_arguments(function: Any, count: int, expected: bool) -> None:
    """Judged by the signature; where there is none to read, with trust."""
    assert accepts(function, count) is expected


def test_a_call_that_could_not_work_is_refused_with_the_arguments_it_would_get() -> None:
    """Other arguments, or a generator, whose call runs nothing."""

    def generator(state: Any, logger: Any) -> Any:
        yield

    async def async_generator(state: Any, logger: Any) -> Any:
        yield

    check_call(lambda state, logger: None, "state, logger", "x.batch_end")
    check_call(lambda: None, "", "x.post_close")
    refused: list[tuple[Any, str, str]] = [
        (lambda state: None, "state, logger", "x.hook has to take (state, logger)"),
        (lambda state: None, "", "x.hook has to take ()"),
        (generator, "state, logger", "x.hook is a generator, so that calling it would run nothing; take out its yield"),
        (async_generator, "state, logger", "x.hook is a generator, so that calling it would run nothing"),
    ]
    for function, arguments, message in refused:
        with pytest.raises(HandlerTypeError) as caught:
            check_call(function, arguments, "x.hook")
        assert str(caught.value).startswith(message)


def test_the_events_of_a_decorator_are_members_values_or_names() -> None:
    """No events stand for all of them; whatever is no string is refused."""
    given = read_events((Event.INIT, "epoch_end", "BATCH_END"), "@algorithm")

    actual = {event for event in Event if runs_on(given, event)}

    assert actual == {Event.INIT, Event.EPOCH_END, Event.BATCH_END}
    assert all(runs_on(read_events((), "@algorithm"), event) for event in Event)
    with pytest.raises(HandlerTypeError) as caught:
        read_events((Event.INIT, len), "@algorithm")
    assert str(caught.value) == (
        "@algorithm takes events, not <built-in function len>; write @algorithm() over a function that runs on all "
        "of them"
    )


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LayerFreezing", "layer_freezing"),
        ("HTTPLogger", "http_logger"),
        ("EMA", "ema"),
        ("MixUp", "mix_up"),
        ("GPT2Logger", "gpt2_logger"),
        ("Sam2D", "sam2_d"),
        ("already_snake", "already_snake"),
        ("_Private", "_private"),
    ],
)
def test_a_class_name_becomes_snake_case(name: str, expected: str) -> None:
    """Words begin at a capital after a small letter or digit, and at the last capital of an acronym."""
    assert snake_case(name) == expected


def test_the_name_is_the_option_where_that_is_a_string_else_the_class() -> None:
    """A Mock has no name of its own unless somebody set one."""
    named = Mock()
    named.name = "double"

    assert name_of(SimpleNamespace(name="given")) == "given"
    assert name_of(SimpleNamespace(name="")) == "simple_namespace"
    assert name_of(SimpleNamespace(name=3)) == "simple_namespace"
    assert name_of(Mock()) == "mock"
    assert name_of(named) == "double"


def test_names_are_made_unique_by_counting() -> None:
    """In registration order; a name that looks counted already is not given twice."""
    participants = [SimpleNamespace(name=name) for name in ("mixup", "mixup", "b", "mixup#2", "mixup")]

    assert unique_names(participants) == ["mixup", "mixup#2", "b", "mixup#2#2", "mixup#3"]


def test_a_free_name_is_taken_at_once() -> None:
    """So that the next one of that name gets another."""
    taken = {"a"}

    assert [free_name("a", taken), free_name("a", taken), free_name("b", taken)] == ["a#2", "a#3", "b"]
    assert taken == {"a", "a#2", "a#3", "b"}


def test_the_name_of_a_function_is_its_own_or_its_objects_class() -> None:
    """Through partials."""
    assert function_name(plain_function) == "plain_function"
    assert function_name(functools.partial(functools.partial(plain_function))) == "plain_function"
    assert function_name(PlainCallable()) == "plain_callable"
