"""Progressive resizing: the pixels, the schedule, and its place among the algorithms that change inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger, LoggerDestination
from eventbus_engine.time import Time
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import (
    CutMix,
    LabelSmoothing,
    MixUp,
    ProgressiveResizing,
    SelectiveBackprop,
    resize_batch,
)
from eventbus_engine.training.algorithms.progressive_resizing import ResizingMode


def bilinear_reference(image: Tensor, height: int, width: int) -> Tensor:
    """Bilinear interpolation at the centres of the new pixels, one at a time in float64; `image` is `(H, W)`."""

    def taps(index: int, old: int, new: int) -> list[tuple[int, float]]:
        place = max((index + 0.5) * old / new - 0.5, 0.0)
        low = min(math.floor(place), old - 1)
        return [(low, 1 - (place - low)), (min(low + 1, old - 1), place - low)]

    rows = [
        [
            sum(
                float(image[i, j]) * a * b
                for i, a in taps(row, image.shape[0], height)
                for j, b in taps(column, image.shape[1], width)
            )
            for column in range(width)
        ]
        for row in range(height)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@settings(deadline=None)  # torch is slow when it is first called
@given(height=st.integers(1, 7), width=st.integers(1, 7), scale=st.floats(0.05, 1), seed=st.integers(0, 2**32))
def test_resizing_equals_bilinear_interpolation(height: int, width: int, scale: float, seed: int) -> None:
    """Each new pixel lies where its centre falls; the sides are rounded to whole pixels."""
    images = torch.randn(2, 1, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    target = torch.arange(2)
    resized, labels = resize_batch(images, target, scale)
    size = max(1, round(scale * height)), max(1, round(scale * width))
    expected = torch.stack([bilinear_reference(image[0], *size) for image in images]).unsqueeze(1)

    torch.testing.assert_close(resized, expected, rtol=1e-12, atol=1e-12)
    assert labels is target


@settings(deadline=None)  # torch is slow when it is first called
@given(height=st.integers(1, 9), width=st.integers(1, 9), scale=st.floats(0.05, 1), dense=st.booleans())
def test_resized_maps_hold_the_nearest_labels(height: int, width: int, scale: float, dense: bool) -> None:
    """No label appears that was not there, in maps `(N, H, W)` as in `(N, C, H, W)`."""
    labels = torch.arange(2 * height * width).reshape(2, height, width)
    maps = labels.unsqueeze(1) if dense else labels
    resized, actual = resize_batch(torch.zeros(2, 3, height, width), maps, scale, resize_targets=True)
    size = tuple(resized.shape[-2:])
    expected = [
        [
            [
                image[int((row + 0.5) * height / size[0])][int((column + 0.5) * width / size[1])]
                for column in range(size[1])
            ]
            for row in range(size[0])
        ]
        for image in labels.tolist()
    ]

    assert actual.reshape(2, *size).tolist() == expected
    assert actual.dtype == torch.int64


@settings(deadline=None)  # torch is slow when it is first called
@given(height=st.integers(1, 7), width=st.integers(1, 7), scale=st.floats(0.05, 1), seed=st.integers(0, 2**32))
def test_crops_are_a_part_of_the_images_and_of_their_maps(height: int, width: int, scale: float, seed: int) -> None:
    """One place for all of them, inputs and targets alike."""
    images = torch.arange(2 * 3 * height * width).reshape(2, 3, height, width).double()
    maps = torch.arange(2 * height * width).reshape(2, height, width)
    cropped, labels = resize_batch(
        images, maps, scale, "crop", resize_targets=True, generator=torch.Generator().manual_seed(seed)
    )
    rows, columns = cropped.shape[-2:]
    top, left = divmod(int(labels[0, 0, 0]), width)

    assert (rows, columns) == (max(1, round(scale * height)), max(1, round(scale * width)))
    assert torch.equal(cropped, images[..., top : top + rows, left : left + columns])
    assert torch.equal(labels, maps[..., top : top + rows, left : left + columns])


def test_crops_are_drawn_from_all_places() -> None:
    """Uniformly: of 3 x 3 places each comes as often as the others."""
    generator, image = torch.Generator().manual_seed(0), torch.arange(16.0).reshape(1, 1, 4, 4)
    corners = [
        int(resize_batch(image, torch.zeros(1), 0.5, "crop", generator=generator)[0][0, 0, 0, 0]) for _ in range(1800)
    ]
    counts = {corner: corners.count(corner) for corner in sorted(set(corners))}

    assert list(counts) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert all(count == pytest.approx(200, abs=5 * math.sqrt(1800 * 1 / 9 * 8 / 9)) for count in counts.values())


def test_a_generator_fixes_the_crop_and_spares_the_global_one() -> None:
    """Same seed, same place; without one, torch's own decides."""
    images, before = torch.arange(256.0).reshape(1, 1, 16, 16), torch.get_rng_state()
    first, second = (
        resize_batch(images, images, 0.5, "crop", generator=torch.Generator().manual_seed(3))[0] for _ in range(2)
    )

    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    resize_batch(images, images, 0.5, "crop")
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_the_type_is_kept(mode: ResizingMode, dtype: torch.dtype) -> None:
    """And the values are those of float64, as far as the type's own digits go."""
    images = torch.randint(0, 200, (2, 1, 6, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    actual, expected = (
        resize_batch(batch, images, 0.5, mode, generator=torch.Generator().manual_seed(0))[0]
        for batch in (images, images.double())
    )

    assert actual.dtype == dtype
    tolerance = 1.0 if dtype == torch.uint8 else 2 * 200 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_a_factor_of_one_changes_nothing(mode: ResizingMode) -> None:
    """The very same tensors come back, and nothing is drawn."""
    images, maps, before = torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4), torch.get_rng_state()
    resized, target = resize_batch(images, maps, 1.0, mode, resize_targets=True)

    assert resized is images
    assert target is maps
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("inputs", "maps", "message"),
    [
        (torch.zeros(2, 4, 4), torch.zeros(2, 4, 4), r"images \(N, C, H, W\), .* got \(2, 4, 4\) torch\.float32"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.long), torch.zeros(2, 4, 4), r"floating-point or uint8, got .*int64"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2), r"targets of shape \(2,\) are no maps of images \(2, 1, 4, 4\)"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 5), r"targets of shape \(2, 4, 5\) are no maps"),
    ],
)
def test_batches_that_do_not_fit_are_refused(inputs: Tensor, maps: Tensor, message: str) -> None:
    """The error names the shapes; in the function and in the class."""
    state = make_state(0)
    state.batch = (inputs, maps)

    with pytest.raises(BatchError, match=message):
        resize_batch(inputs, maps, 0.5, resize_targets=True)
    with pytest.raises(BatchError, match=message):
        ProgressiveResizing(resize_targets=True).apply(Event.AFTER_DATALOADER, state, Logger())


@pytest.mark.parametrize("scale", [0, 1.5, math.nan, "0.5"])
def test_a_scale_out_of_range_is_refused(scale: Any) -> None:
    """The error names the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"resize_batch: scale_factor=.* \(0, 1\]"):
        resize_batch(torch.zeros(1, 1, 4, 4), torch.zeros(1), scale)
    with pytest.raises(ConfigurationError, match=r"ProgressiveResizing: initial_scale=.* \(0, 1\]"):
        ProgressiveResizing(initial_scale=scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shrink"}, r"mode='shrink' is not one of \('resize', 'crop'\)"),
        ({"finetune_fraction": 1.1}, r"finetune_fraction=1\.1 .* \[0, 1\]"),
        ({"delay_fraction": -0.1}, r"delay_fraction=-0\.1 .* \[0, 1\]"),
        ({"delay_fraction": 0.9}, r"delay_fraction=0\.9 and finetune_fraction=0\.2 are together more"),
        ({"size_increment": 0}, r"size_increment=0 has to be a whole number of pixels"),
        ({"size_increment": 1.5}, r"size_increment=1\.5 has to be a whole number of pixels"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """The error names the argument, its value and what would fit."""
    with pytest.raises(ConfigurationError, match=f"ProgressiveResizing: {message}"):
        ProgressiveResizing(**options)
    with pytest.raises(ConfigurationError, match=r"resize_batch: mode='shrink'"):
        resize_batch(torch.zeros(1, 1, 4, 4), torch.zeros(1), 0.5, "shrink")  # type: ignore[arg-type]


def make_state(batches: int, **options: Any) -> State:
    """The state of a run of 10 batches, of which `batches` are over."""
    state = State(nn.Identity(), max_duration=Time(10, "ba"), **options)
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch()
    return state


def scale_reference(elapsed: float, initial: float, delay: float, finetune: float) -> float:
    """The line through the end of the delay, at `initial`, and the begin of the fine-tuning, at 1."""
    if elapsed >= 1 - finetune:
        return 1.0
    return initial + (1 - initial) * max(0.0, (elapsed - delay) / (1 - finetune - delay) if elapsed > delay else 0.0)


@settings(deadline=None)  # torch is slow when it is first called
@given(
    done=st.integers(0, 9),
    initial=st.floats(0.1, 1),
    delay=st.integers(0, 10),
    finetune=st.integers(0, 10),
    side=st.integers(1, 40),
    increment=st.integers(1, 8),
)
def test_schedule_equals_the_definition(
    done: int, initial: float, delay: int, finetune: int, side: int, increment: int
) -> None:
    """The side is the nearest multiple of the increment, one at least, and never more than it was."""
    finetune = min(finetune, 10 - delay)
    state = make_state(done)
    state.batch = (torch.zeros(1, 1, side, 2 * side), torch.zeros(1))
    resizing = ProgressiveResizing(
        initial_scale=initial, delay_fraction=delay / 10, finetune_fraction=finetune / 10, size_increment=increment
    )
    resizing.apply(Event.AFTER_DATALOADER, state, Logger())
    scale = scale_reference(done / 10, initial, delay / 10, finetune / 10)
    expected = [
        length if scale == 1 else min(length, max(1, round(scale * length / increment)) * increment)
        for length in (side, 2 * side)
    ]

    assert list(state.batch[0].shape[-2:]) == expected


class Pooled(nn.Module):
    """Takes images of any size into 3 classes; keeps the sizes it was given, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head = nn.Linear(2, 3)
        self.sizes: list[tuple[int, ...]] = []
        self.evaluated: set[tuple[int, ...]] = set()

    def forward(self, input: Tensor) -> Any:
        if self.training:
            self.sizes.append(tuple(input.shape))
        else:
            self.evaluated.add(tuple(input.shape))
        return self.head(input.mean(dim=(-2, -1)))


class Logged(LoggerDestination):
    """Keeps what is logged, by name."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        for name, value in metrics.items():
            self.values.setdefault(name, []).append(value)


def make_trainer(model: nn.Module, algorithms: Sequence[Algorithm[Any, Any]], **options: Any) -> Trainer:
    """A run of ten batches of six images, (6, 2, 16, 24)."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(6, 2, 16, 24, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])) for _ in range(10)]
    defaults: dict[str, Any] = {"loss": functional.cross_entropy, "max_duration": "10ba", "seed": 2}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model, batches, batches[:1], optimizers=optimizer, algorithms=algorithms, **defaults | options)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["resize", "crop"])
async def test_training_begins_small_and_ends_whole(mode: ResizingMode) -> None:
    """The sizes of a run, by microbatch; evaluation sees whole images; what is logged says the same."""
    model, logged = Pooled(), Logged()
    await make_trainer(model, [ProgressiveResizing(mode)], loggers=[logged], microbatches=2).fit()
    expected = [(8, 12)] * 6 + [(12, 16), (12, 20)] + [(16, 24)] * 2

    assert model.sizes == [(3, 2, *size) for size in expected for _ in range(2)]
    assert model.evaluated == {(6, 2, 16, 24)}
    assert logged.values["progressive_resizing/height"] == [height for height, _ in expected]
    assert logged.values["progressive_resizing/width"] == [width for _, width in expected]
    assert logged.values["progressive_resizing/scale_factor"] == pytest.approx([0.5] * 6 + [2 / 3, 5 / 6, 1, 1])


@pytest.mark.anyio
async def test_an_initial_scale_of_one_changes_nothing() -> None:
    """Bit for bit."""
    plain, resized = Pooled(), Pooled()
    await make_trainer(plain, []).fit()
    await make_trainer(resized, [ProgressiveResizing("crop", initial_scale=1.0)]).fit()

    assert torch.equal(plain.head.weight, resized.head.weight)


@pytest.mark.anyio
@pytest.mark.parametrize("mixing", [CutMix, MixUp])
@pytest.mark.parametrize("resizing_first", [True, False])
async def test_it_resizes_before_others_mix(mixing: type[CutMix | MixUp], resizing_first: bool) -> None:
    """And after samples are selected; in either order of registration. Smoothing goes with all of them."""
    model, resizing, selecting = Pooled(), ProgressiveResizing("crop"), SelectiveBackprop(0.0, 1.0, interrupt=0)
    pair: list[Algorithm[Any, Any]] = [resizing, mixing()] if resizing_first else [mixing(), resizing]
    trainer = make_trainer(model, [*pair, LabelSmoothing(), selecting], max_duration="1ba")
    order = trainer.engine.explain(Event.AFTER_DATALOADER).order
    await trainer.fit()

    assert order == ("selective_backprop", "progressive_resizing", mixing.__name__.lower())
    assert model.sizes == [(3, 2, 8, 12)]


def test_maps_are_resized_with_their_images() -> None:
    """Under the keys that are given; without `resize_targets` they are not even read."""
    state = make_state(0, seed=1)
    maps = torch.arange(2 * 16 * 16).reshape(2, 16, 16)
    images = maps.unsqueeze(1).double()
    state.batch = {"image": images, "mask": maps}
    ProgressiveResizing("crop", resize_targets=True, input_key="image", target_key="mask").apply(
        Event.AFTER_DATALOADER, state, Logger()
    )
    assert state.batch["mask"].shape == (2, 8, 8)
    assert torch.equal(state.batch["image"], state.batch["mask"].unsqueeze(1).double())

    state.batch = {"image": images}
    ProgressiveResizing(input_key="image", target_key="mask").apply(Event.AFTER_DATALOADER, state, Logger())
    assert state.batch["image"].shape == (2, 1, 8, 8)


def test_crops_belong_to_the_seed_and_the_batch() -> None:
    """A run that resumes at a batch, or tries it again, draws what the first one drew there."""

    def corners(seed: int, batches: list[int]) -> list[int]:
        drawn = []
        for batch in batches:
            state = make_state(batch, seed=seed)
            state.batch = (torch.arange(64.0 * 64).reshape(1, 1, 64, 64), torch.zeros(1))
            ProgressiveResizing("crop").apply(Event.AFTER_DATALOADER, state, Logger())
            drawn.append(int(state.batch[0].flatten()[0]))
        return drawn

    before = torch.get_rng_state()
    whole = corners(1, [0, 1, 1, 2])

    assert whole[1] == whole[2]
    assert len(set(whole)) == 3
    assert corners(1, [2]) == whole[3:]
    assert corners(2, [0, 1, 1, 2]) != whole
    assert torch.equal(torch.get_rng_state(), before)


def test_it_runs_on_one_event_and_needs_an_end() -> None:
    """Of all forty; without a `max_duration` there is no schedule."""
    resizing, state = ProgressiveResizing(), State(nn.Identity())
    state.batch = (torch.zeros(1, 1, 4, 4), torch.zeros(1))

    assert [event for event in Event if resizing.match(event, state)] == [Event.AFTER_DATALOADER]
    with pytest.raises(ConfigurationError, match="ProgressiveResizing runs by the fraction of training that is over"):
        resizing.apply(Event.AFTER_DATALOADER, state, Logger())


def test_inputs_that_are_no_single_tensor_are_refused() -> None:
    """The error says what came and how to point at the tensor; for the maps as well."""
    state = make_state(0)
    state.batch = ([torch.zeros(2), torch.zeros(2)], torch.zeros(2))
    with pytest.raises(
        BatchError, match=r"ProgressiveResizing needs the input to be one tensor, got list\(.*\); point"
    ):
        ProgressiveResizing().apply(Event.AFTER_DATALOADER, state, Logger())
    state.batch = (torch.zeros(1, 1, 4, 4), [1])
    with pytest.raises(BatchError, match=r"ProgressiveResizing needs the target to be one tensor"):
        ProgressiveResizing(resize_targets=True).apply(Event.AFTER_DATALOADER, state, Logger())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_the_same_pixels_on_a_cuda_device(mode: ResizingMode) -> None:
    """The place is drawn on the CPU; inputs and maps stay on the device."""
    images, maps = torch.arange(128.0).reshape(2, 1, 8, 8), torch.arange(128).reshape(2, 8, 8)
    here, there = (
        resize_batch(*batch, 0.5, mode, True, torch.Generator().manual_seed(0))
        for batch in ((images, maps), (images.cuda(), maps.cuda()))
    )

    torch.testing.assert_close(there[0].cpu(), here[0])
    assert torch.equal(there[1].cpu(), here[1])
