"""Algorithms: what changes the run. They run one after another, in the order that the passes give them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from eventbus_engine._options import check_call, function_name, is_async_callable, name_of, read_events, runs_on
from eventbus_engine.errors import AsyncMatchError, HandlerTypeError
from eventbus_engine.event import EventName

__all__ = ["Algorithm", "AlgorithmRef", "FunctionAlgorithm", "algorithm", "check_algorithm"]

StateT = TypeVar("StateT", default=Any)
EventT = TypeVar("EventT", bound=EventName, default=Any)
ResultT = TypeVar("ResultT", default=Any)

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

    def match(self, event: EventT, state: StateT, /) -> bool:
        """Whether to run on this event, given the state. A plain function: it decides the order."""
        raise NotImplementedError(f"{type(self).__name__} has no match(event, state)")

    def apply(self, event: EventT, state: StateT, logger: Any, /) -> int | Awaitable[int | None] | None:
        """Change the state in place. `def` or `async def`; the number it returns is the trace's exit code."""
        raise NotImplementedError(f"{type(self).__name__} has no apply(event, state, logger)")


class FunctionAlgorithm(Algorithm[StateT, EventT], Generic[StateT, EventT, ResultT]):
    """The algorithm that `@algorithm` makes of a function, which stays callable as it was."""

    def __init__(
        self, function: Callable[[EventT, StateT, Any], ResultT], events: frozenset[str], options: dict[str, Any]
    ) -> None:
        self.events: frozenset[str] = events
        self.apply: Any = function
        self.__name__: str = function_name(function)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.name: str | None = self.__name__
        for option, value in options.items():
            setattr(self, option, value)

    def match(self, event: EventT, state: StateT, /) -> bool:
        """Run on the events given to the decorator, or on all of them if none was."""
        return runs_on(self.events, event)

    def __call__(self, event: EventT, state: StateT, logger: Any) -> ResultT:
        """Call the function."""
        result: ResultT = self.apply(event, state, logger)
        return result

    def __repr__(self) -> str:
        return f"<algorithm {self.name}>"


OPTIONS = (
    "name",
    "run_before",
    "run_after",
    "around",
    "conflicts_with",
    "pin",
    "timeout",
    "find_unused_parameters",
    "backwards_create_graph",
)


def algorithm(
    *events: EventName | str, **options: Any
) -> Callable[[Callable[[EventT, StateT, Any], ResultT]], FunctionAlgorithm[StateT, EventT, ResultT]]:
    """Make an algorithm of a function `(event, state, logger)`, plain or async.

    Args:
        *events: when to run: members of a vocabulary, their values or their names; none means always.
        **options: the options of `Algorithm`, by name.

    Raises:
        HandlerTypeError: if the function cannot take three positional arguments, or an option is unknown.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise HandlerTypeError(f"@algorithm has no option {unknown[0]!r}; it takes {', '.join(OPTIONS)}")
    wanted = read_events(events, "@algorithm")

    def decorate(
        function: Callable[[EventT, StateT, Any], ResultT],
    ) -> FunctionAlgorithm[StateT, EventT, ResultT]:
        if not callable(function):
            raise HandlerTypeError(f"@algorithm needs a function (event, state, logger), got {function!r}")
        check_call(function, "event, state, logger", f"@algorithm function {function_name(function)}")
        return FunctionAlgorithm(function, wanted, options)

    return decorate


def check_algorithm(candidate: object) -> None:
    """Refuse what cannot run as an algorithm, before anything runs.

    Raises:
        HandlerTypeError: no callable `match` and `apply`, or they take other arguments.
        AsyncMatchError: `match` is a coroutine function.
    """
    name = name_of(candidate)
    if isinstance(candidate, type):
        raise HandlerTypeError(
            f"{candidate.__name__} is a class, not an algorithm; pass an instance: {candidate.__name__}()"
        )
    for method, arguments in (("match", "event, state"), ("apply", "event, state, logger")):
        function = getattr(candidate, method, None)
        if not callable(function):
            raise HandlerTypeError(
                f"{candidate!r} is no algorithm: it has no callable {method}({arguments}); derive it from Algorithm, "
                f"or decorate a function with @algorithm(...)"
            )
        check_call(function, arguments, f"{name}.{method}")
    if is_async_callable(candidate.match):  # type: ignore[attr-defined]
        raise AsyncMatchError(f"{name}.match is async; matching decides the order, so make it a plain function")
