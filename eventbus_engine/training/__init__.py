"""Training with torch: the only part of the package that imports it. Installed by the extra `train`."""

from __future__ import annotations

from eventbus_engine.training.data import BatchKey
from eventbus_engine.training.evaluator import Evaluator
from eventbus_engine.training.model import BatchModel, LossFunction
from eventbus_engine.training.state import Precision, State
from eventbus_engine.training.surgery import NoEffectWarning, replace_modules
from eventbus_engine.training.trainer import Trainer

__all__ = [
    "BatchKey",
    "BatchModel",
    "Evaluator",
    "LossFunction",
    "NoEffectWarning",
    "Precision",
    "State",
    "Trainer",
    "replace_modules",
]
