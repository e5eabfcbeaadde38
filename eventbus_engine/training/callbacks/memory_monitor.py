"""Memory: what a run takes, on its device or in its process."""

from __future__ import annotations

import difflib
import logging
import mmap
import sys
from collections.abc import Mapping
from typing import Any

import torch

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import Logger
from eventbus_engine.training.state import State

__all__ = ["MemoryMonitor"]

log: logging.Logger = logging.getLogger("eventbus_engine")

MEMORY_KEYS: Mapping[str, str] = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}
"""What is logged of `torch.cuda.memory_stats`, and under which name."""

_GIGABYTE = 1e9

_STATM = "/proc/self/statm"


class MemoryMonitor(Callback[State]):
    """Log the memory in use after every batch, in GB (10^9 bytes).

    On CUDA that is what the caching allocator says of the run's device, as `memory/peak_allocated_mem` and so on;
    counts, such as `memory/alloc_retries`, are logged as they are. The figures are the host's own: asking for them
    waits for nothing on the device. Peaks are since the start of the process, or the last
    `torch.cuda.reset_peak_memory_stats`.

    Elsewhere it is the resident memory of the process: `memory/current_resident_mem`, where there is a `/proc`, and
    `memory/peak_resident_mem`, where there is a `getrusage`. Where there is neither, it says so once in the log.

    Args:
        memory_keys: which figures of `torch.cuda.memory_stats` to log, and the name of each behind `memory/`. By
            default allocated, active, inactive and reserved bytes, now and at the peak, and the allocator's retries.

    Raises:
        ConfigurationError: the keys are no mapping of names to names.
    """

    def __init__(self, memory_keys: Mapping[str, str] | None = None) -> None:
        super().__init__()
        if memory_keys is not None and not _are_names(memory_keys):
            raise ConfigurationError(
                f"MemoryMonitor: memory_keys={memory_keys!r} has to map names in torch.cuda.memory_stats() to names to "
                f"log them by, such as {{'allocated_bytes.all.peak': 'peak_allocated_mem'}}"
            )
        self.memory_keys: dict[str, str] = dict(MEMORY_KEYS if memory_keys is None else memory_keys)
        self._reported = False

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log what there is.

        Raises:
            ConfigurationError: the allocator has no figure of a name in `memory_keys`.
        """
        if state.device.type == "cuda":
            figures = _read_allocator(torch.cuda.memory_stats(state.device), self.memory_keys)
        else:
            figures = _read_process()
        if figures:
            logger.log_metrics({f"memory/{name}": value for name, value in figures.items()})
        elif not self._reported:
            self._reported = True
            log.warning(
                "MemoryMonitor logs nothing: there is no memory to ask for on %s, device %s", sys.platform, state.device
            )


def _are_names(given: Any) -> bool:
    return (
        isinstance(given, Mapping)
        and bool(given)
        and all(isinstance(item, str) and item for pair in given.items() for item in pair)
    )


def _read_allocator(stats: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    """The figures of the allocator by the names to log them by; bytes in GB."""
    figures: dict[str, float] = {}
    for key, name in keys.items():
        if key not in stats:
            nearest = ", ".join(difflib.get_close_matches(key, stats)) or "what is in torch.cuda.memory_stats()"
            raise ConfigurationError(f"MemoryMonitor: the CUDA allocator has no figure {key!r}; give {nearest}")
        figures[name] = stats[key] / _GIGABYTE if "bytes" in key else stats[key]
    return figures


def _read_process() -> dict[str, float]:
    """The resident memory of the process, in GB: now and at its peak, as far as the platform says."""
    figures: dict[str, float] = {}
    try:
        with open(_STATM, "rb") as file:
            figures["current_resident_mem"] = int(file.read().split()[1]) * mmap.PAGESIZE / _GIGABYTE
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return figures
    unit = 1 if sys.platform == "darwin" else 1024
    figures["peak_resident_mem"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIGABYTE
    return figures
