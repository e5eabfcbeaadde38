"""`configure`: it sets up, it follows, it gives back, and it leaves on time."""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision

from eventbus_engine import Algorithm, Engine, Event
from eventbus_engine.errors import ConfigurationError, TelemetryError
from eventbus_engine.telemetry.configure import (
    configure,
    current_provider,
    generation,
    warn_about_global_randomness,
)
from eventbus_engine.telemetry.ids import PrivateIdGenerator
from eventbus_engine.telemetry.sampling import EveryNth

pytestmark = pytest.mark.usefixtures("untouched_randomness")


def read_spans(path: Path) -> list[dict[str, Any]]:
    """All spans of a file of OTLP JSON lines."""
    return [
        span
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def read_resource(path: Path) -> dict[str, str]:
    """The string attributes of the first resource in it."""
    (resource, *_) = json.loads(path.read_text().splitlines()[0])["resourceSpans"]
    return {item["key"]: item["value"].get("stringValue") for item in resource["resource"]["attributes"]}


def emit(name: str) -> None:
    """One span, through the global provider."""
    trace.get_tracer("tests").start_span(name).end()


def test_spans_go_to_the_endpoint_and_into_the_file(collector: Any, tmp_path: Path) -> None:
    """Both at once, everything delivered when the block is left."""
    path = tmp_path / "spans.jsonl"
    with configure("digits", collector.url, path=path) as provider:
        emit("one")
        inside = current_provider()
    (request,) = (ExportTraceServiceRequest.FromString(received.body) for received in collector.requests)
    (sent,) = request.resource_spans[0].scope_spans[0].spans
    (written,) = read_spans(path)

    assert inside is provider
    assert isinstance(provider, TracerProvider)
    assert isinstance(provider.id_generator, PrivateIdGenerator)
    assert (sent.name, written["name"]) == ("one", "one")
    assert sent.span_id.hex() == written["spanId"]


def test_the_endpoint_and_the_headers_may_come_from_the_environment(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard variables, no argument."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k")
    with configure():
        emit("one")
    (received,) = collector.requests

    assert (received.path, received.headers["api-key"]) == ("/v1/traces", "k")


def test_the_block_may_be_entered_again_and_kept_tracers_follow(tmp_path: Path) -> None:
    """The second notebook cell works as the first; a tracer kept from anywhere writes to whichever is on."""
    paths = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    kept: list[trace.Tracer] = []
    for path in paths:
        with configure(path=path):
            kept.append(trace.get_tracer("tests"))
            for tracer in kept:
                with tracer.start_as_current_span(path.name) as span:
                    assert span.is_recording()
        for tracer in kept:
            with tracer.start_as_current_span("outside") as span:
                assert not span.is_recording()

    assert [[span["name"] for span in read_spans(path)] for path in paths] == [["1.jsonl"], ["2.jsonl"] * 2]


def test_the_generation_changes_whenever_the_provider_does(tmp_path: Path) -> None:
    """So that what was made from a provider is known to be stale."""
    seen = [(generation(), current_provider())]
    for _ in range(2):
        with configure(path=tmp_path / "spans.jsonl") as provider:
            seen.append((generation(), provider))
        seen.append((generation(), current_provider()))

    assert len({number for number, _ in seen}) == 5
    assert [provider is None for _, provider in seen] == [True, False, True, False, True]


@pytest.mark.parametrize("function_kind", ["plain", "async"])
def test_a_kept_tracer_decorates_functions_for_whichever_provider_is_on_at_the_call(
    function_kind: str, tmp_path: Path
) -> None:
    """Decorated while one is on, called under the next; an async function is inside its span until it returns."""
    import asyncio

    with configure(path=tmp_path / "1.jsonl"):
        tracer = trace.get_tracer("tests")

        @tracer.start_as_current_span("decorated")
        def plain() -> bool:
            return trace.get_current_span().is_recording()

        @tracer.start_as_current_span("decorated")
        async def asynchronous() -> bool:
            await asyncio.sleep(0)
            return trace.get_current_span().is_recording()

    def call() -> bool:
        return plain() if function_kind == "plain" else asyncio.run(asynchronous())

    outside = call()
    with configure(path=tmp_path / "2.jsonl"):
        inside = [call(), call()]

    assert (outside, inside) == (False, [True, True])
    assert inspect.iscoroutinefunction(asynchronous)
    assert plain.__name__ == "plain"
    assert [len(read_spans(tmp_path / name)) for name in ("1.jsonl", "2.jsonl")] == [0, 2]


def test_an_exception_in_the_block_passes_and_the_spans_are_kept(tmp_path: Path) -> None:
    """The run that failed is the one whose spans are wanted."""

    def crash() -> None:
        with configure(path=tmp_path / "spans.jsonl"):
            emit("before the crash")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()

    assert [span["name"] for span in read_spans(tmp_path / "spans.jsonl")] == ["before the crash"]
    assert current_provider() is None


def test_inside_another_block_nothing_is_added_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The outer one stays in charge, after the inner one is left too."""
    with configure(path=tmp_path / "outer.jsonl") as outer:
        with configure(path=tmp_path / "inner.jsonl") as inner:
            emit("one")
        emit("two")

    assert inner is outer
    assert [span["name"] for span in read_spans(tmp_path / "outer.jsonl")] == ["one", "two"]
    assert not (tmp_path / "inner.jsonl").exists()
    assert [record.levelname for record in caplog.records if "configured already" in record.getMessage()] == ["WARNING"]


def run_program(program: str, **environment: str) -> list[str]:
    """Run it in a process of its own: OpenTelemetry's global provider can be set once per process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_a_global_provider_that_is_there_wins(tmp_path: Path) -> None:
    """What the user has set up is used as it is: same provider, no file, no shutdown, one warning."""
    program = f"""
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from eventbus_engine.telemetry.configure import configure, current_provider
own, kept = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
own.add_span_processor(SimpleSpanProcessor(kept))
print(current_provider())
trace.set_tracer_provider(own)
with configure(path={str(tmp_path / "spans.jsonl")!r}) as provider:
    trace.get_tracer("x").start_span("one").end()
trace.get_tracer("x").start_span("two").end()
print(provider is own, current_provider() is own, [span.name for span in kept.get_finished_spans()])
"""
    printed = run_program(program)

    assert printed == [
        "None",
        "True True ['one', 'two']",
        "tracing is configured already, by a TracerProvider; telemetry.configure() leaves it as it is and adds nothing",
    ]
    assert not (tmp_path / "spans.jsonl").exists()


def test_a_tracer_from_before_the_first_block_follows_too(tmp_path: Path) -> None:
    """Libraries fetch theirs when they are imported, from the API's own proxy."""
    program = f"""
from opentelemetry import trace
from eventbus_engine.telemetry.configure import configure
early = trace.get_tracer("early")
print(early.start_span("zero").is_recording())
for number in range(2):
    with configure(path={str(tmp_path)!r} + f"/{{number}}.jsonl"):
        print(early.start_span("one").is_recording())
    print(early.start_span("two").is_recording())
"""
    assert run_program(program) == ["False", "True", "False", "True", "False"]


def test_importing_and_asking_needs_no_sdk() -> None:
    """A program that does not trace does not load it, let alone the exporter's HTTP and protobuf."""
    program = """
import sys
from eventbus_engine.telemetry.configure import current_provider, generation
print(current_provider(), generation())
print([name for name in ("opentelemetry.sdk.trace", "http.client", "google.protobuf") if name in sys.modules])
"""
    assert run_program(program) == ["None 0", "[]"]


def test_otel_sdk_disabled_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A no-op provider; nothing is installed and no file appears."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with configure(path=tmp_path / "spans.jsonl") as provider:
        recording = provider.get_tracer("x").start_span("x").is_recording()
        during = current_provider()

    assert (recording, during) == (False, None)
    assert not (tmp_path / "spans.jsonl").exists()


@pytest.mark.parametrize(
    ("service_name", "attributes", "environment", "expected"),
    [
        ("argument", {"service.name": "attribute"}, {"OTEL_SERVICE_NAME": "variable"}, "argument"),
        (None, {"service.name": "attribute"}, {"OTEL_SERVICE_NAME": "variable"}, "attribute"),
        (None, None, {"OTEL_SERVICE_NAME": "a", "OTEL_RESOURCE_ATTRIBUTES": "service.name=b"}, "a"),
        (None, None, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=b,team=t"}, "b"),
    ],
)
def test_the_service_name_comes_from_the_nearest_source(
    service_name: str | None,
    attributes: dict[str, str] | None,
    environment: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Argument, resource attributes, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with configure(service_name, path=tmp_path / "spans.jsonl", resource_attributes=attributes):
        emit("one")

    assert read_resource(tmp_path / "spans.jsonl")["service.name"] == expected


def test_the_sampler_and_the_queue_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler given here, OTEL_TRACES_SAMPLER, and OTEL_BSP_* with an error that names them."""
    with configure(path=tmp_path / "off.jsonl", sampler=ALWAYS_OFF):
        emit("one")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with configure(path=tmp_path / "off.jsonl"):
        emit("two")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")

    assert read_spans(tmp_path / "off.jsonl") == []
    with pytest.raises(ConfigurationError, match="OTEL_BSP"), configure(path=tmp_path / "x.jsonl"):
        pass
    assert current_provider() is None


def test_processors_of_the_user_are_flushed_and_shut_down() -> None:
    """The provider in the block is the SDK's; what is added to it ends with it."""
    ended: list[str] = []

    class Recorder(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span.name)

        def shutdown(self) -> None:
            ended.append("shutdown")

    with configure() as provider:
        assert isinstance(provider, TracerProvider)
        provider.add_span_processor(Recorder())
        emit("one")

    assert ended == ["one", "shutdown"]


@pytest.mark.parametrize("kind", ["refusing_url", "silent_url", "unreachable_url"])
def test_leaving_the_block_keeps_its_deadline_whatever_the_endpoint_does(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens, nobody answers, no handshake: one second is one second, and the file is complete anyway."""
    path = tmp_path / "spans.jsonl"
    with configure(endpoint=request.getfixturevalue(kind), path=path, timeout=20, shutdown_timeout=1.0):
        for number in range(700):
            emit(f"span {number}")
        started = time.monotonic()
    elapsed = time.monotonic() - started
    warnings = [record.getMessage() for record in caplog.records if "did not reach" in record.getMessage()]

    assert elapsed < 1.5
    assert len(read_spans(path)) == 700
    assert [warning.split(" http")[0] for warning in warnings] == ["700 of 700 spans did not reach"]


def test_a_processor_of_the_user_that_hangs_does_not_hold_the_block(caplog: pytest.LogCaptureFixture) -> None:
    """The deadline covers what others have added too."""
    release = threading.Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            release.wait(30)

    with configure(shutdown_timeout=0.5) as provider:
        assert isinstance(provider, TracerProvider)
        provider.add_span_processor(Stuck())
        started = time.monotonic()
    elapsed = time.monotonic() - started
    release.set()

    assert elapsed < 0.75


def test_spans_that_a_full_queue_pushed_out_are_reported(
    collector: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest go, and all of them are counted."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    blocked = threading.Event()
    send = collector.server.finish_request

    def wait_first(*args: Any) -> None:
        blocked.wait(30)
        send(*args)

    monkeypatch.setattr(collector.server, "finish_request", wait_first)
    with configure(endpoint=collector.url):
        for number in range(20):
            emit(f"span {number}")
        blocked.set()
    sent = sum(
        len(ExportTraceServiceRequest.FromString(received.body).resource_spans[0].scope_spans[0].spans)
        for received in collector.requests
    )
    (warning,) = (r.getMessage() for r in caplog.records if "did not reach" in r.getMessage())

    assert 4 <= sent <= 8
    assert warning == (
        f"{20 - sent} of 20 spans did not reach {collector.url}/v1/traces: 0 failed, {20 - sent} dropped"
    )


def test_without_the_extra_an_argument_raises_and_a_variable_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable set for the whole machine must not stop a program; an endpoint asked for must not be ignored."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.common.trace_encoder", None)
    with pytest.raises(TelemetryError, match="otlp"), configure(endpoint="http://localhost:4318"):
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    with configure(path=tmp_path / "spans.jsonl"):
        emit("one")

    assert len(read_spans(tmp_path / "spans.jsonl")) == 1
    assert 'pip install "eventbus-engine[otlp]"' in caplog.text


@pytest.mark.parametrize("shutdown_timeout", [0, -1, float("inf"), float("nan")])
def test_a_shutdown_timeout_that_is_no_time_is_refused(shutdown_timeout: float) -> None:
    """By name, before anything is set up."""
    with pytest.raises(ConfigurationError, match="shutdown_timeout="), configure(shutdown_timeout=shutdown_timeout):
        pass


def sdk_provider(**options: Any) -> TracerProvider:
    """A provider as a user would set it up."""
    provider = TracerProvider(shutdown_on_exit=False, **options)
    provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    return provider


def test_a_provider_that_draws_from_the_global_random_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Which says why, and what to use instead; each provider once."""
    provider = sdk_provider()
    for _ in range(2):
        warn_about_global_randomness(provider)
    warnings = [record.getMessage() for record in caplog.records]

    assert len(warnings) == 1
    assert "global random module" in warnings[0]
    assert "RandomIdGenerator (give the TracerProvider id_generator=telemetry.PrivateIdGenerator())" in warnings[0]


class OwnRandomness(RandomIdGenerator):
    """Random ids from a generator of its own, whatever its base does."""

    def __init__(self) -> None:
        self._own = random.Random(1)

    def generate_span_id(self) -> int:
        return self._own.getrandbits(64)

    def generate_trace_id(self) -> int:
        return self._own.getrandbits(128)


@pytest.mark.parametrize("generator", [PrivateIdGenerator(), OwnRandomness()])
def test_a_provider_with_ids_of_its_own_gets_no_warning(
    generator: RandomIdGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    """Ours, and a subclass of the stock one that draws elsewhere."""
    with caplog.at_level(logging.WARNING):
        warn_about_global_randomness(sdk_provider(id_generator=generator))
        warn_about_global_randomness(trace.NoOpTracerProvider())

    assert caplog.records == []


def test_a_stock_exporter_gets_a_warning_even_with_private_ids(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its retries draw from the global random."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", pytest)
    warn_about_global_randomness(sdk_provider(id_generator=PrivateIdGenerator()))

    assert "use telemetry.OtlpHttpExporter" in caplog.text


def names_under(path: Path, **options: Any) -> list[str]:
    """The names of the spans of five pairs, each with an algorithm, under these options."""
    with configure(path=path, **options):
        engine = Engine(algorithms=[LabelSmoothing()])
        for _ in range(5):
            with engine.sync.pair("before_loss"):
                pass
        engine.sync.close()
    return [span["name"] for span in read_spans(path)]


class LabelSmoothing(Algorithm[Any, Any]):
    """Runs before the loss."""

    def match(self, event: Any, state: Any) -> bool:
        """There."""
        return event is Event.BEFORE_LOSS

    def apply(self, event: Any, state: Any, logger: Any) -> int:
        """Nothing."""
        return 0


def test_every_nth_root_is_kept_the_first_included(tmp_path: Path) -> None:
    """One decision for a root and all that is below it."""
    names = names_under(tmp_path / "spans.jsonl", sample_every=3)

    assert names == ["algorithm label_smoothing", "dispatch before_loss", "dispatch after_loss", "loss"] * 2


def test_a_sampler_that_counts_follows_a_parent_and_counts_names_apart() -> None:
    """And does not remember names without end."""
    sampler = EveryNth(2)

    def kept(name: str) -> bool:
        return sampler.should_sample(None, 1, name).decision is Decision.RECORD_AND_SAMPLE

    assert [kept("a"), kept("b"), kept("a"), kept("b"), kept("a")] == [True, True, False, False, True]
    assert sum(kept(f"name {number}") for number in range(3000)) == 998 + 1001
    for flags in (0, 1):
        parent = trace.SpanContext(1, 1, True, trace.TraceFlags(flags))
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        assert sampler.should_sample(context, 1, "a").decision.is_sampled() is bool(flags)  # type: ignore[no-untyped-call]


def test_a_root_that_says_it_is_the_last_is_kept_out_of_turn() -> None:
    """It counts as any other; what has a parent says so in vain."""
    sampler = EveryNth(3)
    parent = trace.set_span_in_context(trace.NonRecordingSpan(trace.SpanContext(1, 1, False, trace.TraceFlags(0))))

    def kept(attributes: dict[str, Any] | None = None, context: Any = None) -> bool:
        result = sampler.should_sample(context, 1, "batch", attributes=attributes)
        return result.decision is Decision.RECORD_AND_SAMPLE

    found = [kept(), kept({"train.batch": 1}), kept({"train.last": True}), kept(), kept({"train.last": False})]
    assert found == [True, False, True, True, False]
    assert not kept({"train.last": True}, parent)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("algorithm", ["dispatch before_loss", "dispatch after_loss", "loss"]),
        ("pair", ["algorithm label_smoothing", "dispatch before_loss", "dispatch after_loss"]),
        ("dispatch", ["loss"]),
    ],
)
def test_groups_of_spans_can_be_switched_off(group: str, expected: list[str], tmp_path: Path) -> None:
    """The others stay."""
    assert names_under(tmp_path / "spans.jsonl", groups={group: False, "callback": True}) == expected * 5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"groups": {"callbacks": False}}, "callbacks; there are algorithm"),
        ({"sample_every": 0}, "sample_every=0"),
        ({"sample_every": 2, "sampler": ALWAYS_OFF}, "give one of them"),
    ],
)
def test_budgets_that_do_not_fit_are_refused_by_name(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Nothing is set up."""
    with pytest.raises(ConfigurationError, match=named), configure(path=tmp_path / "spans.jsonl", **options):
        pass

    assert current_provider() is None
