"""Training on more than one rank: what a job that torchrun has started shares out, agrees upon and adds up."""

from __future__ import annotations

from eventbus_engine.training.ranks.job import Job, find_job
from eventbus_engine.training.ranks.ranks import Parallelism, Ranks
from eventbus_engine.training.ranks.sampler import sampler

__all__ = ["Job", "Parallelism", "Ranks", "find_job", "sampler"]
