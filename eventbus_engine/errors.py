"""The exception tree.

Every error of this package derives from `EventBusError`, so one `except` catches them all:

    EventBusError
    ├── ConfigurationError (ValueError)      something given to a constructor or a registration does not fit
    │   ├── VocabularyError                  an event vocabulary with a value that cannot be an event
    │   ├── AsyncMatchError (TypeError)      an algorithm whose `match` is a coroutine function
    │   ├── HandlerTypeError (TypeError)     a handler that cannot be called, or not with what it is given
    │   ├── CycleError                       ordering constraints that contradict each other
    │   └── CallbackInUseError               a callback with a lifetime of its own, open in another engine
    ├── UnknownEventError (ValueError)       a name that is no event of the vocabulary; lists the nearest ones
    ├── TimeFormatError (ValueError, TypeError, RuntimeError)  a duration that does not parse, or units that do not mix
    ├── PassError (TypeError)                an algorithm pass that did not return a sequence of algorithms
    ├── BatchError (TypeError, ValueError)   a batch the training loop cannot read, split or hand to the model
    ├── TrainingError (RuntimeError)         a run that cannot go on: its loss is not finite
    ├── CheckpointError (RuntimeError)       a checkpoint that cannot be written, read, or loaded into this run
    ├── RankError (RuntimeError)             a rank that has lost the others of its job
    ├── HandlerTimeoutError (TimeoutError)   an algorithm or callback that outlived its `timeout`
    ├── HandlerCancelledError                a callback that cancelled itself
    ├── DeadlockError                        dispatches that wait for each other's lanes
    ├── EngineClosedError (RuntimeError)     an event for an engine that is closed, or closing
    ├── DeliveryError (RuntimeError)         records that the far side of a destination did not take
    ├── SnapshotError (AttributeError)       a background callback read what its snapshot does not hold
    ├── StandInError (AttributeError)        a foreign callback asked for what only its own trainer has
    ├── SyncUsageError (RuntimeError)        `engine.sync` called from one of the engine's own handlers
    ├── TelemetryError (RuntimeError)        tracing asked to do what its set-up cannot do
    │   └── SpanFileError (ValueError)       a file of spans with a line that is no request
    ├── SpoolError (RuntimeError)            a spool that cannot be opened, read or written
    │   ├── SpoolInUseError                  a spool that another writer has open
    │   ├── SpoolFullError                   no room on the disk for what was to be spooled
    │   ├── SpoolCorruptError                a spool whose file is damaged
    │   └── SpoolRecordError (ValueError)    a record that is too large, or holds what cannot be encoded
    └── CallbackErrors (ExceptionGroup)      what the callbacks of one event raised, in registration order
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces


class EventBusError(Exception):
    """Base of every error raised by this package."""

    traces: Traces
    """What ran before the failure; set on whatever leaves `run_event`, ours or not."""


class ConfigurationError(EventBusError, ValueError):
    """Something handed to a constructor or a registration does not fit; raised before anything runs."""


class VocabularyError(ConfigurationError):
    """An `EventName` subclass has a member whose value cannot name an event."""


class AsyncMatchError(ConfigurationError, TypeError):
    """An algorithm's `match` is asynchronous. Matching decides the order, so it has to be a plain function."""


class HandlerTypeError(ConfigurationError, TypeError):
    """A handler, hook or algorithm cannot be called, or takes other arguments than it will be given."""


class CycleError(ConfigurationError):
    """Ordering constraints contradict each other.

    `cycle` holds the names along the cycle, the first one repeated at the end.
    """

    def __init__(self, message: str, cycle: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cycle: tuple[str, ...] = tuple(cycle)


class CallbackInUseError(ConfigurationError):
    """A callback that is open in one engine got its first event from another."""


class UnknownEventError(EventBusError, ValueError):
    """A name is not an event of the vocabulary in use. `nearest` holds the closest names, best first."""

    def __init__(self, message: str, nearest: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.nearest: tuple[str, ...] = tuple(nearest)


class TimeFormatError(EventBusError, ValueError, TypeError, RuntimeError):
    """A duration does not parse, or two times of different units were mixed.

    It is all that Composer raises for these: a ValueError for what does not parse, a TypeError for a fraction of what
    comes whole, a RuntimeError for units that do not mix.
    """


class PassError(EventBusError, TypeError):
    """An algorithm pass returned None, or anything but a sequence of algorithms."""


class BatchError(EventBusError, TypeError, ValueError):
    """A batch cannot be read, split into microbatches, or handed to the model."""


class TrainingError(EventBusError, RuntimeError):
    """A training run cannot go on as it is: its loss is not finite."""


class CheckpointError(EventBusError, RuntimeError):
    """A checkpoint cannot be written, is not whole or not to be trusted, or does not fit the run that is to load it."""


class RankError(EventBusError, RuntimeError):
    """A rank has lost the others of its job: what they were to do together failed.

    Attributes:
        rank: which rank says so.
        world_size: how many there were.
    """

    def __init__(self, message: str, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(message)
        self.rank: int = rank
        self.world_size: int = world_size


class HandlerTimeoutError(EventBusError, TimeoutError):
    """An algorithm or a callback outlived its `timeout` and was cancelled."""


class HandlerCancelledError(EventBusError):
    """A callback cancelled itself. It counts as that callback's failure and reaches nobody else."""


class DeadlockError(EventBusError):
    """Dispatches wait for each other's lanes. `chain` describes each of them, in waiting order."""

    def __init__(self, message: str, chain: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.chain: tuple[str, ...] = tuple(chain)


class EngineClosedError(EventBusError, RuntimeError):
    """The engine is closed, or closing, and takes no more events."""


class DeliveryError(EventBusError, RuntimeError):
    """The far side of a destination did not take a batch of records, or some of them.

    Attributes:
        retryable: whether the same batch may be taken later: the far side is down, or busy.
        retry_after: the seconds that it asked to be left alone for; None if it did not.
        lost: how many records of the batch have not arrived; None for all of them.
    """

    def __init__(
        self, message: str, *, retryable: bool = False, retry_after: float | None = None, lost: int | None = None
    ) -> None:
        super().__init__(message)
        self.retryable: bool = retryable
        self.retry_after: float | None = retry_after
        self.lost: int | None = lost


class SnapshotError(EventBusError, AttributeError):
    """A background callback read what its `snapshot` does not hold, or named in it what cannot be copied."""


class StandInError(EventBusError, AttributeError):
    """A callback made for another trainer asked its stand-in for something that only the real one has."""


class SyncUsageError(EventBusError, RuntimeError):
    """`engine.sync` was called where blocking the thread would block the engine itself."""


class TelemetryError(EventBusError, RuntimeError):
    """Tracing was asked to do something its set-up cannot do."""


class SpanFileError(TelemetryError, ValueError):
    """A file holds something other than OTLP JSON lines. `path` and `line`, counted from 1, say where."""

    def __init__(self, path: str | os.PathLike[str], line: int, problem: str) -> None:
        super().__init__(
            f"{os.fspath(path)}, line {line}: {problem}; each line has to be one OTLP ExportTraceServiceRequest in "
            "JSON, as OtlpJsonFileExporter writes them; delete this one to read the others"
        )
        self.path = path
        self.line = line


class SpoolError(EventBusError, RuntimeError):
    """A spool cannot be opened, read or written. `path` is its file."""

    def __init__(self, message: str, path: str | os.PathLike[str] = "") -> None:
        super().__init__(message)
        self.path = path


class SpoolInUseError(SpoolError):
    """Another process, or another `Spool` of this one, has the file open. A spool has one writer at a time."""


class SpoolFullError(SpoolError):
    """The disk has no room. What was spooled before stays, and the spool goes on once there is room.

    `stored` says how many of the records, from the first, were stored before.
    """

    def __init__(self, message: str, path: str | os.PathLike[str] = "", stored: int = 0) -> None:
        super().__init__(message, path)
        self.stored = stored


class SpoolCorruptError(SpoolError):
    """The file of a spool is damaged, or is none."""


class SpoolRecordError(SpoolError, ValueError):
    """A record is too large for its spool, or holds a value that cannot be encoded."""


class CallbackErrors(EventBusError, ExceptionGroup[Exception]):
    """The exceptions that callbacks (and plain subscribers) of one event raised, in registration order."""

    def derive(self, excs: Sequence[Exception]) -> CallbackErrors:  # type: ignore[override]
        """Keep the type when `split` or `except*` takes the group apart."""
        return CallbackErrors(self.message, excs)
