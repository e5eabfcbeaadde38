"""`composer.core.time`: the package's own units and times, and a `Timestamp` with Composer's signatures."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from eventbus_engine import time as ours
from eventbus_engine.time import Time, TimeInput, TimeUnit

__all__ = ["Time", "TimeUnit", "Timestamp", "ensure_time"]

_ZERO = timedelta()


class Timestamp(ours.Timestamp):
    """The package's `Timestamp`, called and saved as Composer's: by position, and with wall-clock times as `timedelta`.

    Args:
        iteration: and so on, all counters as a `Time` of their unit or an int.
        total_wct: and so on, wall-clock times; none by default.

    Raises:
        TimeFormatError: a value that does not fit.
    """

    __slots__ = ()

    def __init__(  # noqa: PLR0917 -- Composer's own signature
        self,
        iteration: int | Time[int] = 0,
        epoch: int | Time[int] = 0,
        batch: int | Time[int] = 0,
        sample: int | Time[int] = 0,
        token: int | Time[int] = 0,
        epoch_in_iteration: int | Time[int] = 0,
        token_in_iteration: int | Time[int] = 0,
        batch_in_epoch: int | Time[int] = 0,
        sample_in_epoch: int | Time[int] = 0,
        token_in_epoch: int | Time[int] = 0,
        total_wct: timedelta | None = None,
        iteration_wct: timedelta | None = None,
        epoch_wct: timedelta | None = None,
        batch_wct: timedelta | None = None,
    ) -> None:
        super().__init__(
            iteration=iteration,
            epoch=epoch,
            batch=batch,
            sample=sample,
            token=token,
            epoch_in_iteration=epoch_in_iteration,
            token_in_iteration=token_in_iteration,
            batch_in_epoch=batch_in_epoch,
            sample_in_epoch=sample_in_epoch,
            token_in_epoch=token_in_epoch,
            total_wct=total_wct or _ZERO,
            iteration_wct=iteration_wct or _ZERO,
            epoch_wct=epoch_wct or _ZERO,
            batch_wct=batch_wct or _ZERO,
        )

    def to_next_epoch(self, duration: timedelta | None = None) -> Timestamp:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """One epoch further: what counts within the epoch starts again from 0.

        Args:
            duration: time that passed since the last batch; default: none.
        """
        return super().to_next_epoch(duration=duration)

    def state_dict(self) -> dict[str, Any]:
        """All attributes by name: counters as ints, wall-clock times as `timedelta`."""
        return {name: getattr(self, name) if name.endswith("_wct") else value for name, value in self._plain()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, here or in Composer; what an older one lacks stays as it is."""
        super().load_state_dict(dict(self._plain()) | dict(state))

    def _plain(self) -> Any:
        return super().state_dict().items()

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in self.state_dict().items())
        return f"Timestamp({', '.join(values)})"


def ensure_time(maybe_time: TimeInput, int_unit: TimeUnit | str) -> Time:
    """A `Time` of a `Time`, a time string, or a number in `int_unit`.

    Raises:
        TimeFormatError: it is none of these.
    """
    return Time.from_input(maybe_time, int_unit)
