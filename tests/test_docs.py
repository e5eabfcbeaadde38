"""Every snippet of the README and the docs runs as it stands, and prints what the page says it prints."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(?:```(python|output)\n(.*?)^```$|<!--python\n(.*?)^-->$)", re.MULTILINE | re.DOTALL)
MARK = "=====8<===== "


PAGES = [
    page
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


# Composer has an environment of its own, with a torchvision; `make test` runs these pages there.
PEERS = {"composer_trainer.md": "torchvision"}


def script_of(page: Path) -> tuple[str, dict[int, str]]:
    """The page's snippets as one program, and the output each is followed by, by its number.

    A snippet in a comment (`<!--python ... -->`) sets the scene for those after it without showing on the page.
    """
    parts: list[str] = []
    expected: dict[int, str] = {}
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if match[1] == "output":
            expected[len(parts) - 1] = match[2]
            continue
        parts.append(f"print({MARK!r} + '{len(parts)}')\n{match[2] or match[3]}")
    return "\n".join(parts), expected


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_snippet_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    """One process a page, warnings as errors, in an empty folder."""
    if page.name in PEERS and importlib.util.find_spec(PEERS[page.name]) is None:
        pytest.skip("Composer has its own environment")
    script, expected = script_of(page)
    program = tmp_path / "snippets.py"
    program.write_text(script, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    printed = {number: text for number, _, text in (part.partition("\n") for part in done.stdout.split(MARK)[1:])}
    for number, output in expected.items():
        assert printed[str(number)].rstrip() == output.rstrip()


def test_the_readme_names_every_extra() -> None:
    """All but what the package itself is developed and measured with."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install = readme.partition("## Install")[2].partition("\n## ")[0]

    assert set(re.findall(r"eventbus-engine\[(\w+)\]|^\| `(\w+)` \|", install, re.MULTILINE)) == {
        ("all", ""),
        *(("", extra) for extra in extras - {"all", "bench", "dev"}),
    }
