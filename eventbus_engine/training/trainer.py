"""`Trainer`: puts a model, its data and its participants together, and runs `fit`, `eval` and `predict` on them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import torch
from anyio.abc import TaskGroup
from opentelemetry.trace import TracerProvider
from torch import nn

from eventbus_engine.closing import CloseReport
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError, EngineClosedError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.plan import PassesArgument
from eventbus_engine.time import Time
from eventbus_engine.training.arguments import (
    DURATION_UNITS,
    INTERVAL_UNITS,
    check_compile,
    check_cuda_timing,
    check_device,
    check_duration,
    check_loggers,
    check_microbatches,
    check_optimizers,
    check_precision,
    check_schedulers,
    check_seed,
    check_subset,
    listed,
    make_scaler,
)
from eventbus_engine.training.checkpoint.resuming import Resuming
from eventbus_engine.training.evaluator import evaluate, make_evaluators
from eventbus_engine.training.generators import seed_generators
from eventbus_engine.training.loop import TrainingLoop
from eventbus_engine.training.model import LossFunction, check_model
from eventbus_engine.training.prediction import predict
from eventbus_engine.training.ranks.ranks import Parallelism, Ranks
from eventbus_engine.training.ranks.sampler import check_shares
from eventbus_engine.training.section import Sections
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.state import Precision, State
from eventbus_engine.training.tracing import RunTracing, in_one_run
from eventbus_engine.training.worker import ComputeWorker, InlineWorker, Worker

__all__ = ["Trainer"]

log: logging.Logger = logging.getLogger("eventbus_engine")


class Trainer:
    """Trains and evaluates a model, firing an event at every point where an algorithm or a callback may join in.

    One call is a whole program: it opens what it uses and closes it, everything delivered, on the way out:

        anyio.run(trainer.fit)

    To call it more than once, keep it open; a later `fit` goes on where the one before stopped:

        async with Trainer(...) as trainer:
            await trainer.fit("2ep")
            await trainer.fit("100ba")
            metrics = await trainer.eval()

    Started by torchrun, it trains with the other ranks of the job: see docs/ranks.md.

    The constructor runs nothing: INIT fires first thing in the first `fit`, `eval` or `predict`.

    Attributes:
        state: the blackboard that algorithms and callbacks work on.
        engine: runs the events; `engine.bus` is where to subscribe, `engine.explain` tells the order.

    Args:
        model: any module with `loss` beside it, called with the inputs of a batch; or, without `loss`, a `BatchModel`.
        train_dataloader: iterated once per epoch: a DataLoader, a list of batches, an async iterable.
        eval_dataloader: a loader, or several `Evaluator`s; None to train without evaluation.
        loss: `(outputs, targets) -> tensor of one element`, the mean over the samples.
        optimizers: one or several, stepped after every batch.
        schedulers: learning-rate schedulers, one or several, stepped after every epoch.
        max_duration: when to stop: `"3ep"`, `"500ba"`, `"10000sp"`, `"1000000tok"`, `"1h30m"`, a `Time`, or a number of
            epochs. The batch that reaches it is the last.
        algorithms: in registration order; what order they run in is up to the passes.
        callbacks: in registration order.
        loggers: destinations of what is logged.
        algorithm_passes: passes besides the default ones, in any of the engine's forms.
        device: where to train, `"cuda"` for example; by default where the model's parameters are.
        precision: `"fp32"` (default), `"amp_bf16"`, or `"amp_fp16"`, which scales the loss.
        seed: seeds `random`, `torch` and, where it is imported, `numpy`, once, before INIT: the same seed then gives
            the same losses. None leaves the generators alone. What the model was initialised with came before.
        compile: compile the model's forward pass by `torch.compile`, once INIT is over; a mapping has its options, as
            in `{"mode": "max-autotune"}`.
        offload: whether computations run on a worker thread, so that the event loop keeps beating; False runs the
            same loop inline.
        microbatches: into how many parts to cut each batch, to save memory; the gradient is that of the whole batch.
        eval_interval: how often to evaluate, where an `Evaluator` does not say it itself: `"1ep"`, `"200ba"`, or any
            other duration, `"0.1dur"` for a tenth of the run.
        step_schedulers_every_batch: step the schedulers after every batch instead.
        run_name: by default the time and a few random letters.
        tracer_provider: where spans go; OpenTelemetry's global provider by default.
        parallelism: how the ranks of a job share the work: `"ddp"`, the default where there are several, or `"fsdp"`,
            which cuts up the model and its optimizers' state.
        cuda_timing: also make spans of what forward, loss, backward and the optimizer took on the CUDA device, which
            their own spans, of the launches, do not show.
        load_path: the folder of a checkpoint to go on from. It is loaded after INIT, when the model is what the
            algorithms have made of it.
        load_strict: whether all of it has to fit: the model, the optimizers, the schedulers. False loads what fits.
        load_weights_only: load the model alone, to begin a run of its own from there.
        autoresume: go on from the newest checkpoint that this run's `CheckpointSaver` has left in its folder, all of
            it; where there is none yet, begin as without it, at `load_path` if that is given.

    Raises:
        ConfigurationError: an argument does not fit; it says which, and what would.
        TimeFormatError: a duration does not parse.
    """

    def __init__(  # noqa: PLR0913 # house: this is where a whole run is put together, and most of it has a default
        self,
        model: nn.Module,
        train_dataloader: Any,
        eval_dataloader: Any = None,
        *,
        loss: LossFunction | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        schedulers: Any = None,
        max_duration: str | int | Time,
        algorithms: Any = (),
        callbacks: Any = (),
        loggers: Any = (),
        algorithm_passes: PassesArgument = None,
        device: str | torch.device | None = None,
        precision: Precision | None = None,
        seed: int | None = None,
        compile: bool | Mapping[str, Any] = False,
        offload: bool = True,
        microbatches: int = 1,
        eval_interval: str | int | Time = "1ep",
        step_schedulers_every_batch: bool = False,
        run_name: str | None = None,
        tracer_provider: TracerProvider | None = None,
        cuda_timing: bool = False,
        load_path: str | os.PathLike[str] | None = None,
        load_strict: bool = True,
        load_weights_only: bool = False,
        autoresume: bool = False,
        parallelism: Parallelism | None = None,
    ) -> None:
        check_model(model, loss)
        self._ranks = ranks = Ranks(parallelism)
        source = BatchSource(train_dataloader, "train_dataloader")
        evaluators = make_evaluators(eval_dataloader)
        self._resuming = Resuming.check(load_path, load_strict, load_weights_only, autoresume, listed(callbacks))
        interval = check_duration("eval_interval", eval_interval, INTERVAL_UNITS)
        for item in (source, *(evaluator.source for evaluator in evaluators)):
            check_shares(item.loader, item.name, ranks.job)
        ranks.check_algorithms(listed(algorithms))
        where, number_format = ranks.device(check_device(device, model)), check_precision(precision)
        self._worker: Worker = ComputeWorker() if offload else InlineWorker()
        self.state: State = State(
            model,
            optimizers=check_optimizers(optimizers),
            schedulers=check_schedulers(schedulers),
            train_dataloader=train_dataloader,
            loss_fn=loss,
            algorithms=listed(algorithms),
            callbacks=ranks.speaking([*check_loggers(loggers), *listed(callbacks)]),
            max_duration=check_duration("max_duration", max_duration, DURATION_UNITS),
            device=where,
            precision=number_format,
            scaler=make_scaler(number_format, where),
            seed=check_seed(seed),
            microbatches=check_microbatches(microbatches),
            run_name=run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}",
            worker=self._worker,
            ranks=ranks,
        )
        self.state._source = source
        self.engine: Engine[State] = Engine(self.state, None, algorithm_passes, tracer_provider=tracer_provider)
        if offload:
            # Plain `apply` computes, too; inline it needs no detour and sees the caller's own context.
            self.engine.offload = self.state.compute
        clock = check_cuda_timing(cuda_timing, self.state.device)
        self._tracing = RunTracing(self.engine.tracers, self.state, ranks.job.rank, clock)
        sections = Sections(self.engine, self._worker)
        self._loop = TrainingLoop(
            self.state, self.engine, sections, source, evaluators, interval, step_schedulers_every_batch, self._tracing
        )
        self._compile = check_compile(compile)
        self._tasks: TaskGroup | None = None  # of async loaders that work ahead
        self._initialised = self._entered = self._busy = False

    @property
    def logger(self) -> Logger:
        """The logger that handlers get."""
        return self.engine.logger

    async def fit(self, duration: str | int | Time | None = None) -> None:
        """Train until `max_duration`, or for another `duration` from here on.

        It opens the trainer and closes it at the end, whatever that end is, unless it is open already. With
        `autoresume`, a run that had come to its end is left as it is.

        Raises:
            ConfigurationError: there is nothing left to train, no optimizer, or a fit is running.
            TimeFormatError: the duration does not parse.
            CheckpointError: the checkpoint to load is damaged, or does not fit the run.
            BatchError: a batch cannot be used; it says what would.
            EngineClosedError: the trainer is closed.
        """
        more = None if duration is None else check_duration("duration", duration, DURATION_UNITS)
        async with self._session():
            resumed = await self._initialise()
            if resumed and more is None and self._is_over():
                log.info("there is nothing left to train: the run had come to its end, %s", self.state.max_duration)
                return
            self._extend(more)
            if not self.state.optimizers:
                raise ConfigurationError("there is nothing to step: give the Trainer optimizers=")
            await self._loop.fit()

    async def eval(self, eval_dataloader: Any = None) -> dict[str, float]:
        """Evaluate now, and return the metrics, by the names they are logged under: `metrics/eval/accuracy`.

        It opens the trainer and closes it at the end, whatever that end is, unless it is open already.

        Args:
            eval_dataloader: a loader, or several `Evaluator`s; by default the trainer's own.

        Raises:
            ConfigurationError: there is no eval_dataloader, or a fit is running.
            BatchError: a batch cannot be used; it says what would.
            EngineClosedError: the trainer is closed.
        """
        evaluators = make_evaluators(eval_dataloader) or self._loop.evaluators
        if not evaluators:
            raise ConfigurationError("there is nothing to evaluate on: give the Trainer eval_dataloader=")
        sources = [] if eval_dataloader is None else [evaluator.source for evaluator in evaluators]
        for source in sources:
            check_shares(source.loader, source.name, self._ranks.job)
        async with self._session(), self._lent(sources):
            await self._initialise()
            with self._tracing.unit("eval"):
                async with self.engine.pair(Event.EVAL_STANDALONE_START):
                    await evaluate(self.state, self.engine, evaluators)
        return dict(self.state.metrics)

    async def predict(
        self, dataloader: Any, *, subset_num_batches: int | None = None, return_outputs: bool = True
    ) -> list[Any]:
        """Run the model over a loader, and return what it says.

        It opens the trainer and closes it at the end, whatever that end is, unless it is open already.

        Args:
            dataloader: yields batches of the same form as the training loader's, or inputs alone.
            subset_num_batches: use so many batches and no more; all of them by default.
            return_outputs: False for callbacks that take them from `state.outputs` as they come.

        Returns:
            The model's outputs for each batch, on the CPU; nothing without `return_outputs`.

        Raises:
            ConfigurationError: the loader cannot be iterated, or a fit is running.
            BatchError: a batch cannot be used; it says what would.
            EngineClosedError: the trainer is closed.
        """
        source, most = BatchSource(dataloader, "dataloader"), check_subset(subset_num_batches)
        async with self._session(), self._lent([source]):
            await self._initialise()
            with self._tracing.unit("predict"):
                return await predict(self.state, self.engine, source, most, return_outputs)

    async def close(self) -> CloseReport:
        """Close the engine, which delivers and closes what takes part in it, the data and the worker thread."""
        try:
            return await self.engine.close()
        finally:
            await _close(self._sources())
            if self._ranks.joined:
                await self.state.compute(self._ranks.leave)
            self._worker.close()

    async def __aenter__(self) -> Self:
        self._refuse_closed()
        await self.engine.__aenter__()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        for source in self._sources():
            source.prefetch_in(self._tasks)
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._entered = False
        assert self._tasks is not None  # noqa: S101 -- entered
        try:
            # What works ahead ends here and fails nowhere else, so that an error of the block leaves as itself.
            try:
                await _close(self._sources())
                await self._tasks.__aexit__(None, None, None)
            finally:
                # Also where the tasks end by a cancellation: the engine has a group of its own to leave.
                await self.engine.__aexit__(kind, error, tb)
        finally:
            # Closing has its own deadlines, and has to happen all the more when the run is cancelled.
            with anyio.CancelScope(shield=True):
                await self.close()

    def _sources(self) -> list[BatchSource]:
        return [self._loop.source, *(evaluator.source for evaluator in self._loop.evaluators)]

    @asynccontextmanager
    async def _lent(self, sources: Sequence[BatchSource]) -> AsyncIterator[None]:
        """Sources that are the caller's, for one call."""
        for source in sources:
            source.prefetch_in(self._tasks)
        try:
            yield
        finally:
            await _close(sources)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """One call at a time, in a trainer that is open."""
        self._refuse_closed()
        if self._busy:
            raise ConfigurationError(
                "this trainer is at work already, and it has only one state: await that call first, or make another "
                "Trainer"
            )
        self._busy = True
        try:
            if self._entered:
                async with in_one_run(self.state, self._tracing):
                    yield
            else:
                async with self, in_one_run(self.state, self._tracing):
                    yield
        finally:
            self._busy = False

    def _refuse_closed(self) -> None:
        if self.engine.closed:
            raise EngineClosedError(
                "this trainer is closed: fit(), eval() and predict() close what they open; to call them more than "
                "once, keep it open with `async with trainer:`"
            )

    def _extend(self, more: Time | None) -> None:
        """Set the end of this fit."""
        state = self.state
        if more is not None:
            state.max_duration = state.timestamp.get(more.unit) + more
        if state.max_duration is not None and self._is_over():
            raise ConfigurationError(
                f"there is nothing left to train: max_duration is {state.max_duration}, and training is at "
                f"{state.timestamp.get(state.max_duration.unit)}; say how much more, as in fit(duration='1ep')"
            )

    def _is_over(self) -> bool:
        end = self.state.max_duration
        return end is not None and self.state.timestamp >= end

    async def _initialise(self) -> bool:
        """Once, before anything is used: seed, INIT, the model to its device; whether the run goes on from its own."""
        if self._initialised:
            return False
        if self.state.seed is not None:
            seed_generators(self.state.seed)
        await self.engine.run_event(Event.INIT)
        await self.state.compute(self.state.model.to, self.state.device)
        if self._ranks.together:
            await self.state.compute(self._ranks.set_up, self.state.model, self.state.optimizers, self.state.seed)
        if self._compile is not None:
            self.state.compile(**self._compile)
        async with self.engine.pair(Event.BEFORE_LOAD):
            resumed = await self._resuming.load(self.state)
        self._initialised = True
        return resumed


async def _close(sources: Sequence[BatchSource]) -> None:
    with anyio.CancelScope(shield=True):
        for source in sources:
            await source.aclose()
