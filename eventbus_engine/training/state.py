"""`State`: what the training loop, the algorithms and the callbacks share."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.time import Time, Timestamp, TimeUnit
from eventbus_engine.training import data
from eventbus_engine.training.data import BatchKey
from eventbus_engine.training.model import LossFunction
from eventbus_engine.training.ranks.ranks import Ranks
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.worker import InlineWorker, Worker

__all__ = ["AUTOCAST", "Precision", "State"]

P = ParamSpec("P")
T = TypeVar("T")

Precision: TypeAlias = Literal["fp32", "amp_bf16", "amp_fp16"]
"""`fp32`: the parameters' own type throughout. `amp_bf16`, `amp_fp16`: forward and loss under autocast to that type."""

AUTOCAST: dict[Precision, torch.dtype | None] = {
    "fp32": None,
    "amp_bf16": torch.bfloat16,
    "amp_fp16": torch.float16,
}


@dataclass(eq=False)
class State:
    """The blackboard of a run. The loop writes it, algorithms change it, callbacks read it.

    Attributes:
        model: the module being trained. An algorithm may replace it at INIT.
        optimizers: stepped after every batch.
        schedulers: learning-rate schedulers, stepped after every epoch, or every batch if the trainer is told so.
        train_dataloader: the loader that `fit` iterates.
        loss_fn: `(outputs, targets) -> loss`; None where the model brings its own.
        algorithms: the algorithms in registration order. Live: what is added takes part from the next event on.
        callbacks: the callbacks and logger destinations, live as well.
        max_duration: when `fit` ends.
        device: where the model and the batches are.
        precision: the number format of the forward pass.
        scaler: with `amp_fp16`, what keeps small gradients from vanishing in float16: it scales the loss for the
            backward pass, so that gradients are scaled from AFTER_BACKWARD up to, not including, AFTER_TRAIN_BATCH.
        seed: what the run was seeded with, None if it was not.
        microbatches: into how many parts each batch is cut for forward and backward.
        run_name: the name of the run.
        batch: the batch in progress, on `device`: the whole one from AFTER_DATALOADER to BEFORE_TRAIN_BATCH and from
            AFTER_TRAIN_BATCH to BATCH_CHECKPOINT, the microbatch in between; an evaluation's own during evaluation.
        outputs: what the model made of `batch`, of the last microbatch after AFTER_TRAIN_BATCH.
        loss: a tensor of one element: the microbatch's loss, with its graph, from BEFORE_LOSS to AFTER_BACKWARD; the
            whole batch's, detached, from AFTER_TRAIN_BATCH on; that of all ranks' batches from BATCH_END on.
        timestamp: how far training is. The batch counts as done from BATCH_END on, with the samples of all ranks.
        eval_timestamp: how far the evaluation, or the prediction, in progress is.
        metrics: the metrics of the latest evaluation, under the names they are logged by: `metrics/eval/accuracy`.
    """

    model: nn.Module
    _: KW_ONLY
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    train_dataloader: Any = None
    loss_fn: LossFunction | None = None
    algorithms: list[Any] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    max_duration: Time | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "fp32"
    scaler: torch.amp.GradScaler | None = None
    seed: int | None = None
    microbatches: int = 1
    run_name: str = "run"
    worker: InitVar[Worker | None] = None
    ranks: InitVar[Ranks | None] = None

    batch: Any = field(default=None, init=False)
    outputs: Any = field(default=None, init=False)
    loss: Tensor | None = field(default=None, init=False)
    timestamp: Timestamp = field(default_factory=Timestamp, init=False)
    eval_timestamp: Timestamp = field(default_factory=Timestamp, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self, worker: Worker | None, ranks: Ranks | None) -> None:
        """Without a worker, computations run inline."""
        self._worker: Worker = worker or InlineWorker()
        self._ranks: Ranks = ranks or Ranks()
        self._compiled: tuple[nn.Module, Callable[..., Any]] | None = None
        self._compile_options: Mapping[str, Any] | None = None
        self._replica: tuple[nn.Module, Callable[..., Any]] | None = None
        self._pass: Callable[[], Awaitable[Tensor]] | None = None  # the loop's, while there is a batch to repeat
        self._source: BatchSource | None = None  # the trainer's, of the training batches

    async def compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a long computation where it does not hold up the event loop: on the trainer's worker thread.

        It runs under a copy of the caller's context variables, with `device` as the current one, in torch's default
        grad mode and without autocast: those belong to the thread, so enter them inside the function, for example
        with `precision_context()`.

        Example:
            An algorithm's extra forward pass, inside `async def apply`:

            >>> outputs = await state.compute(state.model, inputs)

        Raises:
            EngineClosedError: the trainer is closed.
        """
        return await self._worker.run(self._on_device, function, args, kwargs)

    def _on_device(self, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        # The current CUDA device is kept per thread, so it is set where the work is done.
        if self.device.type != "cuda":
            return function(*args, **kwargs)
        with torch.cuda.device(self.device):
            return function(*args, **kwargs)

    @property
    def rank(self) -> int:
        """The number of this process among those that train together, from 0."""
        return self._ranks.job.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._ranks.job.world_size

    def _prepare(self, *, last: bool) -> None:
        """Before a forward pass of training: what is done about its gradients between ranks."""
        options = self._compile_options
        runner = self._ranks.prepare(self.model, self.algorithms, options, last=last)
        self._replica = None if runner is None else (self.model, runner)

    @property
    def runner(self) -> Callable[..., Any]:
        """What to call for a forward pass of training: `local_runner`, or DDP around it. All ranks have to."""
        if self._replica is not None and self._replica[0] is self.model:
            return self._replica[1]
        return self.local_runner

    @property
    def local_runner(self) -> Callable[..., Any]:
        """What to call for a forward pass besides: `model`, or what `compile` has made of it."""
        if self._compiled is not None and self._compiled[0] is self.model:
            return self._compiled[1]
        return self.model

    def compile(self, **options: Any) -> None:
        """From here on run the model compiled; what it is made of, and called, stays as it is.

        Args:
            **options: of `torch.compile`.
        """
        # Not `model.compile()`, which compiles nothing where the model is one of torch's own, a Sequential, say.
        self._compiled = self.model, torch.compile(self.model, **options)
        self._compile_options = options

    async def backpropagate(self) -> Tensor:
        """Run forward, loss and backward of the batch in progress once more, with the parameters as they are now.

        For an algorithm that needs the gradients at another point than the loop's, on AFTER_TRAIN_BATCH, in an async
        `apply`. The batch goes through a microbatch at a time, with the events of each, and its gradients are added to
        those that are there. `batch` and `loss` are afterwards what they were.

        Returns:
            The mean loss over the samples of the whole batch, detached.

        Raises:
            ConfigurationError: it is not AFTER_TRAIN_BATCH of a Trainer's batch, or the precision is `amp_fp16`.
        """
        if self._pass is None:
            raise ConfigurationError(
                "there is no batch to backpropagate once more: await state.backpropagate() in an async apply on "
                "AFTER_TRAIN_BATCH, in a run of the Trainer"
            )
        if self.scaler is not None:
            raise ConfigurationError(
                "a second backward pass in one step does not go with precision='amp_fp16', whose scaler has checked "
                "the gradients already; use 'amp_bf16', or 'fp32'"
            )
        kept = self.batch, self.loss
        try:
            return await self._pass()
        finally:
            self.batch, self.loss = kept

    def precision_context(self) -> AbstractContextManager[Any]:
        """Autocast as `precision` says. It belongs to the thread that enters it: never await inside."""
        dtype = AUTOCAST[self.precision]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def batch_get_item(self, key: BatchKey) -> Any:
        """One part of the batch: by position, name, or a function of the batch.

        Raises:
            BatchError: the batch has no such part.
        """
        return data.get_item(self.batch, key)

    def batch_set_item(self, key: BatchKey, value: Any) -> None:
        """Replace one part of the batch; `state.batch` becomes a new container, the data set's own stays as it is.

        Args:
            key: a position, a name, a function `(batch, value)` that returns the changed batch, or a pair of functions
                of which the second is that.
            value: what to put there.

        Raises:
            BatchError: the batch has no such part, or it cannot be replaced.
        """
        self.batch = data.set_item(self.batch, key, value)

    def get_elapsed_duration(self) -> Time | None:
        """The part of `max_duration` that is over, in the unit DURATION: 0.0 to 1.0. None without a `max_duration`."""
        if self.max_duration is None:
            return None
        if not self.max_duration.value:  # stopped before the first batch
            return Time(1.0, TimeUnit.DURATION)
        return self.timestamp.get(self.max_duration.unit) / self.max_duration

    def stop_training(self) -> None:
        """End `fit` after the batch in progress, as if `max_duration` had been reached."""
        self.max_duration = self.timestamp.batch
