"""Spans that have not ended when tracing ends: each is handed on exactly once, whoever comes first."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from eventbus_engine.telemetry.provider import RecordingProvider
from eventbus_engine.telemetry.records import RecordedSpan
from eventbus_engine.telemetry.spans import Template

TEMPLATE = Template("algorithm a", "algorithm")


class Recording:
    """A provider, and the records that it hands on."""

    def __init__(self) -> None:
        self.provider: RecordingProvider = RecordingProvider([])
        self.kept: list[RecordedSpan] = []
        self.provider.recorder.put = self.kept.append

    def open(self) -> RecordedSpan:
        """Open a span that nothing is around."""
        span = self.provider.recorder.open(TEMPLATE, root=True)
        assert isinstance(span, RecordedSpan)
        return span


@pytest.fixture
def recording() -> Iterator[Recording]:
    """One that is shut down in the end."""
    made = Recording()
    yield made
    made.provider.shutdown()


def on_a_thread(function: Callable[[], None]) -> None:
    """Call it on another thread, and wait for that."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_what_is_ending_is_not_ended_by_another_thread(recording: Recording) -> None:
    """Tracing ends while a thread is in the midst of ending its span: the span is there once, with its own outcome."""

    class UntimelyError(Exception):
        def __str__(self) -> str:
            on_a_thread(recording.provider.end_open_spans)
            return "tracing has ended"

    span = recording.open()
    span.end("failed", UntimelyError())

    assert [each.outcome for each in recording.kept] == ["failed"]


def test_what_tracing_has_ended_ends_no_more(recording: Recording) -> None:
    """A handler that returns after that changes nothing of what has been handed on."""
    span = recording.open()
    on_a_thread(recording.provider.end_open_spans)
    span.end("ok")
    span.end_now()

    assert [each.outcome for each in recording.kept] == ["in_flight"]


def test_threads_that_end_their_spans_while_tracing_ends(recording: Recording) -> None:
    """Four threads of 2000 spans each, and one that ends whatever is open, over and over: each is there once."""
    over = threading.Event()

    def work() -> None:
        for _ in range(2000):
            recording.open().end("ok")

    def sweep() -> None:
        while not over.is_set():
            recording.provider.end_open_spans()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=work) for _ in range(4)]
        sweeper = threading.Thread(target=sweep)
        for thread in (sweeper, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        over.set()
        sweeper.join()
    finally:
        sys.setswitchinterval(before)

    assert set(Counter(span.span_id for span in recording.kept).values()) == {1}
    assert len(recording.kept) == 4 * 2000
    assert not recording.provider.recorder.open_spans


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_hands_on_none_of_its_parents(recording: Recording) -> None:
    """Neither when tracing ends there, nor when the handler that forked ends there as well."""
    span = recording.open()
    child = os.fork()
    if child == 0:  # pragma: no cover - a process of its own
        recording.provider.end_open_spans()
        span.end("ok")
        mine = recording.open()
        mine.end("ok")
        os._exit(0 if recording.kept == [mine] else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    span.end("ok")

    assert code == 0
    assert recording.kept == [span]
