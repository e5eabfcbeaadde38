"""A record is the live span that user code sees: what of the API it does, and where it is current."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from opentelemetry import baggage
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context, attach, get_current
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    StaticSampler,
    TraceIdRatioBased,
)

from eventbus_engine.telemetry import records
from eventbus_engine.telemetry.recorder import Recorder
from eventbus_engine.telemetry.records import RecordedSpan, find_context_accessors
from eventbus_engine.telemetry.sampling import EveryNth, quick_verdict
from eventbus_engine.telemetry.spans import Template

TEMPLATE = Template("algorithm a", "algorithm")


def recorder() -> tuple[Recorder, list[RecordedSpan]]:
    """A recorder, and where what it records ends up."""
    kept: list[RecordedSpan] = []
    return Recorder(None, kept.append), kept


def test_the_context_is_the_one_of_the_api() -> None:
    """Its variable is used directly, so that whatever reads the context by the API finds the same."""
    read, write = find_context_accessors()
    outer = read()
    mine = Context({"mine": 1})
    write(mine)
    try:
        assert get_current() is mine
        assert read is not get_current
    finally:
        attach(outer)
    assert read() is get_current() is outer


def test_with_another_implementation_of_the_context_the_api_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do more than set a variable."""
    monkeypatch.setenv("OTEL_PYTHON_CONTEXT", "theirs")

    assert find_context_accessors() == (get_current, attach)


def test_where_no_variable_has_the_context_the_api_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept elsewhere."""
    elsewhere: list[Context] = []
    monkeypatch.setattr(records, "attach", elsewhere.append)

    assert find_context_accessors()[0] is get_current


@pytest.mark.parametrize("arguments", [{}, {"end_time": 3}])
def test_users_do_not_end_it(arguments: dict[str, Any]) -> None:
    """The engine does, once its handler has ended."""
    recording, kept = recorder()
    span = recording.open(TEMPLATE)
    current = otel.get_current_span()
    current.end(**arguments)
    current.end(17)
    current.set_attribute("still", "there")

    assert kept == []
    assert current.is_recording()
    span.end("ok")
    assert [each.extra for each in kept] == [{"still": "there"}]
    assert not current.is_recording()


def test_what_is_in_the_context_stays_and_is_let_go() -> None:
    """Baggage is there inside; a span that waits for its export keeps nothing of what was around it."""
    recording, kept = recorder()
    token = otel_context.attach(baggage.set_baggage("user", "me"))
    span = recording.open(TEMPLATE)
    inside = baggage.get_baggage("user")
    span.end("ok")
    around = baggage.get_baggage("user")
    otel_context.detach(token)

    assert (inside, around) == ("me", "me")
    assert dict(kept[0]._outer) == {}
    assert otel.get_current_span() is otel.INVALID_SPAN


def test_it_goes_on_in_another_task() -> None:
    """Left in one place and entered in another, it is current there, on top of what is there."""
    recording, _ = recorder()
    span = recording.open(TEMPLATE)
    span.leave()
    token = otel_context.attach(baggage.set_baggage("user", "me"))
    span.enter()

    assert otel.get_current_span().get_span_context() == span.span_context
    assert baggage.get_baggage("user") == "me"
    span.end("ok")
    assert baggage.get_baggage("user") == "me"
    assert otel.get_current_span() is otel.INVALID_SPAN
    otel_context.detach(token)


SAMPLERS = pytest.mark.parametrize(
    ("sampler", "quick"),
    [
        pytest.param(ALWAYS_ON, True, id="always"),
        pytest.param(ALWAYS_OFF, True, id="never"),
        pytest.param(ParentBased(ALWAYS_OFF), True, id="never, unless the parent is"),
        pytest.param(EveryNth(3), True, id="every third"),
        pytest.param(TraceIdRatioBased(0.5), False, id="by the id"),
        pytest.param(ParentBased(TraceIdRatioBased(0.5)), False, id="by the id, unless the parent is"),
    ],
)


@SAMPLERS
def test_the_quick_verdict_is_the_samplers(sampler: Sampler, quick: bool) -> None:
    """Where it can be had without asking about each span."""
    takes, same = quick_verdict(sampler), copy.deepcopy(sampler)

    assert (takes is not None) is quick
    for number in range(10 if quick else 0):
        asked = same.should_sample(None, number + 1, "name").decision
        assert (takes("name", None) if callable(takes) else takes) is (asked is Decision.RECORD_AND_SAMPLE)


@SAMPLERS
def test_a_recorder_takes_the_roots_that_its_sampler_takes(sampler: Sampler, quick: bool) -> None:
    """However it gets to know."""
    kept: list[RecordedSpan] = []
    recording, same = Recorder(copy.deepcopy(sampler), kept.append), copy.deepcopy(sampler)
    taken = []
    for _ in range(20):
        root = recording.open(TEMPLATE)
        ids, child = root.span_context, recording.open(TEMPLATE)
        assert child.recording is root.recording is ids.trace_flags.sampled
        asked = same.should_sample(None, ids.trace_id, TEMPLATE.name, attributes=TEMPLATE.attributes).decision
        taken.append(root.recording)
        assert root.recording is (asked is Decision.RECORD_AND_SAMPLE)
        child.end("ok")
        root.end("ok")

    assert len(kept) == 2 * sum(taken)
    assert otel.get_current_span() is otel.INVALID_SPAN


def test_a_sampler_of_ones_own_is_asked() -> None:
    """It may have more to say than the one it is made from."""

    class Mine(StaticSampler):
        """Says what the one above says, so far."""

    assert quick_verdict(Mine(Decision.DROP)) is None
    assert quick_verdict(ParentBased(Mine(Decision.DROP))) is None


def test_a_root_that_is_not_sampled_has_ids_all_the_same() -> None:
    """They are drawn once somebody asks, for a log record or to pass them on; users cannot end it either."""
    recording = Recorder(ALWAYS_OFF, lambda span: None)
    token = otel_context.attach(baggage.set_baggage("user", "me"))
    root = recording.open(TEMPLATE)
    found = otel.get_current_span()
    found.end()
    found.set_attribute("lost", "yes")
    ids = found.get_span_context()

    assert (ids.is_valid, ids.trace_flags.sampled, found.is_recording()) == (True, False, False)
    assert found.get_span_context() is root.span_context is otel.get_current_span().get_span_context()
    assert f"trace_id=0x{ids.trace_id:032x}" in repr(found)
    assert baggage.get_baggage("user") == "me"
    assert recording.open(TEMPLATE).below(recording) is None
    root.end("ok")
    other = recording.open(TEMPLATE)
    assert other.span_context.trace_id != ids.trace_id
    other.end("ok")
    otel_context.detach(token)
    assert otel.get_current_span() is otel.INVALID_SPAN


def test_a_root_that_is_not_sampled_goes_on_in_another_task() -> None:
    """Entered elsewhere, it is current there, on top of what is there."""
    recording = Recorder(ALWAYS_OFF, lambda span: None)
    root = recording.open(TEMPLATE)
    root.leave()
    left = otel.get_current_span()
    token = otel_context.attach(baggage.set_baggage("user", "me"))
    root.enter()

    assert left is otel.INVALID_SPAN
    assert otel.get_current_span().get_span_context() == root.span_context
    assert baggage.get_baggage("user") == "me"
    root.end("ok")
    otel_context.detach(token)
    assert otel.get_current_span() is otel.INVALID_SPAN


def test_start_and_end_are_on_the_wall_clock() -> None:
    """And 0 while it lasts."""
    import time

    recording, _ = recorder()
    before = time.time_ns()
    span = recording.open(TEMPLATE)
    assert isinstance(span, RecordedSpan)
    assert span.end_time == 0
    span.end("ok")

    second = 1_000_000_000
    assert before - second < span.start <= span.end_time < time.time_ns() + second
