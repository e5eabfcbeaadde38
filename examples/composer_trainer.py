"""A Trainer of MosaicML Composer on our Engine: one line gives it the right order, an async callback and traces.

The program is Composer's up to `use_engine`. SelectiveBackprop then chooses among the samples before MixUp mixes them,
where Composer's own engine runs it last; and the spans of the run are in a file to look at.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

# torchvision on PyPI is built for CUDA; beside another torch its import needs these names.
if torch.version.cuda is None:
    operators = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

warnings.simplefilter("ignore")  # of Composer's dependencies, much

from composer import Trainer  # noqa: E402
from composer.algorithms import LabelSmoothing, MixUp, SelectiveBackprop  # noqa: E402
from composer.models import ComposerClassifier  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from eventbus_adapters.composer import use_engine  # noqa: E402
from eventbus_engine import Callback, telemetry  # noqa: E402


class Remote(Callback[Any]):
    """Stands for a callback that sends something somewhere."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    async def batch_end(self, state: Any, logger: Any) -> None:
        """Composer's state, as Composer's callbacks get it."""
        self.losses.append(state.total_loss_dict["loss/train/total"])


def make_trainer() -> Any:
    """A trainer as Composer's documentation has it."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    model = ComposerClassifier(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), num_classes=4)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=32),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        max_duration="8ep",
        algorithms=[MixUp(alpha=0.1), SelectiveBackprop(start=0.5, keep=0.5, interrupt=2), LabelSmoothing(0.05)],
        progress_bar=False,
        device="cpu",
        seed=17,
    )


def main() -> None:
    """Train, and say what the spans show."""
    torch.set_num_threads(1)
    remote, spans = Remote(), Path(tempfile.mkdtemp()) / "spans.jsonl"
    trainer = make_trainer()
    with telemetry.configure(service_name="composer", path=spans):
        use_engine(trainer, callbacks=[remote])
        trainer.fit()
        trainer.close()
    print(f"loss: {remote.losses[0]:.2f} after one batch, {remote.losses[-1]:.2f} after {len(remote.losses)}")
    lines = spans.read_text(encoding="utf-8").splitlines()
    print(f"{sum('algorithm selective_backprop' in json.dumps(json.loads(line)) for line in lines)} lines of spans")


if __name__ == "__main__":
    main()
