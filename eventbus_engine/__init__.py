"""An asyncio/trio event bus for training loops and data pipelines, with an engine that keeps its handlers in order."""

from eventbus_engine import passes, telemetry
from eventbus_engine.algorithm import Algorithm, algorithm
from eventbus_engine.bus import CallNext, EventBus, Middleware, Subscription
from eventbus_engine.callback import Callback, HookNameWarning, background, callback
from eventbus_engine.closing import CloseReport
from eventbus_engine.counts import DeliveryCounts
from eventbus_engine.engine import Engine
from eventbus_engine.envelope import Envelope, current_envelope
from eventbus_engine.errors import (
    AsyncMatchError,
    BatchError,
    CallbackErrors,
    CallbackInUseError,
    CheckpointError,
    ConfigurationError,
    CycleError,
    DeadlockError,
    DeliveryError,
    EngineClosedError,
    EventBusError,
    HandlerCancelledError,
    HandlerTimeoutError,
    HandlerTypeError,
    PassError,
    RankError,
    SnapshotError,
    SpanFileError,
    SpoolCorruptError,
    SpoolError,
    SpoolFullError,
    SpoolInUseError,
    SpoolRecordError,
    StandInError,
    SyncUsageError,
    TelemetryError,
    TimeFormatError,
    TrainingError,
    UnknownEventError,
    VocabularyError,
)
from eventbus_engine.event import Event, EventName
from eventbus_engine.in_flight import InFlight
from eventbus_engine.logger import Logger, LoggerDestination
from eventbus_engine.pair import Pair
from eventbus_engine.passes import AlgorithmPass, ConflictWarning, LossInterpolationWarning
from eventbus_engine.plan import Move, Plan
from eventbus_engine.policy import Circuit, Retry
from eventbus_engine.snapshot import Record
from eventbus_engine.time import Time, Timestamp, TimeUnit
from eventbus_engine.trace import Trace, Traces

__all__ = [
    "Algorithm",
    "AlgorithmPass",
    "AsyncMatchError",
    "BatchError",
    "CallNext",
    "Callback",
    "CallbackErrors",
    "CallbackInUseError",
    "CheckpointError",
    "Circuit",
    "CloseReport",
    "ConfigurationError",
    "ConflictWarning",
    "CycleError",
    "DeadlockError",
    "DeliveryCounts",
    "DeliveryError",
    "Engine",
    "EngineClosedError",
    "Envelope",
    "Event",
    "EventBus",
    "EventBusError",
    "EventName",
    "HandlerCancelledError",
    "HandlerTimeoutError",
    "HandlerTypeError",
    "HookNameWarning",
    "InFlight",
    "Logger",
    "LoggerDestination",
    "LossInterpolationWarning",
    "Middleware",
    "Move",
    "Pair",
    "PassError",
    "Plan",
    "RankError",
    "Record",
    "Retry",
    "SnapshotError",
    "SpanFileError",
    "SpoolCorruptError",
    "SpoolError",
    "SpoolFullError",
    "SpoolInUseError",
    "SpoolRecordError",
    "StandInError",
    "Subscription",
    "SyncUsageError",
    "TelemetryError",
    "Time",
    "TimeFormatError",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "Traces",
    "TrainingError",
    "UnknownEventError",
    "VocabularyError",
    "algorithm",
    "background",
    "callback",
    "current_envelope",
    "passes",
    "telemetry",
]
