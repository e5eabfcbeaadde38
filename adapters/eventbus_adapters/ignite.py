"""ignite's `Engine` with ordered algorithms, callbacks and traces; and its handlers and metrics in our own loop.

`use_engine(trainer, engine, model, optimizer)` has an ignite `Engine` publish our events while it runs. `IgniteTrainer`
and `IgniteEvaluator` are callbacks of ours with an ignite `Engine` that follows, for whatever attaches to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from eventbus_adapters._ignite_attachment import Attachment, attached
from eventbus_adapters._ignite_peer import Engine as IgniteEngine
from eventbus_adapters._ignite_peer import Events, check_version
from eventbus_adapters.torch_loop import check_subject
from eventbus_engine.callback import Callback
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.arguments import check_device, check_optimizers
from eventbus_engine.training.model import inputs_and_targets

__all__ = ["Attachment", "IgniteEvaluator", "IgniteTrainer", "use_engine"]


def use_engine(
    trainer: IgniteEngine,
    engine: Engine[Any],
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Callable[..., Any] | None = None,
    *,
    evaluators: Mapping[str, IgniteEngine] | None = None,
    device: str | torch.device | None = None,
) -> Attachment:
    """Have an ignite `Engine` that trains publish the events of training on an engine of ours, whenever it runs.

    Example:
        >>> loss = nn.CrossEntropyLoss()
        >>> trainer = create_supervised_trainer(model, optimizer, loss)
        >>> use_engine(trainer, Engine(algorithms=[MixUp()]), model, optimizer, loss)
        >>> trainer.run(loader, max_epochs=3)

    What algorithms make of the batch, the outputs and the loss reaches the update function; without algorithms the
    trainer trains as it would alone, bit for bit. More in `docs/adapters/ignite.md`.

    Args:
        trainer: the engine whose update function trains on a batch.
        engine: publishes the events; whoever made it closes it. Its state, if it has one, becomes the run's and goes on
            counting; if not, each run gets a new one, and INIT is published first.
        model: what the update function calls; its calls are the forward passes, if they compute gradients.
        optimizers: one or several; the first to step ends the training on the batch (AFTER_TRAIN_BATCH).
        loss: an `nn.Module`, whose calls count wherever they are made; or a function, to be called by the attachment's
            `loss`.
        evaluators: engines that evaluate the model in the course of the training, by the label of their metrics.
        device: where batches are moved to; by default where the model's parameters are.

    Raises:
        ConfigurationError: an argument does not fit, or one of the ignite engines is attached already.
    """
    check_version()
    others = dict(evaluators or {})
    seen: list[object] = []
    for name, each in [("trainer", trainer), *others.items()]:
        if not isinstance(each, IgniteEngine):
            raise ConfigurationError(f"{name} is a {type(each).__name__}; give an ignite.engine.Engine, an instance")
        if each in attached:
            raise ConfigurationError(
                f"{name} has an engine already, and every event would be published twice; detach() that one first, or "
                f"give one engine all the participants"
            )
        if each in seen:
            raise ConfigurationError(f"{name} is here twice, and every event would be published twice; give it once")
        seen.append(each)
    check_subject(engine, model, loss)
    options = {
        "engine": engine,
        "model": model,
        "optimizers": check_optimizers(optimizers),
        "loss": loss,
        "device": check_device(device, model),
    }
    return Attachment(trainer, others, options)


class _Mirror(Callback[Any]):
    """A callback with an ignite `Engine` that it fires the events of."""

    def __init__(self, output: Callable[[Any], Any], **options: Any) -> None:
        check_version()
        super().__init__(**options)
        self.engine: IgniteEngine = IgniteEngine(_refuse)
        self._output = output

    def _fire(self, *events: Events) -> None:
        for event in events:
            self.engine.fire_event(event)

    def _begin_run(self, state: Any, loader: Any) -> None:
        end = getattr(state, "max_duration", None)
        mirrored = self.engine.state
        mirrored.iteration = mirrored.epoch = 0
        mirrored.dataloader = loader
        mirrored.epoch_length = len(loader) if hasattr(loader, "__len__") else None
        mirrored.max_epochs = int(end) if end is not None and end.unit == "ep" else None


class IgniteTrainer(_Mirror):
    """A callback that drives an ignite `Engine` by the events of our training, so that ignite's handlers work with it.

    Attach to `engine` what goes to a trainer there: progress bars, timers, metrics of the training loss, loggers,
    anything of one's own. Its state has `epoch`, `iteration`, `max_epochs`, `epoch_length`, `dataloader`, `batch`,
    `output` and `metrics`. `engine.terminate()` ends the training, through `state.stop_training()`.

    Args:
        output: `(state) -> engine.state.output` after a batch; by default its loss, a float.
        **options: those of `Callback`.

    Attributes:
        engine: the ignite `Engine`; it cannot be run.

    Raises:
        HandlerTypeError: an option is unknown.
    """

    def __init__(self, output: Callable[[Any], Any] | None = None, **options: Any) -> None:
        super().__init__(output or _loss, **options)

    def fit_start(self, state: Any, logger: Any) -> None:
        """STARTED."""
        self._begin_run(state, state.train_dataloader)
        self.engine.state.iteration = int(state.timestamp.batch)
        self.engine.state.epoch = int(state.timestamp.epoch)
        self._tell(state, Events.STARTED)

    def epoch_start(self, state: Any, logger: Any) -> None:
        """EPOCH_STARTED."""
        self.engine.state.epoch = int(state.timestamp.epoch) + 1
        self._tell(state, Events.EPOCH_STARTED)

    def before_dataloader(self, state: Any, logger: Any) -> None:
        """GET_BATCH_STARTED."""
        self._tell(state, Events.GET_BATCH_STARTED)

    def after_dataloader(self, state: Any, logger: Any) -> None:
        """GET_BATCH_COMPLETED."""
        self._tell(state, Events.GET_BATCH_COMPLETED)

    def batch_start(self, state: Any, logger: Any) -> None:
        """ITERATION_STARTED."""
        self.engine.state.iteration = int(state.timestamp.batch) + 1
        self._tell(state, Events.ITERATION_STARTED)

    def batch_end(self, state: Any, logger: Any) -> None:
        """ITERATION_COMPLETED."""
        self.engine.state.output = self._output(state)
        self._tell(state, Events.ITERATION_COMPLETED)

    def epoch_end(self, state: Any, logger: Any) -> None:
        """EPOCH_COMPLETED."""
        self._tell(state, Events.EPOCH_COMPLETED)

    def eval_after_all(self, state: Any, logger: Any) -> None:
        """A handler of an evaluation may have terminated the training."""
        self._tell(state)

    def fit_end(self, state: Any, logger: Any) -> None:
        """COMPLETED."""
        self._fire(Events.COMPLETED)

    def _tell(self, state: Any, *events: Events) -> None:
        self.engine.state.batch = state.batch
        self._fire(*events)
        if self.engine.should_terminate:
            self.engine.should_terminate = False
            self._fire(Events.TERMINATE)
            state.stop_training()


class IgniteEvaluator(_Mirror):
    """A callback that drives an ignite `Engine` by the events of our evaluations, for ignite's metrics and handlers.

    Attach to `engine` what goes to an evaluator there. An evaluation is an epoch of it; its metrics, of which
    `engine.state.metrics` has those of the last one, are logged as `metrics/<label>/<name>`.

    Args:
        output: `(state) -> engine.state.output` after a batch; by default `(outputs, targets)`, as metrics expect it.
        label: in the names that the metrics are logged by. Default `"ignite"`.
        **options: those of `Callback`.

    Attributes:
        engine: the ignite `Engine`; it cannot be run.

    Raises:
        HandlerTypeError: an option is unknown.
    """

    def __init__(self, output: Callable[[Any], Any] | None = None, label: str = "ignite", **options: Any) -> None:
        super().__init__(output or _outputs_and_targets, **options)
        self.label: str = label

    def eval_start(self, state: Any, logger: Any) -> None:
        """STARTED and EPOCH_STARTED."""
        self._begin_run(state, None)
        self.engine.state.max_epochs = 1
        self._fire(Events.STARTED)
        self.engine.state.epoch = 1
        self._fire(Events.EPOCH_STARTED)

    def eval_batch_start(self, state: Any, logger: Any) -> None:
        """ITERATION_STARTED."""
        self.engine.state.iteration += 1
        self.engine.state.batch = state.batch
        self._fire(Events.ITERATION_STARTED)

    def eval_batch_end(self, state: Any, logger: Any) -> None:
        """ITERATION_COMPLETED."""
        self.engine.state.output = self._output(state)
        self._fire(Events.ITERATION_COMPLETED)

    def eval_end(self, state: Any, logger: Any) -> None:
        """EPOCH_COMPLETED and COMPLETED."""
        self._fire(Events.EPOCH_COMPLETED, Events.COMPLETED)
        metrics = self.engine.state.metrics
        if metrics:
            logger.log_metrics({f"metrics/{self.label}/{name}": value for name, value in metrics.items()})


def _loss(state: Any) -> float:
    return float(state.loss.item())


def _outputs_and_targets(state: Any) -> Any:
    return state.outputs, inputs_and_targets(state.batch)[1]


def _refuse(engine: IgniteEngine, batch: Any) -> None:
    raise ConfigurationError(
        "this ignite Engine follows a Trainer of ours, and cannot be run; call the Trainer's fit()"
    )
