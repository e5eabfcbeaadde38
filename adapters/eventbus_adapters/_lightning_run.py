"""What a Lightning `Trainer` has, as a run of our engine has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eventbus_adapters._lightning_loop import LightningLoop
from eventbus_adapters.torch_loop import Instrumentation, LoopState
from eventbus_engine.engine import Engine
from eventbus_engine.event import Event
from eventbus_engine.time import Time, TimeUnit
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.state import Precision
from eventbus_engine.training.worker import InlineWorker, Worker

__all__ = ["LightningRun"]

PRECISIONS: dict[str, Precision] = {"16-mixed": "amp_fp16", "bf16-mixed": "amp_bf16"}


class LightningRun(Instrumentation):
    """From the `setup` of a Trainer to its `teardown`: the engine's state and the loop.

    Args:
        engine: publishes the events.
        trainer: Lightning's.
        module: the LightningModule.
        names: of the module's parts that are the model and the loss; None where that is not said.
        run_name: of a state that is made here.
    """

    def __init__(
        self,
        engine: Engine[Any],
        trainer: Any,
        module: nn.Module,
        names: tuple[str | None, str | None],
        run_name: str | None,
    ) -> None:
        model, loss = names
        super().__init__(
            engine=engine,
            model=module,
            optimizers=[],
            source=BatchSource((), "dataloader"),  # Lightning fetches the batches
            loss=None if loss is None else getattr(module, loss, None),
            device=torch.device(trainer.strategy.root_device),
            max_duration=None,
            run_name=run_name,
            hooks=True,
        )
        self.trainer = trainer
        self._first = True
        self._acquire()
        try:
            self.state: Any = self._take_state(InlineWorker())
            self.loop = LightningLoop(self, self.state, model, loss)
        except BaseException:
            self._release()
            raise
        self._own_duration: Time | None = getattr(self.state, "max_duration", None)

    def begin(self) -> None:
        """Publish INIT, where the state is new."""
        own = isinstance(self.state, LoopState)
        if own:
            self.state.device = self.device
            self.state.precision = PRECISIONS.get(str(self.trainer.precision), "fp32")
            self.state.scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.loop.begin_run(*([Event.INIT] if own and self._first else []))
        self._check_model()

    def learn(self) -> None:
        """Lightning has made the optimizers, and knows how long the run will be."""
        if isinstance(self.state, LoopState):
            self.state.optimizers = list(self.trainer.optimizers)
            self.state.max_duration = self._own_duration = _duration(self.trainer)
        self.loop.watch_steps(self.trainer.optimizers)

    def end(self, error: BaseException | None) -> None:
        """It is over, or has failed of the error."""
        try:
            self.loop.end_run(error)
        finally:
            self._release()

    def stop_if_told(self) -> None:
        """Hand `state.stop_training()` on to Lightning."""
        end = getattr(self.state, "max_duration", None)
        if isinstance(end, Time) and end is not self._own_duration and self.state.timestamp >= end:
            self.trainer.should_stop = True

    def _take_state(self, worker: Worker) -> Any:
        state = self.engine.state
        if isinstance(state, LoopState) and state.model is self.model:  # it has been fitted; now it is validated
            self._first = False
            return state
        self.run_name = self.run_name if state is None or isinstance(state, LoopState) else None
        taken = super()._take_state(worker)
        self._worker = None  # it stays with the state
        return taken


def _duration(trainer: Any) -> Time | None:
    """How long Lightning will train for, as far as it says so in epochs or in steps of the optimizer."""
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        return Time(trainer.max_epochs, TimeUnit.EPOCH)
    if trainer.max_steps >= 0:
        return Time(trainer.max_steps * trainer.accumulate_grad_batches, TimeUnit.BATCH)
    return None
