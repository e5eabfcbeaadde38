"""OpenTelemetry: gauges for metrics, log records for the rest, through the API alone."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eventbus_engine.callback import Callback
from eventbus_engine.engine import Engine
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.loggers import OtelLogger
from eventbus_engine.trace import Trace


class Backend:
    """A real SDK with everything in memory, and the destination that sends to it."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.exporter: Any = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
        self.logs = LoggerProvider(shutdown_on_exit=False)
        self.logs.add_log_record_processor(SimpleLogRecordProcessor(self.exporter))
        meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.destination = OtelLogger(meters, self.logs, log_traces=True)

    def gauges(self) -> dict[str, list[Any]]:
        """The value of every series of every gauge."""
        data = self.reader.get_metrics_data()
        metrics: list[Any] = [
            metric
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        return {metric.name: [point.value for point in metric.data.data_points] for metric in metrics}

    def records(self) -> list[Any]:
        """The log records, in order."""
        return [log.log_record for log in self.exporter.get_finished_logs()]


def test_metrics_are_gauges_and_the_step_makes_no_new_series() -> None:
    """One series of each, however many steps there were, with the last value; the step is a gauge itself."""
    backend = Backend()
    logger = Logger(None, [backend.destination])
    for step in range(10):
        logger.log_metrics({"loss/train/total": torch.tensor(step / 2), "ok": True}, step)
    logger.log_metrics({"loss/train/total": 8.0})

    assert backend.gauges() == {"eventbus.step": [9], "loss/train/total": [8.0], "ok": [1]}
    assert backend.records() == []


@pytest.mark.parametrize(
    ("metric", "instrument"),
    [
        ("train/loss", "train/loss"),
        ("top-1.acc", "top-1.acc"),
        ("lr (group 0)", "lr__group_0_"),
        ("1st", "m_1st"),
        ("_hidden", "m__hidden"),
        ("größe", "gr__e"),
        ("ärger", "m__rger"),
        ("", "m_"),
        ("x" * 300, "x" * 255),
    ],
)
def test_a_metric_gets_the_nearest_name_that_an_instrument_may_have(metric: str, instrument: str) -> None:
    """Nothing is refused by the SDK because of its name."""
    backend = Backend()
    backend.destination.log_metrics({metric: 1.0})

    assert backend.gauges() == {instrument: [1.0]}


def test_metrics_whose_names_become_equal_stay_apart() -> None:
    """Case does not count in the names of instruments either; a long name keeps room for what tells them apart."""
    backend = Backend()
    backend.destination.log_metrics({"a b": 1, "a_b": 2, "A_b": 3, "x" * 255: 4, "x" * 256: 5})
    gauges = backend.gauges()

    assert sorted(value for series in gauges.values() for value in series) == [1, 2, 3, 4, 5]
    assert gauges["a_b"] == [1]
    assert max(len(name) for name in gauges) == 255


def test_everything_else_is_a_log_record() -> None:
    """Its event name, its step, its fields as plain values; a metric that is no finite number too."""
    backend = Backend()
    logger = Logger(None, [backend.destination])
    logger.log_hyperparameters({"lr": 0.1, "betas": (0.9, 0.99)})
    logger.log_traces({"a/INIT": Trace("a", Event.INIT, run=True, outcome="ok")}, step=0)
    logger.log_table(["x"], [[torch.tensor(1)]], name="confusion", step=4)
    logger.log_images(torch.zeros(3, 4, 4), name="digits")
    logger.log_metrics({"phase": "warm-up", "loss": math.inf}, step=5)
    records = backend.records()

    assert [(record.event_name, dict(record.attributes)) for record in records] == [
        ("eventbus.hyperparameters", {}),
        ("eventbus.traces", {"eventbus.step": 0}),
        ("eventbus.table", {"eventbus.step": 4}),
        ("eventbus.images", {}),
        ("eventbus.metrics", {"eventbus.step": 5}),
    ]
    assert records[0].body == {"hyperparameters": {"lr": 0.1, "betas": [0.9, 0.99]}}
    assert records[1].body["traces"]["a/INIT"]["outcome"] == "ok"
    assert records[2].body == {"name": "confusion", "columns": ["x"], "rows": [[1]]}
    assert records[3].body == {"name": "digits", "shape": [3, 4, 4], "channels_last": False}
    assert records[4].body == {"metrics": {"phase": "warm-up", "loss": math.inf}}
    assert backend.gauges() == {"eventbus.step": [5]}


@pytest.mark.anyio
async def test_log_records_belong_to_the_span_of_the_event() -> None:
    """What a callback logs, and the engine's own traces, carry its trace, so that a backend shows them together."""

    class Table(Callback):
        def batch_end(self, state: Any, logger: Logger) -> None:
            logger.log_table(["x"], [[1]])

    backend, spans = Backend(), InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with Engine(callbacks=[Table(), backend.destination], tracer_provider=provider) as engine:
        await engine.run_event(Event.BATCH_END)
    (dispatch,) = [span for span in spans.get_finished_spans() if span.name == "dispatch batch_end"]
    (table,) = [record for record in backend.records() if record.event_name == "eventbus.table"]
    context = dispatch.get_span_context()
    assert context is not None

    assert table.trace_id == context.trace_id
    assert table.span_id in {span.context.span_id for span in spans.get_finished_spans() if span.context}


def test_without_an_sdk_nothing_happens_and_none_is_loaded() -> None:
    """The global providers of a program that has set none take everything and keep nothing."""
    program = (
        "import sys\n"
        "from eventbus_engine.loggers import OtelLogger\n"
        "destination = OtelLogger()\n"
        "destination.log_metrics({'loss': 1, 'phase': 'x'}, 1)\n"
        "print('opentelemetry.sdk' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("False\n", "")
