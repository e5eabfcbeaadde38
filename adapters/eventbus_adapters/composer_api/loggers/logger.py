"""`composer.loggers.logger`: the package's `Logger` with Composer's signatures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eventbus_adapters.composer_api.loggers.logger_destination import LoggerDestination
from eventbus_engine import logger as ours
from eventbus_engine.trace import Trace

__all__ = ["Logger"]

_RANKS = {"rank": "0", "local_rank": "0", "world_size": "1", "local_world_size": "1", "node_rank": "0"}
"""What the names of files may contain, each read from the environment, with its value in a run of one process."""


class Logger(ours.Logger):
    """Hands log records to every destination, at once and in order.

    Args:
        state: whose batch is the default step, and whose `run_name` goes into the names of files.
        destinations: one destination, several, or None.
    """

    def __init__(self, state: Any, destinations: Any = None) -> None:
        if destinations is None:
            destinations = ()
        super().__init__(state, destinations if isinstance(destinations, Sequence) else (destinations,))

    def add_destination(self, destination: Any) -> None:
        """Send the records from now on to this destination too, in Composer's way unless it is one of the package's."""
        super().add_destination(destination)
        if isinstance(destination, ours.LoggerDestination) and not isinstance(destination, LoggerDestination):
            return
        methods = self._ports[id(destination)].methods
        for method, (function, later) in methods.items():
            adapt = _CALLS.get(method)
            if adapt is not None:
                methods[method] = adapt(function), later

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Log what configures the run."""
        super().log_hyperparameters(parameters)

    def upload_file(self, remote_file_name: str, file_path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Store a file with every destination that takes files.

        Args:
            remote_file_name: under which name; `{run_name}`, `{rank}`, `{local_rank}`, `{world_size}`,
                `{local_world_size}` and `{node_rank}` in it are replaced.
            file_path: where it is, likewise.
            overwrite: whether to replace one that is there.
        """
        path = Path(self._fill_in(os.fspath(file_path)))
        super().upload_file(self._fill_in(remote_file_name), path, overwrite=overwrite)

    def has_file_upload_destination(self) -> bool:
        """Whether any destination takes files."""
        return any(getattr(each, "can_upload_files", bool)() for each in self.destinations)

    def _fill_in(self, name: str) -> str:
        values = {key: os.environ.get(key.upper(), alone) for key, alone in _RANKS.items()}
        values["run_name"] = str(getattr(self._state, "run_name", ""))
        for key, value in values.items():  # one by one: what is no such name stays as it is
            name = name.replace(f"{{{key}}}", value)
        return name


def _with_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """The step by position."""
    return lambda *arguments, step: function(*arguments, step)


def _as_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Traces as Composer logs them, and no step."""
    return lambda traces, step: function({_key(key, trace): _number(trace) for key, trace in traces.items()})


def _images(function: Callable[..., Any]) -> Callable[..., Any]:
    """Everything by position."""

    def call(images: Any, name: str, channels_last: bool, *, step: int | None, **others: Any) -> Any:
        return function(images, name, channels_last, step, *others.values())

    return call


def _file(function: Callable[..., Any]) -> Callable[..., Any]:
    """Everything by name."""
    return lambda state, remote_file_name, file_path, overwrite: function(
        state=state, remote_file_name=remote_file_name, file_path=file_path, overwrite=overwrite
    )


def _key(key: str, trace: Any) -> str:
    if not isinstance(trace, Trace) or trace.event is None:
        return key
    return f"algorithm_traces/{trace.name}/{type(trace.event).__name__}.{trace.event.name}"


def _number(trace: Any) -> Any:
    return int(trace.run) if isinstance(trace, Trace) else trace


_CALLS = {
    "log_metrics": _with_step,
    "log_table": _with_step,
    "log_traces": _as_numbers,
    "log_images": _images,
    "upload_file": _file,
}
"""How Composer calls the methods of a destination, where that is not how it is done here."""
