"""`compile=`: the forward pass is compiled, once, after model surgery, and trains to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.event import Event
from eventbus_engine.training import State, Trainer

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]


class Wider(Algorithm[State, Event]):
    """Model surgery."""

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT."""
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Any) -> None:
        """Put an activation in place of another."""
        assert isinstance(state.model, nn.Sequential)
        state.model[1] = nn.Tanh()


async def test_a_compiled_model_trains_to_the_same_parameters(make_trainer: MakeTrainer) -> None:
    """With the names that it had, so that nothing that is saved shows it."""
    compiled_graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    plain = make_trainer(max_duration="1ep", algorithms=[Wider()])
    await plain.fit()
    torch._dynamo.reset()
    compiled = make_trainer(max_duration="1ep", algorithms=[Wider()], compile={"backend": backend})
    await compiled.fit()
    torch._dynamo.reset()

    assert len(compiled_graphs) == 1
    assert any("tanh" in str(target).lower() for target in compiled_graphs[0])
    expected: dict[str, Tensor] = plain.state.model.state_dict()
    actual: dict[str, Tensor] = compiled.state.model.state_dict()
    assert list(actual) == list(expected)
    assert all(torch.allclose(actual[name], expected[name]) for name in expected)


async def test_nothing_is_compiled_unasked(make_trainer: MakeTrainer) -> None:
    """To compile takes seconds to minutes."""
    trainer = make_trainer(max_duration="1ba", compile=False)
    await trainer.fit()

    assert trainer.state.runner is trainer.state.model


async def test_a_model_put_in_its_place_runs_as_it_is(make_trainer: MakeTrainer, make_model: Any) -> None:
    """What was compiled is another."""
    trainer = make_trainer(compile={"backend": "eager"})
    async with trainer:
        await trainer.fit("1ba")
        compiled = trainer.state.runner
        trainer.state.model = make_model()

        assert compiled is not trainer.state.model
        assert trainer.state.runner is trainer.state.model


async def test_a_model_of_ones_own_is_compiled(make_trainer: MakeTrainer) -> None:
    """One that has no length, as most have none."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, features: Tensor) -> Tensor:
            logits: Tensor = self.layer(features)
            return logits

    trainer = make_trainer(model=Own(), max_duration="2ba", compile={"backend": "eager"})
    await trainer.fit()

    assert trainer.state.timestamp.batch == 2
