"""Ctrl-C on a program with background callbacks: what waits is delivered, and what cannot be is reported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="an interrupt is sent as a POSIX signal")

PROGRAM = """
import json, sys, threading
import anyio, anyio.to_thread
from eventbus_engine import Callback, Engine

backend, kind = sys.argv[1:]


class State:
    number = 0


class Slow(Callback):
    delivery, snapshot = "background", ("number",)
    seen = []

    async def batch_end(self, state, logger):
        await interrupted.wait()
        if kind == "hangs" and state.number == 2:
            await anyio.sleep_forever()
        self.seen.append(state.number)


class Blocking(Callback):
    delivery, run_blocking, snapshot = "background", True, ("number",)
    seen = []

    def batch_end(self, state, logger):
        entered.set()
        go_on.wait()
        if kind == "hangs" and state.number == 2:
            threading.Event().wait()
        self.seen.append(state.number)


async def main():
    global interrupted
    interrupted = anyio.Event()
    state, engine = State(), None
    try:
        async with Engine(state, callbacks=[Slow(), Blocking()]) as engine:
            for state.number in range(5):
                await engine.run_event("batch_end")
            try:
                # Trio raises the interrupt in whatever runs just then; so let it find nothing running.
                await anyio.to_thread.run_sync(entered.wait)
                await anyio.wait_all_tasks_blocked()
                print("ready", flush=True)
                await anyio.sleep_forever()
            finally:
                interrupted.set()
                go_on.set()
                if kind == "hangs":
                    await engine.close(timeout=0.3)
    finally:
        with anyio.CancelScope(shield=True):
            report = await engine.close()
        print(json.dumps([Slow.seen, Blocking.seen, report.undelivered, report.abandoned, report.ok]), flush=True)


go_on, entered = threading.Event(), threading.Event()
anyio.run(main, backend=backend)
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("drains", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], {}, [], True]),
        ("hangs", [[0, 1], [0, 1], {"slow": 3, "blocking": 3}, ["blocking"], False]),
    ],
)
def test_an_interrupted_program_drains_or_says_what_is_left(
    backend: str, kind: str, expected: list[object], start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Within the deadline of `close`; the program ends by the interrupt, also with a thread that never comes back."""
    process = start(PROGRAM, backend, kind)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)

    assert json.loads(output) == expected, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode != 0
