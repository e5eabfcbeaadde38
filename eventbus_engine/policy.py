"""What a background callback does about a far side that does not take its events: `Retry` and `Circuit`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from eventbus_engine.errors import (
    ConfigurationError,
    DeadlockError,
    EngineClosedError,
    HandlerCancelledError,
    HandlerTypeError,
    SnapshotError,
)

__all__ = ["Circuit", "CircuitState", "Retry"]

CircuitState: TypeAlias = Literal["closed", "open", "probing"]

_LASTING = (DeadlockError, EngineClosedError, HandlerCancelledError, HandlerTypeError, SnapshotError)
"""What another attempt would not change: the program is at fault, not the far side."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and after which pauses, a hook that failed is called again with the same event.

    The pauses double from `initial` to `maximum`. An exception with a `retry_after` (seconds) gets at least that
    long. One whose `retryable` is False is not tried again. `timeout` holds for each attempt.

    Args:
        attempts: in all, the first one included.
        initial: seconds after the first failure.
        maximum: seconds that a pause of ours is never longer than. What the far side asks for may be.
        jitter: the share of a pause that is left to chance, 0.0 to 1.0, so that many processes do not come back at
            once. From a private generator: no seeded run notices.
        on: the exceptions that another attempt may help with.

    Raises:
        ConfigurationError: a number out of its bounds.
    """

    attempts: int = 5
    initial: float = 0.5
    maximum: float = 30.0
    jitter: float = 0.5
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check("Retry", "attempts", self.attempts, whole=True, least=1)
        _check("Retry", "initial", self.initial)
        _check("Retry", "maximum", self.maximum)
        _check("Retry", "jitter", self.jitter, most=1)
        if not isinstance(self.on, tuple) or not all(isinstance(c, type) and issubclass(c, Exception) for c in self.on):
            raise ConfigurationError(
                f"Retry has on={self.on!r}; give a tuple of classes of exceptions, as in (OSError,)"
            )

    def covers(self, error: Exception) -> bool:
        """Whether another attempt may help."""
        return isinstance(error, self.on) and transient(error)

    def pause(self, attempt: int, error: Exception, chance: random.Random) -> float:
        """Seconds until the next attempt.

        Args:
            attempt: how many there have been.
            error: what the last one raised.
            chance: where the jitter is drawn from.
        """
        # Past 2**64 it is the maximum anyway, and a float has an end.
        backoff = min(self.initial * 2.0 ** min(attempt - 1, 64), self.maximum)
        return max(backoff * (1 - self.jitter * chance.random()), asked_for(error))


@dataclass(frozen=True, slots=True)
class Circuit:
    """When to leave a far side that is down alone, and for how long.

    After `failures` in a row the circuit is open: events wait, and the hook is not called. When `cool_down` is over,
    the event whose turn it is goes out as a probe. If the far side takes it, the circuit is closed again and the rest
    follows in order; if not, the next probe is due after another `cool_down`.

    Args:
        failures: attempts that failed in a row, retries counted one by one.
        cool_down: seconds until a probe; longer if the exception has a `retry_after`.

    Raises:
        ConfigurationError: a number out of its bounds.
    """

    failures: int = 5
    cool_down: float = 30.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check("Circuit", "failures", self.failures, whole=True, least=1)
        _check("Circuit", "cool_down", self.cool_down)


def transient(error: Exception) -> bool:
    """Whether it may be different next time, as far as the exception can tell."""
    return not isinstance(error, _LASTING) and getattr(error, "retryable", True) is not False


def asked_for(error: Exception) -> float:
    """The seconds that the far side asked to be left alone for: the exception's `retry_after`, 0 if it has none."""
    seconds: Any = getattr(error, "retry_after", None)
    return float(seconds) if _is_number(seconds) and math.isfinite(seconds) and seconds > 0 else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(cls: str, name: str, value: Any, *, whole: bool = False, least: int = 0, most: float = math.inf) -> None:
    fits = isinstance(value, int) if whole else _is_number(value) and math.isfinite(value)
    if isinstance(value, bool) or not fits or not least <= value <= most:
        kind = "whole number" if whole else "number"
        bounds = f"of {least} or more" if most == math.inf else f"from {least} to {most:g}"
        raise ConfigurationError(f"{cls} has {name}={value!r}; give a {kind} {bounds}")


class Breaker:
    """The state of one callback's circuit."""

    def __init__(self, circuit: Circuit | None) -> None:
        self.circuit = circuit
        self.state: CircuitState = "closed"
        self.failures: int = 0
        self.openings: int = 0

    def succeeded(self) -> bool:
        """Note a success; True if that closed the circuit."""
        before, self.state, self.failures = self.state, "closed", 0
        return before != "closed"

    def failed(self, error: Exception) -> tuple[float | None, bool]:
        """Note a failure.

        Returns:
            The seconds until a probe, None while the circuit is closed; and whether it was this that opened it.
        """
        if self.circuit is None or not transient(error):
            return None, False
        self.failures += 1
        if self.failures < self.circuit.failures:
            return None, False
        opened = self.state == "closed"
        self.openings += opened
        self.state = "open"
        return max(self.circuit.cool_down, asked_for(error)), opened
