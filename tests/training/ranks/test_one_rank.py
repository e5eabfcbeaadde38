"""What a job of one rank shows without a second process: joining, leaving, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from eventbus_engine import BatchError, CheckpointError, ConfigurationError, Event, Logger, RankError
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import EMA
from eventbus_engine.training.callbacks import CheckpointSaver
from eventbus_engine.training.checkpoint import find_checkpoints
from eventbus_engine.training.checkpoint.storage import delete_checkpoint
from eventbus_engine.training.ranks.job import Job, find_job, naming_rank
from eventbus_engine.training.ranks.ranks import Ranks

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The job of whoever runs the tests does not count, and none is left behind."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of one, as `torchrun --nproc-per-node=1` starts it."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")


async def losses_of(trainer: Trainer) -> list[float]:
    """The loss of each batch."""
    losses: list[float] = []

    def note(state: State) -> None:
        assert state.loss is not None
        losses.append(float(state.loss))

    with trainer.engine.bus.subscribe(lambda envelope: note(trainer.state), "batch_end"):
        await trainer.fit()
    return losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
@pytest.mark.usefixtures("one_rank")
async def test_a_job_of_one_rank_trains_as_no_job_does(
    make_trainer: MakeTrainer, parallelism: str, device: str
) -> None:
    """On CUDA by nccl, with gloo beside it."""
    alone = await losses_of(make_trainer(microbatches=2, device=device))
    trainer = make_trainer(microbatches=2, device=device, parallelism=parallelism)
    joined = await losses_of(trainer)

    assert joined == pytest.approx(alone, rel=1e-5)
    assert trainer.state.device.index == (0 if device == "cuda" else None)


@pytest.mark.usefixtures("one_rank")
async def test_one_rank_trains_alone_unless_asked_otherwise(make_trainer: MakeTrainer) -> None:
    """There is nobody to agree with."""
    trainer = make_trainer(max_duration="1ba")
    await trainer.fit()

    assert not trainer.state._ranks.together
    assert (trainer.state.rank, trainer.state.world_size) == (0, 1)


@pytest.mark.parametrize("wrong", ["ddp", "fsdp"])
async def test_parallelism_without_a_job_is_refused_with_the_way_to_start_one(
    make_trainer: MakeTrainer, wrong: str
) -> None:
    """Instead of waiting for ranks that nobody has started."""
    with pytest.raises(ConfigurationError, match="no rank of a job; start the program with `torchrun --nproc-per"):
        make_trainer(parallelism=wrong)


async def test_a_parallelism_that_is_none_is_refused(make_trainer: MakeTrainer) -> None:
    """With those that there are."""
    with pytest.raises(ConfigurationError, match="parallelism='zero'; give 'ddp' or 'fsdp', or leave it out"):
        make_trainer(parallelism="zero")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "two", "WORLD_SIZE": "2"}, "the environment has RANK='two', which is no number of a rank"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "the environment has WORLD_SIZE='-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_is_no_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], told: str
) -> None:
    """It names the variable."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigurationError, match=told):
        find_job()


def test_without_torchruns_variables_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them alone is something else's."""
    monkeypatch.setenv("RANK", "0")

    assert find_job() is None


def test_the_rank_on_its_machine_is_the_rank_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the index of the rank's CUDA device."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_job() == Job(3, 4, 3)
    monkeypatch.setenv("LOCAL_RANK", "1")

    assert find_job() == Job(3, 4, 1)
    assert Ranks().device(torch.device("cuda")) == torch.device("cuda", 1)
    assert Ranks().device(torch.device("cuda", 0)) == torch.device("cuda", 0)


async def test_a_job_that_cannot_meet_says_what_is_missing(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables that torchrun sets, and another launcher may not."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ConfigurationError, match="rank 0 of 2 finds no MASTER_ADDR and no MASTER_PORT"):
        await make_trainer().fit()


@pytest.mark.usefixtures("one_rank")
async def test_a_model_that_is_cut_up_already_stays_so(make_trainer: MakeTrainer) -> None:
    """Whoever cuts up a model by parts of their own makes the optimizer afterwards."""
    dist.init_process_group("gloo")
    try:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        fully_shard(model)
        parameters = list(model.parameters())
        await make_trainer(model=model, parallelism="fsdp").fit()
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert isinstance(parameters[0], DTensor)
        assert not isinstance(model[0], FSDPModule)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
async def test_what_is_frozen_and_thawed_trains_or_not(make_trainer: MakeTrainer) -> None:
    """DDP would fail without the gradient of a frozen one, and leave out a thawed one; here it is made anew."""
    trainer = make_trainer(parallelism="ddp", max_duration="1ba")
    weight = trainer.state.model.get_parameter("0.weight")
    moved = []
    async with trainer:
        for trained in (True, False, True):
            before = weight.detach().clone()
            weight.requires_grad_(trained)
            weight.grad = None
            await trainer.fit("1ba")
            moved.append(not torch.equal(before, weight))

    assert moved == [True, False, True]


@pytest.mark.usefixtures("one_rank")
async def test_a_rank_without_a_batch_cannot_follow_the_others_through_a_model_cut_up(
    make_trainer: MakeTrainer,
) -> None:
    """There is nothing to feed its part with."""
    async with make_trainer(parallelism="fsdp", max_duration="1ba") as trainer:
        ranks = trainer.state._ranks
        trainer.state._ranks.any = lambda flag: True  # type: ignore[method-assign]  # the others have batches
        assert ranks.in_step
        with pytest.raises(BatchError, match="rank 0 has no batch to evaluate, but others have"):
            await trainer.predict([])


def test_a_failed_collective_names_the_rank_and_where_to_look() -> None:
    """Gloo's own error, below whatever has wrapped it."""
    cause = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1: third_party/gloo/gloo/transport\nmore")
    with pytest.raises(RankError) as caught, naming_rank(Job(1, 4, 1)):
        raise BatchError("Linear failed on the batch") from cause

    assert (caught.value.rank, caught.value.world_size) == (1, 4)
    assert str(caught.value).startswith("rank 1 of 4 has lost the others: a collective failed ([pair.cc:553] Conn")
    assert "more" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind"), [(dist.DistBackendError("NCCL"), RankError), (ValueError("gloomy"), ValueError)]
)
def test_nccl_has_a_class_for_it_and_other_errors_stay_what_they_are(error: Exception, kind: type[Exception]) -> None:
    """Those get a note of the rank they were raised on."""
    with pytest.raises(kind) as caught, naming_rank(Job(0, 2, 0)):
        raise error

    assert kind is RankError or caught.value.__notes__ == ["on rank 0 of 2"]


def test_what_has_been_named_once_stays_as_it_is() -> None:
    """A call inside of another's adds nothing."""
    error = RankError("lost", rank=1, world_size=2)
    with pytest.raises(RankError) as caught, naming_rank(Job(1, 2, 1)):
        raise error

    assert caught.value is error


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
@pytest.mark.usefixtures("one_rank")
async def test_a_job_goes_on_from_its_own_newest_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path, parallelism: str
) -> None:
    """From none where there is none; averages that are loaded whole are cut up as the model is."""

    def make() -> tuple[EMA, Trainer]:
        ema, saver = EMA(half_life="2ba"), CheckpointSaver(tmp_path, "2ba")
        return ema, make_trainer(algorithms=[ema], callbacks=[saver], autoresume=True, parallelism=parallelism)

    expected, trainer = make()
    losses = await losses_of(trainer)
    for path in find_checkpoints(tmp_path)[1:]:
        delete_checkpoint(path)
    ema, trainer = make()

    assert await losses_of(trainer) == losses[2:]
    for name, average in expected.averages.items():
        assert isinstance(average, DTensor) == isinstance(ema.averages[name], DTensor) == (parallelism == "fsdp")
        assert whole(average).tolist() == whole(ema.averages[name]).tolist()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a job of one rank, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.usefixtures("one_rank")
def test_weights_loaded_whole_are_put_back_into_a_model_that_is_cut_up() -> None:
    """As a run has them that was saved while the averages were in its model."""
    dist.init_process_group("gloo")
    try:
        model = nn.Linear(4, 3)
        weights = {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items()}
        fully_shard(model)
        ema = EMA()
        ema.load_state_dict({"averages": {}, "training_weights": weights})
        ema.apply(Event.BATCH_START, State(model), Logger())
        assert {name: whole(t).tolist() for name, t in model.state_dict().items()} == {
            name: tensor.tolist() for name, tensor in weights.items()
        }
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_another_rank_cannot_load_is_refused_here_too() -> None:
    """By the number of that rank; and one that this rank cannot load by what is wrong with it."""
    ranks = Ranks("ddp")
    ranks.gather = lambda value: [value, 0, 1]  # type: ignore[method-assign]

    def load(failure: Exception | None) -> None:
        with ranks.loading():
            if failure is not None:
                raise failure

    with pytest.raises(CheckpointError, match=r"^rank 2 cannot load the checkpoint, and says why"):
        load(None)
    with pytest.raises(CheckpointError, match=r"^mine$"):
        load(CheckpointError("mine"))
