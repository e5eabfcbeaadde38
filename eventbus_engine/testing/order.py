"""A check of the order in which algorithms ran: `assert_order`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventbus_engine._options import name_of, read_option, snake_case
from eventbus_engine.algorithm import Algorithm

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces

__all__ = ["assert_order"]


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
