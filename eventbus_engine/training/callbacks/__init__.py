"""Callbacks for a training run: they watch its speed, its numbers and its memory, end it in time, and save it."""

from eventbus_engine.training.callbacks.checkpoint_saver import CheckpointSaver
from eventbus_engine.training.callbacks.early_stopper import EarlyStopper
from eventbus_engine.training.callbacks.lr_monitor import LRMonitor
from eventbus_engine.training.callbacks.memory_monitor import MemoryMonitor
from eventbus_engine.training.callbacks.nan_monitor import NaNMonitor
from eventbus_engine.training.callbacks.optimizer_monitor import OptimizerMonitor
from eventbus_engine.training.callbacks.runtime_estimator import RuntimeEstimator
from eventbus_engine.training.callbacks.speed_monitor import SpeedMonitor

__all__ = [
    "CheckpointSaver",
    "EarlyStopper",
    "LRMonitor",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
]
