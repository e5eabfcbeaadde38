"""What `eventbus-engine trace …` does."""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from eventbus_engine.errors import ConfigurationError, SpanFileError
from eventbus_engine.telemetry.reports.chrome import write_chrome
from eventbus_engine.telemetry.reports.jaeger import write_jaeger
from eventbus_engine.telemetry.reports.otlp import write_otlp
from eventbus_engine.telemetry.reports.reader import Recording
from eventbus_engine.telemetry.reports.summary import format_summary, summarize
from eventbus_engine.telemetry.reports.tree import format_trace

__all__ = ["export", "show", "summary"]

_WRITERS: dict[str, Callable[[Recording, TextIO], list[str] | None]] = {
    "chrome": write_chrome,
    "jaeger": write_jaeger,
    "otlp": write_otlp,
}


def summary(path: Path) -> int:
    """Print the numbers of a run; returns the exit code."""

    def run(recording: Recording) -> None:
        _print(format_summary(summarize(recording.traces())))

    return _report(path, run)


def show(path: Path, trace: str | None, limit: int) -> int:
    """Print traces as trees, in the order in which they started; returns the exit code.

    Args:
        path: the recording.
        trace: the id of a trace, or how it begins; all traces by default.
        limit: how many at most.

    Raises:
        ConfigurationError: no trace has such an id.
    """

    def run(recording: Recording) -> None:
        index = recording.index()
        wanted = [trace_id for trace_id in index if trace is None or trace_id.startswith(trace.lower())]
        if trace is not None and not wanted:
            raise ConfigurationError(f"no trace in {str(path)!r} has an id that begins with {trace!r}")
        chosen = set(heapq.nsmallest(limit, wanted, key=lambda trace_id: index[trace_id].start_ns))
        trees = sorted(recording.traces(chosen.__contains__), key=lambda found: found.start_ns)
        parts = [format_trace(found) for found in trees]
        if left := len(wanted) - len(chosen):
            parts.append(f"{left:,} more; --limit shows more of them, --trace a certain one")
        _print("\n\n".join(parts))

    return _report(path, run)


def export(path: Path, form: str, output: Path | None) -> int:
    """Write a run in another format; returns the exit code.

    Args:
        path: the recording.
        form: `jaeger`, `chrome` or `otlp`.
        output: the file, replaced once it is complete; standard output by default.

    Raises:
        ConfigurationError: the file cannot be written, or is the recording itself.
    """

    def run(recording: Recording) -> None:
        write = _WRITERS[form]
        if output is None:
            warnings = write(recording, sys.stdout)
        else:
            if output.exists() and any(output.samefile(file) for file in recording.paths):
                raise ConfigurationError(f"{str(output)!r} is the recording itself; give --output another name")
            with _replacing(output) as out:
                warnings = write(recording, out)
        for warning in warnings or ():
            _say(warning)

    return _report(path, run)


def _report(path: Path, run: Callable[[Recording], None]) -> int:
    recording = Recording(path)
    try:
        run(recording)
        sys.stdout.flush()
    except SpanFileError as error:
        _say(str(error))
        return 1
    except BrokenPipeError:
        # Whoever read this has seen enough, as `head` has. What is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if recording.truncated:
        files = "1 file ends" if recording.truncated == 1 else f"{recording.truncated} files end"
        _say(f"{files} in the middle of a line, as a killed process leaves it; the spans of that line are missing")
    return 0


def _print(text: str) -> None:
    # A span may have a name that the terminal's encoding lacks.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="backslashreplace").decode(encoding) + "\n")


def _say(message: str) -> None:
    sys.stderr.write(f"eventbus-engine: {message}\n")


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file to write to that takes the place of `path` if all goes well, and leaves nothing behind if not."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8") as out:
            yield out
        part.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {str(path)!r}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink()
