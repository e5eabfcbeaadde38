"""A trace as a tree: the order of its spans, and how it shows in a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus_engine.telemetry.reports import RecordedSpan, RecordedTrace, Recording, format_trace
from eventbus_engine.telemetry.reports.model import Process, Scope, Status, format_time

Json = dict[str, Any]


def only_trace(path: Path) -> RecordedTrace:
    """The trace of a file that has one."""
    (trace,) = Recording(path).traces()
    return trace


def shape(trace: RecordedTrace) -> list[str]:
    """The names of the spans, indented."""
    return ["  " * node.depth + node.span.name for node in trace.walk()]


def traces_of(path: Path) -> list[RecordedTrace]:
    """The traces of a file in the order of their starts."""
    return sorted(Recording(path).traces(), key=lambda trace: trace.start_ns)


# --------------------------------------------------------------------------------------------------------------- order


def test_the_tree_of_an_engine_is_what_it_did(recorded: Path) -> None:
    """The file has the spans in the order of their ends; the tree has them as they ran."""
    pair, batch_end = traces_of(recorded)

    assert shape(pair) == [
        "loss",
        "  dispatch before_loss",
        "    algorithm smoothing",
        "    algorithm mixing",
        "  dispatch after_loss",
        "    algorithm mixing",
        "    algorithm smoothing",
        "    callback one",
        "    callback two",
    ]
    assert shape(batch_end) == ["dispatch batch_end", "  callback fragile", "  callback remote"]


def test_siblings_come_by_start_then_end_then_order_then_as_in_the_file(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """A coarse clock gives many spans one start; what took no time came before what did."""
    third, second = ({"eventbus.order": {"intValue": order}} for order in ("1", "0"))
    path = write(
        [
            span(6, 1, (5, 9)),
            span(7, 1, (5, 9)),
            span(4, 1, (5, 5), attributes=third),
            span(3, 1, (5, 5), attributes=second),
            span(5, 1, (5, 5)),
            span(2, 1, (4, 8)),
            span(1, 0, (4, 9)),
        ]
    )

    assert shape(only_trace(path)) == ["span 1", *(f"  span {number}" for number in range(2, 8))]


def test_a_span_whose_parent_is_not_there_is_a_root(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Its parent has not ended, was lost with a truncated line, or lives in another process."""
    path = write([span(3, 2, (1, 2)), span(2, 9, (0, 3)), span(4, 8, (5, 6))])

    assert shape(only_trace(path)) == ["span 2", "  span 3", "span 4"]


def test_spans_that_are_each_others_ancestors_are_not_lost(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """No real tracer makes such a circle; a damaged file may, and still every span shows once."""
    path = write([span(1, 0, (0, 9)), span(3, 2, (2, 3)), span(2, 3, (1, 4)), span(4, 4, (5, 6))])

    assert shape(only_trace(path)) == ["span 1", "span 2", "  span 3", "span 4"]


def made_up(number: int, parent: int, start: int, length: int) -> RecordedSpan:
    """A span of a made-up trace."""
    return RecordedSpan(
        trace_id="a" * 32,
        span_id=f"{number:016x}",
        parent_id=f"{parent:016x}" if parent else "",
        name=str(number),
        kind=1,
        start_ns=start,
        end_ns=start + length,
        attributes={},
        events=[],
        links=[],
        status=Status(0, ""),
        trace_state="",
        dropped={},
        process=Process("tests", {}),
        scope=Scope("", ""),
    )


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 5), st.integers(0, 3)), min_size=1))
def test_every_span_shows_once_and_after_its_parent(fields: list[tuple[int, int, int, int]]) -> None:
    """Whatever the parents say, and where ids occur twice as well."""
    spans = [made_up(*each) for each in fields]

    nodes = list(RecordedTrace("a" * 32, spans).walk())

    assert sorted(id(node.span) for node in nodes) == sorted(map(id, spans))
    seen: dict[int, int] = {}
    for node in nodes:
        if node.parent is None:
            assert node.depth == 0
        else:
            assert node.depth == seen[id(node.parent)] + 1
            assert node.span.parent_id == node.parent.span_id
        seen[id(node.span)] = node.depth


def test_a_tree_may_be_deeper_than_the_stack() -> None:
    """Ten thousand generations are no recursion."""
    spans = [made_up(number, number - 1, number, 1) for number in range(1, 10_001)]

    *_, last = RecordedTrace("a" * 32, spans).walk()

    assert (last.span, last.depth) == (spans[-1], 9_999)


# ------------------------------------------------------------------------------------------------------- how it shows


def test_a_line_tells_duration_outcome_order_skips_and_errors(recorded: Path) -> None:
    """In columns: durations in milliseconds to the right, names indented by their depth."""
    pair, batch_end = (format_trace(trace).splitlines() for trace in traces_of(recorded))

    assert re.fullmatch(r"trace [0-9a-f]{32}  \d{4}-\d\d-\d\dT[\d:.]{12}Z  tests  9 spans", pair[0])
    assert len({line.index(" ms  ") for line in pair[1:]}) == 1
    assert [line.partition(" ms  ")[2] for line in pair[1:4]] == [
        "loss  ok",
        "  dispatch before_loss  ok  skipped: idle",
        "    algorithm smoothing  ok  #0  exit=7",
    ]
    assert batch_end[2].endswith(" ms    callback fragile  failed  error: ValueError: no such batch")


def test_durations_are_in_milliseconds(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """To the microsecond, with thousands set apart."""
    lines = format_trace(only_trace(write([span(2, 1, (0, 4_000)), span(1, 0, (0, 2_345_678_901))]))).splitlines()

    assert lines[1:] == ["2,345.679 ms  span 1", "    0.004 ms    span 2"]


def test_links_places_and_odd_values_show(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """A link leads to the span it names; an error without a description has its type at least."""
    link = {"traceId": "c" * 32, "spanId": "d" * 16}
    attributes = {
        "train.epoch": {"intValue": "1"},
        "train.batch": {"intValue": "7"},
        "eventbus.skipped": "x",
        "error.type": "KeyError",
    }
    path = write([span(1, links=[link], status={"code": 2}, attributes=attributes), span(2, status={"code": 2})])

    first, second = format_trace(only_trace(path)).splitlines()[1:]

    assert first.endswith(f"span 1  epoch=1  batch=7  skipped: x  error: KeyError  -> {'c' * 32}/{'d' * 16}")
    assert second.endswith("span 2  error: no description")


def test_a_name_cannot_command_the_terminal(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Escape sequences and line breaks show as what they are; letters of any script stay."""
    path = write([span(1, name="naïve\x1b[31m\nred", attributes={"eventbus.outcome": "o\tk"})], service="\x07bell")

    actual = format_trace(only_trace(path))

    assert "naïve\\x1b[31m\\nred  o\\tk" in actual
    assert "\\x07bell" in actual
    assert len(actual.splitlines()) == 2


@pytest.mark.parametrize(
    ("nanoseconds", "expected"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_772_366_400_123_999_999, "2026-03-01T12:00:00.123Z"),
        (2**64 - 1, "2554-07-21T23:34:33.709Z"),
        (10**30, f"{10**30} ns"),
    ],
)
def test_times_show_in_utc_to_the_millisecond(nanoseconds: int, expected: str) -> None:
    """Cut, not rounded; beyond the calendar they are what they are."""
    assert format_time(nanoseconds) == expected
