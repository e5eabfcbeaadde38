"""What the adapter takes of ignite."""

from __future__ import annotations

import warnings

from eventbus_adapters import _peer

try:
    with warnings.catch_warnings():
        # Not ignite's own: it imports what is deprecated of torch.
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        from ignite.engine import Engine, Events
except ImportError as error:
    raise _peer.missing("pytorch-ignite", "ignite") from error

__all__ = ["Engine", "Events", "check_version"]


def check_version() -> None:
    """Refuse versions that this has not been tested with.

    Raises:
        ConfigurationError: naming the version.
    """
    _peer.check_version("pytorch-ignite", "ignite", "0.5.5", "0.6")
