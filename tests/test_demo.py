"""The demo, end to end: a real run in a process of its own, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from eventbus_engine.demo.records import read_records

EPOCHS = 2
BATCHES_PER_EPOCH = 23
SEVEN_LINES = [
    "[STEP=0][layer_freezing/INIT=0]",
    "[STEP=1][layer_freezing/EPOCH_START=0]",
    "[STEP=1][layer_freezing/BATCH_START=0]",
    "[STEP=2][layer_freezing/BATCH_START=0]",
    "[STEP=23][layer_freezing/BATCH_START=0]",
    "[STEP=23][layer_freezing/BATCH_END=0]",
    "[STEP=23][layer_freezing/EPOCH_END=1]",
]


def command(directory: Path, *arguments: str) -> list[str]:
    """The demo's command line, writing to `directory/demo`; an epoch is too short for its usual target."""
    demo = [sys.executable, "-m", "eventbus_engine", "demo", "--runs-dir", str(directory), "--run-name", "demo"]
    return [*demo, "--target", "0", *arguments]


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        command(directory, *arguments),
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A short run on each event loop: the process that has ended, and its directory."""
    directory = tmp_path_factory.mktemp(request.param)
    return run(directory, "--epochs", str(EPOCHS), "--target", "0.6", "--backend", request.param), directory / "demo"


class Collector:
    """A collector of OTLP/HTTP in protobuf on a free port. It counts spans, and says when a batch's have come."""

    def __init__(self) -> None:
        collector = self
        self.spans = 0
        self.arrived = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
                names = [span.name for scope in scopes for span in scope.spans]
                collector.spans += len(names)
                self.send_response(200)
                self.end_headers()
                if "dispatch batch_end" in names:
                    collector.arrived.set()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that is up."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


def spans_in(path: Path) -> list[dict[str, Any]]:
    """The spans of a file of OTLP JSON lines, every line checked for the shape of an export request."""
    spans: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        request = json.loads(line)
        assert list(request) == ["resourceSpans"]
        for resource in request["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                assert scope["scope"]["name"] == "eventbus_engine"
                spans += scope["spans"]
    for span in spans:
        assert re.fullmatch("[0-9a-f]{32}", span["traceId"])
        assert re.fullmatch("[0-9a-f]{16}", span["spanId"])
        assert 0 < int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    return spans


def test_it_exits_with_0_and_is_quiet_outside_a_terminal(finished: Any) -> None:
    """No progress bar in a pipe, no warning, and everything held."""
    ran, _ = finished

    assert (ran.returncode, ran.stderr) == (0, "")


def test_report_shows_the_seven_log_lines_of_an_epoch(finished: Any) -> None:
    """One of each kind, in the order they were logged."""
    ran, _ = finished

    shown = [line.strip() for line in ran.stdout.splitlines() if "[layer_freezing/" in line]

    assert shown == SEVEN_LINES


def test_report_shows_the_order_of_the_algorithms_against_their_registration(finished: Any) -> None:
    """SelectiveBackprop first on AFTER_DATALOADER, MixUp last on AFTER_LOSS, registered the other way round."""
    ran, _ = finished

    rows = re.findall(r"^  (registered|AFTER_DATALOADER|AFTER_LOSS) +([^(\n]+?)(?:  \(|$)", ran.stdout, re.MULTILINE)

    assert rows == [
        ("registered", "mixup, label_smoothing, layer_freezing, selective_backprop"),
        ("AFTER_DATALOADER", "selective_backprop, mixup"),
        ("AFTER_LOSS", "label_smoothing, mixup"),
    ]


def test_server_has_received_every_batch_once(finished: Any) -> None:
    """As many posts as batches, none missing."""
    ran, _ = finished
    total = EPOCHS * BATCHES_PER_EPOCH

    assert f"took {total} posts for {total} batches, missing = 0" in ran.stdout


def test_metrics_hold_a_loss_for_every_batch_and_an_accuracy_for_every_epoch(finished: Any) -> None:
    """The file of metrics is complete, and the accuracy that is printed is the last one in it."""
    ran, directory = finished
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [record for record in map(json.loads, lines) if record["kind"] == "metrics"]

    losses = [record["step"] for record in metrics if "loss/train/total" in record["metrics"]]
    accuracies = [
        record["metrics"]["metrics/eval/accuracy"] for record in metrics if "metrics/eval/accuracy" in record["metrics"]
    ]

    assert losses == list(range(1, EPOCHS * BATCHES_PER_EPOCH + 1))
    assert len(accuracies) == EPOCHS
    assert re.search(r"held-out accuracy +(.+)", ran.stdout).group(1) == f"{accuracies[-1]:.1%}"  # type: ignore[union-attr]


def test_spans_are_complete_and_show_the_order(finished: Any) -> None:
    """Every batch has all its spans, and selective_backprop's precedes mixup's."""
    _, directory = finished
    spans = spans_in(directory / "spans.jsonl")
    names = Counter(span["name"] for span in spans)
    children: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        children.setdefault(span.get("parentSpanId", ""), []).append(span)

    orders = Counter(
        tuple(
            child["name"]
            for child in sorted(children.get(span["spanId"], []), key=lambda s: int(s["startTimeUnixNano"]))
        )
        for span in spans
        if span["name"] == "dispatch after_dataloader"
    )

    total = EPOCHS * BATCHES_PER_EPOCH
    assert names["dispatch batch_start"] == names["dispatch batch_end"] == names["dispatch after_loss"] == total
    assert names["callback post_batches"] == total
    assert names["algorithm layer_freezing"] == EPOCHS
    assert set(orders) == {
        ("algorithm mixup",),
        ("algorithm selective_backprop", "algorithm mixup"),
    }


def test_report_tells_the_lag_and_where_everything_lies(finished: Any) -> None:
    """Figures for p50 and p99 in order, and two files that exist."""
    ran, directory = finished

    p50, p99 = map(float, re.search(r"p50 (\d+\.\d+) ms, p99 (\d+\.\d+) ms", ran.stdout).groups())  # type: ignore[union-attr]

    assert 0 <= p50 <= p99
    assert str(directory / "metrics.jsonl") in ran.stdout
    assert str(directory / "spans.jsonl") in ran.stdout


def test_same_seed_gives_the_same_losses_whatever_runs_beside(tmp_path: Path) -> None:
    """Bit for bit: on the other event loop, without tracing, and with weights and batches from another process."""
    traced = run(tmp_path / "traced", "--epochs", "1")
    untraced = run(tmp_path / "untraced", "--epochs", "1", "--backend", "trio", OTEL_SDK_DISABLED="true")

    expected, actual = (losses(tmp_path / name / "demo") for name in ("traced", "untraced"))

    assert (traced.returncode, untraced.returncode) == (0, 0)
    assert "switched off by OTEL_SDK_DISABLED" in untraced.stdout
    assert len(set(expected)) == BATCHES_PER_EPOCH
    assert actual == expected


def losses(directory: Path) -> list[float]:
    """The loss of every batch."""
    records = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    metrics = [record["metrics"] for record in records if record["kind"] == "metrics"]
    return [values["loss/train/total"] for values in metrics if "loss/train/total" in values]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send to one process")
@pytest.mark.parametrize(
    ("number", "backend"), [(signal.SIGINT, "asyncio"), (signal.SIGINT, "trio"), (signal.SIGTERM, "asyncio")]
)
def test_signal_ends_it_cleanly_with_everything_flushed(
    number: signal.Signals, backend: str, tmp_path: Path, collector: Collector
) -> None:
    """In the middle of training: the files are whole, every post is counted, the exit code says which signal."""
    with subprocess.Popen(
        command(tmp_path, "--epochs", "2000", "--backend", backend),
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_for_spans(process, collector)
            process.send_signal(number)
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()

    records = read_records(tmp_path / "demo" / "metrics.jsonl")
    spans = spans_in(tmp_path / "demo" / "spans.jsonl")
    ended = sum(span["name"] == "dispatch batch_end" for span in spans)
    assert (process.returncode, errors) == (128 + number, "")
    assert 0 < records.batches < 2000 * BATCHES_PER_EPOCH
    assert f"took {records.batches} posts for {records.batches} batches, missing = 0" in output
    assert ended == records.batches
    assert collector.spans == len(spans)
    assert output.rstrip().endswith(f"interrupted by {number.name}; everything above is flushed")


def wait_for_spans(process: subprocess.Popen[str], collector: Collector) -> None:
    """Return once the collector has a batch's, which is in the middle of training; fail if the process ends before."""

    def watch() -> None:
        process.wait()
        collector.arrived.set()

    threading.Thread(target=watch, daemon=True).start()
    assert collector.arrived.wait(120), "no span of a batch has come: the training has not begun"
    assert process.poll() is None, process.communicate()


def test_spans_also_go_to_the_endpoint_of_the_environment(tmp_path: Path, collector: Collector) -> None:
    """With `OTEL_EXPORTER_OTLP_ENDPOINT` set, a collector receives as many spans as the file holds."""
    ran = run(tmp_path, "--epochs", "1", OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)

    spans = spans_in(tmp_path / "demo" / "spans.jsonl")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"endpoint {collector.url}/v1/traces" in ran.stdout
    assert collector.spans == len(spans) > 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_terminal_shows_progress_unless_told_not_to(tmp_path: Path) -> None:
    """Epoch, batches, loss, accuracy and the time left, on standard error; nothing with `--no-progress`."""
    shown = run_in_terminal(tmp_path / "shown", "--epochs", "1")
    hidden = run_in_terminal(tmp_path / "hidden", "--epochs", "1", "--no-progress")

    assert re.search(r"epoch 1 .* 23/23 loss \d\.\d+ .*accuracy 0\.\d+ \d:\d\d:\d\d", shown)
    assert hidden == ""


def run_in_terminal(directory: Path, *arguments: str) -> str:
    """What the demo writes to standard error where that is a terminal, control sequences left out."""
    controller, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    with subprocess.Popen(
        command(directory, *arguments), env=environment, stdout=subprocess.DEVNULL, stderr=terminal
    ) as process:
        os.close(terminal)
        written = b""
        # Linux reports the end of a terminal as an error.
        with suppress(OSError):
            while chunk := os.read(controller, 65536):
                written += chunk
    os.close(controller)

    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def test_target_that_is_not_reached_is_a_failure(tmp_path: Path) -> None:
    """The accuracy is printed as it is, and the exit code is 1."""
    ran = run(tmp_path, "--epochs", "1", "--target", "1")

    assert ran.returncode == 1
    assert re.search(r"this did not hold: the held-out accuracy is \d\d\.\d%, the target 100\.0%", ran.stdout)


def test_run_that_exists_is_not_written_into(tmp_path: Path) -> None:
    """Two runs in one directory would be told apart by nobody."""
    (tmp_path / "demo").mkdir()

    ran = run(tmp_path)

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "exists already" in ran.stderr
    assert "--run-name" in ran.stderr
    assert "Traceback" not in ran.stderr
