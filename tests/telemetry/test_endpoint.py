"""The standard variables of the OTLP exporter, and the arguments that stand before them."""

from __future__ import annotations

import pytest

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.endpoint import (
    Endpoint,
    endpoint_in_environment,
    resolve_compression,
    resolve_headers,
    resolve_timeout,
)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("argument", "environment", "expected"),
    [
        (None, {}, "http://localhost:4318/v1/traces"),
        (None, {ENDPOINT: "http://host:1"}, "http://host:1/v1/traces"),
        (None, {ENDPOINT: "https://host/base/?key=1"}, "https://host/base/v1/traces?key=1"),
        (None, {TRACES_ENDPOINT: "http://host:1/"}, "http://host:1/"),
        (None, {TRACES_ENDPOINT: "http://host/own", ENDPOINT: "http://other"}, "http://host/own"),
        (None, {TRACES_ENDPOINT: " ", ENDPOINT: "http://other"}, "http://other/v1/traces"),
        ("http://host:1", {TRACES_ENDPOINT: "http://other"}, "http://host:1/v1/traces"),
        ("http://host:1/", {}, "http://host:1/v1/traces"),
        ("http://host:1/own", {}, "http://host:1/own"),
    ],
)
def test_the_endpoint_comes_from_the_argument_then_the_signal_then_the_base(
    argument: str | None, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal's endpoint is used as it is; the base, and an argument without a path, get /v1/traces."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert Endpoint.resolve(argument).url == expected


def test_an_endpoint_is_taken_apart_for_the_connection() -> None:
    """Host, port, what stands in the request line, and whether to speak TLS."""
    actual = Endpoint.resolve("https://[::1]:8443/own/path?key=1")

    assert (actual.host, actual.port, actual.target, actual.tls) == ("::1", 8443, "/own/path?key=1", True)


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://host:4317", "http://", "http://host:port", "http://[::1"])
def test_an_endpoint_that_is_no_url_is_refused_by_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and shows how it should look."""
    monkeypatch.setenv(ENDPOINT, url)

    with pytest.raises(ConfigurationError, match=ENDPOINT):
        Endpoint.resolve(None)


def test_credentials_in_the_url_are_refused_without_being_repeated() -> None:
    """They would not be sent, and must not end in a log."""
    with pytest.raises(ConfigurationError, match="pass them as a header") as caught:
        Endpoint.resolve("http://user:hunter2@host")

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://host"}, True),
        ({TRACES_ENDPOINT: "http://host"}, True),
        ({ENDPOINT: "http://host", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://host", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_the_environment_asks_for_an_export_with_an_endpoint(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes it back with OTEL_TRACES_EXPORTER=none."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert endpoint_in_environment() is expected


def test_headers_of_the_environment_are_percent_decoded_and_bad_ones_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A value may hold an equals sign; what HTTP forbids is named by its place, since it may be secret."""
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b%3D, Authorization = Basic eA==,secret,x=evil%0d%0aInjected: 1,"
    )
    actual = resolve_headers(None)

    assert actual == {"api-key": "a b=", "Authorization": "Basic eA=="}
    assert [record.getMessage() for record in caplog.records] == [
        f"item {number} of OTEL_EXPORTER_OTLP_HEADERS is no key=value that HTTP allows; it is left out"
        for number in (3, 4)
    ]


def test_headers_of_the_signal_or_the_argument_replace_the_general_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not merged."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "a=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "b=2")

    assert resolve_headers(None) == {"b": "2"}
    assert resolve_headers({"c": "3"}) == {"c": "3"}
    assert resolve_headers({}) == {}


@pytest.mark.parametrize(("key", "value"), [("", "x"), ("a b", "x"), ("a", "x\r\nb: 1"), ("a", "€")])
def test_a_header_that_http_forbids_is_refused_by_name(key: str, value: str) -> None:
    """At construction, not in the middle of the run."""
    with pytest.raises(ConfigurationError, match="cannot stand in an HTTP request"):
        resolve_headers({key: value})


@pytest.mark.parametrize(
    ("argument", "variable", "expected", "warns"),
    [
        (None, None, 10.0, False),
        (None, "2.5", 2.5, False),
        (7, "2.5", 7, False),
        (None, "soon", 10.0, True),
        (None, "-1", 10.0, True),
        (None, "inf", 10.0, True),
        (None, "10000", 10000.0, True),
    ],
)
def test_the_timeout_counts_seconds_and_warns_about_what_does_not_look_like_it(
    argument: float | None,
    variable: str | None,
    expected: float,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in OpenTelemetry Python; a variable that does not parse is ignored with a warning."""
    if variable is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", variable)

    assert resolve_timeout(argument) == expected
    assert bool(caplog.records) is warns


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    """An argument is a programmer's, so it raises."""
    with pytest.raises(ConfigurationError, match="timeout="):
        resolve_timeout(timeout)


def test_compression_is_gzip_or_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The variable's other values are ignored with a warning, the argument's are refused."""
    assert resolve_compression(None) == "none"

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "GZIP")

    assert (resolve_compression(None), resolve_compression("none")) == ("gzip", "none")

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zstd")

    assert resolve_compression(None) == "none"
    assert "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION='zstd'" in caplog.text

    with pytest.raises(ConfigurationError, match="'zstd' is not supported"):
        resolve_compression("zstd")


def test_tls_files_that_cannot_be_loaded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction, by the variable."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem")

    with pytest.raises(ConfigurationError, match=r"/nowhere/ca\.pem"):
        Endpoint.resolve("https://host").tls_context()

    assert Endpoint.resolve("http://host").tls_context() is None
