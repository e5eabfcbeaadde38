"""Metrics as OTLP JSON: `encode_metrics`, a pure function from the SDK's metrics to the body of an export request."""

from __future__ import annotations

from opentelemetry.sdk.metrics.export import (
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    Sum,
)

from eventbus_engine.telemetry.otlp import (
    Json,
    _encode_double,
    _encode_scope,
    _encode_time,
    _present,
    encode_attributes,
)

__all__ = ["encode_metrics"]


def encode_metrics(data: MetricsData) -> Json:
    """Encode metrics as one `ExportMetricsServiceRequest`; neither exponential histograms nor exemplars are known.

    Returns:
        A dictionary that `json.dumps` takes as it is.
    """
    return {
        "resourceMetrics": [
            _present(
                resource=_present(attributes=encode_attributes(resource.resource.attributes)),
                scopeMetrics=[
                    _present(
                        scope=_encode_scope(scope.scope),
                        metrics=[_encode_metric(metric) for metric in scope.metrics],
                        schemaUrl=scope.schema_url,
                    )
                    for scope in resource.scope_metrics
                ],
                schemaUrl=resource.schema_url,
            )
            for resource in data.resource_metrics
        ]
    }


def _encode_metric(metric: Metric) -> Json:
    encoded = _present(name=metric.name, description=metric.description, unit=metric.unit)
    data = metric.data
    if isinstance(data, Gauge):
        encoded["gauge"] = _present(dataPoints=[_encode_number(point) for point in data.data_points])
    elif isinstance(data, Sum):
        encoded["sum"] = _present(
            dataPoints=[_encode_number(point) for point in data.data_points],
            aggregationTemporality=data.aggregation_temporality.value,
            isMonotonic=data.is_monotonic,
        )
    elif isinstance(data, Histogram):
        encoded["histogram"] = _present(
            dataPoints=[_encode_histogram(point) for point in data.data_points],
            aggregationTemporality=data.aggregation_temporality.value,
        )
    return encoded


def _encode_number(point: NumberDataPoint) -> Json:
    value = point.value
    # One of the two is there even if it is 0: OTLP tells that from no value.
    held: Json = {"asInt": str(value)} if isinstance(value, int) else {"asDouble": _encode_double(value)}
    return {**_common(point), **held}


def _encode_histogram(point: HistogramDataPoint) -> Json:
    return {
        **_common(point),
        **_present(
            count=str(point.count),
            bucketCounts=[str(count) for count in point.bucket_counts],
            explicitBounds=[_encode_double(bound) for bound in point.explicit_bounds],
        ),
        "sum": _encode_double(point.sum),
        "min": _encode_double(point.min),
        "max": _encode_double(point.max),
    }


def _common(point: NumberDataPoint | HistogramDataPoint) -> Json:
    return _present(
        attributes=encode_attributes(point.attributes),
        startTimeUnixNano=_encode_time(point.start_time_unix_nano),
        timeUnixNano=_encode_time(point.time_unix_nano),
    )
