"""The parts of the demo one by one: its server, its heartbeat, and what it says of runs that went wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import pytest
import torch

from eventbus_engine.demo.digits import make_loaders, make_model
from eventbus_engine.demo.heartbeat import Heartbeat, percentile
from eventbus_engine.demo.records import RunRecords, read_records
from eventbus_engine.demo.report import Outcome, find_problems, format_report
from eventbus_engine.demo.run import Options, run_demo
from eventbus_engine.demo.server import BatchServer
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.logger import Logger
from eventbus_engine.training import State
from eventbus_engine.training.algorithms import MixUp


def make_options(runs_dir: Path, run_name: str | None) -> Options:
    """An epoch without a progress bar."""
    return Options(
        epochs=1, seed=1, target=0.0, backend="asyncio", runs_dir=runs_dir, run_name=run_name, progress=False
    )


def test_run_that_fails_says_why_and_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report shows what there is, and the error names the algorithm and the event."""

    class FailingMixUp(MixUp):
        def apply(self, event: Event, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 3:
                raise ValueError("nothing left to mix")
            super().apply(event, state, logger)

    monkeypatch.setattr("eventbus_engine.demo.run.MixUp", FailingMixUp)
    written: list[str] = []

    code = run_demo(make_options(tmp_path, "failed"), written.append)

    assert code == 1
    assert "took 3 posts for 3 batches, missing = 0" in written[0]
    assert "the run failed: ValueError: nothing left to mix" in written[-1]
    assert "in algorithm mixup on AFTER_DATALOADER" in written[-1]


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", ".."])
def test_run_name_cannot_lead_out_of_the_runs_directory(name: str, tmp_path: Path) -> None:
    """It is a name, not a path."""
    with pytest.raises(ConfigurationError, match="--runs-dir"):
        run_demo(make_options(tmp_path, name))


def test_runs_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match="choose another --runs-dir"):
        run_demo(make_options(tmp_path / "file", None))


def test_data_and_model_draw_nothing_from_the_global_generator() -> None:
    """And the same seed gives the same split, the same batches and the same weights."""
    before = torch.get_rng_state()

    first, again = ([*map(list, make_loaders(3)), list(make_model(3).parameters())] for _ in range(2))

    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_held_out_images_are_a_fifth_and_not_trained_on() -> None:
    """1,797 images in all, each in one of the two loaders."""
    train, held_out = (
        torch.cat([torch.column_stack([images.flatten(1), labels]) for images, labels in loader])
        for loader in make_loaders(3)
    )

    assert (len(train), len(held_out)) == (1438, 359)
    assert len({tuple(image) for image in torch.cat([train, held_out]).tolist()}) == 1797


def outcome(directory: Path, records: RunRecords, server: BatchServer) -> Outcome:
    """A run with these records, of which nothing else is known."""
    return Outcome(directory, "a run", 1.0, records, server, Heartbeat())


def complete_records() -> RunRecords:
    """What one epoch of three batches logs if everything holds."""
    records = RunRecords()
    algorithms = {
        "after_dataloader": ["selective_backprop", "mixup"],
        "after_loss": ["label_smoothing", "mixup"],
        "epoch_end": ["layer_freezing"],
    }
    everyone = ["mixup", "label_smoothing", "layer_freezing", "selective_backprop"]
    batch = ["after_dataloader", "batch_start", "after_loss", "batch_end"]
    for event, step in [
        ("init", 0),
        ("epoch_start", 1),
        *((event, step) for step in (1, 2, 3) for event in batch),
        ("epoch_end", 3),
    ]:
        ran = algorithms.get(event, [])
        listed = [*ran, *(name for name in everyone if name not in ran)]
        records.add_traces(
            step,
            {f"{n}/{event.upper()}": {"name": n, "event": event, "run": n in ran, "order": None} for n in listed},
        )
        if event == "batch_end":
            records.add_metrics({"loss/train/total": 0.5})
    records.add_metrics({"metrics/eval/accuracy": 0.97})
    return records


def take_three(server: BatchServer) -> None:
    """Post three batches, in process."""
    for batch in (1, 2, 3):
        assert server.take(json.dumps({"batch": batch}).encode())


def test_run_in_which_everything_held_has_no_problems(tmp_path: Path) -> None:
    """Otherwise the tests of the problems would prove nothing."""
    with BatchServer() as server:
        take_three(server)
        problems = find_problems(outcome(tmp_path, complete_records(), server), target=0.95)

    assert problems == []


def test_batch_that_did_not_arrive_is_a_problem(tmp_path: Path) -> None:
    """And so is a post that was refused."""
    with BatchServer() as server:
        taken = [server.take(body) for body in (b'{"batch": 1}', b'{"batch": 3}', b'{"batch": "2"}', b"{", b"[]")]
        problems = find_problems(outcome(tmp_path, complete_records(), server), target=0.95)

    assert taken == [True, True, False, False, False]
    assert problems == [
        "the server has not received 1 of 3 batches",
        "the server took 2 posts for 3 batches, and refused 3",
    ]


def test_wrong_order_is_a_problem(tmp_path: Path) -> None:
    """One occasion is enough."""
    records = complete_records()
    records.orders["after_dataloader"]["mixup", "selective_backprop"] += 1

    with BatchServer() as server:
        take_three(server)
        problems = find_problems(outcome(tmp_path, records, server), target=0.95)

    assert problems == ["selective_backprop did not run before mixup on AFTER_DATALOADER"]


def test_run_that_has_logged_nothing_has_a_report_and_every_problem(tmp_path: Path) -> None:
    """As one that is interrupted before its first event."""
    with BatchServer() as server:
        nothing = outcome(tmp_path, read_records(tmp_path / "metrics.jsonl"), server)
        report, problems = format_report(nothing), find_problems(nothing, target=0.5)

    assert "not measured yet" in report
    assert "p50 nan ms" in report
    assert problems == [
        "the held-out accuracy was never measured, the target 50.0%",
        "selective_backprop did not run before mixup on AFTER_DATALOADER",
        "label_smoothing did not run before mixup on AFTER_LOSS",
        "layer_freezing has 0 kinds of log line, not 7",
    ]


def test_server_takes_posts_over_http_and_refuses_what_is_none() -> None:
    """A real request each, over one connection that stays open."""
    with BatchServer() as server, httpx.Client(trust_env=False) as client:
        statuses = [
            client.post(server.url, json={"batch": 1}).status_code,
            client.post(server.url, json={"loss": 1}).status_code,
            client.post(server.url.replace("batches", "others"), json={"batch": 2}).status_code,
            client.get(server.url).status_code,
        ]

    assert statuses == [200, 400, 400, 501]
    assert (server.posts, server.batches, server.missing(2)) == (1, {1}, 1)


@pytest.mark.parametrize(
    ("values", "rank", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.0),
        ([float(value) for value in range(1, 101)], 99, 99.0),
        ([7.0], 99, 7.0),
        ([7.0], 0, 7.0),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], rank: float, expected: float) -> None:
    """The smallest value that this part of the values does not exceed."""
    assert percentile(values, rank) == expected


@pytest.mark.anyio
async def test_heartbeat_notices_a_loop_that_is_held_up() -> None:
    """Whoever keeps the loop for 60 ms makes a beat late by that, less the interval it was waiting anyway."""
    heartbeat = Heartbeat(interval=0.005)
    async with anyio.create_task_group() as group:
        group.start_soon(heartbeat.run)
        await anyio.wait_all_tasks_blocked()
        before = len(heartbeat.lags)
        held = time.perf_counter() + 0.06
        while time.perf_counter() < held:
            pass
        while len(heartbeat.lags) == before:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()

    assert max(heartbeat.lags) >= 0.05
