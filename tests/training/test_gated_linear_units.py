"""Gated linear units: the formula, which blocks are gated, and where the new weights come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import TransformerEncoderLayer as Encoder
from torch.nn import functional
from torch.nn.utils import parametrizations

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.loggers.memory import InMemoryLogger
from eventbus_engine.training import NoEffectWarning, Trainer
from eventbus_engine.training.algorithms import GatedLinear, GatedLinearUnits, apply_gated_linear_units
from eventbus_engine.training.state import State


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def feed_forward(width: int = 4, hidden: int = 8, activation: nn.Module | None = None) -> nn.Sequential:
    """A transformer's block, without dropout."""
    return nn.Sequential(nn.Linear(width, hidden), activation or nn.GELU(), nn.Linear(hidden, width))


def linear_reference(row: list[float], weight: list[list[float]], bias: list[float] | None) -> list[float]:
    """`W x + b`, one Python float (float64) at a time."""
    return [
        math.fsum(w * x for w, x in zip(weights, row, strict=True)) + (0.0 if bias is None else bias[number])
        for number, weights in enumerate(weight)
    ]


def numbers(parameter: Tensor | None) -> Any:
    """A parameter as Python floats."""
    return None if parameter is None else parameter.tolist()


# --------------------------------------------------------------------------------------------------------- the formula


@settings(deadline=None)  # torch is slow when it is first called
@given(
    width=st.integers(1, 4),
    hidden=st.integers(5, 7),
    own_bias=st.booleans(),
    biases=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 100),
)
def test_a_gated_block_equals_the_papers_formula(
    width: int, hidden: int, own_bias: bool, biases: tuple[bool, bool], seed: int
) -> None:
    """`W2 (tanh(W x + b) * (V x + c)) + d`, with and without b and c."""
    model = nn.Sequential(nn.Linear(width, hidden, bias=own_bias), nn.Tanh(), nn.Linear(hidden, width)).double()
    inputs = random_tensor(3, width, seed=seed, dtype=torch.float64)
    block: Any = apply_gated_linear_units(model, None, None, *biases, seed=seed)
    gate, other, last = block[0].gated_layer, block[0].non_gated_layer, block[2]
    expected = []
    for row in inputs.tolist():
        gated = [math.tanh(z) for z in linear_reference(row, numbers(gate.weight), numbers(gate.bias))]
        linear = linear_reference(row, numbers(other.weight), numbers(other.bias))
        inner = [a * b for a, b in zip(gated, linear, strict=True)]
        expected.append(linear_reference(inner, numbers(last.weight), numbers(last.bias)))

    assert (gate.bias is not None, other.bias is not None) == biases
    torch.testing.assert_close(block(inputs), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", [functional.relu, nn.GELU(), torch.tanh])
def test_a_gated_encoder_layer_equals_the_formula(activation: Any, norm_first: bool) -> None:
    """Attention and norms as before, around the gated block; also where torch would take its fast path."""
    layer = Encoder(8, 2, 16, 0.0, activation, batch_first=True, norm_first=norm_first).double()
    inputs = random_tensor(2, 5, 8, dtype=torch.float64)
    gated: Any = apply_gated_linear_units(layer, seed=0)
    linear = gated.linear1

    def block(x: Tensor) -> Tensor:
        hidden = activation(x @ layer.linear1.weight.T) * (x @ linear.non_gated_layer.weight.T)
        return layer.linear2(hidden)  # type: ignore[no-any-return]

    attention = layer.self_attn
    if norm_first:
        normed = layer.norm1(inputs)
        middle = inputs + attention(normed, normed, normed)[0]
        expected = middle + block(layer.norm2(middle))
    else:
        middle = layer.norm1(inputs + attention(inputs, inputs, inputs)[0])
        expected = layer.norm2(middle + block(middle))

    assert type(gated) is Encoder
    torch.testing.assert_close(gated(inputs), expected)
    gated.eval()
    with torch.no_grad():
        torch.testing.assert_close(gated(inputs), expected)


def test_padding_does_not_take_a_stack_to_the_fast_path() -> None:
    """Of inference: it reads the weights of the block as it was. The outputs at the tokens are those of training."""
    model = nn.TransformerEncoder(Encoder(8, 2, 16, 0.0, batch_first=True), 2)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    inputs = random_tensor(2, 3, 8)
    apply_gated_linear_units(model, seed=0)
    expected = model(inputs, src_key_padding_mask=padding)
    model.eval()
    with torch.no_grad():
        actual = model(inputs, src_key_padding_mask=padding)

    torch.testing.assert_close(actual[~padding], expected[~padding])


def test_the_activation_may_be_given() -> None:
    """GLU is that with the logistic function; without, each block keeps its own."""
    inputs = random_tensor(3, 4)
    first: Any = apply_gated_linear_units(feed_forward(), act_fn=torch.sigmoid, seed=0)
    second: Any = apply_gated_linear_units(feed_forward(activation=nn.SiLU()), seed=0)

    assert first[0].act_fn is torch.sigmoid
    assert isinstance(second[0].act_fn, nn.SiLU)
    torch.testing.assert_close(
        first[0](inputs), torch.sigmoid(first[0].gated_layer(inputs)) * first[0].non_gated_layer(inputs)
    )


# ----------------------------------------------------------------------------------------------- what counts as a block


@pytest.mark.parametrize(
    ("block", "place"),
    [
        (feed_forward(), 0),
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.Dropout(0.1)), 0),
        (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3)), 1),
        (nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 4)), 1),
    ],
)
def test_feed_forward_blocks_are_gated_in_place(block: nn.Sequential, place: int) -> None:
    """The first linear layer is, an Identity stands for the activation; the rest are the very same modules."""
    model = nn.ModuleDict({"block": block})
    before, inputs = list(block), random_tensor(2, 4)
    shape = block(inputs).shape
    apply_gated_linear_units(model)
    actual: Any = model["block"]

    assert isinstance(actual[place], GatedLinear)
    assert isinstance(actual[place + 1], nn.Identity)
    assert actual[place].act_fn is before[place + 1]
    assert actual[place].gated_layer.weight is before[place].weight
    assert all(actual[i] is before[i] for i in range(len(before)) if i not in (place, place + 1))
    assert actual(inputs).shape == shape


class OwnSequential(nn.Sequential):
    """With a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        inner: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return input + inner


class OwnLinear(nn.Linear):
    """A subclass, such as a quantised layer."""


class OwnEncoder(Encoder):
    """With a block of its own."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return x


def tied_by_weight_norm() -> nn.Sequential:
    """The first weight is computed."""
    block = feed_forward()
    block[0] = parametrizations.weight_norm(block[0])
    return block


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4)),
        nn.Sequential(OwnLinear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        OwnSequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        OwnEncoder(8, 2, 16),
        tied_by_weight_norm(),
        nn.Linear(4, 8),
    ],
)
def test_anything_else_is_left_alone(model: nn.Module) -> None:
    """With a warning that names the algorithm."""
    before = list(model.modules())

    with pytest.warns(NoEffectWarning, match=f"GatedLinearUnits changed nothing: {type(model).__name__} has no feed-"):
        assert apply_gated_linear_units(model) is model
    assert list(model.modules()) == before


def test_gating_twice_is_gating_once() -> None:
    """A gated block is no candidate."""
    model = nn.Sequential(feed_forward(), Encoder(4, 2, 8))
    apply_gated_linear_units(model)
    before = list(model.modules())

    with pytest.warns(NoEffectWarning, match="not gated yet"):
        apply_gated_linear_units(model)
    assert list(model.modules()) == before


def test_encoders_and_decoders_of_a_transformer_are_gated() -> None:
    """All of them; a block has three matrices for two, and with the default no bias inside."""
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    count = sum(p.numel() for p in model.parameters())
    apply_gated_linear_units(model)
    gated = [name for name, module in model.named_modules() if isinstance(module, GatedLinear)]

    assert gated == [
        *(f"encoder.layers.{number}.linear1" for number in range(2)),
        *(f"decoder.layers.{number}.linear1" for number in range(3)),
    ]
    assert sum(p.numel() for p in model.parameters()) - count == 5 * (8 * 16 - 16)
    assert model(random_tensor(2, 3, 8), random_tensor(2, 4, 8)).shape == (2, 4, 8)


def test_a_shared_block_stays_shared() -> None:
    """As in models that repeat their layers."""
    block = feed_forward()
    model = nn.ModuleList([block, block])
    apply_gated_linear_units(model)

    assert model[0] is model[1]
    assert isinstance(model[0].get_submodule("0"), GatedLinear)


# ----------------------------------------------------------------------------------------------- weights and optimizers


def test_new_weights_come_from_the_seed_and_the_name() -> None:
    """Not from the global generator; each block has its own, of torch's own distribution."""

    def new_weights(seed: int | None) -> list[Tensor]:
        model = nn.Sequential(feed_forward(16, 64), feed_forward(16, 64))
        state = torch.get_rng_state()
        apply_gated_linear_units(model, gated_layer_bias=True, non_gated_layer_bias=True, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        names = [name for name, _ in model.named_parameters() if "non_gated" in name]
        return [model.get_parameter(name).detach() for name in names]

    first, again, other = new_weights(1), new_weights(1), new_weights(2)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[2])
    for weights in first:  # uniform between -1/4 and 1/4
        assert weights.abs().max() <= 0.25
        assert weights.std() == pytest.approx(0.25 / math.sqrt(3), rel=0.25)


def test_without_a_seed_it_is_torchs() -> None:
    """What `torch.manual_seed` was given decides."""
    weights = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            weights.append(apply_gated_linear_units(feed_forward()).get_parameter("0.non_gated_layer.weight"))

    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_the_new_weight_joins_the_group_of_the_one_beside_it(optimizer_class: Any) -> None:
    """Weights and biases in groups of their own, norms with the biases; the carried-over weight keeps its state."""
    model = nn.Sequential(Encoder(4, 2, 8, 0.0))
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    rest = {name: p for name, p in model.named_parameters() if p.ndim == 1}
    options: dict[str, Any] = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    optimizer = optimizer_class(
        [{"params": list(weights.values()), "weight_decay": 0.1}, {"params": list(rest.values()), "weight_decay": 0.0}],
        lr=0.01,
        **options,
    )
    inputs = random_tensor(3, 4)
    model(inputs).square().sum().backward()
    optimizer.step()
    states = dict(optimizer.state)
    apply_gated_linear_units(model, optimizer, seed=0)
    new = model.get_parameter("0.linear1.non_gated_layer.weight")
    groups = [{id(p) for p in group["params"]} for group in optimizer.param_groups]

    assert groups[0] == {id(p) for p in [*weights.values(), new]}
    assert groups[1] == {id(p) for name, p in rest.items() if name != "0.linear1.bias"}
    assert rest["0.linear1.bias"] not in optimizer.state
    assert all(optimizer.state[p] is states[p] for p in weights.values())
    before = new.detach().clone()
    optimizer.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()
    assert not torch.equal(new, before)
    assert optimizer.state[new]


@pytest.mark.parametrize("biases", [(False, False), (True, True)])
def test_type_and_mode_are_kept(biases: tuple[bool, bool]) -> None:
    """A frozen bfloat16 block in eval mode stays one, new parameters included."""
    model = feed_forward().bfloat16().eval().requires_grad_(False)
    gated = apply_gated_linear_units(model, None, None, *biases)

    assert {p.dtype for p in gated.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in gated.parameters())
    assert not any(module.training for module in gated.modules())
    assert len(list(gated.parameters())) == 4 + sum(biases)


def test_the_gated_model_compiles_and_its_state_goes_round() -> None:
    """`torch.compile` sees one graph, and a copy loads what was saved."""
    models = [
        apply_gated_linear_units(nn.Sequential(Encoder(4, 2, 8, 0.0), feed_forward()), seed=seed) for seed in (0, 1)
    ]
    models[1].load_state_dict(models[0].state_dict())
    inputs = random_tensor(3, 4)

    assert torch.equal(torch.compile(models[1], backend="eager", fullgraph=True)(inputs), models[0](inputs))


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act_fn": nn.GELU}, r"act_fn=<class .*GELU'> is no activation; .*nn\.GELU\(\)"),
        ({"act_fn": "gelu"}, r"act_fn='gelu' is no activation"),
        ({"gated_layer_bias": 1}, r"gated_layer_bias=1 has to be True or False"),
        ({"non_gated_layer_bias": None}, r"non_gated_layer_bias=None has to be True or False"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """The error names the option and its value; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=f"GatedLinearUnits: {message}"):
        GatedLinearUnits(**options)
    with pytest.raises(ConfigurationError, match=f"apply_gated_linear_units: {message}"):
        apply_gated_linear_units(feed_forward(), **options)


def test_a_hook_on_a_block_is_not_lost() -> None:
    """The error says when to register it."""
    model = nn.Sequential(feed_forward())
    model[0].register_forward_hook(lambda *_: None)

    with pytest.raises(ConfigurationError, match=r"Sequential '0' .* forward hooks; .* after INIT"):
        apply_gated_linear_units(model)


# ------------------------------------------------------------------------------------------------------------ in a run


@pytest.mark.anyio
async def test_a_run_trains_the_gated_model() -> None:
    """Twice with one seed, the same numbers; the model that was built is the one that is trained."""
    losses = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(Encoder(4, 2, 8, 0.0), nn.Linear(4, 3))
        records = InMemoryLogger()
        trainer = Trainer(
            model,
            [(random_tensor(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))] * 3,
            loss=functional.cross_entropy,
            optimizers=torch.optim.Adam(model.parameters(), lr=0.05),
            max_duration="4ep",
            algorithms=[GatedLinearUnits(act_fn=functional.silu, non_gated_layer_bias=True)],
            loggers=[records],
            seed=7,
        )
        await trainer.fit()
        linear: Any = model.get_submodule("0.linear1")
        losses.append(records.data["loss/train/total"])

        assert isinstance(linear, GatedLinear)
        assert linear.non_gated_layer.bias.abs().sum() > 0
        assert records.hyperparameters == {"gated_linear_units/num_layers": 1}

    assert losses[0] == losses[1]


@pytest.mark.anyio
async def test_a_model_that_is_one_block_is_replaced_in_the_state() -> None:
    """Nothing else holds it; the optimizer steps the new one."""
    model = feed_forward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model,
        [(random_tensor(6, 4), random_tensor(6, 4, seed=1))],
        loss=functional.mse_loss,
        optimizers=optimizer,
        max_duration="1ep",
        algorithms=[GatedLinearUnits()],
    )
    await trainer.fit()

    assert trainer.state.model is not model
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in trainer.state.model.parameters()}


def test_gated_linear_units_run_on_init_only() -> None:
    """Of all forty events, one; and a checkpoint needs them."""
    state = State(nn.Identity())

    assert {event for event in Event if GatedLinearUnits().match(event, state)} == {Event.INIT}
    assert GatedLinearUnits.required_on_load() is True
