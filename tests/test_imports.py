"""Importing the package is cheap and changes nothing in the process. Each test imports it in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

FORBIDDEN = (
    "h11",
    "httpx",
    "numpy",
    "opentelemetry._logs",
    "opentelemetry.exporter",
    "opentelemetry.sdk",
    "rich",
    "sklearn",
    "torch",
    "trio",
)


def run(program: str) -> Any:
    """What the last line printed by a program says, in JSON."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", ["eventbus_engine", "eventbus_engine.loggers", "eventbus_engine.cli"])
def test_import_loads_nothing_of_the_extras(module: str) -> None:
    """Neither the package nor its command line needs what only training, exporting or the demo uses."""
    loaded = run(f"import json, sys, {module}; print(json.dumps([m for m in {FORBIDDEN} if m in sys.modules]))")

    assert loaded == []


def test_help_of_the_command_line_loads_nothing_of_the_extras() -> None:
    """`--help` answers at once."""
    loaded = run(
        "import json, sys\n"
        "from eventbus_engine.cli import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit: pass\n"
        f"print(json.dumps([m for m in {FORBIDDEN} if m in sys.modules]))"
    )

    assert loaded == []


def test_asking_for_a_destination_draws_no_random_number() -> None:
    """Whenever a seeded program first asks; rich draws one at its import. What does not exist is no attribute."""
    program = (
        "import json, random\n"
        "from eventbus_engine import loggers\n"
        "before = random.getstate()\n"
        "for name in loggers.__all__: getattr(loggers, name)\n"
        "print(json.dumps([random.getstate() == before, hasattr(loggers, 'NoLogger')]))"
    )

    assert run(program) == [True, False]


def test_import_has_no_effect_on_the_process() -> None:
    """No signal or exit handler, no thread, no configuration of logging, structlog or tracing, no drawn number."""
    before, after = run(PROCESS_STATE)

    assert before == after


PROCESS_STATE = """
import atexit, gc, json, logging, os, random, signal, sys, threading, warnings
import anyio, structlog, opentelemetry.trace  # what these do at import is theirs

def state():
    root = logging.getLogger()
    return {
        "signals": {s.name: str(signal.getsignal(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)},
        "exit handlers": atexit._ncallbacks(),
        "threads": sorted(t.name for t in threading.enumerate()),
        "logging": [root.level, [str(h) for h in root.handlers], logging.raiseExceptions],
        "own logging": [str(h) for h in logging.getLogger("eventbus_engine").handlers],
        "structlog": [structlog.is_configured(), str(structlog.get_config()["processors"])],
        "tracing": str(opentelemetry.trace._TRACER_PROVIDER),
        "random": hash(random.getstate()),
        "environment": dict(os.environ),
        "warnings": [str(f) for f in warnings.filters],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.unraisablehook), str(sys.gettrace())],
        "recursion": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold()],
    }

before = state()
import eventbus_engine
print(json.dumps([before, state()]))
"""
