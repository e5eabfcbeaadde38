"""Learning-rate schedulers by time strings, with the names and parameters of MosaicML Composer's.

A schedule is a function of the state: how far the run is decides the factor by which the learning rates that the
optimizers began with are multiplied. There is nothing to step and nothing to save: a run that resumes has the factor
that the uninterrupted one had. Any callable `(state) -> float` is such a schedule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.time import Time, TimeInput, TimeUnit
from eventbus_engine.training.arguments import DURATION_UNITS, listed
from eventbus_engine.training.learning_rates import is_number
from eventbus_engine.training.progress import progress
from eventbus_engine.training.state import State

__all__ = [
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "StepScheduler",
    "TimedScheduler",
]

_UNITS = (*DURATION_UNITS, TimeUnit.DURATION)


# ---------------------------------------------------------------------------------------------------- the schedules


class TimedScheduler(ABC):
    """The factor of the initial learning rates as a function of the time: `scheduler(state)`.

    Raises:
        ConfigurationError: from the constructor, for an argument that is out of range.
        TimeFormatError: from the constructor, for a time that does not parse.
    """

    def __call__(self, state: State) -> float:
        """The factor at `state.timestamp`.

        Raises:
            ConfigurationError: the run has no `max_duration`, or a loader without a length, and the schedule needs it.
        """
        return self.factor(state)

    @abstractmethod
    def factor(self, state: State, since: Time | None = None) -> float:
        """The factor at `state.timestamp` of this schedule if it begins at `since`; before that, its first one."""

    def _time(self, argument: str, value: TimeInput, *, zero: bool = False) -> Time:
        time = Time.from_input(value)
        if time.unit in _UNITS and (time.value > 0 or (zero and time.value == 0)):
            return time
        amount = "0 or more" if zero else "more than 0"
        raise ConfigurationError(f"{type(self).__name__}: {argument}={time} has to be {amount}, in {', '.join(_UNITS)}")

    def _number(self, argument: str, value: float, at_least: float = 0.0) -> float:
        if not is_number(value, at_least):
            raise ConfigurationError(
                f"{type(self).__name__}: {argument}={value!r} has to be a number in [{at_least:g}, inf)"
            )
        return float(value)


class StepScheduler(TimedScheduler):
    """`gamma ** floor(t / step_size)`: decay after every step.

    Args:
        step_size: the time between two decays, such as `"30ep"`.
        gamma: what each one multiplies the factor by, 0 or more. Default 0.1.
    """

    def __init__(self, step_size: TimeInput, gamma: float = 0.1) -> None:
        self.step_size: Time = self._time("step_size", step_size)
        self.gamma: float = self._number("gamma", gamma)

    def factor(self, state: State, since: Time | None = None) -> float:
        """One `gamma` for each whole step."""
        return self.gamma ** max(math.floor(progress(state, self.step_size, since, whole=True)), 0)


class MultiStepScheduler(TimedScheduler):
    """`gamma ** n`, where `n` of the milestones are reached.

    Args:
        milestones: when to decay, counted from the start of the run: `["30ep", "0.8dur"]`, in any units.
        gamma: what each one multiplies the factor by, 0 or more. Default 0.1.
    """

    def __init__(self, milestones: Sequence[TimeInput], gamma: float = 0.1) -> None:
        self.milestones: list[Time] = [self._time("milestones", milestone) for milestone in listed(milestones)]
        self.gamma: float = self._number("gamma", gamma)

    def factor(self, state: State, since: Time | None = None) -> float:
        """One `gamma` for each milestone; they do not move with `since`."""
        reached = sum(progress(state, milestone, whole=True) >= 1 for milestone in self.milestones)
        return float(self.gamma**reached)


class ExponentialScheduler(TimedScheduler):
    """`gamma ** (t / decay_period)`: decay with every batch.

    Args:
        gamma: what each period multiplies the factor by, 0 or more.
        decay_period: how long that takes. Default `"1ep"`.
    """

    def __init__(self, gamma: float, decay_period: TimeInput = "1ep") -> None:
        self.gamma: float = self._number("gamma", gamma)
        self.decay_period: Time = self._time("decay_period", decay_period)

    def factor(self, state: State, since: Time | None = None) -> float:
        """One `gamma` for each period, parts of one included."""
        return float(self.gamma ** max(float(progress(state, self.decay_period, since)), 0.0))


class CosineAnnealingWarmRestartsScheduler(TimedScheduler):
    """Half a cosine from 1 to `alpha_f`, again and again (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983).

    Args:
        t_0: how long the first cycle takes.
        t_mult: how many times as long as the one before each further cycle takes, 1 or more. Default 1.0.
        alpha_f: the factor at the end of each cycle, 0 or more. Default 0.0.
    """

    def __init__(self, t_0: TimeInput, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0: Time = self._time("t_0", t_0)
        self.t_mult: float = self._number("t_mult", t_mult, at_least=1.0)
        self.alpha_f: float = self._number("alpha_f", alpha_f)

    def factor(self, state: State, since: Time | None = None) -> float:
        """The cosine, by how much of the cycle in progress is over."""
        left, cycle = max(progress(state, self.t_0, since), Fraction(0)), Fraction(1)
        if self.t_mult == 1:
            left %= 1
        while left >= cycle:
            left -= cycle
            cycle *= Fraction(str(self.t_mult))
        return _cosine(float(left / cycle), self.alpha_f)


class _Annealing(TimedScheduler):
    """A curve from 0 to 1, the part of the time until `t_max` that is over."""

    _whole = False

    def __init__(self, t_max: TimeInput) -> None:
        self.t_max: Time = self._time("t_max", t_max)

    def factor(self, state: State, since: Time | None = None) -> float:
        """The curve at the part of the time from `since` to `t_max` that is over; after it, at its end."""
        over = progress(state, self.t_max, since, whole=self._whole)
        return self._curve(float(min(max(over, Fraction(0)), Fraction(1))))

    @abstractmethod
    def _curve(self, over: float) -> float: ...


class ConstantScheduler(_Annealing):
    """`alpha` until `t_max`, then 1.

    Args:
        alpha: the factor, 0 or more. Default 1.0.
        t_max: until when. Default `"1dur"`, the whole run.
    """

    _whole = True

    def __init__(self, alpha: float = 1.0, t_max: TimeInput = "1dur") -> None:
        super().__init__(t_max)
        self.alpha: float = self._number("alpha", alpha)

    def _curve(self, over: float) -> float:
        return self.alpha if over < 1 else 1.0


class LinearScheduler(_Annealing):
    """`alpha_i + (alpha_f - alpha_i) * t / t_max`, then `alpha_f`.

    Args:
        alpha_i: the factor at the start, 0 or more. Default 1.0.
        alpha_f: the factor at the end, 0 or more. Default 0.0.
        t_max: when the end is. Default `"1dur"`, the end of the run.
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeInput = "1dur") -> None:
        super().__init__(t_max)
        self.alpha_i: float = self._number("alpha_i", alpha_i)
        self.alpha_f: float = self._number("alpha_f", alpha_f)

    def _curve(self, over: float) -> float:
        return (1 - over) * self.alpha_i + over * self.alpha_f


class CosineAnnealingScheduler(_Annealing):
    """`alpha_f + (1 - alpha_f) * (1 + cos(pi * t / t_max)) / 2`, then `alpha_f`.

    Args:
        t_max: when the end is. Default `"1dur"`, the end of the run.
        alpha_f: the factor at the end, 0 or more. Default 0.0.
    """

    def __init__(self, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.alpha_f: float = self._number("alpha_f", alpha_f)

    def _curve(self, over: float) -> float:
        return _cosine(over, self.alpha_f)


class PolynomialScheduler(_Annealing):
    """`alpha_f + (1 - alpha_f) * (1 - t / t_max) ** power`, then `alpha_f`.

    Args:
        power: the exponent, 0 or more.
        t_max: when the end is. Default `"1dur"`, the end of the run.
        alpha_f: the factor at the end, 0 or more. Default 0.0.
    """

    def __init__(self, power: float, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.power: float = self._number("power", power)
        self.alpha_f: float = self._number("alpha_f", alpha_f)

    def _curve(self, over: float) -> float:
        return float(self.alpha_f + (1 - self.alpha_f) * (1 - over) ** self.power)


def _cosine(over: float, alpha_f: float) -> float:
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * over)) / 2


# ------------------------------------------------------------------------------------------------------ with warm-up


class _WithWarmup(TimedScheduler):
    """A schedule that begins at the end of the warm-up, which climbs from 0 to its first factor along a line."""

    def __init__(self, t_warmup: TimeInput, schedule: TimedScheduler) -> None:
        self.t_warmup: Time = self._time("t_warmup", t_warmup, zero=True)
        self.schedule: TimedScheduler = schedule

    def factor(self, state: State, since: Time | None = None) -> float:
        """The schedule's own factor, scaled down while the warm-up lasts."""
        factor = self.schedule.factor(state, self.t_warmup)
        return float(min(progress(state, self.t_warmup), Fraction(1))) * factor


class ConstantWithWarmupScheduler(_WithWarmup):
    """From 0 to `alpha` over `t_warmup`, then `ConstantScheduler`.

    Args:
        t_warmup: how long the warm-up takes; `"0ba"` for none.
        alpha: the factor after it, 0 or more. Default 1.0.
        t_max: until when. Default `"1dur"`, the whole run.
    """

    def __init__(self, t_warmup: TimeInput, alpha: float = 1.0, t_max: TimeInput = "1dur") -> None:
        super().__init__(t_warmup, ConstantScheduler(alpha, t_max))


class LinearWithWarmupScheduler(_WithWarmup):
    """From 0 to `alpha_i` over `t_warmup`, then `LinearScheduler` over the time left until `t_max`.

    Args:
        t_warmup: how long the warm-up takes; `"0ba"` for none.
        alpha_i: the factor after it, 0 or more. Default 1.0.
        alpha_f: the factor at the end, 0 or more. Default 0.0.
        t_max: when the end is, counted from the start of the run. Default `"1dur"`.
    """

    def __init__(
        self, t_warmup: TimeInput, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeInput = "1dur"
    ) -> None:
        super().__init__(t_warmup, LinearScheduler(alpha_i, alpha_f, t_max))


class MultiStepWithWarmupScheduler(_WithWarmup):
    """From 0 to 1 over `t_warmup`, times `MultiStepScheduler`.

    Args:
        t_warmup: how long the warm-up takes; `"0ba"` for none.
        milestones: when to decay, counted from the start of the run: `["30ep", "0.8dur"]`, in any units.
        gamma: what each one multiplies the factor by, 0 or more. Default 0.1.
    """

    def __init__(self, t_warmup: TimeInput, milestones: Sequence[TimeInput], gamma: float = 0.1) -> None:
        super().__init__(t_warmup, MultiStepScheduler(milestones, gamma))


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """From 0 to 1 over `t_warmup`, then `CosineAnnealingScheduler` over the time left until `t_max`.

    Args:
        t_warmup: how long the warm-up takes; `"0ba"` for none.
        t_max: when the end is, counted from the start of the run. Default `"1dur"`.
        alpha_f: the factor at the end, 0 or more. Default 0.0.
    """

    def __init__(self, t_warmup: TimeInput, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_warmup, CosineAnnealingScheduler(t_max, alpha_f))


class PolynomialWithWarmupScheduler(_WithWarmup):
    """From 0 to 1 over `t_warmup`, then `PolynomialScheduler` over the time left until `t_max`.

    Args:
        t_warmup: how long the warm-up takes; `"0ba"` for none.
        power: the exponent, 0 or more. Default 2.0.
        t_max: when the end is, counted from the start of the run. Default `"1dur"`.
        alpha_f: the factor at the end, 0 or more. Default 0.0.
    """

    def __init__(
        self, t_warmup: TimeInput, power: float = 2.0, t_max: TimeInput = "1dur", alpha_f: float = 0.0
    ) -> None:
        super().__init__(t_warmup, PolynomialScheduler(power, t_max, alpha_f))
