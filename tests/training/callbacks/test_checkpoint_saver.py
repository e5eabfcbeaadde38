"""Saving in the course of training: when, under which name, what is kept, and what becomes of failures."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from eventbus_engine import Algorithm, Callback, CallbackErrors, Event
from eventbus_engine.errors import CheckpointError, ConfigurationError
from eventbus_engine.time import Timestamp
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.callbacks import CheckpointSaver, checkpoint_saver
from eventbus_engine.training.checkpoint import (
    Contents,
    Snapshot,
    find_checkpoints,
    open_checkpoint,
    take_snapshot,
    write_snapshot,
)

pytestmark = pytest.mark.anyio

Make = Callable[..., Trainer]


def names(folder: Path, *, link: bool = True) -> list[str]:
    """Of the whole checkpoints, by how far they are; there is nothing else in the folder but the link."""
    found = [path.name for path in find_checkpoints(folder)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*found, "latest"] if found and link else found)
    return found


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ("1ep", ["ep1-ba3", "ep2-ba6"]),
        (2, ["ep2-ba6"]),
        ("2ba", ["ep0-ba2", "ep1-ba4", "ep1-ba6", "ep2-ba6"]),
        ("0.5dur", ["ep1-ba3", "ep2-ba6"]),
        ("100ep", ["ep2-ba6"]),
        ("7sp", ["ep0-ba2", "ep0-ba3", "ep1-ba4", "ep1-ba5", "ep1-ba6", "ep2-ba6"]),
    ],
)
async def test_it_saves_at_its_interval_and_at_the_end(
    make_trainer: Make, tmp_path: Path, interval: str | int, expected: list[str]
) -> None:
    """An end that has been saved is not saved again; one whose epoch has ended since is."""
    trainer = make_trainer(callbacks=[CheckpointSaver(tmp_path, interval)])
    await trainer.fit()

    assert names(tmp_path) == expected
    assert (tmp_path / "latest").resolve() == tmp_path / expected[-1]
    assert open_checkpoint(tmp_path / "latest").values["timestamp"].batch == 6


async def test_what_is_saved_is_the_model_as_it_was_then(make_trainer: Make, tmp_path: Path) -> None:
    """Although it is written while the training goes on, to memory that has been used before."""
    seen: dict[str, torch.Tensor] = {}

    class Watch(Callback[State]):
        def batch_checkpoint(self, state: State, logger: Any) -> None:
            seen[f"ba{int(state.timestamp.batch)}"] = state.model.state_dict()["0.weight"].clone()

    saver = CheckpointSaver(tmp_path, "1ba", filename="ba{batch}")
    await make_trainer(callbacks=[Watch(), saver]).fit()

    assert names(tmp_path) == list(seen)
    for name, weight in seen.items():
        kept = torch.zeros_like(weight)
        open_checkpoint(tmp_path / name).read({"model.0.weight": kept})
        assert kept.equal(weight), name


async def test_what_a_callback_says_is_what_it_was_then(make_trainer: Make, tmp_path: Path) -> None:
    """It goes on beside the copy that is made on the training thread: here an algorithm stands for that."""
    notes: dict[str, list[int]] = {"of": []}

    class Notes(Callback[State]):
        def state_dict(self) -> dict[str, Any]:
            return {"notes": notes, "more": (deque([notes["of"]], 1), torch.Size([2]), {1})}

    class Later(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return False

        def state_dict(self) -> None:
            notes["of"].append(1)

    await make_trainer(max_duration="1ba", algorithms=[Later()], callbacks=[Notes(), CheckpointSaver(tmp_path)]).fit()

    state = open_checkpoint(tmp_path / "latest").values["callbacks"]["notes"]["state"]
    assert state == {"notes": {"of": []}, "more": (deque([[]], 1), torch.Size([2]), {1})}


async def test_one_that_comes_by_again_is_replaced(make_trainer: Make, tmp_path: Path) -> None:
    """A name without a counter in it has one checkpoint at a time."""
    await make_trainer(callbacks=[CheckpointSaver(tmp_path, "1ba", filename="run", latest=None)]).fit()

    assert names(tmp_path, link=False) == ["run"]
    assert open_checkpoint(tmp_path / "run").values["timestamp"].epoch == 2


class Scores(Callback[State]):
    """An evaluation of every epoch, with results that are known before."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def eval_end(self, state: State, logger: Any) -> None:
        """Instead of what was measured."""
        state.metrics["metrics/eval/score"] = self.values[int(state.timestamp.epoch) - 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"keep": 2}, [4, 5]),
        ({"keep": 1, "keep_best": 2}, [2, 3, 5]),
        ({"keep": 2, "keep_best": 1, "mode": "min"}, [4, 5]),
        ({"keep": 1, "keep_best": 9}, [1, 2, 3, 5]),
    ],
)
async def test_the_newest_and_the_best_are_kept(
    make_trainer: Make, tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    """Of equals the earlier one is the better; what is no number is never the best."""
    saver = CheckpointSaver(tmp_path, metric="metrics/eval/score", filename="ep{epoch}", **options)
    scores = Scores(0.2, 0.9, 0.8, float("nan"), 0.1)
    batches = [(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))]
    trainer = make_trainer(
        train_dataloader=batches, eval_dataloader=batches, max_duration="5ep", callbacks=[scores, saver]
    )
    await trainer.fit()

    assert names(tmp_path) == [f"ep{epoch}" for epoch in expected]


async def test_the_best_are_told_by_what_was_measured_there(make_trainer: Make, batches: Any, tmp_path: Path) -> None:
    """A number of an earlier point of the run says nothing of this one: without any other, that is an error."""
    saver = CheckpointSaver(tmp_path, "2ba", keep=1, keep_best=1, metric="metrics/eval/loss")
    trainer = make_trainer(eval_dataloader=batches, max_duration="5ba", callbacks=[saver])

    with pytest.raises(CallbackErrors) as caught:
        await trainer.fit()

    assert caught.group_contains(ConfigurationError, match="not measured just before any checkpoint.*metrics/eval/acc")
    assert names(tmp_path) == ["ep1-ba5"]


async def test_a_run_that_goes_on_takes_over_what_it_goes_on_from(make_trainer: Make, tmp_path: Path) -> None:
    """Those before its start are its own; those after it, and all of a run that begins anew, are others'."""
    first = make_trainer(max_duration="6ba", callbacks=[CheckpointSaver(tmp_path, "1ba", filename="ba{batch}")])
    await first.fit()
    begun = make_trainer(max_duration="2ba", callbacks=[CheckpointSaver(tmp_path, filename="new{batch}", keep=1)])
    await begun.fit()
    assert names(tmp_path) == ["ba1", "ba2", "new2", "ba3", "ba4", "ba5", "ba6"]

    went_on = make_trainer(max_duration="5ba", callbacks=[CheckpointSaver(tmp_path, filename="on{batch}", keep=2)])
    went_on.state.timestamp = open_checkpoint(tmp_path / "ba4").values["timestamp"]
    await went_on.fit()

    assert names(tmp_path) == ["ba4", "ba5", "on5", "ba6"]


async def test_checkpoints_that_are_further_than_the_run_are_named(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another run in the same folder, or of the same one that has been set back: a restart would take them."""
    await make_trainer(callbacks=[CheckpointSaver(tmp_path)]).fit()
    before = caplog.text
    await make_trainer(callbacks=[CheckpointSaver(tmp_path)], load_path=tmp_path / "ep1-ba3").fit()

    assert "got further" not in before
    assert "a run that got further, ep2-ba6: autoresume would go on from them" in caplog.text


async def test_what_a_killed_run_has_left_is_cleared(make_trainer: Make, tmp_path: Path) -> None:
    """By the next run in the folder, before it saves anything."""
    (tmp_path / ".ba1.0123456789ab.writing").mkdir()
    (tmp_path / ".ba1.0123456789ab.writing" / "rank0.json").write_text("{}")
    await make_trainer(callbacks=[CheckpointSaver(tmp_path)]).fit()

    assert names(tmp_path) == ["ep1-ba3", "ep2-ba6"]


class Gate:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()

    def __call__(self, snapshot: Snapshot, path: Path) -> None:
        """Instead of `write_snapshot`."""
        self.begun.set()
        assert self.open.wait(60)
        write_snapshot(snapshot, path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Every write waits there."""
    gate = Gate()
    monkeypatch.setattr(checkpoint_saver, "write_snapshot", gate)
    return gate


async def test_training_goes_on_while_a_checkpoint_is_written(make_trainer: Make, tmp_path: Path, gate: Gate) -> None:
    """Up to the next save, and at its end it waits."""
    batches: list[int] = []

    class Watch(Callback[State]):
        def batch_end(self, state: State, logger: Any) -> None:
            batches.append(int(state.timestamp.batch))
            if state.timestamp.batch == 6:
                assert find_checkpoints(tmp_path) == []
                gate.open.set()

    await make_trainer(callbacks=[CheckpointSaver(tmp_path, "4ba"), Watch()]).fit()

    assert batches == [1, 2, 3, 4, 5, 6]
    assert names(tmp_path) == ["ep1-ba4", "ep2-ba6"]


async def test_a_run_that_is_cancelled_waits_for_what_is_written(
    make_trainer: Make, tmp_path: Path, gate: Gate
) -> None:
    """Closing does."""
    trainer = make_trainer(callbacks=[CheckpointSaver(tmp_path, "1ba")], max_duration="1000ep")
    async with anyio.create_task_group() as group:
        group.start_soon(trainer.fit)
        await anyio.to_thread.run_sync(gate.begun.wait)
        group.cancel_scope.cancel()
        gate.open.set()

    assert names(tmp_path)[0] == "ep0-ba1"
    assert trainer.engine.closed


async def test_a_write_that_outlives_closing_comes_to_its_end(
    make_trainer: Make, tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread is left to its work; a failure that nobody is there to hear of is logged."""
    saver = CheckpointSaver(tmp_path, "1ba")
    trainer = make_trainer(callbacks=[saver], max_duration="1ba")
    async with trainer:
        async with anyio.create_task_group() as group:
            group.start_soon(trainer.fit)
            await anyio.to_thread.run_sync(gate.begun.wait)
            group.cancel_scope.cancel()
        report = await trainer.engine.close(timeout=0.05)
    assert report.timed_out == ["checkpoint_saver"]
    (tmp_path / "ep0-ba1").write_text("in the way")
    gate.open.set()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "eventbus-engine-checkpoint"]
    assert not thread.daemon
    thread.join()

    assert "a checkpoint could not be saved" in caplog.text


def fail_at(*batches: int) -> Callable[[Snapshot, Path], None]:
    """A disk that fails for a while."""

    def write(snapshot: Snapshot, path: Path) -> None:
        if snapshot.timestamp["batch"] in batches:
            raise CheckpointError(f"the checkpoint {path} cannot be written")
        write_snapshot(snapshot, path)

    return write


async def test_a_write_that_fails_is_raised_at_the_next_save_which_is_made_all_the_same(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a full disk costs is one checkpoint, and no batch more."""
    monkeypatch.setattr(checkpoint_saver, "write_snapshot", fail_at(2))
    trainer = make_trainer(callbacks=[CheckpointSaver(tmp_path, "2ba")])

    with pytest.raises(CallbackErrors) as caught:
        await trainer.fit()

    assert caught.group_contains(CheckpointError, match="ep0-ba2 cannot be written")
    assert names(tmp_path) == ["ep1-ba4"]


async def test_a_run_that_need_not_save_goes_on_without(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_error="log"`."""
    monkeypatch.setattr(checkpoint_saver, "write_snapshot", fail_at(2))
    saver = CheckpointSaver(tmp_path, "2ba")
    saver.on_error = "log"
    await make_trainer(callbacks=[saver]).fit()

    assert names(tmp_path) == ["ep1-ba4", "ep1-ba6", "ep2-ba6"]
    assert "checkpoint_saver" in caplog.text


async def test_the_last_write_is_raised_at_the_end(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit that returns has saved its end."""
    monkeypatch.setattr(checkpoint_saver, "write_snapshot", fail_at(6))
    trainer = make_trainer(callbacks=[CheckpointSaver(tmp_path, "3ba", filename="ba{batch}", latest=None)])

    with pytest.raises(CallbackErrors) as caught:
        await trainer.fit()

    assert caught.group_contains(CheckpointError, match="ba6 cannot be written")
    assert names(tmp_path, link=False) == ["ba3"]


async def test_a_folder_that_cannot_be_made_is_named_before_the_training(make_trainer: Make, tmp_path: Path) -> None:
    """Not after the first epoch."""
    (tmp_path / "file").write_text("")
    trainer = make_trainer(callbacks=[CheckpointSaver(tmp_path / "file" / "runs")])

    with pytest.raises(CallbackErrors) as caught:
        await trainer.fit()

    assert caught.group_contains(CheckpointError, match="no checkpoint can be saved to .*runs")
    assert trainer.state.timestamp == Timestamp()


async def test_what_is_no_link_is_not_replaced_by_one(make_trainer: Make, tmp_path: Path) -> None:
    """And the checkpoint is there all the same."""
    (tmp_path / "latest").mkdir()
    trainer = make_trainer(callbacks=[CheckpointSaver(tmp_path)])

    with pytest.raises(CallbackErrors) as caught:
        await trainer.fit()

    assert caught.group_contains(CheckpointError, match="latest to the checkpoint ep1-ba3 cannot be made")
    assert [path.name for path in find_checkpoints(tmp_path)] == ["ep1-ba3", "ep2-ba6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": "0ba"}, "interval is 0ba"),
        ({"interval": "1iter"}, "interval is 1iter; give it in"),
        ({"keep": 0}, "keep=0 has to be a whole number, 1 or more"),
        ({"keep_best": -1}, "keep_best=-1"),
        ({"keep_best": 1}, "keep_best=1 needs a metric"),
        ({"mode": "best"}, "mode='best'"),
        ({"filename": "{step}"}, r"something else in braces than iteration, epoch"),
        ({"filename": "{"}, r"something else in braces"),
        ({"filename": "../{batch}"}, "plain name in the folder"),
        ({"filename": ".{batch}"}, "plain name in the folder"),
        ({"filename": ""}, "plain name in the folder"),
        ({"latest": "a/b"}, "latest='a/b' has to be a plain name"),
        ({"filename": "latest"}, "both 'latest'"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """By what is wrong with them."""
    with pytest.raises(ConfigurationError, match=message):
        CheckpointSaver(tmp_path, **arguments)


async def test_a_snapshot_takes_over_the_memory_of_one_that_is_spent() -> None:
    """All that fits; what has another shape, or is new, gets memory of its own."""
    first = take_snapshot(Contents({"same": torch.ones(3), "other": torch.ones(2)}))
    memory = {name: tensor.data_ptr() for name, tensor in first.parts.items()}
    second = take_snapshot(Contents({"same": torch.zeros(3), "other": torch.zeros(4), "new": torch.zeros(1)}), first)

    assert second.parts["same"].data_ptr() == memory["same"]
    assert {name: tensor.tolist() for name, tensor in second.parts.items()} == {
        "same": [0, 0, 0],
        "other": [0, 0, 0, 0],
        "new": [0],
    }
    assert second.plan is not first.plan
    assert take_snapshot(Contents({"same": torch.ones(3)}), take_snapshot(Contents({"same": torch.ones(3)}))).nonce
