"""The size limits of the code: modules of 400 lines, functions of 60, 15 parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for room in ("eventbus_engine", "adapters") for path in (ROOT / room).rglob("*.py"))

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 15

EXCUSE = "# house: "
"""Followed by a reason, on a module's first line or on the line of a `def`, it lifts the limits there."""


def breaches(source: str) -> Iterator[str]:
    """What in a module is larger than it may be and does not say why."""
    lines = source.splitlines()
    if len(lines) > MAX_MODULE_LINES and not excused(lines[0]):
        yield f"1: {len(lines)} lines, at most {MAX_MODULE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or excused(lines[node.lineno - 1]):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
        if count > MAX_PARAMETERS:
            yield f"{node.lineno}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}"


def excused(line: str) -> bool:
    """Whether the line gives a reason; the bare marker gives none."""
    return bool(line.partition(EXCUSE)[2].strip())


def function(lines: int = 2, parameters: int = 0, comment: str = "") -> str:
    """The source of a function of that size."""
    names = ", ".join(f"p{index}" for index in range(parameters))
    return "\n".join([f"def large({names}):  {comment}", *["    pass"] * (lines - 1)])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_stays_small_or_says_why(path: Path) -> None:
    """No module, function or constructor is larger than the limits without a reason on its first line."""
    actual = list(breaches(path.read_text(encoding="utf-8")))

    assert actual == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("\n" * 400, []),
        ("\n" * 401, ["1: 401 lines, at most 400"]),
        ("# house: generated\n" + "\n" * 400, []),
        (function(lines=60), []),
        (function(lines=61), ["1: large has 61 lines, at most 60"]),
        (function(lines=61, comment="# house: one table"), []),
        (function(lines=61, comment="# house: "), ["1: large has 61 lines, at most 60"]),
        (function(parameters=15), []),
        (function(parameters=16), ["1: large has 16 parameters, at most 15"]),
        (f"async {function(parameters=16)}", ["1: large has 16 parameters, at most 15"]),
    ],
)
def test_the_check_sees_what_is_too_large(source: str, expected: list[str]) -> None:
    """The limits themselves pass, one more fails, and only a reason lifts them."""
    actual = list(breaches(source))

    assert actual == expected
