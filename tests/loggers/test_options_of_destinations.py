"""The destinations that come with the library take the options of every callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventbus_engine import Engine, HandlerTypeError
from eventbus_engine.loggers import HttpLogger, JsonlLogger, OtelLogger, ProgressBar, StructlogLogger

pytestmark = pytest.mark.anyio

MAKERS: dict[str, Callable[..., Any]] = {
    "http": lambda path, **options: HttpLogger("http://127.0.0.1:1", **options),
    "jsonl": lambda path, **options: JsonlLogger(path / "log.jsonl", **options),
    "otel": lambda path, **options: OtelLogger(**options),
    "progress": lambda path, **options: ProgressBar(**options),
    "structlog": lambda path, **options: StructlogLogger(**options),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
async def test_it_takes_the_options_of_callbacks(make: Callable[..., Any], tmp_path: Path) -> None:
    """And the engine heeds them."""
    destination = make(tmp_path, delivery="background", on_error="quarantine", name="mine")
    async with Engine(callbacks=[destination]) as engine:
        await engine.run_event("batch_end")
        engine.logger.log_metrics({"loss": 1.0})
        report = await engine.close(timeout=0.1)

    assert (destination.delivery, destination.on_error) == ("background", "quarantine")
    assert "mine" in [*report.closed, *report.undelivered]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
async def test_what_is_no_option_is_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(HandlerTypeError, match="has no option 'max_pendin'"):
        make(tmp_path, max_pendin=1)
