"""Algorithms: what changes the run. They run one after another, in the order that the passes give them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from eventbus_engine._options import accepts, function_name, is_async_callable, name_of
from eventbus_engine.errors import AsyncMatchError, HandlerTypeError
from eventbus_engine.event import EventName

__all__ = ["Algorithm", "AlgorithmFunction", "AlgorithmRef", "algorithm", "check_algorithm"]

StateT = TypeVar("StateT", default=Any)
EventT = TypeVar("EventT", bound=EventName, default=Any)

AlgorithmRef: TypeAlias = "type[Any] | str | Algorithm[Any, Any]"
"""How a constraint names another algorithm: its class, its name or class name, or the object itself."""


class Algorithm(Generic[StateT, EventT]):
    """Something that changes the state at certain events: model surgery, data augmentation, cleaning a record.

    Subclass it, or use `@algorithm`, or pass any object with a `match` and an `apply`.

    Options, all class or instance attributes:

    * `name`: a string; the snake_case of the class by default.
    * `run_before`, `run_after`: algorithms (classes or names) to stay before or after, on every event.
    * `around`: algorithms to wrap: before them on the way in, after them on the way out of a pair.
    * `conflicts_with`: algorithms it must not be combined with; the engine warns once.
    * `pin`: `"first"` or `"last"`, on every event. Constraints are stronger than pins.
    * `timeout`: seconds an async `apply` may take, None for no limit.
    """

    name: str | None = None
    run_before: Sequence[AlgorithmRef] = ()
    run_after: Sequence[AlgorithmRef] = ()
    around: Sequence[AlgorithmRef] = ()
    conflicts_with: Sequence[AlgorithmRef] = ()
    pin: Literal["first", "last"] | None = None
    timeout: float | None = None

    find_unused_parameters: bool = False
    """Whether the algorithm leaves parameters without gradients, which data-parallel wrappers have to know."""
    backwards_create_graph: bool = False
    """Whether the backward pass has to build a graph, for an algorithm that differentiates gradients."""

    @staticmethod
    def required_on_load() -> bool:
        """Whether a checkpoint written with this algorithm cannot be loaded without it."""
        return False

    def match(self, event: EventT, state: StateT) -> bool:
        """Whether to run on this event, given the state. A plain function: it decides the order."""
        raise NotImplementedError(f"{type(self).__name__} has no match(event, state)")

    def apply(self, event: EventT, state: StateT, logger: Any) -> int | None | Awaitable[int | None]:
        """Change the state in place. `def` or `async def`; the number it returns is the trace's exit code."""
        raise NotImplementedError(f"{type(self).__name__} has no apply(event, state, logger)")


AlgorithmFunction: TypeAlias = Callable[[Any, Any, Any], Any]
"""`(event, state, logger) -> int | None`, plain or async."""


class _FunctionAlgorithm(Algorithm[Any, Any]):
    """The algorithm that `@algorithm` makes of a function."""

    def __init__(self, function: AlgorithmFunction, events: frozenset[Any], options: dict[str, Any]) -> None:
        self._events = events
        self.apply = function  # type: ignore[method-assign]
        self.__name__ = function_name(function)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.name = self.__name__
        for option, value in options.items():
            setattr(self, option, value)

    def match(self, event: EventName, state: Any) -> bool:
        """Run on the events given to the decorator, or on all of them if none was."""
        return not self._events or event in self._events

    def __call__(self, event: EventName, state: Any, logger: Any) -> Any:
        """The decorated function stays callable as it was."""
        return self.apply(event, state, logger)

    def __repr__(self) -> str:
        return f"<algorithm {self.name}>"


_OPTIONS = ("name", "run_before", "run_after", "around", "conflicts_with", "pin", "timeout")


def algorithm(*events: EventName | str, **options: Any) -> Callable[[AlgorithmFunction], Algorithm[Any, Any]]:
    """Make an algorithm of a function `(event, state, logger)`, plain or async.

    Args:
        *events: when to run: members of a vocabulary, or their values; none means always.
        **options: the options of `Algorithm`, by name.

    Raises:
        HandlerTypeError: if the function cannot take three positional arguments, or an option is unknown.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise HandlerTypeError(f"@algorithm has no option {unknown[0]!r}; it takes {', '.join(_OPTIONS)}")
    if any(not isinstance(event, str) for event in events):
        raise HandlerTypeError("@algorithm takes events: write @algorithm() over a function that runs on all of them")

    def decorate(function: AlgorithmFunction) -> Algorithm[Any, Any]:
        if not callable(function) or not accepts(function, 3):
            raise HandlerTypeError(f"@algorithm needs a function (event, state, logger), got {function!r}")
        values = frozenset(e if isinstance(e, EventName) else e.lower() for e in events)
        return _FunctionAlgorithm(function, values, options)

    return decorate


def check_algorithm(candidate: object) -> None:
    """Refuse what cannot run as an algorithm, before anything runs.

    Raises:
        HandlerTypeError: no callable `match` and `apply`, or they take other arguments.
        AsyncMatchError: `match` is a coroutine function.
    """
    name = name_of(candidate)
    if isinstance(candidate, type):
        raise HandlerTypeError(f"{candidate.__name__} is a class, not an algorithm; pass an instance: {candidate.__name__}()")
    for method, count, arguments in (("match", 2, "event, state"), ("apply", 3, "event, state, logger")):
        function = getattr(candidate, method, None)
        if not callable(function):
            raise HandlerTypeError(
                f"{candidate!r} is no algorithm: it has no callable {method}({arguments}); derive it from Algorithm, "
                f"or decorate a function with @algorithm(...)"
            )
        if not accepts(function, count):
            raise HandlerTypeError(f"{name}.{method} has to take ({arguments})")
    if is_async_callable(candidate.match):  # type: ignore[attr-defined]
        raise AsyncMatchError(f"{name}.match is async; matching decides the order, so make it a plain function")
