"""An ignite `Engine` that publishes our events: what `eventbus_adapters.ignite.use_engine` returns."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from eventbus_adapters._driven_loop import Driven, DrivenLoop
from eventbus_adapters._ignite_peer import Engine as IgniteEngine
from eventbus_adapters._ignite_peer import Events
from eventbus_adapters.torch_loop import LoopState
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training.source import BatchSource

__all__ = ["Attachment", "attached"]

attached: weakref.WeakSet[Any] = weakref.WeakSet()
"""The ignite engines that have one of ours."""


class Attachment:
    """A trainer of ignite's that publishes our events. Made by `use_engine`.

    Args:
        trainer: whose runs publish.
        evaluators: by label.
        options: those of `Driven` that are known by now.
    """

    def __init__(
        self, trainer: IgniteEngine, evaluators: Mapping[str, IgniteEngine], options: Mapping[str, Any]
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._driven: Driven | None = None
        self._loop: DrivenLoop | None = None
        self._engines = [trainer, *evaluators.values()]
        attached.update(self._engines)
        self._handles = [
            trainer.add_event_handler(event, handler)
            for event, handler in {
                Events.STARTED: self._begin,
                Events.EPOCH_STARTED: self._begin_epoch,
                Events.GET_BATCH_STARTED: self._begin_fetch,
                Events.GET_BATCH_COMPLETED: self._take,
                Events.ITERATION_STARTED: self._begin_batch,
                Events.ITERATION_COMPLETED: self._end_batch,
                Events.EPOCH_COMPLETED: self._end_epoch,
            }.items()
        ]
        # An exception has a handler of its own in ignite, but with one there it would not be raised any more.
        self._wrap_run(trainer, self._run)
        for label, evaluator in evaluators.items():
            self._handles.append(evaluator.add_event_handler(Events.ITERATION_STARTED, self._begin_eval_batch))
            self._handles.append(evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._end_eval_batch))
            self._wrap_run(evaluator, functools.partial(self._evaluate, label, evaluator))

    @property
    def state(self) -> Any:
        """The state of our engine."""
        return self._options["engine"].state

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loss between BEFORE_LOSS and AFTER_LOSS, in the update function, where it is no `nn.Module`."""
        return self._begun().loss(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward(...)` between BEFORE_BACKWARD and AFTER_BACKWARD, for what was made of a loss: `loss / 4`."""
        self._begun().backward(loss, *args, **kwargs)

    def detach(self) -> None:
        """Give the ignite engines back as they were."""
        for handle in self._handles:
            handle.remove()
        for each in self._engines:
            vars(each).pop("run", None)
            attached.discard(each)

    @staticmethod
    def _wrap_run(engine: IgniteEngine, around: Callable[..., Any]) -> None:
        run = engine.run
        vars(engine)["run"] = functools.wraps(run)(functools.partial(around, run))

    # ------------------------------------------------------------------------------------------------------- training

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            state = run(*args, **kwargs)
        except BaseException as error:
            self._close(error)
            raise
        self._close()
        return state

    def _close(self, error: BaseException | None = None) -> None:
        driven, self._driven, self._loop = self._driven, None, None
        if driven is not None:
            traceback = None if error is None else error.__traceback__
            driven.__exit__(None if error is None else type(error), error, traceback)

    def _begun(self) -> DrivenLoop:
        """The loop of this run. One that goes on where it was interrupted does not start again."""
        if self._loop is None:
            engine, now = self._options["engine"], self._trainer.state
            own_state = engine.state is None or isinstance(engine.state, LoopState)
            driven = Driven(
                **self._options,
                source=BatchSource(now.dataloader or (), "data"),
                max_duration=_duration(now) if own_state else None,
                run_name=None,
                hooks=True,
                start=_timestamp(now),
            )
            loop = driven.__enter__()
            self._driven, self._loop = driven, cast("DrivenLoop", loop)
        return self._loop

    def _begin(self, trainer: IgniteEngine) -> None:
        self._begun()

    def _begin_epoch(self, trainer: IgniteEngine) -> None:
        self._begun().begin_epoch()

    def _begin_fetch(self, trainer: IgniteEngine) -> None:
        self._begun().fetch()

    def _take(self, trainer: IgniteEngine) -> None:
        trainer.state.batch = self._begun().take(trainer.state.batch)

    def _begin_batch(self, trainer: IgniteEngine) -> None:
        loop = self._begun()
        if not loop.in_batch:  # without data, nothing is fetched
            loop.fetch()
            self._take(trainer)
        loop.state.batch = trainer.state.batch  # another handler may have changed it
        trainer.state.batch = loop.begin_batch()

    def _end_batch(self, trainer: IgniteEngine) -> None:
        loop = self._begun()
        loop.end_batch()
        if loop.stopped:
            trainer.terminate()

    def _end_epoch(self, trainer: IgniteEngine) -> None:
        loop = self._begun()
        loop.end_epoch()
        if loop.stopped:
            trainer.terminate()

    # ----------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, label: str, evaluator: IgniteEngine, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = self._loop
        if loop is None:
            return run(*args, **kwargs)
        with loop.evaluation():
            loop.begin_evaluator()
            state = run(*args, **kwargs)
            # Run again after an error, ignite returns nothing.
            loop.end_evaluator(label, evaluator.state.metrics)
        return state

    def _begin_eval_batch(self, evaluator: IgniteEngine) -> None:
        if self._loop is not None:
            evaluator.state.batch = self._loop.begin_eval_batch(evaluator.state.batch)

    def _end_eval_batch(self, evaluator: IgniteEngine) -> None:
        if self._loop is not None:
            self._loop.end_eval_batch()


def _duration(state: Any) -> Time | None:
    if state.max_iters is not None:
        return Time(state.max_iters, "ba")
    return None if state.max_epochs is None else Time(state.max_epochs, "ep")


def _timestamp(state: Any) -> Timestamp:
    """How far a trainer is that goes on with an earlier run."""
    epoch, batch = divmod(state.iteration, state.epoch_length) if state.epoch_length else (state.epoch, 0)
    return Timestamp(epoch=epoch, batch=state.iteration, batch_in_epoch=batch)
