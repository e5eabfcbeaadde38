"""What a checkpoint holds, whoever stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Contents"]


@dataclass(frozen=True)
class Contents:
    """The parts of a run that a checkpoint keeps.

    Attributes:
        tensors: by dotted names; on any device, of a rank's own shard or the whole: `model.fc.weight`.
        values: what is the same on every rank, in the types that `values.encode` keeps; tensors anywhere in it are
            kept with the others.
        rank_values: what is this rank's own.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    rank_values: Mapping[str, Any] = field(default_factory=dict)
