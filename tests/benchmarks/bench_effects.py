"""What each algorithm does to a training run: how good the model gets, in how much time and how many passes.

Every arm of a comparison is trained with the same seeds, in turns, and judged by samples it has not seen. A figure is
the mean over the seeds and their standard deviation; a difference is that to the arm without the algorithm, seed by
seed, and its standard error: one that is not three times as large as that may well be chance. The seconds are those
the processor spent on training, evaluation left out, on one thread, the median over the seeds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import anyio
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from effects import EFFECTS, Arm, Effect
from tables import Table, cell
from tasks import Setup
from torch import Tensor, nn

from eventbus_engine import Callback
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer

Row = tuple[str, float, str, float | None]

COUNTS = {
    "forward": "values forward",
    "backward": "values backward",
    "gradients": "gradients",
    "parameters": "parameters",
}
"""What is counted in millions, and the head of its column: the values, pixels or characters, that went through the
model each way, the gradients of single parameters that came out of it, and the parameters that it has at the end."""


class Outcome(NamedTuple):
    """What came of a run: its figures, by the heads of their columns, the seconds, and the passes it took."""

    quality: dict[str, float]
    seconds: float
    forward: int
    backward: int
    gradients: int
    parameters: int


class Passes(Callback[State]):
    """Counts the values, pixels or characters, that go through the model, and the gradients that come out of it."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = self.backward = self.gradients = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward += _values([*args, *kwargs.values()])

    def after_backward(self, state: State, logger: Logger) -> None:
        """A microbatch has gone backward."""
        batch = state.batch
        self.backward += _values([batch["input_ids"]] if isinstance(batch, dict) else batch[:1])
        self.gradients += sum(weight.numel() for weight in state.model.parameters() if weight.requires_grad)


def _values(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))


def train(setup: Setup, algorithms: Sequence[Any], seed: int) -> Outcome:
    """Train, then judge."""
    passes, optimizer = Passes(setup.model), setup.optimizer(setup.model)
    trainer = Trainer(
        setup.model,
        setup.train,
        setup.held_out,
        loss=F.cross_entropy,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setup.steps) if setup.decay else None,
        step_schedulers_every_batch=True,
        max_duration=f"{setup.steps}ba",
        eval_interval=f"{setup.steps + 1}ba",
        algorithms=algorithms,
        callbacks=passes,
        seed=seed,
        offload=False,
    )

    async def fit() -> Outcome:
        async with trainer:
            started = time.process_time()
            await trainer.fit()
            seconds = time.process_time() - started
            counted = passes.forward, passes.backward, passes.gradients
            metrics = await trainer.eval()
        model = trainer.state.model
        return Outcome(
            setup.judge(metrics, model), seconds, *counted, sum(weight.numel() for weight in model.parameters())
        )

    return anyio.run(fit)


def measure(*, only: Sequence[str] = (), seeds: int = 5, length: float = 1.0, note: str = "") -> Iterator[Row | Table]:
    """A table for each effect.

    Args:
        only: the names of the algorithms, all by default.
        seeds: how many runs of each arm.
        length: how long to train, as a part of what the task is meant for.
        note: on which machine.

    Raises:
        SystemExit: there is no such effect.
    """
    if unknown := sorted(set(only) - set(EFFECTS)):
        raise SystemExit(f"there is no effect {', '.join(unknown)}; there are {', '.join(sorted(EFFECTS))}")
    torch.set_num_threads(1)
    for name in only or sorted(EFFECTS):
        effect = EFFECTS[name]
        first = next(iter(effect.arms.values()))
        _run(effect, first, 0, 0.0)  # what torch sets up for its first run is nobody's
        outcomes: dict[str, list[Outcome]] = {label: [] for label in effect.arms}
        for seed in range(seeds):
            for label, arm in effect.arms.items():
                outcomes[label].append(_run(effect, arm, seed, length))
        yield _table(name, effect, outcomes)


def _run(effect: Effect, arm: Arm, seed: int, length: float) -> Outcome:
    return train((arm.task or effect.task)(seed).shorter(arm.length * length), arm.algorithms(), seed)


def _table(name: str, effect: Effect, outcomes: dict[str, list[Outcome]]) -> Table:
    base = next(iter(outcomes.values()))
    count = len(base)
    heads = list(base[0].quality)
    # What is the same in every arm is not worth a column.
    counts = [one for one in COUNTS if len({_mean(runs, one) for runs in outcomes.values()}) > 1]
    rows = []
    for label, runs in outcomes.items():
        base = runs if effect.arms[label].base else base
        row = [label]
        for figure in heads:
            row.append(spread([run.quality[figure] for run in runs]))
            if figure == heads[0]:
                changes = [run.quality[figure] - other.quality[figure] for run, other in zip(runs, base, strict=True)]
                digits = _digits([run.quality[figure] for run in runs])
                row.append("" if runs is base else change(changes, digits))
        row.append(f"{statistics.median(run.seconds for run in runs):.2f}")
        row += [cell(_mean(runs, one) / 1e6) for one in counts]
        rows.append(row)
    head = ["", heads[0], "difference", *heads[1:], "seconds", *(f"{COUNTS[one]}, M" for one in counts)]
    title = f"{effect.what}, {count} seeds"
    figures = {label: [run._asdict() for run in runs] for label, runs in outcomes.items()}
    return Table(f"effect-{name}", title, head, rows, {"algorithm": name, "arms": figures})


def _mean(runs: Sequence[Outcome], count: str) -> float:
    return statistics.fmean(getattr(run, count) for run in runs)


def spread(values: Sequence[float]) -> str:
    """The mean and the standard deviation."""
    digits = _digits(values)
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values) if len(values) > 1 else 0:.{digits}f}"


def change(values: Sequence[float], digits: int) -> str:
    """The mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0
    mean = round(statistics.fmean(values), digits) + 0.0  # which has no -0.00
    return f"{mean:+.{digits}f} ± {error:.{digits}f}"


def _digits(values: Sequence[float]) -> int:
    """As many as tell percents apart, or bits."""
    return 2 if statistics.fmean(values) >= 10 else 3
