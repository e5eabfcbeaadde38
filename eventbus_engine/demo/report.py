"""The end of the demo: what happened, and whether everything that was promised held."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eventbus_engine.demo.heartbeat import Heartbeat, percentile
from eventbus_engine.demo.records import RunRecords, count_spans
from eventbus_engine.demo.server import BatchServer
from eventbus_engine.telemetry.endpoint import Endpoint, endpoint_in_environment

__all__ = ["Outcome", "find_problems", "format_report"]

LABEL_WIDTH = 20


@dataclass(frozen=True)
class Outcome:
    """All that is known about a run.

    Attributes:
        directory: where its files are.
        headline: its name, and what it was run with.
        seconds: how long training took.
        records: what it logged.
        server: what has been posted, and where to.
        heartbeat: the lag of the event loop while it trained.
    """

    directory: Path
    headline: str
    seconds: float
    records: RunRecords
    server: BatchServer
    heartbeat: Heartbeat


def find_problems(outcome: Outcome, target: float) -> list[str]:
    """What a complete run should have done and did not. `target` is the accuracy to reach, 0 to 1."""
    records, server = outcome.records, outcome.server
    problems: list[str] = []
    if records.accuracy is None or records.accuracy < target:
        reached = "was never measured" if records.accuracy is None else f"is {records.accuracy:.1%}"
        problems.append(f"the held-out accuracy {reached}, the target {target:.1%}")
    if missing := server.missing(records.batches):
        problems.append(f"the server has not received {missing} of {records.batches} batches")
    if server.posts != records.batches or server.refused:
        problems.append(
            f"the server took {server.posts} posts for {records.batches} batches, and refused {server.refused}"
        )
    for event, first in (
        ("after_dataloader", "selective_backprop"),
        ("after_loss", "label_smoothing"),
    ):
        orders = [order for order in records.orders.get(event, ()) if first in order]
        if not orders or any(order != (first, "mixup") for order in orders):
            problems.append(f"{first} did not run before mixup on {event.upper()}")
    if (lines := len(records.lines_of_first_epoch("layer_freezing"))) != 7:
        problems.append(f"layer_freezing has {lines} kinds of log line, not 7")
    return problems


def format_report(outcome: Outcome) -> str:
    """The report, in lines of text."""
    records = outcome.records
    accuracy = "not measured yet" if records.accuracy is None else f"{records.accuracy:.1%}"
    lines = [
        _row("run", f"{outcome.headline}: {records.batches} batches in {outcome.seconds:.1f} s"),
        _row("held-out accuracy", accuracy),
        "",
        "order of the algorithms",
        _row("  registered", ", ".join(records.registered)),
        *_order_rows(records, "after_dataloader"),
        *_order_rows(records, "after_loss"),
        "",
        "log lines of layer_freezing in the first epoch",
        *(f"  {line}" for line in records.lines_of_first_epoch("layer_freezing")),
        "",
        _row("HTTP server", _server(outcome)),
        _row("event loop lag", _lag(outcome.heartbeat)),
        "",
        _row("metrics, traces", str(outcome.directory / "metrics.jsonl")),
        _row("spans", _spans(outcome.directory / "spans.jsonl")),
    ]
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}"


def _order_rows(records: RunRecords, event: str) -> list[str]:
    """A row for each order the event has seen, the longest first."""
    seen = sorted(records.orders.get(event, {}).items(), key=lambda item: -len(item[0]))
    labels = [f"  {event.upper()}", *[""] * len(seen)]
    return [
        _row(label, f"{', '.join(order) or '(none)'}  ({times} {'time' if times == 1 else 'times'})")
        for label, (order, times) in zip(labels, seen, strict=False)
    ]


def _server(outcome: Outcome) -> str:
    server, batches = outcome.server, outcome.records.batches
    return f"{server.url} took {server.posts} posts for {batches} batches, missing = {server.missing(batches)}"


def _lag(heartbeat: Heartbeat) -> str:
    p50, p99 = (percentile(heartbeat.lags, rank) * 1000 for rank in (50, 99))
    beats, interval = len(heartbeat.lags), heartbeat.interval * 1000
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms ({beats} beats, {interval:g} ms apart, while training)"


def _spans(path: Path) -> str:
    if not path.exists():
        return "none: tracing is switched off by OTEL_SDK_DISABLED"
    spans, traces = count_spans(path)
    # What did not arrive there, telemetry.configure has said on standard error.
    also = f", endpoint {Endpoint.resolve(None).url}" if endpoint_in_environment() else ""
    return f"{path} ({spans} spans in {traces} traces){also}"
