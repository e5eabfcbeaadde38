"""For Composer's objects in a training loop of ours: its state and logger in Composer's form."""

from __future__ import annotations

from typing import Any

import torch

from eventbus_adapters._composer_peer import composer
from eventbus_engine.callback import unwrap
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time, Timestamp
from eventbus_engine.training.state import State

__all__ = ["LoggerOfOurs", "StateOfOurs"]

FIELDS = tuple(composer.core.Timestamp().state_dict())


class StateOfOurs(composer.core.State):  # type: ignore[misc]
    """Composer's State over one of ours: what both have is one thing, and the rest is as Composer's constructor has it.

    So `state.batch = ...` in an algorithm of Composer's reaches our loop, and `state.stop_training()` ends it.
    """

    _ours: State | None = None  # until it is set, assignments stay here: what the constructor assigns is not for ours

    def __init__(self, ours: State) -> None:
        super().__init__(
            model=ours.model,
            rank_zero_seed=ours.seed or 0,
            run_name=ours.run_name,
            device=_device(ours.device),
            device_train_microbatch_size=None,
            train_dataloader=ours.train_dataloader,
            dataloader=ours.train_dataloader,
            dataloader_label="train",
            precision=ours.precision,
            scaler=ours.scaler,
        )
        self._times: dict[str, tuple[Any, Any]] = {}
        self._ours = ours

    def __setattr__(self, name: str, value: Any) -> None:
        ours = self._ours
        if ours is None or name not in _SHARED:
            super().__setattr__(name, value)
        else:
            if name == "max_duration" and isinstance(value, str):
                value = Time.from_timestring(value)
            setattr(ours, name, _to_ours(value))

    def __getattribute__(self, name: str) -> Any:
        if name not in _SHARED:
            return super().__getattribute__(name)
        ours = self._ours
        return super().__getattribute__(name) if ours is None else self._to_theirs(name, getattr(ours, name))

    def _to_theirs(self, name: str, value: Any) -> Any:
        """A time of ours as Composer's; made once, since it is read far more often than it changes."""
        if not isinstance(value, Time | Timestamp):
            return value
        known = self._times.get(name)
        if known is None or known[0] is not value:
            known = self._times[name] = value, _time(value)
        return known[1]


_SHARED = frozenset(
    {
        "batch",
        "eval_timestamp",
        "loss",
        "max_duration",
        "model",
        "optimizers",
        "outputs",
        "run_name",
        "schedulers",
        "timestamp",
        "train_dataloader",
    }
)


def _time(ours: Time[Any] | Timestamp) -> Any:
    if isinstance(ours, Time):
        return composer.core.Time(ours.value, ours.unit.value)
    values = {field: getattr(ours, field) for field in FIELDS}
    return composer.core.Timestamp(**{k: v.value if isinstance(v, Time) else v for k, v in values.items()})


def _to_ours(value: Any) -> Any:
    """A time of Composer's as ours; everything else as it is."""
    if isinstance(value, composer.core.Time):
        return Time(value.value, value.unit.value)
    if isinstance(value, composer.core.Timestamp):
        return Timestamp(**value.state_dict())
    return value


def _device(device: torch.device) -> Any:
    if device.type == "cuda":
        return composer.devices.DeviceGPU(device.index or 0)
    return composer.devices.DeviceCPU()


class LoggerOfOurs(composer.loggers.Logger):  # type: ignore[misc]
    """Composer's Logger over one of ours: everything goes to all destinations, ours and Composer's."""

    def __init__(self, ours: Logger, state: Any) -> None:
        self._ours = ours
        self._state = state

    @property
    def destinations(self) -> tuple[Any, ...]:
        """Composer's own destinations among them."""
        guests = (unwrap(destination) for destination in self._ours.destinations)
        return tuple(guest.theirs for guest in guests if isinstance(guest, composer.loggers.LoggerDestination))

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Traces in Composer's form, for destinations of Composer's; ours get theirs from the engine."""
        for destination in self.destinations:
            destination.log_traces(traces)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """To all destinations."""
        self._ours.log_hyperparameters(parameters)

    def log_table(self, columns: Any, rows: Any, name: str = "Table", step: int | None = None) -> None:
        """To all destinations."""
        self._ours.log_table(columns, rows, name, step)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """To all destinations."""
        self._ours.log_metrics(metrics, step)

    def log_images(self, images: Any, *options: Any, **named: Any) -> None:
        """To all destinations."""
        self._ours.log_images(images, *options, **named)

    def upload_file(self, remote_file_name: str, file_path: Any, *, overwrite: bool = False) -> None:
        """To all destinations that take files; the names may have Composer's placeholders."""
        name, path = (
            composer.utils.format_name_with_dist(str(each), run_name=self._state.run_name)
            for each in (remote_file_name, file_path)
        )
        self._ours.upload_file(name, path, overwrite=overwrite)
