"""The option `spool` of callbacks: `check_spool`."""

from __future__ import annotations

import os

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.spool.store import Spool

__all__ = ["check_spool"]


def check_spool(spool: object, described: str, *, has_sender: bool) -> None:
    """Refuse what is no spool, or a spool for a callback that sends nothing from it.

    Raises:
        ConfigurationError: naming the callback.
    """
    if not isinstance(spool, str | os.PathLike | Spool):
        raise ConfigurationError(f"{described} has spool={spool!r}; give a path, a Spool, or None")
    if not has_sender:
        raise ConfigurationError(
            f"{described} has a spool, but nothing that sends what is in it; give it a method "
            f"send_records(records, logger), and let its hooks return what there is to send"
        )
