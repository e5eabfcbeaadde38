"""Label smoothing: the formula, and labels that come out as they went in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from eventbus_engine.callback import Callback
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training.algorithms import LabelSmoothing, MixUp, smooth_labels
from eventbus_engine.training.state import State
from eventbus_engine.training.trainer import Trainer


def make_state(batch: Any = None) -> State:
    """A state with a batch in it."""
    state = State(nn.Identity())
    state.batch = batch
    return state


def smoothed_reference(labels: list[int], classes: int, smoothing: float) -> list[list[float]]:
    """The definition, one Python float (float64) at a time."""
    return [
        [(1.0 - smoothing) * (1.0 if c == label else 0.0) + smoothing / classes for c in range(classes)]
        for label in labels
    ]


@settings(deadline=None)  # torch is slow when it is first called
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    smoothing=st.floats(0, 1, allow_subnormal=False),
)
def test_smoothing_of_class_indices_equals_the_definition(labels: list[int], smoothing: float) -> None:
    """Every entry is the convex combination of one-hot and uniform."""
    actual = smooth_labels(torch.zeros(len(labels), 7, dtype=torch.float64), torch.tensor(labels), smoothing)
    expected = torch.tensor(smoothed_reference(labels, 7, smoothing), dtype=torch.float64)

    torch.testing.assert_close(actual, expected, rtol=1e-15, atol=1e-15)
    assert actual.sum(dim=1).tolist() == pytest.approx([1.0] * len(labels))


def test_smoothing_of_dense_targets_equals_smoothing_of_their_classes() -> None:
    """One-hot rows and class indices are two spellings of the same targets."""
    labels = torch.tensor([2, 0, 1])
    logits = torch.zeros(3, 4, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(labels, 4)

    assert torch.equal(smooth_labels(logits, one_hot, 0.3), smooth_labels(logits, labels, 0.3))
    assert torch.equal(smooth_labels(logits, one_hot.double(), 0.3), smooth_labels(logits, labels, 0.3))


def test_class_dimension_is_the_second_one_for_dense_predictions() -> None:
    """Segmentation: logits (N, C, H, W) with labels (N, H, W)."""
    labels = torch.tensor([[[0, 1], [2, 2]]])
    actual = smooth_labels(torch.zeros(1, 3, 2, 2), labels, 0.3)

    assert actual.shape == (1, 3, 2, 2)
    torch.testing.assert_close(actual[0, :, 1, 0], torch.tensor([0.1, 0.1, 0.8]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_targets_are_at_least_as_precise_as_float32(dtype: torch.dtype) -> None:
    """Half precision logits do not round the probabilities; float64 ones keep their precision."""
    actual = smooth_labels(torch.zeros(2, 10, dtype=dtype), torch.tensor([1, 2], dtype=torch.int32))

    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_cross_entropy_takes_the_smoothed_targets() -> None:
    """The loss with smoothed targets is the loss that torch smooths itself."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (6,), generator=generator)
    actual = torch.nn.functional.cross_entropy(logits, smooth_labels(logits, labels, 0.2))

    torch.testing.assert_close(actual, torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2))


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, math.nan, math.inf, "0.1", None])
def test_smoothing_out_of_range_is_refused(smoothing: Any) -> None:
    """The error names the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"smooth_labels: smoothing=.* \[0, 1\]"):
        smooth_labels(torch.zeros(1, 2), torch.tensor([0]), smoothing)
    with pytest.raises(ConfigurationError, match=r"LabelSmoothing: smoothing=.* \[0, 1\]"):
        LabelSmoothing(smoothing)


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        (torch.zeros(3), torch.tensor([0, 1, 2]), r"logits of shape \(N, C, \.\.\.\), got \(3,\)"),
        (torch.zeros(3, 4), torch.tensor([0, 1]), r"\(2,\) do not go with outputs of shape \(3, 4\)"),
        (torch.zeros(2, 4), torch.tensor([0.0, 1.0]), r"read as class indices, but are torch\.float32"),
        (torch.zeros(2, 4), torch.tensor([0, 4]), r"from 0 to 4 do not fit 4 classes"),
        (torch.zeros(2, 4), torch.tensor([-100, 1]), r"from -100 to 1 do not fit 4 classes"),
    ],
)
def test_targets_that_do_not_fit_are_refused(logits: torch.Tensor, target: torch.Tensor, message: str) -> None:
    """The error names the shapes, or the labels."""
    with pytest.raises(BatchError, match=message):
        smooth_labels(logits, target)


def test_empty_batch_smooths_to_nothing() -> None:
    """No samples, no labels, no error."""
    assert smooth_labels(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (0, 3)


def test_only_the_loss_sees_smoothed_labels() -> None:
    """BEFORE_LOSS swaps them in; AFTER_LOSS puts the very same tensor back, unchanged."""
    labels = torch.tensor([1, 0, 2])
    state = make_state(batch=(torch.zeros(3, 2), labels))
    state.outputs = torch.zeros(3, 3)
    smoothing = LabelSmoothing(0.3)
    smoothing.apply(Event.BEFORE_LOSS, state, Logger())
    during = state.batch_get_item(1)
    smoothing.apply(Event.AFTER_LOSS, state, Logger())

    torch.testing.assert_close(during, smooth_labels(state.outputs, labels, 0.3))
    assert state.batch_get_item(1) is labels
    assert labels.tolist() == [1, 0, 2]
    assert smoothing.original_labels is None


class LabelsAroundTheLoss(Callback[State]):
    """Keeps the targets that the batch holds before, during and after the loss, and how MixUp has paired them."""

    def __init__(self, mixup: MixUp) -> None:
        self.mixup = mixup
        self.paired: list[tuple[float, torch.Tensor]] = []
        self.seen: dict[str, list[torch.Tensor]] = {"after_forward": [], "before_loss": [], "after_loss": []}

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.paired.append((self.mixup.mixing, self.mixup.indices))

    def after_forward(self, state: State, logger: Logger) -> None:
        self.seen["after_forward"].append(state.batch_get_item(1))

    def before_loss(self, state: State, logger: Logger) -> None:
        self.seen["before_loss"].append(state.batch_get_item(1))

    def after_loss(self, state: State, logger: Logger) -> None:
        self.seen["after_loss"].append(state.batch_get_item(1))


@pytest.mark.anyio
@pytest.mark.parametrize("smoothing_first", [True, False])
@pytest.mark.parametrize(("microbatches", "sizes"), [(1, [7]), (3, [3, 3, 1])])
async def test_smoothing_goes_with_mixing_in_either_order(
    microbatches: int, sizes: list[int], smoothing_first: bool
) -> None:
    """Registered either way round, the loss sees mixtures of smoothed labels, and only the loss sees them."""
    labels = [1, 0, 2, 1, 2, 2, 0]
    generator = torch.Generator().manual_seed(0)
    model, mixup, smoothing = nn.Linear(2, 3), MixUp(alpha=1.0), LabelSmoothing(0.3)
    around = LabelsAroundTheLoss(mixup)
    trainer = Trainer(
        model,
        [(torch.randn(7, 2, generator=generator), torch.tensor(labels)) for _ in range(2)],
        loss=nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        max_duration="1ep",
        algorithms=[smoothing, mixup] if smoothing_first else [mixup, smoothing],
        callbacks=[around],
        microbatches=microbatches,
        seed=1,
    )
    await trainer.fit()
    found, during, after = around.seen.values()
    smooth = torch.tensor(smoothed_reference(labels, 3, 0.3))
    expected = [(1 - mixing) * smooth + mixing * smooth[partners] for mixing, partners in around.paired]

    assert [len(targets) for targets in during] == sizes * 2
    torch.testing.assert_close(torch.cat(during), torch.cat(expected))
    assert torch.cat(found).tolist() == labels * 2
    assert all(restored is before for restored, before in zip(after, found, strict=True))
    assert not torch.allclose(torch.cat(during), smooth.repeat(2, 1), atol=0.05)


def test_labels_lie_where_the_key_says() -> None:
    """A name, or a pair of functions, reaches into a mapping."""
    labels = torch.tensor([0, 1])
    pair = (lambda batch: batch["y"]["class"], lambda batch, value: {**batch, "y": {"class": value}})
    for key, batch in (("y", {"x": torch.zeros(2, 1), "y": labels}), (pair, {"y": {"class": labels}})):
        state = make_state(batch=batch)
        state.outputs = torch.zeros(2, 2)
        smoothing = LabelSmoothing(target_key=key)
        smoothing.apply(Event.BEFORE_LOSS, state, Logger())
        during = state.batch_get_item(key)
        smoothing.apply(Event.AFTER_LOSS, state, Logger())

        assert during.shape == (2, 2)
        assert state.batch_get_item(key) is labels


def test_several_outputs_are_refused() -> None:
    """A tuple of outputs has no one class dimension; the labels stay in place."""
    labels = torch.tensor([0, 1])
    state = make_state(batch=(torch.zeros(2, 1), labels))
    state.outputs = (torch.zeros(2, 2), torch.zeros(2, 2))

    with pytest.raises(BatchError, match=r"LabelSmoothing needs the model's output to be one tensor, got tuple"):
        LabelSmoothing().apply(Event.BEFORE_LOSS, state, Logger())
    assert state.batch_get_item(1) is labels


def test_after_loss_alone_changes_nothing() -> None:
    """Nothing was swapped in, so nothing is put back."""
    labels = torch.tensor([0, 1])
    state = make_state(batch=(torch.zeros(2, 1), labels))
    LabelSmoothing().apply(Event.AFTER_LOSS, state, Logger())

    assert state.batch_get_item(1) is labels


def test_label_smoothing_runs_around_the_loss_only() -> None:
    """Of all forty events, it matches two."""
    state = make_state()
    matched = {event for event in Event if LabelSmoothing().match(event, state)}

    assert matched == {Event.BEFORE_LOSS, Event.AFTER_LOSS}
