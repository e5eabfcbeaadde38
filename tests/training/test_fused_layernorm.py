"""Fused layer norm: its statistics, its types, and that everything else stays as it was."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.loggers.memory import InMemoryLogger
from eventbus_engine.training import NoEffectWarning, Trainer
from eventbus_engine.training.algorithms import (
    AutocastLayerNorm,
    FusedLayerNorm,
    GatedLinearUnits,
    apply_fused_layernorm,
)
from eventbus_engine.training.algorithms.fused_layernorm import _find_liger
from eventbus_engine.training.state import State


def normalized_reference(row: list[float], weight: list[float], bias: list[float], eps: float) -> list[float]:
    """The definition, one Python float (float64) at a time."""
    mean = math.fsum(row) / len(row)
    variance = math.fsum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / math.sqrt(variance + eps) * w + b for x, w, b in zip(row, weight, bias, strict=True)]


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_norm(*shape: int, dtype: torch.dtype = torch.float32) -> nn.LayerNorm:
    """A layer norm whose parameters are not the trivial ones."""
    norm = nn.LayerNorm(list(shape), eps=1e-3)
    norm.weight.data = random_tensor(*shape, seed=1)
    norm.bias.data = random_tensor(*shape, seed=2)
    return norm.to(dtype)


def transformer() -> nn.Sequential:
    """Two encoder layers, five layer norms."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)), nn.Flatten(), nn.Linear(24, 3))


# -------------------------------------------------------------------------------------------------------- the numbers


@settings(deadline=None)  # torch is slow when it is first called
@given(rows=st.integers(1, 4), width=st.integers(1, 9), offset=st.floats(-100, 100), seed=st.integers(0, 100))
def test_it_equals_the_definition(rows: int, width: int, offset: float, seed: int) -> None:
    """Row by row, in float64."""
    norm = random_norm(width, dtype=torch.float64)
    inputs = random_tensor(rows, width, seed=seed, dtype=torch.float64) + offset
    expected = [
        normalized_reference(row, norm.weight.tolist(), norm.bias.tolist(), norm.eps) for row in inputs.tolist()
    ]

    torch.testing.assert_close(AutocastLayerNorm(norm)(inputs), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_rounded_once(autocast: torch.dtype, dtype: torch.dtype) -> None:
    """The result is the float64 one, rounded to autocast's type: no more than half a unit in the last place is lost.

    The input has a mean of 100 and a deviation of 0.1, which rounding it first would wipe out.
    """
    norm = random_norm(64)
    inputs = (100 + 0.1 * random_tensor(16, 64, dtype=torch.float64)).to(dtype)
    exact = functional.layer_norm(inputs.double(), (64,), norm.weight.double(), norm.bias.double(), norm.eps)
    with torch.autocast("cpu", dtype=autocast):
        actual = AutocastLayerNorm(norm)(inputs)

    assert actual.dtype == autocast
    half_unit = torch.finfo(autocast).eps / 2
    # In float32 the mean of such an input is itself off by 1e-5 of the deviation.
    torch.testing.assert_close(actual.double(), exact, rtol=1.01 * half_unit, atol=2e-3 * half_unit + 2e-4)


def test_gradients_under_autocast_are_those_of_float64() -> None:
    """To the precision of the types they are in: the parameters' in float32, though the output is in bfloat16."""
    norm = random_norm(32)
    inputs = (3 + random_tensor(8, 32)).requires_grad_()
    outer = random_tensor(8, 32, seed=3).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = AutocastLayerNorm(norm)(inputs)
    actual = torch.autograd.grad(output, (inputs, norm.weight, norm.bias), outer)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (inputs, norm.weight, norm.bias)]
    exact = functional.layer_norm(doubles[0], (32,), doubles[1], doubles[2], norm.eps)
    expected = torch.autograd.grad(exact, doubles, outer.double())

    assert [gradient.dtype for gradient in actual] == [torch.float32] * 3
    for gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("inputs", [torch.bfloat16, torch.float32, torch.float64])
def test_without_autocast_the_output_has_the_inputs_type(parameters: torch.dtype, inputs: torch.dtype) -> None:
    """The wider of the two types computes."""
    norm, values = random_norm(16, dtype=parameters), random_tensor(4, 16, dtype=inputs)
    exact = functional.layer_norm(values.double(), (16,), norm.weight.double(), norm.bias.double(), norm.eps)
    actual = AutocastLayerNorm(norm)(values)

    assert actual.dtype == inputs
    precision = torch.finfo(inputs).eps if inputs != torch.float64 else 1e-6
    torch.testing.assert_close(actual.double(), exact, rtol=precision, atol=precision)


def test_float64_stays_float64_under_autocast() -> None:
    """As autocast leaves it alone elsewhere."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert AutocastLayerNorm(nn.LayerNorm(2).double())(torch.zeros(1, 2).double()).dtype == torch.float64


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(6, elementwise_affine=False),
        nn.LayerNorm(6, bias=False),
        nn.LayerNorm([4, 6], eps=0.1),
        random_norm(6),
    ],
)
def test_in_float32_it_is_torchs_own(norm: nn.LayerNorm) -> None:
    """Bit for bit, with every choice of parameters; printed with the same arguments, copied and pickled."""
    fused, inputs = AutocastLayerNorm(norm), random_tensor(2, 4, 6)

    assert torch.equal(fused(inputs), norm(inputs))
    assert fused.extra_repr() == norm.extra_repr()
    assert torch.equal(copy.deepcopy(fused)(inputs), norm(inputs))
    assert torch.equal(pickle.loads(pickle.dumps(fused))(inputs), norm(inputs))


# ---------------------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize(("version", "found"), [("0.8.4", False), ("0.8.5", True), ("1.0.0.dev1", True)])
def test_ligers_kernel_is_used_from_the_version_that_keeps_float32_statistics(
    version: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones round them for the backward pass."""
    metadata = tmp_path / f"liger_kernel-{version}.dist-info" / "METADATA"
    module = tmp_path / "liger_kernel" / "ops" / "layer_norm.py"
    for path, text in (
        (metadata, f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {version}\n"),
        (module, "class LigerLayerNormFunction: ..."),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        kernel = _find_liger()
    finally:
        for name in ("liger_kernel.ops.layer_norm", "liger_kernel.ops", "liger_kernel"):
            sys.modules.pop(name, None)

    assert (kernel is not None) is found


@pytest.mark.parametrize(
    ("norm", "inputs", "expected"),
    [
        (nn.LayerNorm(4), torch.zeros(2, 4), True),
        (nn.LayerNorm(4), torch.zeros(2, 4).bfloat16(), True),
        (nn.LayerNorm(4), torch.zeros(2, 4).double(), False),
        (nn.LayerNorm(4), torch.zeros(0, 4), False),
        (nn.LayerNorm(4, bias=False), torch.zeros(2, 4), False),
        (nn.LayerNorm(4, elementwise_affine=False), torch.zeros(2, 4), False),
        (nn.LayerNorm([2, 4]), torch.zeros(2, 4), False),
        (nn.LayerNorm(65537), torch.zeros(1, 65537), False),
    ],
)
def test_ligers_kernel_gets_what_it_can_compute(norm: nn.LayerNorm, inputs: Tensor, expected: bool) -> None:
    """A norm over one dimension, of 65536 at most, with weight and bias, in float32."""
    assert AutocastLayerNorm(norm)._suits_liger(inputs) is expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_output_has_autocasts_type(dtype: torch.dtype) -> None:
    """By torch's own kernel."""
    norm = random_norm(64).cuda()
    inputs = (3 + random_tensor(16, 64)).to("cuda", dtype)
    fused = AutocastLayerNorm(norm)
    fused._liger = None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = fused(inputs)
    exact = functional.layer_norm(inputs.double(), (64,), norm.weight.double(), norm.bias.double(), norm.eps)

    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.skipif(
    not torch.cuda.is_available() or _find_liger() is None, reason="needs a CUDA device and liger_kernel 0.8.5 or later"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ligers_kernel_computes_the_same(dtype: torch.dtype) -> None:
    """Output and gradients, from inputs in either type with parameters in float32."""
    norm = random_norm(64).cuda()
    inputs = (3 + random_tensor(16, 64)).to("cuda", dtype).requires_grad_()
    outer = random_tensor(16, 64, seed=3).to("cuda", torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = AutocastLayerNorm(norm)(inputs)
    gradients = torch.autograd.grad(actual, (inputs, norm.weight, norm.bias), outer)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (inputs, norm.weight, norm.bias)]
    exact = functional.layer_norm(doubles[0], (64,), doubles[1], doubles[2], norm.eps)
    expected = torch.autograd.grad(exact, doubles, outer.double())

    assert "Liger" in type(actual.grad_fn).__name__ or dtype == torch.float32
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=1e-3)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=2**-7, atol=2e-2)


# --------------------------------------------------------------------------------------------------------- the surgery


def test_every_layer_norm_is_replaced_and_parameters_are_carried_over() -> None:
    """Under their names, in the order they had; the optimizer keeps its state, checkpoints fit both ways."""
    model, other = transformer(), transformer()
    inputs = random_tensor(2, 3, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()
    expected, parameters, states = model(inputs), list(model.parameters()), dict(optimizer.state)
    actual = apply_fused_layernorm(model, optimizer)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.LayerNorm)]
    other.load_state_dict(model.state_dict())

    assert actual is model
    assert kinds == [AutocastLayerNorm] * 5
    assert torch.equal(model(inputs), expected)
    assert torch.equal(other(inputs), expected)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert dict(optimizer.state) == states


class ChannelsFirst(nn.LayerNorm):
    """With a forward of its own, as torchvision's LayerNorm2d."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class Renamed(nn.LayerNorm):
    """A layer norm by another name."""


def test_only_what_normalises_as_torch_does_is_replaced() -> None:
    """Another forward, or a weight that is computed, is left alone; a second time there is nothing left."""
    computed = parametrizations.spectral_norm(nn.LayerNorm([4, 4]))
    model = nn.Sequential(Renamed(4), ChannelsFirst(4), computed)
    apply_fused_layernorm(model)

    assert [type(module) for module in model] == [AutocastLayerNorm, ChannelsFirst, type(computed)]
    with pytest.warns(NoEffectWarning, match=r"FusedLayerNorm changed nothing: Sequential has no torch\.nn\.LayerNorm"):
        apply_fused_layernorm(model)


def test_a_model_that_is_a_layer_norm_is_returned_anew() -> None:
    """Nothing holds it that could be changed; its mode and type are kept."""
    norm = nn.LayerNorm(4).bfloat16().eval()
    actual = apply_fused_layernorm(norm)

    assert isinstance(actual, AutocastLayerNorm)
    assert actual.weight is norm.weight
    assert actual.training is False


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    """The error names it."""
    with pytest.raises(ConfigurationError, match=r"is no torch\.nn\.Module"):
        apply_fused_layernorm(nn.LayerNorm)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match=r"'sgd' is no optimizer"):
        apply_fused_layernorm(transformer(), "sgd")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("autocast", [False, True])
def test_the_fused_model_compiles(autocast: bool) -> None:
    """`torch.compile` sees one graph, with autocast and without."""
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), random_tensor(2, 4)
    apply_fused_layernorm(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = model(inputs)
        actual = torch.compile(model, backend="eager", fullgraph=True)(inputs)

    assert torch.equal(actual, expected)
    assert actual.dtype == (torch.bfloat16 if autocast else torch.float32)


# ----------------------------------------------------------------------------------------------------------- in a run


@pytest.mark.anyio
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("fused_first", [True, False])
async def test_it_comes_last_and_leaves_no_plain_layer_norm(fused_first: bool, precision: Any) -> None:
    """Whichever way round it is registered, after other surgery; the run trains what it has put in."""
    model, records = transformer(), InMemoryLogger()
    algorithms = [FusedLayerNorm(), GatedLinearUnits()] if fused_first else [GatedLinearUnits(), FusedLayerNorm()]
    trainer = Trainer(
        model,
        [(random_tensor(4, 3, 8), torch.tensor([0, 1, 2, 0]))] * 2,
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="1ep",
        algorithms=algorithms,
        loggers=[records],
        precision=precision,
        seed=1,
    )
    order = list(trainer.engine.explain(Event.INIT).order)
    before = [p.detach().clone() for name, p in model.named_parameters() if "norm" in name]
    await trainer.fit()
    after = [p for name, p in model.named_parameters() if "norm" in name]

    assert order == ["gated_linear_units", "fused_layernorm"]
    assert {type(module) for module in model.modules() if isinstance(module, nn.LayerNorm)} == {AutocastLayerNorm}
    assert records.hyperparameters == {"gated_linear_units/num_layers": 2, "fused_layernorm/num_layers": 5}
    assert not any(torch.equal(p, old) for p, old in zip(after, before, strict=True))


def test_fused_layernorm_runs_on_init_only() -> None:
    """Of all forty events, one; and a checkpoint does not need it."""
    state = State(nn.Identity())

    assert {event for event in Event if FusedLayerNorm().match(event, state)} == {Event.INIT}
    assert FusedLayerNorm.required_on_load() is False
    assert FusedLayerNorm().name == "fused_layernorm"
