"""Reading a recording: what was exported comes back, a killed process is no error, anything else says where it is."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from eventbus_engine.errors import ConfigurationError, SpanFileError, TelemetryError
from eventbus_engine.telemetry import PrivateIdGenerator
from eventbus_engine.telemetry.otlp import encode_spans
from eventbus_engine.telemetry.reports import RecordedSpan, Recording

Json = dict[str, Any]
Main = Callable[[], Awaitable[None]]


def all_spans(path: Path) -> list[RecordedSpan]:
    """The spans of all traces."""
    return [span for trace in Recording(path).traces() for span in trace.spans]


def essentials(span: ReadableSpan | RecordedSpan) -> tuple[object, ...]:
    """What a span is, of the SDK's and of ours."""
    if isinstance(span, RecordedSpan):
        return (
            *(span.trace_id, span.span_id, span.parent_id, span.name, span.start_ns, span.end_ns, span.attributes),
            [(event.time_ns, event.name, event.attributes) for event in span.events],
            [(link.trace_id, link.span_id, link.attributes) for link in span.links],
            (*span.status, span.kind, span.process.attributes, tuple(span.scope)),
        )
    context = span.get_span_context()
    assert context is not None
    assert span.instrumentation_scope is not None
    return (
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        f"{span.parent.span_id:016x}" if span.parent else "",
        *(span.name, span.start_time, span.end_time, lists(span.attributes)),
        [(event.timestamp, event.name, lists(event.attributes)) for event in span.events],
        [(f"{to.context.trace_id:032x}", f"{to.context.span_id:016x}", lists(to.attributes)) for to in span.links],
        (
            *(span.status.status_code.value, span.status.description or "", span.kind.value + 1),
            lists(span.resource.attributes),
            (span.instrumentation_scope.name, span.instrumentation_scope.version or ""),
        ),
    )


def lists(attributes: Any) -> Json:
    """Attributes with lists in the place of tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in (attributes or {}).items()}


# ------------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_spans_of_an_engine_come_back_as_they_were(
    record: Callable[..., Path], main_program: Main, backend: str
) -> None:
    """Ids, parents, times, attributes, events and status are those that another exporter got."""
    kept = InMemorySpanExporter()
    path = record(
        main_program, prepare=lambda provider: provider.add_span_processor(SimpleSpanProcessor(kept)), backend=backend
    )

    actual = sorted(map(essentials, all_spans(path)), key=repr)
    expected = sorted(map(essentials, kept.get_finished_spans()), key=repr)

    assert actual == expected
    assert len(actual) > 10


VALUES = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text()),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
)


@given(attributes=st.dictionaries(st.text(min_size=1), VALUES), number=st.integers(1, 2**64 - 1))
def test_whatever_the_sdk_takes_comes_back(
    tmp_path_factory: pytest.TempPathFactory, attributes: Json, number: int
) -> None:
    """Attributes of every type, on the span, an event and a link; kind, status and scope."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    linked = otel.SpanContext(number, number, is_remote=False)
    with provider.get_tracer("tests", "1.0").start_as_current_span(
        "work", kind=SpanKind.CONSUMER, attributes=attributes, links=[Link(linked, attributes)]
    ) as span:
        span.add_event("happened", attributes)
        span.set_status(Status(StatusCode.ERROR, "broken"))
    (made,) = kept.get_finished_spans()
    path = tmp_path_factory.mktemp("round") / "spans.jsonl"
    path.write_text(json.dumps(encode_spans([made])) + "\n")

    (read,) = all_spans(path)

    assert essentials(read) == essentials(made)


def test_what_only_other_exporters_write_is_read_too(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Numbers instead of strings, nested and empty values, NaN, bytes, unknown fields, null for a default."""
    values = {
        "number": {"intValue": 5},
        "digits": {"doubleValue": "2.5"},
        "nothing": {},
        "nan": {"doubleValue": "NaN"},
        "low": {"doubleValue": "-Infinity"},
        "bytes": {"bytesValue": "aGk="},
        "map": {"kvlistValue": {"values": [{"key": "inner", "value": {"arrayValue": {}}}]}},
    }
    made = span(1, attributes=values, future={"field": 1}, links=None, traceState="a=b", droppedEventsCount=3)
    made |= {"startTimeUnixNano": 5_000, "endTimeUnixNano": 9_000, "parentSpanId": "0" * 16, "traceId": "AB" * 16}

    (read,) = all_spans(write([made]))
    nan = read.attributes.pop("nan")

    assert math.isnan(nan)
    assert read.attributes == {
        "number": 5,
        "digits": 2.5,
        "nothing": None,
        "low": -math.inf,
        "bytes": b"hi",
        "map": {"inner": []},
    }
    assert (read.trace_id, read.parent_id, read.start_ns, read.duration_ns) == ("ab" * 16, "", 5_000, 4_000)
    assert (read.trace_state, read.dropped, read.links) == ("a=b", {"events": 3}, [])


def test_a_span_of_ids_alone_has_the_defaults(write: Callable[..., Path]) -> None:
    """OTLP leaves out what holds its default."""
    (read,) = all_spans(write([{"traceId": "1" * 32, "spanId": "2" * 16}], service=""))

    assert (read.name, read.kind, read.start_ns, read.end_ns, read.order) == ("", 0, 0, 0, math.inf)
    assert (read.attributes, read.events, read.links, read.status, read.scope) == ({}, [], [], (0, ""), ("", ""))


@pytest.mark.parametrize("end", ["", "400"])
def test_a_span_without_an_end_or_with_one_before_its_start_lasts_no_time(
    span: Callable[..., Json], write: Callable[..., Path], end: str
) -> None:
    """Clocks are set back, and what is flushed in a crash has not ended."""
    made = span(1)
    made["startTimeUnixNano"] = "500"
    made["endTimeUnixNano"] = end or None

    (read,) = all_spans(write([made]))

    assert (read.start_ns, read.end_ns, read.duration_ns) == (500, 500, 0)


# -------------------------------------------------------------------------------------------------------------- files


def test_all_span_files_of_a_run_folder_are_one_recording(
    tmp_path: Path, span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """The ranks of a job write one each; what else lies there is not read."""
    write([span(1)], name="spans-rank1.jsonl")
    write([span(2, parent=1)], [span(3, parent=1)], name="spans-rank0.jsonl")
    (tmp_path / "metrics.jsonl").write_text("no spans here\n")

    recording = Recording(tmp_path)
    (trace,) = recording.traces()

    assert [path.name for path in recording.paths] == ["spans-rank0.jsonl", "spans-rank1.jsonl"]
    assert [span.name for span in trace.spans] == ["span 2", "span 3", "span 1"]


def test_a_folder_without_spans_and_a_file_that_is_not_there_say_so(tmp_path: Path) -> None:
    """The message names the path and what was looked for."""
    with pytest.raises(ConfigurationError, match=r"no spans in .*spans\*\.jsonl"):
        Recording(tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot read spans from .*nothing\.jsonl"):
        Recording(tmp_path / "nothing.jsonl")


def test_blank_lines_and_empty_files_are_no_error(
    tmp_path: Path, span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """Neither is anything more than a run that traced nothing."""
    path = write([span(1)])
    path.write_text("\n  \n" + path.read_text() + "\n")
    (tmp_path / "empty.jsonl").touch()

    assert [read.name for read in all_spans(path)] == ["span 1"]
    assert all_spans(tmp_path / "empty.jsonl") == []


def test_what_a_live_run_appends_later_is_not_seen(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Both passes over the files see the same, or a trace would never be complete."""
    path = write([span(1)])
    recording = Recording(path)
    text = path.read_text()
    recording.index()
    path.write_text(text + write([span(2), span(3)], name="more.jsonl").read_text())

    (trace,) = recording.traces()

    assert [read.name for read in trace.spans] == ["span 1"]


def test_a_file_that_became_shorter_ends_where_it_ends(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Somebody has cleaned up in between; there is nothing to wait for."""
    path = write([span(1)])
    recording = Recording(path)
    path.write_text("")

    assert list(recording.traces()) == []


# ---------------------------------------------------------------------------------------------------- truncated, broken


@settings(max_examples=60)
@given(data=st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A killed process leaves part of a line: that much is lost, counted, and no error."""
    names = data.draw(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
    lines = [
        json.dumps(
            {
                "resourceSpans": [
                    {"scopeSpans": [{"spans": [{"traceId": "a" * 32, "spanId": f"{i + 1:016x}", "name": name}]}]}
                ]
            },
            ensure_ascii=False,
        ).encode()
        + b"\n"
        for i, name in enumerate(names)
    ]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("cut") / "spans.jsonl"
    path.write_bytes(whole[:cut])
    recording = Recording(path)

    actual = [span.name for trace in recording.traces() for span in trace.spans]

    ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    # A line that lacks nothing but its newline is whole.
    kept = sum(end - 1 <= cut for end in ends)
    assert actual == names[:kept]
    assert recording.truncated == (cut > (ends[kept - 1] if kept else 0))


SPAN = {"traceId": "a" * 32, "spanId": "b" * 16}


def request(**fields: Any) -> Json:
    """A request with one span, which has these fields besides its ids."""
    return {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN | fields]}]}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not JSON", "no JSON"),
        ('{"resourceSpans":[{"re{"resourceSpans":[]}', "no JSON"),
        ("\xff", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ([], "the line holds [], not an object"),
        ({"resourceSpans": {}}, "resourceSpans is {}, not a list of objects"),
        ({"resourceSpans": [1]}, "resourceSpans is [1], not a list of objects"),
        ({"resourceSpans": [{"resource": []}]}, "resource is [], not an object"),
        (request(name=5), "name is 5, not a string"),
        (request(name=["x" * 99]), f"name is ['{'x' * 55}..., not a string"),
        (request(traceId="abc"), "traceId is 'abc', not an id of 32 hexadecimal digits"),
        (request(traceId="0" * 32), "not an id of 32 hexadecimal digits"),
        (request(spanId=None), "spanId is '', not an id of 16 hexadecimal digits"),
        (request(parentSpanId="zz"), "parentSpanId is 'zz', not an id"),
        (request(startTimeUnixNano="soon"), "startTimeUnixNano is 'soon', not an integer"),
        (request(endTimeUnixNano=True), "endTimeUnixNano is True, not an integer"),
        (request(endTimeUnixNano=-1), "endTimeUnixNano is -1, not the nanoseconds since the epoch"),
        (request(events=[{"timeUnixNano": 2**64}]), "timeUnixNano is 18446744073709551616, not the nano"),
        (request(kind=1.5), "kind is 1.5, not an integer"),
        (request(links=[{"traceId": "a" * 32}]), "spanId is '', not an id"),
        (request(attributes=[{"key": "a", "value": {"stringValue": 1}}]), "{'stringValue': 1} is no attribute value"),
        (request(attributes=[{"key": "a", "value": {"doubleValue": True}}]), "is no attribute value"),
        (request(attributes=[{"key": "a", "value": {"doubleValue": 10**400}}]), "too large"),
        (request(attributes=[{"key": "a", "value": {"bytesValue": "?"}}]), "base64"),
    ],
)
def test_a_malformed_line_is_a_typed_error_that_says_where(
    tmp_path: Path, span: Callable[..., Json], write: Callable[..., Path], line: Any, problem: str
) -> None:
    """It names the file, the line and the field, and says what to do; the class is one of ours and a ValueError."""
    path = write([span(1)])
    broken = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(path.read_bytes() + broken.encode("latin-1") + b"\n" + path.read_bytes())

    with pytest.raises(SpanFileError) as caught:
        list(Recording(path).traces())

    assert (caught.value.path, caught.value.line) == (path, 2)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert problem in str(caught.value)
    assert "delete this one" in str(caught.value)
    assert isinstance(caught.value, TelemetryError)
    assert isinstance(caught.value, ValueError)


def test_a_whole_line_that_is_malformed_is_no_truncated_one(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """Only what cannot be parsed, at the very end, is taken for the work of a killed process."""
    path = write([span(1)])
    path.write_text(path.read_text() + "[]")

    with pytest.raises(SpanFileError, match="line 2"):
        list(Recording(path).requests())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["values", "key", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [
    *("parentSpanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano", "attributes", "events", "links"),
    *("status", "traceState", "droppedLinksCount", "traceId", "spanId"),
]


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_any_json_is_read_or_refused_by_name(fields: Json, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No field's content gets past the reader as another exception."""
    path = tmp_path_factory.mktemp("any") / "spans.jsonl"
    path.write_text(json.dumps(request(**fields)) + "\n")

    try:
        found = len(all_spans(path))
    except SpanFileError as error:
        found = error.line

    assert found == 1


# ------------------------------------------------------------------------------------------------------------- streams


def test_a_trace_comes_as_soon_as_it_is_complete(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """In the order in which they were completed, however they are interleaved."""
    path = write(
        [span(1, trace=1), span(1, trace=2)], [span(2, trace=2, parent=1)], [span(1, trace=3)], [span(2, trace=1)]
    )

    actual = [(int(trace.trace_id), [span.name for span in trace.spans]) for trace in Recording(path).traces()]

    assert actual == [(2, ["span 1", "span 2"]), (3, ["span 1"]), (1, ["span 1", "span 2"])]


def test_only_the_traces_asked_for_are_decoded(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """What is wrong with another one does not get in the way."""
    path = write([span(1, trace=1), span(1, trace=2, name=5)])

    actual = [trace.trace_id for trace in Recording(path).traces(lambda trace_id: trace_id.endswith("1"))]

    assert actual == [f"{1:032x}"]


def test_memory_is_bounded_by_the_open_traces_not_by_the_file(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """Five thousand spans in traces of four take a fraction of what the file has."""
    spans = [span(1 + number % 4, trace=1 + number // 4, attributes={"text": "x" * 500}) for number in range(5_000)]
    path = write(*(spans[start : start + 50] for start in range(0, len(spans), 50)))
    del spans
    recording = Recording(path)
    recording.index()
    tracemalloc.start()
    try:
        count = sum(1 for _ in recording.traces())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == 1_250
    assert peak < path.stat().st_size / 10
