"""Training on a CUDA device: in bfloat16, compiled, with the event loop alive beside it."""

from __future__ import annotations

import runpy
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import nn

from eventbus_engine.callback import Callback
from eventbus_engine.errors import CallbackErrors
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import EMA, FusedLayerNorm, GatedLinearUnits, SeqLengthWarmup
from eventbus_engine.training.checkpoint import take_snapshot, write_snapshot
from eventbus_engine.training.checkpoint.contents import collect

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EXAMPLES = Path(__file__).parents[2] / "examples"


class Losses(Callback[State]):
    """Keeps the loss of every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def batch_end(self, state: State, logger: Any) -> None:
        """Another one."""
        assert state.loss is not None
        self.seen.append(float(state.loss))


@pytest.fixture
def make_char_lm() -> Callable[..., Trainer]:
    """The trainer of the example's model on its text, on the device."""

    def make(**arguments: Any) -> Trainer:
        example = runpy.run_path(str(EXAMPLES / "train_char_lm.py"))
        torch.manual_seed(1)
        text = example["Text"]()
        model: nn.Module = example["GPT"](len(text.alphabet))
        return Trainer(
            model,
            text.batches(200),
            loss=F.cross_entropy,
            optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
            max_duration="200ba",
            device="cuda",
            precision="amp_bf16",
            algorithms=[GatedLinearUnits(), FusedLayerNorm(), SeqLengthWarmup(max_seq_length=example["LENGTH"])],
            seed=1,
            **arguments,
        )

    return make


async def test_a_language_model_trains_in_bfloat16_compiled(make_char_lm: Callable[..., Trainer]) -> None:
    """The loss falls far below that of guessing, as far as without the compiler."""
    plain, compiled = Losses(), Losses()
    await make_char_lm(callbacks=[plain]).fit()
    await make_char_lm(callbacks=[compiled], compile={"dynamic": True}).fit()
    ends = [statistics.mean(losses.seen[-20:]) for losses in (plain, compiled)]

    assert all(end < 0.75 * statistics.mean(plain.seen[:5]) for end in ends)
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


async def test_the_event_loop_keeps_its_beat_while_the_device_trains(make_char_lm: Callable[..., Trainer]) -> None:
    """It gets its turn many times a batch, launches and all; how often exactly is for the benchmarks to say."""
    beats: list[float] = []

    async def heart() -> None:
        while True:
            beats.append(time.perf_counter())
            await anyio.sleep(0.001)

    losses = Losses()
    trainer = make_char_lm(callbacks=[losses])
    async with anyio.create_task_group() as group:
        group.start_soon(heart)
        await trainer.fit()
        group.cancel_scope.cancel()

    assert len(losses.seen) == 200
    assert len(beats) > len(losses.seen)


class Cut(Callback[State]):
    """Saves the run after some batch, and ends it there."""

    def __init__(self, batch: int, path: Path) -> None:
        super().__init__()
        self.batch, self.path = batch, path

    async def batch_checkpoint(self, state: State, logger: Any) -> None:
        """Nobody hears of it any more."""
        if state.timestamp.batch == self.batch:
            write_snapshot(await state.compute(lambda: take_snapshot(collect(state, state._source))), self.path)
            raise RuntimeError("killed")


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that add up in one order only."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
async def test_a_run_in_bfloat16_resumes_bit_for_bit(make_char_lm: Callable[..., Trainer], tmp_path: Path) -> None:
    """With moving averages, and dropout drawn on the device: its losses, its weights, and the device's generator."""

    def drop(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return F.dropout(outputs, 0.1)

    def make(**arguments: Any) -> Trainer:
        trainer = make_char_lm(**arguments)
        trainer.state.algorithms.append(EMA(half_life="10ba"))
        trainer.state.model.register_forward_hook(drop)
        return trainer

    whole, rest = Losses(), Losses()
    first = make(callbacks=[whole])
    await first.fit("60ba")
    drawn = torch.cuda.get_rng_state()
    with pytest.raises(CallbackErrors):
        await make(callbacks=[Cut(23, tmp_path / "cut")]).fit("60ba")
    torch.cuda.manual_seed(99)
    second = make(callbacks=[rest], load_path=tmp_path / "cut")
    await second.fit("37ba")

    expected, actual = first.state.model.state_dict(), second.state.model.state_dict()
    assert rest.seen == whole.seen[23:]
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, actual[name])] == []
