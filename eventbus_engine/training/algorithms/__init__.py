"""Algorithms that change how a model trains: for each a pure function and a class beside it."""

from eventbus_engine.training.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool, apply_blurpool, blur_2d
from eventbus_engine.training.algorithms.cutmix import CutMix, cutmix_batch
from eventbus_engine.training.algorithms.ema import EMA, compute_ema
from eventbus_engine.training.algorithms.fused_layernorm import AutocastLayerNorm, FusedLayerNorm, apply_fused_layernorm
from eventbus_engine.training.algorithms.gated_linear_units import (
    GatedLinear,
    GatedLinearUnits,
    apply_gated_linear_units,
)
from eventbus_engine.training.algorithms.gradient_clipping import GradientClipping, apply_gradient_clipping
from eventbus_engine.training.algorithms.gradient_penalty import GradientPenalty, gradient_penalty
from eventbus_engine.training.algorithms.label_smoothing import LabelSmoothing, smooth_labels
from eventbus_engine.training.algorithms.layer_freezing import LayerFreezing, freeze_layers
from eventbus_engine.training.algorithms.mixup import MixUp, mixup_batch
from eventbus_engine.training.algorithms.progressive_resizing import ProgressiveResizing, resize_batch
from eventbus_engine.training.algorithms.sam import SAM, perturb, restore
from eventbus_engine.training.algorithms.selective_backprop import (
    SelectiveBackprop,
    select_using_loss,
    should_selective_backprop,
)
from eventbus_engine.training.algorithms.seq_length_warmup import SeqLengthWarmup, set_batch_sequence_length

__all__ = [
    "AutocastLayerNorm",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool",
    "CutMix",
    "EMA",
    "FusedLayerNorm",
    "GatedLinear",
    "GatedLinearUnits",
    "GradientClipping",
    "GradientPenalty",
    "LabelSmoothing",
    "LayerFreezing",
    "MixUp",
    "ProgressiveResizing",
    "SAM",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "apply_blurpool",
    "apply_fused_layernorm",
    "apply_gated_linear_units",
    "apply_gradient_clipping",
    "blur_2d",
    "compute_ema",
    "cutmix_batch",
    "freeze_layers",
    "gradient_penalty",
    "mixup_batch",
    "perturb",
    "resize_batch",
    "restore",
    "select_using_loss",
    "set_batch_sequence_length",
    "should_selective_backprop",
    "smooth_labels",
]
