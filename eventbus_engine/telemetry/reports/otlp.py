"""The recording as one OTLP `ExportTraceServiceRequest`, for whatever takes that in JSON."""

from __future__ import annotations

import json
from typing import TextIO

from eventbus_engine.telemetry.reports.reader import Recording

__all__ = ["write_otlp"]


def write_otlp(recording: Recording, out: TextIO) -> None:
    """Write all requests as one. What is in them stays as it is, fields that are unknown here included.

    Raises:
        SpanFileError: a line of the recording is no request.
    """
    out.write('{"resourceSpans":[')
    separator = ""
    for request in recording.requests():
        for resource in request.get("resourceSpans") or ():
            out.write(separator + json.dumps(resource, separators=(",", ":")))
            separator = ",\n"
    out.write("]}\n")
