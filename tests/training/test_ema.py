"""EMA: the average, when it moves, and weights that change places around evaluation and come back bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError, TimeFormatError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import EMA, GradientClipping, compute_ema


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters and buffers."""
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Equal bit for bit, in every parameter and buffer."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def average_reference(history: list[float], smoothing: float) -> float:
    """The recursion in float64, from the first value on."""
    average = history[0]
    for value in history[1:]:
        average = smoothing * average + (1 - smoothing) * value
    return average


class Masked(nn.Module):
    """A parameter, a float buffer, a counter, a mask of zeros and infinities, and a tied parameter."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value, dtype=dtype))
        self.tied = self.weight
        self.mean: Tensor
        self.count: Tensor
        self.mask: Tensor
        self.register_buffer("mean", torch.tensor(value, dtype=dtype))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("mask", torch.tensor([0.1, -math.inf, math.inf], dtype=dtype), persistent=False)


finite = st.floats(-1e3, 1e3, allow_subnormal=False)


@settings(deadline=None)  # torch is slow when it is first called
@given(history=st.lists(finite, min_size=1, max_size=8), smoothing=st.floats(0, 1, allow_subnormal=False))
def test_average_equals_the_recursion(history: list[float], smoothing: float) -> None:
    """Parameters and float buffers are averaged, counters copied, constants kept; the model is not changed."""
    ema_model = Masked(history[0])
    for value in history[1:]:
        model = Masked(value)
        before = weights_of(model)
        compute_ema(model, ema_model, smoothing)
        assert same(weights_of(model), before)
    expected = average_reference(history, smoothing)

    assert ema_model.weight.tolist() == pytest.approx([expected] * 2, rel=1e-12, abs=1e-9)
    assert ema_model.mean.item() == pytest.approx(expected, rel=1e-12, abs=1e-9)
    assert ema_model.count.item() == int(history[-1])
    assert ema_model.mask.tolist() == [0.1, -math.inf, math.inf]
    assert ema_model.tied is ema_model.weight


def test_the_averages_may_be_more_precise_than_the_model() -> None:
    """Steps that bfloat16 would round away add up in float32."""
    model, ema_model = Masked(2.0, torch.bfloat16), Masked(1.0, torch.float32)
    for _ in range(10):
        compute_ema(model, ema_model, 0.999)

    assert ema_model.weight.tolist() == pytest.approx([2 - 0.999**10] * 2, rel=1e-6)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, math.nan, "0.9"])
def test_smoothing_out_of_range_is_refused(smoothing: Any) -> None:
    """The error names the argument, its value and the range; in the function and in the class."""
    with pytest.raises(ConfigurationError, match=r"compute_ema: smoothing=.* \[0, 1\]"):
        compute_ema(Masked(0), Masked(0), smoothing)
    with pytest.raises(ConfigurationError, match=r"EMA: smoothing=.* \[0, 1\]"):
        EMA(half_life=None, smoothing=smoothing)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (nn.Linear(2, 2), "weight"),
        (nn.Linear(3, 3), "weight, bias"),
        (nn.Linear(3, 2, bias=False), "bias"),
        (nn.Sequential(nn.Linear(3, 2)), r"weight, bias, 0\.weight, 0\.bias"),
        (nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), r"weight, bias, 0\.weight, 0\.bias \.\.\."),
    ],
)
def test_models_that_differ_are_refused(other: nn.Module, names: str) -> None:
    """The error names what differs, missing, left over, or of another shape."""
    with pytest.raises(ConfigurationError, match=rf"ema_model does not go with Linear: they differ in {names};"):
        compute_ema(nn.Linear(3, 2), other)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"smoothing": 0.9}, ConfigurationError, r"half_life='1000ba' and smoothing=0\.9 .* None for the other"),
        ({"half_life": None}, ConfigurationError, r"half_life=None and smoothing=None"),
        ({"half_life": "10sp"}, ConfigurationError, r"half_life is 10sp; give it in ep, ba"),
        ({"half_life": "0ba"}, ConfigurationError, r"half_life is 0ba; give more"),
        ({"half_life": "soon"}, TimeFormatError, r"'soon'"),
        ({"update_interval": "0ba"}, ConfigurationError, r"update_interval is 0ba; give more"),
        ({"update_interval": "1ep"}, TimeFormatError, r"1ep and 1000ba do not mix"),
        ({"ema_start": "1.5dur"}, ConfigurationError, r"ema_start='1\.5dur'"),
        ({"ema_start": "-1ba"}, ConfigurationError, r"ema_start='-1ba'"),
        ({"ema_start": "late"}, TimeFormatError, r"'late'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The error names the argument, its value and what would fit."""
    with pytest.raises(error, match=message):
        EMA(**options)


@pytest.mark.parametrize(
    ("options", "smoothing", "interval"),
    [
        ({}, 0.5 ** (1 / 1000), "1ba"),
        ({"half_life": "10ba", "update_interval": "5ba"}, 0.5**0.5, "5ba"),
        ({"half_life": "2ep"}, 0.5**0.5, "1ep"),
        ({"half_life": None, "smoothing": 0.75}, 0.75, "1ba"),
        ({"half_life": None, "smoothing": 0.75, "update_interval": "2ep"}, 0.75, "2ep"),
    ],
)
def test_half_life_gives_the_smoothing(options: dict[str, Any], smoothing: float, interval: str) -> None:
    """After as many updates as fit into a half-life, half of the old average is left."""
    ema = EMA(**options)

    assert ema.smoothing == pytest.approx(smoothing, rel=1e-12)
    assert ema.update_interval == Time.from_timestring(interval)


class Watch(Callback[State]):
    """Keeps the weights at the end of every batch, and those that evaluation runs with."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.evaluated: list[dict[str, Tensor]] = []
        self.restored: list[dict[str, Tensor]] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        self.trained.append(weights_of(state.model))

    def batch_end(self, state: State, logger: Logger) -> None:
        self.trained.append(weights_of(state.model))

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        self.evaluated.append(weights_of(state.model))

    def eval_end(self, state: State, logger: Logger) -> None:
        self.restored.append(weights_of(state.model))


def averaged(history: list[dict[str, Tensor]], smoothing: float) -> dict[str, Tensor]:
    """The averages of a history of weights, by the recursion in float64; counters as they were last."""
    result = {name: value.double() for name, value in history[0].items()}
    for weights in history[1:]:
        result = {name: smoothing * result[name] + (1 - smoothing) * weights[name].double() for name in result}
    return {
        name: value if history[-1][name].is_floating_point() else history[-1][name] for name, value in result.items()
    }


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal up to the digits of float32."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-5, atol=1e-7)


def new_model() -> nn.Module:
    """4 features into 3 classes, with running statistics and a counter among the buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.anyio
async def test_evaluation_runs_on_the_averages_and_gives_the_weights_back(
    make_trainer: Callable[..., Trainer], make_batches: Callable[..., Any]
) -> None:
    """In fit and standalone, for every evaluation; and the training is that without it, bit for bit."""
    model, watch, ema = new_model(), Watch(), EMA(half_life="2ba")
    trainer = make_trainer(model=model, eval_dataloader=make_batches(seed=9), algorithms=[ema], callbacks=[watch])
    async with trainer:
        await trainer.fit()
        metrics = await trainer.eval()
    plain = new_model()
    await make_trainer(model=plain).fit()
    reference = copy.deepcopy(plain).eval()
    reference.load_state_dict(ema.averages, strict=False)
    with torch.no_grad():
        losses = [functional.cross_entropy(reference(inputs), labels) for inputs, labels in make_batches(seed=9)]

    assert len(watch.trained) == 7
    for epoch, (evaluated, restored) in enumerate(zip(watch.evaluated[::3], watch.restored, strict=True)):
        done = min(3 * (epoch + 1), 6)
        assert_close(evaluated, averaged(watch.trained[: done + 1], 0.5**0.5))
        assert same(restored, watch.trained[done])
    assert same(weights_of(model), weights_of(plain))
    assert not same(watch.evaluated[-1], watch.trained[-1])
    assert metrics["metrics/eval/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({"half_life": "1ba", "update_interval": "2ba"}, [0, 2, 4, 6]),
        ({"half_life": "1ep"}, [0, 3, 6]),
        ({"half_life": "1ba", "ema_start": "4ba"}, [4, 5, 6]),
        ({"half_life": "1ba", "ema_start": "1ep"}, [4, 5, 6]),
        ({"half_life": "1ba", "ema_start": "0.5dur"}, [3, 4, 5, 6]),
    ],
)
async def test_averages_begin_and_move_when_they_are_due(
    make_trainer: Callable[..., Trainer], options: dict[str, Any], moves: list[int]
) -> None:
    """A copy at `ema_start`, then the weights after each of the batches that are due; an epoch counts at its end."""
    watch, ema = Watch(), EMA(**options)
    await make_trainer(model=new_model(), algorithms=[ema], callbacks=[watch], max_duration="6ba").fit()

    assert_close(ema.averages, averaged([watch.trained[batch] for batch in moves], ema.smoothing))


@pytest.mark.anyio
async def test_before_its_start_evaluation_runs_on_the_weights_themselves(
    make_trainer: Callable[..., Trainer], batches: Any
) -> None:
    """There are no averages yet; nor are there in a program that only evaluates."""
    for fits in (True, False):
        model, watch, ema = new_model(), Watch(), EMA(ema_start="1.0dur")
        before = weights_of(model)
        trainer = make_trainer(
            model=model, eval_dataloader=batches, algorithms=[ema], callbacks=[watch], eval_interval="1ba"
        )
        await (trainer.fit("2ba") if fits else trainer.eval())

        assert same(watch.evaluated[0], watch.trained[1] if fits else before)


class Interrupts(Callback[State]):
    """Fails in the middle of the first evaluation."""

    def __init__(self) -> None:
        self.left = 1

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.left -= 1
        if not self.left:
            raise ArithmeticError


@pytest.mark.anyio
@pytest.mark.parametrize("goes_on", ["fit", "eval"])
async def test_an_evaluation_that_failed_midway_is_cleared_up_after(
    make_trainer: Callable[..., Trainer], batches: Any, goes_on: str
) -> None:
    """The next fit, or evaluation, first puts the training weights back: what follows is as if nothing had failed."""
    model, watch, ema = new_model(), Watch(), EMA(half_life="2ba")
    options = {"eval_dataloader": batches, "max_duration": "1ep"}
    async with make_trainer(model=model, algorithms=[ema], callbacks=[watch, Interrupts()], **options) as trainer:
        with pytest.raises(ExceptionGroup, match="EVAL_BATCH_END"):
            await trainer.fit()
        during = weights_of(model)
        averages = {name: value.clone() for name, value in ema.averages.items()}
        await (trainer.fit("1ba") if goes_on == "fit" else trainer.eval())

    assert_close(during, averages)
    assert same(watch.trained[-1 if goes_on == "eval" else 4], watch.trained[3])
    assert same(weights_of(model), watch.trained[-1])


def make_state(model: nn.Module, batches: int = 0) -> State:
    """The state of a run of 100 batches, of which `batches` are over."""
    state = State(model, max_duration=Time(100, "ba"))
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch()
    return state


def begun(model: nn.Module, **options: Any) -> tuple[EMA, State]:
    """An EMA that has begun with the model."""
    ema, state = EMA(**options), make_state(model)
    ema.apply(Event.FIT_START, state, Logger())
    return ema, state


OUTSIDE = [event for event in Event if event not in {
    Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END
}]  # fmt: skip


@pytest.mark.parametrize("event", OUTSIDE)
def test_any_event_but_those_of_evaluation_ends_it(event: Event) -> None:
    """The training weights are back for it; a new evaluation begins with the averages again."""
    model = Masked(1.0)
    ema, state = begun(model)
    with torch.no_grad():
        model.weight.fill_(5.0)
    ema.apply(Event.EVAL_START, state, Logger())
    assert model.weight.tolist() == [1.0, 1.0]
    matched = ema.match(event, state)
    ema.apply(event, state, Logger())

    assert matched
    assert model.weight.tolist() == ([1.0, 1.0] if event == Event.EVAL_START else [5.0, 5.0])
    ema.apply(Event.EVAL_END, state, Logger())
    assert model.weight.tolist() == [5.0, 5.0]


def test_it_runs_where_there_is_something_to_do() -> None:
    """Before it has begun, after, and during an evaluation."""
    ema, state = EMA(update_interval="2ba"), make_state(Masked(1.0))
    assert {event for event in Event if ema.match(event, state)} == {Event.FIT_START, Event.BATCH_END}

    state = make_state(Masked(1.0), batches=3)
    assert {event for event in Event if ema.match(event, state)} == {Event.BATCH_END}
    ema.apply(Event.BATCH_END, state, Logger())  # joined in the middle of the run
    assert {event for event in Event if ema.match(event, state)} == {Event.EVAL_START}

    state.timestamp = state.timestamp.to_next_batch()
    assert {event for event in Event if ema.match(event, state)} == {Event.EVAL_START, Event.BATCH_END}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_averages_are_kept_in_float32_at_least(dtype: torch.dtype) -> None:
    """The model keeps its type, and its own weights bit for bit."""
    model = Masked(0.1, dtype)
    ema, state = begun(model, half_life=None, smoothing=0.999)
    with torch.no_grad():
        model.weight.fill_(0.2)
    ema.apply(Event.BATCH_END, state, Logger())
    before = weights_of(model)
    ema.apply(Event.EVAL_START, state, Logger())
    during = weights_of(model)
    ema.apply(Event.EVAL_END, state, Logger())

    assert {name: value.dtype for name, value in ema.averages.items()} == {
        "weight": torch.promote_types(dtype, torch.float32),
        "mean": torch.promote_types(dtype, torch.float32),
        "count": torch.int64,
        "mask": torch.promote_types(dtype, torch.float32),
    }
    assert during["weight"].tolist() == ema.averages["weight"].to(dtype).tolist()
    assert ema.averages["weight"].tolist() == pytest.approx([0.999 * 0.1 + 0.001 * 0.2] * 2, rel=1e-2)
    assert same(weights_of(model), before)


def test_averages_follow_a_model_that_moves() -> None:
    """A new type, and a new device; the meta device stands for one that this machine may lack."""
    model = nn.BatchNorm1d(2)
    ema, state = begun(model)
    model.double()
    ema.apply(Event.BATCH_END, state, Logger())
    kept = ema.averages["weight"]
    model.to("meta")
    ema.apply(Event.BATCH_END, state, Logger())

    assert (kept.dtype, kept.tolist()) == (torch.float64, [1.0, 1.0])
    assert {value.device.type for value in ema.averages.values()} == {"meta"}


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EVAL_START])
def test_surgery_after_the_start_is_noticed(event: Event) -> None:
    """The error says when to change the model; nothing is half done."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ema, state = begun(model)
    model[1] = nn.Linear(2, 3)
    before = weights_of(model)

    with pytest.raises(ConfigurationError, match=r"does not go with Sequential: they differ in 1\.weight, 1\.bias;"):
        ema.apply(event, state, Logger())
    assert same(weights_of(model), before)


@pytest.mark.anyio
async def test_a_model_changed_at_init_is_averaged_as_it_is_then(make_trainer: Callable[..., Trainer]) -> None:
    """The averages are taken after INIT."""

    class Widen(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event == Event.INIT

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            state.model.add_module("last", nn.Linear(3, 3))
            state.optimizers[0].add_param_group({"params": list(state.model.get_submodule("last").parameters())})

    ema = EMA()
    await make_trainer(algorithms=[ema, Widen()]).fit()

    assert "last.weight" in ema.averages


@pytest.mark.anyio
@pytest.mark.parametrize("during_evaluation", [False, True])
async def test_a_resumed_run_goes_on_with_the_averages(
    make_trainer: Callable[..., Trainer], batches: Any, during_evaluation: bool
) -> None:
    """What was saved, in or out of an evaluation, gives the run that was never interrupted."""
    whole_model, whole = new_model(), EMA(half_life="2ba")
    await make_trainer(model=whole_model, algorithms=[whole], max_duration="6ba").fit()
    model, ema = new_model(), EMA(half_life="2ba")
    first = make_trainer(model=model, algorithms=[ema], max_duration="3ba")
    await first.fit()
    if during_evaluation:
        ema.apply(Event.EVAL_START, first.state, Logger())
    saved = copy.deepcopy((model.state_dict(), ema.state_dict()))
    resumed_model, resumed = new_model(), EMA(half_life="2ba")
    resumed_model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    trainer = make_trainer(model=resumed_model, algorithms=[resumed], max_duration="6ba")
    trainer.state.timestamp = first.state.timestamp
    await trainer.fit()

    assert same(weights_of(resumed_model), weights_of(whole_model))
    assert same(resumed.averages, whole.averages)
    assert EMA.required_on_load()


def test_loaded_averages_are_the_algorithms_own() -> None:
    """Going on with the averages does not change what was loaded."""
    ema, _ = begun(Masked(1.0))
    saved = ema.state_dict()
    other, state = EMA(half_life="1ba"), make_state(Masked(3.0))
    other.load_state_dict(saved)
    other.apply(Event.BATCH_END, state, Logger())

    assert other.averages["weight"].tolist() == [2.0, 2.0]
    assert ema.averages["weight"].tolist() == saved["averages"]["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("state", [{}, {"averages": {}}, {"averages": 3, "training_weights": {}}, None,
                                   {"averages": {"weight": 1.0}, "training_weights": {}}])  # fmt: skip
def test_another_state_is_refused(state: Any) -> None:
    """The error says what it has to hold, and the averages stay."""
    ema, _ = begun(Masked(1.0))
    with pytest.raises(ConfigurationError, match=r"averages and training_weights, .* state_dict\(\) returned"):
        ema.load_state_dict(state)

    assert ema.averages["weight"].tolist() == [1.0, 1.0]


def test_a_start_in_fractions_needs_an_end() -> None:
    """Without a `max_duration` there is nothing to take a fraction of; from the very start there need not be."""
    state = State(Masked(1.0))

    assert EMA().match(Event.FIT_START, state)
    with pytest.raises(ConfigurationError, match="EMA runs by the fraction of training that is over"):
        EMA(ema_start="0.5dur").match(Event.FIT_START, state)


@pytest.mark.anyio
async def test_it_goes_with_clipping(make_trainer: Callable[..., Trainer], batches: Any) -> None:
    """Both read the model at the end of a batch; neither changes what the other sees."""
    weights = []
    for algorithms in ([GradientClipping("norm", 0.1), EMA()], [EMA(), GradientClipping("norm", 0.1)]):
        model = new_model()
        await make_trainer(model=model, algorithms=algorithms, eval_dataloader=batches).fit()
        weights.append(weights_of(model))

    assert same(*weights)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_averages_loaded_on_the_cpu_move_to_the_models_cuda_device() -> None:
    """As those of a checkpoint that was mapped to the CPU."""
    ema, _ = begun(Masked(1.0))
    model = Masked(3.0).cuda()
    resumed, state = EMA(half_life="1ba"), make_state(model)
    resumed.load_state_dict(ema.state_dict())
    resumed.apply(Event.BATCH_END, state, Logger())
    resumed.apply(Event.EVAL_START, state, Logger())

    assert model.weight.tolist() == [2.0, 2.0]
    assert {value.device.type for value in resumed.averages.values()} == {"cuda"}
