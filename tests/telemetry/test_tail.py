"""Tail keeping: roots that the head decision refused, and that failed or took long, are exported all the same."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import weakref
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eventbus_engine import Algorithm, Engine, Event, background
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry import PrivateIdGenerator, configure, otlp
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.telemetry.recorder import RecordedSpan, Recorder
from eventbus_engine.telemetry.reports import RecordedTrace, Recording
from eventbus_engine.telemetry.spans import Template
from eventbus_engine.telemetry.tail import KeepReport, TailKeeper
from eventbus_engine.telemetry.wire import Records

Outcome = Literal["ok", "failed", "timed_out", "cancelled"]

ROOT = Template("batch", "batch")
CHILD = Template("algorithm a", "algorithm")
RANDOM = TraceFlags.RANDOM_TRACE_ID
REFUSING = ParentBased(ALWAYS_OFF)


@dataclass
class Setup:
    """A recorder that refuses every root, what it holds them in, and what has come out."""

    failed: bool = True
    slow: float | None = None
    per_root: int = 100
    in_all: int = 1000
    sampler: Sampler | None = REFUSING
    kept: list[RecordedSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keeper = TailKeeper(self.failed, self.slow, self.kept.append, self.per_root, self.in_all)
        self.recorder = Recorder(self.sampler, self.kept.append, frozenset(), self.keeper)

    def open(self, template: Template = CHILD, *, root: bool = False) -> RecordedSpan:
        """A span that is recorded."""
        span = self.recorder.open(template, root=root)
        assert isinstance(span, RecordedSpan)
        return span

    def run(self, *outcomes: Outcome, end: Outcome = "ok") -> RecordedSpan:
        """A root with children that end so."""
        root = self.open(ROOT, root=True)
        for outcome in outcomes:
            self.open().end(outcome)
        root.end(end)
        return root

    def run_one(self) -> None:
        """A span inside whatever is current."""
        self.open().end("ok")

    @property
    def names(self) -> list[str]:
        """Of what has come out."""
        return [span.template.name for span in self.kept]


def reasons(kept: list[RecordedSpan]) -> list[str]:
    """Why each was kept, as it is exported."""
    spans = Records(kept, Resource({}), SpanLimits()).to_spans()
    return [str((span.attributes or {}).get("eventbus.kept")) for span in spans]


@pytest.mark.parametrize("outcome", ["failed", "timed_out", "cancelled"])
@pytest.mark.parametrize("where", ["root", "child"])
def test_a_root_in_which_something_failed_is_kept_whole(outcome: Outcome, where: str) -> None:
    """Wherever it was, whatever the failure; all of its spans say why they are there, in the order of their end."""
    setup = Setup()
    setup.run("ok", "ok")
    failing: list[Outcome] = [outcome] if where == "child" else []
    setup.run("ok", *failing, end=outcome if where == "root" else "ok")

    assert setup.names[0] == "algorithm a"
    assert setup.names[-1] == "batch"
    assert reasons(setup.kept) == ["failed"] * (3 if where == "child" else 2)
    assert setup.keeper.report == KeepReport(failed=1, slow=0, discarded=1, lost=0)


def test_a_root_that_took_long_is_kept() -> None:
    """Longer than `slow` seconds; one that did not is not, and failures do not count unless they are asked for."""
    quick, slow = Setup(failed=False, slow=3600.0), Setup(failed=False, slow=1e-9)
    for setup in (quick, slow):
        setup.run("failed")

    assert quick.kept == []
    assert reasons(slow.kept) == ["slow", "slow"]
    assert (quick.keeper.report.discarded, slow.keeper.report.slow) == (1, 1)


def test_a_root_both_failed_and_slow_says_failed() -> None:
    """The stronger reason."""
    setup = Setup(failed=True, slow=1e-9)
    setup.run("failed")

    assert set(reasons(setup.kept)) == {"failed"}


def test_what_is_sampled_is_not_marked() -> None:
    """Nobody holds it: it is put when it ends."""
    setup = Setup(sampler=None)
    root = setup.open(ROOT)
    setup.open().end("failed")

    assert setup.names == ["algorithm a"]
    root.end("failed")
    assert reasons(setup.kept) == ["None", "None"]
    assert setup.keeper.report == KeepReport(0, 0, 0, 0)


def test_late_spans_follow_the_decision_about_their_root() -> None:
    """Background work that ends after it: exported with a root that was kept, forgotten with one that was not."""
    for outcome, expected in (("failed", ["batch", "algorithm a", "algorithm a"]), ("ok", [])):
        setup = Setup()
        root = setup.open(ROOT)
        late = setup.open()
        later = copy_context()
        late.leave()
        root.end(outcome)  # type: ignore[arg-type]
        later.run(setup.run_one)
        later.run(late.end, "failed")

        assert setup.names == expected
        assert setup.keeper.report.discarded == (outcome == "ok")


def test_what_is_propagated_says_not_sampled() -> None:
    """While it runs nobody knows that it will be kept: recording, but not sampled, as the API puts it."""
    setup = Setup()
    root = setup.open(ROOT)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    current = otel.get_current_span()
    root.end("failed")

    context = root.get_span_context()
    assert current is root
    assert context.trace_flags == RANDOM
    assert carrier["traceparent"] == f"00-{context.trace_id:032x}-{context.span_id:016x}-02"


def test_a_root_under_a_remote_parent_that_is_not_sampled_is_held_as_well() -> None:
    """Its part of the trace is exported under the ids it has."""
    setup = Setup(sampler=None)
    remote = SpanContext(0xA1, 0xB2, True, TraceFlags(0))
    with otel.use_span(NonRecordingSpan(remote)):
        root = setup.open(ROOT)
        setup.open().end("failed")
        root.end("ok")

    child, kept = setup.kept
    assert kept is root
    assert (root.root.trace_id, root.parent_id, child.parent_id) == (0xA1, 0xB2, root.span_id)
    assert root.get_span_context().trace_flags == 0


def test_both_encodings_say_what_the_sdk_would_say() -> None:
    """`eventbus.kept` goes through the templates as through the SDK's own encoder."""
    setup = Setup()
    setup.run("ok", "failed")
    records = Records(setup.kept, Resource({"service.name": "x"}), SpanLimits())
    spans = records.to_spans()

    assert ExportTraceServiceRequest.FromString(records.to_protobuf()) == sdk_encode(spans)
    (encoded,) = otlp.encode_spans(spans)["resourceSpans"]
    assert json.loads(records.to_json()) == encoded


# ------------------------------------------------------------------------------------------------- spans of the user's


def test_the_users_own_spans_stay_unsampled_and_what_is_below_them_follows_the_root() -> None:
    """A parent-based sampler drops them; the engine's spans inside them still belong to the root around them."""
    setup = Setup()
    tracer = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False).get_tracer("user")
    root = setup.open(ROOT)
    with tracer.start_as_current_span("mine") as mine:
        setup.open().end("failed")
    root.end("ok")

    assert not mine.is_recording()
    child, kept = setup.kept
    assert kept is root
    assert child.root is root.root
    assert child.parent_id == mine.get_span_context().span_id


def test_below_a_span_of_the_users_that_is_sampled_the_head_decides_anew() -> None:
    """One trace, and what its sampler says."""
    setup = Setup()
    tracer = TracerProvider(sampler=ALWAYS_ON, id_generator=PrivateIdGenerator(), shutdown_on_exit=False).get_tracer(
        "user"
    )
    root = setup.open(ROOT)
    with tracer.start_as_current_span("mine"):
        setup.open().end("ok")
    root.end("ok")

    assert reasons(setup.kept) == ["None"]


def test_a_root_of_its_own_in_a_held_one_has_a_fate_of_its_own() -> None:
    """As a batch in an epoch."""
    setup = Setup()
    epoch = setup.open(ROOT, root=True)
    batch = setup.run("failed")
    setup.run("ok")
    epoch.end("ok")

    assert {span.root for span in setup.kept} == {batch.root}
    assert setup.keeper.report == KeepReport(1, 0, 2, 0)


# -------------------------------------------------------------------------------------------------------------- bounds


def test_of_a_root_with_too_many_spans_failures_and_the_first_are_held() -> None:
    """A span whose parent is there comes with it, and what was lost is counted, on the root and in all."""
    setup = Setup(per_root=4)
    root = setup.open(ROOT)
    for number in range(10):
        span = setup.open()
        span.set("number", number)
        span.end("failed" if number == 7 else "ok")
    root.end("ok")

    assert [(span.extra or {})["number"] for span in setup.kept[:-1]] == [0, 1, 2, 7]
    assert root.extra == {"eventbus.lost": 6}
    assert setup.keeper.report == KeepReport(1, 0, 0, 6)


def test_spans_of_parents_that_are_held_come_with_them() -> None:
    """Whatever a bound cuts off, no span is left whose parent, started before it, is gone."""
    setup = Setup(per_root=3)
    root = setup.open(ROOT)
    nest = [setup.open() for _ in range(8)]
    for span in reversed(nest):
        span.end("ok")
    root.end("failed")

    assert setup.kept == [nest[2], nest[1], nest[0], root]


def test_of_too_many_roots_the_oldest_lose_what_they_have() -> None:
    """One that never ends does not keep the others from being held."""
    setup = Setup(in_all=5)
    forgotten = setup.open(ROOT, root=True)
    for _ in range(4):
        setup.open().end("ok")
    setup.run("ok", "failed")
    forgotten.end("failed")

    assert setup.names == ["algorithm a", "algorithm a", "batch", "batch"]
    assert forgotten.extra == {"eventbus.lost": 4}
    assert setup.keeper.report == KeepReport(2, 0, 0, 4)


def test_what_is_lost_of_a_root_that_is_discarded_is_no_loss() -> None:
    """It would have been thrown away."""
    setup = Setup(per_root=1)
    setup.run("ok", "ok", "ok")

    assert setup.keeper.report == KeepReport(0, 0, 1, 0)


def test_nothing_is_left_of_a_root_that_was_discarded() -> None:
    """Neither its spans nor what they know."""
    setup = Setup()

    class Big:
        """Something that can be referenced weakly."""

    def work() -> weakref.ref[Big]:
        big = Big()
        root = setup.open(ROOT)
        root.set("big", big)
        setup.open().end("ok")
        root.end("ok")
        return weakref.ref(big)

    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()


def test_roots_in_many_threads_are_counted_exactly() -> None:
    """All at once; no span is lost or in the wrong root."""
    setup = Setup()

    def work() -> None:
        for number in range(200):
            setup.run("ok", "failed" if number % 2 else "ok")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert setup.keeper.report == KeepReport(400, 0, 400, 0)
    assert len(setup.kept) == 1200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_exports_nothing_that_its_parent_holds() -> None:
    """Its own span alone, once tracing ends there. Nor does it wait for a lock that a thread of the parent's had."""
    setup = Setup()
    root = setup.open(ROOT)
    setup.open().end("failed")
    reading, writing = os.pipe()
    with setup.keeper._lock:
        child = os.fork()
        if not child:  # pragma: no cover -- in another process
            setup.open().end("ok")
            root.end("ok")
            setup.keeper.settle()
            os.write(writing, bytes([len(setup.kept)]))
            os._exit(0)
    os.waitpid(child, 0)
    root.end("ok")

    assert os.read(reading, 1) == b"\x01"
    assert setup.names == ["algorithm a", "batch"]
    os.close(reading)
    os.close(writing)


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass
class Node:
    """A span to be: how it ends, whether that is after its root, and what runs in it."""

    outcome: Outcome
    late: bool
    children: list[Node]


outcomes: st.SearchStrategy[Outcome] = st.sampled_from(["ok", "ok", "ok", "failed", "cancelled"])
leaves = st.builds(Node, outcomes, st.booleans(), st.just([]))
nodes = st.recursive(
    leaves, lambda inner: st.builds(Node, outcomes, st.booleans(), st.lists(inner, max_size=3)), max_leaves=8
)


@settings(max_examples=60, deadline=None)
@given(st.lists(nodes, max_size=4), st.booleans(), st.sampled_from([None, 1e-9, 3e-5, 3600.0]), st.integers(1, 4))
def test_any_trees_of_spans(trees: list[Node], failed: bool, slow: float | None, per_root: int) -> None:
    """What comes out is what a model says, by the outcomes, the times and the bound."""
    setup = Setup(failed=failed, slow=slow, per_root=per_root)
    expected: list[RecordedSpan] = []
    lost = 0

    def run(node: Node, held: list[RecordedSpan], late: list[tuple[RecordedSpan, Outcome]]) -> None:
        span = setup.open()
        for child in node.children:
            run(child, held, late)
        if node.late:
            span.leave()
            late.append((span, node.outcome))
        else:
            span.end(node.outcome)
            held.append(span)

    for tree in trees:
        held: list[RecordedSpan] = []
        late: list[tuple[RecordedSpan, Outcome]] = []
        root = setup.open(ROOT, root=True)
        for child in tree.children:
            run(child, held, late)
        root.end(tree.outcome)
        for span, outcome in late:
            copy_context().run(span.end, outcome)

        seconds = (root.end_time - root.start) / 1e9
        bad = any(span.outcome != "ok" for span in [*held, root])
        if (failed and bad) or (slow is not None and seconds > slow):
            first = sorted(held, key=lambda span: (span.outcome == "ok", span.start))[:per_root]
            expected += [span for span in held if span in first]
            expected += [root, *[span for span, _ in late]]
            lost += len(held) - len(first)

    assert setup.kept == expected
    report = setup.keeper.report
    assert report.lost == lost
    assert report.failed + report.slow + report.discarded == len(trees)
    assert otel.get_current_span() is otel.INVALID_SPAN


# -------------------------------------------------------------------------------------------------- through an engine


class Fussy(Algorithm[Any, Any]):
    """Fails on some values of the state."""

    name = "fussy"

    def match(self, event: Any, state: Any) -> bool:
        """Always."""
        return True

    def apply(self, event: Any, state: Any, logger: Any) -> int:
        """Refuse what is negative."""
        if state < 0:
            raise ValueError(f"{state} is negative")
        return int(state)


def traces(path: Path) -> list[RecordedTrace]:
    """What was exported."""
    return list(Recording(path).traces())


@pytest.mark.anyio
async def test_rule_7_8_failed_roots_are_kept_beside_the_sampled_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One in three by the head decision, and the failure besides, marked; the closing line tells of both."""
    caplog.set_level(logging.INFO, "eventbus_engine")
    path = tmp_path / "spans.jsonl"
    with configure(path=path, sample_every=3, keep_failed=True) as provider:
        engine = Engine[Any](algorithms=[Fussy()])
        for number in (0, 1, 2, 3, -4, 5):
            try:
                await engine.run_event(Event.BATCH_END, number)
            except ValueError:
                assert number == -4
    assert isinstance(provider, RecordingProvider)

    found = [[span.attributes.get("eventbus.kept") for span in trace.spans] for trace in traces(path)]
    assert found == [[None, None], [None, None], ["failed", "failed"]]
    assert provider.kept == KeepReport(1, 0, 3, 0)
    assert "1 failed and 0 slow ones were kept, without 0 spans" in caplog.text


@pytest.mark.anyio
async def test_rule_7_8_a_background_callback_that_ends_later_follows_its_event(tmp_path: Path) -> None:
    """Its span ends after that of its event."""
    path = tmp_path / "spans.jsonl"

    class Watch:
        name = "watch"

        async def batch_end(self, state: Any, logger: Any) -> None:
            """Nothing."""

    with configure(path=path, sampler=REFUSING, keep_failed=True):
        async with Engine[Any](algorithms=[Fussy()], callbacks=[background(Watch())]) as engine:
            await engine.run_event(Event.BATCH_END, 1)
            with pytest.raises(ValueError, match="negative"):
                await engine.run_event(Event.BATCH_END, -1)

    assert {span.attributes["eventbus.kept"] for trace in traces(path) for span in trace.spans} == {"failed"}


@pytest.mark.anyio
async def test_rule_7_8_a_root_under_way_when_the_block_ends_is_decided_by_what_is_known(tmp_path: Path) -> None:
    """A run that is broken off: what is under way then is not thrown away, nor what has failed in it."""
    path = tmp_path / "spans.jsonl"
    with configure(path=path, sampler=REFUSING, keep_failed=True) as provider:
        assert isinstance(provider, RecordingProvider)
        root = provider.recorder.open(ROOT, root=True)
        provider.recorder.open(CHILD).end("failed")
        root.leave()

    (trace,) = traces(path)
    outcomes = {span.name: span.attributes["eventbus.outcome"] for span in trace.spans}
    assert outcomes == {"batch": "in_flight", "algorithm a": "failed"}


def test_a_root_that_goes_on_after_the_block_follows_that_decision(tmp_path: Path) -> None:
    """It was decided about once."""
    setup = Setup()
    root = setup.open(ROOT)
    setup.open().end("failed")
    setup.keeper.settle()
    setup.open().end("ok")
    root.end("ok")

    assert reasons(setup.kept) == ["failed"] * 3
    assert setup.keeper.report.failed == 1


@pytest.mark.anyio
async def test_with_live_spans_nothing_is_held() -> None:
    """A processor of the user's sees what the sampler lets it see."""
    provider = RecordingProvider([], sampler=REFUSING, keep_failed=True)
    provider.add_span_processor(SpanProcessor())
    with pytest.raises(ValueError, match="negative"):
        await Engine[Any](algorithms=[Fussy()], tracer_provider=provider).run_event(Event.BATCH_END, -1)
    provider.shutdown()

    assert provider.kept == KeepReport(0, 0, 0, 0)


def test_without_the_opt_in_there_is_nothing_to_report() -> None:
    """A refused root is not recorded."""
    provider = RecordingProvider([], sampler=REFUSING)
    root = provider.recorder.open(ROOT)
    root.end("failed")
    provider.shutdown()

    assert not root.recording
    assert provider.kept is None


@pytest.mark.parametrize("slow", [0, -1.0, float("nan"), float("inf")])
def test_a_keep_slow_that_is_no_time_is_refused(slow: float, tmp_path: Path) -> None:
    """By name."""
    with (
        pytest.raises(ConfigurationError, match=r"keep_slow=.* seconds"),
        configure(path=tmp_path / "spans.jsonl", keep_slow=slow),
    ):
        pass
