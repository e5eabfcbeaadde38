"""Lightning under the name that it is installed by: `pytorch_lightning`, or `lightning.pytorch`."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

from eventbus_engine.errors import ConfigurationError

__all__ = ["find_peer"]

NAMES = ("pytorch_lightning", "lightning.pytorch")
OLDEST, BEFORE = (2, 5), (3, 0)


def find_peer() -> ModuleType:
    """Import Lightning: what the program has imported already, or what there is.

    Raises:
        ConfigurationError: it is not installed, or in a version that this adapter does not go with.
    """
    for name in sorted(NAMES, key=lambda name: name not in sys.modules):
        try:
            peer = importlib.import_module(name)
        except ImportError:
            continue
        _check_version(name, str(getattr(peer, "__version__", "")))
        return peer
    raise ConfigurationError(
        "eventbus_adapters.lightning needs Lightning, which is not installed: pip install 'eventbus-engine[lightning]' "
        "for pytorch_lightning, or pip install lightning"
    )


def _check_version(name: str, version: str) -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found < BEFORE:
        raise ConfigurationError(
            f"eventbus_adapters.lightning goes with Lightning {'.'.join(map(str, OLDEST))} up to, not including, "
            f"{'.'.join(map(str, BEFORE))}, and {name} is {version or 'of no version'}: "
            f"pip install 'eventbus-engine[lightning]'"
        )
