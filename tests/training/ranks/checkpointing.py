"""A job that saves, and one that loads what others have saved: `python checkpointing.py FOLDER save|load`.

The test runs `train` on one rank, in its own process. Each rank writes down what it saw, for the test to read.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eventbus_engine import Algorithm, Callback, CheckpointError, Event
from eventbus_engine.training import State, Trainer, ranks
from eventbus_engine.training.algorithms import EMA, LayerFreezing
from eventbus_engine.training.callbacks import CheckpointSaver

Facts = dict[str, Any]

WAYS = ("ddp", "fsdp")
SAVED = ("ep1-ba5", "ep2-ba10")
"""In the middle of an epoch, with one layer frozen and with two."""


class Scaled(nn.Module):
    """A parameter of one element, of which one rank of two has nothing, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Count, and scale."""
        self.seen += int(self.training)
        return x * self.scale


class Jitter(Algorithm[State, Event]):
    """Scales each batch by a number of its own, as MixUp draws one, but the same for a batch of another size."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def match(self, event: Event, state: State) -> bool:
        """Run on each batch."""
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Any) -> None:
        """Draw, and scale."""
        state.batch_set_item(0, state.batch_get_item(0) * torch.rand((), generator=self.generator))

    def state_dict(self) -> Facts:
        """Where the generator is."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it there."""
        self.generator.set_state(state["generator"])


def portrait(state: State) -> dict[str, Tensor]:
    """Parameters, buffers, and what the optimizer and EMA keep, whole and by name. A collective operation."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    tensors: dict[str, Tensor] = dict(state.model.state_dict())
    for parameter, kept in state.optimizers[0].state.items():
        tensors |= {f"adamw.{names[parameter]}.{key}": value for key, value in kept.items()}
    for algorithm in state.algorithms:
        if isinstance(algorithm, EMA):
            tensors |= {f"ema.{name}": value for name, value in algorithm.averages.items()}
    whole = {name: tensors[name].detach() for name in sorted(tensors)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in whole.items()}


class Watch(Callback[State]):
    """Notes the losses, and what the run is made of where a checkpoint is saved and where one has been loaded."""

    def __init__(self, saver: CheckpointSaver, folder: Path) -> None:
        self.saver = saver
        self.folder = folder
        self.losses: list[float] = []
        self.metrics: list[float] = []
        self.portraits: dict[str, dict[str, Tensor]] = {}
        self.begun: Facts = {}

    async def after_load(self, state: State, logger: Any) -> None:
        """Nothing has been drawn since. Wherever each rank has looked, they save to one folder."""
        self.saver.folder = self.folder
        self.portraits["loaded"] = await state.compute(portrait, state)
        self.begun = {
            "batch": int(state.timestamp.batch),
            "seed": state.seed,
            "generator": torch.initial_seed(),
            "frozen": [name for name, parameter in state.model.named_parameters() if not parameter.requires_grad],
        }

    async def batch_end(self, state: State, logger: Any) -> None:
        """The batch counts as done; a checkpoint of it is saved after this."""
        assert state.loss is not None
        self.losses.append(float(state.loss))
        name = f"ep{int(state.timestamp.epoch)}-ba{int(state.timestamp.batch)}"
        if name in SAVED:
            self.portraits[name] = await state.compute(portrait, state)

    def eval_after_all(self, state: State, logger: Any) -> None:
        """Of the averages."""
        self.metrics.append(float(state.metrics["metrics/eval/loss"]))


def new_data(size: int, seed: int) -> TensorDataset:
    """Samples with four features, of three classes."""
    features = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features.argmax(1).clamp(max=2))


def train(
    folder: Path, size: int, *, seed: int = 7, looks_in: Path | None = None, **arguments: Any
) -> tuple[Facts, dict[str, dict[str, Tensor]]]:
    """Train to the end, with checkpoints in `folder`.

    Args:
        folder: to save to.
        size: of a rank's batch.
        seed: of the run.
        looks_in: for a checkpoint to go on from; `folder` by default.
        arguments: of the trainer, besides.

    Returns:
        What the run came to, and the portraits of it.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Scaled(), nn.Linear(8, 3)]
    model, saver = nn.Sequential(*layers), CheckpointSaver(looks_in or folder, "5ba")
    watch = Watch(saver, folder)
    data, held_out = new_data(64, 0), new_data(21, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(
        model,
        DataLoader(data, batch_size=size, sampler=ranks.sampler(data, seed=3)),
        DataLoader(held_out, batch_size=4, sampler=ranks.sampler(held_out, shuffle=False)),
        loss=functional.cross_entropy,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        max_duration="4ep",
        algorithms=[EMA(half_life="4ba"), LayerFreezing(freeze_start=0.0), Jitter()],
        callbacks=[watch, saver],
        seed=seed,
        **arguments,
    )
    anyio.run(trainer.fit)
    return {**watch.begun, "losses": watch.losses, "metrics": watch.metrics}, watch.portraits


# ------------------------------------------------------------------------------------------------- on two ranks


def save(folder: Path, rank: int) -> Facts:
    """Train either way."""
    facts: Facts = {}
    for way in WAYS:
        facts[way], portraits = train(folder / way, 8, parallelism=way)
        for name in SAVED:
            if rank == 0:
                save_file(portraits[name], folder / f"{way}-{name}.safetensors")
    return facts


def load(folder: Path, rank: int) -> Facts:
    """Go on from what was saved on one rank or two, under a seed that is not the run's."""
    facts: Facts = {}
    ways = [("one", *SAVED[1:], way) for way in WAYS] + [("ddp", SAVED[0], "fsdp"), ("fsdp", SAVED[0], "ddp")]
    for source, name, way in ways:
        goal = f"{source}-under-{way}"
        path = folder / source / name
        facts[goal], portraits = train(folder / goal, 8, parallelism=way, load_path=path, seed=99)
        save_file(portraits["loaded"], folder / f"{goal}-{rank}.safetensors")
    # Each rank looks into a folder of its own, and they are not alike: that of rank 0 is the one that counts.
    for way in WAYS:
        own, common = folder / f"autoresume-{way}-{rank}", folder / f"autoresume-{way}"
        facts[common.name], _ = train(common, 8, parallelism=way, autoresume=True, looks_in=own, seed=99)
    facts["damaged"] = refusal(folder, load_path=folder / "damaged")
    facts["damaged for one"] = refusal(folder, load_path=folder / ("damaged" if rank else f"ddp/{SAVED[0]}"))
    newer = folder / f"newer-{rank}" / "checkpoint"
    newer.mkdir(parents=True)
    (newer / "manifest.json").write_text('{"format": 1000}', encoding="utf-8")
    facts["newer"] = refusal(folder, autoresume=True, looks_in=newer.parent)
    facts["left"] = not dist.is_initialized()
    return facts


def refusal(folder: Path, **arguments: Any) -> str:
    """What is said of a checkpoint that cannot be loaded."""
    try:
        train(folder / "never", 8, **arguments)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def main() -> None:
    """Do it, and write down what has been seen."""
    folder, what = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(130, exit=True)  # where each thread is, should the ranks wait for each other
    job = ranks.find_job()
    assert job is not None
    facts = {"save": save, "load": load}[what](folder, job.rank)
    (folder / f"{what}-{job.rank}.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
