"""The demo itself: build a trainer as a user would, train with everything switched on, and report."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import torch
from torch.nn import functional

from eventbus_engine import telemetry
from eventbus_engine.demo.callbacks import PostBatches
from eventbus_engine.demo.digits import make_loaders, make_model
from eventbus_engine.demo.heartbeat import Heartbeat
from eventbus_engine.demo.records import read_records
from eventbus_engine.demo.report import Outcome, find_problems, format_report
from eventbus_engine.demo.server import BatchServer
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.loggers import JsonlLogger, ProgressBar
from eventbus_engine.training import Trainer
from eventbus_engine.training.algorithms import LabelSmoothing, LayerFreezing, MixUp, SelectiveBackprop

__all__ = ["Options", "run_demo"]


@dataclass(frozen=True)
class Options:
    """What the command line chooses.

    Attributes:
        epochs: how long to train.
        seed: of everything random in the run.
        target: the held-out accuracy to reach, 0 to 1.
        backend: the event loop, `asyncio` or `trio`.
        runs_dir: where the directory of the run is made.
        run_name: its name; by default the time and a few random letters.
        progress: whether to draw a progress bar, if standard error is a terminal.
    """

    epochs: int
    seed: int
    target: float
    backend: str
    runs_dir: Path
    run_name: str | None
    progress: bool


def run_demo(options: Options, write: Callable[[str], None] = print) -> int:
    """Train, and write the report.

    Returns:
        The exit code: 0 if everything held, 1 if something did not, 128 plus the signal's number if one ended it.

    Raises:
        ConfigurationError: an option cannot be used.
    """
    directory = _make_directory(options)
    with BatchServer() as server:
        heartbeat = Heartbeat()
        trainer = make_trainer(options, directory, server.url)
        training = _Training(trainer, heartbeat)
        started = time.perf_counter()
        with telemetry.configure(service_name="eventbus-engine-demo", path=directory / "spans.jsonl"):
            training.run(options.backend)
        seconds = time.perf_counter() - started
    headline = f"{directory.name}, seed {options.seed}, {options.backend}"
    outcome = Outcome(directory, headline, seconds, read_records(directory / "metrics.jsonl"), server, heartbeat)
    write(format_report(outcome))
    return _conclude(training, outcome, options, write)


def make_trainer(options: Options, directory: Path, url: str) -> Trainer:
    """The trainer of the demo. Its algorithms stand in an order that would be wrong as it is.

    SelectiveBackprop has to see the samples before MixUp mixes them. And what MixUp does to the labels on BEFORE_LOSS,
    before LabelSmoothing, it has to undo on AFTER_LOSS after LabelSmoothing. The engine's passes see to both.
    """
    torch.set_num_threads(1)  # tensors this small gain nothing from more, and the event loop wants a core too
    train, held_out = make_loaders(options.seed)
    model = make_model(options.seed)
    batches = options.epochs * len(train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    return Trainer(
        model,
        train,
        held_out,
        loss=functional.cross_entropy,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs),
        # In batches: what depends on how much of the training is over then moves on with every batch.
        max_duration=f"{batches}ba",
        algorithms=[MixUp(), LabelSmoothing(), LayerFreezing(), SelectiveBackprop()],
        callbacks=[PostBatches(url)],
        loggers=[JsonlLogger(directory / "metrics.jsonl", log_traces=True), ProgressBar(enabled=options.progress)],
        seed=options.seed,
        run_name=directory.name,
    )


@dataclass
class _Training:
    """One call of `fit`, beside a heartbeat, until it ends or a signal ends it.

    Attributes:
        interrupted: the signal that ended it.
        error: the exception that ended it.
    """

    trainer: Trainer
    heartbeat: Heartbeat
    interrupted: signal.Signals | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)

    def run(self, backend: str) -> None:
        """Run an event loop for it. Everything is closed and delivered when this returns."""
        try:
            anyio.run(self._main, backend=backend)
        except KeyboardInterrupt:  # from where signals cannot be received, or from a second Ctrl-C
            self.interrupted = signal.SIGINT

    async def _main(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_signals, group.cancel_scope)
            group.start_soon(self.heartbeat.run)
            try:
                await self.trainer.fit()
            except Exception as error:
                self.error = error
            group.cancel_scope.cancel()

    async def _watch_signals(self, scope: anyio.CancelScope) -> None:
        """Cancel on the first Ctrl-C or SIGTERM: a cancelled trainer still closes and delivers what it has opened."""
        if sys.platform == "win32":
            return
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                self.interrupted = number
                scope.cancel()
                return


def _make_directory(options: Options) -> Path:
    name = options.run_name or f"digits-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    if Path(name).name != name or name == "..":
        raise ConfigurationError(f"run name {name!r} is no plain name; say where to put the run with --runs-dir")
    directory = options.runs_dir / name
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise ConfigurationError(
            f"{directory} exists already, and would hold two runs; choose another --run-name, or remove it"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot make {directory}: {error}; choose another --runs-dir") from error
    return directory


def _conclude(training: _Training, outcome: Outcome, options: Options, write: Callable[[str], None]) -> int:
    if training.interrupted is not None:
        write(f"\ninterrupted by {training.interrupted.name}; everything above is flushed")
        return 128 + training.interrupted
    if training.error is not None:
        write("\nthe run failed: " + "".join(traceback.format_exception_only(training.error)).rstrip())
        return 1
    problems = find_problems(outcome, options.target)
    for problem in problems:
        write(f"\nthis did not hold: {problem}")
    return 1 if problems else 0
