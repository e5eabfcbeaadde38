"""Logging: `Logger`, which handlers call, and `LoggerDestination`, where the records go."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import anyio

from eventbus_engine._options import MISSING, is_async_callable, name_of, own_method, read_option
from eventbus_engine.callback import Callback, OnError, has_sender, unwrap
from eventbus_engine.handlers import add_note
from eventbus_engine.trace import batches_done

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces

__all__ = ["Logger", "LoggerDestination", "is_destination"]


class LoggerDestination(Callback[Any]):
    """Where log records go: a console, a file, a service. A callback that also has `log_*` methods.

    Override what you care for, `def` or `async def`. A plain method is called at once, on whichever thread logged;
    an async one receives its records in order when the destinations run, after the callbacks of the event.
    With a `send_records`, they return what there is to send, as the hooks do. With `run_blocking`, the plain ones are
    called with the async ones, on the destination's thread, unless they only return what there is to send.
    A destination that fails never stops a run: `on_error` is `"log"` unless you say otherwise.
    Of several ranks that train together only rank 0 has destinations, but for those with `every_rank = True`.
    """

    on_error: OnError = "log"
    every_rank: bool = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> Any:
        """Record metrics, name to value, of a step (the number of the batch)."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> Any:
        """Record what configures the run."""

    def log_traces(self, traces: Traces, step: int | None = None) -> Any:
        """Record what the engine did with its algorithms on one event."""

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> Any:
        """Record a table of `rows`, each as long as `columns`."""

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> Any:
        """Record one image, (C, H, W) or (H, W, C) if `channels_last`, or a batch of them."""

    def upload_file(
        self, state: Any, remote_file_name: str, file_path: str | PathLike[str], *, overwrite: bool = False
    ) -> Any:
        """Store a file under a remote name."""


log: logging.Logger = logging.getLogger("eventbus_engine")

_METHODS = ("log_metrics", "log_hyperparameters", "log_traces", "log_table", "log_images", "upload_file")


def is_destination(candidate: Any) -> bool:
    """Whether a callback takes log records: a LoggerDestination, or anything that really has one of its methods."""
    target = unwrap(candidate)
    return isinstance(target, LoggerDestination) or any(
        inspect.getattr_static(target, method, MISSING) is not MISSING for method in _METHODS
    )


def _as_it_is(argument: Any) -> Any:
    """A copy of a dict or list: the caller may go on changing it, but what was logged is what it held then."""
    if isinstance(argument, Mapping):
        return dict(argument)
    return list(argument) if isinstance(argument, list) else argument


def _identity(result: Any) -> Any:
    return result


def _raise(error: Exception) -> None:
    raise error


class _Made:
    """A record that has been made: there is nothing to do but return it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


class Pending(deque[Callable[[], Any]]):
    """The records that wait for a destination, in order, each a call to make and await.

    Attributes:
        used: whether anything has been logged for the destination, be it by a plain method, which leaves nothing here.
        lost: records that were taken out and that the destination failed on, or was cancelled over.
        delivering: while somebody is delivering them, what tells that it is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False
        self.lost = 0
        self.delivering: anyio.Event | None = None

    def take(self) -> Pending:
        """Take all of them out."""
        taken = Pending()
        taken.extend(self)
        self.clear()
        return taken

    def take_made(self) -> list[Any] | None:
        """Take out what they come to, if all of them are made already, so that no code of the destination's runs."""
        values = [record.value for record in self if isinstance(record, _Made)]
        if len(values) < len(self):
            return None
        self.clear()
        return values


class _Port:
    """The logger's end of one destination: which methods it has, and the records waiting for its async ones."""

    __slots__ = ("destination", "methods", "name", "pending", "sends")

    def __init__(self, destination: Any) -> None:
        self.destination = destination
        self.name = name_of(destination)
        self.pending = Pending()
        target = unwrap(destination)
        # By method: what to call, and whether only when the destinations run.
        self.methods: dict[str, tuple[Callable[..., Any], bool]] = {}
        self.sends: bool = has_sender(destination)
        # What only makes a record makes it of the values as they are when they are logged.
        blocking = read_option(destination, "run_blocking", False) is True and not self.sends
        for method in _METHODS:
            bound = own_method(target, method, LoggerDestination)
            if bound is not None:
                self.methods[method] = bound, is_async_callable(bound) or blocking


class Logger:
    """Hands log records to every destination. Each method is a plain call that returns at once.

    A failure of a destination never reaches the caller: it is reported on the `eventbus_engine` logger of the
    standard library, or raised at the destination stage of the event where the destination's `on_error` is `"raise"`.

    Args:
        state: the state whose `timestamp.batch` is the default step. May be None.
        destinations: `LoggerDestination`s, or objects with the same methods.

    Attributes:
        destinations: where records go, in order; `add_destination` adds to them.
        version: changes with them.
        staged: whether it belongs to an engine, which hands on what waits for async destinations.
    """

    def __init__(self, state: Any = None, destinations: Iterable[Any] = ()) -> None:
        self._state = state
        self._ports: dict[int, _Port] = {}
        self.destinations: list[Any] = []
        self.version: int = 0
        self.staged: bool = False
        for destination in destinations:
            self.add_destination(destination)

    def add_destination(self, destination: Any) -> None:
        """Send the records from now on to this destination too; once is enough."""
        if not any(known is destination for known in self.destinations):
            self.version += 1
            self.destinations.append(destination)
            self._ports.setdefault(id(destination), _Port(destination))

    def follow(self, callbacks: Iterable[Any], before: Iterable[Any] = ()) -> None:
        """Log to the destinations among these callbacks, and to none that was among those before and has left.

        What was logged for one that leaves is still delivered to it when the engine closes.
        """
        staying = list(callbacks)
        left = {id(callback) for callback in before} - {id(callback) for callback in staying}
        self.version += bool(left)
        # In place: loggers bound to other states share the list.
        self.destinations[:] = [destination for destination in self.destinations if id(destination) not in left]
        for callback in staying:
            if is_destination(callback):
                self.add_destination(callback)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics, name to value. `step` defaults to the state's batch."""
        self._send("log_metrics", metrics, step=self._step(step))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log what configures the run."""
        self._send("log_hyperparameters", hyperparameters)

    def log_traces(self, traces: Traces, step: int | None = None) -> None:
        """Log what the engine did on one event. The engine calls this itself."""
        self._send("log_traces", traces, step=self._step(step))

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table of `rows`, each as long as `columns`."""
        self._send("log_table", columns, rows, name, step=self._step(step))

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Log one image, (C, H, W) or (H, W, C) if `channels_last`, or a batch of them."""
        self._send(
            "log_images",
            images,
            name,
            channels_last,
            step=self._step(step),
            masks=masks,
            mask_class_labels=mask_class_labels,
            use_table=use_table,
        )

    def upload_file(self, remote_file_name: str, file_path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Store a file under a remote name with every destination that takes files."""
        self._send("upload_file", self._state, remote_file_name, file_path, overwrite=overwrite)

    def takes(self, method: str) -> bool:
        """Whether any destination has this `log_*` method, so that the caller may spare itself the work."""
        return any(method in self._ports[id(destination)].methods for destination in self.destinations)

    def bound_to(self, state: Any) -> Logger:
        """A logger with the same destinations whose default step is another state's, for a background snapshot."""
        other = Logger.__new__(Logger)
        other._state, other._ports, other.destinations, other.version = state, self._ports, self.destinations, -1
        other.staged = self.staged
        return other

    def _step(self, step: int | None) -> int | None:
        return batches_done(self._state) if step is None else step

    def _send(self, method: str, *args: Any, **kwargs: Any) -> None:
        for destination in tuple(self.destinations):
            port = self._ports[id(destination)]
            found = port.methods.get(method)
            if found is None:
                continue
            port.pending.used = True
            function, later = found
            if later:
                kept = [_as_it_is(argument) for argument in args]
                port.pending.append(functools.partial(function, *kept, **kwargs))
                continue
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                self._keep_failure(port, method, error)
            else:
                if isinstance(result, Awaitable):
                    port.pending.append(functools.partial(_identity, result))
                elif port.sends and result is not None:
                    port.pending.append(_Made(result))

    def _keep_failure(self, port: _Port, method: str, error: Exception) -> None:
        """Leave the failure to the destination stage, where the destination's `on_error` decides about it."""
        add_note(error, f"in destination {port.name}, {method}")
        if self.staged:
            port.pending.append(functools.partial(_raise, error))
        else:
            log.error("destination %s failed in %s", port.name, method, exc_info=error)

    def pending(self, destination: Any) -> Pending | None:
        """The records waiting for an async destination, each a call to make and await; None if it is not ours."""
        port = self._ports.get(id(destination))
        return port.pending if port is not None else None
