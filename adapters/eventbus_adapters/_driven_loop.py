"""A blocking loop that belongs to a framework: what it has to call out, where nothing of torch's can be watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from eventbus_adapters._torch_course import Plain, count
from eventbus_adapters._torch_loops import TorchLoop, blocking
from eventbus_adapters.torch_loop import Instrumentation, LoopState
from eventbus_engine.event import Event
from eventbus_engine.time import Timestamp
from eventbus_engine.training.data import move

__all__ = ["Driven", "DrivenLoop"]


class DrivenLoop(TorchLoop):
    """A `TorchLoop` that is told how far its framework's loop is, where a loop of one's own would iterate it.

    The calls of the model, of a loss that is a module, and of the optimizers are watched as they are there.
    """

    def __init__(self, subject: Driven, state: Any) -> None:
        super().__init__(subject, state)
        self._goal = getattr(state, "max_duration", None)

    @property
    def in_batch(self) -> bool:
        """Whether a batch is being fetched, or trained on."""
        return self._is_open("batch")

    @property
    def stopped(self) -> bool:
        """Whether somebody has called `state.stop_training()`."""
        return getattr(self.state, "max_duration", None) is not self._goal

    # --------------------------------------------------------------------------------------------- epochs and batches

    def begin_epoch(self) -> None:
        """An epoch begins."""
        blocking(self._begin_epoch())

    def end_epoch(self) -> None:
        """An epoch is over, whatever of it is still open."""
        blocking(self._end_epoch())

    def fetch(self) -> None:
        """A batch is about to be fetched; unless `take` says otherwise, there will have been none left."""
        if not self._is_open("epoch"):  # the framework goes on inside an epoch
            self.begin_epoch()
        blocking(self._end_batch())
        blocking(self._begin_fetch())

    async def _end_batch(self) -> None:
        if self._is_open(Event.BEFORE_DATALOADER):
            await self._give_up_batch("end of data")
        await super()._end_batch()

    def take(self, batch: Any) -> Any:
        """A batch has been fetched; what the algorithms have made of it."""
        blocking(self._end_fetch(move(batch, self._device)))
        return self.state.batch

    def take_more(self, batch: Any) -> Any:
        """Another part of the batch in progress, whose gradients add to those that there are."""
        blocking(self._take_more(move(batch, self._device)))
        return self.state.batch

    async def _take_more(self, batch: Any) -> None:
        samples, tokens = self._samples, self._tokens
        await self._enter(Event.BEFORE_DATALOADER, self._pair(Event.BEFORE_DATALOADER))
        await self._end_fetch(batch)
        self._samples, self._tokens = self._samples + samples, self._tokens + tokens
        self._parts.forget()
        self._parts.learn(self.state.batch, "batch")

    def begin_batch(self) -> Any:
        """The training on the batch begins; what the algorithms have made of it."""
        blocking(self._begin_train_batch())
        return self.state.batch

    def end_batch(self) -> None:
        """The training on the batch is over."""
        blocking(self._end_batch())

    # ---------------------------------------------------------------------------------------------- parts of a batch

    def take_loss(self, loss: Tensor) -> Any:
        """A loss that has been computed where nothing could be watched; what the algorithms have made of it."""
        return blocking(self._call(Event.BEFORE_LOSS, lambda: loss, (), {}))

    def backward_by(self, function: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The framework's own backward pass."""
        blocking(self._backward(loss, args, kwargs, function))

    # ----------------------------------------------------------------------------------------------------- evaluation

    def _section(self, event: Event) -> Event | None:
        if event == Event.BEFORE_FORWARD and self._is_here() and self._open[-1][0] == Event.EVAL_BATCH_START:
            return Event.EVAL_BEFORE_FORWARD
        return super()._section(event)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """One or several evaluators run. One that fails is given up: whoever catches its error may go on training."""
        state = self.state
        kept = state.batch, state.outputs, state.loss
        blocking(self._enter("eval", Plain(self._tracing.unit("eval"))))
        try:
            blocking(self._enter(Event.EVAL_BEFORE_ALL, self._pair(Event.EVAL_BEFORE_ALL)))
            yield
            blocking(self._leave(Event.EVAL_BEFORE_ALL))
        except BaseException as error:
            self._parts.forget()
            blocking(self._leave("eval", error))
            raise
        else:
            blocking(self._leave("eval"))
        finally:
            state.batch, state.outputs, state.loss = kept

    def begin_evaluator(self) -> None:
        """One of them begins."""
        self.state.eval_timestamp = Timestamp()
        blocking(self._enter(Event.EVAL_START, self._pair(Event.EVAL_START)))

    def begin_eval_batch(self, batch: Any) -> Any:
        """It begins with a batch; what the algorithms have made of it."""
        self.state.batch = batch
        blocking(self._enter(Event.EVAL_BATCH_START, self._pair(Event.EVAL_BATCH_START)))
        self._parts.learn(self.state.batch, "batch")
        return self.state.batch

    def end_eval_batch(self) -> None:
        """It is through with the batch."""
        self._parts.forget()
        samples, tokens = count(self.state.batch)
        self.state.eval_timestamp = self.state.eval_timestamp.to_next_batch(samples, tokens)
        blocking(self._leave(Event.EVAL_BATCH_START))

    def end_evaluator(self, label: str, metrics: Mapping[str, Any]) -> None:
        """It has measured this."""
        if not isinstance(getattr(self.state, "metrics", None), dict):
            self.state.metrics = {}
        self.state.metrics |= {f"metrics/{label}/{name}": value for name, value in metrics.items()}
        blocking(self._leave(Event.EVAL_START))


@dataclass(eq=False, kw_only=True)
class Driven(Instrumentation):
    """One run of a framework's loop.

    Args:
        make: the loop's class.
        start: how far the framework already is, where it goes on with an earlier run.
    """

    make: Callable[[Driven, Any], DrivenLoop] = DrivenLoop
    start: Timestamp = field(default_factory=Timestamp)

    def _make_loop(self, state: Any) -> DrivenLoop:
        return self.make(self, state)

    def _take_state(self, worker: Any) -> Any:
        state = super()._take_state(worker)
        if isinstance(state, LoopState):
            state.timestamp = self.start
        return state
