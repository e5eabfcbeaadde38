"""`telemetry.configure(metrics=True)`: metrics over HTTP and into a file, within deadlines."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics as stock_encode
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics._internal import measurement_consumer as sdk_clock
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from eventbus_engine import Algorithm, Engine, Event, telemetry
from eventbus_engine.errors import ConfigurationError, TelemetryError
from eventbus_engine.telemetry.otlp_metrics import encode_metrics
from eventbus_engine.telemetry.reports import Recording

pytestmark = pytest.mark.usefixtures("untouched_randomness")


class Clip(Algorithm[Any, Any]):
    def match(self, event: Any, state: Any) -> bool:
        return True

    def apply(self, event: Any, state: Any, logger: Any) -> None: ...


def publish(times: int) -> None:
    """So many events with an algorithm each."""
    engine = Engine(algorithms=[Clip()])
    for _ in range(times):
        engine.sync.run_event(Event.BATCH_END)
    engine.sync.close()


def metrics_in(request: ExportMetricsServiceRequest) -> dict[str, Any]:
    """The metrics of a request by name, of any scope."""
    return {m.name: m for r in request.resource_metrics for s in r.scope_metrics for m in s.metrics}


def requests_in(path: Path) -> list[ExportMetricsServiceRequest]:
    """What stands in a file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [json_format.ParseDict(line, ExportMetricsServiceRequest()) for line in lines if "resourceMetrics" in line]


def of_collector(collector: Any) -> list[ExportMetricsServiceRequest]:
    """What a collector got."""
    bodies = [request.body for request in collector.requests if request.path == "/v1/metrics"]
    return [ExportMetricsServiceRequest.FromString(body) for body in bodies]


def test_leaving_the_block_sends_everything_to_the_same_endpoint_and_into_the_same_file(
    collector: Any, tmp_path: Path
) -> None:
    """After the spans, so that it tells what became of all of them; reports of traces do not mind the lines."""
    path = tmp_path / "spans.jsonl"
    with telemetry.configure(service_name="digits", endpoint=collector.url, path=path, metrics=True) as provider:
        publish(3)
    sent, (written,) = of_collector(collector)[-1], requests_in(path)

    assert sent == written
    assert sent.resource_metrics[0].resource == stock_resource(provider.resource)  # type: ignore[attr-defined]
    metrics = metrics_in(sent)
    assert {name for name in metrics if name.endswith("duration")} == {
        "eventbus.dispatch.duration",
        "eventbus.algorithm.duration",
    }
    (point,) = metrics["eventbus.algorithm.duration"].histogram.data_points
    assert (point.count, sum(point.bucket_counts), len(point.explicit_bounds)) == (3, 3, 19)
    assert point.min <= point.sum / 3 <= point.max
    assert metrics["eventbus.algorithm.duration"].unit == "s"
    counts = {
        what: [point.as_int for point in metrics[f"eventbus.spans.{what}"].sum.data_points]
        for what in ("recorded", "delivered", "dropped", "failed")
    }
    assert counts == {"recorded": [6, 6], "delivered": [6, 6], "dropped": [0, 0], "failed": [0, 0]}
    assert sum(len(trace.spans) for trace in Recording(path).traces()) == 6


def stock_resource(resource: Resource) -> Any:
    """A resource as the SDK's own encoder has it."""
    reader = InMemoryMetricReader()
    MeterProvider([reader], resource, shutdown_on_exit=False).get_meter("x").create_counter("x").add(1)
    data = reader.get_metrics_data()
    assert data is not None
    return stock_encode(data).resource_metrics[0].resource


def test_metrics_are_sent_from_time_to_time_and_count_from_the_start(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds; what the program measures itself goes with it."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "5")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    with telemetry.configure(metrics=True) as provider:
        meters = provider.meter_provider  # type: ignore[attr-defined]
        meters.get_meter("mine").create_counter("steps").add(7)
        publish(3)
        collector.got_one.wait(5)
        collector.got_one.clear()
        collector.got_one.wait(5)
        publish(2)
    requests = of_collector(collector)

    assert len(requests) >= 3
    counts = [
        sum(p.count for p in metrics_in(r)["eventbus.dispatch.duration"].histogram.data_points) for r in requests[1:]
    ]
    assert (counts[0], counts[-1], counts) == (3, 5, sorted(counts))
    assert [point.as_int for point in metrics_in(requests[-1])["steps"].sum.data_points] == [7]


def test_the_variables_of_metrics_beat_the_general_ones(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint, headers, compression; and no metrics where `OTEL_METRICS_EXPORTER` is none."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{collector.url}/own")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "api-key=k")
    with telemetry.configure(metrics=True):
        publish(1)
    (request,) = collector.requests
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with telemetry.configure(metrics=True) as provider:
        publish(1)
    with telemetry.configure(endpoint=collector.url, metrics=True):
        publish(1)

    assert (request.path, request.headers["api-key"]) == ("/own", "k")
    assert provider.meter_provider is None  # type: ignore[attr-defined]
    assert [request.path for request in collector.requests[1:]] == ["/v1/traces"]


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("{}/v1/traces", "/v1/metrics"), ("{}/base/v1/traces/", "/base/v1/metrics"), ("{}/", "/v1/metrics")],
)
def test_an_endpoint_for_traces_says_where_metrics_go(collector: Any, endpoint: str, expected: str) -> None:
    """Beside them."""
    with telemetry.configure(endpoint=endpoint.format(collector.url), metrics=True):
        pass

    assert [request.path for request in collector.requests] == [expected]


def test_an_endpoint_with_a_path_of_its_own_is_refused(refusing_url: str) -> None:
    """It does not say where metrics go; the error says what to do."""
    with (
        pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"),
        telemetry.configure(endpoint=f"{refusing_url}/own", metrics=True),
    ):
        pass

    assert telemetry.current_provider() is None


@pytest.mark.parametrize("interval", ["0", "-1", "soon", "inf", "nan"])
def test_an_interval_that_is_none_is_refused_by_name(
    interval: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And nothing is left configured."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    with (
        pytest.raises(ConfigurationError, match="OTEL_METRIC_EXPORT_INTERVAL"),
        telemetry.configure(path=tmp_path / "spans.jsonl", metrics=True),
    ):
        pass

    assert telemetry.current_provider() is None


@pytest.mark.parametrize("url", ["refusing_url", "silent_url"])
def test_a_dead_endpoint_keeps_the_deadline_and_is_complained_about_once(
    url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it refuses or is silent, leaving the block takes no longer than it may."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    finished = time.monotonic()
    with telemetry.configure(endpoint=request.getfixturevalue(url), metrics=True, shutdown_timeout=0.5):
        publish(1)
        while len([r for r in caplog.records if "metrics were not delivered" in r.message]) < 1:
            time.sleep(0.005)
        finished = time.monotonic()
    taken = time.monotonic() - finished

    assert taken < 30  # the retries alone would take as long as they like
    complaints = [r for r in caplog.records if "metrics were not delivered" in r.message]
    assert [r.levelno for r in complaints if r.levelno >= logging.WARNING] == [logging.WARNING]


def test_leaving_the_block_interrupts_a_send_that_hangs(silent_url: str) -> None:
    """Its own timeout is far away, the block's is not."""
    started = time.monotonic()
    with telemetry.configure(endpoint=silent_url, timeout=120, metrics=True, shutdown_timeout=0.3):
        publish(1)

    assert time.monotonic() - started < 60


def test_rejected_points_are_complained_about_until_they_are_taken(
    collector: Any, answer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial success is a failure; what is no protobuf is none."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    partial = ExportMetricsServiceResponse(
        partial_success=ExportMetricsPartialSuccess(rejected_data_points=3, error_message="too many")
    )
    for body in (partial.SerializeToString(), b"\xff not protobuf", b""):
        collector.script.append(answer(body=body))
        with telemetry.configure(metrics=True):
            pass

    (complaint,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert complaint.endswith("3 data points rejected: too many")


def test_exporting_metrics_leaves_every_global_generator_alone(refusing_url: str, collector: Any, answer: Any) -> None:
    """The retries' jitter, and the examples that the SDK keeps of measurements within a span, included."""
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    collector.script += [answer(status=503, headers={"Retry-After": "0"})] * 2
    for url in (collector.url, refusing_url):
        with telemetry.configure(endpoint=url, metrics=True, shutdown_timeout=0.2) as provider:
            meters = provider.meter_provider  # type: ignore[attr-defined]
            mine = meters.get_meter("mine").create_counter("steps")
            with provider.get_tracer("mine").start_as_current_span("outer"):
                for _ in range(100):
                    mine.add(1)
                publish(20)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    assert after == before


def test_collecting_within_a_span_draws_from_no_global_generator() -> None:
    """On a provider of the user's, the SDK keeps examples of what is measured within a sampled span."""
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    engine = Engine(algorithms=[Clip()], meter_provider=meters)
    before = random.getstate()
    from eventbus_engine.telemetry.provider import RecordingProvider

    tracers = RecordingProvider([])
    with tracers.get_tracer("mine").start_as_current_span("outer"):
        for _ in range(20):
            for _ in range(20):
                engine.sync.run_event(Event.BATCH_END)
            reader.collect()
    engine.sync.close()
    tracers.shutdown()

    assert random.getstate() == before


def test_metrics_in_json_are_what_the_stock_encoder_makes_of_them() -> None:
    """Sums that grow and that do not, gauges and histograms; integers, floats and what JSON has no number for."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], Resource({"service.name": "x"}), shutdown_on_exit=False)
    meter = provider.get_meter("scope", "1", schema_url="https://example.org/schema")
    meter.create_counter("counter", "{event}", "All of them.").add(0, {"a": 1})
    meter.create_counter("seconds").add(1.5)
    meter.create_up_down_counter("level").add(-3, {"b": [True, False]})
    meter.create_observable_gauge("gauge", [lambda _: [Observation(0), Observation(0.0, {"c": "d"})]])
    histogram = meter.create_histogram("histogram", "s", explicit_bucket_boundaries_advisory=[0.0, 1.0])
    for value in (0.0, 0.5, 2.5):
        histogram.record(value)
    data = reader.get_metrics_data()
    assert data is not None
    parsed = json_format.ParseDict(json.loads(json.dumps(encode_metrics(data))), ExportMetricsServiceRequest())

    assert parsed == stock_encode(data)


def test_without_the_extra_a_file_is_written_and_an_endpoint_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One in the environment, which nobody asked for here, is warned about."""
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", None)
    with (
        pytest.raises(TelemetryError, match=r"metrics.*eventbus-engine\[otlp\]"),
        telemetry.configure(endpoint="http://127.0.0.1:1", metrics=True),
    ):
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:1")
    with telemetry.configure(path=tmp_path / "spans.jsonl", metrics=True):
        publish(1)

    assert len(requests_in(tmp_path / "spans.jsonl")) == 1
    assert any("but sending metrics by OTLP/HTTP needs the extra" in r.message for r in caplog.records)


def test_a_forked_child_sends_no_metrics(tmp_path: Path) -> None:
    """Neither when asked to nor when it leaves the block: what it has counted goes on from what its parent had."""
    program = """
import os, sys
from eventbus_engine import Engine, Event, telemetry
engine = Engine()
with telemetry.configure(path=sys.argv[1], metrics=True) as provider:
    engine.sync.run_event(Event.BATCH_END)
    child = os.fork()
    if child == 0:
        engine.sync.run_event(Event.BATCH_END)
        provider.meter_provider.force_flush()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    path = tmp_path / "spans.jsonl"
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=60)
    (request,) = requests_in(path)

    (point,) = metrics_in(request)["eventbus.dispatch.duration"].histogram.data_points
    assert point.count == 1


def test_an_instrument_that_takes_too_long_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK gives up that collection, by the clock; the next one brings the numbers."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "5")
    hours = 3600 * 10**9
    asked = threading.Event()

    def late(_: CallbackOptions) -> list[Observation]:
        if not asked.is_set():
            monkeypatch.setattr(sdk_clock, "time_ns", lambda: time.time_ns() + hours)
            asked.set()
        return []

    path = tmp_path / "spans.jsonl"
    with telemetry.configure(path=path, metrics=True) as provider:
        meter = provider.meter_provider.get_meter("mine")  # type: ignore[attr-defined]
        for name in ("late", "later"):
            meter.create_observable_gauge(name, [late])
        publish(2)
        assert asked.wait(5)
        while not any("metrics were not collected" in record.message for record in caplog.records):
            time.sleep(0.001)

    (point,) = metrics_in(requests_in(path)[-1])["eventbus.dispatch.duration"].histogram.data_points
    assert point.count == 2
