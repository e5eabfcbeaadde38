"""transformers' `Trainer` with ordered algorithms, callbacks and traces; and its callbacks in our own loop.

`use_engine(trainer, engine)` has a Trainer publish our events while it trains. `HuggingFaceCallback` makes a
`TrainerCallback` one of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from eventbus_adapters import _peer
from eventbus_adapters._huggingface_loop import TrainerRun
from eventbus_adapters._torch_course import Unfinished
from eventbus_adapters.torch_loop import check_subject
from eventbus_engine._options import snake_case
from eventbus_engine.callback import OnError
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import LoggerDestination

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as _error:
    raise _peer.missing("transformers, with accelerate,", "huggingface") from _error

__all__ = ["EngineCallback", "HuggingFaceCallback", "use_engine"]

VERSIONS = "5.23", "6"
"""What this has been tested with: from the first up to, not including, the second."""


def use_engine(trainer: Trainer, engine: Engine[Any], loss: Callable[..., Any] | None = None) -> EngineCallback:
    """Have a transformers `Trainer` publish the events of training on an engine, whenever it trains.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=dataset)
        >>> use_engine(trainer, Engine(algorithms=[SelectiveBackprop(input_key="input_ids", target_key="labels")]))
        >>> trainer.train()

    What algorithms make of the batch, the outputs and the loss reaches the Trainer; without algorithms it trains as
    it would alone, bit for bit. More in `docs/adapters/huggingface.md`.

    Args:
        trainer: a Trainer, of a subclass too. What it is made of stays as it is; while `train` runs, the methods that
            its batches and losses go through are wrapped.
        engine: publishes the events; whoever made it closes it. Its state, if it has one, becomes the run's and goes on
            counting; if not, each run gets a new one, and INIT is published first.
        loss: `(logits, labels) -> mean loss`, to be used in training in place of the one that the model computes. For
            algorithms that change the labels before the loss, such as `LabelSmoothing`, it has to be given.

    Returns:
        The callback that the Trainer has got, whose `remove()` ends it.

    Raises:
        ConfigurationError: an argument does not fit, or the Trainer has an engine already.
    """
    _peer.check_version("transformers", "huggingface", *VERSIONS)
    if not isinstance(trainer, Trainer):
        raise ConfigurationError(f"trainer is a {type(trainer).__name__}; give a transformers.Trainer, an instance")
    if any(isinstance(callback, EngineCallback) for callback in trainer.callback_handler.callbacks):
        raise ConfigurationError(
            "this Trainer has an engine already, and every event would be published twice; remove() that one first, or "
            "give one engine all the participants"
        )
    check_subject(engine, trainer.model, loss)
    callback = EngineCallback(trainer, engine, loss)
    trainer.add_callback(callback)
    return callback


class EngineCallback(TrainerCallback):
    """Tells an engine how far a Trainer is. Made by `use_engine`.

    Args:
        trainer: whose callback it is about to be.
        engine: publishes the events.
        loss: in place of the model's own; None for that.
    """

    def __init__(self, trainer: Trainer, engine: Engine[Any], loss: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._trainer = trainer
        self._engine = engine
        self._loss = loss
        self._run: TrainerRun | None = None
        train = trainer.train
        # The callbacks are not told when a run fails.
        vars(trainer)["train"] = functools.wraps(train)(functools.partial(self._train, train))

    def remove(self) -> None:
        """Give the Trainer back as it was."""
        self._trainer.remove_callback(self)
        vars(self._trainer).pop("train", None)

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            output = train(*args, **kwargs)
        except BaseException as error:
            self._close(error)
            raise
        self._close()
        return output

    def _close(self, error: BaseException | None = None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close(error)

    @property
    def _loop(self) -> Any:
        assert self._run is not None  # noqa: S101 -- `on_train_begin` comes first
        return self._run.loop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """INIT, if the engine has no state, and FIT_START."""
        self._close(Unfinished("the Trainer began anew, with smaller batches"))
        if args.n_gpu > 1:
            raise ConfigurationError(
                f"the Trainer would copy its model to {args.n_gpu} devices by DataParallel, where none can follow it; "
                f"start one process for each by torchrun, or show it one by CUDA_VISIBLE_DEVICES=0"
            )
        self._run = TrainerRun(self._trainer, self._engine, self._loss)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """EPOCH_START."""
        self._loop.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """BATCH_START and BEFORE_TRAIN_BATCH: the batch has been fetched."""
        self._loop.begin_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """BATCH_END and BATCH_CHECKPOINT; whoever called `state.stop_training()` ends the run."""
        self._loop.end_batch()
        control.should_training_stop |= self._loop.stopped

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """EPOCH_END and EPOCH_CHECKPOINT."""
        self._loop.end_epoch()
        control.should_training_stop |= self._loop.stopped

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """What the Trainer logs goes to the engine's destinations, too."""
        if self._run is not None and logs:
            self._engine.logger.log_metrics(dict(logs))


class HuggingFaceCallback(LoggerDestination):
    """A `TrainerCallback` of transformers as a callback of ours, and a destination of what is logged.

    It is called as their Trainer would call it, with a `TrainerState` and a `TrainerControl` kept up to date by our
    events; `docs/adapters/huggingface.md` has the table. Of what it asks for by its control, the end of the training is
    granted, through `state.stop_training()`; saving, logging and evaluating are up to our Trainer.

    Args:
        callback: an instance, of any subclass of `TrainerCallback`.
        args: what it reads as its `TrainingArguments`; by default those with a folder `trainer_output`, and no reports.
        **options: those of `Callback`; `on_error` is `"raise"` by default.

    Attributes:
        state: their `TrainerState`. `best_metric` follows `args.metric_for_best_model`.
        control: their `TrainerControl`.

    Raises:
        ConfigurationError: it is no `TrainerCallback`.
        HandlerTypeError: an option is unknown.
    """

    on_error: OnError = "raise"

    def __init__(self, callback: TrainerCallback, args: TrainingArguments | None = None, **options: Any) -> None:
        _peer.check_version("transformers", "huggingface", *VERSIONS)
        if not isinstance(callback, TrainerCallback):
            raise ConfigurationError(
                f"{callback!r} is no TrainerCallback of transformers; give an instance of one, and callbacks of ours "
                f"to the engine as they are"
            )
        super().__init__(**{"name": snake_case(type(callback).__name__), **options})
        self.callback: TrainerCallback = callback
        self.args: Any = args or TrainingArguments(output_dir="trainer_output", report_to=[])
        self.state: Any = TrainerState()
        self.control: TrainerControl = TrainerControl()
        self._objects: dict[str, Any] = {}

    def init(self, state: Any, logger: Any) -> None:
        """`on_init_end`."""
        self._call("on_init_end", state)

    def fit_start(self, state: Any, logger: Any) -> None:
        """`on_train_begin`."""
        self.control.should_training_stop = False
        self._call("on_train_begin", state)

    def epoch_start(self, state: Any, logger: Any) -> None:
        """`on_epoch_begin`."""
        self.control.should_epoch_stop = False
        self._call("on_epoch_begin", state)

    def batch_start(self, state: Any, logger: Any) -> None:
        """`on_step_begin`."""
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self._call("on_step_begin", state)

    def after_train_batch(self, state: Any, logger: Any) -> None:
        """`on_pre_optimizer_step`."""
        self._call("on_pre_optimizer_step", state)

    def batch_end(self, state: Any, logger: Any) -> None:
        """`on_optimizer_step` and `on_step_end`."""
        self._call("on_optimizer_step", state)
        self._call("on_step_end", state)

    def eval_batch_end(self, state: Any, logger: Any) -> None:
        """`on_prediction_step`."""
        self._call("on_prediction_step", state)

    def eval_after_all(self, state: Any, logger: Any) -> None:
        """`on_evaluate`, with the metrics under their names: `eval_accuracy` is our `metrics/eval/accuracy`."""
        metrics = {_their_name(name): value for name, value in state.metrics.items()}
        self._call("on_evaluate", state, metrics=metrics)
        self._remember_best(metrics)

    def epoch_end(self, state: Any, logger: Any) -> None:
        """`on_epoch_end`."""
        self._call("on_epoch_end", state)

    def fit_end(self, state: Any, logger: Any) -> None:
        """`on_train_end`."""
        self._call("on_train_end", state)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """`on_log`, once the training has begun."""
        if self._objects:
            logs = {_their_name(name): value for name, value in metrics.items()}
            self.state.log_history.append({**logs, "step": self.state.global_step if step is None else step})
            self._tell("on_log", logs=logs)

    def _call(self, hook: str, state: Any, **more: Any) -> None:
        """Tell the callback, as of now, and see to what it wants."""
        self._follow(state)
        self._tell(hook, **more)
        if self.control.should_training_stop and hook != "on_train_end":
            state.stop_training()

    def _tell(self, hook: str, **more: Any) -> None:
        control = getattr(self.callback, hook)(self.args, self.state, self.control, **self._objects, **more)
        self.control = self.control if control is None else control

    def _follow(self, state: Any) -> None:
        now, end = state.timestamp, state.max_duration
        loader = state.train_dataloader
        length = len(loader) if hasattr(loader, "__len__") else 0
        self.state.global_step = int(now.batch)
        self.state.epoch = int(now.epoch) + (int(now.batch_in_epoch) / length if length else 0.0)
        if end is not None and end.unit == "ep":
            self.state.num_train_epochs, self.state.max_steps = int(end), int(end) * length
        elif end is not None and end.unit == "ba":
            self.state.max_steps = int(end)
        self._objects = {
            "model": state.model,
            "processing_class": None,
            "optimizer": next(iter(state.optimizers), None),
            "lr_scheduler": next(iter(state.schedulers), None),
            "train_dataloader": loader,
            "eval_dataloader": None,
        }

    def _remember_best(self, metrics: Mapping[str, float]) -> None:
        """What their Trainer does after an evaluation, and their early stopping relies on."""
        name = self.args.metric_for_best_model
        if name is None:
            return
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        best = self.state.best_metric
        if value is not None and (best is None or (value > best if self.args.greater_is_better else value < best)):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step


def _their_name(name: str) -> str:
    return name.removeprefix("metrics/").replace("/", "_")
