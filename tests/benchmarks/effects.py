"""What each algorithm is measured on, and beside what: where its authors promise something, and where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tasks import Task, digits, large_digits, shifted_digits, text

from eventbus_engine.training import algorithms

__all__ = ["EFFECTS", "Arm", "Effect"]


class Arm(NamedTuple):
    """One of the ways to train.

    Attributes:
        algorithms: makes them.
        length: how long to train, as a part of the task's own steps.
        task: the effect's own by default.
        base: whether the arms after it are compared with it; the first one is a base in any case.
    """

    algorithms: Callable[[], Sequence[Any]] = tuple
    length: float = 1.0
    task: Task | None = None
    base: bool = False


@dataclass(frozen=True)
class Effect:
    """A comparison.

    Attributes:
        what: the task, in words.
        task: makes it from a seed.
        arms: the ways to train.
    """

    what: str
    task: Task
    arms: Mapping[str, Arm]


def use(name: str, **options: Any) -> Callable[[], Sequence[Any]]:
    """The algorithm of that name, a new one for each run."""
    return lambda: [getattr(algorithms, name)(**options)]


def pair(name: str, **options: Any) -> dict[str, Arm]:
    """Without it, and with it."""
    return {"without": Arm(), "with": Arm(use(name, **options))}


def also(task: Task, where: str, name: str, **options: Any) -> dict[str, Arm]:
    """The same on another task."""
    return {
        f"{where}, without": Arm(task=task, base=True),
        f"{where}, with": Arm(use(name, **options), task=task),
    }


DIGITS = "400 digits, 20 epochs"
NOISY_DIGITS = "400 digits, 30 % of them with random labels, 20 epochs"
TEXT = "a GPT on English, 300 steps"

noisy_digits = partial(digits, noise=0.3)
steady_digits = partial(digits, noise=0.3, decay=False)

EFFECTS: dict[str, Effect] = {
    "blurpool": Effect("400 digits in a field of 16 by 16, 12 epochs", shifted_digits, pair("BlurPool")),
    "cutmix": Effect(NOISY_DIGITS, noisy_digits, pair("CutMix") | also(digits, "right labels", "CutMix")),
    "ema": Effect(
        f"{NOISY_DIGITS}, at the same learning rate throughout",
        steady_digits,
        pair("EMA", half_life="20ba") | also(noisy_digits, "falling rate", "EMA", half_life="20ba"),
    ),
    "fused_layernorm": Effect(TEXT, text, pair("FusedLayerNorm")),
    "gated_linear_units": Effect(
        TEXT,
        text,
        pair("GatedLinearUnits") | {"without, hidden layers half as wide again": Arm(task=partial(text, hidden=288))},
    ),
    "gradient_clipping": Effect(
        "400 digits, 20 epochs, no BatchNorm, a learning rate of 0.3",
        partial(digits, norm=False, rate=0.3),
        pair("GradientClipping", clipping_type="norm", clipping_threshold=1.0)
        | also(
            partial(digits, norm=False, rate=0.1),
            "rate 0.1",
            "GradientClipping",
            clipping_type="norm",
            clipping_threshold=1.0,
        ),
    ),
    "gradient_penalty": Effect(
        NOISY_DIGITS, noisy_digits, pair("GradientPenalty") | {"weight=0.1": Arm(use("GradientPenalty", weight=0.1))}
    ),
    "label_smoothing": Effect(
        NOISY_DIGITS, noisy_digits, pair("LabelSmoothing") | also(digits, "right labels", "LabelSmoothing")
    ),
    "layer_freezing": Effect(
        DIGITS, digits, pair("LayerFreezing") | {"freeze_start=0": Arm(use("LayerFreezing", freeze_start=0.0))}
    ),
    "mixup": Effect(NOISY_DIGITS, noisy_digits, pair("MixUp") | also(digits, "right labels", "MixUp")),
    "progressive_resizing": Effect(
        "400 digits at 32 by 32, 12 epochs",
        large_digits,
        pair("ProgressiveResizing") | {"without, 0.7 of the steps": Arm(length=0.7)},
    ),
    "sam": Effect(NOISY_DIGITS, noisy_digits, pair("SAM") | {"without, twice the steps": Arm(length=2.0)}),
    "selective_backprop": Effect(
        DIGITS,
        digits,
        pair("SelectiveBackprop")
        | {
            "start=0.2, end=1, interrupt=0": Arm(use("SelectiveBackprop", start=0.2, end=1.0, interrupt=0)),
            "without, 0.6 of the steps": Arm(length=0.6),
        },
    ),
    "seq_length_warmup": Effect(
        TEXT,
        text,
        pair("SeqLengthWarmup", max_seq_length=64) | {"without, 0.87 of the steps": Arm(length=0.87)},
    ),
}
