"""Composer itself: imported without its signal handlers, of a version that fits, and its events beside ours."""

from __future__ import annotations

import importlib
import signal
import threading
from typing import Any

from eventbus_adapters import _peer
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event

__all__ = ["OURS", "SUPPORTED", "THEIRS", "composer", "load_composer"]

SUPPORTED = "0.32", "0.33"
"""The versions that the adapter is tested with: from the first up to, not including, the second."""


def load_composer() -> Any:
    """Import Composer, and leave SIGINT and SIGTERM as they were: its engine takes both as it is imported.

    Where a program has imported Composer before, its handlers stay.

    Raises:
        ConfigurationError: Composer is not there, cannot be imported, or is of another version.
    """
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        peer = importlib.import_module("composer")
    except Exception as error:
        raise ConfigurationError(
            f"the composer adapter needs MosaicML Composer {SUPPORTED[0]}, which cannot be imported here "
            f"({type(error).__name__}: {error}); pip install 'eventbus-engine[composer]'"
        ) from error
    finally:
        for number, handler in handlers.items():
            if main and handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    _peer.check_version("mosaicml", "composer", *SUPPORTED, installed=str(getattr(peer, "__version__", "")))
    return peer


composer: Any = load_composer()

THEIRS: dict[Event, Any] = {event: composer.core.Event(event.value) for event in Event}
"""Composer's event by ours. Its members equal no strings without a warning, so its objects have to get these."""

OURS: dict[Any, Event] = {theirs: ours for ours, theirs in THEIRS.items()}
