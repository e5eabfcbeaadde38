"""A run of transformers' `Trainer`: what its callbacks do not see is wrapped on the objects, while the run lasts.

A `TrainerCallback` is told of epochs and steps, and gets neither the batch nor the loss. Those go through the public
methods that a subclass of `Trainer` would override.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from eventbus_adapters._driven_loop import Driven, DrivenLoop
from eventbus_adapters._torch_loops import blocking
from eventbus_adapters.torch_loop import LoopState
from eventbus_engine.engine import Engine
from eventbus_engine.event import Event
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training.arguments import check_device, check_optimizers
from eventbus_engine.training.model import inputs_and_targets
from eventbus_engine.training.source import BatchSource

__all__ = ["TrainerRun"]

FORWARD = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD)


class TrainerLoop(DrivenLoop):
    """The loop. With a loss of the adapter's, `state.outputs` are the logits, as algorithms of training expect them."""

    _way_out = (
        "the model has computed its loss together with its outputs; give the adapter one, use_engine(trainer, engine, "
        "loss=torch.nn.functional.cross_entropy), or change the batch before its forward pass"
    )

    async def _begin(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self.state.batch
        args, kwargs = await super()._begin(event, args, kwargs)
        after = self.state.batch
        if event in FORWARD and after is not before and isinstance(before, Mapping) and isinstance(after, Mapping):
            # What an algorithm has added reaches the model, too.
            kwargs |= {name: value for name, value in after.items() if name not in before}
        return args, kwargs

    async def _end(self, event: Event, result: Any) -> Any:
        return await super()._end(event, logits_of(result) if event in FORWARD and self._loss is not None else result)

    def compute_loss(self, outputs: Any, targets: Any) -> Any:
        """The adapter's loss; its backward pass is the Trainer's to call."""
        return blocking(self._call(Event.BEFORE_LOSS, self._loss_function(), (outputs, targets), {}))


class TrainerRun:
    """One call of `Trainer.train`, from `on_train_begin` on.

    Args:
        trainer: the Trainer, all of it prepared.
        engine: publishes the events.
        loss: `(logits, labels) -> mean loss`, in place of the model's own; None for that.
    """

    def __init__(self, trainer: Any, engine: Engine[Any], loss: Callable[..., Any] | None) -> None:
        own_state = engine.state is None or isinstance(engine.state, LoopState)
        self._trainer = trainer
        self._driven = Driven(
            engine=engine,
            model=trainer.model,
            optimizers=check_optimizers(getattr(trainer.optimizer, "optimizer", trainer.optimizer)),
            source=BatchSource(trainer.callback_handler.train_dataloader, "the train_dataset's loader"),
            loss=None if loss is None else on_logits(loss),
            device=check_device(None, trainer.model),
            max_duration=Time(trainer.state.max_steps, "ba") if own_state else None,
            run_name=trainer.args.run_name if own_state else None,
            hooks=True,
            make=TrainerLoop,
            start=Timestamp(batch=trainer.state.global_step, epoch=int(trainer.state.epoch or 0)),
        )
        self._undo = ExitStack()
        self._depth = 0  # an evaluation of several data sets is one of each
        self._fresh = False  # the next training step is the first on its batch
        with self._undo:
            self.loop: Any = self._driven.__enter__()
            self._undo.push(self._driven.__exit__)
            self._wrap_all()
            self._undo = self._undo.pop_all()

    def close(self, error: BaseException | None) -> None:
        """Take everything off the Trainer again, and end the run: with its events, or of an error."""
        if error is None:
            self._undo.close()
        else:
            self._undo.__exit__(type(error), error, error.__traceback__)

    def _wrap_all(self) -> None:
        trainer = self._trainer
        self._wrap(trainer, "get_batch_samples", self._fetch)
        self._wrap(trainer, "training_step", self._train)
        self._wrap(trainer, "compute_loss", self._watch_loss if self._driven.loss is None else self._compute_loss)
        self._wrap(trainer.accelerator, "backward", self.loop.backward_by)
        self._wrap(trainer, "evaluate", self._evaluate)
        self._wrap(trainer, "evaluation_loop", self._run_evaluator)
        self._wrap(trainer, "prediction_step", self._predict)
        if self._driven.loss is not None:
            self._set(trainer, "loss_is_scaled_for_ga", False)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have a method of an object called by `around(method, ...)`."""
        method = getattr(owner, name)
        self._set(owner, name, functools.wraps(method)(functools.partial(around, method)))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        attributes = vars(owner)
        if name in attributes:
            self._undo.callback(attributes.__setitem__, name, attributes[name])
        else:
            self._undo.callback(attributes.pop, name, None)
        attributes[name] = value

    # ------------------------------------------------------------------------------------------------------- training

    def _fetch(self, method: Callable[..., Any], batches: Iterator[Any], number: int, *rest: Any) -> Any:
        """Fetch what the next optimizer step takes: a batch, or several to accumulate the gradients of."""
        self.loop.fetch()
        self._fresh = True
        if number == 1:
            # The Trainer counts what its loss is averaged over, so the algorithms come first.
            samples, items = method(map(self.loop.take, batches), number, *rest)
        else:
            samples, items = method(batches, number, *rest)
            samples[:1] = [self.loop.take(batch) for batch in samples[:1]]
        return samples, items

    def _train(self, method: Callable[..., Any], model: nn.Module, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        if not self._fresh:
            self.loop.take_more(batch)
        self._fresh = False
        return method(model, self.loop.state.batch, *rest, **kwargs)

    def _watch_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's own method, which has the model compute the loss or knows a way to."""
        result = method(*args, **kwargs)
        if isinstance(result, tuple):
            return (self.loop.take_loss(result[0]), *result[1:])
        return self.loop.take_loss(result)

    def _compute_loss(
        self,
        method: Callable[..., Any],
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Compute the adapter's loss."""
        features, labels = inputs_and_targets(inputs)
        outputs = model(**features)
        loss = self.loop.compute_loss(outputs, labels)
        return (loss, {"logits": logits_of(outputs)}) if return_outputs else loss

    # ----------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            return method(*args, **kwargs)
        with self.loop.evaluation():
            self._depth = 1
            try:
                metrics = method(*args, **kwargs)
            finally:
                self._depth = 0
        self._trainer.control.should_training_stop |= self.loop.stopped
        return metrics

    def _run_evaluator(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._depth:  # a prediction
            return method(*args, **kwargs)
        self.loop.begin_evaluator()
        output = method(*args, **kwargs)
        label = kwargs.get("metric_key_prefix", "eval")
        metrics = {name.removeprefix(f"{label}_"): value for name, value in output.metrics.items()}
        self.loop.end_evaluator(label, metrics)
        return output

    def _predict(self, method: Callable[..., Any], model: nn.Module, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        if not self._depth:
            return method(model, batch, *rest, **kwargs)
        result = method(model, self.loop.begin_eval_batch(batch), *rest, **kwargs)
        self.loop.end_eval_batch()
        return result


def logits_of(outputs: Any) -> Any:
    """The logits among a model's outputs, as transformers' models return them; a tensor is taken to be them."""
    if isinstance(outputs, Mapping):
        return outputs["logits"]
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def on_logits(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of logits as one of outputs, for algorithms that call the model and the loss themselves."""

    @functools.wraps(loss, updated=())
    def wrapped(outputs: Any, targets: Any, **options: Any) -> Any:
        return loss(logits_of(outputs), targets, **options)

    return wrapped
