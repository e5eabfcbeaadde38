"""How far a run is on its way to a time, as an exact fraction, whatever units the two are counted in."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.time import Time, TimeUnit
from eventbus_engine.training.source import BatchSource
from eventbus_engine.training.state import State

__all__ = ["progress"]


def progress(state: State, time: Time, since: Time | None = None, *, whole: bool = False) -> Fraction:
    """How much of the way from `since`, the start of the run by default, to `time` is over: 1 when it is reached.

    Exact: `0.7dur` of ten batches ends with the seventh, which binary fractions would miss. An epoch moves with its
    batches; where nobody knows how many it has, only whole epochs can be told.

    Args:
        state: the state of the run.
        time: the end of the way, counted from the start of the run.
        since: its beginning. Default: the start of the run.
        whole: whether the caller needs to know no more than how many times it is reached.

    Raises:
        ConfigurationError: this cannot be known in the units given.
    """
    end, unit = _in_units_of_the_run(state, time)
    length = _batches_per_epoch(state)
    if unit is TimeUnit.EPOCH and length is None and not (whole and end.denominator == 1):
        raise ConfigurationError(
            f"a schedule of {time} moves with the batches of an epoch, but train_dataloader does not say how many that "
            f"are; give it a length (__len__), or give {time} and max_duration in batches, samples or tokens"
        )
    start = Fraction(0) if since is None else _start(state, since, time, unit, length)
    now = _position(state, unit, length)
    return Fraction(now >= start) if end <= start else (now - start) / (end - start)


def _in_units_of_the_run(state: State, time: Time) -> tuple[Fraction, TimeUnit]:
    """A time as it is, and a fraction of the run as what it is a fraction of."""
    amount = Fraction(str(time.value))
    if time.unit is not TimeUnit.DURATION:
        return amount, time.unit
    if state.max_duration is None:
        raise ConfigurationError(f"{time} is a fraction of the run: give the run a max_duration")
    return amount * int(state.max_duration), state.max_duration.unit


def _batches_per_epoch(state: State) -> int | None:
    loader = state.train_dataloader
    return None if loader is None else BatchSource(loader, "train_dataloader").length or None


def _start(state: State, since: Time, time: Time, unit: TimeUnit, length: int | None) -> Fraction:
    """The moment `since` in the unit of `time`: epochs and batches convert, nothing else does."""
    start, found = _in_units_of_the_run(state, since)
    if found is unit or not start:
        return start
    if length is not None and {found, unit} == {TimeUnit.EPOCH, TimeUnit.BATCH}:
        return start * length if unit is TimeUnit.BATCH else start / length
    unknown = " and a train_dataloader with a length" if TimeUnit.EPOCH in (found, unit) else ""
    raise ConfigurationError(
        f"a schedule that begins after {since} and ends at {time} needs both in one unit, but here they are in {found} "
        f"and {unit}; give both in {unit}, or in epochs and batches{unknown}"
    )


def _position(state: State, unit: TimeUnit, length: int | None) -> Fraction:
    now = state.timestamp
    if unit is TimeUnit.SECOND:
        return Fraction(now.total_wct // timedelta(microseconds=1), 1_000_000)
    if unit is TimeUnit.EPOCH and length is not None:
        return int(now.epoch) + min(Fraction(int(now.batch_in_epoch), length), Fraction(1))
    return Fraction(int(now.get(unit)))
