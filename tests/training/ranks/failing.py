"""A job one of whose ranks fails: `python failing.py FOLDER HOW`. The other writes down what it gets to hear."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import nn
from torch.nn import functional

from eventbus_engine import Algorithm, Event, RankError
from eventbus_engine.training import State, Trainer

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]


class Fail(Algorithm[State, Event]):
    """Fails on rank 1, before the third batch's backward pass."""

    def match(self, event: Event, state: State) -> bool:
        """It is there."""
        return event == Event.BEFORE_BACKWARD and state.rank == 1 and state.timestamp.batch == 2

    def apply(self, event: Event, state: State, logger: Any) -> None:
        """Say when, and fail."""
        (FOLDER / "failed.json").write_text(json.dumps(time.time()), encoding="utf-8")
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the cause of it all")


def main() -> None:
    """Train until it fails."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would come before there is anything to write
    model = nn.Linear(4, 3)
    batches = [(torch.randn(4, 4), torch.zeros(4, dtype=torch.int64))] * 8
    trainer = Trainer(
        model,
        batches,
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        algorithms=[Fail()],
    )
    try:
        anyio.run(trainer.fit)
    except RankError as error:
        heard = {"text": str(error), "rank": error.rank, "world_size": error.world_size}
        (FOLDER / "heard.json").write_text(json.dumps(heard), encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
