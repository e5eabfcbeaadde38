"""`composer.core.event`: the vocabulary of training is the package's own."""

from __future__ import annotations

from eventbus_engine.event import Event

__all__ = ["Event"]
