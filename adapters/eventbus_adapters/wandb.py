"""Log records for Weights & Biases: `WandbLogger`. Needs the extra `wandb`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eventbus_adapters import _peer
from eventbus_adapters._pixels import pixels_of
from eventbus_adapters._tracker import Content, FileTracker, draw_elsewhere
from eventbus_engine.errors import ConfigurationError, DeliveryError

try:
    import wandb
except ImportError as _error:
    raise _peer.missing("wandb", "wandb") from _error

__all__ = ["STEP", "WandbLogger"]

STEP = "eventbus/step"
"""The column that holds the step, and the horizontal axis of all charts."""


class WandbLogger(FileTracker):
    """Log to a run of Weights & Biases, by default offline: to files for `wandb sync`, and to nobody.

    * Metrics are a row of the run's history for each call. The step is in the column `eventbus/step`, which is the
      horizontal axis of the charts; W&B's own `_step` numbers the rows, since it drops a row whose step goes back.
    * Hyperparameters go to the run's config; images, with their masks, and tables to the media of a row; files to the
      files of the run. Traces are not logged: W&B has no place for them.

    W&B has a process of its own for all runs of the program, which ends with the program, or by `wandb.teardown()`. It
    stages tables in `WANDB_DATA_DIR`, keeps logs in `WANDB_CACHE_DIR`, and reports its own crashes to its makers unless
    `WANDB_ERROR_REPORTING` is `false`.

    Args:
        project: the project of the run.
        mode: `"offline"` (default), `"online"`, for which this machine has to be logged in (`wandb login`), or
            `"disabled"`.
        directory: where the files of the run go, in a folder `wandb`; by default the current directory.
        init: further arguments of `wandb.init`: `entity`, `group`, `name`, `tags`, `settings` and so on.
        **options: the options of `Callback`. The defaults here: `delivery="background"`, `run_blocking=True`,
            `max_batch=100`, `max_wait=0.5`, `retry=Retry(attempts=5)`.

    Attributes:
        run: the run; None before it is open.

    Raises:
        ConfigurationError: an argument cannot be used, or this version of wandb.
        HandlerTypeError: an option that callbacks do not have.
    """

    name: str | None = "wandb_logger"

    def __init__(
        self,
        project: str | None = None,
        *,
        mode: Literal["online", "offline", "disabled"] = "offline",
        directory: str | os.PathLike[str] | None = None,
        init: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _peer.check_version("wandb", "wandb", "0.20", installed=wandb.__version__)
        if mode not in ("online", "offline", "disabled"):
            raise ConfigurationError(f"WandbLogger has mode={mode!r}; use 'online', 'offline' or 'disabled'")
        super().__init__(**options)
        self.run: wandb.Run | None = None
        # A run of its own, whatever other runs the program has.
        given = {} if directory is None else {"dir": directory}
        self._arguments: dict[str, Any] = {
            "project": project, "mode": mode, "reinit": "create_new", **given, **(init or {}),
        }  # fmt: skip

    def open(self, state: Any, logger: Any) -> None:
        """Begin the run."""
        draw_elsewhere("wandb.sdk.lib.retry")
        # W&B would take another one instead of making it.
        Path(self._arguments.get("dir", ".")).mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(**self._arguments)
        self.run.define_metric("*", step_metric=STEP)

    def close(self, state: Any, logger: Any) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()

    def tell(self, records: Sequence[Content]) -> None:
        """Log a record."""
        if self.run is None:
            raise DeliveryError("the run is not open; log while the engine is")
        for record in records:
            match record["kind"]:
                case "hyperparameters":
                    config: Any = self.run.config  # untyped
                    config.update(record["hyperparameters"], allow_val_change=True)
                case "file":
                    _keep(self.run, record["name"], Path(record["path"]))
                case _:
                    step = {} if record["step"] is None else {STEP: record["step"]}
                    self.run.log({"_timestamp": record["time"], **_row(record), **step})


def _row(record: Content) -> dict[str, Any]:
    match record["kind"]:
        case "metrics":
            metrics: dict[str, Any] = record["metrics"]
            return metrics
        case "images":
            return {record["name"]: _images_of(record)}
        case "table":
            return {record["name"]: wandb.Table(columns=record["columns"], data=record["rows"])}
        case kind:
            raise DeliveryError(f"W&B has no place for a record of kind {kind!r}")


def _images_of(record: Content) -> list[wandb.Image]:
    images, labels = pixels_of(record["images"], record["channels_last"]), record["mask_class_labels"]
    described = {"class_labels": labels} if labels else {}
    masks = {name: np.asarray(mask) for name, mask in record["masks"].items()}
    return [
        wandb.Image(
            pixels,
            masks={
                name: {"mask_data": mask[number] if mask.ndim == 3 else mask, **described}
                for name, mask in masks.items()
            },
        )
        for number, pixels in enumerate(images)
    ]


def _keep(run: wandb.Run, name: str, path: Path) -> None:
    """Put a file among those of the run, under a name of its own."""
    kept = Path(run.dir) / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, kept)
    run.save(kept, base_path=run.dir, policy="now")
