"""A hand-written loop gets its traces into a collector by the ten lines of the documentation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eventbus_engine import Engine, telemetry
from eventbus_engine.training.algorithms import LabelSmoothing

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def ten_lines() -> str:
    """The snippet, from the page it stands on."""
    blocks: Iterator[str] = (block for page in PAGES for block in BLOCK.findall(page.read_text(encoding="utf-8")))
    return next(block for block in blocks if "import instrument\n" in block)


def received(collector: Any) -> tuple[str, list[Span]]:
    """The service's name, and the spans in the order of their starting."""
    requests = [ExportTraceServiceRequest.FromString(request.body) for request in collector.requests]
    resources = [resource for request in requests for resource in request.resource_spans]
    names = {
        attribute.value.string_value
        for resource in resources
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    (name,) = names
    return name, sorted(spans, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def program(collector: Any) -> dict[str, Any]:
    """What the snippet finds: a small convolutional network and images of digits, eight of them to a batch."""
    torch.manual_seed(0)
    images, digits = torch.randn(24, 1, 8, 8), torch.arange(24) % 10
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    return {
        "Engine": Engine,
        "F": functional,
        "LabelSmoothing": LabelSmoothing,
        "URL": collector.url,
        "loader": DataLoader(TensorDataset(images, digits), batch_size=8),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "telemetry": telemetry,
    }


def test_ten_lines_bring_a_loop_into_a_collector(collector: Any, program: dict[str, Any]) -> None:
    """A trace for each batch, linked to the run, with the work and the algorithms in it."""
    snippet = ten_lines()

    exec(snippet, program)

    service, spans = received(collector)
    roots = [span for span in spans if not span.parent_span_id]
    (run,) = [span for span in roots if span.name == "run"]
    batches = [span for span in roots if span.name == "batch"]
    of_first = [span.name for span in spans if span.trace_id == batches[0].trace_id]
    assert sum(1 for line in snippet.splitlines() if line.strip()) <= 10
    assert service == "digits"
    assert Counter(span.name for span in roots) == {"run": 1, "epoch": 3, "batch": 9, "end of data": 3}
    assert {(link.trace_id, link.span_id) for span in batches for link in span.links} == {(run.trace_id, run.span_id)}
    work = ["dataloader", "train_batch", "forward", "loss", "backward", "optimizer"]
    assert [name for name in of_first if name in work] == work
    assert of_first.count("algorithm label_smoothing") == 2


def test_a_loop_that_fails_arrives_with_its_failed_batch(collector: Any, program: dict[str, Any]) -> None:
    """Leaving the loop by an exception ends and exports what was open."""

    def explode(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("not a number")

    program["F"] = type("F", (), {"cross_entropy": staticmethod(explode)})

    with pytest.raises(FloatingPointError):
        exec(ten_lines(), program)

    _, spans = received(collector)
    failed = {span.name for span in spans if span.status.code == Status.STATUS_CODE_ERROR}
    assert failed == {"epoch", "batch", "train_batch", "loss"}
