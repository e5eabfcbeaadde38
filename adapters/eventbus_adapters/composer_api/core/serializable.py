"""`composer.core.serializable`: what algorithms and callbacks have for checkpoints."""

from __future__ import annotations

from typing import Any

__all__ = ["Serializable"]


class Serializable:
    """Something whose state goes into checkpoints. Override both methods."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep; nothing by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""


class NamedByClass:
    """Something that goes by the name of its class, `MixUp`, as Composer's do, unless it sets a `name` of its own."""

    name: str | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__
