"""Ways to train the same model on the same batches: by hand, with this project's Trainer, and with other people's.

Each is a function of a `Job` that trains for as many steps as the job's loader yields batches. Loaded, each does the
same arithmetic besides the step, by the same functions: it smooths the labels, clips the gradients and averages the
weights; two more algorithms, or hooks in their place, have nothing to do yet; and five callbacks count the batches.
Whatever else they take is theirs.
"""

from __future__ import annotations

import copy
import itertools
import logging
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any

import anyio
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from peers import import_composer, need
from torch import Tensor, nn

from eventbus_engine import Callback
from eventbus_engine.training import Trainer
from eventbus_engine.training.algorithms import (
    EMA,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    SelectiveBackprop,
    apply_gradient_clipping,
    compute_ema,
    smooth_labels,
)

__all__ = ["BY_HAND", "WAYS", "Job", "composer"]

SMOOTHING, THRESHOLD, AVERAGING = 0.1, 1.0, 0.999
CALLBACKS = 5


class Job:
    """What to train, and the loader, which keeps the time: a step lasts from one request for a batch to the next.

    Attributes:
        asked: when each batch was asked for, in seconds: by the clock, and of the processor's time for all threads.

    Args:
        samples: in a batch.
        steps: batches to train on.
        loaded: with algorithms and callbacks.
    """

    def __init__(self, samples: int, steps: int, loaded: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batch = torch.randn(samples, 64, generator=generator), torch.arange(samples) % 10
        self.steps = steps
        self.loaded = loaded
        self.model = nn.Sequential(
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.asked: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.steps):
            self.asked.append((perf_counter(), process_time()))
            yield self.batch

    def seconds(self, skip: int) -> tuple[float, float]:
        """The median step after so many: by the clock, and of the processor's time."""
        steps = list(itertools.pairwise(self.asked[skip:]))
        clock, processor = (statistics.median(later[i] - earlier[i] for earlier, later in steps) for i in (0, 1))
        return clock, processor


def by_hand(job: Job) -> None:
    """What one writes without a library."""
    model, optimizer = job.model, job.optimizer
    averages = copy.deepcopy(model)
    for inputs, labels in job:
        optimizer.zero_grad()
        outputs = model(inputs)
        targets = smooth_labels(outputs, labels, SMOOTHING) if job.loaded else labels
        loss = F.cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if job.loaded:
            apply_gradient_clipping(model, "norm", THRESHOLD)
        optimizer.step()
        if job.loaded:
            compute_ema(model, averages, AVERAGING)
        loss.item()


class Count(Callback[Any]):
    """Counts the batches."""

    def __init__(self) -> None:
        self.batches = 0

    def batch_end(self, state: Any, logger: Any) -> None:
        """Another one."""
        self.batches += 1


def ours(job: Job, offload: bool) -> None:
    """`Trainer.fit`, with the computations on a thread of their own or inline."""
    trainer = Trainer(
        job.model,
        job,
        loss=F.cross_entropy,
        optimizers=job.optimizer,
        max_duration=f"{job.steps}ba",
        offload=offload,
        algorithms=[
            LabelSmoothing(SMOOTHING),
            GradientClipping("norm", THRESHOLD),
            EMA(half_life=None, smoothing=AVERAGING),
            LayerFreezing(),
            SelectiveBackprop(start=1.0, end=1.0),
        ]
        if job.loaded
        else (),
        callbacks=[Count() for _ in range(CALLBACKS)] if job.loaded else (),
    )
    anyio.run(trainer.fit)


class Hooks:
    """Those that the loops of Lightning call on a callback; it does nothing in any of them."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class CountHook(Hooks):
    """Counts the batches."""

    batches = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Another one."""
        self.batches += 1


def fabric(job: Job) -> None:
    """`Fabric`: the loop by hand, the backward pass and the callbacks through it."""
    lightning = need("lightning_fabric")
    callbacks = [*(CountHook() for _ in range(CALLBACKS)), Hooks(), Hooks()] if job.loaded else []
    fabric = lightning.Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
    model, optimizer = fabric.setup(job.model, job.optimizer)
    averages = copy.deepcopy(job.model)
    for index, (inputs, labels) in enumerate(job):
        fabric.call("on_train_batch_start", (inputs, labels), index)
        optimizer.zero_grad()
        outputs = model(inputs)
        targets = smooth_labels(outputs, labels, SMOOTHING) if job.loaded else labels
        loss = F.cross_entropy(outputs, targets)
        fabric.backward(loss)
        if job.loaded:
            apply_gradient_clipping(job.model, "norm", THRESHOLD)
        optimizer.step()
        if job.loaded:
            compute_ema(job.model, averages, AVERAGING)
        fabric.call("on_train_batch_end", loss.item(), (inputs, labels), index)
    fabric.call("on_train_epoch_end")


def lightning(job: Job) -> None:
    """`Trainer.fit` of Lightning, without logger, progress bar and checkpoints."""
    pl = need("pytorch_lightning")
    for name in ("pytorch_lightning", "lightning_fabric", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def forward(module: Any, batch: Any, index: int) -> Tensor:
        outputs = module.model(batch[0])
        targets = smooth_labels(outputs, batch[1], SMOOTHING) if job.loaded else batch[1]
        return F.cross_entropy(outputs, targets)

    def clip(self: Any, trainer: Any, module: Any, optimizer: Any) -> None:
        apply_gradient_clipping(module.model, "norm", THRESHOLD)

    averages = copy.deepcopy(job.model)

    def average(self: Any, trainer: Any, module: Any, *rest: Any) -> None:
        compute_ema(module.model, averages, AVERAGING)

    body = {"training_step": forward, "configure_optimizers": lambda module: job.optimizer}
    module = type("Module", (pl.LightningModule,), body)()
    module.model = job.model
    hooks: list[Any] = [Hooks, Hooks, *[CountHook] * CALLBACKS]
    callbacks = [type(kind.__name__, (kind, pl.Callback), {})() for kind in hooks] if job.loaded else []
    if job.loaded:
        callbacks.append(type("Clip", (pl.Callback,), {"on_before_optimizer_step": clip})())
        callbacks.append(type("Average", (pl.Callback,), {"on_train_batch_end": average})())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=job.steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, job)


def composer(job: Job, on_our_engine: Sequence[Any] | None = None) -> None:
    """`Trainer.fit` of Composer, without loggers and progress bar, with algorithms of its kind."""
    composer = import_composer()
    logging.getLogger("composer").setLevel(logging.ERROR)
    event, averages = composer.Event, copy.deepcopy(job.model)

    def smooth(state: Any, labels: list[Any] = []) -> None:  # noqa: B006 -- keeps the labels from one call to the next
        if labels:
            state.batch_set_item(1, labels.pop())
        else:
            labels.append(state.batch_get_item(1))
            state.batch_set_item(1, smooth_labels(state.outputs, labels[0], SMOOTHING))

    def algorithm(apply: Callable[[Any], Any], *events: Any) -> Any:
        body = {
            "match": lambda self, event, state: event in events,
            "apply": lambda self, event, state, logger: apply(state),
        }
        return type("Algorithm", (composer.Algorithm,), body)()

    body = {
        "forward": lambda self, batch: self.module(batch[0]),
        "loss": lambda self, outputs, batch: F.cross_entropy(outputs, batch[1]),
    }
    model = type("Model", (composer.models.ComposerModel,), body)()
    model.module = job.model
    count = type("Count", (composer.Callback,), {"batches": 0, "batch_end": Count.batch_end})
    algorithms = [
        algorithm(smooth, event.BEFORE_LOSS, event.AFTER_LOSS),
        algorithm(lambda state: apply_gradient_clipping(job.model, "norm", THRESHOLD), event.AFTER_TRAIN_BATCH),
        algorithm(lambda state: compute_ema(job.model, averages, AVERAGING), event.BATCH_END),
        algorithm(lambda state: None, event.EPOCH_END),
        algorithm(lambda state: None),
    ]
    trainer = composer.Trainer(
        model=model,
        train_dataloader=job,
        optimizers=job.optimizer,
        max_duration=f"{job.steps}ba",
        device="cpu",
        device_train_microbatch_size=len(job.batch[1]),
        progress_bar=False,
        algorithms=algorithms if job.loaded else [],
        callbacks=[count() for _ in range(CALLBACKS)] if job.loaded else [],
    )
    if on_our_engine is not None:
        from eventbus_adapters.composer import use_engine  # which needs Composer

        use_engine(trainer, callbacks=on_our_engine)
    trainer.fit()
    trainer.close()


def quiet(way: Callable[[Job], None]) -> Callable[[Job], None]:
    """Without what it warns of."""

    def train(job: Job) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            way(job)

    return train


BY_HAND = "by hand"

WAYS: dict[str, tuple[Callable[[Job], None], bool]] = {
    BY_HAND: (by_hand, False),
    "eventbus-engine": (partial(ours, offload=True), False),
    "eventbus-engine, offload=False": (partial(ours, offload=False), False),
    "Lightning Fabric": (quiet(fabric), True),
    "Lightning": (quiet(lightning), True),
    "Composer": (quiet(composer), True),
    "Composer, use_engine": (quiet(partial(composer, on_our_engine=())), True),
}
"""How each trains, and whether it is somebody else's, which may be missing or broken."""
