"""Two ranks that torchrun has started train as one: `job.py` runs once, and each test reads what its ranks saw."""

from __future__ import annotations

import gzip
import json
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from torch.nn import functional

from eventbus_engine.testing import FlakyEndpoint
from eventbus_engine.training import Trainer

JOB = Path(__file__).parent / "job.py"

Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def job(start_job: Callable[..., subprocess.Popen[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks saw, by scenario, one entry for each rank; and the spans that a receiver got of them."""
    folder = tmp_path_factory.mktemp("job")
    with FlakyEndpoint() as endpoint:
        process = start_job(JOB, str(folder), variables={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint.url})
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output
        bodies = [request.body for request in endpoint.requests if request.path.endswith("/v1/traces")]
    seen = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    facts: dict[str, Any] = {name: [rank[name] for rank in seen] for name in seen[0]}
    return {**facts, "spans": spans_in(bodies), "output": output}


def spans_in(bodies: list[bytes]) -> list[Span]:
    """The spans of OTLP requests."""
    spans: list[Span] = []
    for body in bodies:
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)
        spans += [span for r in request.resource_spans for s in r.scope_spans for span in s.spans]
    return spans


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """The names of the job's program, to train on one rank what it trains on two."""
    return runpy.run_path(str(JOB))


@pytest.fixture(scope="module")
def alone(program: dict[str, Any]) -> dict[str, Any]:
    """What one rank sees with twice the batch."""
    watch = program["Watch"]()
    trainer: Trainer = program["curve"](16, watch)
    anyio.run(trainer.fit)
    facts: dict[str, Any] = program["told"](trainer, watch)
    return facts


@pytest.mark.parametrize("way", ["ddp", "fsdp", "inline"])
def test_two_ranks_give_the_losses_of_one_with_twice_the_batch(
    job: dict[str, Any], alone: dict[str, Any], way: str
) -> None:
    """To rounding, with layers that freeze underway, clipped gradients and microbatches; on both ranks alike."""
    first, second = job[way]

    assert first["frozen"] == second["frozen"] == alone["frozen"] > 0
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert first["timestamp"] == second["timestamp"] == alone["timestamp"] == [4, 16, 256]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_evaluation_counts_every_sample_once(job: dict[str, Any], alone: dict[str, Any], way: str) -> None:
    """Of 21 samples: the loss, what torchmetrics adds up by itself, and a metric that knows of no ranks."""
    first, second = job[way]

    assert first["metrics"] == second["metrics"]
    assert len(first["metrics"]) == 4
    for ours, expected in zip(first["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_rule_6_3_only_the_training_thread_issues_collectives(job: dict[str, Any], way: str) -> None:
    """Two threads would issue them in two orders, and the ranks wait for each other forever."""
    expected = {
        "ddp": {"all_gather", "all_reduce", "broadcast", "gradients"},
        "fsdp": {"all_gather_single", "all_reduce", "broadcast", "reduce_scatter_single"},
    }[way]
    for rank in job[way]:
        assert rank["threads"] == ["eventbus-engine-compute"]
        assert {*expected, "init_process_group", "destroy_process_group"} <= {*rank["collectives"]}


def test_the_model_stays_the_users_own_and_ddp_is_what_is_called(job: dict[str, Any]) -> None:
    """So its parameters keep their names; and both ranks have the same."""
    first, second = job["ddp"]

    assert (first["raw"], first["runner"]) == ("Sequential", "DistributedDataParallel")
    assert first["weights"] == second["weights"]


def test_fsdp_leaves_each_rank_a_part_of_each_parameter(job: dict[str, Any]) -> None:
    """The optimizer, made before, steps those parts: the losses fall as those of one rank."""
    first, second = job["fsdp"]

    assert first["parts"] == [[4, 4], [4], [4, 8], [4], [4, 8], [4], [2, 8], [2]]
    assert second["parts"] == [[4, 4], [4], [4, 8], [4], [4, 8], [4], [1, 8], [1]]


def test_state_of_an_optimizer_from_before_is_cut_up_with_its_parameters(job: dict[str, Any]) -> None:
    """Adam goes on with its moments, as it does where nothing is cut up."""
    for rank in job["moved_state"]:
        whole, parts = rank["losses"]
        assert parts == pytest.approx(whole, rel=1e-5)


def test_compilation_goes_along(job: dict[str, Any], alone: dict[str, Any]) -> None:
    """DDP, or the model that is cut up, is compiled."""
    for rank in job["compiled"]:
        assert rank["ddp"] == pytest.approx(alone["losses"][:4], rel=1e-4)
        assert rank["fsdp"] == pytest.approx(alone["losses"][:4], rel=1e-4)


def test_the_group_made_by_a_trainer_is_taken_down_and_one_of_the_users_left(job: dict[str, Any]) -> None:
    """Whoever has made it, knows what it is for."""
    assert [rank["left"] for rank in (*job["ddp"], *job["fsdp"])] == [True] * 4
    assert [rank["there"] for rank in job["own_group"]] == [True, True]


def test_ranks_are_called_alike_and_keep_one_time(job: dict[str, Any]) -> None:
    """By rank 0's name of the run; what is due by the clock is due everywhere."""
    first, second = job["ddp"]

    assert (first["rank"], second["rank"], first["world_size"]) == (0, 1, 2)
    assert first["run_name"] == second["run_name"] == "run of rank 0"
    assert first["seconds"] == second["seconds"]


def test_one_rank_stops_all_and_no_batch_is_lost(job: dict[str, Any]) -> None:
    """After a batch on either rank, and after an epoch; the next fit goes on with the batch that was fetched."""
    for rank in job["stopped"]:
        whole, stopped = rank["samples"]
        assert rank["ends"] == [2, 5, 8, 16]
        assert stopped == whole


def test_the_batch_that_was_fetched_is_not_lost_to_a_run_that_resumes(job: dict[str, Any]) -> None:
    """A checkpoint is at the batches that were trained on."""
    for rank in job["held"]:
        assert rank["cut"] == rank["whole"]


def test_a_rank_without_data_takes_the_others_along(job: dict[str, Any], program: dict[str, Any]) -> None:
    """The epoch ends for all, and batches of different size count by their samples: as the samples of one batch."""
    sizes = program["cut"]([5, 3, 2, 6, 4, 4])
    together = [tuple(map(torch.cat, zip(*sizes[i : i + 2], strict=True))) for i in range(0, 6, 2)]
    model, watch = program["new_model"](), program["Watch"]()
    trainer = Trainer(
        model,
        together,
        loss=functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        callbacks=[watch],
    )
    anyio.run(trainer.fit)

    for rank in job["uneven"]:
        for kind in ("Stream", "AsyncStream"):
            assert rank[kind]["timestamp"] == [2, 6, 48]
            assert rank[kind]["losses"] == pytest.approx(watch.losses, rel=1e-4)
    assert "rank 0 has data left in epoch 0, but another rank has none" in job["output"]


def test_algorithms_run_on_a_model_that_is_cut_up(job: dict[str, Any]) -> None:
    """In bfloat16, with tied weights, an evaluation of 3 batches on one rank and 2 on the other, and a prediction."""
    first, second = job["algorithms"]

    assert first["timestamp"] == [2, 8, 128]
    assert first["losses"] == second["losses"]
    assert len(first["metrics"]) == 2
    assert first["metrics"] == second["metrics"]
    assert (first["predictions"], second["predictions"]) == (1, 2)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_all_ranks_evaluate_one_model_and_draw_their_own_random_numbers(job: dict[str, Any], way: str) -> None:
    """Running statistics are rank 0's; augmentations and dropout must not repeat each other."""
    first, second = (rank[way] for rank in job["statistics"])

    assert first["outputs"] == second["outputs"]
    assert all(a != b for a, b in zip(first["drawn"], second["drawn"], strict=True))


def test_rank_0_speaks_and_others_only_where_asked_to(job: dict[str, Any]) -> None:
    """The loss that is logged is that of all ranks."""
    first, second = job["destinations"]

    assert first["memory"] == first["every"] == second["every"] == pytest.approx(first["losses"], rel=1e-6)
    assert second["memory"] == []
    assert len(first["memory"]) == 2


def attributes(span: Span) -> dict[str, Any]:
    """Those of its attributes that the tests look at, as plain values."""
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


def test_rule_7_3_the_ranks_of_a_run_make_one_trace_and_their_batches_are_linked_to_it(job: dict[str, Any]) -> None:
    """At a real receiver: rank 0's run is the parent of the others', and what every unit of work is linked to."""
    (name,) = {rank["run_name"] for rank in job["traced"]}
    spans = [span for span in job["spans"] if attributes(span).get("train.run.id") == name]
    runs = {attributes(span)["train.rank"]: span for span in spans if span.name == "run"}
    units = [span for span in spans if span.name in ("batch", "epoch", "eval")]

    assert runs.keys() == {0, 1}
    assert (runs[0].parent_span_id, runs[1].parent_span_id) == (b"", runs[0].span_id)
    assert runs[0].trace_id == runs[1].trace_id
    assert {(attributes(unit)["train.rank"], unit.name, len(unit.links)) for unit in units} == {
        (rank, kind, 1) for rank in (0, 1) for kind in ("batch", "epoch")
    }
    assert {(link.trace_id, link.span_id) for unit in units for link in unit.links} == {
        (runs[0].trace_id, runs[0].span_id)
    }


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("sampler", "train_dataloader is a DataLoader with a RandomSampler, which would give all 2 ranks the same"),
        ("eval sampler", "the dataloader of evaluator 'eval' is a DataLoader with a SequentialSampler"),
        ("create_graph", "GradientPenalty differentiates the gradients, which torch averages over ranks only as they"),
        ("lengths", "the train_dataloaders of ranks 0 to 1 have epochs of 2, 3 batches; give each as many"),
        ("model", "the model of rank 1 has other parameters or buffers than that of rank 0"),
        ("optimizers", "SGD steps a parameter of shape (8, 4) that is not in the model"),
        ("microbatches", "the batches of the ranks are cut into 4, 3 microbatches"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_on_all_alike(job: dict[str, Any], what: str, told: str) -> None:
    """With the way out, and none of them left waiting."""
    for rank in job["refused"]:
        assert told in rank[what]
