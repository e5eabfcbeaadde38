"""The settings of OTLP/HTTP, from arguments or from the standard `OTEL_EXPORTER_OTLP_*` variables.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/: the variable of the signal (`..._TRACES_...`) beats the
general one, an empty variable counts as unset, and one that does not parse is ignored with a warning.
"""

from __future__ import annotations

import http.client
import logging
import math
import os
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from eventbus_engine.errors import ConfigurationError

__all__ = [
    "Endpoint",
    "Signal",
    "endpoint_in_environment",
    "export_wanted",
    "read_retry_after",
    "resolve_compression",
    "resolve_headers",
    "resolve_timeout",
]

_logger = logging.getLogger("eventbus_engine")

Signal: TypeAlias = Literal["traces", "metrics"]

_DEFAULT_TIMEOUT = 10.0
_SUSPICIOUS_TIMEOUT = 1000.0

# RFC 9110 §5.1 and §5.5: a token; visible characters of Latin-1, spaces and tabs, so above all no line break.
_HEADER_NAME = re.compile(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True)
class Endpoint:
    """Where to post: the whole URL, and the parts of it that a connection needs."""

    url: str
    host: str
    port: int | None
    target: str
    tls: bool

    @classmethod
    def resolve(cls, endpoint: str | None, signal: Signal = "traces") -> Endpoint:
        """The endpoint for a signal: the argument, else the environment's, else the local collector's.

        Raises:
            ConfigurationError: no URL with http or https and a host; or a path that is that of another signal alone.
        """
        if endpoint is not None:
            parsed = cls.parse(endpoint, "endpoint")
            path = urlsplit(endpoint).path.strip("/")
            return parsed.below(signal) if not path else parsed if signal == "traces" else parsed.beside(signal)
        name = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
        if value := os.environ.get(name, "").strip():
            return cls.parse(value, name)
        base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or "http://localhost:4318"
        return cls.parse(base, "OTEL_EXPORTER_OTLP_ENDPOINT").below(signal)

    @classmethod
    def parse(cls, url: str, source: str) -> Endpoint:
        """Take a URL apart; `source` names it in errors."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as exc:
            raise ConfigurationError(f"{source}={url!r} is no URL: {exc}") from exc
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigurationError(
                f"{source}={url!r} needs a scheme, http or https, and a host, as in http://localhost:4318"
            )
        if parts.username is not None:
            raise ConfigurationError(
                f"{source} for {host} holds credentials; pass them as a header, as in headers={{'Authorization': ...}}"
            )
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(url, host, port, target, parts.scheme == "https")

    def below(self, signal: Signal) -> Endpoint:
        """The endpoint for a signal below this base."""
        parts = urlsplit(self.url)
        path = f"{parts.path.rstrip('/')}/v1/{signal}"
        return self.parse(parts._replace(path=path).geturl(), "endpoint")

    def beside(self, signal: Signal) -> Endpoint:
        """The endpoint for a signal beside this one, which is for traces.

        Raises:
            ConfigurationError: its path does not say where that is.
        """
        parts = urlsplit(self.url)
        base, found, rest = parts.path.rpartition("/v1/traces")
        if not found or rest.strip("/"):
            raise ConfigurationError(
                f"endpoint={self.url!r} is for traces alone, so there is no telling where {signal} go; give one "
                f"without a path, or no endpoint and OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
            )
        return self.parse(parts._replace(path=base).geturl(), "endpoint").below(signal)

    def tls_context(self, signal: Signal = "traces") -> ssl.SSLContext | None:
        """The TLS settings: the system's authorities, or the standard `..._CERTIFICATE` and `..._CLIENT_*` files.

        Raises:
            ConfigurationError: one of the files cannot be loaded.
        """
        if not self.tls:
            return None
        authorities = _environment("CERTIFICATE", signal)[1]
        certificate = _environment("CLIENT_CERTIFICATE", signal)[1]
        try:
            context = ssl.create_default_context(cafile=authorities or None)
            if certificate:
                context.load_cert_chain(certificate, _environment("CLIENT_KEY", signal)[1] or None)
        except OSError as exc:
            raise ConfigurationError(
                f"cannot load the TLS files of OTEL_EXPORTER_OTLP_CERTIFICATE={authorities!r}, "
                f"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE={certificate!r}: {exc}"
            ) from exc
        return context

    def connection(self, tls_context: ssl.SSLContext | None) -> http.client.HTTPConnection:
        """A connection to this endpoint, not yet opened."""
        if tls_context is None:
            return http.client.HTTPConnection(self.host, self.port)
        return http.client.HTTPSConnection(self.host, self.port, context=tls_context)


def endpoint_in_environment(signal: Signal = "traces") -> bool:
    """Whether the environment asks for an export: an endpoint is set, and `OTEL_TRACES_EXPORTER` is not `none`."""
    return export_wanted(signal) and bool(_environment("ENDPOINT", signal)[1])


def export_wanted(signal: Signal) -> bool:
    """Whether the environment lets a signal be exported: `OTEL_METRICS_EXPORTER`, say, is not `none`."""
    return os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() != "none"


def resolve_timeout(timeout: float | None, signal: Signal = "traces") -> float:
    """Seconds for a batch: the argument, else the environment's, else 10.

    Raises:
        ConfigurationError: the argument is not positive.
    """
    if timeout is not None:
        if not 0 < timeout < math.inf:
            raise ConfigurationError(f"timeout={timeout!r} must be a positive, finite number of seconds")
        return timeout
    name, value = _environment("TIMEOUT", signal)
    if not value:
        return _DEFAULT_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        _logger.warning("%s=%r is no positive number of seconds; taking %g", name, value, _DEFAULT_TIMEOUT)
        return _DEFAULT_TIMEOUT
    if seconds >= _SUSPICIOUS_TIMEOUT:
        _logger.warning(
            "%s=%s counts seconds, as everywhere in OpenTelemetry Python; is it in milliseconds?", name, value
        )
    return seconds


def resolve_compression(compression: str | None, signal: Signal = "traces") -> str:
    """`"gzip"` or `"none"`: the argument, else the environment's, else `"none"`.

    Raises:
        ConfigurationError: the argument is something else.
    """
    name, value = ("compression", compression) if compression is not None else _environment("COMPRESSION", signal)
    chosen = value.strip().lower() or "none"
    if chosen in ("gzip", "none"):
        return chosen
    if compression is not None:
        raise ConfigurationError(f"compression={compression!r} is not supported; take 'gzip' or 'none'")
    _logger.warning("%s=%r is neither 'gzip' nor 'none'; taking 'none'", name, value)
    return "none"


def resolve_headers(headers: Mapping[str, str] | None, signal: Signal = "traces") -> dict[str, str]:
    """The additional headers: the argument, else the environment's `key=value,key=value`, percent-decoded.

    Raises:
        ConfigurationError: the name or value of one in the argument cannot stand in an HTTP request.
    """
    if headers is not None:
        for key, value in headers.items():
            if not _is_header(key, value):
                # Not the value: it may be a secret.
                raise ConfigurationError(f"header {key!r} cannot stand in an HTTP request; use one line of Latin-1")
        return dict(headers)
    name, text = _environment("HEADERS", signal)
    parsed: dict[str, str] = {}
    for number, item in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        key, separator, value = (unquote(part).strip() for part in item.partition("="))
        if separator and _is_header(key, value):
            parsed[key] = value
        else:
            _logger.warning("item %d of %s is no key=value that HTTP allows; it is left out", number, name)
    return parsed


def read_retry_after(value: str | None) -> float | None:
    """Seconds to wait, from either form of the header (RFC 9110 §10.2.3); None if there is none, or none to read."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _is_header(key: str, value: str) -> bool:
    return bool(_HEADER_NAME.fullmatch(key) and _HEADER_VALUE.fullmatch(value))


def _environment(setting: str, signal: Signal) -> tuple[str, str]:
    """The name and the stripped value of the variable that holds a setting; the value is empty if none does."""
    general = f"OTEL_EXPORTER_OTLP_{setting}"
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{setting}", general):
        if value := os.environ.get(name, "").strip():
            return name, value
    return general, ""
