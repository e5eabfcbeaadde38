"""A callback of Lightning's as one of ours, with stand-ins for the trainer and the module that it is called with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eventbus_engine._options import snake_case
from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError, StandInError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time, TimeUnit
from eventbus_engine.training.state import State

__all__ = ["LightningCallback", "ModuleStandIn", "TrainerStandIn"]

HOOKS: dict[Event, tuple[str, ...]] = {
    Event.INIT: ("setup",),
    Event.FIT_START: ("on_fit_start", "on_train_start"),
    Event.EPOCH_START: ("on_train_epoch_start",),
    Event.BATCH_START: ("on_train_batch_start",),
    Event.BEFORE_TRAIN_BATCH: ("on_before_zero_grad",),
    Event.BEFORE_BACKWARD: ("on_before_backward",),
    Event.AFTER_BACKWARD: ("on_after_backward",),
    Event.AFTER_TRAIN_BATCH: ("on_before_optimizer_step",),
    Event.BATCH_END: ("on_train_batch_end",),
    # After the evaluation at the end of the epoch, which Lightning makes inside of it.
    Event.EPOCH_CHECKPOINT: ("on_train_epoch_end",),
    Event.EVAL_START: ("on_validation_start", "on_validation_epoch_start"),
    Event.EVAL_BATCH_START: ("on_validation_batch_start",),
    Event.EVAL_BATCH_END: ("on_validation_batch_end",),
    Event.EVAL_END: ("on_validation_epoch_end", "on_validation_end"),
    Event.PREDICT_START: ("on_predict_start", "on_predict_epoch_start"),
    Event.PREDICT_BATCH_START: ("on_predict_batch_start",),
    Event.PREDICT_BATCH_END: ("on_predict_batch_end",),
    Event.PREDICT_END: ("on_predict_epoch_end", "on_predict_end"),
    Event.FIT_END: ("on_train_end", "on_fit_end"),
}
"""What each event is to a callback of Lightning's, in the order of the calls."""

FOLLOWED = (
    *(Event.FIT_START, Event.EPOCH_START, Event.BATCH_START, Event.EVAL_STANDALONE_START, Event.EVAL_START),
    *(Event.EVAL_END, Event.EVAL_STANDALONE_END, Event.PREDICT_START, Event.PREDICT_END),
)
"""The events by which the stand-in for the trainer keeps up with ours."""


class TrainerStandIn:
    """What a callback of Lightning's may ask of its trainer, answered from our state.

    `should_stop = True` ends the training after the batch in progress. Anything else is a `StandInError`.
    """

    accumulate_grad_batches = 1
    barebones = False
    check_val_every_n_epoch: int | None = None  # evaluation has intervals of its own
    fast_dev_run = False
    log_every_n_steps = 1
    sanity_checking = False
    val_check_interval: float | None = None

    def __init__(self, state: State, logger: Logger) -> None:
        self._state = state
        self._told = False
        self._function, self._stage = "fit", "train"
        self.callback_metrics: dict[str, Tensor] = {}
        self.current_epoch = 0
        self.batch_idx = 0
        self.lightning_module = ModuleStandIn(state, logger, self)
        self.logger = SimpleNamespace(log_metrics=logger.log_metrics, log_hyperparams=logger.log_hyperparameters)
        self.loggers = [self.logger]
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.global_rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        self.is_global_zero = self.global_rank == 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StandInError(
            f"a callback of Lightning's asked its trainer for {name!r}, which our Trainer has none of; it has "
            f"{', '.join(_public(self))}; use one of eventbus_engine.training.callbacks in its place, or Lightning's "
            f"own Trainer with EngineCallback"
        )

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of Lightning's that run here."""
        return [item.callback for item in self._state.callbacks if isinstance(item, LightningCallback)]

    @property
    def global_step(self) -> int:
        """Steps of the optimizers so far, one a batch."""
        return int(self._state.timestamp.batch)

    @property
    def is_last_batch(self) -> bool:
        """Whether it is known that no other batch of the epoch follows."""
        return self.batch_idx + 1 == self.num_training_batches

    @property
    def max_epochs(self) -> int | None:
        """None where the duration is counted in something else."""
        return self._duration(TimeUnit.EPOCH)

    @property
    def max_steps(self) -> int:
        """-1 where the duration is counted in something else."""
        steps = self._duration(TimeUnit.BATCH)
        return -1 if steps is None else steps

    @property
    def num_training_batches(self) -> float:
        """The length of the training loader; infinity where that is not known."""
        loader = self._state.train_dataloader
        return len(loader) if hasattr(loader, "__len__") else math.inf

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are stepped."""
        return self._state.optimizers

    @property
    def model(self) -> Any:
        """The model itself, without a stand-in."""
        return self._state.model

    @property
    def precision(self) -> str:
        """Of the forward pass."""
        return self._state.precision

    @property
    def should_stop(self) -> bool:
        """Whether a callback of Lightning's has told it to stop."""
        return self._told

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._told = bool(stop)
        if stop:
            self._state.stop_training()

    @property
    def state(self) -> Any:
        """`fn` and `stage`, as strings that are equal to Lightning's."""
        return SimpleNamespace(fn=self._function, stage=self._stage)

    @property
    def strategy(self) -> Any:
        """This process decides alone."""
        return SimpleNamespace(
            root_device=self._state.device,
            barrier=lambda name=None: None,
            broadcast=lambda value, src=0: value,
            reduce_boolean_decision=lambda decision, **how: decision,
        )

    @property
    def train_dataloader(self) -> Any:
        """The training loader."""
        return self._state.train_dataloader

    @property
    def training(self) -> bool:
        """Whether it is training."""
        return self._stage == "train"

    @property
    def validating(self) -> bool:
        """Whether it is evaluating."""
        return self._stage == "validate"

    @property
    def predicting(self) -> bool:
        """Whether it is predicting."""
        return self._stage == "predict"

    def _keep_up(self, event: Event) -> None:
        """Where the run is, as Lightning counts: a batch and an epoch go on until their last hook."""
        state = self._state
        if event == Event.FIT_START:
            self._told = False
        elif event == Event.EPOCH_START:
            self.current_epoch = int(state.timestamp.epoch)
        elif event == Event.BATCH_START:
            self.batch_idx = int(state.timestamp.batch_in_epoch)
        elif event in (Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END):
            self._function = "validate" if event == Event.EVAL_STANDALONE_START else "fit"
        elif event.is_eval or event.is_predict:
            self._stage = "predict" if event.is_predict else "validate"
            self.callback_metrics.update({name: torch.tensor(value) for name, value in state.metrics.items()})

    def _duration(self, unit: TimeUnit) -> int | None:
        duration: Time | None = self._state.max_duration
        return int(duration) if duration is not None and duration.unit is unit else None


class ModuleStandIn:
    """What a callback of Lightning's may ask of its module: `log`, and whatever our model has."""

    def __init__(self, state: State, logger: Logger, trainer: TrainerStandIn) -> None:
        self._state = state
        self._logger = logger
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self._state.model, name)
        except AttributeError:
            raise StandInError(
                f"a callback of Lightning's asked its module for {name!r}, which {type(self._state.model).__name__} "
                f"has none of; it has the attributes of the model, and {', '.join(_public(self))}"
            ) from None

    @property
    def current_epoch(self) -> int:
        """The trainer's."""
        return self.trainer.current_epoch

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._state.device

    @property
    def global_step(self) -> int:
        """The trainer's."""
        return self.trainer.global_step

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a number now; how to show and to reduce it is not asked for here."""
        self.log_dict({name: value})

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log several."""
        self.trainer.callback_metrics.update({name: torch.as_tensor(value) for name, value in dictionary.items()})
        self._logger.log_metrics({name: float(value) for name, value in dictionary.items()})

    def optimizers(self) -> Any:
        """The optimizer, or the list of them."""
        optimizers = self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers


class LightningCallback(Callback[State]):
    """A callback of Lightning's, or anything with hooks of those names, in our `Trainer`.

    It is called with stand-ins for its trainer and its module. `trainer.callback_metrics` holds the metrics of our
    evaluations under their names here (`metrics/eval/accuracy`) and what callbacks have logged; `trainer.should_stop`
    ends the training. What the stand-ins have none of is a `StandInError`.

    Args:
        callback: the one to run.
        **options: of `Callback`, by name.

    Raises:
        ConfigurationError: it has no hook of Lightning's.
        HandlerTypeError: an argument that is no option.
    """

    def __init__(self, callback: Any, **options: Any) -> None:
        super().__init__(**{"name": snake_case(type(callback).__name__), **options})
        self.callback = callback
        self._trainer: TrainerStandIn | None = None
        found = {event: [hook for hook in HOOKS.get(event, ()) if _overrides(callback, hook)] for event in Event}
        if isinstance(callback, type) or not any(found.values()):
            raise ConfigurationError(
                f"{callback!r} is no callback of Lightning's; give an instance that has one of its hooks, "
                f"on_train_batch_end for example"
            )
        for event, hooks in found.items():
            if hooks or event in FOLLOWED:
                setattr(self, event.value, self._hook_for(event, hooks))

    def close(self, state: State, logger: Logger) -> None:
        """`teardown`."""
        if _overrides(self.callback, "teardown"):
            trainer = self._stand_in(state, logger)
            self.callback.teardown(trainer, trainer.lightning_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """The callback's own."""
        saved: dict[str, Any] = self.callback.state_dict()
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The callback's own."""
        self.callback.load_state_dict(state)

    def _stand_in(self, state: State, logger: Logger) -> TrainerStandIn:
        if self._trainer is None or self._trainer._state is not state:
            self._trainer = TrainerStandIn(state, logger)
        return self._trainer

    def _hook_for(self, event: Event, hooks: list[str]) -> Callable[[State, Logger], None]:
        def hook(state: State, logger: Logger) -> None:
            trainer = self._stand_in(state, logger)
            trainer._keep_up(event)
            for name in hooks:
                for arguments in _arguments(name, state, trainer):
                    getattr(self.callback, name)(trainer, trainer.lightning_module, *arguments)
            if event in (Event.EVAL_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END):
                trainer._stage = "train"

        return hook


def _arguments(hook: str, state: State, trainer: TrainerStandIn) -> list[tuple[Any, ...]]:
    """What to call a hook with besides the trainer and the module, once or several times."""
    if hook == "setup":
        return [("fit",)]
    if hook in ("on_before_zero_grad", "on_before_optimizer_step"):
        return [(optimizer,) for optimizer in state.optimizers]
    if hook == "on_before_backward":
        return [(state.loss,)]
    if "batch" not in hook:
        return [()]
    if hook.startswith("on_train"):
        place: tuple[Any, ...] = (state.batch, trainer.batch_idx)
    else:
        done = int(state.eval_timestamp.batch)
        place = (state.batch, done - 1 if hook.endswith("_end") else done)
    if hook == "on_train_batch_end":
        return [({"loss": state.loss}, *place)]
    return [(state.outputs, *place)] if hook.endswith("_end") else [place]


def _overrides(callback: Any, hook: str) -> bool:
    """Whether it has a hook of its own, and not only that of Lightning's base class, which does nothing."""
    if hook in getattr(callback, "__dict__", ()):
        return True
    owner = next((cls for cls in type(callback).__mro__ if hook in vars(cls)), None)
    return owner is not None and not (owner.__name__ == "Callback" and owner.__module__.endswith("callbacks.callback"))


def _public(stand_in: object) -> list[str]:
    return sorted(name for name in {*dir(type(stand_in)), *vars(stand_in)} if not name.startswith("_"))
