"""What `MixUp` and `CutMix` share: pairs of samples, and targets that follow their inputs into the microbatches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from eventbus_engine.algorithm import Algorithm, AlgorithmRef
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms._common import batch_generator, check_range, dense_targets, single_tensor
from eventbus_engine.training.data import BatchKey, describe, set_item, split
from eventbus_engine.training.model import compute_loss
from eventbus_engine.training.state import State


def check_pairs(owner: str, input: torch.Tensor, target: torch.Tensor) -> None:
    """Refuse a batch in which not every input has its target.

    Raises:
        BatchError: `input` and `target` hold different numbers of samples.
    """
    if input.ndim == 0 or target.ndim == 0 or len(input) != len(target):
        raise BatchError(f"{owner} needs as many targets as inputs, got {tuple(target.shape)} and {tuple(input.shape)}")


def choose_partners(
    owner: str, samples: int, indices: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    """The partner of each sample, `(N,)`: the ones given, or a permutation, drawn.

    Raises:
        ConfigurationError: there are not as many partners as samples.
    """
    if indices is None:
        return torch.randperm(samples, generator=generator)
    if tuple(indices.shape) != (samples,):
        raise ConfigurationError(f"{owner}: indices has to have the shape ({samples},), not {tuple(indices.shape)}")
    return indices


def draw_beta(owner: str, alpha: float, generator: torch.Generator | None) -> float:
    """`z ~ Beta(alpha, alpha)`, in `[0, 1]`; 0 where `alpha` is.

    Raises:
        ConfigurationError: `alpha` is out of range.
    """
    check_range(owner, "alpha", alpha, 0)
    if alpha == 0:
        return 0.0
    # torch's Beta distribution takes no generator; the standard library's sampler does, in the form of its seed.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return random.Random(seed).betavariate(alpha, alpha)


class BatchMixing(Algorithm[State, Event]):
    """Mixes the inputs of the whole batch, and later the targets, or the losses, of each of its microbatches.

    A subclass says how to mix inputs, in `_mix`. The microbatches may pass more than once, as when another algorithm
    backpropagates a second time: each pass begins with the first of them.
    """

    around: Sequence[AlgorithmRef] = ("LabelSmoothing",)

    def __init__(self, interpolate_loss: bool, input_key: BatchKey, target_key: BatchKey) -> None:
        self.interpolate_loss: bool = interpolate_loss
        self.input_key: BatchKey = input_key
        self.target_key: BatchKey = target_key
        self.mixing: float = 0.0
        """The partners' weight in the batch in progress."""
        self.indices: torch.Tensor = torch.arange(0)
        """The partner of each of its samples, `(N,)`, on the CPU."""
        self._partners: Iterator[torch.Tensor] | None = None
        self._found: torch.Tensor | None = None

    def _mix(
        self, inputs: torch.Tensor, target: torch.Tensor, indices: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The mixed inputs, the partners' targets, and the partners' weight."""
        raise NotImplementedError

    def match(self, event: Event, state: State) -> bool:
        """Run on AFTER_DATALOADER, BEFORE_LOSS and AFTER_LOSS; or on AFTER_DATALOADER and BEFORE_BACKWARD."""
        if self.interpolate_loss:
            return event in (Event.AFTER_DATALOADER, Event.BEFORE_BACKWARD)
        return event in (Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Mix the inputs of the batch, the targets or the loss of the microbatch, or put its targets back.

        Raises:
            BatchError: inputs, targets or outputs are not single tensors, or do not fit each other; or the microbatch
                does not fit the batch whose inputs were mixed.
        """
        if event == Event.AFTER_DATALOADER:
            self._mix_inputs(state)
        elif event == Event.AFTER_LOSS:
            self._restore_targets(state)
        elif self._partners is not None:  # else the inputs were not mixed, as when it joined in the middle of a batch
            target = self._tensor(state.batch_get_item(self.target_key), "the target")
            partners = self._next_microbatch(self._partners, target)
            if event == Event.BEFORE_LOSS:
                self._mix_targets(state, target, partners)
            else:
                self._mix_loss(state, partners)

    def _mix_inputs(self, state: State) -> None:
        self._partners = self._found = None  # a batch that failed midway has left its own
        inputs = self._tensor(state.batch_get_item(self.input_key), "the input")
        target = self._tensor(state.batch_get_item(self.target_key), "the target")
        generator = batch_generator(state, str(self.name))
        self.indices = torch.randperm(inputs.shape[:1].numel(), generator=generator)
        mixed, partners, self.mixing = self._mix(inputs, target, self.indices, generator)
        state.batch_set_item(self.input_key, mixed)
        self._partners = _in_microbatches(partners, state)

    def _mix_targets(self, state: State, target: torch.Tensor, partners: torch.Tensor) -> None:
        outputs = self._tensor(state.outputs, "the model's output")
        own, other = dense_targets(outputs, target), dense_targets(outputs, partners)
        state.batch_set_item(self.target_key, (1 - self.mixing) * own + self.mixing * other)
        self._found = target

    def _restore_targets(self, state: State) -> None:
        if self._found is not None:
            state.batch_set_item(self.target_key, self._found)
            self._found = None

    def _mix_loss(self, state: State, partners: torch.Tensor) -> None:
        own = self._tensor(state.loss, "the loss")
        batch = set_item(state.batch, self.target_key, partners)
        with torch.enable_grad(), state.precision_context():
            other = compute_loss(state.model, state.outputs, batch, state.loss_fn)
            state.loss = (1 - self.mixing) * own + self.mixing * other

    def _next_microbatch(self, partners: Iterator[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        part, owner = next(partners), type(self).__name__
        if part.shape != target.shape:
            raise BatchError(
                f"the microbatch's target is {describe(target)}, but of the batch that {owner} has mixed "
                f"{describe(part)} is due; let what drops samples run before {owner} on AFTER_DATALOADER, and what "
                f"makes targets dense after {owner} on BEFORE_LOSS"
            )
        return part

    def _tensor(self, value: object, what: str) -> torch.Tensor:
        return single_tensor(value, type(self).__name__, what)


def _in_microbatches(targets: torch.Tensor, state: State) -> Iterator[torch.Tensor]:
    """The targets of one microbatch after another, pass after pass, cut as the loop cuts the batch, and not before."""
    while True:
        yield from split(targets, state.microbatches)
