"""A recording in other formats, held to what their documentation says: Jaeger's model, Chrome's events, OTLP."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from eventbus_engine.telemetry.reports import RecordedSpan, Recording, write_chrome, write_jaeger, write_otlp
from eventbus_engine.telemetry.reports.jaeger import MAX_SPANS

Json = dict[str, Any]


def exported(path: Path, write: Callable[[Recording, Any], object]) -> Json:
    """What a writer makes of a file, read as strictly as a browser does."""
    out = io.StringIO()
    write(Recording(path), out)
    document: Json = json.loads(out.getvalue(), parse_constant=pytest.fail)
    return document


def all_spans(path: Path) -> list[RecordedSpan]:
    """The spans of all traces."""
    return [span for trace in Recording(path).traces() for span in trace.spans]


# ---------------------------------------------------------------------------------------- Jaeger's model, as documented

VALUES = {
    "string": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int64": lambda value: isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53,
    "float64": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "binary": lambda value: isinstance(value, str),
}
"""The types of a tag in model/json of Jaeger; integers as far as its UI, in JavaScript, reads them."""


def jaeger_problems(document: Json) -> list[str]:
    """What in a document does not follow model/json of Jaeger, or would not show as it is meant."""
    return [problem for trace in document["data"] for problem in trace_problems(trace)]


def trace_problems(trace: Json) -> Iterator[str]:
    """The same of a trace."""
    if set(trace) - {"warnings"} != {"traceID", "spans", "processes"}:
        yield f"the fields of the trace are {sorted(trace)}"
    if not re.fullmatch("[0-9a-f]{32}", trace["traceID"]):
        yield f"traceID {trace['traceID']!r}"
    for process in trace["processes"].values():
        if not isinstance(process["serviceName"], str):
            yield f"serviceName {process['serviceName']!r}"
        yield from tag_problems(process["tags"])
    for span in trace["spans"]:
        yield from (f"span {span.get('spanID')}: {problem}" for problem in span_problems(span, trace))


def span_problems(span: Json, trace: Json) -> Iterator[str]:
    """The same of a span in its trace."""
    known = {"traceID", "spanID", "operationName", "references", "startTime", "duration", "tags", "logs", "processID"}
    if set(span) != known:
        yield f"the fields are {sorted(span)}"
    if span["traceID"] != trace["traceID"]:
        yield f"traceID {span['traceID']!r}"
    if not re.fullmatch("[0-9a-f]{16}", span["spanID"]):
        yield f"spanID {span['spanID']!r}"
    if not isinstance(span["operationName"], str):
        yield f"operationName {span['operationName']!r}"
    for name in ("startTime", "duration"):
        if not (type(span[name]) is int and span[name] >= 0):
            yield f"{name} {span[name]!r}"
    if span["processID"] not in trace["processes"]:
        yield f"processID {span['processID']!r}"
    yield from reference_problems(span)
    yield from tag_problems(span["tags"])
    for log in span["logs"]:
        if set(log) != {"timestamp", "fields"} or type(log["timestamp"]) is not int:
            yield f"log {log!r}"
        yield from tag_problems(log["fields"])


def reference_problems(span: Json) -> Iterator[str]:
    """The same of what a span refers to."""
    for position, reference in enumerate(span["references"]):
        if set(reference) != {"refType", "traceID", "spanID"}:
            yield f"the fields of a reference are {sorted(reference)}"
        if reference["refType"] not in ("CHILD_OF", "FOLLOWS_FROM"):
            yield f"refType {reference['refType']!r}"
        ids = f"{reference['traceID']}/{reference['spanID']}"
        if not re.fullmatch("[0-9a-f]{32}/[0-9a-f]{16}", ids):
            yield f"reference to {ids!r}"
        if reference["refType"] == "CHILD_OF" and (position > 0 or reference["traceID"] != span["traceID"]):
            yield "a parent is not the first reference, or is of another trace"


def tag_problems(tags: list[Json]) -> Iterator[str]:
    """The same of the tags of a span or a process, or the fields of a log."""
    for tag in tags:
        if set(tag) != {"key", "type", "value"} or not isinstance(tag["key"], str):
            yield f"tag {tag!r}"
        elif tag["type"] not in VALUES or not VALUES[tag["type"]](tag["value"]):
            yield f"tag {tag['key']} is {tag['value']!r}, which is no {tag['type']}"
    keys = [tag["key"] for tag in tags]
    if len(keys) != len(set(keys)):
        yield f"a key twice in {keys}"


def shown_parents(trace: Json) -> dict[str, str]:
    """The parent of each span as Jaeger's UI has it: the first reference, of whatever type, if that span is there."""
    ids = {span["spanID"] for span in trace["spans"]}
    return {
        span["spanID"]: span["references"][0]["spanID"]
        if span["references"] and span["references"][0]["spanID"] in ids
        else ""
        for span in trace["spans"]
    }


def shown_order(trace: Json) -> list[str]:
    """The spans from top to bottom as Jaeger's UI has them: siblings by start, equal ones as they came."""
    children: dict[str, list[Json]] = {}
    parents = shown_parents(trace)
    for span in trace["spans"]:
        children.setdefault(parents[span["spanID"]], []).append(span)
    shown: list[str] = []

    def show(parent: str) -> None:
        for span in sorted(children.get(parent, ()), key=lambda span: span["startTime"]):
            shown.append(span["operationName"])
            show(span["spanID"])

    show("")
    return shown


def tags_of(owner: Json, where: str = "tags") -> Json:
    """Tags by their keys."""
    return {tag["key"]: tag["value"] for tag in owner[where]}


def test_the_spans_of_an_engine_are_valid_for_jaeger_and_keep_ids_and_parents(recorded: Path) -> None:
    """Every span is there once, under the parent it had, in the process it came from."""
    document = exported(recorded, write_jaeger)
    theirs = all_spans(recorded)

    assert jaeger_problems(document) == []
    written = {(span["traceID"], span["spanID"]): span for trace in document["data"] for span in trace["spans"]}
    assert written.keys() == {(span.trace_id, span.span_id) for span in theirs}
    for span in theirs:
        shown = written[span.trace_id, span.span_id]
        assert shown["operationName"] == span.name
        assert [reference["spanID"] for reference in shown["references"]] == [span.parent_id][: bool(span.parent_id)]
        assert shown["startTime"] == span.start_ns // 1_000
        assert abs(shown["duration"] * 1_000 - span.duration_ns) < 1_000
        assert tags_of(shown)["eventbus.outcome"] == span.attributes["eventbus.outcome"]
    processes = [process["serviceName"] for trace in document["data"] for process in trace["processes"].values()]
    assert processes == ["tests", "tests"]


def test_jaeger_shows_siblings_in_the_order_in_which_they_ran(recorded: Path) -> None:
    """Also where all of a trace falls into one microsecond, and the file has the spans by their ends."""
    coarse = re.sub(r'TimeUnixNano":"(\d+)"', 'TimeUnixNano":"5000000"', recorded.read_text())
    shuffled = [json.loads(line) for line in coarse.splitlines()]
    for request in shuffled:
        request["resourceSpans"][0]["scopeSpans"][0]["spans"].reverse()
    recorded.write_text("".join(json.dumps(request) + "\n" for request in shuffled))

    (pair,) = (
        trace for trace in exported(recorded, write_jaeger)["data"] if trace["spans"][0]["operationName"] == "loss"
    )

    order = [tags_of(span).get("eventbus.order") for span in pair["spans"]]
    shown = [name for name in shown_order(pair) if name.startswith(("algorithm", "loss"))]
    assert [number for number in order if number is not None] == [0, 1, 0, 1]
    assert shown[0] == "loss"
    assert sorted(shown[1:3]) == sorted(shown[3:5]) == ["algorithm mixing", "algorithm smoothing"]
    assert shown[1:3] == shown[4:2:-1]


def test_a_failure_shows_as_an_error_in_jaeger(recorded: Path) -> None:
    """Red in the list, with the description as a tag and the exception as a log."""
    document = exported(recorded, write_jaeger)
    (failed,) = (
        span for trace in document["data"] for span in trace["spans"] if span["operationName"] == "callback fragile"
    )
    tags, (log,) = tags_of(failed), failed["logs"]

    assert tags["error"] is True
    assert tags["otel.status_code"] == "ERROR"
    assert tags["otel.status_description"] == "ValueError: no such batch"
    assert tags["otel.scope.name"] == "eventbus_engine"
    assert "span.kind" not in tags
    assert tags_of(log, "fields")["event"] == "exception"
    assert tags_of(log, "fields")["exception.type"] == "ValueError"


def test_a_link_follows_the_parent_and_never_becomes_one(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Where there is no parent, Jaeger takes a link into the same trace for one: such a link becomes a log."""

    def link(trace: int, number: int, **fields: Any) -> Json:
        return {"traceId": f"{trace:032x}", "spanId": f"{number:016x}", **fields}

    why = {"attributes": [{"key": "why", "value": {"stringValue": "retry"}}]}
    path = write(
        [
            span(1, links=[link(7, 8), link(1, 2), link(9, 2)]),
            span(2, 1, links=[link(1, 1), link(7, 8, **why)]),
        ]
    )
    (trace,) = exported(path, write_jaeger)["data"]
    root, child = trace["spans"]

    assert jaeger_problems({"data": [trace]}) == []
    assert [(r["refType"], int(r["traceID"]), int(r["spanID"])) for r in root["references"]] == [("FOLLOWS_FROM", 7, 8)]
    assert [(r["refType"], int(r["traceID"]), int(r["spanID"])) for r in child["references"]] == [
        ("CHILD_OF", 1, 1),
        ("FOLLOWS_FROM", 1, 1),
        ("FOLLOWS_FROM", 7, 8),
    ]
    assert [tags_of(log, "fields") for log in root["logs"]] == [
        {"event": "link", "trace_id": f"{trace_id:032x}", "span_id": f"{2:016x}"} for trace_id in (1, 9)
    ]
    assert [tags_of(log, "fields")["why"] for log in child["logs"]] == ["retry"]
    assert shown_parents(trace) == {f"{1:016x}": "", f"{2:016x}": f"{1:016x}"}


def test_what_has_no_field_in_jaeger_becomes_a_tag(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Kind, OK, the W3C state, what was dropped; our own tags win over attributes of the same name."""
    made = span(
        1,
        kind=5,
        status={"code": 1},
        traceState="a=b",
        droppedLinksCount=2,
        attributes={"span.kind": "mine", "error": "kept"},
        events=[{"timeUnixNano": "1500", "name": "later"}, {"timeUnixNano": "1400", "droppedAttributesCount": 1}],
    )
    path = write([made])
    (trace,) = exported(path, write_jaeger)["data"]
    (shown,) = trace["spans"]

    assert tags_of(shown) == {
        "span.kind": "consumer",
        "error": "kept",
        "otel.status_code": "OK",
        "w3c.tracestate": "a=b",
        "otel.dropped_links_count": 2,
    }
    # Both in the same microsecond: the field says which came first, where Jaeger would sort by name.
    assert [(log["timestamp"], tags_of(log, "fields")) for log in shown["logs"]] == [
        (1, {"event": "", "eventbus.order": 0, "otel.event.dropped_attributes_count": 1}),
        (1, {"event": "later", "eventbus.order": 1}),
    ]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ({"stringValue": "a"}, "string", "a"),
        ({"boolValue": True}, "bool", True),
        ({"intValue": "-7"}, "int64", -7),
        ({"intValue": str(2**53)}, "string", str(2**53)),
        ({"doubleValue": 2.0}, "float64", 2.0),
        ({"doubleValue": "NaN"}, "string", "nan"),
        ({"bytesValue": "aGk="}, "binary", "aGk="),
        ({"arrayValue": {"values": [{"stringValue": "é"}, {"doubleValue": "Infinity"}]}}, "string", '["é", "inf"]'),
        ({"kvlistValue": {"values": [{"key": "a", "value": {"boolValue": False}}]}}, "string", '{"a": false}'),
        ({}, "string", ""),
    ],
)
def test_an_attribute_becomes_a_tag_of_its_type(
    span: Callable[..., Json], write: Callable[..., Path], value: Json, kind: str, expected: object
) -> None:
    """Lists and maps as JSON; as text what JavaScript would read as another number, and what JSON cannot say."""
    (trace,) = exported(write([span(1, attributes={"a": value})]), write_jaeger)["data"]
    (shown,) = trace["spans"]
    (tag,) = (tag for tag in shown["tags"] if tag["key"] == "a")

    assert tag == {"key": "a", "type": kind, "value": expected}


def test_a_child_stays_within_its_parent_in_microseconds(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """Cutting durations instead of ends would let it stick out by one."""
    path = write([span(2, 1, (1_900, 3_100)), span(1, 0, (1_900, 3_100)), span(3, 1, (2_100, 2_900))])
    (trace,) = exported(path, write_jaeger)["data"]

    actual = [(shown["startTime"], shown["startTime"] + shown["duration"]) for shown in trace["spans"]]

    assert actual == [(1, 3), (1, 3), (2, 2)]


def test_a_trace_too_large_for_elasticsearch_is_warned_about(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """In the document, and to whoever exports; one span fewer is fine."""
    path = write([span(number + 1, at=(number, number)) for number in range(MAX_SPANS + 1)], [span(1, trace=2)])
    out = io.StringIO()

    warnings = write_jaeger(Recording(path), out)

    large, small = json.loads(out.getvalue())["data"]
    assert len(large["spans"]) == 10_001
    assert (
        large["warnings"]
        == warnings
        == [f"trace {1:032x} has 10,001 spans; a Jaeger that stores in Elasticsearch shows 10,000 of them"]
    )
    assert "warnings" not in small


# --------------------------------------------------------------------------------------- Chrome's events, as documented


def chrome_problems(document: Json) -> list[str]:
    """What does not follow the Trace Event Format; above all, slices of one track that overlap and do not nest."""
    problems: list[str] = []
    open_slices: dict[tuple[int, int], list[Json]] = {}
    # The viewers sort by time, and leave alone what is equal.
    for event in sorted(document["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event["ph"] == "M":
            continue
        if not all(type(event[name]) is int for name in ("ts", "pid", "tid")):
            problems.append(f"{event['name']}: a number is missing")
        if event["ph"] != "X":
            continue
        stack = open_slices.setdefault((event["pid"], event["tid"]), [])
        while stack and ends(stack[-1]) <= event["ts"] and not covers(stack[-1], event):
            stack.pop()
        if stack and not covers(stack[-1], event):
            problems.append(f"{event['name']} overlaps {stack[-1]['name']}")
        stack.append(event)
    return problems


def ends(event: Json) -> int:
    """When a slice is over, in microseconds."""
    return int(event["ts"] + event["dur"])


def covers(outer: Json, inner: Json) -> bool:
    """Whether one slice lies within another."""
    return bool(outer["ts"] <= inner["ts"] and ends(inner) <= ends(outer))


def slices(document: Json) -> list[Json]:
    """The complete events."""
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def track_of(event: Json) -> tuple[int, int]:
    """The track that an event is on."""
    return event["pid"], event["tid"]


def test_the_spans_of_an_engine_are_slices_that_nest(recorded: Path) -> None:
    """All of them, with their ids, times and attributes."""
    document = exported(recorded, write_chrome)
    theirs = {f"{span.trace_id}/{span.span_id}": span for span in all_spans(recorded)}

    assert chrome_problems(document) == []
    assert {event["args"]["ID"] for event in slices(document)} == theirs.keys()
    for event in slices(document):
        span = theirs[event["args"]["ID"]]
        assert (event["name"], event["ts"], event["cat"]) == (
            *(span.name, span.start_ns // 1_000, span.attributes["eventbus.kind"]),
        )
        assert event["args"]["NANOSECONDS"] == span.duration_ns
        assert event["args"].get("PARENT", "") == span.parent_id
        assert event["args"]["eventbus.outcome"] == span.attributes["eventbus.outcome"]
    (failed,) = (event for event in slices(document) if event["name"] == "callback fragile")
    assert failed["args"]["STATUS"] == "ValueError: no such batch"
    (raised,) = (event for event in document["traceEvents"] if event["ph"] == "i")
    assert (raised["name"], track_of(raised)) == ("exception", track_of(failed))


def test_concurrent_callbacks_are_on_tracks_of_their_own(recorded: Path) -> None:
    """And what runs one after another shares that of its dispatch."""
    document = exported(recorded, write_chrome)
    tracks = {event["name"]: track_of(event) for event in slices(document)}

    assert tracks["callback one"] != tracks["callback two"]
    assert tracks["loss"] == tracks["dispatch after_loss"] == tracks["algorithm mixing"] == tracks["callback one"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names[tracks["callback one"]] == "traces 1"
    assert names[tracks["callback two"]] == "traces 1, concurrent 1"


def test_processes_and_traces_at_the_same_time_have_tracks_of_their_own(
    tmp_path: Path, span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """A trace that begins when another is over takes its track; tracks are named and sorted."""
    link = {"traceId": "c" * 32, "spanId": "d" * 16}
    write(
        [span(1, at=(0, 5_000), trace=1), span(1, at=(2_000, 9_000), trace=2), span(1, at=(5_000, 6_000), trace=3)],
        name="spans-0.jsonl",
        service="left",
    )
    write([span(2, 1, (2_500, 3_000), trace=1, links=[link])], name="spans-1.jsonl", service="right")
    document = exported(tmp_path, write_chrome)
    tracks = {event["args"]["ID"]: track_of(event) for event in slices(document)}
    one, two, three = (tracks[f"{trace:032x}/{1:016x}"] for trace in (1, 2, 3))
    remote = tracks[f"{1:032x}/{2:016x}"]
    metadata = [event for event in document["traceEvents"] if event["ph"] == "M"]

    assert chrome_problems(document) == []
    assert one == three != two
    assert remote[0] != one[0] == two[0]
    assert {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"} == {
        one[0]: "left",
        remote[0]: "right",
    }
    order = {track_of(e): e["args"]["sort_index"] for e in metadata if e["name"] == "thread_sort_index"}
    assert order[one] < order[two]
    (linked,) = (event for event in slices(document) if "LINKS" in event["args"])
    assert linked["args"]["LINKS"] == [f"{'c' * 32}/{'d' * 16}"]


# --------------------------------------------------------------------------------------------------- all of the formats

IDS = st.integers(1, 5)
TIMES = st.integers(0, 9_000)
ATTRIBUTE = st.recursive(
    st.one_of(
        st.builds(lambda value: {"stringValue": value}, st.text(max_size=5)),
        st.builds(lambda value: {"boolValue": value}, st.booleans()),
        st.builds(lambda value: {"intValue": str(value)}, st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda value: {"doubleValue": value}, st.floats(allow_nan=False, allow_infinity=False)),
        st.sampled_from([{"doubleValue": "NaN"}, {"doubleValue": "-Infinity"}, {"bytesValue": "AA=="}, {}]),
    ),
    lambda inner: st.builds(lambda values: {"arrayValue": {"values": values}}, st.lists(inner, max_size=2)),
    max_leaves=3,
)
ATTRIBUTES = st.dictionaries(
    st.sampled_from(["error", "event", "eventbus.order", "ID", "a", "b"]), ATTRIBUTE, max_size=3
)


@st.composite
def span_of(draw: st.DrawFn, number: int) -> Json:
    """A span of one of two traces, with any parent, times and attributes; the numbers make span ids unique."""

    def attributes() -> Json:
        return {"attributes": [{"key": key, "value": value} for key, value in draw(ATTRIBUTES).items()]}

    links = [
        {"traceId": f"{trace:032x}", "spanId": f"{other:016x}", **attributes()}
        for trace, other in draw(st.lists(st.tuples(st.integers(1, 3), IDS), max_size=2))
    ]
    events = [
        {"timeUnixNano": str(time), "name": draw(st.text(max_size=3)), **attributes()}
        for time in draw(st.lists(TIMES, max_size=2))
    ]
    start, end = sorted((draw(TIMES), draw(TIMES)))
    parent = draw(st.integers(0, number - 1))
    return {
        "traceId": f"{draw(st.integers(1, 2)):032x}",
        "spanId": f"{number:016x}",
        "parentSpanId": f"{parent:016x}" if parent else "",
        "name": draw(st.text(max_size=5)),
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end),
        "status": {"code": draw(st.integers(0, 3)), "message": draw(st.sampled_from(["", "broken"]))},
        "kind": draw(st.integers(0, 6)),
        **attributes(),
        "links": links,
        "events": events,
    }


@st.composite
def recordings(draw: st.DrawFn) -> str:
    """The text of a file: up to eight spans, in any order, over some lines, of two processes."""
    spans = draw(st.permutations([draw(span_of(number + 1)) for number in range(draw(st.integers(0, 8)))]))
    lines: list[Json] = []
    while spans:
        size = draw(st.integers(1, len(spans)))
        here, spans = spans[:size], spans[size:]
        name = {"key": "service.name", "value": {"stringValue": draw(st.sampled_from(["one", "two"]))}}
        lines.append({"resourceSpans": [{"resource": {"attributes": [name]}, "scopeSpans": [{"spans": here}]}]})
    return "".join(json.dumps(line) + "\n" for line in lines)


@settings(max_examples=150)
@given(text=recordings())
def test_any_recording_is_valid_in_every_format_and_keeps_ids_and_parents(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing is lost, nothing is there twice, whatever the spans hold and however they lie in time."""
    path = tmp_path_factory.mktemp("any") / "spans.jsonl"
    path.write_text(text)
    spans = {(span.trace_id, span.span_id): span for span in all_spans(path)}

    jaeger, chrome, otlp = (exported(path, write) for write in (write_jaeger, write_chrome, write_otlp))

    assert jaeger_problems(jaeger) == []
    shown = {(span["traceID"], span["spanID"]): span for trace in jaeger["data"] for span in trace["spans"]}
    assert len(shown) == sum(len(trace["spans"]) for trace in jaeger["data"])
    assert shown.keys() == spans.keys()
    for trace in jaeger["data"]:
        parents = shown_parents(trace)
        for (trace_id, span_id), span in spans.items():
            if trace_id == trace["traceID"]:
                there = (trace_id, span.parent_id) in spans
                assert parents[span_id] == (span.parent_id if there else "")
                stated = [
                    ref["spanID"] for ref in shown[trace_id, span_id]["references"] if ref["refType"] == "CHILD_OF"
                ]
                assert stated == ([span.parent_id] if span.parent_id else [])

    assert chrome_problems(chrome) == []
    assert sorted(event["args"]["ID"] for event in slices(chrome)) == sorted("/".join(key) for key in spans)
    assert {event["args"]["ID"]: event["args"].get("PARENT", "") for event in slices(chrome)} == {
        "/".join(key): span.parent_id for key, span in spans.items()
    }

    back = path.with_name("back.jsonl")
    back.write_text(json.dumps(otlp) + "\n")
    assert repr(all_spans(back)) == repr(all_spans(path))


def test_otlp_is_one_request_that_holds_what_the_lines_held(recorded: Path) -> None:
    """The official protobuf takes it."""
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    recorded.write_text(recorded.read_text() + json.dumps({}) + "\n" + recorded.read_text())

    document = exported(recorded, write_otlp)

    assert document == {"resourceSpans": [resource for line in [*lines, *lines] for resource in line["resourceSpans"]]}
    # Protobuf's own JSON has ids in base64, where OTLP has them in hexadecimal.
    plain = json.loads(re.sub(r'"(traceId|spanId|parentSpanId)": "[0-9a-f]+"', r'"\1": "AAAA"', json.dumps(document)))
    protobuf: Any = importlib.import_module("google.protobuf.json_format")  # which has no types
    request = protobuf.ParseDict(plain, ExportTraceServiceRequest())
    assert len(request.resource_spans) == len(document["resourceSpans"])


@pytest.mark.parametrize("write_format", [write_jaeger, write_chrome, write_otlp])
def test_an_empty_recording_is_an_empty_document(tmp_path: Path, write_format: Callable[..., object]) -> None:
    """Not a syntax error."""
    (tmp_path / "spans.jsonl").touch()

    document = exported(tmp_path, write_format)

    assert [value for value in document.values() if isinstance(value, list)] == [[]]
