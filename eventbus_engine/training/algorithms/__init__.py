"""Algorithms that change how a model trains: for each a pure function and a class beside it."""

from eventbus_engine.training.algorithms.label_smoothing import LabelSmoothing, smooth_labels
from eventbus_engine.training.algorithms.layer_freezing import LayerFreezing, freeze_layers
from eventbus_engine.training.algorithms.mixup import MixUp, mixup_batch
from eventbus_engine.training.algorithms.selective_backprop import (
    SelectiveBackprop,
    select_using_loss,
    should_selective_backprop,
)

__all__ = [
    "LabelSmoothing",
    "LayerFreezing",
    "MixUp",
    "SelectiveBackprop",
    "freeze_layers",
    "mixup_batch",
    "select_using_loss",
    "should_selective_backprop",
    "smooth_labels",
]
