"""What a type checker sees of the package from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["eventbus_engine", "eventbus_adapters"])
def test_every_public_type_is_known(package: str) -> None:
    """`pyright --verifytypes` finds nothing that it would have to guess."""
    pytest.importorskip("pyright")
    # It looks for the package where the first `python` on the path has it.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", package, "--ignoreexternal"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    if "No py.typed file found" in done.stdout:
        pytest.skip(f"{package} is not installed: make venv")

    assert "Type completeness score: 100%" in done.stdout, done.stdout
