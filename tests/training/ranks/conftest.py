"""Jobs that torchrun starts, on gloo over the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
StartJob = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def start_job() -> StartJob:
    """Starts a program on two ranks."""

    def start(program: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        return subprocess.Popen(
            [*torchrun, str(program), *arguments],
            env={**kept, "OMP_NUM_THREADS": "1", **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start
