"""Callbacks that watch a training run: its speed, its numbers, its memory, and when to end it."""

from eventbus_engine.training.callbacks.early_stopper import EarlyStopper
from eventbus_engine.training.callbacks.lr_monitor import LRMonitor
from eventbus_engine.training.callbacks.memory_monitor import MemoryMonitor
from eventbus_engine.training.callbacks.nan_monitor import NaNMonitor
from eventbus_engine.training.callbacks.optimizer_monitor import OptimizerMonitor
from eventbus_engine.training.callbacks.runtime_estimator import RuntimeEstimator
from eventbus_engine.training.callbacks.speed_monitor import SpeedMonitor

__all__ = [
    "EarlyStopper",
    "LRMonitor",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
]
