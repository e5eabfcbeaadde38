"""`composer.core.callback`: the base of callbacks, with a hook for every event to call by `super()`."""

from __future__ import annotations

from typing import Any

from eventbus_adapters.composer_api.core.serializable import NamedByClass, Serializable
from eventbus_engine.callback import Callback as OurCallback
from eventbus_engine.callback import empty

__all__ = ["Callback"]


@empty
def _nothing(self: Any, state: Any, logger: Any) -> Any:
    """Do nothing on this event."""


class Callback(NamedByClass, OurCallback[Any], Serializable):
    """A callback with Composer's methods: override the hooks of the events that you want, or `run_event` for all.

    Every hook is there already, so that `super().batch_end(state, logger)` works; one that is not overridden costs
    nothing. Hooks may be async, and all the options of `eventbus_engine.Callback` hold, as attributes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    init = before_load = after_load = fit_start = _nothing
    iteration_start = epoch_start = before_dataloader = after_dataloader = _nothing
    batch_start = before_train_batch = before_forward = after_forward = _nothing
    before_loss = after_loss = before_backward = after_backward = _nothing
    after_train_batch = batch_end = batch_checkpoint = epoch_end = _nothing
    epoch_checkpoint = iteration_end = iteration_checkpoint = fit_end = _nothing
    eval_before_all = eval_start = eval_batch_start = eval_before_forward = _nothing
    eval_after_forward = eval_batch_end = eval_end = eval_after_all = _nothing
    eval_standalone_start = eval_standalone_end = predict_start = predict_batch_start = _nothing
    predict_before_forward = predict_after_forward = predict_batch_end = predict_end = _nothing
