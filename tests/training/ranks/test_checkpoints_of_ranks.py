"""What two ranks have saved goes on on one, and the other way round: `checkpointing.py` saves, and loads."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eventbus_engine.training.checkpoint import open_checkpoint

PROGRAM = Path(__file__).parent / "checkpointing.py"
WAYS = ("ddp", "fsdp")
EARLY, LATE = "ep1-ba5", "ep2-ba10"

StartJob = Callable[..., subprocess.Popen[str]]
Facts = dict[str, Any]
Train = Callable[..., tuple[Facts, dict[str, dict[str, Tensor]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all checkpoints are: those of `ddp` and `fsdp`, on two ranks, and of `one`."""
    return tmp_path_factory.mktemp("checkpoints")


def run(start_job: StartJob, folder: Path, what: str) -> dict[str, list[Facts]]:
    """What the two ranks of a job saw, by name."""
    output, _ = (process := start_job(PROGRAM, str(folder), what)).communicate(timeout=150)
    assert process.returncode == 0, output
    seen = [json.loads((folder / f"{what}-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    return {name: [rank[name] for rank in seen] for name in seen[0]}


@pytest.fixture(scope="module")
def saved(start_job: StartJob, folder: Path) -> dict[str, list[Facts]]:
    """Two ranks train to the end, each way, and save underway."""
    return run(start_job, folder, "save")


@pytest.fixture(scope="module")
def train() -> Train:
    """The run, for one rank."""
    function: Train = runpy.run_path(str(PROGRAM))["train"]
    return function


@pytest.fixture(scope="module")
def alone(train: Train, folder: Path) -> Facts:
    """One rank trains to the end, with twice the batch."""
    return train(folder / "alone", 16)[0]


@pytest.fixture(scope="module")
def one(train: Train, folder: Path, saved: Any) -> dict[str, tuple[Facts, dict[str, dict[str, Tensor]]]]:
    """One rank goes on from what two have saved, and saves to `one` what has begun as ddp."""
    places = {"ddp": folder / "one", "fsdp": folder / "one-fsdp"}
    return {way: train(places[way], 16, load_path=folder / way / EARLY, seed=99) for way in WAYS}


@pytest.fixture(scope="module")
def loaded(start_job: StartJob, folder: Path, one: Any) -> dict[str, list[Any]]:
    """Two ranks go on from what one has saved, and from what two have saved the other way."""
    for way in WAYS:
        for rank, name in [(0, EARLY), (0, LATE), (1, EARLY)]:
            shutil.copytree(folder / way / name, folder / f"autoresume-{way}-{rank}" / name)
    shutil.copytree(folder / "ddp" / EARLY, folder / "damaged")
    with open(folder / "damaged" / "rank1.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    return run(start_job, folder, "load")


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)] == []


def assert_goes_on_as(facts: Facts, alone: Facts) -> None:
    """To rounding: the losses of the rest of the run, and of the evaluations that are left."""
    begin, epoch = facts["batch"], facts["batch"] // 4
    assert facts["losses"] == pytest.approx(alone["losses"][begin:], rel=1e-4)
    assert facts["metrics"] == pytest.approx(alone["metrics"][epoch:], rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_that_save_give_the_losses_of_one(saved: dict[str, list[Facts]], alone: Facts, way: str) -> None:
    """Which is what the rest is measured by."""
    for rank in saved[way]:
        assert_goes_on_as(rank, alone)
        assert len(rank["losses"]) == 16


@pytest.mark.parametrize("way", WAYS)
def test_what_two_ranks_have_saved_loads_on_one_bit_for_bit(one: Any, folder: Path, way: str) -> None:
    """Parameters, buffers, the state of AdamW, the averages of EMA; what was frozen is, and has no state."""
    facts, portraits = one[way]
    expected = load_file(folder / f"{way}-{EARLY}.safetensors")

    assert_same(portraits["loaded"], expected)
    assert {"ema.5.scale", "ema.5.seen", "adamw.5.scale.exp_avg", "5.seen"} < expected.keys()
    assert facts["frozen"] == ["0.weight", "0.bias"]
    assert not any(name.startswith("adamw.0.") for name in expected)


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_goes_on_as_two_would_have(one: Any, alone: Facts, way: str) -> None:
    """In the middle of an epoch, with twice the batch."""
    facts, _ = one[way]

    assert facts["batch"] == 5
    assert_goes_on_as(facts, alone)


@pytest.mark.parametrize("way", WAYS)
def test_what_one_rank_has_saved_goes_on_on_two(
    loaded: dict[str, list[Facts]], one: Any, alone: Facts, folder: Path, way: str
) -> None:
    """Bit for bit where it is loaded, on each rank, and to rounding from there on."""
    _, portraits = one["ddp"]
    for rank, facts in enumerate(loaded[f"one-under-{way}"]):
        assert facts["batch"] == 10
        assert_same(load_file(folder / f"one-under-{way}-{rank}.safetensors"), portraits[LATE])
        assert_goes_on_as(facts, alone)


@pytest.mark.parametrize(("source", "way"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_what_was_saved_one_way_goes_on_the_other(
    loaded: dict[str, list[Facts]], alone: Facts, folder: Path, source: str, way: str
) -> None:
    """A model that was whole is cut up, and one that was cut up is whole."""
    expected = load_file(folder / f"{source}-{EARLY}.safetensors")
    for rank, facts in enumerate(loaded[f"{source}-under-{way}"]):
        assert facts["batch"] == 5
        assert_same(load_file(folder / f"{source}-under-{way}-{rank}.safetensors"), expected)
        assert_goes_on_as(facts, alone)


def test_a_rank_that_the_checkpoint_does_not_know_keeps_its_generators(loaded: dict[str, list[Facts]]) -> None:
    """The seed of the run is everybody's all the same: what algorithms draw by it is to be alike on all ranks."""
    unknown = loaded["one-under-ddp"] + loaded["one-under-fsdp"]
    known = loaded["ddp-under-fsdp"] + loaded["fsdp-under-ddp"]

    assert [(facts["seed"], facts["generator"]) for facts in unknown] == [(7, 7), (7, 100)] * 2
    assert [(facts["seed"], facts["generator"]) for facts in known] == [(7, 7), (7, 8)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_autoresume_goes_on_from_rank_0s_choice_on_all(
    loaded: dict[str, list[Facts]], saved: dict[str, list[Facts]], way: str
) -> None:
    """Also where another rank would have chosen an older one; and as before on as many ranks, bit for bit."""
    for facts, before in zip(loaded[f"autoresume-{way}"], saved[way], strict=True):
        assert facts["batch"] == 10
        assert facts["losses"] == before["losses"][10:]


def test_a_damaged_checkpoint_is_refused_on_all_ranks(loaded: dict[str, list[Any]]) -> None:
    """Each has seen it, and none waits for another."""
    for told in loaded["damaged"]:
        assert "rank1.safetensors is not as it was written: its hash is another" in told
    assert loaded["left"] == [True, True]


def test_a_checkpoint_that_one_rank_cannot_load_is_refused_on_the_others_too(loaded: dict[str, list[Any]]) -> None:
    """Else they would go on from it alone; they say whose fault it is."""
    first, second = loaded["damaged for one"]

    assert "rank 1 cannot load the checkpoint" in first
    assert "rank1.safetensors is not as it was written" in second


def test_a_folder_that_rank_0_cannot_read_is_refused_on_the_others_too(loaded: dict[str, list[Any]]) -> None:
    """Only rank 0 looks into it, and the others hear that there is nothing to wait for."""
    first, second = loaded["newer"]

    assert "can be read: checkpoint" in first
    assert "rank 0 cannot load the checkpoint" in second


def test_a_checkpoint_of_two_ranks_says_so(saved: Any, folder: Path) -> None:
    """Each rank has written a part of what is cut up, and rank 0 all of what is not."""
    whole, parts = (open_checkpoint(folder / way / EARLY) for way in WAYS)

    def spread(checkpoint: Any) -> list[str]:
        return [part.file for part in checkpoint.tensors["model.6.weight"].parts]

    assert (whole.manifest.world_size, parts.manifest.world_size) == (2, 2)
    assert spread(whole) == ["rank0.safetensors"]
    assert spread(parts) == ["rank0.safetensors", "rank1.safetensors"]
