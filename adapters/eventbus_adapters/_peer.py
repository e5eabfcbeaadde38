"""The frameworks that adapters are for: which are installed, in a version that goes with the adapter."""

from __future__ import annotations

import re
from importlib import metadata

from eventbus_engine.errors import ConfigurationError

__all__ = ["check_version", "missing"]


def missing(peer: str, extra: str) -> ConfigurationError:
    """The error for a peer that cannot be imported; what the import raised belongs into its cause."""
    return ConfigurationError(
        f"eventbus_adapters.{extra} is for {peer}, which cannot be imported here; install it with: "
        f"pip install 'eventbus-engine[{extra}]'"
    )


def check_version(peer: str, extra: str, low: str, high: str | None = None, *, installed: str | None = None) -> None:
    """Refuse another version of a peer than those from `low` up to, not including, `high`.

    Args:
        peer: the name that it is installed by.
        extra: that brings it.
        low: the oldest version.
        high: the first that is too new; by default none is.
        installed: the version that is there, where the peer says so itself; by default that of its package.

    Raises:
        ConfigurationError: naming the version and those that it may be.
    """
    version = metadata.version(peer) if installed is None else installed
    found = _numbers(version)
    if found < _numbers(low) or (high is not None and found >= _numbers(high)):
        raise ConfigurationError(
            f"{peer} {version or 'of no version'} is installed, but eventbus_adapters.{extra} goes with {low} "
            f"{'or newer' if high is None else f'up to, not including, {high}'}; install one with: "
            f"pip install 'eventbus-engine[{extra}]'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """`5.23.0.dev0` as (5, 23, 0): what comes after the numbers makes no difference here."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in leading[0].split(".")) if leading else ()
