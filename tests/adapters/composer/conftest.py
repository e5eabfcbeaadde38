"""What Composer needs to be imported: two of torchvision's operators, declared.

torchvision comes as a CUDA wheel only. Beside a torch without CUDA its library does not load, and its import then fails
as it says what these operators do. Nothing here calls them.
"""

from __future__ import annotations

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")

if torch.version.cuda is None:
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
