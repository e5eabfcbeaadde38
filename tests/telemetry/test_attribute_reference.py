"""The reference in docs/tracing.md names every attribute that the sources can put on a span, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
NAME = re.compile(r"(?:eventbus|train|code|error|exception|messaging|process)(?:\.[a-z_]+)+")


def emitted() -> set[str]:
    """The names of attributes and metrics in the string literals of the sources, without the docstrings."""
    found: set[str] = set()
    for folder in ("eventbus_engine", "adapters/eventbus_adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            if {"reports", "loggers"} & set(path.parts):
                continue  # they read what others have put there, and make no spans
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
                    found.add(node.value)
    return found


def documented() -> set[str]:
    """The names in the section on what is on a span."""
    return names_in(PAGE.partition("## What is on a span\n")[2].partition("\n## ")[0])


def of_metrics() -> set[str]:
    """The names of metrics and of their attributes, in the table of the other page."""
    return names_in("\n".join(line for line in METRICS.splitlines() if line.startswith("|")))


def names_in(text: str) -> set[str]:
    """The names of attributes between backticks."""
    return {name for name in re.findall("`([^`]+)`", text) if NAME.fullmatch(name)}


def kinds() -> set[str]:
    """The values of `eventbus.kind` in the table."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `eventbus.kind` ")]
    return set(re.findall("`([^`]+)`", row)) - {"eventbus.kind"}


def test_every_attribute_is_in_the_reference() -> None:
    """And what is there can be found on a span."""
    assert emitted() - documented() <= of_metrics()
    assert documented() <= emitted()
    assert len(emitted()) > 12


def test_every_kind_is_in_the_reference() -> None:
    """As the values that the sources give: literally, or as the name of a unit that they open."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "eventbus_engine").rglob("*.py"))
    opened = set(re.findall(r'\.unit\("([a-z ]+)"\)|unit\.rename\("([a-z ]+)"\)', sources))
    templates = re.findall(r'(?:event|handler)_template\(\s*"([a-z]+)"', sources)
    units = {name for pair in opened for name in pair if name}

    assert units | set(templates) | {"run", "section", "device", "slow"} == kinds()
