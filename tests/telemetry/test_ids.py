"""The id generator: private, never zero, new in every process."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

from eventbus_engine.telemetry.ids import PrivateIdGenerator


def test_ids_are_drawn_without_the_global_generator() -> None:
    """Switching tracing on changes no number the program draws."""
    before = random.getstate()
    generator = PrivateIdGenerator()
    for _ in range(100):
        generator.generate_span_id()
        generator.generate_trace_id()

    assert random.getstate() == before


def test_processes_seeded_alike_have_ids_of_their_own() -> None:
    """Two generators made after the same global seed share no id."""
    random.seed(0)
    first = PrivateIdGenerator()
    random.seed(0)
    second = PrivateIdGenerator()
    ids = {generator.generate_trace_id() for generator in (first, second) for _ in range(100)}

    assert len(ids) == 200


def test_ids_use_the_whole_width_and_are_never_zero() -> None:
    """64 and 128 bits, every bit of them in use, and a drawn zero, which means "no id", is drawn again."""
    generator = PrivateIdGenerator()
    span_bits = trace_bits = 0
    for _ in range(200):
        span_bits |= generator.generate_span_id()
        trace_bits |= generator.generate_trace_id()
    drawn = iter([0, 0, 7])
    generator._random.getrandbits = lambda bits: next(drawn)  # type: ignore[method-assign]

    assert (span_bits, trace_bits) == (2**64 - 1, 2**128 - 1)
    assert generator.generate_span_id() == 7
    assert generator.is_trace_id_random()


def test_threads_share_a_generator_without_sharing_ids() -> None:
    """Concurrent draws give distinct ids."""
    generator = PrivateIdGenerator()
    ids: list[int] = []
    start = threading.Barrier(4)

    def draw() -> None:
        start.wait()
        ids.extend(generator.generate_span_id() for _ in range(500))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(ids)) == 2000


def test_a_forked_child_does_not_repeat_its_parent() -> None:
    """Parent and children of a fork go on with ids that differ."""
    program = """
import os
from eventbus_engine.telemetry.ids import PrivateIdGenerator
generator = PrivateIdGenerator()
generator.generate_trace_id()
for _ in range(2):
    if os.fork() == 0:
        os.write(1, b"%x\\n" % generator.generate_trace_id())
        os._exit(0)
    os.wait()
os.write(1, b"%x\\n" % generator.generate_trace_id())
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert len(set(printed.stdout.split())) == 3
