"""The store against a plain list: a state machine of everything that can be done with it."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eventbus_engine.spool import Record, Spool
from eventbus_engine.spool.records import split

MAX_BYTES = 2**20
MAX_AGE = 100
QUEUES = ["a", "b"]


class Model(RuleBasedStateMachine):
    """What the queues hold is what was appended, less what was acknowledged and less what the bounds dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "spool"
        self.now = 0
        self.made = 0
        self.kept: list[tuple[str, Record]] = []
        self.aged: Counter[str] = Counter()
        self.sized: Counter[str] = Counter()
        self.begun: set[str] = set()
        self.spool = self.open()

    def open(self) -> Spool:
        """As every process does."""
        return Spool(self.path, max_bytes=MAX_BYTES, max_age=MAX_AGE * 1e-9, clock=lambda: self.now)

    def teardown(self) -> None:
        """Whatever it came to."""
        self.spool.close()
        shutil.rmtree(self.folder)

    def drop_aged(self) -> None:
        """What comes before every append and peek."""
        aged = [name for name, record in self.kept if record.time < self.now - MAX_AGE]
        self.aged.update(aged)
        self.kept = [(name, record) for name, record in self.kept if record.time >= self.now - MAX_AGE]

    @rule(
        queue=st.sampled_from(QUEUES),
        sizes=st.lists(st.sampled_from([0, 1, 100, 4100, 30_000, 60_000]), max_size=8),
        times=st.integers(1, 4),
        late=st.integers(0, 120),
    )
    def append(self, queue: str, sizes: list[int], times: int, late: int) -> None:
        """Records of many sizes, some of them late. What has to go for them is the oldest, of whatever queue.

        A batch that was begun goes last.
        """
        sizes = sizes * times
        records = [Record(f"{self.made + n}", self.now - late, bytes(size)) for n, size in enumerate(sizes)]
        self.made += len(records)
        # One transaction each, since room for the next one may cost what the last one has stored.
        for part in split(records, self.spool.max_record_bytes):
            assert self.spool.append(queue, part) == len(part)
            self.drop_aged()
            lost = Counter({name: self.spool.stats(name).lost_to_size for name in QUEUES})
            order = sorted(self.kept, key=lambda kept: kept[1].id in self.begun)  # which leaves the rest as it is
            gone = order[: (lost - self.sized).total()]
            assert Counter(name for name, _ in gone) == lost - self.sized
            self.kept = [kept for kept in self.kept if kept not in gone] + [(queue, record) for record in part]
            self.sized = lost

    @rule(queue=st.sampled_from(QUEUES), limit=st.integers(1, 20), skip=st.integers(0, 3))
    def peek(self, queue: str, limit: int, skip: int) -> None:
        """The first of the queue, or those after some number."""
        found = self.spool.peek(queue, limit)
        self.drop_aged()
        expected = [record for name, record in self.kept if name == queue]
        assert [record._replace(number=0) for record in found] == expected[:limit]
        if skip < len(found):
            later = self.spool.peek(queue, limit, found[skip].number)
            assert [record._replace(number=0) for record in later] == expected[skip + 1 :][:limit]

    @rule(queue=st.sampled_from(QUEUES), limit=st.integers(1, 20))
    def next_batch(self, queue: str, limit: int) -> None:
        """What is left of the batch that was begun; if nothing, the first of the queue, which are one from then on."""
        found = self.spool.next_batch(queue, limit)
        self.drop_aged()
        mine = [record for name, record in self.kept if name == queue]
        begun = [record for record in mine if record.id in self.begun]
        assert [record._replace(number=0) for record in found] == (begun or mine[:limit])
        self.begun.update(record.id for record in found)

    @rule(queue=st.sampled_from(QUEUES), limit=st.integers(1, 20))
    def ack(self, queue: str, limit: int) -> None:
        """Some from the front."""
        self.peek(queue, limit, skip=limit)
        found = self.spool.peek(queue, limit)
        assert self.spool.ack(queue, found[-1].number if found else 0) == len(found)
        acknowledged = {record.id for record in found}
        self.kept = [(name, record) for name, record in self.kept if record.id not in acknowledged]

    @rule(nanoseconds=st.integers(1, 60))
    def wait(self, nanoseconds: int) -> None:
        """Time goes by."""
        self.now += nanoseconds

    @rule()
    def reopen(self) -> None:
        """The next process, after a clean end."""
        self.spool.close()
        self.spool = self.open()

    @rule()
    def crash(self) -> None:
        """The next process, after one that died: it finds the files as they are at this moment."""
        crashed = self.folder / "crashed"
        crashed.mkdir()
        for suffix in ("", "-wal"):  # the marks are written in place, and stay where they are
            shutil.copy(f"{self.path}{suffix}", crashed / f"spool{suffix}")
        self.spool.close()
        for suffix in ("", "-wal"):
            (crashed / f"spool{suffix}").replace(f"{self.path}{suffix}")
        crashed.rmdir()
        self.spool = self.open()

    @invariant()
    def bounds_and_counts_hold(self) -> None:
        """At every step."""
        assert self.spool.size <= MAX_BYTES
        for name in QUEUES:
            mine = [record for queue, record in self.kept if queue == name]
            stats = self.spool.stats(name)
            assert (stats.pending, stats.size) == (len(mine), sum(len(record.data) for record in mine))
            assert stats.oldest == min((record.time for record in mine), default=None)
            assert (stats.lost_to_size, stats.lost_to_age) == (self.sized[name], self.aged[name])


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30)
