"""Composer's own algorithms, callbacks and loggers do under our Engine what they do under Composer's, bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

composer: Any = pytest.importorskip("composer", reason="Composer has its own environment", exc_type=ImportError)

from eventbus_adapters.composer import ComposerEngine, use_engine  # noqa: E402

algorithms: Any = importlib.import_module("composer.algorithms")
callbacks: Any = importlib.import_module("composer.callbacks")
loggers: Any = importlib.import_module("composer.loggers")

ALGORITHMS: dict[str, Callable[[], list[Any]]] = {
    "blurpool": lambda: [algorithms.BlurPool(min_channels=1)],
    "channels_last": lambda: [algorithms.ChannelsLast()],
    "colout": lambda: [algorithms.ColOut(p_row=0.2, p_col=0.2)],
    "cutmix": lambda: [algorithms.CutMix(alpha=1.0)],
    "cutout": lambda: [algorithms.CutOut(length=0.5)],
    "ema": lambda: [algorithms.EMA(half_life="2ba")],
    "ghost_batch_norm": lambda: [algorithms.GhostBatchNorm(ghost_batch_size=2)],
    "gradient_clipping": lambda: [algorithms.GradientClipping(clipping_type="norm", clipping_threshold=0.05)],
    "label_smoothing": lambda: [algorithms.LabelSmoothing(0.1)],
    "layer_freezing": lambda: [algorithms.LayerFreezing(freeze_start=0.0)],
    "low_precision_layernorm": lambda: [algorithms.LowPrecisionLayerNorm(apply_at=composer.core.Event.INIT)],
    "mixup": lambda: [algorithms.MixUp(alpha=0.2)],
    "progressive_resizing": lambda: [algorithms.ProgressiveResizing(initial_scale=0.75, delay_fraction=0.0)],
    "sam": lambda: [algorithms.SAM(interval=1)],
    "selective_backprop": lambda: [algorithms.SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)],
    "squeeze_excite": lambda: [algorithms.SqueezeExcite(min_channels=1)],
    "swa": lambda: [algorithms.SWA(swa_start="0.2dur", swa_end="0.8dur", update_interval="1ba")],
    "several": lambda: [
        algorithms.ChannelsLast(),
        algorithms.CutOut(length=0.5),
        algorithms.MixUp(alpha=0.2),
        algorithms.LabelSmoothing(0.1),
        algorithms.GradientClipping(clipping_type="norm", clipping_threshold=0.05),
        algorithms.EMA(half_life="2ba"),
    ],
}


SURGERY = {"blurpool", "channels_last", "ghost_batch_norm", "low_precision_layernorm", "sam", "squeeze_excite"}
"""They run on INIT or AFTER_LOAD, in the Trainer's constructor."""


class Run:
    """What comes of two epochs: the weights, and what the loggers have got."""

    def __init__(self, make_trainer: Callable[..., Any], made: list[Any], file: Path, ours: bool) -> None:
        self.memory = loggers.InMemoryLogger()
        trainer = make_trainer(
            algorithms=made,
            callbacks=[callbacks.SpeedMonitor(window_size=2), callbacks.LRMonitor()],
            loggers=[self.memory, loggers.FileLogger(filename=str(file))],
            eval_dataloader=make_images(),
            max_duration="2ep",
        )
        if ours:
            use_engine(trainer)
        trainer.fit()
        trainer.close()
        self.text = file.read_text(encoding="utf-8")
        self.weights = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}

    @property
    def metrics(self) -> dict[str, list[tuple[dict[str, Any], Any]]]:
        """By name, when and what."""
        return {
            name: [(at.state_dict(), float(value)) for at, value in records]
            for name, records in self.memory.data.items()
        }


def make_images() -> Any:
    """Some to evaluate on."""
    inputs = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, torch.arange(4) % 3), batch_size=2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_the_results_it_has_in_composers_engine(
    name: str,
    make_trainer: Callable[..., Any],
    ticking: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights, metrics with their times, and the lines of the log file, traces included."""
    made = ALGORITHMS[name]
    ticking()
    theirs = Run(make_trainer, made(), tmp_path / "theirs.txt", ours=False)
    ticking()
    if name in SURGERY:
        monkeypatch.setattr("composer.trainer.trainer.Engine", ComposerEngine)  # ours from the start
    ours = Run(make_trainer, made(), tmp_path / "ours.txt", ours=name not in SURGERY)

    assert ours.metrics == theirs.metrics
    assert {"throughput/batches_per_sec", "loss/train/total"} <= ours.metrics.keys()
    assert any(metric.startswith("lr-") for metric in ours.metrics)
    assert ours.text == theirs.text
    assert "algorithm_traces" in ours.text
    assert ours.weights.keys() == theirs.weights.keys()
    assert [key for key, value in ours.weights.items() if not torch.equal(value, theirs.weights[key])] == []


def test_without_algorithms_the_weights_are_others(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """So the comparisons above compare something: what an algorithm writes does reach the loop."""
    plain = Run(make_trainer, [], tmp_path / "plain.txt", ours=True)
    smoothed = Run(make_trainer, ALGORITHMS["label_smoothing"](), tmp_path / "smoothed.txt", ours=True)

    assert any(not torch.equal(plain.weights[key], smoothed.weights[key]) for key in plain.weights)
