"""Lightning under the name that it is installed by: `pytorch_lightning`, or `lightning.pytorch`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from eventbus_adapters import _peer

__all__ = ["find_peer"]

NAMES = ("pytorch_lightning", "lightning.pytorch")
VERSIONS = "2.5", "3"
"""From the first up to, not including, the second."""


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
        _peer.check_version(name, "lightning", *VERSIONS, installed=str(getattr(peer, "__version__", "")))
        return peer
    raise _peer.missing("Lightning, as pytorch_lightning or lightning,", "lightning")
