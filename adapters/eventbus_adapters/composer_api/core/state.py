"""`composer.core.state`: the training state with Composer's constructor and attributes. It needs the extra `train`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import torch

from eventbus_adapters.composer_api.core.time import Time, Timestamp, TimeUnit
from eventbus_engine import time
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training import state as ours

__all__ = ["State"]


class State(ours.State):
    """The package's training state, made and read as Composer's.

    Algorithms of the package run on it as well as those written against Composer. What is there for Composer's own
    Trainer, its sharding and its checkpoints, is not.

    Args:
        model: the module being trained.
        rank_zero_seed: the seed of rank 0; `seed` adds the rank, of the environment variable RANK.
        run_name: the name of the run.
        device: a `torch.device`, or its name.
        max_duration: a `Time` or a time string, in any unit but DURATION.
        device_train_microbatch_size: samples in a microbatch; kept for whoever reads it, as is all that follows.
        auto_microbatching: whether the size is to be found out.
        train_dataloader: the loader that training iterates.
        evaluators: one evaluator, or several.
        dataloader: the loader in use.
        dataloader_label: its name; needed with it.
        dataloader_len: batches of an epoch, -1 for all of them.
        dataset_state: how far each data set is.
        dataset_resumption: which data set was resumed.
        precision: `fp32`, `amp_bf16` or `amp_fp16`.
        precision_config: for precisions that take one.
        optimizers: one optimizer, or several.
        scaler: of gradients.
        save_metrics: whether metrics go into checkpoints.
        algorithms: one algorithm, or several, in registration order.
        callbacks: one callback, or several, in registration order.
        parallelism_config: None.

    Raises:
        ConfigurationError: a `parallelism_config`, a `dataloader` without a label, or a unit that does not fit.
        TimeFormatError: a time does not parse.
    """

    def __init__(  # house: the constructor of Composer's State, parameter for parameter  # noqa: PLR0913, PLR0917
        self,
        model: torch.nn.Module,
        rank_zero_seed: int,
        run_name: str,
        device: torch.device | str,
        max_duration: str | Time | None = None,
        device_train_microbatch_size: float | None = None,
        auto_microbatching: bool = False,
        train_dataloader: Iterable[Any] | None = None,
        evaluators: Any = None,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | Time[int] = -1,
        dataset_state: dict[str, Any] | None = None,
        dataset_resumption: dict[str, Any] | None = None,
        precision: ours.Precision = "fp32",
        precision_config: dict[str, Any] | None = None,
        optimizers: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        save_metrics: bool = False,
        algorithms: Any = None,
        callbacks: Any = None,
        parallelism_config: None = None,
    ) -> None:
        if parallelism_config is not None:
            raise ConfigurationError(
                "parallelism_config is for Composer's Trainer, which shards the model by it; shard the model yourself, "
                "after INIT, and leave it out"
            )
        super().__init__(
            model,
            optimizers=optimizers,
            train_dataloader=train_dataloader,
            algorithms=algorithms,
            callbacks=callbacks,
            max_duration=max_duration,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            device=torch.device(device),
            precision=precision,
            scaler=scaler,
            seed=rank_zero_seed + int(os.environ.get("RANK", "0")),
            run_name=run_name,
        )
        self.rank_zero_seed: int = rank_zero_seed
        self.device_train_microbatch_size: int | float | None = device_train_microbatch_size
        self.auto_microbatching: bool = auto_microbatching
        self.evaluators: list[Any] = evaluators
        self.dataset_state: dict[str, Any] | None = dataset_state
        self.dataset_resumption: dict[str, Any] = dataset_resumption or {}
        self.precision_config: dict[str, Any] | None = precision_config
        self.save_metrics: bool = save_metrics
        self.timestamp: time.Timestamp = Timestamp()
        self.eval_timestamp: time.Timestamp = Timestamp()
        self.predict_timestamp: Timestamp = Timestamp()
        self.previous_timestamp: Timestamp | None = None
        self.profiler: Any = None
        self.load_path: str | None = None
        self.outputs: Any = torch.Tensor()
        self.loss: torch.Tensor | None = torch.Tensor()
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.train_metric_values: dict[str, float] = {}
        self.eval_metric_values: dict[str, float] = {}
        self.total_loss_dict: dict[str, float] = {}
        self.metric_outputs: dict[str, Any] = {}
        self.set_dataloader(dataloader, dataloader_label, dataloader_len)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LISTS:
            value = _as_list(value)
        elif name == "max_duration" and value is not None:
            value = _read_duration(value)
        super().__setattr__(name, value)

    def stop_training(self) -> None:
        """End training after the batch in progress, as if `max_duration` had been reached, in its unit."""
        unit = TimeUnit.BATCH if self.max_duration is None else self.max_duration.unit
        self.max_duration: Time | None = self.timestamp.get(TimeUnit.BATCH if unit is TimeUnit.EPOCH else unit)

    def set_dataloader(
        self,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | Time[int] = -1,
    ) -> None:
        """Change the loader in use.

        Args:
            dataloader: the loader, None for none.
            dataloader_label: its name.
            dataloader_len: batches of an epoch, -1 for all of them.

        Raises:
            ConfigurationError: a loader without a label.
        """
        if dataloader is not None and dataloader_label is None:
            raise ConfigurationError("a dataloader needs a label; give dataloader_label='train', for example")
        self.dataloader: Iterable[Any] | None = dataloader
        self.dataloader_label: str | None = None if dataloader is None else dataloader_label
        self._dataloader_len: Time[int] | None = None
        if dataloader is not None:
            self.dataloader_len = dataloader_len

    @property
    def dataloader_len(self) -> Time[int] | None:
        """Batches of an epoch; None without a loader, or where the loader does not know."""
        return self._dataloader_len

    @dataloader_len.setter
    def dataloader_len(self, batches: int | Time[int]) -> None:  # pyright: ignore[reportPropertyTypeMismatch]
        if self.dataloader is None:
            raise ConfigurationError("dataloader_len is of a dataloader, and there is none; call set_dataloader first")
        wanted = Time.from_input(batches, TimeUnit.BATCH)
        there = _length(self.dataloader)
        if there is not None and wanted > there:
            warnings.warn(
                f"dataloader_len is {int(wanted)}, but the dataloader has {there} batches, which it is set to",
                stacklevel=2,
            )
        if wanted < 0 or (there is not None and wanted > there):
            self._dataloader_len = None if there is None else Time.from_batch(there)
        else:
            self._dataloader_len = Time.from_batch(int(wanted))


_LISTS = frozenset({"algorithms", "callbacks", "evaluators", "optimizers", "schedulers"})


def _as_list(value: Any) -> list[Any]:
    """Several, one or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def _read_duration(value: time.TimeInput) -> Time:
    duration = Time.from_input(value)
    if duration.unit is TimeUnit.DURATION:
        raise ConfigurationError(
            f"max_duration={duration} is a part of itself; give it in another unit, such as '10ep' or '1000ba'"
        )
    return duration


def _length(dataloader: Iterable[Any]) -> int | None:
    try:
        return len(dataloader) if isinstance(dataloader, Sized) else None
    except (TypeError, NotImplementedError):  # a DataLoader over a stream has a `__len__` that raises
        return None
