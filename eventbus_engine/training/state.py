"""`State`: what the training loop, the algorithms and the callbacks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from eventbus_engine.time import Time, Timestamp, TimeUnit
from eventbus_engine.training import data
from eventbus_engine.training.data import BatchKey
from eventbus_engine.training.model import LossFunction
from eventbus_engine.training.worker import InlineWorker, Worker

__all__ = ["PRECISIONS", "Precision", "State"]

P = ParamSpec("P")
T = TypeVar("T")

Precision: TypeAlias = Literal["fp32", "amp_bf16"]
"""`fp32`: the parameters' own type throughout. `amp_bf16`: forward and loss under autocast to bfloat16."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "amp_bf16")


@dataclass(eq=False)
class State:
    """The blackboard of a run. The loop writes it, algorithms change it, callbacks read it.

    Attributes:
        model: the module being trained. An algorithm may replace it at INIT.
        optimizers: stepped after every batch.
        schedulers: learning-rate schedulers, stepped after every epoch, or every batch if the trainer is told so.
        train_dataloader: the loader that `fit` iterates.
        eval_dataloader: what evaluation iterates: a loader, or `Evaluator`s.
        loss_fn: `(outputs, targets) -> loss`; None where the model brings its own.
        algorithms: the algorithms in registration order. Live: what is added takes part from the next event on.
        callbacks: the callbacks and logger destinations, live as well.
        max_duration: when `fit` ends.
        device: where the model and the batches are.
        precision: the number format of the forward pass.
        seed: what the run was seeded with, None if it was not.
        microbatches: into how many parts each batch is cut for forward and backward.
        run_name: the name of the run.
        batch: the batch in progress, on `device`: the whole one from AFTER_DATALOADER to BEFORE_TRAIN_BATCH and from
            AFTER_TRAIN_BATCH to BATCH_CHECKPOINT, the microbatch in between; an evaluation's own during evaluation.
        outputs: what the model made of `batch`, of the last microbatch after AFTER_TRAIN_BATCH.
        loss: a tensor of one element: the microbatch's loss, with its graph, from BEFORE_LOSS to AFTER_BACKWARD; the
            whole batch's, detached, from AFTER_TRAIN_BATCH on.
        timestamp: how far training is. The batch counts as done from BATCH_END on.
        eval_timestamp: how far the evaluation in progress is.
        metrics: the metrics of the latest evaluation, under the names they are logged by: `metrics/eval/accuracy`.
    """

    model: nn.Module
    _: KW_ONLY
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    train_dataloader: Any = None
    eval_dataloader: Any = None
    loss_fn: LossFunction | None = None
    algorithms: list[Any] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    max_duration: Time | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "fp32"
    seed: int | None = None
    microbatches: int = 1
    run_name: str = "run"
    worker: InitVar[Worker | None] = None

    batch: Any = field(default=None, init=False)
    outputs: Any = field(default=None, init=False)
    loss: Tensor | None = field(default=None, init=False)
    timestamp: Timestamp = field(default_factory=Timestamp, init=False)
    eval_timestamp: Timestamp = field(default_factory=Timestamp, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self, worker: Worker | None) -> None:
        """Without a worker, computations run inline."""
        self._worker: Worker = worker or InlineWorker()

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
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            return function(*args, **kwargs)

    def precision_context(self) -> AbstractContextManager[Any]:
        """Autocast as `precision` says. It belongs to the thread that enters it: never await inside."""
        if self.precision == "amp_bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

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
