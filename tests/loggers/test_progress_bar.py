"""The progress bar: on a real terminal, and in a pipe."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TextIO

import anyio
import pytest

from eventbus_engine import Engine, EventName, Time, Timestamp
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.loggers import ProgressBar

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """A pseudo-terminal, and all that is written to it."""

    def __init__(self) -> None:
        self.controller, self.descriptor = os.openpty()
        self.stream: TextIO = os.fdopen(self.descriptor, "w")
        self._written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while chunk := os.read(self.controller, 65536):
                self._written += chunk

    def finish(self) -> str:
        """Close it, and return what was written."""
        with suppress(OSError):
            self.stream.close()
        self._reader.join()
        with suppress(OSError):
            os.close(self.controller)
        return self._written.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal without colours."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    made = Terminal()
    yield made
    made.finish()


def plain_text(written: str) -> str:
    """Without the control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


def last_line(written: str) -> str:
    """The bar as it stayed on the screen."""
    return plain_text(written).replace("\r", "\n").strip().splitlines()[-1]


class Step(EventName):
    DONE = "done"
    OTHER = "other"


def training_state(**values: Any) -> SimpleNamespace:
    """What the bar reads of a training state, three batches to an epoch."""
    return SimpleNamespace(timestamp=Timestamp(), loss=None, train_dataloader=[0, 0, 0], **values)


@pytest.mark.anyio
async def test_pipeline_is_counted_and_its_latest_metrics_are_shown(terminal: Terminal) -> None:
    """Only the chosen event counts; a metric has the last part of its name, and markup in it is text."""
    bar = ProgressBar(3, event="done", label="rows", interval=0, stream=terminal.stream)
    drawn = random.getstate()
    async with Engine(callbacks=[bar], events=Step) as engine:
        for number in range(3):
            engine.logger.log_metrics({"a": 1, "b": 2, "c": 3, "io/bad": number, "[red]x": "[b]", "list": [1]})
            await engine.run_event(Step.DONE, SimpleNamespace())
            await engine.run_event(Step.OTHER, SimpleNamespace())
    written = terminal.finish()

    assert re.match(r"rows .* 3/3 c 3 bad 2 \[red\]x \[b\] 0:00:00", last_line(written))
    assert "1/3" in plain_text(written)
    assert written.count(HIDE) == written.count(SHOW) == 1
    assert written.rindex(SHOW) > written.rindex("3/3")
    assert random.getstate() == drawn


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("duration", "done", "batches", "expected"),
    [
        (Time(7, "ba"), Timestamp(epoch=2, batch=7, batch_in_epoch=1), 7, r"epoch 3 .* 7/7 loss 0\.125 accuracy 0\.9 "),
        (Time(2, "ep"), Timestamp(epoch=2, batch=6), 6, r"epoch 2 .* 6/6 loss 0\.125 accuracy 0\.9 "),
        (Time(9, "sp"), Timestamp(epoch=0, batch=1, batch_in_epoch=1), 1, r"epoch 1 .* 1/\? +loss 0\.125 "),
        (None, Timestamp(), 0, r"epoch 1 .* 0/\? +loss 0\.125 "),
    ],
)
async def test_training_shows_epoch_batches_loss_and_metrics(
    terminal: Terminal, duration: Any, done: Timestamp, batches: int, expected: str
) -> None:
    """Batches are those of the state, so a resumed run goes on where it was; the loss is not shown twice."""
    state = training_state(max_duration=duration)
    async with Engine(state, callbacks=[ProgressBar(interval=0, stream=terminal.stream)]) as engine:
        engine.logger.log_metrics({"loss/train/total": 0.125, "metrics/eval/accuracy": 0.9})
        await engine.run_event(Event.INIT)
        engine.logger.log_metrics({"loss/train/total": 0.125, "metrics/eval/accuracy": 0.9})
        state.timestamp, state.loss = done, 0.125
        await engine.run_event(Event.BATCH_END)
    written = terminal.finish()

    assert re.match(expected, last_line(written)), last_line(written)


def test_epochs_of_a_loader_without_length_have_no_end(terminal: Terminal) -> None:
    """And chosen metrics are shown in the order they were asked for, those not yet logged left out."""
    state = training_state(max_duration=Time(2, "ep"))
    state.train_dataloader = iter([])
    bar = ProgressBar(metrics=["lr", "late", "a/x"], stream=terminal.stream)
    bar.open(state, None)
    bar.log_metrics({"a/x": 1, "other": 2, "lr": 0.1})
    bar.close(state, None)

    assert re.match(r"epoch 1 .* 0/\? +lr 0\.1 x 1", last_line(terminal.finish()))


def test_redraws_are_throttled_and_in_between_the_loss_is_not_read(terminal: Terminal) -> None:
    """Reading it waits for an accelerator; only the first and the last drawing do."""

    class Counted(SimpleNamespace):
        reads = 0

        @property
        def loss(self) -> float:
            self.reads += 1
            return 0.5

    state = Counted()
    bar = ProgressBar(1000, interval=3600, stream=terminal.stream)
    bar.open(state, None)
    threads = threading.active_count()
    for _ in range(1000):
        bar._advance(state, None)
    reads = state.reads
    bar.close(state, None)

    assert reads == 1
    assert threads == threading.active_count()
    assert "1000/1000 loss 0.5" in last_line(terminal.finish())


def test_metric_keeps_no_graph_alive(terminal: Terminal) -> None:
    """The step that logged it could not be freed otherwise."""
    import torch

    bar = ProgressBar(1, stream=terminal.stream)
    bar.open(None, None)
    bar.log_metrics({"x": torch.ones((), requires_grad=True) * 2})
    kept = bar._metrics["x"]
    bar.close(None, None)

    assert not kept.requires_grad
    assert "x 2" in last_line(terminal.finish())


@pytest.mark.anyio
async def test_terminal_comes_back_when_the_run_fails_or_is_cancelled(terminal: Terminal) -> None:
    """The cursor is shown again, and standard output is what it was."""
    output = sys.stdout

    async def fail() -> None:
        async with Engine(callbacks=[ProgressBar(stream=terminal.stream)]) as engine:
            await engine.run_event(Event.BATCH_END)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with anyio.CancelScope() as scope:
        async with Engine(callbacks=[ProgressBar(stream=terminal.stream)]) as engine:
            await engine.run_event(Event.BATCH_END)
            scope.cancel()
            await anyio.sleep_forever()
    written = terminal.finish()

    assert written.count(HIDE) == written.count(SHOW) == 2
    assert sys.stdout is output


@pytest.mark.parametrize("end", ["interrupt", "exit"])
def test_terminal_comes_back_when_the_program_ends_without_closing(terminal: Terminal, end: str) -> None:
    """By Ctrl-C in an engine that nobody closes, or by running off its end."""
    program = (
        "import signal, sys\n"
        "from eventbus_engine.loggers import ProgressBar\n"
        "bar = ProgressBar(3)\n"
        "bar.open(None, None)\n"
        "if sys.argv[1] == 'interrupt': signal.raise_signal(signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, end], stderr=terminal.stream, check=False)
    written = terminal.finish()

    assert done.returncode == (-signal.SIGINT if end == "interrupt" else 0)
    assert written.count(HIDE) == written.count(SHOW) == 1
    assert written.rindex(SHOW) > written.rindex("0/3")


@pytest.mark.anyio
@pytest.mark.parametrize("hung_up", [True, False], ids=["hung up", "closed"])
async def test_terminal_that_goes_away_ends_the_drawing_only(
    hung_up: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is reported for every step, and the run goes on."""
    monkeypatch.setenv("TERM", "xterm")
    controller, descriptor = os.openpty()
    stream = os.fdopen(descriptor, "w")
    async with Engine(callbacks=[ProgressBar(interval=0, stream=stream)]) as engine:
        await engine.run_event(Event.BATCH_END)
        os.close(controller) if hung_up else stream.close()
        await engine.run_event(Event.BATCH_END)
        await engine.run_event(Event.BATCH_END)
    with suppress(OSError):
        stream.close()
    if not hung_up:
        os.close(controller)

    assert caplog.messages == []


def test_nothing_is_drawn_if_told_so_or_on_a_terminal_that_cannot(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`enabled=False`, and a dumb terminal, which would show every drawing below the one before."""
    for dumb in (False, True):
        if dumb:
            monkeypatch.setenv("TERM", "dumb")
        bar = ProgressBar(1, stream=terminal.stream, enabled=dumb)
        bar.open(None, None)
        bar.log_metrics({"x": 1})
        bar._advance(None, None)
        bar.close(None, None)

    assert terminal.finish() == ""


@pytest.mark.anyio
async def test_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where FORCE_COLOR asks for the colours of a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        async with Engine(callbacks=[ProgressBar(interval=0, stream=stream)]) as engine:
            engine.logger.log_metrics({"x": 1})
            await engine.run_event(Event.BATCH_END)
    written = os.read(reading, 100)
    os.close(reading)

    assert written == b""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total": -1}, "must not be negative"),
        ({"interval": -1}, "must not be negative"),
        ({"event": "close"}, "'close' is a method"),
        ({"event": "log_metrics"}, "'log_metrics' is a method"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    """At construction, by name."""
    with pytest.raises(ConfigurationError, match=message):
        ProgressBar(**options)
