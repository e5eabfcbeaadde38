"""The environment that Composer runs in here differs from the main one in what Composer caps, and in nothing else."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]

CAPPED = {"coolname", "numpy", "packaging", "pillow", "rich", "tabulate", "torchmetrics"}
"""What Composer 0.32.1, or the client of its makers' platform that it brings, wants older than we do."""


def pins(path: Path) -> dict[str, str]:
    """Version by name, as a file of requirements pins them."""
    text = path.read_text(encoding="utf-8").lower().replace("_", "-")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def test_both_environments_have_the_same_versions_but_for_composers_caps() -> None:
    """So that what passes in one passes in the other, torch above all."""
    here, main = pins(Path(__file__).with_name("requirements.txt")), pins(ROOT / "constraints.txt")

    differing = {name for name in here.keys() & main.keys() if here[name] != main[name]}

    assert "torch" in here
    assert differing == CAPPED
