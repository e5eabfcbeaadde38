"""The checks of the trainer's arguments: each returns what the trainer works with, or says what would have fitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventbus_engine._options import is_async_callable
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import is_destination
from eventbus_engine.time import Time, TimeUnit
from eventbus_engine.training.device_timing import CudaClock, DeviceClock
from eventbus_engine.training.state import AUTOCAST, Precision

DURATION_UNITS = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.SECOND)
INTERVAL_UNITS = (*DURATION_UNITS, TimeUnit.DURATION)


def listed(given: Any) -> list[Any]:
    """One or several, as Composer takes them."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def check_duration(name: str, value: Any, units: tuple[TimeUnit, ...]) -> Time:
    """A duration of more than nothing in one of `units`; a number counts epochs.

    Raises:
        TimeFormatError: it does not parse.
        ConfigurationError: it does not fit.
    """
    duration = Time.from_input(value, TimeUnit.EPOCH)
    if duration.unit not in units:
        raise ConfigurationError(f"{name} is {duration}; give it in {', '.join(units)}, for example '3{units[0]}'")
    if duration.value <= 0:
        raise ConfigurationError(f"{name} is {duration}; give more than that, for example '3{units[0]}'")
    return duration


def check_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """One or several optimizers."""
    optimizers = listed(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"{optimizer!r} is no optimizer; give instances, such as torch.optim.SGD(model.parameters(), lr=0.1)"
            )
    return optimizers


def check_schedulers(given: Any) -> list[Any]:
    """One or several objects with a `step()`, or functions of the state."""
    schedulers = listed(given)
    for scheduler in schedulers:
        stepped = callable(getattr(scheduler, "step", None))
        if isinstance(scheduler, type) or not (stepped or callable(scheduler)) or is_async_callable(scheduler):
            raise ConfigurationError(
                f"{scheduler!r} is no scheduler; give instances of one of torch.optim.lr_scheduler's or of one of "
                f"eventbus_engine.training.schedulers', or plain functions (state) -> factor of the learning rates"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "ReduceLROnPlateau needs a metric to step by, which the loop does not choose for you; step it in a "
                "callback's eval_end, from state.metrics"
            )
    return schedulers


def check_loggers(given: Any) -> list[Any]:
    """One or several destinations."""
    loggers = listed(given)
    for logger in loggers:
        if isinstance(logger, type) or not is_destination(logger):
            raise ConfigurationError(
                f"{logger!r} takes no log records; give instances of LoggerDestination, and anything else as callbacks="
            )
    return loggers


def check_device(given: Any, model: nn.Module) -> torch.device:
    """The device, by default the one of the model's first parameter."""
    if given is None:
        parameter = next(model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"device={given!r} is no device; give 'cpu', 'cuda', 'cuda:1', 'mps' …") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device={given!r}, but torch finds no CUDA device here; give 'cpu', or install a build of torch for it"
        )
    return device


def check_cuda_timing(given: Any, device: torch.device) -> DeviceClock | None:
    """The clock to time sections on the device with, None to leave that out."""
    if not isinstance(given, bool):
        raise ConfigurationError(f"cuda_timing={given!r}; give True or False")
    if given and device.type != "cuda":
        raise ConfigurationError(
            f"cuda_timing=True times on a CUDA device, but this run is on {device}; leave it out there, or give "
            f"cuda_timing=torch.cuda.is_available()"
        )
    return CudaClock() if given else None


def check_precision(given: Any) -> Precision:
    """One of the precisions, the first by default."""
    for precision in AUTOCAST:
        if given in (precision, None):
            return precision
    raise ConfigurationError(f"precision={given!r} is not supported; use {', '.join(map(repr, AUTOCAST))}")


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps small gradients from vanishing, in the one precision whose range is too narrow for them."""
    return torch.amp.GradScaler(device.type) if precision == "amp_fp16" else None


def check_compile(given: Any) -> Mapping[str, Any] | None:
    """The options of `torch.nn.Module.compile`; None to leave that out."""
    if isinstance(given, bool):
        return {} if given else None
    if isinstance(given, Mapping):
        return given
    raise ConfigurationError(
        f"compile={given!r}; give True, False, or the options of torch.compile, as in {{'mode': 'max-autotune'}}"
    )


def check_seed(given: Any) -> int | None:
    """A seed for every generator, or None."""
    # numpy's seeds are the narrowest: 32 bits
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 2**32):
        return given
    raise ConfigurationError(
        f"seed={given!r} is no seed; give an integer from 0 to 2**32 - 1, or None to leave the generators alone"
    )


def check_microbatches(given: Any) -> int:
    """A number of parts."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return given
    raise ConfigurationError(f"microbatches={given!r}; give into how many parts to cut a batch, 1 or more")


def check_subset(given: Any) -> int | None:
    """A number of batches, or None for all of them."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
        return given
    raise ConfigurationError(f"subset_num_batches={given!r}; give how many batches to use, 1 or more, or None for all")
