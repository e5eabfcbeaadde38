"""`composer.core.passes`: the package's own, among them both names of the one that puts layer norms last."""

from __future__ import annotations

from eventbus_engine.passes import (
    AlgorithmPass,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)

__all__ = [
    "AlgorithmPass",
    "set_filo_order",
    "sort_fused_layernorm_last",
    "sort_low_precision_layernorm_last",
    "sort_selective_backprop_first",
    "sort_to_back",
    "sort_to_front",
    "warn_if_multiple_loss_interpolation",
]

sort_low_precision_layernorm_last = sort_fused_layernorm_last
"""What Composer has called it since it called that algorithm so. It holds both classes last."""
