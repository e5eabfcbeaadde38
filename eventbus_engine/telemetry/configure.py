"""Switching tracing on for a while: `configure`, and what the rest of the program asks about it.

OpenTelemetry lets a process set its global provider once, for good. But `configure` is a context manager, to be used
again in the next notebook cell or the next test. So what it installs, once, is a small provider of our own that hands
every call on to whichever SDK provider is configured at the moment, or to a no-op one. Tracers are usually fetched
once and kept; those fetched from here follow along too.

The SDK is imported when it is needed: a program that does not trace does not pay for it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import NoOpTracer, NoOpTracerProvider, ProxyTracerProvider, Span, Tracer, TracerProvider

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.telemetry.meters import CONFIGURED, global_meter_provider
from eventbus_engine.telemetry.sigterm import ending_on_sigterm

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler

    from eventbus_engine.telemetry.exporters import OtlpExporter
    from eventbus_engine.telemetry.metric_export import MetricPipeline
    from eventbus_engine.telemetry.provider import RecordingProvider

__all__ = ["configure", "current_provider", "generation", "warn_about_global_randomness"]

_logger = logging.getLogger("eventbus_engine")

_STOCK_EXPORTERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)


@contextmanager
def configure(  # house: the body is short; its documentation is what users need in one place
    service_name: str | None = None,
    endpoint: str | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    resource_attributes: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    compression: str | None = None,
    sampler: Sampler | None = None,
    sample_every: int | None = None,
    groups: Mapping[str, bool] | None = None,
    metrics: bool = False,
    keep_failed: bool = False,
    keep_slow: float | None = None,
    shutdown_timeout: float = 5.0,
    handle_sigterm: bool = False,
) -> Generator[TracerProvider, None, None]:
    """Trace what runs inside the block, and send the spans to a collector, into a file, or both.

    Example:
        >>> with configure(service_name="digits", path="runs/digits/spans.jsonl"):
        ...     pass  # train

    Wrap it around the event loop (`anyio.run`), not around a part of a coroutine: leaving it blocks, for up to
    `shutdown_timeout`, until the last spans are out. A global provider that is there already wins: it is what the
    block gets, unchanged, with one warning. `OTEL_SDK_DISABLED=true` makes the block get a no-op provider and
    nothing is set up. What is set up reads the standard variables: `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*`,
    `OTEL_SPAN_*` and those of `OtlpHttpExporter`.

    Args:
        service_name: the resource attribute `service.name`; default `OTEL_SERVICE_NAME`, then
            `OTEL_RESOURCE_ATTRIBUTES`, then the SDK's `unknown_service`.
        endpoint: an OTLP/HTTP endpoint, see `OtlpHttpExporter`; default the one in `OTEL_EXPORTER_OTLP_*`, unless
            `OTEL_TRACES_EXPORTER` is `none`. No export over HTTP if there is neither.
        path: a file for OTLP JSON lines, see `OtlpJsonFileExporter`.
        resource_attributes: further attributes of the resource.
        headers: see `OtlpHttpExporter`.
        timeout: see `OtlpHttpExporter`; seconds.
        compression: see `OtlpHttpExporter`.
        sampler: an SDK sampler; default `OTEL_TRACES_SAMPLER`, else every span.
        sample_every: instead of a sampler: the first root of each name, as `batch`, every n-th after it, and the last
            where that is known at its start.
        groups: False for kinds of the engine's spans that are not wanted: `dispatch` (with all that is below it),
            `algorithm`, `callback`, `pair`, `section`. What runs in such a one is a child of what is around it.
        metrics: whether to send metrics too: every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds (60000) to the same
            endpoint, unless `OTEL_METRICS_EXPORTER` is `none`, and into the same file. Jaeger does not take them.
        keep_failed: whether to keep the engine's own spans of a root that was not sampled if something in it failed,
            was cancelled or timed out. They carry `eventbus.kept`.
        keep_slow: likewise if it took longer than this; seconds.
        shutdown_timeout: seconds that leaving the block may take, however dead the endpoint is. What could not be
            delivered by then is given up, counted and logged. Spans of engines that have not ended by then are
            exported as they are, with status ERROR and `eventbus.in_flight`.
        handle_sigterm: whether SIGTERM ends the tracing in the same way first, while the program goes on. Then the
            handler that was there before is called, or the process dies of the signal as it would have; by a second
            SIGTERM at once. Only on the main thread.

    Yields:
        The provider in effect: the SDK's, so that span processors can be added to it, unless see above.

    Raises:
        ConfigurationError: an argument, or the endpoint in the environment, cannot be used; `handle_sigterm` on
            another thread than the main one.
        TelemetryError: `endpoint` is given, but the extra `otlp` is not installed.
    """
    if not 0 < shutdown_timeout < math.inf:
        raise ConfigurationError(f"shutdown_timeout={shutdown_timeout!r} must be a positive, finite number of seconds")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield NoOpTracerProvider()
        return
    if (present := current_provider()) is not None:
        _logger.warning(
            "tracing is configured already, by a %s; telemetry.configure() leaves it as it is and adds nothing",
            type(present).__qualname__,
        )
        yield present
        return
    if handle_sigterm and threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("handle_sigterm=True works on the main thread only; call telemetry.configure there")
    if sample_every is not None:
        sampler = _every_nth(sample_every, sampler)
    exporters = _make_exporters(endpoint, path, headers, timeout, compression)
    provider = _make_provider(exporters, service_name, resource_attributes, sampler, groups, keep_failed, keep_slow)
    pipeline = _make_pipeline(provider, endpoint, path, headers, timeout, compression) if metrics else None
    _GLOBAL.activate(provider)
    CONFIGURED.metrics = pipeline.engines if pipeline is not None else None

    def end() -> None:
        deadline = time.monotonic() + shutdown_timeout
        _GLOBAL.activate(None)
        CONFIGURED.metrics = None
        provider.end_open_spans()
        # The metrics come last: they tell what became of the spans.
        provider.close(shutdown_timeout if pipeline is None else shutdown_timeout * 0.75)
        if pipeline is not None:
            pipeline.close(deadline - time.monotonic())

    try:
        with ending_on_sigterm(end) if handle_sigterm else nullcontext():
            yield provider
    finally:
        if _GLOBAL.active is provider:
            end()


def current_provider() -> TracerProvider | None:
    """The provider that spans should go to: the one under `configure`, or a global one somebody else has set.

    Returns:
        None if tracing is not configured, so that spans need not be made at all.
    """
    if _GLOBAL.active is not None:
        return _GLOBAL.active
    # Where the API keeps what has been set. Asking it is many times as dear: it reads the environment every time.
    if _GLOBAL.asked and trace._TRACER_PROVIDER is None:
        return None
    _GLOBAL.asked = hasattr(trace, "_TRACER_PROVIDER")  # or never, by another version of the API
    provider = trace.get_tracer_provider()
    if provider is _GLOBAL or isinstance(provider, (ProxyTracerProvider, NoOpTracerProvider)):
        return None
    return provider


def generation() -> int:
    """A number that changes whenever `configure` is entered or left: what was made from the provider is stale then."""
    return _GLOBAL.generation


def warn_about_global_randomness(provider: TracerProvider) -> None:
    """Warn, once per provider, if tracing through it draws from the global `random`.

    Seeded ranks then share their ids, and a training run with tracing is not the run without. Judged by public
    attributes alone: the id generator, and whether one of OpenTelemetry's OTLP exporters, whose retries draw from
    `random`, has been imported.
    """
    if provider in _warned:
        return
    culprits: list[str] = []
    stock = sys.modules.get("opentelemetry.sdk.trace.id_generator")
    generator = getattr(provider, "id_generator", None)
    if stock is not None and _draws_like(generator, stock.RandomIdGenerator):
        culprits.append(
            f"its {type(generator).__name__} (give the TracerProvider id_generator=telemetry.PrivateIdGenerator())"
        )
    if any(name in sys.modules for name in _STOCK_EXPORTERS):
        culprits.append("the retries of the stock OTLP exporter (use telemetry.OtlpHttpExporter)")
    if culprits:
        # A provider that cannot be referenced weakly is warned about each time.
        with suppress(TypeError):
            _warned.add(provider)
        _logger.warning(
            "the TracerProvider draws from the global random module, so that processes seeded alike share their ids "
            "and tracing changes seeded results: %s",
            "; ".join(culprits),
        )


def _draws_like(generator: object, stock: type) -> bool:
    """Whether one of the generator's methods is the stock one, inherited by a subclass included."""
    return isinstance(generator, stock) and any(
        getattr(type(generator), method) is getattr(stock, method)
        for method in ("generate_span_id", "generate_trace_id")
    )


class _SwitchableProvider(TracerProvider):
    """The global provider: hands on to `active`, to a no-op provider while there is none."""

    def __init__(self) -> None:
        self.active: SdkTracerProvider | None = None
        self.asked = False
        self.generation = 0
        self._lock = threading.Lock()

    def activate(self, provider: SdkTracerProvider | None) -> None:
        with self._lock:
            if provider is not None and trace.get_tracer_provider() is not self:
                trace.set_tracer_provider(self)
            self.active = provider
            self.generation += 1

    def get_tracer(self, *args: Any, **kwargs: Any) -> Tracer:
        """A tracer that follows the provider in effect; the arguments are those of the API."""
        return _SwitchableTracer(args, kwargs)


class _SwitchableTracer(Tracer):
    """A tracer that may be kept for the life of the process."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        # One attribute, so that a thread never sees a provider of one generation and a tracer of another.
        self._resolved: tuple[SdkTracerProvider | None, Tracer] = (None, NoOpTracer())

    def resolve(self) -> Tracer:
        provider, tracer = self._resolved
        if provider is not _GLOBAL.active:
            provider = _GLOBAL.active
            tracer = NoOpTracer() if provider is None else provider.get_tracer(*self._args, **self._kwargs)
            self._resolved = (provider, tracer)
        return tracer

    def start_span(self, *args: Any, **kwargs: Any) -> Span:
        return self.resolve().start_span(*args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        return _CurrentSpan(self, args, kwargs)


class _CurrentSpan:
    """What `start_as_current_span` returns: a context manager, and a decorator of functions, plain or async.

    As a decorator it outlives the provider that was there when the function was defined, so it asks on each call.
    """

    def __init__(self, tracer: _SwitchableTracer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._new = functools.partial(_CurrentSpan, tracer, args, kwargs)
        self._tracer = tracer
        self._args = args
        self._kwargs = kwargs

    def __enter__(self) -> Span:
        # The API's decorator hides the signature from type checkers.
        tracer: Any = self._tracer.resolve()
        self._entered: AbstractContextManager[Span] = tracer.start_as_current_span(*self._args, **self._kwargs)
        span: Span = self._entered.__enter__()
        return span

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, value, traceback)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self._new():
                    return await function(*args, **kwargs)

            return traced_coroutine

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._new():
                return function(*args, **kwargs)

        return traced


_GLOBAL = _SwitchableProvider()
_warned: weakref.WeakSet[TracerProvider] = weakref.WeakSet()


def _make_exporters(
    endpoint: str | None,
    path: str | os.PathLike[str] | None,
    headers: Mapping[str, str] | None,
    timeout: float | None,
    compression: str | None,
) -> list[OtlpExporter]:
    """The exporters that the arguments and the environment ask for."""
    from eventbus_engine.errors import TelemetryError
    from eventbus_engine.telemetry.endpoint import endpoint_in_environment
    from eventbus_engine.telemetry.exporters import OtlpHttpExporter, OtlpJsonFileExporter

    exporters: list[OtlpExporter] = []
    if endpoint is not None or endpoint_in_environment():
        try:
            exporters.append(OtlpHttpExporter(endpoint, headers, timeout, compression))
        except TelemetryError as exc:
            if endpoint is not None:
                raise
            # A variable set for the whole machine must not stop a program that never asked for an export.
            _logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s", exc)
    if path is not None:
        exporters.append(OtlpJsonFileExporter(path))
    return exporters


def _make_provider(
    exporters: Sequence[OtlpExporter],
    service_name: str | None,
    resource_attributes: Mapping[str, Any] | None,
    sampler: Sampler | None,
    groups: Mapping[str, bool] | None,
    keep_failed: bool,
    keep_slow: float | None,
) -> RecordingProvider:
    from eventbus_engine.telemetry.provider import RecordingProvider

    try:
        return RecordingProvider(exporters, service_name, resource_attributes, sampler, groups, keep_failed, keep_slow)
    except BaseException:
        for exporter in exporters:
            exporter.shutdown()
        raise


def _make_pipeline(
    provider: RecordingProvider,
    endpoint: str | None,
    path: str | os.PathLike[str] | None,
    headers: Mapping[str, str] | None,
    timeout: float | None,
    compression: str | None,
) -> MetricPipeline | None:
    """What sends the metrics; None if there is a global provider for them, or no place to send them to."""
    if (present := global_meter_provider()) is not None:
        _logger.warning(
            "metrics are configured already, by a %s; telemetry.configure() leaves it as it is and adds nothing",
            type(present).__qualname__,
        )
        return None
    from eventbus_engine.telemetry.metric_export import MetricPipeline, make_destinations, resolve_interval

    try:
        interval = resolve_interval()
        destinations = make_destinations(endpoint, path, headers, timeout, compression)
        pipeline = MetricPipeline(destinations, provider.resource, interval) if destinations else None
    except BaseException:
        provider.shutdown()
        raise
    if pipeline is not None:
        pipeline.engines.exports.watch(provider)
        provider.meter_provider = pipeline.provider
    return pipeline


def _every_nth(every: int, sampler: Sampler | None) -> Sampler:
    from eventbus_engine.telemetry.sampling import EveryNth

    if sampler is not None:
        raise ConfigurationError("sampler= and sample_every= both decide what is kept; give one of them")
    return EveryNth(every)
