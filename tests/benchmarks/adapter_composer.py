"""Composer's Trainer, with its own engine and, by `use_engine`, on ours."""

from __future__ import annotations

import warnings
from typing import Any

from loops import Job, composer
from peers import import_composer

from eventbus_engine import Engine

__all__ = ["TITLE", "train"]

TITLE = "Composer's Trainer, its own engine replaced by ours"

import_composer()  # or there is nothing to measure


def train(job: Job, engine: Engine[Any] | None) -> None:
    """Train without progress bar and loggers; with the engine's callbacks in it, where there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        composer(job, None if engine is None else engine._roster.latest.seen_callbacks)
