"""A budget for traces: `EveryNth`, a sampler that keeps the first of each kind of root, every n-th, and the last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, StaticSampler
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

from eventbus_engine.errors import ConfigurationError

__all__ = ["EveryNth", "quick_verdict"]

_MANY_NAMES = 1000

Verdict: TypeAlias = Callable[[str, Attributes], bool]
"""Whether a span without a parent is sampled, by its name and attributes."""


class EveryNth(Sampler):
    """Keeps the first root of each name, then every n-th, and one that says it is the last, by `train.last`.

    What has a parent goes with its parent. It draws no random numbers, so that which steps are traced is the same in
    each run. The last is not known to a sampler: training says so of its batches, epochs and evaluations where it can.

    Args:
        every: n, from 1.

    Raises:
        ConfigurationError: it is no positive whole number.
    """

    def __init__(self, every: int) -> None:
        if not isinstance(every, int) or every < 1:
            raise ConfigurationError(f"sample_every={every!r} must be a whole number, 1 or more; 1 keeps every trace")
        self._every = every
        self._counts: dict[str, itertools.count[int]] = {}

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide about a span."""
        parent = get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            kept = bool(parent.trace_flags.sampled)
        else:
            kept = self.takes(name, attributes)
        decision = Decision.RECORD_AND_SAMPLE if kept else Decision.DROP
        return SamplingResult(decision, attributes if kept else None, parent.trace_state)

    def takes(self, name: str, attributes: Attributes = None) -> bool:
        """Decide about a span without a parent."""
        count = self._counts.get(name)
        if count is None:
            # Names are to be of low cardinality. Those of who does not care share one count.
            key = name if len(self._counts) < _MANY_NAMES else ""
            count = self._counts.setdefault(key, itertools.count())
        return next(count) % self._every == 0 or (attributes is not None and attributes.get("train.last") is True)

    def get_description(self) -> str:
        """As the SDK's samplers describe themselves."""
        return f"EveryNth{{{self._every}}}"


def quick_verdict(sampler: Sampler | None) -> Verdict | bool | None:
    """Whether a sampler takes spans without a parent, at a tenth of the price of `should_sample` or none.

    Returns:
        True or False if it is always the same; what tells of each span; or None if there is nothing but to ask: a
        sampler may go by the id, or have something to say besides yes and no.
    """
    if sampler is None:
        return True
    if type(sampler) is EveryNth:
        return sampler.takes
    # Without the attribute, should the SDK drop it, the sampler is asked as any other.
    deciding = getattr(sampler, "_root", None) if type(sampler) is ParentBased else sampler
    if type(deciding) is not StaticSampler:
        return None
    return deciding.should_sample(None, 1, "").decision is Decision.RECORD_AND_SAMPLE
