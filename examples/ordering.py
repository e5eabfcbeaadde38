"""Which algorithm runs first? Explain the order of three algorithms on every event that they share.

SelectiveBackprop chooses the samples to train on, so it has to see them before anything augments them: it is pinned
first. MosaicML Composer pins it too, but reverses the order of every "after" event only then, and so runs it last on
AFTER_DATALOADER, the one event where it matters. Here the order is mirrored first and pinned afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eventbus_engine import Algorithm, Engine, Event, passes


class Augmentation(Algorithm[Any, Event]):
    """Does something to the batch once it is loaded, and undoes it around the loss."""

    def match(self, event: Event, state: Any) -> bool:
        """Run after the data loader, and before and after the loss."""
        return event in (Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        """This example only asks for the order; nothing runs."""


class MixUp(Augmentation):
    """Mixes pairs of samples."""

    name = "mixup"


class CutMix(Augmentation):
    """Pastes patches of one sample into another."""

    name = "cutmix"


class SelectiveBackprop(Augmentation):
    """Chooses the samples to train on. The passes recognise it by its name, Composer's own class included."""


def pin_then_mirror(algorithms: Sequence[Algorithm], event: Event) -> list[str]:
    """Composer's order of the same two passes."""
    pinned = passes.sort_selective_backprop_first(algorithms, event)
    return [type(algorithm).__name__ for algorithm in passes.set_filo_order(pinned, event)]


def main() -> None:
    """Print the plans."""
    algorithms = [MixUp(), SelectiveBackprop(), CutMix()]
    engine = Engine(algorithms=algorithms)
    print("registered:", ", ".join(type(algorithm).__name__ for algorithm in algorithms))
    for event in (Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS):
        print(f"\n{engine.explain(event)}")
        print("pinned first and mirrored then, as in Composer:", ", ".join(pin_then_mirror(algorithms, event)))


if __name__ == "__main__":
    main()
