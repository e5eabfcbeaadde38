"""The course of Lightning's loop: which of our events each of its hooks is, and what reaches its module.

Lightning's callback hooks return nothing, so that what an algorithm makes of a batch or a loss could not leave them.
While the run lasts, the module's steps and its `backward` are therefore wrapped on the instance, and its parts watched
through torch's hooks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eventbus_adapters._torch_course import Plain, count
from eventbus_adapters._torch_loops import Subject, TorchLoop, blocking
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.time import Timestamp

__all__ = ["STEPS", "LightningLoop"]

STEPS = {
    "training_step": Event.BEFORE_FORWARD,
    "validation_step": Event.EVAL_BEFORE_FORWARD,
    "test_step": Event.EVAL_BEFORE_FORWARD,
    "predict_step": Event.PREDICT_BEFORE_FORWARD,
}
"""The methods of a module that Lightning calls with a batch, and the event of the model's calls within."""

EVALUATIONS = (Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, Event.PREDICT_START)
EVALUATION_BATCHES = (Event.EVAL_BATCH_START, Event.PREDICT_BATCH_START)


class LightningLoop(TorchLoop):
    """A run of a Lightning `Trainer`, as its hooks tell of it.

    Args:
        subject: what takes part; its model is the LightningModule.
        state: the engine's.
        model: the name of what the module calls for a forward pass, None for the module itself.
        loss: the name of what it calls for the loss, None if that is not known.
    """

    def __init__(self, subject: Subject, state: Any, model: str | None, loss: str | None) -> None:
        super().__init__(subject, state)
        self._names = {Event.BEFORE_FORWARD: model, Event.BEFORE_LOSS: loss}
        self._originals: list[tuple[str, Any]] = []
        self._step_name = ""
        self._heard: set[Event] = set()
        self._loader = 0
        self._kept: tuple[Any, ...] = ()

    # ----------------------------------------------------------------------------------------------------- the module

    def _attach(self) -> None:
        for name in STEPS:
            self._wrap(name, functools.partial(self._run_step, name))
        self._wrap("backward", self._run_backward)
        self._attach_part(self._model, Event.BEFORE_FORWARD)
        self._attach_part(None, Event.BEFORE_LOSS)

    def _attach_part(self, default: nn.Module | None, event: Event) -> None:
        """Watch a part of the module: a module of torch's by its hooks, a method by a wrapper."""
        name = self._names[event]
        part: Any = default if name is None else _part_of(self._model, name)
        if isinstance(part, nn.Module):
            self._watch(part, event)
        elif name is not None:
            self._wrap(name, lambda original, args, kwargs: blocking(self._call(event, original, args, kwargs)))

    def watch_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The optimizers have been made."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._end_step()

    def _end_step(self) -> None:
        if self._is_open("optimizer"):
            blocking(self._leave("optimizer"))

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Have a method of the module called by `around(original, args, kwargs)`."""
        original = getattr(self._model, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, args, kwargs)

        self._originals.append((name, vars(self._model).get(name)))
        setattr(self._model, name, wrapper)

    def _detach(self) -> None:
        while self._originals:
            name, original = self._originals.pop()
            delattr(self._model, name)
            if original is not None:
                setattr(self._model, name, original)
        super()._detach()

    def _section(self, event: Event) -> Event | None:
        if event == Event.BEFORE_BACKWARD or self._step_name == "training_step":
            return super()._section(event)
        if event != Event.BEFORE_FORWARD or not self._step_name or not self._is_here():
            return None
        forward = STEPS[self._step_name]
        return None if self._is_open(forward) else forward

    async def _begin(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._heard.add(event)
        return await super()._begin(event, args, kwargs)

    def _run_step(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """One of `STEPS`, with the batch that the algorithms have left."""
        batches = (Event.BATCH_START,) if name == "training_step" else EVALUATION_BATCHES
        if self._step_name or not self._is_here() or not any(self._is_open(batch) for batch in batches):
            return original(*args, **kwargs)  # called by another step, or for a sanity check
        self._step_name, self._heard = name, set()
        try:
            result = original(self.state.batch, *args[1:], **kwargs)
        finally:
            self._step_name = ""
        if name == "training_step":
            self._refuse_unheard()
            loss = result.get("loss") if isinstance(result, Mapping) else result
            if isinstance(loss, Tensor):
                self.state.loss = loss
        if STEPS[name] not in self._heard:
            self.state.outputs = result
        return result

    def _refuse_unheard(self) -> None:
        """Refuse to leave out an algorithm because nobody has said where its events happen."""
        for event, what in ((Event.BEFORE_FORWARD, "model"), (Event.BEFORE_LOSS, "loss")):
            if event in self._heard:
                continue
            waiting = [name for half in (event, event.partner) for name in self._wanted(half)]
            if waiting:
                known = self._names[event] or ("forward(), by self(...)" if what == "model" else "")
                raise ConfigurationError(
                    f"{waiting[0]} is for {event.name} or {event.partner}, but training_step has not called "
                    f"{known or 'a loss that is known'}; give EngineCallback(..., {what}=...), the name of the "
                    f"attribute of {type(self._model).__name__} that it calls: a torch module, or a method"
                )

    def _wanted(self, event: Any) -> tuple[str, ...]:
        return self._engine.explain(event, self.state).order

    def _run_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        """`module.backward`. With a scaler it is handed the scaled loss, which AFTER_BACKWARD is not to see."""
        scaled = getattr(self.state, "scaler", None) is not None and self._trains()
        kept = self.state.loss

        def backward(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if scaled:
                self.state.loss = kept

        blocking(self._backward(args[0], args[1:], kwargs, backward))

    # ------------------------------------------------------------------------------------------------------- training

    def begin_epoch(self) -> None:
        """The first batch of an epoch is about to be fetched."""
        blocking(self._enter("epoch", Plain(self._tracing.unit("epoch"))))
        blocking(self._publish(Event.EPOCH_START))
        blocking(self._begin_fetch())

    def begin_batch(self, batch: Any, epoch: int) -> None:
        """The batch has been fetched, in the epoch of that number."""
        if not self._is_open("epoch"):  # the run goes on from a checkpoint within an epoch, or between the last
            if int(self.state.timestamp.epoch) < epoch:  # batch of one and its end, which Lightning leaves out then
                self.state.timestamp = self.state.timestamp.to_next_epoch()
            blocking(self._enter("epoch", Plain(self._tracing.unit("epoch"))))
            blocking(self._begin_fetch())
        blocking(self._take(batch))

    def begin_step(self) -> None:
        """An optimizer is about to step."""
        if self._in_batch() and not self._is_open("optimizer"):
            blocking(self._begin_step())

    def end_batch(self, more: bool) -> None:
        """The batch is over; `more` if another one is fetched next."""
        self._end_step()  # a scaler leaves out a step whose gradients are not finite
        blocking(self._end_batch())
        if more:
            blocking(self._begin_fetch())

    def end_epoch(self) -> None:
        """What is open of a batch was not trained on: it was not fetched after all, or the module has left it out."""
        self._parts.forget()
        blocking(self._give_up_batch("no batch"))
        blocking(self._end_epoch())

    # ----------------------------------------------------------------------------------------- evaluation, prediction

    def begin_evaluation(self, outer: Event) -> None:
        """An evaluation, or a prediction, of which `outer` is the first event."""
        blocking(self._give_up_batch("no batch"))
        self._kept = tuple(getattr(self.state, name) for name in ("batch", "outputs", "loss"))
        self._loader, self.state.eval_timestamp = 0, Timestamp()
        unit = "predict" if outer == Event.PREDICT_START else "eval"
        blocking(self._enter("evaluation", Plain(self._tracing.unit(unit))))
        blocking(self._enter(outer, self._pair(outer)))
        if outer != Event.PREDICT_START:
            blocking(self._enter(Event.EVAL_START, self._pair(Event.EVAL_START)))

    def begin_evaluation_batch(self, event: Event, batch: Any, loader: int) -> None:
        """A batch of an evaluation, from its loader of that number, or of a prediction."""
        if loader != self._loader:
            if event == Event.EVAL_BATCH_START:
                blocking(self._leave(Event.EVAL_START))
            self._loader, self.state.eval_timestamp = loader, Timestamp()
            if event == Event.EVAL_BATCH_START:
                blocking(self._enter(Event.EVAL_START, self._pair(Event.EVAL_START)))
        self.state.batch = batch
        self._samples, self._tokens = count(batch)
        blocking(self._enter(event, self._pair(event)))
        self._parts.learn(self.state.batch, "batch")

    def end_evaluation_batch(self, event: Event) -> None:
        """It is over."""
        self._parts.forget()
        state = self.state
        state.eval_timestamp = state.eval_timestamp.to_next_batch(samples=self._samples, tokens=self._tokens)
        blocking(self._leave(event))

    def end_evaluation(self, metrics: Mapping[str, float], more: bool) -> None:
        """The evaluation is over, and this is what it has measured; `more` if a batch to train on is fetched next."""
        self.state.metrics = dict(metrics)
        for event in (Event.EVAL_START, *EVALUATIONS):
            if self._is_open(event):
                blocking(self._leave(event))
        blocking(self._leave("evaluation"))
        self.state.batch, self.state.outputs, self.state.loss = self._kept
        if more:
            blocking(self._begin_fetch())

    # -------------------------------------------------------------------------------------------------------- the run

    def begin_run(self, *events: Event) -> None:
        """The run has begun."""
        self._attach()
        blocking(self._start(events))

    def publish(self, event: Event) -> None:
        """An event that belongs to the run as a whole."""
        blocking(self._publish(event))

    def end_run(self, error: BaseException | None) -> None:
        """It is over, or has failed of the error."""
        try:
            if self._is_open("run"):
                blocking(self._leave("run", error))
        finally:
            self._detach()


def _part_of(module: nn.Module, name: str) -> Any:
    try:
        part = operator.attrgetter(name)(module)
    except AttributeError:
        part = None
    if isinstance(part, nn.Module) or (callable(part) and "." not in name):
        return part
    raise ConfigurationError(
        f"{type(module).__name__} has no torch module {name!r}, and no method of that name; give EngineCallback the "
        f"name of the attribute that training_step calls"
    )
