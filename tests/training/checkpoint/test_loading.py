"""Loading a checkpoint into a run: what has to fit, what may be left out, and which one it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import CallbackErrors, CheckpointError, ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import EMA, BlurPool, LayerFreezing
from eventbus_engine.training.callbacks import CheckpointSaver as Saver
from eventbus_engine.training.callbacks import EarlyStopper, RuntimeEstimator
from eventbus_engine.training.checkpoint import Contents, take_snapshot, write_snapshot
from eventbus_engine.training.checkpoint.contents import collect

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def save(tmp_path: Path, make_trainer: MakeTrainer) -> Callable[..., Any]:
    """Trains for a while, and saves the run; `change` may turn what it consists of into something else."""

    async def saved(*, change: Callable[[dict[str, Any]], None] | None = None, **arguments: Any) -> Path:
        trainer = make_trainer(**{"max_duration": "2ba"} | arguments)
        contents: list[Contents] = []

        class Keep(Callback[State]):
            async def fit_end(self, state: State, logger: Any) -> None:
                contents.append(await state.compute(collect, state, state._source))

        trainer.state.callbacks.append(Keep())
        await trainer.fit()
        parts: dict[str, Any] = {
            "tensors": dict(contents[0].tensors),
            "values": dict(contents[0].values),
            "rank_values": dict(contents[0].rank_values),
        }
        if change is not None:
            change(parts)
        path = tmp_path / "checkpoint"
        write_snapshot(take_snapshot(Contents(**parts)), path)
        return path

    return saved


class Tally(Algorithm[State, Event]):
    """Counts batches."""

    def __init__(self, required: bool = False) -> None:
        self.count = 0
        self.required_on_load = lambda: required  # type: ignore[method-assign]

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BATCH_END

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


async def test_loading_comes_after_surgery_and_between_its_events(
    save: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    """INIT, BEFORE_LOAD, the checkpoint, AFTER_LOAD, and then what trains."""
    path = await save()
    seen: list[tuple[str, int]] = []

    class Watch(Callback[State]):
        def run_event(self, event: Any, state: State, logger: Any) -> None:
            seen.append((event.value, int(state.timestamp.batch)))

    await make_trainer(load_path=path, callbacks=[Watch()]).fit("1ba")

    assert seen[:4] == [("init", 0), ("before_load", 0), ("after_load", 2), ("fit_start", 2)]


async def test_a_duration_counts_from_where_the_checkpoint_is(
    save: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    """`fit("2ba")` trains two more; a run that is at its end says so."""
    path = await save()
    trainer = make_trainer(load_path=str(path))
    await trainer.fit("2ba")

    assert trainer.state.timestamp == "4ba"
    with pytest.raises(ConfigurationError, match="nothing left to train: max_duration is 2ba"):
        await make_trainer(load_path=path, max_duration="2ba").fit()


async def test_a_standalone_evaluation_is_of_the_checkpoint(
    save: Callable[..., Any], make_trainer: MakeTrainer, batches: list[Any]
) -> None:
    """It needs no training first."""
    losses: list[float] = []
    trained = make_trainer(eval_dataloader=batches, max_duration="2ba", eval_interval="2ba")
    path = await save()
    async with trained:
        await trained.fit()
        losses.append((await trained.eval())["metrics/eval/loss"])
    losses.append((await make_trainer(eval_dataloader=batches, load_path=path).eval())["metrics/eval/loss"])

    assert losses[0] == losses[1]


# ------------------------------------------------------------------------------------------------------ what has to fit


async def test_loading_without_an_algorithm_that_is_required_names_it(
    save: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    """By the engine's name for it; nothing has been changed by then."""
    path = await save(algorithms=[Tally(), Tally(required=True), EMA()])
    trainer = make_trainer(load_path=path, algorithms=[Tally()])
    before = [parameter.clone() for parameter in trainer.state.model.parameters()]
    with pytest.raises(CheckpointError, match=r"written with tally#2, ema, which it cannot be loaded without"):
        await trainer.fit()

    assert all(map(torch.equal, before, trainer.state.model.parameters()))
    assert trainer.state.timestamp == "0ba"


async def test_surgery_that_is_missing_is_named_before_its_parameters(
    save: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    """Of weights alone too, unless whatever fits is asked for."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1, stride=2), nn.Flatten(), nn.Linear(4, 3))

    def arguments() -> dict[str, Any]:
        model = make()
        return {"model": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}

    path = await save(**arguments(), algorithms=[BlurPool(min_channels=1)])
    for options in ({}, {"load_strict": False}, {"load_weights_only": True}):
        with pytest.raises(CheckpointError, match="written with blurpool"):
            await make_trainer(**arguments(), load_path=path, **options).fit()
    trainer = make_trainer(**arguments(), load_path=path, load_weights_only=True, load_strict=False)
    await trainer.fit("1ba")

    assert trainer.state.timestamp == "1ba"


async def test_another_model_is_refused_by_name(save: Callable[..., Any], make_trainer: MakeTrainer) -> None:
    """What it lacks, what it has besides, and what is of another shape."""
    path = await save()
    wider = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    deeper = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 3))
    flat = nn.Sequential(nn.Linear(4, 3))
    for model, message in (
        (wider, r"model.0.weight has the shape \[9, 4\], and in the checkpoint \[8, 4\]"),
        (deeper, "the checkpoint lacks its 3.weight, 3.bias"),
        (flat, "it lacks the 2.weight, 2.bias; build it"),
    ):
        trainer = make_trainer(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), load_path=path)
        with pytest.raises(CheckpointError, match=message):
            await trainer.fit()


async def test_what_fits_is_loaded_where_that_is_asked_for(
    save: Callable[..., Any], make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that is new keeps its weights, and stays in its optimizer; the rest goes on."""
    path = await save(**adam_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))))
    arguments = adam_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 3)))
    model, optimizer = arguments["model"], arguments["optimizers"]
    fresh = model[3].weight.clone()
    steps: list[tuple[int, float]] = []

    class Look(Callback[State]):
        def after_load(self, state: State, logger: Any) -> None:
            steps.append((len(optimizer.param_groups[0]["params"]), float(optimizer.state[model[0].weight]["step"])))
            steps.append((int(torch.equal(model[3].weight, fresh)), len(optimizer.state)))

    await make_trainer(**arguments, load_path=path, load_strict=False, callbacks=[Look()]).fit("1ba")

    assert steps == [(6, 2.0), (1, 4)]
    assert "not loaded into Sequential: 3.weight, 3.bias" in caplog.text


def adam_of(model: nn.Module) -> dict[str, Any]:
    """A model and its optimizer."""
    return {"model": model, "optimizers": torch.optim.Adam(model.parameters(), lr=0.01)}


async def test_weights_alone_begin_a_run_of_their_own(save: Callable[..., Any], make_trainer: MakeTrainer) -> None:
    """Other optimizers, algorithms and generators are no matter."""
    path = await save(algorithms=[Tally()])
    arguments = adam_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    tally, seen = Tally(), list[Any]()

    class Look(Callback[State]):
        def after_load(self, state: State, logger: Any) -> None:
            seen.append((int(state.timestamp.batch), tally.count, arguments["model"][0].weight.clone()))

    trained = make_trainer(max_duration="2ba")
    await trained.fit()
    trainer = make_trainer(**arguments, load_path=path, load_weights_only=True, algorithms=[tally], callbacks=[Look()])
    await trainer.fit("1ba")

    assert seen[0][:2] == (0, 0)
    assert torch.equal(seen[0][2], trained.state.model.get_parameter("0.weight"))


async def test_optimizers_and_schedulers_have_to_be_those_of_the_run(
    save: Callable[..., Any], make_trainer: MakeTrainer, make_model: Callable[..., nn.Module]
) -> None:
    """By class, groups and parameters; each error names what differs."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    path = await save(
        model=model, optimizers=sgd, schedulers=torch.optim.lr_scheduler.StepLR(sgd, 1), max_duration="2ba"
    )
    for make, message in (
        (lambda m: torch.optim.Adam(m.parameters()), "has the optimizers Adam, and the checkpoint SGD"),
        (lambda m: torch.optim.SGD([{"params": [p]} for p in m.parameters()], lr=0.1), "has 4 groups of parameters"),
        (lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1), "it lacks 2.weight, 2.bias; make the optimizer"),
        (lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(1))], lr=0.1), "it has besides 0/4;"),
    ):
        model = make_model()
        with pytest.raises(CheckpointError, match=message):
            await make_trainer(model=model, optimizers=make(model), load_path=path).fit()
    model = make_model()
    with pytest.raises(CheckpointError, match="has the schedulers none, and the checkpoint StepLR"):
        await make_trainer(model=model, optimizers=torch.optim.SGD(model.parameters(), 0.1), load_path=path).fit()


async def test_a_schedule_may_be_exchanged_where_not_all_has_to_fit(
    save: Callable[..., Any], make_trainer: MakeTrainer, make_model: Callable[..., nn.Module]
) -> None:
    """The new one begins anew, at the rates of the checkpoint."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    path = await save(model=model, optimizers=sgd, schedulers=torch.optim.lr_scheduler.StepLR(sgd, 1))
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.7)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    trainer = make_trainer(model=model, optimizers=sgd, schedulers=scheduler, load_path=path, load_strict=False)
    await trainer.fit("1ba")

    assert (sgd.param_groups[0]["initial_lr"], scheduler.last_epoch) == (0.1, 1)


# ------------------------------------------------------------------------------------------------ algorithms, callbacks


async def test_who_has_left_is_logged_and_who_has_come_begins_anew(
    save: Callable[..., Any], make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback more or less is no reason not to go on."""
    path = await save(callbacks=[RuntimeEstimator()], algorithms=[Tally()])
    first, second = Tally(), Tally()
    with caplog.at_level(logging.WARNING, logger="eventbus_engine"):
        await make_trainer(load_path=path, algorithms=[first, second], callbacks=[EarlyStopper("loss")]).fit("1ba")

    assert (first.count, second.count) == (3, 1)
    assert "a state of runtime_estimator, which nobody here goes on from" in caplog.text


async def test_who_cannot_say_what_it_is_made_of_is_named(save: Callable[..., Any]) -> None:
    """In place of a checkpoint without it."""

    class Broken(Tally):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no idea")

    with pytest.raises(CallbackErrors) as caught:
        await save(algorithms=[Broken()])

    assert "broken could not say what it is made of: no idea" in str(caught.value.exceptions[0])


async def test_who_cannot_go_on_from_its_state_is_named(save: Callable[..., Any], make_trainer: MakeTrainer) -> None:
    """An algorithm or a callback."""

    class Picky(Tally):
        name = "tally"

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("not mine")

    path = await save(algorithms=[Tally()], callbacks=[EarlyStopper("loss", "train")])
    with pytest.raises(CheckpointError, match="tally cannot go on from the checkpoint: not mine"):
        await make_trainer(load_path=path, algorithms=[Picky()]).fit()


# ------------------------------------------------------------------------------------------------- corners of torch


async def test_the_scale_of_a_loss_goes_on(save: Callable[..., Any], make_trainer: MakeTrainer) -> None:
    """With `amp_fp16`; another precision has none to go on from."""

    def change(parts: dict[str, Any]) -> None:
        parts["values"]["scaler"]["scale"] = 128.0

    path = await save(precision="amp_fp16", change=change)
    trainer = make_trainer(precision="amp_fp16", load_path=path)
    await trainer.fit("1ba")
    assert trainer.state.scaler is not None
    assert trainer.state.scaler.get_scale() == 128.0
    await make_trainer(load_path=path).fit("1ba")


class Tied(nn.Module):
    """One weight under two names, and a counter that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.second(self.first(inputs)))  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


async def test_tied_weights_are_kept_once_and_extra_state_with_them(
    save: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    """What a module says it is made of, it gets back."""
    names: list[str] = []
    path = await save(**adam_of(Tied()), change=lambda parts: names.extend(parts["tensors"]))
    model = Tied()
    await make_trainer(**adam_of(model), load_path=path).fit("1ba")

    assert [name for name in names if name.startswith("model")] == [
        "model.first.weight",
        "model.last.weight",
        "model.last.bias",
    ]
    assert (model.calls, model.first.weight is model.second.weight) == (3, True)


class Counting(nn.Linear):
    """Says what it is made of by copies, as metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.count += 1
        return super().forward(input)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {name: value.detach().clone() for name, value in super().state_dict(*arguments, **options).items()}


async def test_what_a_module_says_by_copies_gets_into_the_module(
    save: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    """What is read into a copy is not in the model yet."""
    path = await save(**adam_of(Counting()))
    model = Counting()
    await make_trainer(**adam_of(model), load_path=path).fit("1ba")

    assert model.count.item() == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), capturable=False),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.1, foreach=False),
        lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    ],
)
async def test_optimizers_of_all_kinds_are_put_back(
    make: Callable[[Any], Any],
    save: Callable[..., Any],
    make_trainer: MakeTrainer,
    make_model: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """State in lists, from the beginning, in scalars; a rate in a tensor."""
    saved: list[Any] = []
    model = make_model()
    optimizer = make(model.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):  # the loop gives no closure
        optimizer.state[optimizer.param_groups[0]["params"][0]] |= {"old_dirs": [torch.ones(3)], "func_evals": 2}
        monkeypatch.setattr(optimizer, "step", lambda: None)
    path = await save(model=model, optimizers=optimizer)
    saved.append(optimizer.state_dict())
    model = make_model()
    optimizer = make(model.parameters())
    rate = optimizer.param_groups[0]["lr"]

    class Look(Callback[State]):
        def after_load(self, state: State, logger: Any) -> None:
            saved.append(optimizer.state_dict())
            state.stop_training()

    with pytest.raises(ConfigurationError, match="nothing left"):
        await make_trainer(model=model, optimizers=optimizer, load_path=path, callbacks=[Look()]).fit()

    assert repr(saved[0]) == repr(saved[1])
    assert (optimizer.param_groups[0]["lr"] is rate) or not isinstance(rate, Tensor)


async def test_frozen_layers_stay_frozen_and_out_of_the_optimizer(
    save: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    """Whether what froze them takes part again or not."""
    path = await save(max_duration="2ep", algorithms=[LayerFreezing(freeze_start=0.0)])
    trainer = make_trainer(load_path=path, max_duration="3ep")
    await trainer.fit()

    trained = [parameter.requires_grad for parameter in trainer.state.model.parameters()]
    assert (trained, len(trainer.state.optimizers[0].param_groups[0]["params"])) == ([False, False, True, True], 2)


# --------------------------------------------------------------------------------------------- what is no run's


def _inner(parts: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """What a change is made in; copied, as it may be the run's own."""
    for name in path[:-1]:
        copied = dict(parts[name])
        parts[name] = copied
        parts = copied
    return parts


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    return lambda parts: _inner(parts, path).pop(path[-1])


def _with(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    return lambda parts: _inner(parts, path).update({path[-1]: value})


@pytest.mark.parametrize(
    "change",
    [
        _without("values", "timestamp"),
        _with("late", "values", "timestamp"),
        _with([], "values", "algorithms"),
        _with({"tally": {}}, "values", "algorithms"),
        _with(3, "values", "scaler"),
        _with([{}], "values", "optimizers"),
        _with([{"class": "Adam", "groups": 3}], "values", "optimizers"),
        _with([{"class": "Adam", "groups": [{"params": [], "options": 3}], "state": {}}], "values", "optimizers"),
        _without("values", "model"),
        _with({"extra": 3, "trained": {}}, "values", "model"),
        _with({"extra": {}, "trained": {"0.weight": "yes"}}, "values", "model"),
        _with(-1, "rank_values", "seed"),
        _with({}, "rank_values", "generators"),
        _with({"batches": -1}, "rank_values", "data"),
        _without("rank_values", "data"),
        _with(torch.ones(2), "rank_values", "generators", "torch"),
        _without("tensors", "optimizers.0.0.weight.exp_avg"),
    ],
)
async def test_values_that_no_run_has_are_refused(
    change: Callable[[dict[str, Any]], None],
    save: Callable[..., Any],
    make_trainer: MakeTrainer,
    make_model: Callable[..., nn.Module],
) -> None:
    """Whole as a checkpoint, but of another program or with an intent: one error, and the run is as it was."""
    path = await save(change=change, **adam_of(make_model()))
    arguments = adam_of(make_model(seed=1))
    before = arguments["model"][0].weight.clone()
    with pytest.raises(CheckpointError):
        await make_trainer(**arguments, load_path=path).fit()

    assert torch.equal(before, arguments["model"][0].weight)


# --------------------------------------------------------------------------------------------------- which checkpoint


class CheckpointSaver(Callback[State]):
    """Has a folder, and writes nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder


async def test_autoresume_goes_on_from_the_newest_whole_checkpoint(
    save: Callable[..., Any], make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one it begins with `load_path`, or anew; one that is damaged is passed over."""
    folder = tmp_path / "run"

    async def begun(**arguments: Any) -> int:
        trainer = make_trainer(callbacks=[CheckpointSaver(folder)], autoresume=True, **arguments)
        await trainer.fit("1ba")
        return int(trainer.state.timestamp.batch) - 1

    first = await begun()
    other = await save()
    second = await begun(load_path=other, load_weights_only=True), await begun(load_path=other)
    folder.mkdir()
    (await save(max_duration="3ba")).rename(folder / "three")
    (await save(max_duration="4ba")).rename(folder / "four")
    third = await begun(load_path=tmp_path / "nowhere", load_weights_only=True)
    values = folder / "four" / "values.json"
    values.write_bytes(values.read_bytes()[:-1] + b" ")  # as large as it was
    fourth = await begun()

    assert (first, second, third, fourth) == (0, (0, 2), 4, 3)
    assert "cannot go on from" in caplog.text


async def test_autoresume_does_not_begin_anew_over_checkpoints_that_it_cannot_read(
    save: Callable[..., Any], make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would replace them one by one: those of a newer release, or all that the disk has spoilt."""
    folder = tmp_path / "run"
    folder.mkdir()
    (await save()).rename(folder / "two")
    (folder / "two" / "manifest.json").write_text('{"format": 1000}')

    with pytest.raises(CheckpointError, match=r"none of .*run can be read: two; .*move them away"):
        await make_trainer(callbacks=[CheckpointSaver(folder)], autoresume=True).fit("1ba")
    assert "is of format 1000" in caplog.text


def test_autoresume_needs_a_saver(make_trainer: MakeTrainer) -> None:
    """There would never be anything to go on from."""
    with pytest.raises(ConfigurationError, match=r"add CheckpointSaver\(folder\) to callbacks="):
        make_trainer(autoresume=True)


@pytest.mark.parametrize("argument", ["load_strict", "load_weights_only", "autoresume"])
def test_the_flags_are_true_or_false(argument: str, make_trainer: MakeTrainer) -> None:
    """A path in the wrong place, for example, is not."""
    with pytest.raises(ConfigurationError, match=f"{argument}='runs/7'; give True or False"):
        make_trainer(**{argument: "runs/7"})


def test_the_path_is_a_path(make_trainer: MakeTrainer) -> None:
    """Nothing that was opened already."""
    with pytest.raises(ConfigurationError, match="load_path=7; give the folder of a checkpoint"):
        make_trainer(load_path=7)


async def test_a_path_without_a_checkpoint_is_an_error(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Not a run from the beginning."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        await make_trainer(load_path=tmp_path).fit()


async def test_a_run_that_had_come_to_its_end_is_left_so_by_autoresume(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Whoever starts it again, as a supervisor does, finds it done; more of it is to be asked for."""
    await make_trainer(max_duration="2ep", callbacks=[Saver(tmp_path)], autoresume=True).fit()
    trained: list[str] = []
    again = make_trainer(max_duration="2ep", callbacks=[Saver(tmp_path)], autoresume=True)
    again.engine.bus.subscribe(lambda envelope: trained.append("epoch"), Event.EPOCH_START)
    async with again:
        await again.fit()
        assert (trained, int(again.state.timestamp.epoch)) == ([], 2)
        with pytest.raises(ConfigurationError, match="nothing left to train"):
            await again.fit()
        await again.fit("1ep")

    assert trained == ["epoch"]
