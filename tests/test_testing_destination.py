"""`RecordingLogger`: every call, in order, as it was."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import torch

from eventbus_engine import ConfigurationError, Engine, Event, Logger, Trace
from eventbus_engine.testing import FakeAlgorithm, RecordingLogger


def test_every_call_is_kept_in_one_order_with_its_time() -> None:
    """What `InMemoryLogger` sorts by kind and name is there as well."""
    recording, images = RecordingLogger(), torch.zeros(3, 4, 4)
    logger = Logger(None, [recording])
    began = datetime.now(UTC)
    traces = {"mixup/INIT": Trace("mixup", Event.INIT, run=True)}
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_metrics({"loss": torch.tensor(2.0, requires_grad=True)}, step=1)
    logger.log_traces(traces, step=1)
    logger.log_table(["x"], [(torch.tensor(1),)], name="rows", step=2)
    logger.log_images(images, name="digits", step=2)
    logger.upload_file("model.pt", "/somewhere/model.pt")
    logger.log_metrics({"loss": 1.0}, step=2)

    assert [record[:3] for record in recording.records] == [
        ("hyperparameters", None, {"lr": 0.1}),
        ("metrics", 1, {"loss": 2.0}),
        ("traces", 1, traces),
        ("table", 2, ("rows", ["x"], [[1]])),
        ("images", 2, images),
        ("file", None, ("model.pt", "/somewhere/model.pt")),
        ("metrics", 2, {"loss": 1.0}),
    ]
    times = [record.time for record in recording.records]
    spanned = [began, *times, datetime.now(UTC)]
    assert spanned == sorted(spanned)
    assert recording.data == {"loss": [(1, 2.0), (2, 1.0)]}
    assert (recording.hyperparameters, recording.traces) == ({"lr": 0.1}, [(1, traces)])
    assert (recording.tables, recording.images) == ({"rows": [(2, ["x"], [[1]])]}, {"digits": [(2, images)]})


@pytest.mark.anyio
async def test_it_goes_where_a_destination_goes() -> None:
    """In three lines, under the options a test asks for."""

    def log(event: Any, state: Any, logger: Any) -> None:
        logger.log_metrics({"loss": 0.5})

    recording = RecordingLogger(name="remote", delivery="background")
    async with Engine(algorithms=[FakeAlgorithm(match="batch_end", apply=log)], callbacks=[recording]) as engine:
        await engine.run_event("batch_end")

    assert recording.kinds == ["metrics", "traces"]
    with pytest.raises(ConfigurationError, match="RecordingLogger has no option 'delivry'"):
        RecordingLogger(delivry="background")
