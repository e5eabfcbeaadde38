"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail; and what CI tries has to be the same from run to run.
settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the long runs to `make soak`."""
    if os.environ.get("EVENTBUS_SOAK") == "1":
        return
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(pytest.mark.skip(reason="a long run: make soak"))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each concurrent test on both event loops."""
    return str(request.param)
