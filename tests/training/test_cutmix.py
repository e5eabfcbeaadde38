"""CutMix: the box, its distribution and its place, and targets that are mixed by its area."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import CutMix, LabelSmoothing, SelectiveBackprop, cutmix_batch

Box = tuple[int, int, int, int]


def pasted_reference(images: torch.Tensor, partners: list[int], box: Box) -> tuple[torch.Tensor, float]:
    """The definition, one pixel at a time; and the fraction of pixels that are still the image's own."""
    top, left, bottom, right = box
    mixed, own, total = images.clone(), 0, 0
    for row in range(images.shape[-2]):
        for column in range(images.shape[-1]):
            inside = top <= row < bottom and left <= column < right
            own, total = own + (not inside), total + 1
            for sample, partner in enumerate(partners):
                if inside:
                    mixed[sample, ..., row, column] = images[partner, ..., row, column]
    return mixed, own / total


@settings(deadline=None)  # torch is slow when it is first called
@given(data=st.data(), samples=st.integers(1, 4), height=st.integers(1, 5), width=st.integers(1, 5))
def test_pasting_equals_the_definition(data: st.DataObject, samples: int, height: int, width: int) -> None:
    """Pixels in the box are the partner's, all others their own; the area says how many."""
    top, bottom = sorted(data.draw(st.tuples(st.integers(0, height), st.integers(0, height))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width))))
    partners = data.draw(st.permutations(range(samples)))
    images = torch.arange(samples * 2 * height * width).reshape(samples, 2, height, width)
    before, box = images.clone(), (top, left, bottom, right)
    actual, permuted, kept, used = cutmix_batch(images, torch.arange(samples), bbox=box, indices=torch.tensor(partners))
    expected, area = pasted_reference(images, list(partners), box)

    assert torch.equal(actual, expected)
    assert torch.equal(images, before)
    assert permuted.tolist() == partners
    assert kept == pytest.approx(area, abs=1e-15)
    assert used == box


@settings(deadline=None)  # torch is slow when it is first called
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 2),
    between=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8]),
    uniform=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_drawn_boxes_lie_in_the_image(
    shape: tuple[int, int], between: list[int], dtype: torch.dtype, uniform: bool, seed: int
) -> None:
    """Whatever is drawn, the result is that of giving what was drawn, in the shape and type of the images."""
    images = torch.arange(3 * math.prod([*between, *shape])).reshape(3, *between, *shape).to(dtype)
    target = torch.arange(3)
    mixed, permuted, kept, box = cutmix_batch(
        images, target, uniform_sampling=uniform, generator=torch.Generator().manual_seed(seed)
    )
    expected, area = pasted_reference(images, permuted.tolist(), box)

    assert torch.equal(mixed, expected)
    assert mixed.dtype == dtype
    assert kept == pytest.approx(area, abs=1e-15)


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [
        # Sides of 2 pixels: of 5 places that touch the image, each pixel is in 2.
        (True, [2 / 5] * 4),
        # Centred on each of the 4 pixels, the box begins one before it.
        (False, [2 / 4, 2 / 4, 2 / 4, 1 / 4]),
    ],
)
def test_place_of_the_box(uniform: bool, expected: list[float]) -> None:
    """How often each pixel is covered, over many boxes, is what counting the places gives."""
    generator = torch.Generator().manual_seed(0)
    images, target = torch.zeros(1, 4, 4), torch.zeros(1)
    covered, draws = torch.zeros(4, 4), 3000
    for _ in range(draws):
        top, left, bottom, right = cutmix_batch(
            images, target, length=0.5, uniform_sampling=uniform, generator=generator
        )[3]
        covered[top:bottom, left:right] += 1
    side = torch.tensor(expected)

    # Five standard deviations of a mean of as many draws.
    torch.testing.assert_close(covered / draws, side[:, None] * side, rtol=0, atol=5 * math.sqrt(0.25 / draws))


def expected_area(alpha: float) -> float:
    """The mean area of the paper's box, cut off at the edges, in an image without pixels.

    A side of length `s = sqrt(z)` with its centre uniform in `[0, 1]` covers `s - s**2 / 4` of it on average, so the
    box covers the square of that, with the moments of `z ~ Beta(alpha, alpha)`.
    """

    def moment(k: float) -> float:
        return math.exp(
            math.lgamma(alpha + k) + math.lgamma(2 * alpha) - math.lgamma(alpha) - math.lgamma(2 * alpha + k)
        )

    return moment(1) - moment(1.5) / 2 + moment(2) / 16


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_area_has_the_distribution_of_the_paper(alpha: float) -> None:
    """The mean over many draws is that of Beta(alpha, alpha), less what sticks out of the image."""
    generator = torch.Generator().manual_seed(7)
    images, target, draws = torch.zeros(1, 64, 64), torch.zeros(1), 3000
    areas = [1 - cutmix_batch(images, target, alpha=alpha, generator=generator)[2] for _ in range(draws)]

    assert sum(areas) / draws == pytest.approx(expected_area(alpha), abs=5 * 0.5 / math.sqrt(draws) / 2)


@pytest.mark.parametrize("nothing", [{"alpha": 0}, {"length": 0}, {"length": 0, "uniform_sampling": True}])
def test_no_area_pastes_nothing(nothing: dict[str, Any]) -> None:
    """The limit of the distribution, and of the length: each image on its own."""
    images = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    mixed, _, kept, _ = cutmix_batch(images, torch.arange(5), **nothing)

    assert kept == 1
    assert torch.equal(mixed, images)


def test_a_length_of_one_is_the_whole_image_at_most() -> None:
    """Cut off where it sticks out, so the area is that of the box as pasted."""
    kept = {cutmix_batch(torch.zeros(1, 4, 4), torch.zeros(1), length=1)[2] for _ in range(50)}

    assert min(kept) == 0 < max(kept) < 1


def test_a_generator_fixes_the_draws_and_spares_the_global_one() -> None:
    """Same seed, same mixture; the global generator does not move."""
    images, target = torch.arange(96.0).reshape(6, 1, 4, 4), torch.arange(6)
    before = torch.get_rng_state()
    first, second, other = (
        cutmix_batch(images, target, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )

    assert torch.equal(first[0], second[0])
    assert first[3] == second[3]
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf, "1"])
def test_alpha_out_of_range_is_refused(alpha: Any) -> None:
    """The error names the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"CutMix: alpha=.* \[0, inf\)"):
        CutMix(alpha=alpha)
    with pytest.raises(ConfigurationError, match=r"cutmix_batch: alpha=.* \[0, inf\)"):
        cutmix_batch(torch.zeros(2, 4, 4), torch.zeros(2), alpha=alpha)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1.1}, r"length=1\.1 .* \[0, 1\]"),
        ({"length": math.nan}, r"length=nan .* \[0, 1\]"),
        ({"bbox": (0, 0, 5, 4)}, r"bbox=\(0, 0, 5, 4\) .* within an image of 4 x 6"),
        ({"bbox": (2, 0, 1, 4)}, r"bbox=\(2, 0, 1, 4\)"),
        ({"bbox": (0, -1, 1, 4)}, r"bbox=\(0, -1, 1, 4\)"),
        ({"bbox": (0, 0, 1)}, r"bbox=\(0, 0, 1\) .* \(top, left, bottom, right\)"),
        ({"bbox": (0.0, 0.0, 1.0, 1.0)}, r"bbox=.* whole numbers"),
        ({"bbox": 3}, r"bbox=3"),
        ({"indices": torch.tensor([0, 1, 0])}, r"shape \(2,\), not \(3,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """The error names the argument and what would fit."""
    with pytest.raises(ConfigurationError, match=f"cutmix_batch: .*{message}|cutmix_batch: {message}"):
        cutmix_batch(torch.zeros(2, 4, 6), torch.zeros(2), **options)


@pytest.mark.parametrize(
    ("shape", "targets", "message"),
    [
        ((2, 4), 2, r"images of shape \(N, \.\.\., H, W\), got \(2, 4\)"),
        ((2, 0, 4), 2, r"images of shape \(N, \.\.\., H, W\), got \(2, 0, 4\)"),
        ((2, 4, 4), 3, r"as many targets as inputs, got \(3,\) and \(2, 4, 4\)"),
    ],
)
def test_batches_that_are_no_images_are_refused(shape: tuple[int, ...], targets: int, message: str) -> None:
    """The error names the shapes."""
    with pytest.raises(BatchError, match=message):
        cutmix_batch(torch.zeros(shape), torch.zeros(targets))


class Recorder(nn.Linear):
    """A classifier of 4 x 4 pixels into 3 classes, in float64; keeps what the model and its loss were given."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(16, 3, dtype=torch.float64)
        self.inputs: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.inputs.append(input)
        return super().forward(input.flatten(1))

    def cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        if reduction == "mean":
            self.targets.append(targets)
        return functional.cross_entropy(outputs, targets, reduction=reduction)


LABELS = [0, 1, 2, 1, 0, 2, 2]


def make_trainer(model: Recorder, algorithms: Sequence[Algorithm[Any, Any]], **options: Any) -> Trainer:
    """A run of three batches of seven images, (7, 1, 4, 4)."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(7, 1, 4, 4, generator=generator, dtype=torch.float64), torch.tensor(LABELS)) for _ in range(3)
    ]
    defaults: dict[str, Any] = {"loss": model.cross_entropy, "max_duration": "3ba", "seed": 2}
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return Trainer(model, batches, optimizers=optimizer, algorithms=algorithms, **defaults | options)


class Watch(Callback[State]):
    """Keeps how CutMix has paired each batch, and the targets around the loss."""

    def __init__(self, cutmix: CutMix) -> None:
        self.cutmix = cutmix
        self.paired: list[tuple[Box, list[int], float]] = []
        self.found: list[torch.Tensor] = []
        self.restored: list[torch.Tensor] = []

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.paired.append((self.cutmix.bbox, self.cutmix.indices.tolist(), self.cutmix.mixing))

    def after_forward(self, state: State, logger: Logger) -> None:
        self.found.append(state.batch_get_item(1))

    def after_loss(self, state: State, logger: Logger) -> None:
        self.restored.append(state.batch_get_item(1))


@pytest.mark.anyio
@pytest.mark.parametrize(("microbatches", "sizes"), [(1, [7]), (3, [3, 3, 1])])
async def test_targets_are_mixed_by_the_area_of_the_box(microbatches: int, sizes: list[int]) -> None:
    """The whole batch is mixed at once; the loss sees as much of the partner's class as the image shows of it."""
    model, cutmix = Recorder(), CutMix()
    watch = Watch(cutmix)
    trainer = make_trainer(model, [cutmix], microbatches=microbatches, callbacks=[watch])
    await trainer.fit()
    one_hot = torch.eye(3, dtype=torch.float64)[LABELS]
    images, targets = [], []
    for (inputs, _), (box, partners, mixing) in zip(trainer.state.train_dataloader, watch.paired, strict=True):
        mixed, kept = pasted_reference(inputs, partners, box)
        images.append(mixed)
        targets.append(kept * one_hot + (1 - kept) * one_hot[partners])
        assert mixing == pytest.approx(1 - kept)

    assert [len(part) for part in model.inputs] == sizes * 3
    assert torch.equal(torch.cat(model.inputs), torch.cat(images))
    torch.testing.assert_close(torch.cat(model.targets), torch.cat(targets))
    assert len({box for box, _, _ in watch.paired}) == 3
    assert torch.cat(watch.restored).tolist() == LABELS * 3


@pytest.mark.anyio
async def test_neither_microbatches_nor_the_mode_change_what_is_learnt() -> None:
    """Gradients of the parts add up, and cross-entropy is linear in the targets: all four runs are one."""
    weights = []
    for microbatches in (1, 3):
        for interpolate_loss in (False, True):
            model = Recorder()
            await make_trainer(model, [CutMix(interpolate_loss=interpolate_loss)], microbatches=microbatches).fit()
            weights.append(model.weight.detach())
    unmixed = Recorder()
    await make_trainer(unmixed, []).fit()

    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(unmixed.weight, weights[0], atol=1e-3)


@pytest.mark.anyio
@pytest.mark.parametrize("smoothing_first", [True, False])
async def test_smoothing_goes_with_it_in_either_order(smoothing_first: bool) -> None:
    """The loss sees mixtures of smoothed labels, and the very same labels come back after it."""
    model, cutmix, smoothing = Recorder(), CutMix(), LabelSmoothing(0.3)
    watch = Watch(cutmix)
    algorithms: list[Algorithm[Any, Any]] = [smoothing, cutmix] if smoothing_first else [cutmix, smoothing]
    await make_trainer(model, algorithms, callbacks=[watch], microbatches=3).fit()
    smooth = 0.7 * torch.eye(3, dtype=torch.float64)[LABELS] + 0.1
    expected = [(1 - mixing) * smooth + mixing * smooth[partners] for _, partners, mixing in watch.paired]

    torch.testing.assert_close(torch.cat(model.targets), torch.cat(expected))
    assert all(restored is found for restored, found in zip(watch.restored, watch.found, strict=True))
    assert torch.cat(watch.restored).tolist() == LABELS * 3


@pytest.mark.anyio
@pytest.mark.parametrize("selective_first", [True, False])
async def test_selective_backprop_ranks_clean_images(selective_first: bool) -> None:
    """It sees the loader's own images in its extra forward pass, and what it keeps is mixed afterwards."""
    ranked: list[torch.Tensor] = []

    class Ranked(Recorder):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if not self.training:
                ranked.append(input)
            return super().forward(input)

    model, cutmix, selective = Ranked(), CutMix(), SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)
    watch = Watch(cutmix)
    algorithms: list[Algorithm[Any, Any]] = [selective, cutmix] if selective_first else [cutmix, selective]
    trainer = make_trainer(model, algorithms, callbacks=[watch])
    await trainer.fit()
    clean = [inputs for inputs, _ in trainer.state.train_dataloader]

    assert all(torch.equal(seen, images) for seen, images in zip(ranked, clean, strict=True))
    assert [len(part) for part in model.inputs] == [3, 3, 3]
    for images, mixed, (box, partners, _) in zip(clean, model.inputs, watch.paired, strict=True):
        kept = [i for i in range(7) if any(_shows(images[i], image, box) for image in mixed)]
        assert torch.equal(mixed, pasted_reference(images[kept], partners, box)[0])


def _shows(own: torch.Tensor, mixed: torch.Tensor, box: Box) -> bool:
    """Whether the mixed image is the own one outside of the box."""
    outside = torch.ones(4, 4, dtype=torch.bool)
    outside[box[0] : box[2], box[1] : box[3]] = False
    return bool(outside.any()) and torch.equal(own[..., outside], mixed[..., outside])


@pytest.mark.anyio
async def test_the_mixture_goes_with_autocast() -> None:
    """Inputs keep their type; outputs in bfloat16 get targets in float32."""
    model = Recorder().to(torch.float32)
    generator = torch.Generator().manual_seed(1)
    batch = (torch.randn(7, 1, 4, 4, generator=generator), torch.tensor(LABELS))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    await Trainer(
        model,
        [batch],
        loss=model.cross_entropy,
        optimizers=optimizer,
        max_duration="1ba",
        algorithms=[CutMix()],
        precision="amp_bf16",
    ).fit()

    assert [part.dtype for part in (*model.inputs, *model.targets)] == [torch.float32, torch.float32]
    assert bool(model.weight.isfinite().all())


def test_draws_belong_to_the_seed_and_the_batch() -> None:
    """A run that resumes at a batch, or tries it again, draws what the first one drew there; MixUp draws others."""

    def boxes(seed: int, batches: list[int]) -> list[tuple[Box, list[int]]]:
        drawn = []
        for batch in batches:
            state, cutmix = State(nn.Identity(), seed=seed), CutMix()
            state.batch = (torch.zeros(9, 32, 32), torch.zeros(9))
            for _ in range(batch):
                state.timestamp = state.timestamp.to_next_batch()
            cutmix.apply(Event.AFTER_DATALOADER, state, Logger())
            drawn.append((cutmix.bbox, cutmix.indices.tolist()))
        return drawn

    before = torch.get_rng_state()
    whole = boxes(1, [0, 1, 1, 2])

    assert whole[1] == whole[2]
    assert whole[0] != whole[1] != whole[3]
    assert boxes(1, [2]) == whole[3:]
    assert boxes(2, [0, 1, 1, 2]) != whole
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_are_no_single_tensor_are_refused() -> None:
    """The error says what came and how to point at the tensor."""
    state = State(nn.Identity())
    state.batch = ([torch.zeros(2), torch.zeros(2)], torch.zeros(2))

    with pytest.raises(BatchError, match=r"CutMix needs the input to be one tensor, got list\(.*\); point input_key"):
        CutMix().apply(Event.AFTER_DATALOADER, state, Logger())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_draws_on_a_cuda_device() -> None:
    """Drawn on the CPU, pasted on the device: the same mixture, bit for bit."""
    images, target = torch.arange(96.0).reshape(6, 1, 4, 4), torch.arange(6)
    here = cutmix_batch(images, target, generator=torch.Generator().manual_seed(3))
    there = cutmix_batch(images.cuda(), target.cuda(), generator=torch.Generator().manual_seed(3))

    assert torch.equal(there[0].cpu(), here[0])
    assert there[1].tolist() == here[1].tolist()
    assert there[2:] == here[2:]
