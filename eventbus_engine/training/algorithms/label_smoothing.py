"""Label smoothing: train towards targets that are a little less certain than the labels."""

from __future__ import annotations

import torch

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import BatchError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_range, dense_targets, single_tensor
from eventbus_engine.training.data import BatchKey
from eventbus_engine.training.state import State

__all__ = ["LabelSmoothing", "smooth_labels"]


def smooth_labels(logits: torch.Tensor, target: torch.Tensor, smoothing: float = 0.1) -> torch.Tensor:
    """Move the targets a part of the way to the uniform distribution over the classes.

    Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision" (https://arxiv.org/abs/1512.00567),
    section 7: `q' = (1 - smoothing) * q + smoothing / C` for C classes.

    Args:
        logits: `(N, C, ...)`; only the shape, the precision and the device are read.
        target: class indices `(N, ...)` in `0..C-1`, or class probabilities in the shape of `logits`.
        smoothing: in `[0, 1]`: 0 leaves the targets as they are, 1 makes them uniform. Default 0.1.

    Returns:
        A new floating-point tensor in the shape of `logits`; the loss has to accept class probabilities, as
        `torch.nn.functional.cross_entropy` does.

    Raises:
        ConfigurationError: `smoothing` is out of range.
        BatchError: the targets do not fit the logits.
    """
    check_range("smooth_labels", "smoothing", smoothing, 0, 1)
    if logits.ndim < 2:
        raise BatchError(f"smooth_labels needs logits of shape (N, C, ...), got {tuple(logits.shape)}")
    return (1.0 - smoothing) * dense_targets(logits, target) + smoothing / logits.shape[1]


class LabelSmoothing(Algorithm[State, Event]):
    """Smooth the labels for the loss alone (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567).

    BEFORE_LOSS puts smoothed targets into the batch; AFTER_LOSS puts the labels back, the very same tensor, so that
    metrics and callbacks see what the data loader gave. It goes with `MixUp`, in either order of registration: the
    engine has it smooth the mixed targets, which is, smoothing being linear, the mixture of the smoothed ones.

    Do not combine it with a loss that smooths by itself (`cross_entropy(label_smoothing=...)`): the labels would be
    smoothed twice; nor with a loss that takes class indices only, such as `nll_loss`.

    Args:
        smoothing: strength in `[0, 1]`. Default 0.1.
        target_key: where the targets lie in the batch: an index, a name, or a pair `(get, set)`. Default 1.

    Raises:
        ConfigurationError: `smoothing` is out of range.
    """

    def __init__(self, smoothing: float = 0.1, target_key: BatchKey = 1) -> None:
        check_range("LabelSmoothing", "smoothing", smoothing, 0, 1)
        self.smoothing = smoothing
        self.target_key = target_key
        self.original_labels: torch.Tensor | None = None
        """The labels to put back: set from BEFORE_LOSS to AFTER_LOSS, None otherwise."""

    def match(self, event: Event, state: State) -> bool:
        """Run on BEFORE_LOSS and AFTER_LOSS."""
        return event in (Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Smooth the targets of the microbatch, or put the labels back.

        Raises:
            BatchError: outputs or targets are not single tensors, or do not fit each other.
        """
        if event == Event.BEFORE_LOSS:
            labels = single_tensor(state.batch_get_item(self.target_key), "LabelSmoothing", "the target")
            outputs = single_tensor(state.outputs, "LabelSmoothing", "the model's output")
            state.batch_set_item(self.target_key, smooth_labels(outputs, labels, self.smoothing))
            self.original_labels = labels
        elif self.original_labels is not None:
            state.batch_set_item(self.target_key, self.original_labels)
            self.original_labels = None
