"""What algorithms and callbacks keep in a checkpoint, under the engine's names for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eventbus_engine._options import read_option, unique_names
from eventbus_engine.errors import CheckpointError

__all__ = ["apart", "check_required", "describe_participants", "load_participants"]

log: logging.Logger = logging.getLogger("eventbus_engine")


def describe_participants(participants: Sequence[Any]) -> dict[str, Any]:
    """By name, whether a run that resumes has to have each of them, and what it wants to be given then.

    Raises:
        CheckpointError: a `state_dict` failed; names whose.
    """
    return {
        name: {"required": _is_required(participant), "state": _state_of(participant, name)}
        for name, participant in zip(unique_names(participants), participants, strict=True)
    }


def _is_required(participant: Any) -> bool:
    required = read_option(participant, "required_on_load", None)
    return callable(required) and required() is True


def _state_of(participant: Any, name: str) -> Any:
    state_dict = read_option(participant, "state_dict", None)
    if not callable(state_dict):
        return None
    try:
        return state_dict()
    except Exception as error:
        raise CheckpointError(f"{name} could not say what it is made of: {error}; mend its state_dict()") from error


def apart(value: Any) -> Any:
    """What a callback has said of itself, in containers of its own: it goes on while that is being copied.

    Its tensors and arrays are those that it has.
    """
    if isinstance(value, Mapping):
        return {key: apart(item) for key, item in value.items()}
    if isinstance(value, deque):
        return deque(map(apart, value), value.maxlen)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return (list if isinstance(value, list) else tuple)(map(apart, value))
    return value


def check_required(saved: Mapping[str, Any], algorithms: Sequence[Any]) -> None:
    """Refuse to go on without an algorithm that a checkpoint needs.

    Raises:
        CheckpointError: naming those that are missing.
    """
    missing = [name for name, entry in saved.items() if entry["required"] and name not in unique_names(algorithms)]
    if missing:
        raise CheckpointError(
            f"the checkpoint was written with {', '.join(missing)}, which it cannot be loaded without; add "
            f"{'it' if len(missing) == 1 else 'them'} to algorithms=, or take what fits of the weights alone with "
            f"load_weights_only=True, load_strict=False"
        )


def load_participants(saved: Mapping[str, Any], participants: Sequence[Any]) -> None:
    """Give everybody what was kept for it. Who has come since begins anew; what is left over is logged.

    Raises:
        CheckpointError: somebody refused it; names who.
    """
    named = dict(zip(unique_names(participants), participants, strict=True))
    for name, entry in saved.items():
        state = entry["state"]
        if state is None:
            continue
        load = read_option(named[name], "load_state_dict", None) if name in named else None
        if not callable(load):
            log.warning("the checkpoint has a state of %s, which nobody here goes on from", name)
            continue
        try:
            load(state)
        except Exception as error:
            raise CheckpointError(f"{name} cannot go on from the checkpoint: {error}") from error
