"""Model surgery: what is replaced, what it takes over, and that the optimizers follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training import NoEffectWarning, replace_modules
from eventbus_engine.training.surgery import replace_or_warn


class Holder(nn.Module):
    """Holds any modules under any names, and calls them in order."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self._modules.values():
            assert child is not None
            x = child(x)
        return x


class Special(nn.Linear):
    """A subclass, to tell it from its base."""


class Gate(nn.Module):
    """The parameters of a linear layer, and another such layer beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.gate = nn.Linear(linear.in_features, linear.out_features)


def fresh(linear: nn.Linear, name: str = "") -> nn.Linear:
    """A new layer of the same shape."""
    return nn.Linear(linear.in_features, linear.out_features)


def train_once(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """One step, with a gradient for every parameter, whether it is used or not."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()


def same(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> bool:
    """Whether two lists hold the same objects in the same order."""
    return [id(p) for p in actual] == [id(p) for p in expected]


# ---------------------------------------------------------------------------------------------------- what is replaced


def test_a_shared_module_is_replaced_by_one_new_module_everywhere() -> None:
    """In two parents, and under two names of the same parent; the function sees it once, by its first name."""
    shared, names = nn.Linear(2, 2), []
    model = Holder(first=shared, inner=Holder(deep=shared, again=shared), other=nn.ReLU())

    def replace(module: nn.Module, name: str) -> nn.Module:
        names.append(name)
        return nn.Identity()

    replaced = replace_modules(model, {nn.Linear: replace})
    inner: Any = model.inner

    assert list(replaced) == [shared]
    assert model.first is inner.deep is inner.again is replaced[shared]
    assert names == ["first"]
    assert isinstance(model.other, nn.ReLU)


def test_the_nearest_class_of_the_mro_decides() -> None:
    """Whatever the order of the mapping; the names are qualified, and the order of the result is that of the walk."""
    model = Holder(a=Special(1, 1), b=Holder(c=nn.Linear(1, 1), d=nn.ReLU()))
    seen: list[tuple[str, str]] = []

    def note(kind: str) -> Callable[[nn.Module, str], nn.Module]:
        return lambda module, name: seen.append((kind, name)) or nn.Identity()  # type: ignore[func-returns-value]

    before = [model.a, model.get_submodule("b.c"), model.get_submodule("b.d")]
    replaced = replace_modules(
        model, {nn.Module: lambda module, name: None, nn.Linear: note("linear"), Special: note("special")}
    )
    everything = replace_modules(model, {nn.Module: note("module")})

    assert seen == [("special", "a"), ("linear", "b.c"), ("module", "")]
    assert list(replaced) == before[:2]
    assert list(everything) == [model]


def test_none_goes_on_inside_and_the_module_itself_is_left_whole() -> None:
    """Both leave the module; only one looks at its children."""
    model = Holder(open=Holder(x=nn.Linear(1, 1)), whole=Holder(x=nn.Linear(1, 1)))
    replace_modules(
        model,
        {
            nn.Linear: lambda linear, name: nn.Identity(),
            Holder: lambda holder, name: holder if name == "whole" else None,
        },
    )

    assert isinstance(model.get_submodule("open.x"), nn.Identity)
    assert isinstance(model.get_submodule("whole.x"), nn.Linear)


def test_what_has_just_been_put_in_is_not_looked_at() -> None:
    """A function may wrap what it replaces."""
    model = Holder(a=nn.Linear(2, 2))
    linear = model.a
    replaced = replace_modules(model, {nn.Linear: lambda module, name: nn.Sequential(module, nn.Linear(2, 2))})

    assert len(replaced) == 1
    assert model.get_submodule("a.0") is linear


def test_the_model_itself_is_in_the_result() -> None:
    """Nothing holds it, so the caller goes on with the new one; its name is empty."""
    model, names = nn.Linear(2, 2), []
    replaced = replace_modules(model, {nn.Linear: lambda module, name: names.append(name) or nn.ReLU()})  # type: ignore[func-returns-value]

    assert isinstance(replaced.get(model, model), nn.ReLU)
    assert names == [""]


def test_a_child_that_is_none_and_a_cycle_are_no_obstacle() -> None:
    """Both are legal in torch's modules."""
    model = Holder(a=nn.Linear(1, 1))
    model.register_module("nothing", None)
    model._modules["up"] = model
    replaced = replace_modules(model, {nn.Linear: lambda module, name: nn.Identity()})

    assert len(replaced) == 1
    assert model._modules["nothing"] is None


# -------------------------------------------------------------------------------------------------- what it takes over


def test_mode_device_and_dtype_are_those_of_what_is_replaced() -> None:
    """Also for buffers, integers aside; on the meta device as well, which stands for any other here."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("count", torch.tensor(0))

    model = Holder(a=nn.Linear(2, 2).bfloat16().eval(), b=nn.Linear(2, 2, device="meta"))
    replace_modules(model, {nn.Linear: lambda module, name: Counting()})
    a, b = model.get_submodule("a"), model.get_submodule("b")

    assert [(t.dtype, t.device.type) for t in a.state_dict().values()] == [
        (torch.bfloat16, "cpu"),
        (torch.bfloat16, "cpu"),
        (torch.int64, "cpu"),
    ]
    assert [t.device.type for t in b.state_dict().values()] == ["meta"] * 3
    assert [(type(p), p.requires_grad) for p in b.parameters()] == [(nn.Parameter, False)]
    assert (a.training, b.training) == (False, True)


def test_a_module_without_tensors_gives_the_models_type() -> None:
    """A pooling layer knows none of its own; a model without tensors has none to give."""
    model = Holder(linear=nn.Linear(2, 2).double(), pool=nn.MaxPool2d(2))
    replace_modules(model, {nn.MaxPool2d: lambda module, name: nn.BatchNorm2d(1, affine=False)})
    bare = Holder(pool=nn.MaxPool2d(2))
    replace_modules(bare, {nn.MaxPool2d: lambda module, name: nn.BatchNorm2d(1, affine=False)})

    assert model.get_buffer("pool.running_mean").dtype == torch.float64
    assert bare.get_buffer("pool.running_mean").dtype == torch.float32


def test_what_is_carried_over_stays_as_it_is() -> None:
    """A frozen batch norm in a wrapper keeps its mode, and a parameter of another type its type."""
    norm = nn.BatchNorm1d(2).eval()
    norm.bias.data = norm.bias.data.double()
    model = Holder(block=Holder(linear=nn.Linear(2, 2), norm=norm))
    replace_modules(model, {Holder: lambda module, name: Holder(norm=module.norm, new=nn.Dropout()) if name else None})

    assert model.get_submodule("block.norm") is norm
    assert (norm.training, norm.bias.dtype) == (False, torch.float64)
    assert model.get_submodule("block.new").training is True


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        (lambda module: module.register_forward_hook(lambda *_: None), "forward hooks"),
        (lambda module: module.register_forward_pre_hook(lambda *_: None), "forward pre hooks"),
        (lambda module: module.register_full_backward_hook(lambda *_: None), "backward hooks"),
        (lambda module: module.register_state_dict_post_hook(lambda *_: None), "state dict hooks"),
    ],
)
def test_hooks_that_would_be_lost_are_refused(register: Any, kind: str) -> None:
    """On the module or inside it; the error names module, hooks and the way out, and nothing has changed."""
    model = Holder(a=nn.Linear(1, 1), b=Holder(c=nn.Sequential(nn.Linear(1, 1))))
    register(model.get_submodule("b.c.0"))
    before = dict(model.named_modules())

    with pytest.raises(ConfigurationError, match=rf"Linear 'b\.c\.0' .* lose its {kind}; .* after INIT"):
        replace_modules(model, {nn.Linear: fresh, nn.Sequential: lambda module, name: nn.Identity()})
    assert dict(model.named_modules()) == before


def test_hooks_go_on_where_the_module_stays_inside_the_new_one() -> None:
    """A wrapper loses nothing."""
    model, calls = Holder(a=nn.Linear(1, 1)), []
    model.get_submodule("a").register_forward_hook(lambda *_: calls.append(1))
    replace_modules(model, {nn.Linear: lambda module, name: nn.Sequential(module, nn.ReLU())})
    model(torch.zeros(1, 1))

    assert calls == [1]


# ------------------------------------------------------------------------------------------------------ the optimizers


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_new_parameters_take_the_place_of_those_that_vanish(optimizer_class: Any) -> None:
    """In their group and their order; the state of the others stays, that of the vanished goes; training goes on."""
    model = Holder(a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 2))
    a, b, c = (model.get_submodule(name) for name in "abc")
    options: dict[str, Any] = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    weights = [layer.get_parameter("weight") for layer in (a, b, c)]
    biases = [layer.get_parameter("bias") for layer in (a, b, c)]
    optimizer = optimizer_class([{"params": weights, "lr": 0.1}, {"params": biases}], lr=0.2, **options)
    train_once(model, optimizer)
    state = {p: optimizer.state[p] for p in (*a.parameters(), *c.parameters())}
    replace_modules(model, {nn.Linear: lambda module, name: fresh(module) if name == "b" else None}, optimizer)
    new = model.get_submodule("b")
    before = new.get_parameter("weight").detach().clone()

    groups = [group["params"] for group in optimizer.param_groups]
    assert same(groups[0], [weights[0], new.get_parameter("weight"), weights[2]])
    assert same(groups[1], [biases[0], new.get_parameter("bias"), biases[2]])
    assert all(optimizer.state[p] is kept for p, kept in state.items())
    assert weights[1] not in optimizer.state
    assert biases[1] not in optimizer.state
    train_once(model, optimizer)
    assert len(optimizer.state_dict()["state"]) == 6
    assert not torch.equal(new.get_parameter("weight"), before)


def test_named_groups_keep_their_names_in_step() -> None:
    """An optimizer made of named parameters saves their names with its state."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    replace_modules(
        model,
        {nn.Linear: lambda module, name: {"0": Gate(module), "1": nn.Linear(1, 1, bias=False)}[name]},
        optimizer,
    )
    group = optimizer.param_groups[0]
    names = {id(p): name for name, p in model.named_parameters()}

    assert group["param_names"] == ["0.weight", "0.gate.weight", "0.bias", "0.gate.bias", "1.weight"]
    assert group["param_names"] == [names[id(p)] for p in group["params"]]


def test_a_parameter_tied_to_another_layer_stays() -> None:
    """It is still in the model; so are its place and its state."""
    model = Holder(embedding=nn.Embedding(3, 2), output=nn.Linear(2, 3, bias=False))
    embedding, output = model.get_submodule("embedding"), model.get_submodule("output")
    output.weight = embedding.weight
    optimizer = torch.optim.Adam(model.parameters())
    train_once(model, optimizer)
    state = optimizer.state[embedding.get_parameter("weight")]
    replace_modules(model, {nn.Linear: lambda module, name: nn.Linear(2, 3, bias=False)}, optimizer)
    tied, untied = embedding.get_parameter("weight"), model.get_parameter("output.weight")

    assert same(optimizer.param_groups[0]["params"], [tied, untied])
    assert optimizer.state[tied] is state
    assert untied not in optimizer.state


def test_a_parameter_outside_the_model_is_nobodys_business() -> None:
    """Such as one of a loss."""
    model, temperature = nn.Sequential(nn.Linear(1, 1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    replace_modules(model, {nn.Linear: lambda module, name: nn.Identity()}, [optimizer])

    assert same(optimizer.param_groups[0]["params"], [temperature])


def test_a_group_may_be_emptied_and_filled_again() -> None:
    """It keeps its place, since schedulers know the groups by number; LBFGS keeps the very list."""
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.LBFGS(model.parameters())
    params = optimizer.param_groups[0]["params"]
    replace_modules(model, {nn.Linear: lambda module, name: nn.ReLU()}, optimizer)
    emptied = list(params)
    replace_modules(model, {nn.ReLU: lambda module, name: nn.PReLU()}, optimizer)

    assert emptied == []
    assert optimizer.param_groups[0]["params"] is params
    assert same(params, list(model.parameters()))


def test_the_optimizer_of_each_part_gets_the_new_parameters_of_that_part() -> None:
    """With several optimizers, too, every parameter is in one of them."""
    model = Holder(a=nn.Linear(1, 1), b=nn.Linear(1, 1))
    first = torch.optim.SGD(model.get_submodule("a").parameters(), lr=0.1)
    second = torch.optim.Adam(model.get_submodule("b").parameters())
    replace_modules(model, {nn.Linear: lambda module, name: Gate(module)}, [first, second])
    a, b = (dict(model.get_submodule(name).named_parameters()) for name in "ab")
    order = ["weight", "gate.weight", "bias", "gate.bias"]

    assert same(first.param_groups[0]["params"], [a[name] for name in order])
    assert same(second.param_groups[0]["params"], [b[name] for name in order])


def test_new_parameters_follow_the_submodule_of_their_name() -> None:
    """The norm beside it is in another group, which concerns nobody; a bias where there was none goes to the weight."""
    block = Holder(proj=nn.Linear(1, 1, bias=False), norm=nn.LayerNorm(1))
    model = Holder(block=block)
    optimizer = torch.optim.SGD(
        [{"params": block.get_submodule("proj").parameters()}, {"params": block.get_submodule("norm").parameters()}],
        lr=0.1,
    )
    replace_modules(
        model,
        {Holder: lambda module, name: Holder(proj=Holder(x=nn.Linear(1, 1)), norm=module.norm) if name else None},
        optimizer,
    )

    assert same(optimizer.param_groups[0]["params"], list(model.get_submodule("block.proj").parameters()))
    assert same(optimizer.param_groups[1]["params"], list(model.get_submodule("block.norm").parameters()))


def test_the_same_name_goes_before_the_same_kind() -> None:
    """Another weight of the old module, in another group, does not make it doubtful."""
    model = Holder(a=Gate(nn.Linear(1, 1)))
    gate = list(model.get_submodule("a.gate").parameters())
    own = [p for name, p in model.named_parameters() if "gate" not in name]
    optimizer = torch.optim.SGD([{"params": gate}, {"params": own}], lr=0.1)
    replace_modules(model, {Gate: lambda module, name: nn.Linear(1, 1)}, optimizer)

    assert optimizer.param_groups[0]["params"] == []
    assert same(optimizer.param_groups[1]["params"], list(model.parameters()))


def test_what_stands_for_the_frozen_or_the_untrained_is_so_itself() -> None:
    """Frozen in the optimizer stays frozen in it; outside of it stays outside."""
    model = Holder(a=nn.Linear(1, 1).requires_grad_(False), b=nn.Linear(1, 1), c=nn.Linear(1, 1))
    optimizer = torch.optim.SGD([*model.get_submodule("a").parameters(), *model.get_submodule("c").parameters()], 0.1)
    replace_modules(model, {nn.Linear: fresh}, optimizer)
    a, b, c = (list(model.get_submodule(name).parameters()) for name in "abc")

    assert same(optimizer.param_groups[0]["params"], [*a, *c])
    assert [p.requires_grad for p in (*a, *b, *c)] == [False, False, True, True, True, True]


def test_what_is_shared_between_new_modules_joins_once() -> None:
    """One activation with a parameter, in every block."""
    shared = nn.PReLU()
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_modules(model, {nn.ReLU: lambda module, name: nn.Sequential(shared)}, optimizer)

    assert same(optimizer.param_groups[0]["params"], [*model[2].parameters(), shared.weight])


@pytest.mark.parametrize(
    ("replacements", "message"),
    [
        (
            {nn.ReLU: lambda module, name: nn.PReLU()},
            r"new parameter c\.weight .* 2 groups .* ReLU 'c' is no parameter",
        ),
        ({nn.Linear: lambda module, name: Holder(x=Alpha())}, r"new parameter a\.x\.alpha .* Linear 'a' is in all"),
    ],
)
def test_a_parameter_that_fits_several_groups_is_refused(replacements: Any, message: str) -> None:
    """The error says which and what to do; model and optimizer are as they were."""
    model = Holder(a=nn.Linear(1, 1), b=nn.Linear(1, 1), c=nn.ReLU())
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)
    before = dict(model.named_modules())

    with pytest.raises(ConfigurationError, match=message + r".* make the optimizers after that"):
        replace_modules(model, replacements, optimizer)
    assert dict(model.named_modules()) == before
    assert same(optimizer.param_groups[0]["params"], weights)
    assert same(optimizer.param_groups[1]["params"], biases)


class Alpha(nn.Module):
    """A parameter of a kind that nothing else has."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))


# ------------------------------------------------------------------------------------------------------- all at random

ACTIONS: dict[str, Callable[[nn.Linear], nn.Module | None]] = {
    "leave": lambda linear: None,
    "keep whole": lambda linear: linear,
    "drop": lambda linear: nn.Identity(),
    "renew": fresh,
    "gate": Gate,
    "wrap": lambda linear: nn.Sequential(linear, nn.Linear(2, 2)),
}


def build(layout: Any, leaves: list[nn.Linear]) -> nn.Module:
    """A tree of modules from nested lists of numbers of leaves."""
    if isinstance(layout, int):
        return leaves[layout % len(leaves)]
    return Holder(**{f"child{number}": build(inner, leaves) for number, inner in enumerate(layout)})


layouts: st.SearchStrategy[Any] = st.recursive(
    st.integers(0, 4), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=10
).map(lambda layout: [layout])


@settings(deadline=None)
@given(
    layout=layouts,
    actions=st.lists(st.sampled_from(sorted(ACTIONS)), min_size=5, max_size=5),
    ties=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=3),
    grouping=st.lists(st.integers(0, 2), min_size=10, max_size=10),
)
def test_optimizers_hold_what_the_model_trains(
    layout: Any, actions: list[str], ties: list[tuple[int, int]], grouping: list[int]
) -> None:
    """Over random trees with shared modules, tied weights and random groups.

    Each parameter of the model is in the optimizer once, nothing else is; what survives keeps its group, its order and
    its state; no replaced module is left anywhere, and the model computes.
    """
    leaves = [nn.Linear(2, 2) for _ in actions]
    for one, other in ties:
        leaves[one].weight = leaves[other].weight
    model = build(layout, leaves)
    groups: list[list[nn.Parameter]] = [[], [], []]
    for parameter, number in zip(model.parameters(), grouping * 2, strict=False):
        groups[number].append(parameter)
    optimizer = torch.optim.Adam([{"params": group} for group in groups if group])
    train_once(model, optimizer)
    states = dict(optimizer.state)
    old_groups = [list(group["params"]) for group in optimizer.param_groups]

    def act(linear: nn.Linear, name: str) -> nn.Module | None:
        return ACTIONS[actions[leaves.index(linear)]](linear)

    replaced = replace_modules(model, {nn.Linear: act}, optimizer)
    after = list(model.parameters())
    new_groups = [list(group["params"]) for group in optimizer.param_groups]

    flat = [p for group in new_groups for p in group]
    assert len(flat) == len(set(flat))
    assert set(flat) == set(after)
    for old_group, new_group in zip(old_groups, new_groups, strict=True):
        survivors = [p for p in old_group if p in set(after)]
        assert same([p for p in new_group if p in set(old_group)], survivors)
    assert set(optimizer.state) == set(states) & set(after)
    assert all(optimizer.state[p] is states[p] for p in optimizer.state)
    wrapped = {leaf for leaf, action in zip(leaves, actions, strict=True) if action == "wrap"}
    assert not (set(model.modules()) & set(replaced)) - wrapped
    train_once(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


def test_the_changed_model_compiles_and_its_state_goes_round() -> None:
    """`torch.compile` sees an ordinary model, and a copy of it loads what was saved."""
    models = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)) for _ in range(2)]
    for model in models:
        replace_modules(model, {nn.Linear: lambda module, name: nn.Sequential(module, nn.Tanh())})
    models[1].load_state_dict(models[0].state_dict())
    inputs = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    expected = models[0](inputs)

    assert torch.equal(torch.compile(models[1], backend="eager", fullgraph=True)(inputs), expected)


# --------------------------------------------------------------------------------------------------- arguments, warning


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear, {}), r"model=<class .*> is no torch\.nn\.Module"),
        ((nn.ReLU(), [nn.Linear]), r"replacements=\[.*\]; give a mapping"),
        ((nn.ReLU(), {"Linear": fresh}), r"'Linear' is no module class"),
        ((nn.ReLU(), {int: fresh}), r"<class 'int'> is no module class"),
        ((nn.ReLU(), {nn.Linear: "Identity"}), r"'Identity', for Linear, cannot be called"),
        ((nn.ReLU(), {nn.ReLU: lambda module, name: "Tanh"}), r"the model, ReLU, is 'Tanh'; .* return a module"),
        (
            (nn.Sequential(nn.ReLU()), {nn.ReLU: lambda module, name: nn.Tanh}),
            r"ReLU '0' is <class .*Tanh'>; .* return a module",
        ),
        ((nn.ReLU(), {}, [torch.optim.SGD]), r"is no optimizer"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    """The error names the argument and what would fit."""
    with pytest.raises(ConfigurationError, match=message):
        replace_modules(*arguments)


def test_an_algorithm_that_finds_nothing_says_so() -> None:
    """The warning names the algorithm, the model and what it lacks; where there is something, there is none."""
    model = nn.Sequential(nn.ReLU())
    with pytest.warns(NoEffectWarning, match=r"Squeeze changed nothing: Sequential has no pooling; leave it out"):
        actual = replace_or_warn("Squeeze", "pooling", model, {nn.MaxPool2d: fresh}, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = replace_or_warn("Squeeze", "ReLU", model[0], {nn.ReLU: lambda module, name: nn.Tanh()}, None)

    assert actual is model
    assert isinstance(changed, nn.Tanh)
