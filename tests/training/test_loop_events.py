"""Which events fire, in which order and how often, written out by hand and compared as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eventbus_engine.callback import Callback
from eventbus_engine.event import Event
from eventbus_engine.training import Evaluator, State, Trainer

pytestmark = pytest.mark.anyio

Batches = list[tuple[Tensor, Tensor]]
MakeBatches = Callable[..., Batches]
MakeTrainer = Callable[..., Trainer]


class Recorder(Callback[State]):
    """Keeps the names of the events, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Any, state: State, logger: Any) -> None:
        """Take every event."""
        self.events.append(event.name)


@pytest.fixture
def recorder() -> Recorder:
    """A callback that keeps the names of the events."""
    return Recorder()


BEFORE_TRAINING = ["INIT", "BEFORE_LOAD", "AFTER_LOAD", "FIT_START", "ITERATION_START"]

MICROBATCH = [
    "BEFORE_FORWARD",
    "AFTER_FORWARD",
    "BEFORE_LOSS",
    "AFTER_LOSS",
    "BEFORE_BACKWARD",
    "AFTER_BACKWARD",
]

AFTER_TRAINING = ["ITERATION_END", "ITERATION_CHECKPOINT", "FIT_END"]

EVAL_BATCH = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]

ONE_EVALUATOR_OF_TWO_BATCHES = ["EVAL_START", *EVAL_BATCH, *EVAL_BATCH, "EVAL_END"]

EVALUATION = ["EVAL_BEFORE_ALL", *ONE_EVALUATOR_OF_TWO_BATCHES, "EVAL_AFTER_ALL"]


def batch(microbatches: int, evaluation: list[str]) -> list[str]:
    """The events of one batch."""
    return [
        "BEFORE_DATALOADER",
        "AFTER_DATALOADER",
        "BATCH_START",
        "BEFORE_TRAIN_BATCH",
        *MICROBATCH * microbatches,
        "AFTER_TRAIN_BATCH",
        "BATCH_END",
        *evaluation,
        "BATCH_CHECKPOINT",
    ]


def epoch_of_three(microbatches: int, evaluation: list[str]) -> list[str]:
    """The events of an epoch of three batches that is asked for a fourth."""
    return [
        "EPOCH_START",
        *batch(microbatches, []) * 3,
        "BEFORE_DATALOADER",
        "EPOCH_END",
        *evaluation,
        "EPOCH_CHECKPOINT",
    ]


@pytest.mark.parametrize("offload", [True, False], ids=["offloaded", "inline"])
@pytest.mark.parametrize("evaluated", [True, False], ids=["with eval", "without eval"])
@pytest.mark.parametrize("microbatches", [1, 3])
async def test_two_epochs(
    make_trainer: MakeTrainer,
    make_batches: MakeBatches,
    recorder: Recorder,
    microbatches: int,
    evaluated: bool,
    offload: bool,
) -> None:
    """BEFORE_DATALOADER fires once more than AFTER_DATALOADER in each epoch: that is how the end is found."""
    trainer = make_trainer(
        max_duration="2ep",
        microbatches=microbatches,
        eval_dataloader=make_batches(2) if evaluated else None,
        callbacks=[recorder],
        offload=offload,
    )
    await trainer.fit()

    evaluation = EVALUATION if evaluated else []
    expected = [*BEFORE_TRAINING, *epoch_of_three(microbatches, evaluation) * 2, *AFTER_TRAINING]

    assert recorder.events == expected


@pytest.mark.parametrize("evaluated", [True, False], ids=["with eval", "without eval"])
@pytest.mark.parametrize("microbatches", [1, 3])
async def test_five_batches_cut_the_second_epoch_short(
    make_trainer: MakeTrainer, make_batches: MakeBatches, recorder: Recorder, microbatches: int, evaluated: bool
) -> None:
    """The run stops after that batch; an epoch that did not see all its data does not end, nor is it evaluated."""
    trainer = make_trainer(
        max_duration="5ba",
        microbatches=microbatches,
        eval_dataloader=make_batches(2) if evaluated else None,
        callbacks=[recorder],
    )
    await trainer.fit()

    expected = [
        *BEFORE_TRAINING,
        *epoch_of_three(microbatches, EVALUATION if evaluated else []),
        "EPOCH_START",
        *batch(microbatches, []) * 2,
        *AFTER_TRAINING,
    ]

    assert recorder.events == expected


async def test_a_run_that_stops_with_the_last_batch_ends_the_epoch(
    make_trainer: MakeTrainer, recorder: Recorder
) -> None:
    """The loader says how long it is, so the epoch is known to be complete without asking for a fourth batch."""
    await make_trainer(max_duration="3ba", callbacks=[recorder]).fit()

    expected = [*BEFORE_TRAINING, "EPOCH_START", *batch(1, []) * 3, "EPOCH_END", "EPOCH_CHECKPOINT", *AFTER_TRAINING]

    assert recorder.events == expected


async def test_a_loader_without_a_length_is_cut_there(
    make_trainer: MakeTrainer, recorder: Recorder, batches: Batches
) -> None:
    """Nobody knows that the third batch was the last until a fourth is asked for."""

    class Stream:
        async def __aiter__(self) -> AsyncIterator[tuple[Tensor, Tensor]]:
            for item in batches:
                yield item

    await make_trainer(train_dataloader=Stream(), max_duration="3ba", callbacks=[recorder]).fit()

    expected = [*BEFORE_TRAINING, "EPOCH_START", *batch(1, []) * 3, *AFTER_TRAINING]

    assert recorder.events == expected


async def test_evaluation_by_batches_comes_between_batch_end_and_batch_checkpoint(
    make_trainer: MakeTrainer, make_batches: MakeBatches, recorder: Recorder
) -> None:
    """Every second batch, whatever the epochs do."""
    trainer = make_trainer(
        max_duration="1ep", eval_dataloader=make_batches(2), eval_interval="2ba", callbacks=[recorder]
    )
    await trainer.fit()

    expected = [
        *BEFORE_TRAINING,
        "EPOCH_START",
        *batch(1, []),
        *batch(1, EVALUATION),
        *batch(1, []),
        "BEFORE_DATALOADER",
        "EPOCH_END",
        "EPOCH_CHECKPOINT",
        *AFTER_TRAINING,
    ]

    assert recorder.events == expected


async def test_standalone_evaluation(make_trainer: MakeTrainer, make_batches: MakeBatches, recorder: Recorder) -> None:
    """Two evaluators, one after the other, and INIT before anything else."""
    evaluators = [Evaluator(make_batches(2), "near"), Evaluator(make_batches(2), "far")]
    await make_trainer(eval_dataloader=evaluators, callbacks=[recorder]).eval()

    expected = [
        "INIT",
        "BEFORE_LOAD",
        "AFTER_LOAD",
        "EVAL_STANDALONE_START",
        *ONE_EVALUATOR_OF_TWO_BATCHES * 2,
        "EVAL_STANDALONE_END",
    ]

    assert recorder.events == expected


async def test_a_second_fit_goes_on_inside_the_epoch(make_trainer: MakeTrainer, recorder: Recorder) -> None:
    """No INIT again, no EPOCH_START again; the epoch ends when its data does."""
    async with make_trainer(max_duration="2ba", callbacks=[recorder]) as trainer:
        await trainer.fit()
        recorder.events.clear()
        await trainer.fit("1ba")

    expected = [
        "FIT_START",
        "ITERATION_START",
        *batch(1, []),
        "EPOCH_END",
        "EPOCH_CHECKPOINT",
        *AFTER_TRAINING,
    ]

    assert recorder.events == expected


async def test_every_event_of_the_vocabulary_is_fired(
    make_trainer: MakeTrainer, make_batches: MakeBatches, recorder: Recorder
) -> None:
    """A fit, an evaluation and a prediction leave out nothing that somebody might wait for."""
    async with make_trainer(eval_dataloader=make_batches(2), callbacks=[recorder]) as trainer:
        await trainer.fit()
        await trainer.eval()
        await trainer.predict(make_batches(1))

    assert set(recorder.events) == {event.name for event in Event}


STARTING = ["INIT", "BEFORE_LOAD", "AFTER_LOAD"]

PREDICT_BATCH = ["PREDICT_BATCH_START", "PREDICT_BEFORE_FORWARD", "PREDICT_AFTER_FORWARD", "PREDICT_BATCH_END"]


def golden(call: str, microbatches: int, evaluators: int, interval: str) -> list[str]:
    """What Composer's pseudocode of its events comes to: two epochs of three batches, evaluators of two batches."""
    evaluator = ["EVAL_START", *EVAL_BATCH * 2, "EVAL_END"]
    if call == "predict":
        return [*STARTING, "PREDICT_START", *PREDICT_BATCH * 2, "PREDICT_END"]
    if call == "eval":
        return [*STARTING, "EVAL_STANDALONE_START", *evaluator * evaluators, "EVAL_STANDALONE_END"]
    events = [*STARTING, "FIT_START", "ITERATION_START"]
    evaluation = ["EVAL_BEFORE_ALL", *evaluator * evaluators, "EVAL_AFTER_ALL"] if evaluators else []
    batches = 0
    for _ in range(2):
        events += ["EPOCH_START"]
        for _ in range(3):
            batches += 1
            due = interval == "2ba" and batches % 2 == 0
            events += batch(microbatches, evaluation if due else [])
        events += ["BEFORE_DATALOADER"]  # which finds no more data
        events += ["EPOCH_END", *(evaluation if interval == "1ep" else []), "EPOCH_CHECKPOINT"]
    return [*events, "ITERATION_END", "ITERATION_CHECKPOINT", "FIT_END"]


@pytest.mark.parametrize("interval", ["2ba", "1ep"])
@pytest.mark.parametrize("evaluators", [0, 1, 2])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("call", ["fit", "eval", "predict"])
async def test_the_events_are_those_of_composers_pseudocode(
    make_trainer: MakeTrainer,
    make_batches: MakeBatches,
    recorder: Recorder,
    call: str,
    microbatches: int,
    evaluators: int,
    interval: str,
) -> None:
    """In order and count, whatever is trained in how many parts, evaluated on how many loaders and how often."""
    if (call, evaluators) == ("eval", 0):
        pytest.skip("there is nothing to evaluate on, which is refused")
    trainer = make_trainer(
        max_duration="2ep",
        microbatches=microbatches,
        eval_dataloader=[Evaluator(make_batches(2), f"eval{number}") for number in range(evaluators)] or None,
        eval_interval=interval,
        callbacks=[recorder],
    )
    await (trainer.predict(make_batches(2)) if call == "predict" else getattr(trainer, call)())

    assert recorder.events == golden(call, microbatches, evaluators, interval)


async def test_evaluators_keep_intervals_of_their_own(make_trainer: MakeTrainer, make_batches: MakeBatches) -> None:
    """Each is run when its own has come round; those that are due at once share one evaluation."""
    runs: list[tuple[int, str]] = []

    class Look(Callback[State]):
        def eval_before_all(self, state: State, logger: Any) -> None:
            runs.append((int(state.timestamp.batch), "together"))

        def eval_after_all(self, state: State, logger: Any) -> None:
            runs.extend((int(state.timestamp.batch), name.split("/")[1]) for name in state.metrics if "loss" in name)

    evaluators = [
        Evaluator(make_batches(1), "often", interval="1ba"),
        Evaluator(make_batches(1), "samples", interval="13sp"),  # batches have 6
        Evaluator(make_batches(1), "half", interval="0.5dur"),
        Evaluator(make_batches(1), "epoch"),
    ]
    await make_trainer(max_duration="6ba", eval_dataloader=evaluators, callbacks=[Look()]).fit()

    expected = [
        *[(1, "together"), (1, "often")],
        *[(2, "together"), (2, "often")],
        *[(3, "together"), (3, "often"), (3, "samples"), (3, "half")],
        *[(3, "together"), (3, "epoch")],
        *[(4, "together"), (4, "often")],
        *[(5, "together"), (5, "often"), (5, "samples")],
        *[(6, "together"), (6, "often"), (6, "half")],
        *[(6, "together"), (6, "epoch")],
    ]

    assert runs == expected


class Clock(Callback[State]):
    """Notes how far the run is at chosen events."""

    def __init__(self, *events: str) -> None:
        self.events = events
        self.seen: list[tuple[str, int, int, int, int]] = []

    def run_event(self, event: Any, state: State, logger: Any) -> None:
        """Epoch, batch, batch in the epoch and sample, as the event finds them."""
        now = state.timestamp
        if event.value in self.events:
            self.seen.append((event.value, int(now.epoch), int(now.batch), int(now.batch_in_epoch), int(now.sample)))


async def test_the_timestamp_counts_a_batch_from_batch_end_and_an_epoch_from_epoch_end(
    make_trainer: MakeTrainer,
    make_batches: MakeBatches,
) -> None:
    """Two epochs of two batches of six samples."""
    clock = Clock("batch_start", "after_train_batch", "batch_end", "epoch_end", "fit_end")
    await make_trainer(train_dataloader=make_batches(2), callbacks=[clock]).fit()

    expected = [
        ("batch_start", 0, 0, 0, 0),
        ("after_train_batch", 0, 0, 0, 0),
        ("batch_end", 0, 1, 1, 6),
        ("batch_start", 0, 1, 1, 6),
        ("after_train_batch", 0, 1, 1, 6),
        ("batch_end", 0, 2, 2, 12),
        ("epoch_end", 1, 2, 0, 12),
        ("batch_start", 1, 2, 0, 12),
        ("after_train_batch", 1, 2, 0, 12),
        ("batch_end", 1, 3, 1, 18),
        ("batch_start", 1, 3, 1, 18),
        ("after_train_batch", 1, 3, 1, 18),
        ("batch_end", 1, 4, 2, 24),
        ("epoch_end", 2, 4, 0, 24),
        ("fit_end", 2, 4, 0, 24),
    ]

    assert clock.seen == expected


async def test_a_cut_epoch_keeps_its_place_and_the_iteration_counts_on(make_trainer: MakeTrainer) -> None:
    """One fit is one iteration, also when it stops inside an epoch."""
    async with make_trainer(max_duration="2ba") as trainer:
        await trainer.fit()
        now = trainer.state.timestamp

    assert (int(now.iteration), int(now.epoch), int(now.batch_in_epoch), int(now.sample_in_epoch)) == (1, 0, 2, 12)


async def test_the_state_holds_the_whole_batch_outside_and_the_microbatch_inside(make_trainer: MakeTrainer) -> None:
    """So do the outputs and the loss."""
    seen: dict[str, tuple[int, int | None, bool | None]] = {}

    class Look(Callback[State]):
        def run_event(self, event: Any, state: State, logger: Any) -> None:
            if isinstance(state.batch, tuple):
                outputs = None if state.outputs is None else len(state.outputs)
                seen.setdefault(event.value, (len(state.batch[0]), outputs, _has_graph(state.loss)))

    await make_trainer(max_duration="1ba", microbatches=3, callbacks=[Look()]).fit()

    expected = {
        "after_dataloader": (6, None, None),
        "batch_start": (6, None, None),
        "before_train_batch": (6, None, None),
        "before_forward": (2, None, None),
        "after_forward": (2, 2, None),
        "before_loss": (2, 2, None),
        "after_loss": (2, 2, True),
        "before_backward": (2, 2, True),
        "after_backward": (2, 2, True),
        "after_train_batch": (6, 2, False),
        "batch_end": (6, 2, False),
        "batch_checkpoint": (6, 2, False),
        "iteration_end": (6, 2, False),
        "iteration_checkpoint": (6, 2, False),
        "fit_end": (6, 2, False),
    }

    assert seen == expected


def _has_graph(loss: torch.Tensor | None) -> bool | None:
    return None if loss is None else loss.requires_grad
