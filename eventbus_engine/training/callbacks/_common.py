"""What the callbacks of this room share: checked counts, checked states, and the loss as a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.state import State


def check_count(owner: str, argument: str, value: Any, least: int) -> int:
    """A whole number, not below `least`.

    Raises:
        ConfigurationError: naming the argument and its value.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigurationError(f"{owner}: {argument}={value!r} has to be a whole number, {least} or more")


def less_is_better(metric: str) -> bool:
    """Whether a metric is called what is better if there is less of it; of any other more is."""
    return any(word in metric.lower() for word in ("loss", "error", "perplexity"))


def check_saved(owner: str, saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a saved state that lacks one of `names`, or holds another.

    Raises:
        ConfigurationError: naming what is there and what should be.
    """
    wanted = sorted(names)
    if sorted(saved) != wanted:
        raise ConfigurationError(
            f"{owner} cannot go on from a state with {', '.join(sorted(saved)) or 'nothing'} in it, as it needs "
            f"{', '.join(wanted)}; load what its state_dict() returned"
        )


def batch_loss(state: State) -> float:
    """The loss of the batch, on BATCH_END.

    The optimizer step, which is over by then, has waited for the loss already: reading it waits for nothing more.
    """
    assert state.loss is not None  # noqa: S101 -- the loop has set it
    return float(state.loss.item())
