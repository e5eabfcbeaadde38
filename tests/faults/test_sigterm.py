"""SIGTERM while tracing, with `handle_sigterm`: what is known is exported, and the signal does what it did before."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from eventbus_engine.telemetry.reports import RecordedSpan

PREAMBLE = """
import os, signal, sys, threading
from eventbus_engine import Engine, Event, telemetry
from eventbus_engine.telemetry.configure import _GLOBAL
from eventbus_engine.telemetry.sigterm import ending_on_sigterm

engine = Engine()
def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
def wait():
    threading.Event().wait()
"""

LOCKED = """
with telemetry.configure(path=sys.argv[1], handle_sigterm=True, shutdown_timeout=1000) as provider:
    engine.sync.run_event(Event.BATCH_END)
    with {lock}:
        terminate()
    wait()
"""

PREVIOUS = """
def previous(number, frame):
    print("previous", signal.Signals(number).name, telemetry.current_provider(), flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, previous)
with telemetry.configure(path=sys.argv[1], handle_sigterm=True):
    engine.sync.run_event(Event.BATCH_END)
    terminate()
    wait()
"""

IGNORED = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with telemetry.configure(path=sys.argv[1], handle_sigterm=True):
    terminate()
    engine.sync.run_event(Event.BATCH_END)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
"""

RAISES = """
def end():
    raise ZeroDivisionError
with ending_on_sigterm(end):
    terminate()
    wait()
"""

ENDS_MEANWHILE = """
leaving = threading.Event()
main = threading.get_ident()
def end():
    leaving.wait()
    while not sys._current_frames()[main].f_code.co_filename.endswith("sigterm.py"):
        pass
    print("ended", flush=True)
with ending_on_sigterm(end):
    terminate()
    leaving.set()
print("too late", flush=True)
"""

AGAIN = """
def end():
    print("begun", flush=True)
    wait()
with ending_on_sigterm(end):
    terminate()
    wait()
"""

FORKED = """
with telemetry.configure(path=sys.argv[1], handle_sigterm=True) as provider:
    engine.sync.run_event(Event.BATCH_END)
    child = os.fork()
    if child == 0:
        engine.sync.run_event(Event.EPOCH_END)
        terminate()
        wait()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

REPLACED = """
def theirs(number, frame):
    pass
with ending_on_sigterm(lambda: None):
    signal.signal(signal.SIGTERM, theirs)
print(signal.getsignal(signal.SIGTERM) is theirs)
with ending_on_sigterm(lambda: None):
    pass
print(signal.getsignal(signal.SIGTERM) is theirs)
"""

ELSEWHERE = """
from eventbus_engine import ConfigurationError
def work():
    try:
        with telemetry.configure(path=sys.argv[1], handle_sigterm=True):
            pass
    except ConfigurationError as error:
        print(error)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(telemetry.current_provider())
"""

Start = Callable[..., subprocess.Popen[str]]
SpansIn = Callable[[Path], list[RecordedSpan]]

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Callable[[str], tuple[int, list[str], str]]:
    """Run a program to its end: its exit status, the lines it printed, and what it logged."""

    def run_program(program: str) -> tuple[int, list[str], str]:
        process = start(PREAMBLE + program, tmp_path / "spans.jsonl")
        printed, logged = process.communicate(timeout=60)
        return process.returncode, printed.splitlines(), logged

    return run_program


Run = Callable[[str], tuple[int, list[str], str]]


@pytest.mark.parametrize(
    "lock", ["provider._workers[0]._progress", "provider._workers[0]._wake._cond", "_GLOBAL._lock"]
)
def test_a_lock_that_the_interrupted_frame_holds_is_not_waited_for(
    lock: str, run: Run, spans_in: SpansIn, tmp_path: Path
) -> None:
    """The signal comes in the midst of queueing a span, say: it is let go of, and everything is exported."""
    code, _, logged = run(LOCKED.format(lock=lock))

    assert code == -signal.SIGTERM, logged
    assert [span.name for span in spans_in(tmp_path / "spans.jsonl")] == ["dispatch batch_end"]


def test_the_handler_that_was_there_is_called_afterwards(run: Run, spans_in: SpansIn, tmp_path: Path) -> None:
    """With the signal, when tracing has ended; what it raises goes its way."""
    code, printed, logged = run(PREVIOUS)

    assert (code, printed) == (7, ["previous SIGTERM None"]), logged
    assert [span.name for span in spans_in(tmp_path / "spans.jsonl")] == ["dispatch batch_end"]


def test_a_signal_that_was_ignored_stays_ignored(run: Run, spans_in: SpansIn, tmp_path: Path) -> None:
    """Tracing goes on."""
    code, printed, logged = run(IGNORED)

    assert (code, printed) == (0, ["True"]), logged
    assert [span.name for span in spans_in(tmp_path / "spans.jsonl")] == ["dispatch batch_end"]


def test_an_ending_that_fails_does_not_keep_the_signal(run: Run) -> None:
    """It is logged, and the process dies of the signal all the same."""
    code, _, logged = run(RAISES)

    assert code == -signal.SIGTERM
    assert "what was to be exported on SIGTERM may be lost" in logged
    assert "ZeroDivisionError" in logged


def test_leaving_the_block_waits_for_an_ending_that_has_begun(run: Run) -> None:
    """A program that happens to end in that moment loses nothing either."""
    code, printed, logged = run(ENDS_MEANWHILE)

    assert (code, printed) == (-signal.SIGTERM, ["ended"]), logged


def test_a_second_signal_is_not_held_up(start: Start) -> None:
    """Whoever cannot wait for the export sends it again."""
    process = start(PREAMBLE + AGAIN)
    assert process.stdout is not None
    begun = process.stdout.readline()
    process.terminate()
    process.communicate(timeout=60)

    assert begun == "begun\n"
    assert process.returncode == -signal.SIGTERM


def test_a_forked_child_ends_for_itself(run: Run, spans_in: SpansIn, tmp_path: Path) -> None:
    """It exports what it has recorded, and dies of the signal; its parent goes on."""
    code, printed, logged = run(FORKED)

    assert (code, printed) == (0, [str(-signal.SIGTERM)]), logged
    names = [span.name for span in spans_in(tmp_path / "spans.jsonl")]
    assert sorted(names) == ["dispatch batch_end", "dispatch epoch_end"]


def test_the_handler_goes_with_the_block(run: Run) -> None:
    """What somebody else has installed meanwhile stays; otherwise what was there before is back."""
    code, printed, logged = run(REPLACED)

    assert (code, printed) == (0, ["True", "True"]), logged


def test_only_the_main_thread_may_ask_for_it(run: Run) -> None:
    """Python allows it nowhere else; nothing is set up then."""
    code, printed, logged = run(ELSEWHERE)

    assert code == 0, logged
    assert printed == ["handle_sigterm=True works on the main thread only; call telemetry.configure there", "None"]
