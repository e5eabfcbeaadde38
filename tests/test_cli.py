"""The command line: what it prints and exits with before any command runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from eventbus_engine import cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "eventbus_engine", *arguments],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_module_and_function_are_the_same_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m eventbus_engine` does what the console script's function does."""
    with pytest.raises(SystemExit) as exited:
        cli.main(["--help"])

    ran = run("--help")

    assert (ran.returncode, ran.stdout) == (exited.value.code, capsys.readouterr().out)
    assert "demo" in ran.stdout


def test_without_a_command_it_prints_the_help_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to do, and the help says what there might be."""
    code = cli.main([])

    assert code == 2
    assert "demo" in capsys.readouterr().out


def test_version_is_that_of_the_distribution(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--version` asks the installed metadata."""
    monkeypatch.setattr(metadata, "version", lambda name: f"1.2.3 of {name}")

    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])

    assert exited.value.code == 0
    assert capsys.readouterr().out == "eventbus-engine 1.2.3 of eventbus-engine\n"


def test_version_of_a_checkout_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run from its source alone, it has no version to tell and says so."""

    def fail(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", fail)

    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])

    assert exited.value.code == 0
    assert capsys.readouterr().out == "eventbus-engine (not installed)\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--epochs", "0"], "0 is not a whole number from 1"),
        (["--epochs", "many"], "invalid _positive value"),
        (["--seed", "-1"], "-1 is not a whole number from 0"),
        (["--seed", str(2**32)], "is not a whole number from 0 to 2**32 - 1"),
        (["--target", "95"], "95 is no fraction from 0 to 1"),
        (["--backend", "gevent"], "invalid choice: 'gevent'"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_option_that_does_not_fit_is_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option and says what would fit; the exit code is 2."""
    with pytest.raises(SystemExit) as exited:
        cli.main(["demo", *arguments])

    errors = capsys.readouterr().err

    assert exited.value.code == 2
    assert complaint in errors
    assert arguments[0] in errors


@pytest.mark.parametrize("module", ["httpx", "rich", "sklearn", "torch"])
def test_demo_without_an_extra_says_what_to_install(module: str, tmp_path: Path) -> None:
    """Where one of the demo's packages cannot be found, it exits with 2 and names the extra."""
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {module!r} else find(name, *rest)\n"
        "from eventbus_engine.cli import main\n"
        f"sys.exit(main(['demo', '--runs-dir', {str(tmp_path)!r}]))"
    )

    ran = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"the demo needs {module}; " in ran.stderr
    assert 'pip install "eventbus-engine[demo]"' in ran.stderr


def test_demo_without_the_event_loop_asked_for_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trio is no dependency: it has to be installed for `--backend trio`."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trio" else find(name))

    code = cli.main(["demo", "--backend", "trio"])

    assert code == 2
    assert "pip install trio" in capsys.readouterr().err


def test_interrupt_before_the_command_can_handle_it_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while torch is being imported is no reason for a traceback."""

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.util, "find_spec", interrupted)

    code = cli.main(["demo"])

    assert code == 130
