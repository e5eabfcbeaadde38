"""The numbers of a run: what ran, how often, how long, and what part of the step that was."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from eventbus_engine import Callback, Engine, Event
from eventbus_engine.telemetry.reports import RecordedSpan, Recording, format_summary, summarize
from eventbus_engine.telemetry.reports.summary import Participant, Summary
from eventbus_engine.training import Trainer

Json = dict[str, Any]


def summary_of(path: Path) -> Summary:
    """The summary of a file."""
    return summarize(Recording(path).traces())


def by_name(summary: Summary) -> dict[str, Participant]:
    """The participants by their names."""
    return {one.name: one for one in summary.participants}


def all_spans(path: Path) -> list[RecordedSpan]:
    """The spans of all traces."""
    return [span for trace in Recording(path).traces() for span in trace.spans]


def test_runs_skips_and_failures_are_those_of_the_engine(recorded: Path) -> None:
    """Two algorithms ran on both halves and not on BATCH_END, one never; a callback failed."""
    summary = summary_of(recorded)

    actual = [(one.kind, one.name, one.runs, one.skips, one.failures) for one in summary.participants]

    assert sorted(actual) == [
        ("algorithm", "idle", 0, 3, 0),
        ("algorithm", "mixing", 2, 1, 0),
        ("algorithm", "smoothing", 2, 1, 0),
        ("callback", "fragile", 1, 0, 1),
        ("callback", "one", 1, 0, 0),
        ("callback", "remote", 1, 0, 0),
        ("callback", "two", 1, 0, 0),
    ]
    assert (summary.dispatches, summary.steps) == (3, 0)
    assert summary.spans == len(all_spans(recorded))


def test_times_are_those_of_the_spans(recorded: Path) -> None:
    """Totals, the slowest and the shares add up from what the file says."""
    summary = summary_of(recorded)
    spans = all_spans(recorded)
    theirs = [span for span in spans if span.name == "algorithm mixing"]
    dispatches = [span.duration_ns for span in spans if span.name.startswith("dispatch ")]
    mixing = by_name(summary)["mixing"]

    assert mixing.total_ns == sum(span.duration_ns for span in theirs)
    assert mixing.slowest is not None
    assert mixing.slowest.duration_ns == max(span.duration_ns for span in theirs)
    assert mixing.slowest.event in ("before_loss", "after_loss")
    assert summary.share(mixing) == mixing.total_ns / sum(dispatches)


def test_participants_come_by_kind_then_by_what_they_took(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """What costs most is what one looks for."""

    def ran(number: int, kind: str, name: str, end: int) -> Json:
        return span(number, at=(0, end), name=f"{kind} {name}", attributes={"eventbus.kind": kind})

    summary = summary_of(write([ran(1, "callback", "c", 9), ran(2, "algorithm", "b", 5), ran(3, "algorithm", "a", 7)]))

    assert [one.name for one in summary.participants] == ["a", "b", "c"]


def test_what_outlasts_its_dispatch_has_no_share_for_that(record: Callable[..., Path]) -> None:
    """An event does not wait for a background callback; this one waits for the event to be over."""
    over = anyio.Event()

    class Remote(Callback):
        name = "remote"
        delivery = "background"

        async def batch_end(self, state: Any, logger: Any) -> None:
            await over.wait()

    async def main() -> None:
        async with Engine(callbacks=[Remote()]) as engine:
            await engine.run_event(Event.BATCH_END)
            over.set()

    path = record(main)
    (remote,) = summary_of(path).participants
    dispatch, ran = sorted(all_spans(path), key=lambda span: span.name, reverse=True)

    assert remote.runs == 1
    assert ran.end_ns > dispatch.end_ns
    assert remote.total_ns == ran.duration_ns
    assert remote.waited_ns == max(0, dispatch.end_ns - ran.start_ns)


def test_nested_dispatches_count_once(record: Callable[..., Path]) -> None:
    """A share of more than the whole would be none."""

    class Outer(Callback):
        name = "outer"

        async def batch_start(self, state: Any, logger: Any) -> None:
            await engine.run_event(Event.BEFORE_LOSS)

    engine = Engine(callbacks=[Outer()])

    async def main() -> None:
        await engine.run_event(Event.BATCH_START)

    path = record(main)
    summary = summary_of(path)
    (outermost,) = (span for span in all_spans(path) if span.name == "dispatch batch_start")

    assert summary.dispatches == 2
    assert summary.dispatch_ns == outermost.duration_ns
    assert 0 < summary.share(by_name(summary)["outer"]) <= 1


def test_in_training_shares_are_of_the_batches_and_the_slowest_has_its_place(record: Callable[..., Path]) -> None:
    """Of the four batches, whatever else the run did; epoch and batch come from the root of the trace."""

    class Watch(Callback):
        name = "watch"

        def batch_end(self, state: Any, logger: Any) -> None: ...

        def batch_checkpoint(self, state: Any, logger: Any) -> None: ...

        def fit_end(self, state: Any, logger: Any) -> None: ...

    async def main() -> None:
        data = [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))] * 2
        model = nn.Linear(4, 3)
        trainer = Trainer(
            model,
            data,
            loss=functional.cross_entropy,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="2ep",
            callbacks=[Watch()],
        )
        await trainer.fit()

    path = record(main)
    summary = summary_of(path)
    spans = all_spans(path)
    batches = [span for span in spans if span.name == "batch" and not span.parent_id]
    inside = [
        span.duration_ns
        for span in spans
        if span.name == "callback watch" and span.attributes["eventbus.event"] == "batch_end"
    ]
    (watch,) = summary.participants

    assert summary.steps == len(batches) == 4
    assert summary.steps_ns == sum(batch.duration_ns for batch in batches)
    assert watch.runs == 9
    # BATCH_CHECKPOINT belongs to the batch and comes after it, so the step does not contain it.
    assert summary.share(watch) == pytest.approx(sum(inside) / summary.steps_ns)
    assert "4 steps of" in format_summary(summary)


def test_the_slowest_run_of_a_batch_says_which_batch(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """The nearest span around it that knows says where; the later of two equals is no slower."""
    place = {"train.epoch": {"intValue": "2"}, "train.batch": {"intValue": "117"}}
    path = write(
        [
            span(3, 2, (200, 900), name="algorithm a", attributes={"eventbus.kind": "algorithm"}),
            span(4, 2, (900, 1_600), name="algorithm a", attributes={"eventbus.kind": "algorithm"}),
            span(2, 1, (100, 2_000), name="dispatch x", attributes={"eventbus.kind": "dispatch"}),
            span(1, 0, (0, 4_000), name="batch", attributes={"eventbus.kind": "batch", **place}),
        ]
    )
    summary = summary_of(path)
    (participant,) = summary.participants

    assert participant.slowest is not None
    assert participant.slowest.where == "epoch 2, batch 117"
    assert participant.slowest.duration_ns == 700
    assert summary.share(participant) == 0.35


@given(st.lists(st.integers(0, 10**12), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[int], rank: float) -> None:
    """Nearest rank: always one of the values, with enough of them at or below and too few below."""
    participant = Participant("algorithm", "a")
    participant.durations_ns.extend(values)

    (actual,) = participant.percentiles_ns(rank)

    assert actual in values
    assert sum(value <= actual for value in values) >= rank * len(values) / 100 - 1e-9
    assert sum(value < actual for value in values) < rank * len(values) / 100 + 1e-9


def test_the_table_has_a_line_for_each_and_its_columns_in_line(recorded: Path) -> None:
    """What has not run shows dashes; callbacks are not asked whether they match, so have no skips."""
    lines = format_summary(summary_of(recorded)).splitlines()

    assert lines[1] == "no batches of a training run; shares are of the dispatches"
    tables = [line for line in lines[2:] if line]
    cells = {line.split()[0]: line.split() for line in tables}
    assert cells["algorithm"][:7] == ["algorithm", "runs", "skips", "failed", "p50", "ms", "p99"]
    assert cells["idle"] == ["idle", "0", "3", "-", "-", "-", "-", "-", "-"]
    assert cells["mixing"][:4] == ["mixing", "2", "1", "0"]
    assert cells["fragile"][:4] == ["fragile", "1", "-", "1"]
    heading, *rows = lines[3:7]
    assert {row.index(row.split()[1]) + len(row.split()[1]) for row in rows} == {heading.index("runs") + len("runs")}


def test_foreign_spans_and_odd_values_are_counted_and_left_alone(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """A user's own span has no kind; another program may mean something else by an attribute."""
    path = write(
        [
            span(1, name="fetch"),
            span(2, at=(0, 0), attributes={"eventbus.kind": "dispatch", "eventbus.skipped": "all"}),
            span(3, at=(0, 0), name="callback c", attributes={"eventbus.kind": "callback"}),
        ]
    )
    summary = summary_of(path)
    (participant,) = summary.participants

    assert (summary.spans, summary.dispatches, participant.failures) == (3, 1, 0)
    assert math.isnan(summary.share(participant))
    assert format_summary(summary).splitlines()[-1].split()[-3:] == ["-", "0.000", "1970-01-01T00:00:00.000Z"]


def test_an_empty_recording_has_a_summary_too(tmp_path: Path) -> None:
    """Nothing ran, and that is what it says."""
    (tmp_path / "spans.jsonl").touch()

    actual = format_summary(summary_of(tmp_path))

    assert actual.splitlines()[0] == "0 spans in 0 traces, 0 dispatches"


def test_failures_are_all_that_did_not_end_well(record: Callable[..., Path]) -> None:
    """A timeout counts as one; a success does not."""

    class Slow(Callback):
        name = "slow"
        timeout = 0.01
        on_error = "log"

        async def batch_end(self, state: Any, logger: Any) -> None:
            if not state:
                await anyio.sleep_forever()

    engine = Engine(callbacks=[Slow()])

    async def main() -> None:
        await engine.run_event(Event.BATCH_END, [])
        await engine.run_event(Event.BATCH_END, ["a record"])

    (participant,) = summary_of(record(main)).participants

    assert (participant.runs, participant.failures) == (2, 1)
