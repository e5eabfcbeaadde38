"""Read options, hooks and names off the objects a user plugs in, ours or not.

Anything of the right shape is accepted as an algorithm or a callback, a `Mock` included. A Mock makes up every
attribute it is asked for, so an option counts only where it really is: in the object, or in a class of its MRO.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from eventbus_engine.errors import ConfigurationError, HandlerTypeError
from eventbus_engine.event import EventName

MISSING: Any = object()


def read_option(owner: object, name: str, default: Any) -> Any:
    """The option `name` of `owner`, or `default` where it was never set."""
    if inspect.getattr_static(owner, name, MISSING) is MISSING:
        return default
    return getattr(owner, name)


def read_timeout(owner: object, described: str) -> float | None:
    """The `timeout` option in seconds, None for no limit.

    Raises:
        ConfigurationError: if it is not a positive number.
    """
    value = read_option(owner, "timeout", None)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        return value
    raise ConfigurationError(f"{described} has timeout={value!r}; give seconds as a positive number, or None")


def read_number(
    owner: object, name: str, default: float, described: str, *, what: str, least: float = 0, whole: bool = False
) -> Any:
    """An option that is a number of `what`, not below `least`.

    Raises:
        ConfigurationError: if it is not.
    """
    value = read_option(owner, name, default)
    fits = isinstance(value, int) if whole else isinstance(value, int | float)
    if fits and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigurationError(f"{described} has {name}={value!r}; give a number of {what}, {least:g} or more")


def read_instance(owner: object, name: str, cls: type[Any], described: str) -> Any:
    """An option that is None, the default, or an object of a class.

    Raises:
        ConfigurationError: if it is not.
    """
    value = read_option(owner, name, None)
    if value is None or isinstance(value, cls):
        return value
    raise ConfigurationError(f"{described} has {name}={value!r}; give a {cls.__name__}, or None")


def read_choice(owner: object, name: str, choices: tuple[Any, ...], described: str) -> Any:
    """An option with a closed set of values, the first of which is the default."""
    value = read_option(owner, name, choices[0])
    if value in choices:
        return value
    allowed = " or ".join(repr(choice) for choice in choices)
    raise ConfigurationError(f"{described} has {name}={value!r}; use {allowed}")


def own_method(owner: object, name: str, base: type[Any]) -> Callable[..., Any] | None:
    """The bound method `name` of `owner`; None where it has none, or only the one that `base` gives everybody."""
    bound = getattr(owner, name, None)
    return bound if callable(bound) and getattr(bound, "__func__", None) is not getattr(base, name) else None


def check_call(function: Callable[..., Any], arguments: str, described: str) -> None:
    """Refuse a function that cannot be called with these arguments, or whose call would run nothing.

    Raises:
        HandlerTypeError: naming the function and the arguments it has to take.
    """
    if not accepts(function, len(arguments.split(", ")) if arguments else 0):
        raise HandlerTypeError(f"{described} has to take ({arguments})")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerTypeError(f"{described} is a generator, so that calling it would run nothing; take out its yield")


def read_events(events: Iterable[object], decorator: str) -> frozenset[str]:
    """The events given to a decorator: members, values or names of members.

    Raises:
        HandlerTypeError: something else was given, such as the function to decorate.
    """
    for event in events:
        if not isinstance(event, str):
            raise HandlerTypeError(
                f"{decorator} takes events, not {event!r}; write {decorator}() over a function that runs on all of them"
            )
    return frozenset(event for event in events if isinstance(event, str))


def runs_on(events: frozenset[str], event: EventName) -> bool:
    """Whether a function decorated with these events runs on one: no events stand for all."""
    return not events or event in events or event.name in events


def is_async_callable(function: object) -> bool:
    """Whether calling `function` gives a coroutine: also for partials and objects with an async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def snake_case(name: str) -> str:
    """`LayerFreezing` -> `layer_freezing`, `HTTPLogger` -> `http_logger`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return spaced.lower()


def name_of(participant: object) -> str:
    """The name of an algorithm or callback: its `name` where that is a string, else its class in snake_case."""
    name = read_option(participant, "name", None)
    return name if isinstance(name, str) and name else snake_case(type(participant).__name__)


def unique_names(participants: Iterable[object]) -> list[str]:
    """Their names in order, a second `mixup` being `mixup#2`."""
    taken: set[str] = set()
    return [free_name(name_of(participant), taken) for participant in participants]


def free_name(name: str, taken: set[str]) -> str:
    """The name, or the first of `name#2`, `name#3` … that is not taken; takes it."""
    free, n = name, 2
    while free in taken:
        free, n = f"{name}#{n}", n + 1
    taken.add(free)
    return free


def function_name(function: Callable[..., Any]) -> str:
    """The name of a plain function, or of the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", None) or snake_case(type(function).__name__))


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether `function` can be called with `count` positional arguments; True where no signature can be read."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
