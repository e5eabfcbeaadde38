"""The traces of a training run, as an exporter gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch.utils.data import DataLoader, TensorDataset

from eventbus_engine.telemetry import PrivateIdGenerator, configure
from eventbus_engine.telemetry.reports import RecordedTrace, Recording
from eventbus_engine.training import Trainer
from eventbus_engine.training.tracing import is_last

pytestmark = pytest.mark.anyio

MakeTrainer = Callable[..., Trainer]


def provider_and_exporter() -> tuple[TracerProvider, InMemorySpanExporter]:
    """A provider that keeps what it gets."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def roots(spans: tuple[ReadableSpan, ...]) -> list[str]:
    """The names of the spans without a parent, in the order of their starting."""
    found = [span for span in spans if span.parent is None]
    return [span.name for span in sorted(found, key=lambda span: span.start_time or 0)]


async def test_rule_7_3_every_batch_epoch_and_eval_is_a_trace_of_its_own(make_trainer: MakeTrainer) -> None:
    """A trace for a whole run would come too late and be too large."""
    provider, exporter = provider_and_exporter()
    trainer = make_trainer(max_duration="1ep", tracer_provider=provider)

    await trainer.fit()

    spans = exporter.get_finished_spans()
    batches = len(list(trainer.state.train_dataloader))
    names = roots(spans)
    assert names == ["run", "epoch", *["batch"] * batches, "end of data"]
    assert len({span.context.trace_id for span in spans if span.context}) == len(names)


async def test_rule_7_3_units_are_linked_to_the_run_and_say_where_they_are(make_trainer: MakeTrainer) -> None:
    """From any batch one finds the run; from the attributes, the batch."""
    provider, exporter = provider_and_exporter()
    trainer = make_trainer(max_duration="2ep", tracer_provider=provider, run_name="a-run")

    await trainer.fit()

    spans = exporter.get_finished_spans()
    (run,) = [span for span in spans if span.name == "run"]
    units = [span for span in spans if span.parent is None and span.name in ("batch", "epoch")]
    assert {link.context.span_id for span in units for link in span.links} == {
        run.context.span_id if run.context else None
    }
    places = [
        (span.attributes["train.epoch"], span.attributes["train.batch"], span.attributes["train.run.id"])
        for span in units
        if span.name == "batch" and span.attributes
    ]
    per_epoch = len(places) // 2
    assert places == [(i // per_epoch, i, "a-run") for i in range(2 * per_epoch)]


async def test_rule_7_3_run_span_is_over_before_the_first_event(make_trainer: MakeTrainer) -> None:
    """It is exported at once, so that a run that hangs can be seen."""
    provider, exporter = provider_and_exporter()
    trainer = make_trainer(max_duration="1ba", tracer_provider=provider)

    await trainer.fit()

    first, *rest = exporter.get_finished_spans()
    assert first.name == "run"
    run_id = first.context.span_id if first.context else None
    outside = [span.name for span in rest if span.parent is not None and span.parent.span_id == run_id]
    assert outside[:3] == ["dispatch init", "load", "dispatch fit_start"]


async def test_batch_trace_holds_its_sections_in_order(make_trainer: MakeTrainer) -> None:
    """Waiting for data, forward, loss, backward and the optimizer show as bars."""
    provider, exporter = provider_and_exporter()
    trainer = make_trainer(max_duration="1ba", tracer_provider=provider)

    await trainer.fit()

    spans = exporter.get_finished_spans()
    (unit,) = [span for span in spans if span.name == "batch" and span.parent is None]
    trace = [span for span in spans if span.context and unit.context and span.context.trace_id == unit.context.trace_id]
    sections = ["dataloader", "train_batch", "forward", "loss", "backward", "optimizer", "dispatch batch_checkpoint"]
    started = [s.name for s in sorted(trace, key=lambda s: s.start_time or 0) if s.name in sections]
    assert started == sections


async def test_without_a_provider_the_run_has_no_spans_and_no_trouble(make_trainer: MakeTrainer) -> None:
    """The helpers step aside."""
    trainer = make_trainer(max_duration="1ep")

    await trainer.fit()

    assert trainer.state.timestamp.epoch == 1


async def test_the_end_of_the_data_is_a_kind_of_its_own(make_trainer: MakeTrainer) -> None:
    """Who counts batches by kind counts no batch that never was."""
    provider, exporter = provider_and_exporter()
    trainer = make_trainer(max_duration="1ep", tracer_provider=provider)

    await trainer.fit()

    kinds = [(span.attributes or {})["eventbus.kind"] for span in exporter.get_finished_spans() if span.parent is None]
    assert kinds.count("batch") == len(list(trainer.state.train_dataloader))
    assert kinds.count("end of data") == 1


async def test_the_run_continues_what_launched_it(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `TRACEPARENT` in the environment; batches stay roots of their own."""
    monkeypatch.setenv("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    provider, exporter = provider_and_exporter()
    trainer = make_trainer(max_duration="1ba", tracer_provider=provider)

    await trainer.fit()

    spans = exporter.get_finished_spans()
    (run,) = [span for span in spans if span.name == "run"]
    assert run.parent is not None
    assert (run.parent.span_id, run.parent.is_remote) == (0xB7AD6B7169203331, True)
    assert run.context is not None
    assert run.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert "batch" in roots(spans)


async def test_a_recorded_run_has_the_same_traces(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Under `telemetry.configure`, the spans of a run are those of live ones: names, parents, links."""

    def shape(traces: Iterable[RecordedTrace]) -> list[tuple[str, str | None, int]]:
        found = []
        for trace in traces:
            names = {span.span_id: span.name for span in trace.spans}
            found += [(span.name, names.get(span.parent_id or ""), len(span.links)) for span in trace.spans]
        return sorted(found, key=str)

    for way in ("recorded", "live"):
        with configure(path=tmp_path / f"{way}.jsonl") as provider:
            if way == "live":
                assert isinstance(provider, TracerProvider)
                provider.add_span_processor(SpanProcessor())
            await make_trainer(max_duration="2ep").fit()

    recorded, live = (shape(Recording(tmp_path / f"{way}.jsonl").traces()) for way in ("recorded", "live"))
    assert recorded == live
    assert ("loss", "batch", 0) in recorded or ("loss", "train_batch", 0) in recorded


class Stream:
    """A loader that does not know its length."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Counted(Stream):
    """One that counts how often it is asked for its length."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return len(self.batches)


def last_units(spans: tuple[ReadableSpan, ...]) -> list[str]:
    """Those that say they are the last, with their place."""
    found = sorted(spans, key=lambda span: span.start_time or 0)
    return [
        f"{span.name} {(span.attributes or {})['train.batch']!s}"
        for span in found
        if (span.attributes or {}).get("train.last") is True
    ]


@pytest.mark.parametrize(
    ("duration", "loader", "expected"),
    [
        ("2ep", list, ["epoch 3", "batch 5", "eval 6"]),
        ("4ba", list, ["epoch 3", "batch 3"]),
        ("6ba", list, ["epoch 3", "batch 5", "eval 6"]),
        ("2ep", Stream, ["epoch 3", "eval 6"]),
        ("4ba", Stream, ["batch 3"]),
        ("36sp", list, ["eval 6"]),
    ],
)
async def test_rule_7_8_a_unit_says_that_it_is_the_last_where_that_is_known(
    make_trainer: MakeTrainer, batches: Any, duration: str, loader: Callable[[Any], Any], expected: list[str]
) -> None:
    """By the duration, and the length of the loader; the end of the data is no batch."""
    provider, exporter = provider_and_exporter()
    trainer = make_trainer(
        train_dataloader=loader(batches), eval_dataloader=batches, max_duration=duration, tracer_provider=provider
    )

    await trainer.fit()

    assert last_units(exporter.get_finished_spans()) == expected


async def test_rule_7_8_each_fit_has_a_last_batch(make_trainer: MakeTrainer) -> None:
    """A later one goes on where the one before has stopped, inside the epoch."""
    provider, exporter = provider_and_exporter()
    async with make_trainer(max_duration="4ba", tracer_provider=provider) as trainer:
        await trainer.fit()
        await trainer.fit("2ba")

    assert last_units(exporter.get_finished_spans()) == ["epoch 3", "batch 3", "epoch 4", "batch 5"]


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ({"batch_size": 6}, True),
        ({"batch_size": 6, "shuffle": True}, True),
        ({"batch_sampler": [[0, 1], [2, 3], [4, 5]]}, False),
        ({"batch_size": None}, False),
        ({"batch_size": 6, "sampler": [5, 4, 3, 2, 1, 0] * 3}, False),
    ],
)
async def test_the_length_of_a_data_loader_counts_where_asking_runs_nothing_of_the_users(
    make_trainer: MakeTrainer, batches: Any, arguments: dict[str, Any], known: bool
) -> None:
    """Samplers of one's own may draw random numbers to find out theirs."""
    data = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    if "batch_size" in arguments and arguments["batch_size"] is None:
        data = batches
    provider, exporter = provider_and_exporter()

    await make_trainer(
        train_dataloader=DataLoader(data, **arguments), max_duration="1ep", tracer_provider=provider
    ).fit()

    assert last_units(exporter.get_finished_spans()) == ["epoch 0", "batch 2"][: 1 + known]


async def test_tracing_asks_no_loader_of_the_users_for_its_length(make_trainer: MakeTrainer, batches: Any) -> None:
    """It would run code that the run without tracing does not."""
    asked = []
    for provider in (None, provider_and_exporter()[0]):
        loader = Counted(batches)
        await make_trainer(train_dataloader=loader, max_duration="4ba", tracer_provider=provider).fit()
        asked.append(loader.asked)

    assert asked[0] == asked[1]


async def test_a_duration_that_is_not_known_says_nothing(make_trainer: MakeTrainer) -> None:
    """Of a state of one's own, say; and nothing else goes wrong."""
    state = make_trainer().state
    state.max_duration = None

    assert not is_last("batch", state)


async def test_rule_7_8_first_every_nth_and_last(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """One head decision for a root: of six batches, the first, every fourth that was asked for, the last."""
    with configure(path=tmp_path / "spans.jsonl", sample_every=4):
        await make_trainer(max_duration="6ba").fit()

    found = [span for trace in Recording(tmp_path / "spans.jsonl").traces() for span in trace.spans]
    roots = [span.attributes["train.batch"] for span in found if span.name == "batch" and not span.parent_id]
    assert sorted(roots) == [0, 3, 5]
