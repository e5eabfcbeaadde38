"""Sequence length warm-up: the cut, the tokens that stay, and the schedule."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger, LoggerDestination
from eventbus_engine.time import Time
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import GradientClipping, SeqLengthWarmup, set_batch_sequence_length


def tokens(samples: int, length: int) -> Tensor:
    """Sequences in which every token is another one."""
    return torch.arange(samples * length).reshape(samples, length)


def make_batch(samples: int, length: int) -> dict[str, Any]:
    """A batch of a language model, with a label for each sample and a name for the batch beside the sequences."""
    ids = tokens(samples, length)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids + 1000,
        "class": torch.arange(samples),
        "name": "train",
    }


sizes = {"samples": st.integers(1, 4), "length": st.integers(1, 9), "wanted": st.integers(1, 10)}


@settings(deadline=None)  # torch is slow when it is first called
@given(**sizes)
def test_truncating_keeps_the_first_tokens(samples: int, length: int, wanted: int) -> None:
    """Of every tensor in the shape of the sequences; all else, and the batch itself, stays as it was."""
    batch = make_batch(samples, length)
    before = dict(batch)
    cut = set_batch_sequence_length(batch, wanted)
    expected = [row[:wanted] for row in tokens(samples, length).tolist()]

    assert cut["input_ids"].tolist() == expected
    assert cut["labels"].tolist() == [[token + 1000 for token in row] for row in expected]
    assert cut["attention_mask"].shape == cut["input_ids"].shape
    assert cut["class"] is batch["class"]
    assert cut["name"] == "train"
    assert list(batch) == list(cut) == list(before)
    assert all(batch[key] is before[key] for key in before)


@settings(deadline=None)  # torch is slow when it is first called
@given(**sizes)
def test_without_truncating_the_rest_makes_further_sequences(samples: int, length: int, wanted: int) -> None:
    """In their order; only what does not fill one is dropped."""
    batch = {key: make_batch(samples, length)[key] for key in ("input_ids", "labels")}
    cut = set_batch_sequence_length(batch, wanted, truncate=False)
    size = min(wanted, length)
    expected = [
        row[start : start + size]
        for row in tokens(samples, length).tolist()
        for start in range(0, length - size + 1, size)
    ]

    assert cut["input_ids"].tolist() == expected
    assert cut["labels"].tolist() == [[token + 1000 for token in row] for row in expected]


@settings(deadline=None)  # torch is slow when it is first called
@given(data=st.data(), **sizes)
def test_the_end_of_a_sequence_may_be_kept(data: st.DataObject, samples: int, length: int, wanted: int) -> None:
    """The last token that is not masked comes to stand last; a sequence that fits keeps its padding."""
    lengths = data.draw(st.lists(st.integers(0, length), min_size=samples, max_size=samples))
    batch = make_batch(samples, length)
    batch["attention_mask"] = torch.tensor([[int(i < n) for i in range(length)] for n in lengths])
    cut = set_batch_sequence_length(batch, wanted, preserve_end_of_sequence=True)
    ids, mask, labels = cut["input_ids"].tolist(), cut["attention_mask"].tolist(), cut["labels"].tolist()

    for row, n in enumerate(lengths):
        whole = tokens(samples, length)[row].tolist()
        expected = [*whole[: wanted - 1], whole[n - 1]] if n > wanted else whole[:wanted]
        assert ids[row] == expected
        assert labels[row] == [token + 1000 for token in expected]
        assert mask[row] == [int(i < n) for i in range(min(wanted, length))]
    assert torch.equal(batch["input_ids"], tokens(samples, length))


def test_without_a_mask_the_end_is_the_last_token() -> None:
    """As in a pair of inputs and targets."""
    cut = set_batch_sequence_length((tokens(2, 5), tokens(2, 5) + 100), 3, preserve_end_of_sequence=True)

    assert [part.tolist() for part in cut] == [[[0, 1, 4], [5, 6, 9]], [[100, 101, 104], [105, 106, 109]]]


@pytest.mark.parametrize("kind", [tuple, list])
def test_pairs_are_cut_alike(kind: Callable[..., Any]) -> None:
    """Inputs and targets, in a batch of the same kind."""
    cut = set_batch_sequence_length(kind([tokens(2, 6), tokens(2, 6) + 100]), 4, truncate=True)
    folded = set_batch_sequence_length(kind([tokens(2, 6), tokens(2, 6) + 100]), 3, truncate=False)

    assert type(cut) is type(folded) is kind
    assert [part.tolist() for part in cut] == [tokens(2, 6)[:, :4].tolist(), (tokens(2, 6)[:, :4] + 100).tolist()]
    assert [part.tolist() for part in folded] == [tokens(4, 3).tolist(), (tokens(4, 3) + 100).tolist()]


def test_a_mapping_of_another_kind_stays_one() -> None:
    """As tokenizers have their own."""
    batch = UserDict(input_ids=tokens(2, 6))
    cut = set_batch_sequence_length(batch, 4)

    assert type(cut) is UserDict
    assert cut["input_ids"].shape == (2, 4)
    assert batch["input_ids"].shape == (2, 6)


def test_sequences_that_are_short_enough_come_back_as_they_are() -> None:
    """The very same batch."""
    batch = make_batch(2, 6)

    assert set_batch_sequence_length(batch, 6) is batch
    assert set_batch_sequence_length(batch, 7, truncate=False) is batch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("options", [{}, {"truncate": False}, {"preserve_end_of_sequence": True}])
def test_the_type_is_kept(dtype: torch.dtype, options: dict[str, bool]) -> None:
    """Weights of tokens, say, beside their numbers."""
    cut = set_batch_sequence_length({"input_ids": tokens(2, 6), "weights": tokens(2, 6).to(dtype)}, 3, **options)

    assert cut["weights"].dtype == dtype
    assert torch.equal(cut["weights"], cut["input_ids"].to(dtype))


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, 6),
        {"ids": tokens(2, 6)},
        {"input_ids": torch.zeros(6)},
        {"input_ids": [1, 2, 3]},
        (tokens(2, 6), torch.zeros(2)),
        (tokens(2, 6), tokens(2, 5)),
        (tokens(2, 6), None),
        (torch.zeros(2, 6, 3), torch.zeros(2, 6, 3)),
        (tokens(2, 6),) * 3,
    ],
)
def test_batches_without_sequences_are_refused(batch: Any) -> None:
    """The error says what came and what would do."""
    with pytest.raises(BatchError, match=r"needs sequences, got .*'input_ids' of shape \(N, L\), or pairs"):
        set_batch_sequence_length(batch, 3)


def test_rows_that_would_be_too_few_are_refused() -> None:
    """Without truncating there are more rows than labels of samples; the error names them."""
    with pytest.raises(BatchError, match=r"rows become more than 2, but 'class' of dict\("):
        set_batch_sequence_length(make_batch(2, 6), 3, truncate=False)


def test_a_mask_of_another_shape_cannot_tell_the_end() -> None:
    """The error names both shapes."""
    batch = {"input_ids": tokens(2, 6), "attention_mask": torch.ones(2, 1, 6, 6)}

    with pytest.raises(BatchError, match=r"of the shape of input_ids, \(2, 6\), got \(2, 1, 6, 6\)"):
        set_batch_sequence_length(batch, 3, preserve_end_of_sequence=True)


@pytest.mark.parametrize("length", [0, -1, 1.5, "8", None])
def test_lengths_have_to_be_whole(length: Any) -> None:
    """The error names the argument, its value and what would fit; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"set_batch_sequence_length: curr_seq_len=.* whole number of tokens"):
        set_batch_sequence_length(make_batch(2, 6), length)
    for argument in ("min_seq_length", "max_seq_length", "step_size"):
        with pytest.raises(ConfigurationError, match=rf"SeqLengthWarmup: {argument}=.* whole number of tokens"):
            SeqLengthWarmup(**{argument: length})


@pytest.mark.parametrize("call", [SeqLengthWarmup, lambda **options: set_batch_sequence_length({}, 8, **options)])
def test_an_end_can_be_kept_by_truncating_only(call: Callable[..., Any]) -> None:
    """The error says why; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"preserve_end_of_sequence=True goes with truncate=True only"):
        call(truncate=False, preserve_end_of_sequence=True)


def test_arguments_out_of_range_are_refused() -> None:
    """The error names the argument, its value and what would fit."""
    wrong: list[Any] = [-0.1, 1.1, math.nan, "0.3"]
    for duration in wrong:
        with pytest.raises(ConfigurationError, match=r"SeqLengthWarmup: duration=.* \[0, 1\]"):
            SeqLengthWarmup(duration)
    with pytest.raises(ConfigurationError, match=r"min_seq_length=9 is more than max_seq_length=8"):
        SeqLengthWarmup(min_seq_length=9, max_seq_length=8)


def make_state(batches: int, total: int = 10) -> State:
    """The state of a run of `total` batches, of which `batches` are over."""
    state = State(nn.Identity(), max_duration=Time(total, "ba"))
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch()
    return state


@settings(deadline=None)  # torch is slow when it is first called
@given(
    done=st.integers(0, 10),
    duration=st.floats(0, 1, allow_subnormal=False),
    bounds=st.tuples(st.integers(1, 40), st.integers(1, 40)).map(sorted),
    step=st.integers(1, 9),
)
def test_schedule_equals_the_definition(done: int, duration: float, bounds: list[int], step: int) -> None:
    """The longest length in whole steps below the line, and the largest one after the warm-up."""
    low, high = bounds
    warmup = SeqLengthWarmup(duration, low, high, step)
    state = make_state(done)
    state.batch = {"input_ids": tokens(1, 50)}
    warmup.apply(Event.AFTER_DATALOADER, state, Logger())
    line = low + (high - low) * (done / 10 / duration if duration else math.inf)
    expected = high if done / 10 >= duration else max(n for n in range(low, high + 1, step) if n <= line)

    assert state.batch["input_ids"].shape == (1, expected)


class TinyModel(nn.Module):
    """Eight tokens into the next one; keeps the shapes it was given, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
        self.shapes: list[tuple[int, ...]] = []
        self.evaluated: set[tuple[int, ...]] = set()

    def forward(self, input_ids: Tensor) -> Any:
        if self.training:
            self.shapes.append(tuple(input_ids.shape))
        else:
            self.evaluated.add(tuple(input_ids.shape))
        return self.layers(input_ids)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Watch(LoggerDestination):
    """Keeps the lengths that are logged."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "seq_length_warmup/sequence_length" in metrics:
            self.lengths.append(metrics["seq_length_warmup/sequence_length"])


def make_trainer(model: nn.Module, warmup: list[Any], as_mapping: bool, **options: Any) -> Trainer:
    """A run of ten batches of four sequences of 32 tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(8, (4, 33), generator=generator) for _ in range(10)]
    batches: list[Any] = [(row[:, :-1], row[:, 1:]) for row in rows]
    if as_mapping:
        batches = [{"input_ids": inputs, "labels": targets} for inputs, targets in batches]
    defaults: dict[str, Any] = {"loss": cross_entropy, "max_duration": "10ba"}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model, batches, batches[:1], optimizers=optimizer, algorithms=warmup, **defaults | options)


EXPECTED = [8, 8, 16, 16, 24] + [32] * 5


@pytest.mark.anyio
@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize("truncate", [False, True])
async def test_training_begins_short_and_ends_whole(as_mapping: bool, truncate: bool) -> None:
    """The shapes of a run, by microbatch; evaluation sees whole sequences; what is logged says the same."""
    model, watch = TinyModel(), Watch()
    warmup = SeqLengthWarmup(0.5, 8, 32, truncate=truncate)
    trainer = make_trainer(model, [GradientClipping("norm", 1.0), warmup], as_mapping, loggers=[watch], microbatches=2)
    await trainer.fit()
    rows = [2 if truncate else 2 * (32 // length) for length in EXPECTED]

    assert model.shapes == [(n, length) for n, length in zip(rows, EXPECTED, strict=True) for _ in range(2)]
    assert model.evaluated == {(4, 32)}
    assert watch.lengths == EXPECTED
    assert trainer.state.timestamp.sample == 40  # as the loader gave them
    assert trainer.state.timestamp.token == (4 * 32 * 10 if as_mapping else 0)


@pytest.mark.anyio
async def test_without_a_warm_up_nothing_changes() -> None:
    """Bit for bit, where no sequence is longer than the maximum; a lower maximum cuts to the end."""
    plain, warmed, bounded = TinyModel(), TinyModel(), TinyModel()
    await make_trainer(plain, [], True).fit()
    await make_trainer(warmed, [SeqLengthWarmup(duration=0)], True).fit()
    await make_trainer(bounded, [SeqLengthWarmup(duration=0, max_seq_length=20)], True).fit()

    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), warmed.parameters(), strict=True))
    assert set(bounded.shapes) == {(4, 20)}


def test_it_runs_on_one_event_and_needs_an_end() -> None:
    """Of all forty; without a `max_duration` there is no schedule."""
    warmup, state = SeqLengthWarmup(), State(nn.Identity())
    state.batch = make_batch(2, 6)

    assert [event for event in Event if warmup.match(event, state)] == [Event.AFTER_DATALOADER]
    with pytest.raises(ConfigurationError, match="SeqLengthWarmup runs by the fraction of training that is over"):
        warmup.apply(Event.AFTER_DATALOADER, state, Logger())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sequences_on_a_cuda_device_stay_there() -> None:
    """Cut there, the ends included."""
    here = make_batch(2, 6)
    there = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in here.items()}
    expected = set_batch_sequence_length(here, 3, preserve_end_of_sequence=True)
    actual = set_batch_sequence_length(there, 3, preserve_end_of_sequence=True)

    assert actual["input_ids"].is_cuda
    assert torch.equal(actual["input_ids"].cpu(), expected["input_ids"])
