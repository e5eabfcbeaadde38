"""A run that was cut anywhere and resumed is the run that was not cut, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import eventbus_engine.training.algorithms as everything
from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import CallbackErrors
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import (
    EMA,
    SAM,
    BlurPool,
    CutMix,
    FusedLayerNorm,
    GatedLinearUnits,
    GradientClipping,
    GradientPenalty,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    SelectiveBackprop,
    SeqLengthWarmup,
)
from eventbus_engine.training.callbacks import EarlyStopper
from eventbus_engine.training.checkpoint import take_snapshot, write_snapshot
from eventbus_engine.training.checkpoint.contents import collect
from eventbus_engine.training.schedulers import CosineAnnealingScheduler

pytestmark = pytest.mark.anyio

EPOCHS, BATCHES, SIZE = 3, 4, 4


class KilledError(Exception):
    """What ends a run in the middle."""


class Cut(Callback[State]):
    """Keeps a checkpoint at one event of a run, at one batch of it, and ends the run there."""

    def __init__(self, event: Event, batch: int, path: Path) -> None:
        super().__init__()
        self.event, self.batch, self.path = event, batch, path

    async def run_event(self, event: Any, state: State, logger: Any) -> None:
        """Nobody hears of the run any more."""
        if event == self.event and state.timestamp.batch == self.batch:
            snapshot = await state.compute(lambda: take_snapshot(collect(state, state._source)))
            write_snapshot(snapshot, self.path)
            raise KilledError


class Diary(Callback[State]):
    """Notes every loss, learning rate and evaluation of a run, by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[tuple[str, int], Any] = {}

    def batch_end(self, state: State, logger: Any) -> None:
        """The loss and the rates."""
        assert state.loss is not None
        rates = [float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups]
        self.entries["batch", int(state.timestamp.batch)] = state.loss.item(), rates

    def eval_after_all(self, state: State, logger: Any) -> None:
        """The metrics."""
        self.entries["eval", int(state.timestamp.batch)] = dict(state.metrics)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from all global generators, as augmentations do."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.inputs[index], self.targets[index]
        if inputs.is_floating_point():
            inputs = inputs + 0.01 * (random.random() + np.random.random() + torch.rand(()))  # noqa: NPY002
        return inputs, targets


def image_model() -> nn.Module:
    """Convolutions with strides, batch norm and dropout, for images of any size."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def text_model() -> nn.Module:
    """An embedding, and the blocks that gates and fused norms look for."""
    return nn.Sequential(
        nn.Embedding(7, 8),
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)),
        nn.LayerNorm(8),
        nn.Linear(8, 7),
    )


def per_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all tokens."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def images(count: int) -> tuple[Tensor, Tensor]:
    """Noise, and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(3, (count,), generator=generator)


def texts(count: int) -> tuple[Tensor, Tensor]:
    """Noise, and what follows."""
    text = torch.randint(7, (count, 9), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


@dataclass(frozen=True)
class Recipe:
    """How to make the same trainer twice."""

    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    loss: Any
    algorithms: Callable[[], list[Any]]
    optimizers: Callable[[nn.Module], Any]
    schedulers: Callable[[Any], Any]
    options: dict[str, Any]

    def make(self, **arguments: Any) -> Trainer:
        """A trainer, with dropout, shuffling and noise from the global generators."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model()
        inputs, targets = self.data(EPOCHS * SIZE)
        optimizer = self.optimizers(model)
        return Trainer(
            model,
            DataLoader(Noisy(*self.data(BATCHES * SIZE - 1)), batch_size=SIZE, shuffle=True),
            [(inputs, targets)],
            loss=self.loss,
            optimizers=optimizer,
            schedulers=self.schedulers(optimizer),
            max_duration=f"{EPOCHS}ep",
            algorithms=self.algorithms(),
            **self.options | arguments,
        )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, one without decay."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]
    return torch.optim.AdamW(groups, lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Whose buffers there are none of at first."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


RECIPES = {
    "images": Recipe(
        image_model,
        images,
        functional.cross_entropy,
        lambda: [
            BlurPool(min_channels=1),
            CutMix(),
            EMA(half_life="3ba"),
            LabelSmoothing(),
            ProgressiveResizing(mode="crop", delay_fraction=0.2),
            SelectiveBackprop(start=0.0, end=1.0, interrupt=2),
            GradientClipping("norm", 0.5),
            LayerFreezing(freeze_start=0.0),
        ],
        adamw,
        lambda optimizer: [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]), CosineAnnealingScheduler("1dur")],
        {"microbatches": 2, "seed": 3},
    ),
    "flat": Recipe(
        image_model,
        images,
        functional.cross_entropy,
        lambda: [MixUp(), SAM(interval=2), GradientClipping("adaptive", 0.1), EMA(half_life="1ep")],
        momentum,
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, EPOCHS * BATCHES),
        {"step_schedulers_every_batch": True, "precision": "amp_bf16", "seed": None},
    ),
    "text": Recipe(
        text_model,
        texts,
        per_token,
        lambda: [
            GatedLinearUnits(),
            FusedLayerNorm(),
            SeqLengthWarmup(duration=0.7, min_seq_length=2, max_seq_length=8, step_size=1),
            GradientPenalty(0.1),
            EMA(None, smoothing=0.5, ema_start="0.3dur"),
        ],
        adamw,
        lambda optimizer: CosineAnnealingScheduler("1dur"),
        {"microbatches": 2, "precision": "amp_bf16", "eval_interval": "3ba", "seed": 5},
    ),
}


def test_the_recipes_have_every_algorithm() -> None:
    """A new one has to be cut, too."""
    named = {type(algorithm) for recipe in RECIPES.values() for algorithm in recipe.algorithms()}
    there = {cls for cls in vars(everything).values() if isinstance(cls, type) and issubclass(cls, Algorithm)}

    assert named == there


def contents_of(trainer: Trainer, diary: Diary) -> dict[str, Any]:
    """All that two runs could differ in."""
    state = trainer.state
    optimizer = state.optimizers[0].state_dict()
    return {
        "model": state.model.state_dict(),
        "trained": [parameter.requires_grad for parameter in state.model.parameters()],
        "optimizer": optimizer,
        "averages": [a.averages for a in state.algorithms if isinstance(a, EMA)],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "diary": diary.entries,
    }


def differing(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two such contents are not equal, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differing(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [found for index in range(len(one)) for found in differing(one[index], other[index], f"{place}.{index}")]
    if isinstance(one, Tensor | np.ndarray):
        return [] if np.array_equal(np.asarray(one), np.asarray(other)) else [place]
    return [] if one == other else [place]


def scramble(seed: int) -> None:
    """The generators of another process."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


async def train(recipe: Recipe, **arguments: Any) -> dict[str, Any]:
    """All of a run from the same numbers on, or what is left of it."""
    diary = Diary()
    trainer = recipe.make(callbacks=[diary, EarlyStopper("loss", patience=100)], **arguments)
    await trainer.fit()
    return contents_of(trainer, diary)


def random_cut(seed: int) -> tuple[Event, int]:
    """Where to cut: before the first step, inside an epoch, at the end of one before and after it is counted."""
    dice = random.Random(seed)
    batch = dice.randrange(EPOCHS * BATCHES)
    if batch == 0:
        return Event.FIT_START, 0
    at_end = batch % BATCHES == 0 and dice.random() < 0.5
    return Event.EPOCH_CHECKPOINT if at_end else Event.BATCH_CHECKPOINT, batch


CUTS = [
    (Event.FIT_START, 0),
    (Event.BATCH_CHECKPOINT, 6),
    (Event.EPOCH_CHECKPOINT, 2 * BATCHES),
    *(pytest.param(*random_cut(seed), marks=pytest.mark.soak) for seed in range(20)),
]


@pytest.mark.parametrize(("event", "batch"), CUTS)
@pytest.mark.parametrize("name", RECIPES)
async def test_a_run_that_is_cut_and_resumed_is_the_run_that_was_not(
    name: str, event: Event, batch: int, tmp_path: Path
) -> None:
    """Losses, rates and metrics from there on; in the end weights, moments, averages and generators."""
    recipe, apart = RECIPES[name], batch % 2 == 0
    scramble(1)
    whole = await train(recipe, offload=apart)
    scramble(1)
    with pytest.raises(CallbackErrors):
        await recipe.make(callbacks=[Cut(event, batch, tmp_path / "cut")], offload=not apart).fit()
    scramble(2)
    rest = await train(recipe, offload=apart, load_path=tmp_path / "cut")

    whole["diary"] = {key: entry for key, entry in whole["diary"].items() if key[1] > batch}
    assert len(rest["diary"]) >= EPOCHS * BATCHES - batch
    assert differing(whole, rest) == []
