"""Selective backprop: spend the backward pass on the samples with the largest losses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import BatchError, ConfigurationError, HandlerTypeError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import batch_generator, check_range, elapsed_fraction, single_tensor
from eventbus_engine.training.data import BatchKey, set_item, split
from eventbus_engine.training.model import forward
from eventbus_engine.training.state import State

__all__ = ["SelectiveBackprop", "select_using_loss", "should_selective_backprop"]

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Whether this batch is one to prune.

    Args:
        current_duration: the fraction of training that is over, in `[0, 1]`.
        batch_idx: the batch's number in its epoch, counted from 0.
        start: the fraction of training from which to prune, in `[0, 1]`; the easy samples should be learnt by then.
            Default 0.5.
        end: the fraction from which not to prune any more, in `[start, 1]`. Default 0.9.
        interrupt: every how many batches to leave one whole, which keeps the training convergent: 2 prunes every other
            batch, 1 none, 0 all of them. Default 2.

    Raises:
        ConfigurationError: `start`, `end` or `interrupt` is out of range.
    """
    _check_schedule("should_selective_backprop", start, end, interrupt)
    return start <= current_duration < end and (interrupt == 0 or (batch_idx + 1) % interrupt != 0)


def select_using_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    model: Callable[[torch.Tensor], Any],
    loss_fun: Callable[..., Any],
    keep: float = 0.5,
    scale_factor: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep a fraction of a batch, preferring samples with a large loss.

    Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers"
    (https://arxiv.org/abs/1910.00762): a sample is chosen with a probability that grows with its loss, as the power
    `beta` of the loss's percentile. Here the percentiles are those of the batch, `(rank + 0.5) / N`, and
    `beta = 1 / keep - 1`, for which a percentile's mean probability is `keep`; exactly `int(keep * N)` samples, and at
    least one, are then drawn with these weights, without replacement.

    The losses come from one more forward pass, without gradients. A `torch.nn.Module` runs it in eval mode and is put
    back as it was, submodule by submodule: dropout would add noise to the ranking and draw from the global generator,
    and BatchNorm would count every batch twice in its running statistics. It runs in the precision it is called in.

    Args:
        input: `(N, ...)`, one sample per row.
        target: `(N, ...)`.
        model: called with `input`, or with a smaller version of it.
        loss_fun: `(outputs, targets)` to a loss. With a keyword `reduction`, or as a module with an attribute of that
            name, it gives all N losses at once; any other is called once per sample.
        keep: the fraction of the samples to keep, in `(0, 1]`. Default 0.5. With 1 nothing is computed.
        scale_factor: factor in `(0, 1]` by which to shrink the spatial dimensions of `input` for the extra forward
            pass, which then costs less; needs an input `(N, C, ...)` with one to three of them. Default 1.
        generator: a CPU generator to draw from. Default: torch's global one.

    Returns:
        The inputs and the targets that are kept, in the order they had.

    Raises:
        ConfigurationError: `keep` or `scale_factor` is out of range, or the input has no spatial dimensions to shrink.
        HandlerTypeError: `loss_fun` is not callable.
        BatchError: there are not as many targets, or losses, as there are inputs.
    """
    _check_selection("select_using_loss", keep, scale_factor)
    if not callable(loss_fun):
        raise HandlerTypeError(f"select_using_loss: loss_fun has to be callable, got {loss_fun!r}")
    total = _count_pairs(input, target)
    count = _count_to_keep(total, keep)
    if count == total:
        return input, target
    with torch.no_grad(), _eval_mode(model):
        losses = _sample_losses(loss_fun, model(_shrink(input, scale_factor)), target, total)
    kept = _draw(losses, count, keep, generator)
    return input[kept.to(input.device)], target[kept.to(target.device)]


class SelectiveBackprop(Algorithm[State, Event]):
    """Train on the hard part of a batch only (Jiang et al. 2019, https://arxiv.org/abs/1910.00762).

    On AFTER_DATALOADER, for the batches that `should_selective_backprop` names, an extra forward pass on the training
    thread finds the losses and `select_using_loss` prunes the whole batch, before it is split into microbatches. Every
    other tensor at the top of the batch that has one row per sample (weights, ids) is pruned with it.

    It has to see the samples as the data loader gives them, so the engine runs it first, wherever it is registered:
    ahead of augmentations such as MixUp, whose mixtures it would rank otherwise. The choice is drawn from a private
    generator, seeded by the run's seed and the number of the batch.

    Do not combine it with another algorithm that drops samples by their loss, nor with a loss that compares samples of
    a batch with each other (contrastive losses): it has no loss per sample.

    Args:
        start: the fraction of training from which to prune, in `[0, 1]`. Default 0.5.
        end: the fraction from which not to prune any more, in `[start, 1]`. Default 0.9.
        keep: the fraction of a batch to keep, in `(0, 1]`; 1 turns the algorithm off. Default 0.5.
        scale_factor: factor in `(0, 1]` for the spatial size in the extra forward pass. Default 1.0.
        interrupt: every how many batches to leave one whole; 0 prunes every batch. Default 2.
        input_key: where the inputs lie in the batch: an index, a name, or a pair `(get, set)`. Default 0.
        target_key: the same for the targets. Default 1.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: float = 0.5,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        _check_schedule("SelectiveBackprop", start, end, interrupt)
        _check_selection("SelectiveBackprop", keep, scale_factor)
        self.start = start
        self.end = end
        self.keep = keep
        self.scale_factor = scale_factor
        self.interrupt = interrupt
        self.input_key = input_key
        self.target_key = target_key

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_DATALOADER, on the batches that are due.

        Raises:
            ConfigurationError: the run has no `max_duration`.
        """
        if event != Event.AFTER_DATALOADER or self.keep == 1:
            return False
        elapsed = elapsed_fraction(state, "SelectiveBackprop")
        return should_selective_backprop(
            elapsed, int(state.timestamp.batch_in_epoch), self.start, self.end, self.interrupt
        )

    async def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Prune the batch, in place of the state's own; the extra forward pass runs on the training thread.

        Raises:
            BatchError: input, target or output is not a single tensor, or they do not fit each other.
        """
        await state.compute(self._prune, state)

    def _prune(self, state: State) -> None:
        inputs = single_tensor(state.batch_get_item(self.input_key), "SelectiveBackprop", "the input")
        target = single_tensor(state.batch_get_item(self.target_key), "SelectiveBackprop", "the target")
        total = _count_pairs(inputs, target)
        count = _count_to_keep(total, self.keep)
        if count == total:
            return
        # A model that reads its batches itself has its loss from the batch too, anything else from the targets.
        loss_fun: Any = state.model.loss if state.loss_fn is None else state.loss_fn
        against = state.batch if state.loss_fn is None else target
        with torch.no_grad(), state.precision_context(), _eval_mode(state.model):
            batch = set_item(state.batch, self.input_key, _shrink(inputs, self.scale_factor))
            losses = _sample_losses(loss_fun, forward(state.model, batch, state.loss_fn), against, total)
        kept = _draw(losses, count, self.keep, batch_generator(state, "selective_backprop"))
        companions = {
            key: item
            for key, item in _top_level_items(state.batch).items()
            if isinstance(item, torch.Tensor) and item.ndim and len(item) == total
        }
        for key, item in {**companions, self.input_key: inputs, self.target_key: target}.items():
            state.batch_set_item(key, item[kept.to(item.device)])


def _count_pairs(inputs: torch.Tensor, target: torch.Tensor) -> int:
    if inputs.ndim == 0 or target.ndim == 0 or len(inputs) != len(target):
        raise BatchError(
            f"selective backprop needs as many targets as inputs, got {tuple(target.shape)} and {tuple(inputs.shape)}"
        )
    return len(inputs)


def _count_to_keep(total: int, keep: float) -> int:
    return min(total, max(1, int(keep * total)))


def _draw(losses: torch.Tensor, count: int, keep: float, generator: torch.Generator | None) -> torch.Tensor:
    """Draw `count` positions by the rank of their losses, `(N,)`; ascending, on the device of the losses."""
    ascending = torch.argsort(losses, stable=True)
    percentiles = (torch.arange(len(losses), dtype=torch.float64) + 0.5) / len(losses)
    # Drawing ranks, not samples, needs no look at the losses: the accelerator is not waited for.
    ranks = torch.multinomial(percentiles ** (1.0 / keep - 1.0), count, replacement=False, generator=generator)
    return ascending[ranks.to(ascending.device)].sort().values


def _sample_losses(loss_fun: Callable[..., Any], outputs: Any, against: Any, total: int) -> torch.Tensor:
    """One loss per sample, `(total,)`, from any loss; the mean where a sample has several (one per pixel, say).

    `against` is what the loss compares the outputs with: targets, or a batch that holds them.
    """
    if isinstance(loss_fun, nn.Module) and isinstance(getattr(loss_fun, "reduction", None), str):
        unreduced: Any = copy.copy(loss_fun)  # the user's own keeps its reduction
        unreduced.reduction = "none"
        losses = unreduced(outputs, against)
    elif _takes_reduction(loss_fun):
        losses = loss_fun(outputs, against, reduction="none")
    else:
        rows = single_tensor(outputs, "SelectiveBackprop", "the model's output")
        parts = split(against, total)
        losses = torch.stack([loss_fun(rows[i : i + 1], part).mean() for i, part in enumerate(parts)])
    losses = single_tensor(losses, "SelectiveBackprop", "the loss")
    if losses.ndim == 0 or len(losses) != total:
        raise BatchError(
            f"SelectiveBackprop needs one loss for each of the {total} samples; "
            f"with reduction='none' the loss has the shape {tuple(losses.shape)}"
        )
    return losses.reshape(total, -1).mean(dim=1)


def _takes_reduction(loss_fun: Callable[..., Any]) -> bool:
    call = loss_fun.forward if isinstance(loss_fun, nn.Module) else loss_fun
    try:
        return "reduction" in inspect.signature(call).parameters
    except ValueError:  # a builtin without a signature
        return False


def _shrink(inputs: torch.Tensor, scale_factor: float) -> torch.Tensor:
    if scale_factor == 1:
        return inputs
    if inputs.ndim not in _INTERPOLATION:
        raise ConfigurationError(
            f"select_using_loss: scale_factor={scale_factor!r} needs an input with 3, 4 or 5 dimensions, (N, C, ...), "
            f"got {tuple(inputs.shape)}; leave it at 1"
        )
    return functional.interpolate(inputs, scale_factor=scale_factor, mode=_INTERPOLATION[inputs.ndim])


@contextmanager
def _eval_mode(model: object) -> Generator[None]:
    """Put a module into eval mode, and every submodule back into the mode it was in."""
    modes = [(m, m.training) for m in model.modules()] if isinstance(model, nn.Module) else []
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _top_level_items(batch: object) -> dict[Any, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    return dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else {}


def _check_schedule(owner: str, start: float, end: float, interrupt: Any) -> None:
    check_range(owner, "start", start, 0, 1)
    check_range(owner, "end", end, start, 1)
    if not isinstance(interrupt, int) or interrupt < 0:
        raise ConfigurationError(f"{owner}: interrupt={interrupt!r} has to be a whole number of batches, 0 or more")


def _check_selection(owner: str, keep: float, scale_factor: float) -> None:
    check_range(owner, "keep", keep, 0, 1, open_low=True)
    check_range(owner, "scale_factor", scale_factor, 0, 1, open_low=True)
