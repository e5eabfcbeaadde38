"""`Recording`: the files of a run, line by line, as requests, as spans, or as whole traces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eventbus_engine.errors import ConfigurationError, SpanFileError
from eventbus_engine.telemetry.reports.decode import Json, SpanDecoder, times_of, trace_id_of
from eventbus_engine.telemetry.reports.model import RecordedSpan, RecordedTrace

__all__ = ["Extent", "Recording"]


@dataclass(slots=True)
class Extent:
    """How many spans a trace has, when the first starts and when the last ends (nanoseconds since the epoch)."""

    spans: int
    start_ns: int
    end_ns: int


class Recording:
    """The spans that a run left in files of OTLP JSON lines.

    Nothing is kept but an entry for each trace and the traces that are not complete yet, so that a file may be larger
    than the memory. What is appended after the construction is not seen, so a run may be looked at while it goes on.

    Args:
        path: a file, or the folder of a run: all of its files `spans*.jsonl`.

    Attributes:
        paths: the files.
        truncated: how many of them end in the middle of a line, as a killed process leaves them; known once one of
            the methods has come to the end. The spans of such a line are lost, and that is no error.

    Raises:
        ConfigurationError: there is no such file, or no spans in that folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.paths: list[Path] = _find(Path(path))
        self.truncated: int = 0
        try:
            self._sizes = [file.stat().st_size for file in self.paths]
        except OSError as exc:
            raise ConfigurationError(f"cannot read spans from {os.fspath(path)!r}: {exc}") from exc
        self._decoder = SpanDecoder()
        self._index: dict[str, Extent] | None = None

    def requests(self) -> Iterator[Json]:
        """The lines, in their order, as JSON; each has been seen to be a request.

        Raises:
            SpanFileError: a line is none.
        """
        for path, number, request in self._lines():
            with _blaming(path, number):
                for _ in self._decoder.raw_spans(request):
                    pass
            yield request

    def index(self) -> dict[str, Extent]:
        """The extent of each trace, by its id, in the order in which their first spans ended.

        Raises:
            SpanFileError: a line is no request.
        """
        if self._index is None:
            index: dict[str, Extent] = {}
            for path, number, request in self._lines():
                with _blaming(path, number):
                    for raw in self._decoder.raw_spans(request):
                        start_ns, end_ns = times_of(raw)
                        known = index.setdefault(trace_id_of(raw), Extent(0, start_ns, end_ns))
                        known.spans += 1
                        known.start_ns = min(known.start_ns, start_ns)
                        known.end_ns = max(known.end_ns, end_ns)
            self._index = index
        return self._index

    def traces(self, wanted: Callable[[str], bool] | None = None) -> Iterator[RecordedTrace]:
        """The traces, each as soon as its last span has been read. Reads the files twice, the first time for `index`.

        Args:
            wanted: takes a trace id; only the traces it is true for are put together. All by default.

        Raises:
            SpanFileError: a line is no request, or one of its spans does not fit.
        """
        index = self.index()
        incomplete: dict[str, list[RecordedSpan]] = {}
        for path, number, request in self._lines():
            with _blaming(path, number):
                found = [
                    self._decoder.decode(raw)
                    for raw in self._decoder.raw_spans(request)
                    if wanted is None or wanted(trace_id_of(raw))
                ]
            for span in found:
                spans = incomplete.setdefault(span.trace_id, [])
                spans.append(span)
                if len(spans) == index[span.trace_id].spans:
                    yield RecordedTrace(span.trace_id, incomplete.pop(span.trace_id))

    def _lines(self) -> Iterator[tuple[Path, int, Json]]:
        """The file, the number and the content of each line that is not blank."""
        self.truncated = 0
        for path, size in zip(self.paths, self._sizes, strict=True):
            with open(path, "rb") as file:
                number, left = 0, size
                # Up to the size it had: what a live run has appended since would be in one pass and not in the other.
                while left > 0 and (line := file.readline(left)):
                    left -= len(line)
                    number += 1
                    if line.isspace():
                        continue
                    try:
                        request = json.loads(line)
                    except (ValueError, RecursionError) as exc:
                        if line.endswith(b"\n"):
                            raise SpanFileError(path, number, f"no JSON ({exc})") from exc
                        self.truncated += 1
                    else:
                        yield path, number, request


@contextmanager
def _blaming(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, RecursionError) as exc:
        raise SpanFileError(path, number, str(exc)) from exc


def _find(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("spans*.jsonl"))
    if not found:
        raise ConfigurationError(
            f"there are no spans in {str(path)!r}: no file spans*.jsonl; give the file that "
            "telemetry.configure(path=...) wrote, or the folder it is in"
        )
    return found
