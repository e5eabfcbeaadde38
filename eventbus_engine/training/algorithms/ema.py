"""EMA: evaluate an exponential moving average of the weights instead of the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.time import Time, TimeInput, TimeUnit
from eventbus_engine.training.algorithms._common import check_range, elapsed_fraction
from eventbus_engine.training.arguments import check_duration
from eventbus_engine.training.state import State

__all__ = ["EMA", "compute_ema"]

_UNITS = (TimeUnit.EPOCH, TimeUnit.BATCH)

_EVALUATING = (Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END)


def compute_ema(model: nn.Module, ema_model: nn.Module, smoothing: float = 0.99) -> None:
    """Move the averages in `ema_model` towards `model`, in place: `smoothing * average + (1 - smoothing) * value`.

    Tarvainen & Valpola 2017, "Mean teachers are better role models" (https://arxiv.org/abs/1703.01780), after Polyak &
    Juditsky 1992. Parameters and floating-point buffers (BatchNorm's running statistics) are averaged, in the precision
    of `ema_model`; buffers of another type (counters, masks) are copied.

    Args:
        model: the model being trained. It is not changed.
        ema_model: of the same architecture, for example a `copy.deepcopy` from earlier on. It may be on another device,
            and should not be in half precision, in which small steps of the average are lost.
        smoothing: in `[0, 1]`: 0 copies the model, 1 leaves the averages as they are. Default 0.99.

    Raises:
        ConfigurationError: `smoothing` is out of range, or the two models do not have the same parameters and buffers.
    """
    check_range("compute_ema", "smoothing", smoothing, 0, 1)
    averages, now = dict(_tensors(ema_model)), dict(_tensors(model))
    _check_same("compute_ema: ema_model", averages, model, now)
    _move(averages, now, {name for name, _ in model.named_buffers()}, smoothing)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers by name, each once, without their graphs."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.detach()


def _move(
    averages: Mapping[str, Tensor], tensors: Mapping[str, Tensor], buffers: Container[str], smoothing: float
) -> None:
    with torch.no_grad():
        for name, value in tensors.items():
            average = averages[name]
            now = value.to(average)
            if not (average.is_floating_point() or average.is_complex()):
                average.copy_(now)
            elif name in buffers:
                # An attention mask holds infinities, whose distance from themselves is no number.
                average.copy_(torch.where(average == now, now, average.lerp(now, 1 - smoothing)))
            else:
                average.lerp_(now, 1 - smoothing)


def _check_same(owner: str, averages: Mapping[str, Tensor], model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    differing = [
        name for name, tensor in tensors.items() if name not in averages or averages[name].shape != tensor.shape
    ]
    differing += [name for name in averages if name not in tensors]
    if differing:
        raise ConfigurationError(
            f"{owner} does not go with {type(model).__name__}: they differ in {', '.join(differing[:4])}"
            f"{' ...' if len(differing) > 4 else ''}; average a model of the same architecture, and change it at INIT "
            f"only"
        )


class EMA(Algorithm[State, Event]):
    """Evaluate an exponential moving average of the weights, which is steadier than the weights it is made from.

    Tarvainen & Valpola 2017 (https://arxiv.org/abs/1703.01780), after Polyak & Juditsky 1992. The averages of all
    parameters and buffers begin as a copy of them when `ema_start` is reached, on the first FIT_START or after a
    batch, and move towards them on BATCH_END (on EPOCH_END, if the unit is epochs); see `compute_ema`. They are
    kept in float32 at least, beside the model, on its device. EVAL_START puts them into the model, in fit and in a
    standalone evaluation, and EVAL_END puts the training weights back, bit for bit. After an evaluation that failed
    midway, the next event of training or evaluation does so; until then the model holds the averages.

    Training itself is not touched. An algorithm that exchanges parts of the model has to do so at INIT. Do not combine
    it with another algorithm that averages weights (SWA), nor with one that writes weights during evaluation.

    A run without evaluation ends with the training weights in its model; `averages` holds the others by name, as
    `model.load_state_dict(ema.averages, strict=False)` takes them.

    Args:
        half_life: after which time, in batches or epochs, half of a change has arrived in the average; None to give
            `smoothing` instead. Default `"1000ba"`.
        smoothing: in `[0, 1]`, the weight of the old average in each update; None to have it computed from `half_life`,
            as `2 ** -(update_interval / half_life)`. Default None.
        ema_start: when to begin: a fraction of training such as `"0.7dur"`, or a time such as `"500ba"`. Default
            `"0.0dur"`, with the weights that training begins with.
        update_interval: how often to update, in batches or epochs, in the unit of `half_life`. Default: after every one
            of them; with `smoothing`, after every batch.

    Raises:
        ConfigurationError: an argument does not fit, or there is not exactly one of `half_life` and `smoothing`.
        TimeFormatError: a time does not parse.
    """

    def __init__(
        self,
        half_life: TimeInput | None = "1000ba",
        smoothing: float | None = None,
        ema_start: TimeInput = "0.0dur",
        update_interval: TimeInput | None = None,
    ) -> None:
        if (half_life is None) == (smoothing is None):
            raise ConfigurationError(
                f"EMA: half_life={half_life!r} and smoothing={smoothing!r} are two ways to say one thing; give one of "
                f"them, and None for the other"
            )
        life = check_duration("EMA: half_life", half_life, _UNITS) if smoothing is None else None
        every = Time(1, TimeUnit.BATCH if life is None else life.unit) if update_interval is None else update_interval
        self.update_interval: Time = check_duration("EMA: update_interval", every, _UNITS)
        weight = smoothing if life is None else 2.0 ** -float(self.update_interval / life)
        check_range("EMA", "smoothing", weight, 0, 1)
        self.smoothing: float = cast("float", weight)
        self.ema_start: Time = _check_start(ema_start)
        self.averages: dict[str, Tensor] = {}
        """The averages by the names of the parameters and buffers; empty before `ema_start`."""
        self._training_weights: dict[str, Tensor] = {}  # while the averages are in the model

    @staticmethod
    def required_on_load() -> bool:
        """True: a run that resumed without the averages would evaluate other weights."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Run on FIT_START, BATCH_END and EPOCH_END, where due, and around evaluation; after a failed one on the next.

        Raises:
            ConfigurationError: `ema_start` is a fraction of training, and the run has no `max_duration`.
        """
        return self._left_in(event) or self._due(event, state) is not None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the averages, put them into the model, or put the training weights back.

        Raises:
            ConfigurationError: the model's parameters are no longer those that were averaged.
        """
        with torch.no_grad():
            if self._left_in(event):
                self._put_back(state.model)
            due = self._due(event, state)
            if due is not None:
                due(state.model)

    def state_dict(self) -> dict[str, Any]:
        """The averages; during an evaluation also the training weights, which the model does not hold then."""
        return {"averages": dict(self.averages), "training_weights": dict(self._training_weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, on whatever device it is.

        Raises:
            ConfigurationError: it is something else.
        """
        try:
            loaded = [{name: value.detach().clone() for name, value in state[key].items()} for key in _STATE_KEYS]
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"EMA: the state to load has to hold {' and '.join(_STATE_KEYS)}, tensors by name; load what "
                f"state_dict() returned"
            ) from error
        self.averages, self._training_weights = loaded

    def _left_in(self, event: Event) -> bool:
        """Whether the averages are in the model, where this event wants the training weights."""
        return bool(self._training_weights) and event not in _EVALUATING

    def _due(self, event: Event, state: State) -> Callable[[nn.Module], None] | None:
        """What there is to do on an event, besides putting the training weights back."""
        if event == Event.EVAL_START:
            return self._put_in if self.averages else None
        if not self.averages:
            # On FIT_START only where it begins the run: one that resumes begins where the uninterrupted one would have.
            due = event == Event.BATCH_END or (event == Event.FIT_START and state.timestamp.batch == 0)
            return self._begin if due and self._has_started(state) else None
        unit, every = self.update_interval.unit, int(self.update_interval)
        return self._update if event == _UPDATES[unit] and int(state.timestamp.get(unit)) % every == 0 else None

    def _has_started(self, state: State) -> bool:
        start = self.ema_start
        if start.unit == TimeUnit.DURATION:
            return not start.value or elapsed_fraction(state, "EMA") >= start.value
        return state.timestamp.get(start.unit) >= start

    def _begin(self, model: nn.Module) -> None:
        self.averages = {name: _precise(value, value, copy=True) for name, value in _tensors(model)}

    def _update(self, model: nn.Module) -> None:
        _move(self.averages, self._follow(model), {name for name, _ in model.named_buffers()}, self.smoothing)

    def _follow(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Bring the averages to the device, precision and ranks of a model that has moved, or they were loaded for."""
        tensors = dict(_tensors(model))
        _check_same("EMA: what was averaged", self.averages, model, tensors)
        for name, value in tensors.items():
            self.averages[name] = _precise(self.averages[name], value)
        return tensors

    def _put_in(self, model: nn.Module) -> None:
        tensors = self._follow(model)
        self._training_weights = {name: value.clone() for name, value in tensors.items()}
        for name, value in tensors.items():
            value.copy_(self.averages[name])

    def _put_back(self, model: nn.Module) -> None:
        tensors = dict(_tensors(model))
        _check_same("EMA: what was trained before the evaluation", self._training_weights, model, tensors)
        for name, value in tensors.items():
            value.copy_(_precise(self._training_weights[name], value))
        self._training_weights = {}


_STATE_KEYS = ("averages", "training_weights")
_UPDATES = {TimeUnit.BATCH: Event.BATCH_END, TimeUnit.EPOCH: Event.EPOCH_END}


def _precise(tensor: Tensor, like: Tensor, *, copy: bool = False) -> Tensor:
    """The tensor on the device of another, cut up like it, and in its type, but float32 at least."""
    dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else like.dtype
    precise = tensor.to(like.device, dtype, copy=copy)
    if isinstance(like, DTensor) and not isinstance(precise, DTensor):
        # Loaded, and so whole on every rank: no rank has to tell another its part, but each to let go of the rest.
        return distribute_tensor(precise, like.device_mesh, like.placements, src_data_rank=None).clone()
    return precise


def _check_start(ema_start: TimeInput) -> Time:
    start = Time.from_input(ema_start, TimeUnit.EPOCH)
    if start.value < 0 or (start.unit == TimeUnit.DURATION and start.value > 1):
        raise ConfigurationError(
            f"EMA: ema_start={ema_start!r} has to be 0 or more, and a fraction of training in [0, 1]"
        )
    return start
