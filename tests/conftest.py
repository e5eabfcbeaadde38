"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from eventbus_engine import relay

# A busy machine is no reason to fail; and what CI tries has to be the same from run to run.
settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("suite")

# Where the suite runs in the background of a script, interrupts are ignored, and its programs would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the long runs to `make soak`, and run once what is the same on trio either way."""
    items[:] = [item for item in items if not _runs_twice(item)]
    if os.environ.get("EVENTBUS_SOAK") == "1":
        return
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(pytest.mark.skip(reason="a long run: make soak"))


def _runs_twice(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return params.get("fan_out") == "task groups" and "trio" in str(params.get("anyio_backend"))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each concurrent test on both event loops."""
    return str(request.param)


# The tests of the rules that the relay has to keep: on asyncio they run without it too, in anyio's task groups.
BOTH_WAYS = {
    "test_bus",
    "test_cancellation",
    "test_context",
    "test_destinations",
    "test_engine_run",
    "test_failure",
    "test_fanout",
    "test_lanes",
    "test_misbehaving_callbacks",
    "test_timeout",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask for both ways where that matters."""
    if Path(metafunc.definition.path).stem in BOTH_WAYS and "anyio_backend" in metafunc.fixturenames:
        metafunc.parametrize("fan_out", ["relay", "task groups"], indirect=True)


@pytest.fixture(autouse=True)
def fan_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How async callbacks run on asyncio."""
    if getattr(request, "param", "relay") == "task groups":
        monkeypatch.setattr(relay, "enabled", False)
