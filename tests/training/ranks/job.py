"""What the ranks of a job do in the tests: started by torchrun, each writes down what it saw, for the tests to read.

One job does everything, since each of its processes takes seconds to import torch. `python job.py FOLDER [NAME ...]`.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import random
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventbus_engine import Algorithm, BatchError, Callback, ConfigurationError, Event, telemetry
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import Evaluator, State, Trainer, ranks
from eventbus_engine.training.algorithms import (
    EMA,
    SAM,
    GradientClipping,
    GradientPenalty,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    SelectiveBackprop,
)
from eventbus_engine.training.callbacks import CheckpointSaver

Facts = dict[str, Any]
SCENARIOS: dict[str, Callable[[], Awaitable[Facts]]] = {}


def scenario(function: Callable[[], Awaitable[Facts]]) -> Callable[[], Awaitable[Facts]]:
    """Have the job go through this one."""
    SCENARIOS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------------ what they share


def new_model(seed: int = 0) -> nn.Module:
    """Four layers with parameters, of which some freeze, and running statistics."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def new_data(size: int, seed: int = 0) -> TensorDataset:
    """Samples with four features, of three classes."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, 4, generator=generator)
    return TensorDataset(features, features.argmax(1).clamp(max=2))


class Watch(Callback[State]):
    """Notes the loss and the time of every batch, and what the evaluations measured."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.samples: list[int] = []
        self.seconds: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.frozen = 0

    def batch_end(self, state: State, logger: Any) -> None:
        """The batch counts as done."""
        assert state.loss is not None
        self.losses.append(float(state.loss))
        self.samples.append(int(state.timestamp.sample))
        self.seconds.append(state.timestamp.total_wct.total_seconds())

    def eval_after_all(self, state: State, logger: Any) -> None:
        """The metrics are there."""
        self.metrics.append(dict(state.metrics))

    def fit_end(self, state: State, logger: Any) -> None:
        """What is frozen by then."""
        self.frozen = sum(not parameter.requires_grad for parameter in state.model.parameters())


def curve(size: int, watch: Watch, seed: int = 0, **arguments: Any) -> Trainer:
    """A trainer whose losses are to be the same on one rank as on two with half the batch: LayerFreezing and all."""
    model, data, held_out = new_model(seed), new_data(64), new_data(21, seed=1)
    loader = DataLoader(data, batch_size=size, sampler=ranks.sampler(data, seed=3))
    eval_loader = DataLoader(held_out, batch_size=4, sampler=ranks.sampler(held_out, shuffle=False))
    evaluators = [Evaluator(eval_loader, metrics={"torch": MulticlassAccuracy(3, average="micro"), "own": Mean()})]
    return Trainer(
        model,
        loader,
        evaluators,
        loss=functional.cross_entropy,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.02),
        max_duration="4ep",
        algorithms=[LayerFreezing(freeze_start=0.2), GradientClipping("norm", 0.5)],
        callbacks=[watch],
        seed=7,
        **arguments,
    )


def told(trainer: Trainer, watch: Watch) -> Facts:
    """What a run came to."""
    state = trainer.state
    now = state.timestamp
    return {
        "rank": state.rank,
        "world_size": state.world_size,
        "run_name": state.run_name,
        "losses": watch.losses,
        "samples": watch.samples,
        "seconds": watch.seconds,
        "metrics": watch.metrics,
        "frozen": watch.frozen,
        "timestamp": [int(now.epoch), int(now.batch), int(now.sample)],
    }


class Mean:
    """A metric of one's own, that knows of no ranks: the mean of the targets."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        self.total += float(targets.sum())
        self.count += len(targets)

    def compute(self) -> float:
        """The mean."""
        return self.total / self.count

    def reset(self) -> None:
        """Begin anew."""
        self.total, self.count = 0.0, 0


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "init_process_group",
    "all_gather_single",
    "reduce_scatter_single",
)


@contextmanager
def watched_collectives() -> Iterator[set[tuple[str, str]]]:
    """Notes each collective with the thread that issues it."""
    seen: set[tuple[str, str]] = set()
    kept = {name: getattr(dist, name) for name in COLLECTIVES}

    def watch(name: str, function: Any) -> Any:
        def issue(*args: Any, **kwargs: Any) -> Any:
            seen.add((name, threading.current_thread().name))
            return function(*args, **kwargs)

        return issue

    for name, function in kept.items():
        setattr(dist, name, watch(name, function))
    try:
        yield seen
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


class Threads(Algorithm[State, Event]):
    """Notes the thread in which DDP averages gradients."""

    def __init__(self, seen: set[tuple[str, str]]) -> None:
        self.seen = seen
        self.hooked: set[int] = set()

    def match(self, event: Event, state: State) -> bool:
        """Run before the backward pass."""
        return event == Event.BEFORE_BACKWARD

    def apply(self, event: Event, state: State, logger: Any) -> None:
        """Put a hook where the averaging begins."""
        runner = state.runner
        if isinstance(runner, DistributedDataParallel) and id(runner) not in self.hooked:
            self.hooked.add(id(runner))
            runner.register_comm_hook(None, lambda state, bucket: self.average(bucket))

    def average(self, bucket: Any) -> Any:
        """As DDP does it."""
        self.seen.add(("gradients", threading.current_thread().name))
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])


# -------------------------------------------------------------------------------------------------------- the scenarios


@scenario
async def ddp() -> Facts:
    """The same model everywhere; it begins as another one on each rank, and rank 0's is taken."""
    watch = Watch()
    rank = int(dist_rank())
    with watched_collectives() as seen:
        trainer = curve(8, watch, seed=rank, microbatches=2, run_name=f"run of rank {rank}")
        trainer.state.algorithms.append(Threads(seen))
        await trainer.fit()
    model = trainer.state.model
    return {
        **told(trainer, watch),
        "threads": sorted({thread for _, thread in seen}),
        "collectives": sorted({name for name, _ in seen}),
        "weights": [parameter.sum().item() for parameter in model.parameters()],
        "raw": type(model).__name__,
        "runner": type(trainer.state.runner).__name__,
        "left": not dist.is_initialized(),
    }


@scenario
async def fsdp() -> Facts:
    """The model cut up."""
    watch = Watch()
    with watched_collectives() as seen:
        trainer = curve(8, watch, seed=int(dist_rank()), microbatches=2, parallelism="fsdp")
        await trainer.fit()
    parameters: list[Any] = list(trainer.state.model.parameters())
    return {
        **told(trainer, watch),
        "threads": sorted({thread for _, thread in seen}),
        "collectives": sorted({name for name, _ in seen}),
        "parts": [list(parameter.to_local().shape) for parameter in parameters],
        "left": not dist.is_initialized(),
    }


@scenario
async def inline() -> Facts:
    """Without a thread for training."""
    watch = Watch()
    trainer = curve(8, watch, offload=False)
    await trainer.fit()
    return told(trainer, watch)


@scenario
async def compiled() -> Facts:
    """Compilation goes along, of either."""
    facts: Facts = {}
    for parallelism in ("ddp", "fsdp"):
        watch = Watch()
        trainer = curve(8, watch, parallelism=parallelism, compile={"backend": "eager"})
        await trainer.fit("1ep")
        facts[parallelism] = watch.losses
    return facts


class StopOnce(Callback[State]):
    """Stops the training after a batch, on one rank."""

    def __init__(self, rank: int, batch: int) -> None:
        self.where = rank, batch

    def batch_end(self, state: State, logger: Any) -> None:
        """If it is the one."""
        if (state.rank, int(state.timestamp.batch)) == self.where:
            state.stop_training()


@scenario
async def stopped() -> Facts:
    """One rank stops all, in the middle of an epoch and at its end; later fits go on with the very next batch."""
    whole, watch = Watch(), Watch()
    await curve(8, whole).fit()
    trainer = curve(8, watch)
    for rank, batch in ((1, 2), (0, 5)):
        trainer.state.callbacks.append(StopOnce(rank, batch))
    trainer.state.callbacks.append(StopAtEpoch())
    ends = []
    async with trainer:
        while trainer.state.timestamp.batch < 16:
            await trainer.fit(f"{16 - int(trainer.state.timestamp.batch)}ba")
            ends.append(int(trainer.state.timestamp.batch))
    return {"ends": ends, "samples": [whole.samples, watch.samples]}


class Seen(Watch):
    """Notes the batches that there were, as a sum of each one's features."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[float] = []

    def after_dataloader(self, state: State, logger: Any) -> None:
        """Before an algorithm could change it."""
        self.batches.append(float(state.batch[0].sum()))


@scenario
async def held() -> Facts:
    """One rank stops all, and a run that resumes goes on with the batch that the other had fetched already."""
    folder = Path(sys.argv[1]) / "held"
    whole, first, second = Seen(), Seen(), Seen()
    await curve(8, whole).fit("6ba")
    cut = curve(8, first)
    cut.state.callbacks += [StopOnce(0, 2), CheckpointSaver(folder)]
    await cut.fit("6ba")
    await curve(8, second, load_path=folder / "latest").fit("4ba")
    return {"whole": whole.batches, "cut": [*first.batches, *second.batches]}


class StopAtEpoch(Callback[State]):
    """Stops the training after the second epoch, on rank 1."""

    def epoch_checkpoint(self, state: State, logger: Any) -> None:
        """The last event of an epoch."""
        if state.rank == 1 and state.timestamp.epoch == 2:
            state.stop_training()


class Stream:
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class AsyncStream(Stream):
    """The same, awaited."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for batch in self.batches:
            await anyio.lowlevel.checkpoint()
            yield batch


def cut(sizes: list[int]) -> list[tuple[Tensor, ...]]:
    """Batches of these sizes, one after another from the same data."""
    return list(zip(*(torch.split(tensor, sizes) for tensor in new_data(sum(sizes)).tensors), strict=True))


@scenario
async def uneven() -> Facts:
    """A rank with less data takes the other along, and batches of different size count by their samples."""
    facts: Facts = {}
    rank = int(dist_rank())
    for kind in (Stream, AsyncStream):
        watch = Watch()
        whole = cut([5, 3, 2, 6, 4, 4, 8])  # in turn for rank 0 and rank 1, and one more for rank 0
        model = new_model()
        trainer = Trainer(
            model,
            kind(whole[rank::2]),
            loss=functional.cross_entropy,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="2ep",
            callbacks=[watch],
        )
        await trainer.fit()
        facts[kind.__name__] = told(trainer, watch)
    return facts


@scenario
async def algorithms() -> Facts:
    """Other algorithms, in reduced precision, on a model that is cut up, with an uneven evaluation and prediction."""
    watch = Watch()
    data, held_out, model = new_data(64), new_data(9, seed=1), Tied()
    trainer = Trainer(
        model,
        DataLoader(data, batch_size=8, sampler=ranks.sampler(data)),
        DataLoader(held_out, batch_size=4, sampler=ranks.sampler(held_out, shuffle=False)),
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="2ep",
        algorithms=[
            EMA(half_life="4ba"),
            SAM(),
            MixUp(),
            LabelSmoothing(),
            SelectiveBackprop(start=0.0, end=1.0),
            GradientClipping("adaptive", 0.1),
        ],
        callbacks=[watch],
        precision="amp_bf16",
        parallelism="fsdp",
        seed=1,
    )
    async with trainer:
        await trainer.fit()
        samples = [batch[0] for batch in cut([4, 4, 4])]
        predictions = await trainer.predict(samples[: 1 + trainer.state.rank])
    return {**told(trainer, watch), "predictions": len(predictions)}


class Tied(nn.Module):
    """Two layers that share their weights, blocks in a list, and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])

    def forward(self, x: Tensor) -> Any:
        """Through all of them."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@scenario
async def statistics() -> Facts:
    """What each rank's evaluation uses of running statistics, and what each draws at random."""
    facts: Facts = {}
    for parallelism in ("ddp", "fsdp"):
        model, data = Tied(), new_data(16)
        trainer = Trainer(
            model,
            DataLoader(data, batch_size=4, sampler=ranks.sampler(data)),
            loss=functional.cross_entropy,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="1ep",
            seed=5,
            parallelism=parallelism,
        )
        async with trainer:
            await trainer.fit()
            [outputs] = await trainer.predict([torch.ones(1, 4)])
            drawn = [torch.rand(()).item(), random.random()]
        facts[parallelism] = {"outputs": outputs.tolist(), "drawn": drawn}
    return facts


class EveryRank(InMemoryLogger):
    """A destination that each rank has."""

    every_rank = True


@scenario
async def destinations() -> Facts:
    """Who of them is there."""
    memory, every, watch = InMemoryLogger(), EveryRank(), Watch()
    trainer = curve(8, watch)
    trainer = Trainer(
        trainer.state.model,
        trainer.state.train_dataloader,
        loss=functional.cross_entropy,
        optimizers=trainer.state.optimizers,
        max_duration="2ba",
        loggers=[memory],
        callbacks=[every, watch],
    )
    await trainer.fit()
    name = "loss/train/total"
    return {
        "memory": [value for _, value in memory.data.get(name, [])],
        "every": [value for _, value in every.data.get(name, [])],
        "losses": watch.losses,
    }


@scenario
async def traced() -> Facts:
    """Spans go to where OTEL_EXPORTER_OTLP_ENDPOINT says."""
    watch = Watch()
    with telemetry.configure(service_name="job"):
        trainer = curve(8, watch)
        await trainer.fit("2ba")
    return told(trainer, watch)


@asynccontextmanager
async def refusal(facts: Facts, name: str) -> AsyncIterator[None]:
    """Notes what is said."""
    try:
        yield
    except (BatchError, ConfigurationError) as error:
        facts[name] = str(error)


@scenario
async def refused() -> Facts:
    """What does not go with ranks, on all of them alike."""
    facts: Facts = {}
    rank, data = int(dist_rank()), new_data(16)

    def trainer(loader: Any = None, model: nn.Module | None = None, **arguments: Any) -> Trainer:
        model = model or new_model()
        arguments.setdefault("optimizers", torch.optim.SGD(model.parameters(), lr=0.1))
        loader = cut([4, 4]) if loader is None else loader
        return Trainer(model, loader, loss=functional.cross_entropy, max_duration="1ep", **arguments)

    async with refusal(facts, "sampler"):
        trainer(DataLoader(data, batch_size=4, shuffle=True))
    async with refusal(facts, "eval sampler"):
        trainer(eval_dataloader=DataLoader(data, batch_size=4))
    async with refusal(facts, "create_graph"):
        trainer(algorithms=[GradientPenalty()])
    async with refusal(facts, "lengths"):
        await trainer(cut([4] * (rank + 2))).fit()
    async with refusal(facts, "model"):
        await trainer(model=nn.Linear(4, 3 + rank)).fit()
    async with refusal(facts, "optimizers"):
        await trainer(optimizers=torch.optim.SGD([*new_model().parameters()], lr=0.1)).fit()
    async with refusal(facts, "microbatches"):
        await trainer(cut([4 + rank]), microbatches=4, parallelism="fsdp").fit()
    return facts


@scenario
async def own_group() -> Facts:
    """A group that the program has made itself is used, and left."""
    dist.init_process_group("gloo")
    await curve(8, Watch()).fit("1ba")
    left = dist.is_initialized()
    dist.destroy_process_group()
    return {"there": left}


@scenario
async def moved_state() -> Facts:
    """An optimizer that has made steps before keeps its state, cut up."""
    losses = []
    for parallelism in ("ddp", "fsdp"):
        model, watch = new_model(), Watch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for inputs, targets in cut([4, 4]):
            functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.zero_grad()
        trainer = Trainer(
            model,
            cut([4, 4]),
            loss=functional.cross_entropy,
            optimizers=optimizer,
            max_duration="2ep",
            callbacks=[watch],
            parallelism=parallelism,
        )
        await trainer.fit()
        losses.append(watch.losses)
    return {"losses": losses}


def dist_rank() -> int:
    """This process's number."""
    job = ranks.find_job()
    assert job is not None
    return job.rank


def main() -> None:
    """Go through the scenarios, on asyncio and trio in turn."""
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(130, exit=True)  # where each thread is, should the ranks wait for each other
    facts = {}
    for number, (name, run) in enumerate(SCENARIOS.items()):
        if not wanted or name in wanted:
            facts[name] = anyio.run(run, backend=("asyncio", "trio")[number % 2])
    (folder / f"{dist_rank()}.json").write_text(json.dumps(copy.copy(facts)), encoding="utf-8")


if __name__ == "__main__":
    main()
