"""The HTTP exporter against real servers: good, busy, refusing, silent, broken."""

from __future__ import annotations

import gzip
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from eventbus_engine.errors import ConfigurationError, TelemetryError
from eventbus_engine.telemetry.exporters import OtlpHttpExporter

MakeSpans = Callable[[int], list[ReadableSpan]]

pytestmark = pytest.mark.usefixtures("untouched_randomness")

SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE


def counts(exporter: OtlpHttpExporter) -> tuple[int, int, int]:
    """Exported, failed, dropped."""
    return exporter.exported, exporter.failed, exporter.dropped


def test_a_collector_receives_the_spans_as_protobuf_over_one_connection(collector: Any, make_spans: MakeSpans) -> None:
    """Every batch decodes to what the stock encoder makes of it, and the connection is kept between them."""
    exporter = OtlpHttpExporter(collector.url, headers={"api-key": "k"})
    batches = [make_spans(3), make_spans(1)]
    results = [exporter.export(batch) for batch in batches]
    exporter.shutdown()
    first, second = collector.requests

    assert results == [SUCCESS, SUCCESS]
    assert [ExportTraceServiceRequest.FromString(r.body) for r in collector.requests] == [
        encode_spans(batch) for batch in batches
    ]
    assert (first.path, first.headers["Content-Type"], first.headers["api-key"]) == (
        "/v1/traces",
        "application/x-protobuf",
        "k",
    )
    assert first.peer == second.peer
    assert counts(exporter) == (4, 0, 0)


def test_gzip_compresses_the_body_and_says_so(
    collector: Any, make_spans: MakeSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by the standard variable."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    spans = make_spans(20)
    exporter = OtlpHttpExporter(collector.url)
    exporter.export(spans)
    exporter.shutdown()
    (request,) = collector.requests

    assert request.headers["Content-Encoding"] == "gzip"
    assert ExportTraceServiceRequest.FromString(gzip.decompress(request.body)) == encode_spans(spans)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_collector_is_asked_again_after_a_backoff(
    status: int, collector: Any, answer: Any, make_spans: MakeSpans
) -> None:
    """The same batch, half a second later, give or take the jitter."""
    collector.script = [answer(status)]
    exporter = OtlpHttpExporter(collector.url)
    result = exporter.export(make_spans(1))
    exporter.shutdown()
    first, second = collector.requests

    assert result is SUCCESS
    assert first.body == second.body
    assert 0.4 <= second.at - first.at < 1.5
    assert counts(exporter) == (1, 0, 0)


def test_retry_after_in_seconds_is_honoured(collector: Any, answer: Any, make_spans: MakeSpans) -> None:
    """It replaces the backoff, which would have been shorter."""
    collector.script = [answer(429, {"Retry-After": "1"})]
    exporter = OtlpHttpExporter(collector.url)
    result = exporter.export(make_spans(1))
    exporter.shutdown()
    first, second = collector.requests

    assert result is SUCCESS
    assert second.at - first.at >= 1.0


def test_retry_after_as_a_date_is_honoured_and_nonsense_is_not(
    collector: Any, answer: Any, make_spans: MakeSpans
) -> None:
    """A date in the past means now; what does not parse means the usual backoff."""
    collector.script = [
        answer(503, {"Retry-After": formatdate(time.time() - 60, usegmt=True)}),
        answer(503, {"Retry-After": "soon"}),
    ]
    exporter = OtlpHttpExporter(collector.url)
    exporter.export(make_spans(1))
    exporter.shutdown()
    first, second, third = collector.requests

    assert second.at - first.at < 0.4
    assert third.at - second.at >= 0.4


def test_a_retry_after_beyond_the_timeout_gives_up_at_once(
    collector: Any, answer: Any, make_spans: MakeSpans, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no point in waiting for an attempt that will not be made."""
    collector.script = [answer(503, {"Retry-After": "3600"})]
    exporter = OtlpHttpExporter(collector.url, timeout=5)
    started = time.monotonic()
    result = exporter.export(make_spans(2))
    elapsed = time.monotonic() - started
    exporter.shutdown()

    assert result is FAILURE
    assert elapsed < 2
    assert counts(exporter) == (0, 2, 0)
    assert "HTTP 503 Service Unavailable; another attempt would exceed the timeout of 5 s" in caplog.text


@pytest.mark.parametrize("status", [301, 400, 401, 404, 500])
def test_a_refusal_is_not_repeated(status: int, collector: Any, answer: Any, make_spans: MakeSpans) -> None:
    """The specification names what may be sent again; nothing else is."""
    collector.script = [answer(status)]
    exporter = OtlpHttpExporter(collector.url)
    result = exporter.export(make_spans(1))
    exporter.shutdown()

    assert result is FAILURE
    assert len(collector.requests) == 1
    assert counts(exporter) == (0, 1, 0)


def test_a_partial_success_counts_what_was_rejected(
    collector: Any, answer: Any, make_spans: MakeSpans, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest has arrived, and nothing is sent again."""
    partial = ExportTracePartialSuccess(rejected_spans=2, error_message="too long")
    collector.script = [answer(body=ExportTraceServiceResponse(partial_success=partial).SerializeToString())]
    exporter = OtlpHttpExporter(collector.url)
    exporter.export(make_spans(5))
    exporter.shutdown()

    assert len(collector.requests) == 1
    assert counts(exporter) == (3, 2, 0)
    assert "rejected 2 spans: too long" in caplog.text


def test_an_answer_that_is_no_protobuf_is_still_a_success(collector: Any, answer: Any, make_spans: MakeSpans) -> None:
    """Not every server answers as the specification asks; and a huge answer does not stand before the next one."""
    collector.script = [answer(body=b"thanks!"), answer(body=b"x" * 200_000)]
    exporter = OtlpHttpExporter(collector.url)
    results = [exporter.export(make_spans(1)) for _ in range(3)]
    exporter.shutdown()

    assert results == [SUCCESS] * 3
    assert counts(exporter) == (3, 0, 0)


def test_a_connection_that_the_server_closed_is_opened_again_at_once(
    collector: Any, answer: Any, make_spans: MakeSpans
) -> None:
    """Servers close idle connections; the next batch must not wait for a backoff."""
    collector.script = [answer(hang_up=True)]
    exporter = OtlpHttpExporter(collector.url)
    exporter.export(make_spans(1))
    started = time.monotonic()
    result = exporter.export(make_spans(1))
    elapsed = time.monotonic() - started
    exporter.shutdown()

    assert result is SUCCESS
    assert elapsed < 0.4
    assert collector.requests[0].peer != collector.requests[1].peer


def test_a_refusing_port_fails_within_the_timeout_and_is_logged_once(
    refusing_url: str, make_spans: MakeSpans, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens: the batch is counted as failed, the second one does not repeat the warning."""
    exporter = OtlpHttpExporter(refusing_url, timeout=0.3)
    started = time.monotonic()
    results = [exporter.export(make_spans(1)) for _ in range(2)]
    elapsed = time.monotonic() - started
    exporter.shutdown()

    assert results == [FAILURE, FAILURE]
    assert elapsed < 1.5
    assert counts(exporter) == (0, 2, 0)
    assert [r.levelname for r in caplog.records if "were not delivered" in r.getMessage()] == ["WARNING"]


def test_a_destination_that_comes_back_is_reported(
    collector: Any, answer: Any, make_spans: MakeSpans, caplog: pytest.LogCaptureFixture
) -> None:
    """With what was lost meanwhile."""
    collector.script = [answer(400)]
    exporter = OtlpHttpExporter(collector.url)
    for _ in range(2):
        exporter.export(make_spans(3))
    exporter.shutdown()

    assert f"{collector.url}/v1/traces takes spans again; 3 were lost so far" in caplog.text


def test_a_silent_server_fails_within_the_timeout(silent_url: str, make_spans: MakeSpans) -> None:
    """The deadline covers the answer too."""
    exporter = OtlpHttpExporter(silent_url, timeout=0.5)
    started = time.monotonic()
    result = exporter.export(make_spans(1))
    elapsed = time.monotonic() - started
    exporter.shutdown()

    assert result is FAILURE
    assert elapsed < 1.5
    assert counts(exporter) == (0, 1, 0)


def export_in_thread(exporter: OtlpHttpExporter, spans: list[ReadableSpan]) -> threading.Thread:
    """As the SDK's batch processor does."""
    thread = threading.Thread(target=exporter.export, args=(spans,), daemon=True)
    thread.start()
    return thread


def test_shutdown_interrupts_a_backoff_at_once(collector: Any, answer: Any, make_spans: MakeSpans) -> None:
    """A minute of Retry-After does not hold the program back; the batch counts as dropped."""
    collector.script = [answer(503, {"Retry-After": "60"})]
    exporter = OtlpHttpExporter(collector.url, timeout=120)
    thread = export_in_thread(exporter, make_spans(2))
    assert collector.got_one.wait(10)
    started = time.monotonic()
    exporter.shutdown()
    thread.join(10)
    elapsed = time.monotonic() - started

    assert not thread.is_alive()
    assert elapsed < 1
    assert counts(exporter) == (0, 0, 2)


def test_shutdown_interrupts_a_request_in_progress_at_once(make_spans: MakeSpans) -> None:
    """The thread that waits for a silent server is woken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        exporter = OtlpHttpExporter(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=120)
        thread = export_in_thread(exporter, make_spans(2))
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(16)
            started = time.monotonic()
            exporter.shutdown()
            thread.join(10)
            elapsed = time.monotonic() - started

    assert not thread.is_alive()
    assert elapsed < 1
    assert counts(exporter) == (0, 0, 2)


def test_shutting_down_twice_is_safe_and_later_spans_are_dropped(collector: Any, make_spans: MakeSpans) -> None:
    """Nothing is sent any more, and everything is counted."""
    exporter = OtlpHttpExporter(collector.url)
    exporter.export(make_spans(1))
    exporter.shutdown()
    exporter.shutdown()
    result = exporter.export(make_spans(4))

    assert result is FAILURE
    assert len(collector.requests) == 1
    assert counts(exporter) == (1, 0, 4)


def test_a_forked_child_sends_over_a_connection_of_its_own(collector: Any) -> None:
    """It must not write into its parent's requests, nor wait for a lock that only its parent can release."""
    program = """
import os, sys
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from eventbus_engine.telemetry.exporters import OtlpHttpExporter
exporter = OtlpHttpExporter(sys.argv[1])
span = TracerProvider(resource=Resource({}), shutdown_on_exit=False).get_tracer("x").start_span("x")
exporter.export([span])
exporter._lock.acquire()
if os.fork() == 0:
    exporter.export([span])
    os._exit(0)
os.wait()
exporter._lock.release()
exporter.export([span])
"""
    subprocess.run([sys.executable, "-c", program, collector.url], check=True, timeout=60)
    parent, child, parent_again = (request.peer for request in collector.requests)

    assert parent == parent_again
    assert parent != child


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_trusts_the_certificate_of_the_standard_variable_and_no_other(
    collector: Any, make_spans: MakeSpans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that is not trusted is not tried again until the timeout."""
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    collector.server.socket = context.wrap_socket(collector.server.socket, server_side=True)
    monkeypatch.setattr(collector.server, "handle_error", lambda request, address: None)
    url = collector.url.replace("http:", "https:")
    distrustful = OtlpHttpExporter(url)
    started = time.monotonic()
    refused = distrustful.export(make_spans(1))
    elapsed = time.monotonic() - started
    distrustful.shutdown()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "cert.pem"))
    trusting = OtlpHttpExporter(url)
    accepted = trusting.export(make_spans(1))
    trusting.shutdown()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(tmp_path / "cert.pem"))
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"):
        OtlpHttpExporter(url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(tmp_path / "key.pem"))
    OtlpHttpExporter(url).shutdown()

    assert (refused, accepted) == (FAILURE, SUCCESS)
    assert elapsed < 2
    assert len(collector.requests) == 1


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protobuf is not among the plain dependencies."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.common.trace_encoder", None)

    with pytest.raises(TelemetryError, match=r'pip install "eventbus-engine\[otlp\]"'):
        OtlpHttpExporter("http://localhost:4318")
