"""Processes that are seeded alike, and their forked children, share no trace id and no span id."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eventbus_engine.telemetry.reports import RecordedSpan

RANK = """
import multiprocessing, os, random, sys
import anyio
from opentelemetry import trace
from eventbus_engine import Algorithm, Engine, Event, telemetry

folder, launcher = sys.argv[1:]
rank = os.environ["RANK"]
if launcher == "torchrun":
    import torch, torch.distributed as distributed
    torch.manual_seed(42)
    distributed.init_process_group("gloo")
random.seed(42)

class Step(Algorithm):
    def match(self, event, state):
        return True
    def apply(self, event, state, logger):
        trace.get_tracer("user").start_span("own").end()  # a span of the SDK's

async def dispatch():
    engine = Engine(algorithms=[Step()])
    for _ in range(25):
        await engine.run_event(Event.BATCH_END)

def work(provider):
    random.seed(42)
    anyio.run(dispatch)
    assert provider.force_flush(10_000)

with telemetry.configure(path=f"{folder}/rank{rank}.jsonl") as provider:
    anyio.run(dispatch)
    worker = multiprocessing.get_context("fork").Process(target=work, args=(provider,))
    worker.start()
    anyio.run(dispatch)
    worker.join()
    assert worker.exitcode == 0, worker.exitcode
if launcher == "torchrun":
    distributed.barrier()
    distributed.destroy_process_group()
"""

# In each of the processes: 25 events before the fork, 25 after it in parent and child, of three spans each.
SPANS = 3 * 25 * 3

SpansIn = Callable[[Path], list[RecordedSpan]]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def assert_no_id_is_shared(spans_in: SpansIn, folder: Path) -> None:
    """Every span of every process is there, under an id of its own, in 75 traces a rank."""
    ranks = [spans_in(folder / f"rank{rank}.jsonl") for rank in (0, 1)]
    spans = [span for rank in ranks for span in rank]
    traces = [{span.trace_id for span in rank} for rank in ranks]

    assert [len(rank) for rank in ranks] == [SPANS, SPANS]
    assert len({span.span_id for span in spans}) == 2 * SPANS
    assert [len(ids) for ids in traces] == [75, 75]
    assert traces[0].isdisjoint(traces[1])


def test_two_seeded_ranks_and_a_forked_worker_of_each_share_no_id(
    start: Callable[..., subprocess.Popen[str]], spans_in: SpansIn, tmp_path: Path
) -> None:
    """As plain processes, whatever started them."""
    ranks = [start(RANK, tmp_path, "plain", RANK=rank, WORLD_SIZE="2") for rank in "01"]
    logged = [rank.communicate(timeout=60)[1] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], logged
    assert_no_id_is_shared(spans_in, tmp_path)


def test_two_ranks_of_torchrun_share_no_id(environment: dict[str, str], spans_in: SpansIn, tmp_path: Path) -> None:
    """The same under torchrun, in a gloo group."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, program, str(tmp_path), "torchrun"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    assert_no_id_is_shared(spans_in, tmp_path)
