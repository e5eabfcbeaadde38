"""Sequence length warm-up: begin the training of a language model with short sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import check_range, elapsed_fraction
from eventbus_engine.training.data import describe, set_item
from eventbus_engine.training.state import State

__all__ = ["SeqLengthWarmup", "set_batch_sequence_length"]


def set_batch_sequence_length(
    batch: Any, curr_seq_len: int, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> Any:
    """Cut the sequences of a batch to a length.

    The batch is a mapping with `input_ids` `(N, L)`, and every other tensor in it of that shape (`attention_mask`,
    `labels`) is cut with them; or a pair of inputs `(N, L)` and targets `(N, L)`. Sequences that are no longer than
    `curr_seq_len` stay as they are.

    Args:
        batch: the batch; it is not changed.
        curr_seq_len: the length to cut to, in tokens, 1 at least.
        truncate: drop what is beyond that length. Without, the rest makes further sequences, `(N * (L // length),
            length)`, and only what is left at the end of each is dropped. Default True.
        preserve_end_of_sequence: keep the last token of each sequence, the last one that `attention_mask` does not mask
            (without one, the last of all): it takes the place of the last token before the cut. Only with `truncate`.
            Default False.

    Returns:
        A batch of the same kind, with tensors `(N, curr_seq_len)`, or `(N * (L // curr_seq_len), curr_seq_len)`.

    Raises:
        ConfigurationError: an argument does not fit.
        BatchError: the batch is neither; or it holds tensors of one row per sample that are no sequences, for which
            there would be too few rows without `truncate`.
    """
    _check_length("set_batch_sequence_length", "curr_seq_len", curr_seq_len)
    _check_mode("set_batch_sequence_length", truncate, preserve_end_of_sequence)
    sequences = _sequences(batch)
    samples, length = sequences.shape
    if curr_seq_len >= length:
        return batch
    items: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    ends = _last_positions(items.get("attention_mask"), sequences) if preserve_end_of_sequence else None
    for key, item in items.items():
        if not isinstance(item, Tensor):
            continue
        if item.shape == sequences.shape:
            batch = set_item(batch, key, _cut(item, curr_seq_len, truncate, ends))
        elif not truncate and item.ndim and len(item) == samples:
            raise BatchError(
                f"set_batch_sequence_length: with truncate=False the rows become more than {samples}, but {key!r} of "
                f"{describe(batch)} has one row for each of those; leave it out of the batch, or truncate"
            )
    return batch


def _sequences(batch: Any) -> Tensor:
    """The tensor `(N, L)` whose shape tells the sequences of the batch from what else is in it."""
    sequences = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        sequences = batch[0] if batch[0].shape == batch[1].shape else None
    if not isinstance(sequences, Tensor) or sequences.ndim != 2:
        raise BatchError(
            f"set_batch_sequence_length needs sequences, got {describe(batch)}; yield mappings with 'input_ids' of "
            f"shape (N, L), or pairs of inputs (N, L) and targets (N, L)"
        )
    return sequences


def _last_positions(mask: Any, like: Tensor) -> Tensor:
    """The position of the last token of each sequence that is not masked, `(N,)`."""
    positions = torch.arange(like.shape[1], device=like.device).expand_as(like)
    if not isinstance(mask, Tensor):
        return positions[:, -1]
    if mask.shape != like.shape:
        raise BatchError(
            f"set_batch_sequence_length: preserve_end_of_sequence needs an attention_mask of the shape of input_ids, "
            f"{tuple(like.shape)}, got {tuple(mask.shape)}"
        )
    return (positions * (mask != 0)).amax(dim=1)


def _cut(sequences: Tensor, length: int, truncate: bool, ends: Tensor | None) -> Tensor:
    if not truncate:
        whole = sequences.shape[1] // length * length
        return sequences[:, :whole].reshape(-1, length)
    if ends is None:
        return sequences[:, :length]
    ends = ends.to(sequences.device).unsqueeze(1)
    last = torch.where(ends >= length, sequences.gather(1, ends), sequences[:, length - 1 : length])
    return torch.cat([sequences[:, : length - 1], last], dim=1)


def _check_length(owner: str, argument: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{owner}: {argument}={value!r} has to be a whole number of tokens, 1 or more")


def _check_mode(owner: str, truncate: bool, preserve_end_of_sequence: bool) -> None:
    if preserve_end_of_sequence and not truncate:
        raise ConfigurationError(
            f"{owner}: preserve_end_of_sequence=True goes with truncate=True only; without truncating, the end of a "
            f"sequence stays in its last part"
        )


class SeqLengthWarmup(Algorithm[State, Event]):
    """Train on short sequences first, and on longer ones as the training goes on, for stability and speed.

    Li et al. 2022, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models"
    (https://arxiv.org/abs/2108.06084). Runs on AFTER_DATALOADER, on mappings with `input_ids` `(N, L)` or pairs of
    inputs and targets `(N, L)`; see `set_batch_sequence_length`. The length grows linearly from `min_seq_length` to
    `max_seq_length` over the fraction `duration` of training, in steps of `step_size`, and stays there: what is longer
    than `max_seq_length` is cut to the end of training. Evaluation sees whole sequences. Logs
    `seq_length_warmup/sequence_length`.

    Samples and tokens are counted as the loader gives them, before they are cut. With `truncate=False` a batch gets
    more and shorter rows, and they are what is cut into microbatches. Do not combine it with another algorithm that
    changes the length of sequences, nor, with `truncate=False`, with one that has paired the rows before it. A mask
    `(N, 1, L, L)` is not cut; let the model make it from `attention_mask`.

    Args:
        duration: the fraction of training after which the length is `max_seq_length`, in `[0, 1]`. Default 0.3.
        min_seq_length: the length to begin with, in tokens. Default 8.
        max_seq_length: the length to end with, at least `min_seq_length`. Default 1024.
        step_size: by how many tokens at a time the length grows. Default 8, which suits the matrix units of
            accelerators.
        truncate: drop what is too long; without, it makes further sequences. Default True.
        preserve_end_of_sequence: keep the last token of each sequence; with `truncate` only. Default False.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
    ) -> None:
        check_range("SeqLengthWarmup", "duration", duration, 0, 1)
        _check_length("SeqLengthWarmup", "min_seq_length", min_seq_length)
        _check_length("SeqLengthWarmup", "max_seq_length", max_seq_length)
        _check_length("SeqLengthWarmup", "step_size", step_size)
        if min_seq_length > max_seq_length:
            raise ConfigurationError(
                f"SeqLengthWarmup: min_seq_length={min_seq_length} is more than max_seq_length={max_seq_length}; begin "
                f"with the shorter one"
            )
        _check_mode("SeqLengthWarmup", truncate, preserve_end_of_sequence)
        self.duration: float = duration
        self.min_seq_length: int = min_seq_length
        self.max_seq_length: int = max_seq_length
        self.step_size: int = step_size
        self.truncate: bool = truncate
        self.preserve_end_of_sequence: bool = preserve_end_of_sequence

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_DATALOADER."""
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Cut the batch to the length that is due by now.

        Raises:
            ConfigurationError: the run has no `max_duration`.
            BatchError: the batch holds no sequences.
        """
        length = self._length(elapsed_fraction(state, "SeqLengthWarmup"))
        state.batch = set_batch_sequence_length(state.batch, length, self.truncate, self.preserve_end_of_sequence)
        logger.log_metrics({"seq_length_warmup/sequence_length": length})

    def _length(self, elapsed: float) -> int:
        if elapsed >= self.duration:
            return self.max_seq_length
        grown = (self.max_seq_length - self.min_seq_length) * elapsed / self.duration
        return self.min_seq_length + int(grown / self.step_size) * self.step_size
