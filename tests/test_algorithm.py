"""Algorithms: what may be one, `@algorithm`, and what is refused."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import anyio.lowlevel
import pytest

from eventbus_engine import (
    Algorithm,
    AsyncMatchError,
    ConfigurationError,
    Engine,
    Event,
    EventName,
    HandlerTypeError,
    UnknownEventError,
    algorithm,
)
from eventbus_engine.algorithm import FunctionAlgorithm, check_algorithm

pytestmark = pytest.mark.anyio


class Ingest(EventName):
    WRITE = "before_write"
    AFTER_WRITE = "after_write"
    CLEAN_UP = "cleanUp"


class Plain(Algorithm[Any, Any]):
    def match(self, event: EventName, state: Any) -> bool:
        return True

    def apply(self, event: EventName, state: Any, logger: Any) -> int:
        return 3


# ----------------------------------------------------------------------------------------------------------- the class


def test_the_defaults_of_an_algorithm() -> None:
    """Nothing required, nothing pinned, no limit."""
    one = Plain()

    assert (one.find_unused_parameters, one.backwards_create_graph, one.required_on_load()) == (False, False, False)
    assert (one.name, one.pin, one.timeout) == (None, None, None)
    assert Algorithm.required_on_load() is False


def test_an_algorithm_without_match_or_apply_says_which_one_it_lacks() -> None:
    """The base has neither."""
    with pytest.raises(NotImplementedError, match=r"Algorithm has no match\(event, state\)"):
        Algorithm[Any, Any]().match(Event.INIT, None)
    with pytest.raises(NotImplementedError, match=r"Algorithm has no apply\(event, state, logger\)"):
        Algorithm[Any, Any]().apply(Event.INIT, None, None)


async def test_anything_of_the_right_shape_is_an_algorithm() -> None:
    """A class of no base, a namespace of functions, a Mock, one with an awaitable result."""

    class Shaped:
        def match(self, event: EventName, state: Any) -> bool:
            return True

        async def apply(self, event: EventName, state: Any, logger: Any) -> int:
            await anyio.lowlevel.checkpoint()
            return 1

    space = SimpleNamespace(match=lambda event, state: True, apply=lambda event, state, logger: 2)
    mock = Mock()
    mock.match.return_value = True
    mock.apply.return_value = 3
    quiet = MagicMock()
    quiet.match.return_value = False
    engine = Engine(algorithms=[Shaped(), space, mock, quiet])

    traces = await engine.run_event(Event.INIT)

    assert [(key, trace.exit_code) for key, trace in traces.items()] == [
        ("shaped/INIT", 1),
        ("simple_namespace/INIT", 2),
        ("mock/INIT", 3),
        ("magic_mock/INIT", None),
    ]
    mock.match.assert_called_once_with(Event.INIT, None)
    mock.apply.assert_called_once_with(Event.INIT, None, engine.logger)
    quiet.apply.assert_not_called()


def test_an_async_mock_is_no_algorithm() -> None:
    """Its `match` is async, and an async answer is no answer."""
    with pytest.raises(AsyncMatchError, match=r"async_mock\.match is async"):
        Engine(algorithms=[AsyncMock()])


async def test_an_awaitable_from_a_plain_apply_is_awaited() -> None:
    """An `AsyncMock`, a partial of a coroutine function, a plain function that returns a coroutine."""
    mock = Mock()
    mock.apply = AsyncMock(return_value=5)

    async def asynchronous(extra: int, event: EventName, state: Any, logger: Any) -> int:
        await anyio.lowlevel.checkpoint()
        return extra

    engine = Engine(
        algorithms=[
            mock,
            algorithm(name="partial")(functools.partial(asynchronous, 6)),
            algorithm(name="returning")(lambda event, state, logger: asynchronous(7, event, state, logger)),
        ]
    )

    traces = await engine.run_event(Event.INIT)

    assert [trace.exit_code for trace in traces.values()] == [5, 6, 7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Plain, "Plain is a class, not an algorithm; pass an instance: Plain()"),
        (3, "3 is no algorithm: it has no callable match(event, state); derive it from Algorithm, or decorate"),
        (None, "None is no algorithm: it has no callable match(event, state)"),
        (
            SimpleNamespace(match=lambda event, state: True),
            "namespace(match=<function <lambda>",
        ),
        (
            SimpleNamespace(match=lambda event: True, apply=print),
            "simple_namespace.match has to take (event, state)",
        ),
        (
            SimpleNamespace(match=lambda event, state: True, apply=lambda event, state: None),
            "simple_namespace.apply has to take (event, state, logger)",
        ),
    ],
)
def test_what_is_no_algorithm_is_refused_at_registration(given: Any, message: str) -> None:
    """With what it lacks, and the way out."""
    with pytest.raises(HandlerTypeError) as caught:
        Engine(algorithms=[given])

    assert str(caught.value).startswith(message)


def test_an_apply_that_is_missing_is_named() -> None:
    """`match` alone does not make an algorithm."""
    with pytest.raises(HandlerTypeError, match=r"it has no callable apply\(event, state, logger\)"):
        check_algorithm(SimpleNamespace(match=lambda event, state: True))


def test_an_apply_that_is_a_generator_is_refused() -> None:
    """It would be called, and nothing of it would run."""

    class Yielding(Algorithm[Any, Any]):
        def match(self, event: EventName, state: Any) -> bool:
            return True

        def apply(self, event: EventName, state: Any, logger: Any) -> Any:
            yield 1

    with pytest.raises(HandlerTypeError) as caught:
        check_algorithm(Yielding())

    assert str(caught.value) == (
        "yielding.apply is a generator, so that calling it would run nothing; take out its yield"
    )


def test_an_async_match_is_a_type_error_at_registration() -> None:
    """Matching decides the order, before anything may suspend."""

    class Async(Plain):
        async def match(self, event: EventName, state: Any) -> bool:  # type: ignore[override]
            return True

    with pytest.raises(AsyncMatchError) as caught:
        Engine(algorithms=[Async()])

    assert isinstance(caught.value, TypeError)
    assert str(caught.value) == "async.match is async; matching decides the order, so make it a plain function"


async def test_a_match_that_turns_out_async_is_an_error_on_the_event() -> None:
    """A plain function that returns a coroutine; the coroutine is not left behind."""

    async def answer() -> bool:
        return True

    sly = SimpleNamespace(name="sly", match=lambda event, state: answer(), apply=lambda event, state, logger: None)

    with pytest.raises(AsyncMatchError, match=r"sly\.match is async"):
        await Engine(algorithms=[sly]).run_event(Event.INIT)


@pytest.mark.parametrize("seconds", [0, -1.0, "1", True])
def test_a_bad_timeout_is_refused(seconds: Any) -> None:
    """By the name of the algorithm."""

    @algorithm(timeout=seconds)
    async def slow(event: EventName, state: Any, logger: Any) -> None: ...

    with pytest.raises(ConfigurationError) as caught:
        Engine(algorithms=[slow])

    assert str(caught.value) == f"algorithm slow has timeout={seconds!r}; give seconds as a positive number, or None"


def test_an_algorithm_given_twice_is_refused() -> None:
    """One object, one place in the order."""
    one = Plain()
    with pytest.raises(ConfigurationError) as caught:
        Engine(algorithms=[one, Plain(), one])

    assert str(caught.value) == "algorithm plain is registered twice; register another instance of it"


# ------------------------------------------------------------------------------------------------------- the decorator


def print_one(event: EventName) -> None:
    """Takes too little."""


async def test_a_decorated_function_runs_on_its_events_alone() -> None:
    """Given as member, as value, or as the name of a member, which need not resemble the value."""
    log: list[tuple[str, EventName]] = []

    @algorithm(Ingest.WRITE)
    def by_member(event: EventName, record: Any, logger: Any) -> None:
        log.append(("by_member", event))

    @algorithm("before_write", "cleanUp")
    async def by_value(event: EventName, record: Any, logger: Any) -> None:
        log.append(("by_value", event))

    @algorithm("WRITE", "CLEAN_UP")
    def by_name(event: EventName, record: Any, logger: Any) -> None:
        log.append(("by_name", event))

    @algorithm()
    def always(event: EventName, record: Any, logger: Any) -> None:
        log.append(("always", event))

    engine = Engine(algorithms=[by_member, by_value, by_name, always], events=Ingest)
    for event in Ingest:
        await engine.run_event(event)

    everyone = ["by_member", "by_value", "by_name", "always"]
    assert log == [
        *((name, Ingest.WRITE) for name in everyone),
        ("always", Ingest.AFTER_WRITE),
        *((name, Ingest.CLEAN_UP) for name in everyone[1:]),
    ]


def test_a_decorated_function_stays_what_it_was() -> None:
    """Callable, with its name and its documentation."""

    @algorithm(Event.BATCH_END, pin="last", find_unused_parameters=True)
    def halve(event: EventName, state: int, logger: Any) -> int:
        """Halve it."""
        return state // 2

    assert halve(Event.BATCH_END, 8, None) == 4
    assert (halve.__name__, halve.name, halve.__doc__) == ("halve", "halve", "Halve it.")
    assert halve.__wrapped__(Event.BATCH_END, 6, None) == 3
    assert (halve.pin, halve.find_unused_parameters, repr(halve)) == ("last", True, "<algorithm halve>")
    assert isinstance(halve, FunctionAlgorithm)


def test_an_event_of_another_vocabulary_is_refused_at_registration() -> None:
    """It would never run: a member, though its value be the same, and a name that nobody has."""

    class Other(EventName):
        WRITE = "before_write"

    function = lambda event, record, logger: None  # noqa: E731

    with pytest.raises(UnknownEventError, match=r"Ingest\.WRITE is no event of Other"):
        Engine(algorithms=[algorithm(Ingest.WRITE)(function)], events=Other)
    with pytest.raises(UnknownEventError, match=r"'training_start' is no event of Event; did you mean INIT\?"):
        Engine(algorithms=[algorithm("training_start")(function)])


def test_misuse_of_the_decorator_is_refused_where_it_happens() -> None:
    """Without its parentheses, with an unknown option, over what cannot take an event, a state and a logger."""

    def function(event: EventName, state: Any, logger: Any) -> None: ...

    decorator: Any = algorithm
    misuses: list[tuple[Any, str]] = [
        (lambda: decorator(function), "@algorithm takes events, not <function"),
        (lambda: decorator(Ingest), "@algorithm takes events, not <enum 'Ingest'>"),
        (lambda: decorator(priority=3), "@algorithm has no option 'priority'; it takes name, run_before, run_after"),
        (lambda: decorator()(3), "@algorithm needs a function (event, state, logger), got 3"),
        (lambda: decorator()(print_one), "@algorithm function print_one has to take (event, state, logger)"),
    ]
    for misuse, message in misuses:
        with pytest.raises(HandlerTypeError) as caught:
            misuse()
        assert str(caught.value).startswith(message)
