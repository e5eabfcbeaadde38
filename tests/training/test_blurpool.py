"""BlurPool: the filter, what is replaced, and that small shifts matter less."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.loggers.memory import InMemoryLogger
from eventbus_engine.training import NoEffectWarning, Trainer
from eventbus_engine.training.algorithms import BlurConv2d, BlurMaxPool2d, BlurPool, apply_blurpool, blur_2d
from eventbus_engine.training.state import State

TRIANGLE = [[1 / 16, 2 / 16, 1 / 16], [2 / 16, 4 / 16, 2 / 16], [1 / 16, 2 / 16, 1 / 16]]

Image = list[list[float]]


def blurred_reference(image: Image, stride: tuple[int, int], taps: Image) -> Image:
    """The definition, one Python float (float64) at a time: beyond the border lie the border's own pixels."""
    height, width = len(image), len(image[0])
    rows, columns = range(0, height, stride[0]), range(0, width, stride[1])

    def pixel(y: int, x: int) -> float:
        return image[min(max(y, 0), height - 1)][min(max(x, 0), width - 1)]

    def blurred(y: int, x: int) -> float:
        return math.fsum(
            tap * pixel(y + i - len(taps) // 2, x + j - len(row) // 2)
            for i, row in enumerate(taps)
            for j, tap in enumerate(row)
        )

    return [[blurred(y, x) for x in columns] for y in rows]


def dense_maximum(image: Image, kernel: int, padding: int, dilation: int, positions: tuple[int, int]) -> Image:
    """The maximum of every window of that many positions, one pixel apart; what is not in the image does not count."""

    def maximum(y: int, x: int) -> float:
        offsets = [dilation * k - padding for k in range(kernel)]
        return max(
            (
                image[y + i][x + j]
                for i, j in itertools.product(offsets, offsets)
                if 0 <= y + i < len(image) and 0 <= x + j < len(image[0])
            ),
            default=-math.inf,
        )

    return [[maximum(y, x) for x in range(positions[1])] for y in range(positions[0])]


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def network() -> nn.Sequential:
    """The image's own convolution, a strided one, and poolings."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(16, 8, 3, stride=2, padding=1),
        nn.MaxPool2d(1, stride=1),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def built_network() -> nn.Sequential:
    """The same with its last layer built, for images of 16 x 16."""
    model = network()
    model(torch.zeros(1, 1, 16, 16))
    return model


# ------------------------------------------------------------------------------------------------------------ the blur


@settings(deadline=None)  # torch is slow when it is first called
@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    taps=st.none() | st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 5])),
    seed=st.integers(0, 100),
)
def test_blur_equals_the_definition(
    size: tuple[int, int], stride: tuple[int, int], taps: tuple[int, int] | None, seed: int
) -> None:
    """For every size, stride and filter, each channel by itself."""
    images = random_tensor(2, 3, *size, seed=seed)
    kernel = None if taps is None else random_tensor(*taps, seed=seed + 1)
    actual = blur_2d(images, stride, kernel)
    expected = [
        [blurred_reference(image, stride, TRIANGLE if kernel is None else kernel.tolist()) for image in sample]
        for sample in images.tolist()
    ]

    assert actual.shape == (2, 3, math.ceil(size[0] / stride[0]), math.ceil(size[1] / stride[1]))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_constant_stays_that_constant(dtype: torch.dtype) -> None:
    """Up to the border, exactly, in the type that goes in; for a single image, too."""
    actual = blur_2d(torch.full((2, 5, 5), 3.0, dtype=dtype), stride=2)

    assert torch.equal(actual, torch.full((2, 3, 3), 3.0, dtype=dtype))


def test_the_papers_example_of_max_pooling() -> None:
    """One pixel of shift turns max pooling's answer from 0 1 0 1 to 1 1 1 1, and the blurred one's by far less."""
    signal = torch.tensor([0.0, 0, 1, 1] * 4).expand(1, 1, 4, 16)
    # Both are constant along the columns; away from the border the signal is periodic, as it is in the paper.
    pool = nn.MaxPool2d((1, 2), stride=(1, 2))
    blurred = BlurMaxPool2d(pool)
    shifted = signal.roll(1, dims=-1)

    assert pool(signal)[0, 0, 1, 2:6].tolist() == [0, 1, 0, 1]
    assert pool(shifted)[0, 0, 1, 2:6].tolist() == [1, 1, 1, 1]
    assert blurred(signal)[0, 0, 1, 2:6].tolist() == [0.5, 1, 0.5, 1]
    assert blurred(shifted)[0, 0, 1, 2:6].tolist() == [0.75, 0.75, 0.75, 0.75]


@pytest.mark.parametrize("blur_first", [True, False])
def test_the_finest_detail_does_not_alias(blur_first: bool) -> None:
    """Stripes of one pixel become a constant whose sign depends on the shift; blurred first, they are gone."""
    conv = nn.Conv2d(1, 1, 1, stride=2, bias=False)
    nn.init.ones_(conv.weight)
    stripes = torch.tensor([1.0, -1.0] * 4).expand(1, 1, 8, 8)
    shifted = stripes.roll(1, dims=-1)
    blurred = BlurConv2d(conv, blur_first)

    assert conv(stripes)[..., 1:3].flatten().tolist() == [1.0] * 8
    assert conv(shifted)[..., 1:3].flatten().tolist() == [-1.0] * 8
    assert blurred(stripes)[..., 1:3].flatten().tolist() == [0.0] * 8
    assert blurred(shifted)[..., 1:3].flatten().tolist() == [0.0] * 8


@pytest.mark.parametrize("blur_first", [True, False])
def test_a_shift_by_the_stride_shifts_the_output_by_one(blur_first: bool) -> None:
    """Of the convolution and of the pooling, away from the border, where another part of the picture comes in."""
    images = random_tensor(2, 2, 16, 16)
    for layer in (BlurConv2d(nn.Conv2d(2, 2, 3, stride=2).double(), blur_first), BlurMaxPool2d(nn.MaxPool2d(2))):
        before, after = layer(images), layer(images.roll((2, 2), dims=(-2, -1)))

        torch.testing.assert_close(after[..., 2:-1, 2:-1], before[..., 1:-2, 1:-2], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- the layers


@settings(deadline=None)
@given(
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    padding=st.integers(0, 1),
    blur_first=st.booleans(),
)
def test_a_blurred_convolution_equals_its_parts(
    stride: tuple[int, int], size: tuple[int, int], padding: int, blur_first: bool
) -> None:
    """Blur then convolve, or convolve then blur; along a direction of stride 1 nothing is blurred."""
    conv = nn.Conv2d(2, 3, 3, stride=stride, padding=padding).double()
    images = random_tensor(2, 2, *size)
    taps = [
        [y * x for x in ([0.25, 0.5, 0.25] if stride[1] > 1 else [1.0])]
        for y in ([0.25, 0.5, 0.25] if stride[0] > 1 else [1.0])
    ]

    def blur(maps: Tensor, step: tuple[int, int]) -> Tensor:
        return torch.tensor(
            [[blurred_reference(image, step, taps) for image in sample] for sample in maps.tolist()],
            dtype=torch.float64,
        )

    if blur_first:
        expected = functional.conv2d(blur(images, (1, 1)), conv.weight, conv.bias, stride, padding)
    else:
        expected = blur(functional.conv2d(images, conv.weight, conv.bias, 1, padding), stride)
    layer = BlurConv2d(conv, blur_first)

    torch.testing.assert_close(layer(images), expected, rtol=1e-12, atol=1e-12)
    assert layer(images).shape == conv(images).shape
    assert conv.stride == stride  # the layer that was given is as it was
    assert all(p is q for p, q in zip(layer.parameters(), conv.parameters(), strict=True))


@settings(deadline=None)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 4),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    ceil_mode=st.booleans(),
)
def test_a_blurred_pooling_equals_the_definition(
    size: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> None:
    """Dense maximum, blur, subsample; the shape is the pooling's own, rounded up or down."""
    assume(padding <= kernel // 2)
    assume(min(size) + 2 * padding > dilation * (kernel - 1))
    pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    image = random_tensor(1, 1, *size)
    shape = pool(image).shape
    # Rounded up, the last window may lie beyond the last one that is within the padding.
    within = [side + 2 * padding - dilation * (kernel - 1) for side in size]
    positions = [max(n, (out - 1) * stride + 1) for n, out in zip(within, shape[-2:], strict=True)]
    maximum = dense_maximum(image[0, 0].tolist(), kernel, padding, dilation, (positions[0], positions[1]))
    expected = blurred_reference(maximum, (stride, stride), TRIANGLE if stride > 1 else [[1.0]])
    actual = BlurMaxPool2d(pool)(image)

    assert actual.shape == shape
    torch.testing.assert_close(actual[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_layers_run_in_autocasts_type() -> None:
    """The filter follows the input; neither of them is trained or saved."""
    conv, pool = BlurConv2d(nn.Conv2d(2, 2, 3, stride=2)), BlurMaxPool2d(nn.MaxPool2d(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = pool(conv(random_tensor(1, 2, 9, 9, dtype=torch.float32)))

    assert outputs.dtype == torch.bfloat16
    assert list(conv.state_dict()) == ["conv.weight", "conv.bias"]
    assert list(pool.state_dict()) == []
    assert (
        repr(pool)
        == "BlurMaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1), ceil_mode=False)"
    )


# --------------------------------------------------------------------------------------------------------- the surgery


def test_strided_layers_are_replaced_and_shapes_stay() -> None:
    """Not the one that sees the image, and none of stride 1; parameters and optimizer stay what they are."""
    model = built_network()
    images = random_tensor(2, 1, 16, 16, dtype=torch.float32)
    shape, parameters = model(images).shape, list(model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    model(images).sum().backward()
    optimizer.step()
    state = dict(optimizer.state)
    actual = apply_blurpool(model, optimizers=optimizer)

    assert actual is model
    assert [type(module) for module in model] == [
        nn.Conv2d,
        nn.ReLU,
        BlurMaxPool2d,
        BlurConv2d,
        nn.MaxPool2d,
        nn.Flatten,
        nn.Linear,
    ]
    assert model(images).shape == shape
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert dict(optimizer.state) == state


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"replace_convs": False}, [2]),
        ({"replace_maxpools": False}, [3]),
        ({"min_channels": 1}, [0, 2, 3]),
        ({"min_channels": 17}, [2]),
        ({"blur_first": False}, [2, 3]),
    ],
)
def test_options_say_what_is_replaced(options: dict[str, Any], expected: list[int]) -> None:
    """The positions of the layers that blur."""
    model = network()
    apply_blurpool(model, **options)
    blurred = [number for number, module in enumerate(model) if isinstance(module, BlurConv2d | BlurMaxPool2d)]
    ways = {module.blur_first for module in model if isinstance(module, BlurConv2d)}

    assert blurred == expected
    assert ways <= {options.get("blur_first", True)}


class OwnConv(nn.Conv2d):
    """With a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_what_cannot_be_stood_for_is_left_alone() -> None:
    """Another forward, indices to return, a stride of 1; and with nothing else, a warning."""
    model = nn.Sequential(OwnConv(16, 1, 1, stride=2), nn.MaxPool2d(2, return_indices=True), nn.Conv2d(16, 1, 1))
    before = list(model)

    with pytest.warns(NoEffectWarning, match="BlurPool changed nothing: Sequential has no strided Conv2d of 16"):
        assert apply_blurpool(model) is model
    assert list(model) == before


def test_blurring_twice_is_blurring_once() -> None:
    """What is inside a layer that blurs is not blurred again."""
    model = network()
    apply_blurpool(model)
    before = list(model.modules())

    with pytest.warns(NoEffectWarning, match="BlurPool"):
        apply_blurpool(model)
    assert list(model.modules()) == before


def test_a_model_that_is_one_layer_is_returned_anew() -> None:
    """Nothing holds it that could be changed."""
    conv = nn.Conv2d(16, 1, 3, stride=2)
    actual = apply_blurpool(conv)

    assert isinstance(actual, BlurConv2d)
    assert actual.conv is conv


@pytest.mark.parametrize("blur_first", [True, False])
def test_the_blurred_model_compiles_and_its_state_goes_round(blur_first: bool) -> None:
    """`torch.compile` sees one graph, and a copy loads what was saved."""
    images = random_tensor(2, 1, 16, 16, dtype=torch.float32)
    models = [built_network() for _ in range(2)]
    for model in models:
        apply_blurpool(model, blur_first=blur_first)
    models[1].load_state_dict(models[0].state_dict())

    compiled = torch.compile(models[1], backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), models[0](images))


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replace_convs": 1}, r"replace_convs=1 has to be True or False"),
        ({"replace_maxpools": None}, r"replace_maxpools=None has to be True or False"),
        ({"blur_first": "yes"}, r"blur_first='yes' has to be True or False"),
        ({"replace_convs": False, "replace_maxpools": False}, r"both False there is nothing to do"),
        ({"min_channels": 0}, r"min_channels=0 has to be a whole number, 1 or more"),
        ({"min_channels": 1.5}, r"min_channels=1\.5 has to be"),
        ({"min_channels": True}, r"min_channels=True has to be"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """The error names the option and its value; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=f"BlurPool: .*{message}"):
        BlurPool(**options)
    with pytest.raises(ConfigurationError, match=f"apply_blurpool: .*{message}"):
        apply_blurpool(network(), **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3, 3),), BatchError, r"\(N, C, H, W\) or \(C, H, W\), got \(3, 3\)"),
        ((torch.zeros(1, 3, 3), 0), ConfigurationError, r"stride=0 has to be 1 or more"),
        ((torch.zeros(1, 3, 3), (1, -1)), ConfigurationError, r"stride=\(1, -1\) has to be 1 or more"),
        ((torch.zeros(1, 3, 3), 1, torch.ones(2, 3)), ConfigurationError, r"both odd, got \(2, 3\)"),
        ((torch.zeros(1, 3, 3), 1, torch.ones(3)), ConfigurationError, r"both odd, got \(3,\)"),
    ],
)
def test_a_blur_of_what_does_not_fit_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    """The error names the shape or the number."""
    with pytest.raises(error, match=message):
        blur_2d(*arguments)


# ----------------------------------------------------------------------------------------------------------- in a run


@pytest.mark.anyio
async def test_a_run_trains_the_blurred_model() -> None:
    """From INIT on; the optimizer that was made before steps what the model has, and the log says how many blur."""
    model, records = built_network(), InMemoryLogger()
    before = [p.detach().clone() for p in model.parameters()]
    images = random_tensor(4, 1, 16, 16, dtype=torch.float32)
    trainer = Trainer(
        model,
        [(images, torch.tensor([0, 1, 2, 0]))],
        loss=functional.cross_entropy,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration="2ep",
        algorithms=[BlurPool()],
        loggers=[records],
    )
    await trainer.fit()

    assert records.hyperparameters == {"blurpool/num_blurconv_layers": 1, "blurpool/num_blurpool_layers": 1}
    assert isinstance(model[3], BlurConv2d)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_blurpool_runs_on_init_only() -> None:
    """Of all forty events, one; and a checkpoint needs it."""
    state = State(nn.Identity())

    assert {event for event in Event if BlurPool().match(event, state)} == {Event.INIT}
    assert BlurPool.required_on_load() is True
    assert BlurPool().name == "blurpool"
