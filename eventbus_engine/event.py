"""Event vocabularies: `EventName`, the base of every one, and `Event`, the vocabulary of training."""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Self, TypeVar

from eventbus_engine.errors import UnknownEventError, VocabularyError

__all__ = ["Event", "EventName", "resolve_event"]

RESERVED_VALUES = frozenset({"close", "open", "post_close", "run_event", "state_dict"})
"""Method names of a callback that are not hooks, so that no event may be called like them."""

EventNameT = TypeVar("EventNameT", bound="EventName")


class EventName(StrEnum):
    """Base of a vocabulary of events. It has no members; subclass it and name yours.

    A value is the name of the callback hook, so it has to be an identifier. Two members named `before_x` and
    `after_x`, or `x_start` and `x_end`, are the halves of a pair: algorithms unwind in reverse order on the
    `after` half, and `Engine.pair` publishes both. The markers may stand inside a name (`eval_before_forward`).

    Example:
        >>> class Ingest(EventName):
        ...     BEFORE_WRITE = "before_write"
        ...     AFTER_WRITE = "after_write"
        >>> Ingest.AFTER_WRITE.is_after_event, Ingest.AFTER_WRITE.canonical_name
        (True, 'write')

    Raises:
        VocabularyError: on class creation, if a value is no identifier or is the name of a callback method.
    """

    # A member equals its value, so it has to hash like it. Enum's own __hash__ is a Python function over the
    # *name*: both wrong for `{"init": ...}[Event.INIT]` and slow in the plan look-up of every dispatch.
    __hash__ = str.__hash__

    _marker: str
    _canonical: str
    _partner_value: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for member in cls:
            problem = _problem_with(member.value)
            if problem:
                raise VocabularyError(
                    f"{cls.__name__}.{member.name} = {member.value!r} {problem}; a value names the callback hook, so "
                    f"use another one, for example {_suggestion(member.value, member.name)!r}"
                )
            # Read on every dispatch, so worked out once. A lone half is no pair and keeps its own name.
            member._marker, member._canonical, member._partner_value = next(
                (half for half in _halves(member.value) if half[2] in cls._value2member_map_), ("", member.value, "")
            )

    @classmethod
    def _missing_(cls, value: object) -> Self:
        """Take names too, and both in any case: `Event("BEFORE_LOSS")`, `Event("Before_Loss")`."""
        if isinstance(value, str) and not isinstance(value, EventName):
            if value in cls.__members__:
                return cls[value]
            lowered = value.lower()
            for name, member in cls.__members__.items():
                if lowered in (name.lower(), member.value.lower()):
                    return member
            nearest = _nearest(lowered, cls)
            known = ", ".join(cls.__members__) or "no events"
            hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"it has {known}"
            raise UnknownEventError(f"{value!r} is no event of {cls.__name__}; {hint}", nearest)
        what = f"{type(value).__name__}.{value.name}" if isinstance(value, EventName) else repr(value)
        raise UnknownEventError(
            f"{what} is no event of {cls.__name__}; pass one of its members, or the engine that speaks the other "
            f"vocabulary: Engine(events={type(value).__name__ if isinstance(value, EventName) else '...'})"
        )

    @property
    def is_before_event(self) -> bool:
        """Whether this is the first half of a pair in its vocabulary."""
        return self._marker in ("before", "start")

    @property
    def is_after_event(self) -> bool:
        """Whether this is the second half of a pair in its vocabulary."""
        return self._marker in ("after", "end")

    @property
    def is_mirrored(self) -> bool:
        """Whether algorithms run in reverse order here: the second half of a `before`/`after` pair."""
        return self._marker == "after"

    @property
    def canonical_name(self) -> str:
        """The name both halves of a pair share: `epoch` for `epoch_start` and `epoch_end`; else the value itself."""
        return self._canonical

    @property
    def partner(self) -> Self | None:
        """The other half of the pair, or None where the vocabulary has no such member."""
        return type(self)(self._partner_value) if self._partner_value else None


def _problem_with(value: str) -> str | None:
    """Why a value cannot name a callback hook, None if it can."""
    if not value.isidentifier():
        return "is not an identifier"
    if keyword.iskeyword(value):
        return "is a keyword of Python"
    if value in RESERVED_VALUES or hasattr(object, value):
        return "clashes with the method of that name that callbacks have"
    return None


def _suggestion(value: str, name: str) -> str:
    """A value close to the one refused that can name a hook."""
    cleaned = re.sub(r"\W+", "_", value).strip("_") or name.lower()
    return f"on_{cleaned}" if _problem_with(cleaned) else cleaned


_OPPOSITE = {"before": "after", "after": "before"}
_OPPOSITE_END = {"start": "end", "end": "start"}


def _halves(value: str) -> Iterator[tuple[str, str, str]]:
    """The pairs that a value may be half of, as (marker, shared name, value of the other half)."""
    words = value.split("_")
    if len(words) == 1:
        return
    for i, word in enumerate(words):
        opposite = _OPPOSITE.get(word) or (_OPPOSITE_END.get(word) if i == len(words) - 1 else None)
        if opposite:
            yield word, "_".join(words[:i] + words[i + 1 :]), "_".join([*words[:i], opposite, *words[i + 1 :]])


class Event(EventName):
    """The events of a training run, with the names and values of MosaicML Composer's vocabulary.

    The order in which `training.Trainer` fires them is written out in `docs/training.md`.
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"
    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @property
    def is_predict(self) -> bool:
        """Whether this event belongs to prediction."""
        return self.value.startswith("predict")

    @property
    def is_eval(self) -> bool:
        """Whether this event belongs to evaluation."""
        return self.value.startswith("eval")


# Where Composer users look for an event under an older or a guessed name.
_KNOWN_AS = {"training_start": "INIT", "training_end": "FIT_END"}


def resolve_event(name: object, events: type[EventNameT]) -> EventNameT:
    """Turn a member, its value (`before_loss`) or its name (`BEFORE_LOSS`), in any case, into a member of `events`.

    Raises:
        UnknownEventError: names the offender and the nearest members.
    """
    if isinstance(name, events):
        return name
    # A member of another vocabulary is not taken for the one that has its value here.
    if isinstance(name, str) and not isinstance(name, EventName) and name in events._value2member_map_:
        return events(name)
    return events._missing_(name)


def _nearest(lowered: str, events: type[EventName]) -> list[str]:
    """The names of the members closest to a name in lower case, best first."""
    if _KNOWN_AS.get(lowered) in events.__members__:
        return [_KNOWN_AS[lowered]]
    names = {member.value.lower(): member.name for member in events}
    return [names[value] for value in difflib.get_close_matches(lowered, names, n=3)]
