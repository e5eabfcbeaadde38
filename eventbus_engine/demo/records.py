"""What a run has left in its files: the demo reports from these, so that it says nothing they do not hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventbus_engine.event import Event
from eventbus_engine.trace import Trace, format_trace

__all__ = ["RunRecords", "count_spans", "read_records"]

Order = tuple[str, ...]


@dataclass
class RunRecords:
    """The records of a `JsonlLogger(log_traces=True)`, in brief.

    Attributes:
        batches: how many batches logged their loss.
        accuracy: the held-out accuracy of the latest evaluation, None before the first.
        registered: the algorithms in registration order.
        orders: for each event, the orders that its algorithms ran in and how often; those that ran, that is.
        traces: step, key and trace of every algorithm on every event, in the order of logging.
    """

    batches: int = 0
    accuracy: float | None = None
    registered: Order = ()
    orders: dict[str, Counter[Order]] = field(default_factory=dict)
    traces: list[tuple[int, str, Trace]] = field(default_factory=list)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Take in a record of kind `metrics`."""
        self.batches += "loss/train/total" in metrics
        self.accuracy = metrics.get("metrics/eval/accuracy", self.accuracy)

    def add_traces(self, step: int, record: dict[str, dict[str, Any]]) -> None:
        """Take in a record of kind `traces`: what one event did with the algorithms, those that ran first."""
        traces = {
            key: Trace(name=fields["name"], event=Event(fields["event"]), order=fields["order"], run=fields["run"])
            for key, fields in record.items()
        }
        event = str(next(iter(record.values()))["event"])
        if not self.registered:
            # On INIT, the first event, none of them runs, and what does not run is listed in registration order.
            self.registered = tuple(trace.name for trace in traces.values())
        self.orders.setdefault(event, Counter())[tuple(trace.name for trace in traces.values() if trace.run)] += 1
        self.traces += [(step, key, trace) for key, trace in traces.items()]

    def lines_of_first_epoch(self, algorithm: str) -> list[str]:
        """The log lines of an algorithm, one of each kind; those that were not reached are left out.

        That is INIT, the start of the epoch, of its first, second and last batch, and the end of that batch and of the
        epoch: seven in a whole epoch of three batches or more.
        """
        of_event: dict[Event, list[str]] = {}
        for step, key, trace in self.traces:
            if trace.name == algorithm and trace.event is not None:
                of_event.setdefault(Event(trace.event), []).append(format_trace(key, trace, step))
                if trace.event == Event.EPOCH_END:
                    break
        starts = of_event.get(Event.BATCH_START, [])
        return [
            *of_event.get(Event.INIT, []),
            *of_event.get(Event.EPOCH_START, []),
            *starts[:2],
            *starts[2:][-1:],
            *of_event.get(Event.BATCH_END, [])[-1:],
            *of_event.get(Event.EPOCH_END, []),
        ]


def read_records(path: Path) -> RunRecords:
    """Read the file of a `JsonlLogger`."""
    records = RunRecords()
    for record in _lines(path):
        if record["kind"] == "metrics":
            records.add_metrics(record["metrics"])
        elif record["kind"] == "traces":
            records.add_traces(record["step"], record["traces"])
    return records


def count_spans(path: Path) -> tuple[int, int]:
    """The spans in a file of OTLP JSON lines, and the traces they belong to; zeros if there is no such file."""
    spans: Sequence[dict[str, Any]] = [
        span
        for request in _lines(path)
        for resource in request["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    return len(spans), len({span["traceId"] for span in spans})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
