"""Lightning: its `Trainer` and `Fabric` publish our events, and its callbacks run in our `Trainer`.

* `EngineCallback(engine)` among the callbacks of a Lightning `Trainer`: its loop drives the engine.
* `instrument_fabric(engine, fabric, ...)` around a loop that is written by hand with `Fabric`.
* `LightningCallback(callback)` among the callbacks of our `Trainer`: our loop runs theirs.

It goes with the package `pytorch_lightning` and with `lightning`. More in `docs/adapters/lightning.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from eventbus_adapters._lightning_fabric import instrument_fabric
from eventbus_adapters._lightning_guest import LightningCallback
from eventbus_adapters._lightning_peer import find_peer
from eventbus_adapters._lightning_run import LightningRun
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.time import Timestamp

if TYPE_CHECKING:
    from pytorch_lightning import Callback as _Callback
else:
    _Callback = find_peer().Callback

__all__ = ["EngineCallback", "LightningCallback", "instrument_fabric"]


class EngineCallback(_Callback):
    """Has the loop of a Lightning `Trainer` publish the events of an engine.

    Example:
        >>> engine = Engine(algorithms=[LabelSmoothing()])
        >>> trainer = pl.Trainer(callbacks=[EngineCallback(engine, loss="criterion")])
        >>> trainer.fit(module, loader)
        >>> engine.sync.close()

    What algorithms make of the batch reaches the module's steps; what they make of the inputs, the outputs and the
    loss reaches the code of `training_step` wherever the engine knows the calls: those of `model` and `loss`. An
    algorithm for the events of calls that it does not know is a `ConfigurationError` in the first training step.

    Args:
        engine: publishes the events; whoever made it closes it. If it has no state, it gets a new
            `torch_loop.LoopState` for every module, whose `model` is the LightningModule, and INIT is published.
        model: the name of the module's attribute whose calls are the forward passes: a torch module (`"net"`,
            `"net.encoder"`) or a method; by default the calls of the module itself, `self(x)`.
        loss: the name of the attribute whose calls compute the loss: a torch module (`"criterion"`), or a method.
        run_name: by default the time and a few random letters.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    def __init__(
        self, engine: Engine[Any], *, model: str | None = None, loss: str | None = None, run_name: str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(engine, Engine) or engine.events is not Event:
            raise ConfigurationError(
                f"EngineCallback needs an Engine with events=Event, the default, got {engine!r}; a loop publishes the "
                f"events of training"
            )
        self.engine = engine
        self._names = (model, loss)
        self._run_name = run_name
        self._running: LightningRun | None = None

    @property
    def _run(self) -> LightningRun:
        if self._running is None:
            raise ConfigurationError(
                "this EngineCallback is called outside of a run; give it to a Trainer, whose fit(), validate(), test() "
                "or predict() sets it up"
            )
        return self._running

    # -------------------------------------------------------------------------------------------------------- the run

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The run begins: INIT, where the engine has not seen the module before."""
        if self._running is not None:
            raise ConfigurationError(
                "a loop is used twice: this EngineCallback is in a run already; make one for each Trainer that runs "
                "at the same time, each with an engine of its own"
            )
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ConfigurationError(
                f"{type(pl_module).__name__}.training_step takes dataloader_iter and fetches its batches itself, so "
                f"that there is no moment at which a batch is there and not yet used; let it take (batch, batch_idx)"
            )
        run = self._running = LightningRun(self.engine, trainer, pl_module, self._names, self._run_name)
        run.begin()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The run is over."""
        self._end(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The run has failed: what is open ends as failed, and publishes nothing more."""
        self._end(trainer, exception)

    def _end(self, trainer: Any, error: BaseException | None) -> None:
        run = self._running
        if run is not None and run.trainer is trainer:  # else this trainer has been refused
            self._running = None
            run.end(error)

    def state_dict(self) -> dict[str, Any]:
        """How far the training is; a checkpoint may be saved after it, too."""
        return {"timestamp": getattr(self.engine.state, "timestamp", Timestamp()).state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        timestamp = Timestamp()
        timestamp.load_state_dict(state_dict["timestamp"])
        self._run.state.timestamp = timestamp

    # ------------------------------------------------------------------------------------------------------- training

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has made the optimizers."""
        self._run.learn()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """FIT_START."""
        self._run.loop.publish(Event.FIT_START)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """FIT_END."""
        self._run.loop.publish(Event.FIT_END)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """EPOCH_START, and BEFORE_DATALOADER of the first batch."""
        self._run.loop.begin_epoch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """EPOCH_END and EPOCH_CHECKPOINT."""
        self._run.loop.end_epoch()
        self._run.stop_if_told()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """AFTER_DATALOADER, BATCH_START and BEFORE_TRAIN_BATCH."""
        self._run.loop.begin_batch(batch, trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """AFTER_TRAIN_BATCH, before the first step of the batch."""
        self._run.loop.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """BATCH_END and BATCH_CHECKPOINT, and BEFORE_DATALOADER of the next one."""
        self._run.loop.end_batch(more=not trainer.is_last_batch)
        self._run.stop_if_told()

    # ----------------------------------------------------------------------------------------- evaluation, prediction

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """EVAL_BEFORE_ALL, or EVAL_STANDALONE_START, and EVAL_START."""
        if not trainer.sanity_checking:
            fitting = trainer.state.fn == "fit"
            self._run.loop.begin_evaluation(Event.EVAL_BEFORE_ALL if fitting else Event.EVAL_STANDALONE_START)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """EVAL_BATCH_START; of another loader, EVAL_END and EVAL_START first."""
        if not trainer.sanity_checking:
            self._run.loop.begin_evaluation_batch(Event.EVAL_BATCH_START, batch, dataloader_idx)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """EVAL_BATCH_END."""
        if not trainer.sanity_checking:
            self._run.loop.end_evaluation_batch(Event.EVAL_BATCH_START)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """EVAL_END, with what was logged in `state.metrics`, and EVAL_AFTER_ALL, or EVAL_STANDALONE_END."""
        if not trainer.sanity_checking:
            fitting = trainer.state.fn == "fit"
            self._run.loop.end_evaluation(_metrics(trainer.callback_metrics), fitting and not trainer.is_last_batch)
            self._run.stop_if_told()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """As of a validation."""
        self.on_validation_start(trainer, pl_module)

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """As of a validation."""
        self.on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """As of a validation."""
        self.on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """As of a validation."""
        self.on_validation_end(trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """PREDICT_START."""
        self._run.loop.begin_evaluation(Event.PREDICT_START)

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """PREDICT_BATCH_START."""
        self._run.loop.begin_evaluation_batch(Event.PREDICT_BATCH_START, batch, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """PREDICT_BATCH_END."""
        self._run.loop.end_evaluation_batch(Event.PREDICT_BATCH_START)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """PREDICT_END."""
        self._run.loop.end_evaluation({}, more=False)


def _metrics(logged: Mapping[str, Tensor]) -> dict[str, float]:
    """What a module has logged, by names that our own callbacks look for."""
    return {f"metrics/eval/{name}": float(value) for name, value in logged.items()}
