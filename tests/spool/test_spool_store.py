"""The store: what is in it, in which order, within which bounds, and what it says when something is wrong."""

from __future__ import annotations

import random
import re
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventbus_engine import (
    ConfigurationError,
    SpoolCorruptError,
    SpoolError,
    SpoolInUseError,
    SpoolRecordError,
)
from eventbus_engine.spool import QueueStats, Record, Spool
from eventbus_engine.spool.marks import Mark

Make = Callable[..., list[Record]]
MIB = 2**20


def ids(records: list[Record]) -> list[str]:
    """What they are."""
    return [record.id for record in records]


def test_records_come_back_as_they_went_in_and_in_order(path: Path, make: Make) -> None:
    """Every queue for itself, each record with its id, time and data, numbered in the order of the spool."""
    with Spool(path) as spool:
        assert spool.append("a", make(2)) == 2
        assert spool.append("b", iter(make(1, 2))) == 1
        assert spool.append("a", make(1, 3)) == 1
        assert spool.append("a", []) == 0

        assert spool.peek("a") == [
            record._replace(number=n) for record, n in zip([*make(2), *make(1, 3)], (1, 2, 4), strict=True)
        ]
        assert ids(spool.peek("a", 2)) == ["id0", "id1"]
        assert ids(spool.peek("a", after=2)) == ["id3"]
        assert ids(spool.peek("b")) == ["id2"]
        assert spool.peek("c") == []
        assert spool.queues() == ["a", "b"]


def test_only_what_is_acknowledged_goes(path: Path, make: Make) -> None:
    """Of its own queue alone, up to and including the number, and however often it is acknowledged."""
    with Spool(path) as spool:
        spool.append("a", make(3))
        spool.append("b", make(1, 3))

        assert spool.ack("a", 2) == 2
        assert spool.ack("a", 2) == 0
        assert spool.ack("b", 3) == 0
        assert spool.ack("c", 99) == 0
        assert ids(spool.peek("a")) == ["id2"]
        assert ids(spool.peek("b")) == ["id3"]


def test_another_spool_on_the_file_goes_on_where_the_first_ended(path: Path, make: Make) -> None:
    """Numbers are never used again, not even once the queue has been emptied in between."""
    with Spool(path) as spool:
        spool.append("a", make(3))
        spool.ack("a", 3)
    with Spool(path) as spool:
        spool.append("a", make(1, 3))
        assert [record.number for record in spool.peek("a")] == [4]
        assert spool.stats("a") == QueueStats(pending=1, size=20, oldest=1003)
    assert sorted(file.name for file in path.parent.iterdir()) == [
        path.name,
        f"{path.name}.lock",
        f"{path.name}.marks",
    ]


def test_an_acknowledgement_of_very_many_is_one_call(path: Path, make: Make) -> None:
    """It is cut into transactions inside. A spool that is empty gives its space back."""
    with Spool(path, max_bytes=4 * MIB) as spool:
        spool.append("a", make(10_000, size=100))
        full = spool.size

        assert spool.ack("a", 9_000) == 9_000
        assert ids(spool.peek("a", 1)) == ["id9000"]
        assert spool.ack("a", 10_000) == 1_000
        assert full > MIB
        assert spool.size < full / 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_bytes", [MIB, 3 * MIB + 17])
def test_the_files_never_take_more_than_max_bytes(path: Path, max_bytes: int, seed: int) -> None:
    """The log included, at any moment, whatever the sizes of the records; what had to go is counted."""
    draw = random.Random(seed)
    clock = [0]
    appended = acknowledged = 0
    with Spool(path, max_bytes=max_bytes, max_age=1e-6, clock=lambda: clock[0]) as spool:
        limit = spool.max_record_bytes - 200
        kinds: list[Callable[[], int]] = [
            lambda: draw.randrange(100),
            lambda: draw.randrange(4000, 4400),
            lambda: limit,
            lambda: draw.randrange(limit),
        ]
        largest = 0
        for _ in range(60):
            kind = draw.choice(kinds)
            count = draw.choice([1, 1, 7, 300 if kind in kinds[:2] else 20])
            records = [Record(f"{n}", clock[0], bytes(kind())) for n in range(count)]
            appended += spool.append(draw.choice("abc"), records)
            largest = max(largest, spool.size)
            clock[0] += draw.choice([0, 1, 1, 300])
            if draw.random() < 0.2:
                queue = draw.choice("abc")
                numbers = [record.number for record in spool.peek(queue, 30)]
                acknowledged += spool.ack(queue, max(numbers, default=0))
                largest = max(largest, spool.size)
        stats = [spool.stats(queue) for queue in "abc"]

    assert max_bytes / 3 < largest <= max_bytes
    assert sum(s.lost_to_size for s in stats) > 0
    assert sum(s.pending + s.lost for s in stats) == appended - acknowledged


def test_what_is_dropped_for_size_is_the_oldest_and_is_counted(path: Path, make: Make) -> None:
    """Whatever queue it is in; and the count is still there in the next process."""
    with Spool(path, max_bytes=MIB) as spool:
        spool.append("old", make(20, size=1000))
        for first in range(0, 2_000, 100):
            spool.append("new", make(100, first, size=1000))
        left = ids(spool.peek("new", 2_000))
        assert spool.peek("old") == []
        assert spool.stats("old").lost_to_size == 20
        assert left == [f"id{n}" for n in range(2_000 - len(left), 2_000)]
        assert 200 < len(left) < 400
    with Spool(path, max_bytes=MIB) as spool:
        assert spool.stats("old") == QueueStats(lost_to_size=20)
        assert spool.stats("new").lost == 2_000 - len(left)


def test_the_batch_on_its_way_is_dropped_last(path: Path, make: Make) -> None:
    """It may arrive at any moment, and would count as lost all the same; what is behind it has not been sent."""
    with Spool(path, max_bytes=MIB) as spool:
        spool.append("a", make(10, size=1000))
        spool.append("b", make(10, size=1000))
        batch = spool.next_batch("a", 5)
        for first in range(10, 2_010, 100):
            spool.append("b", make(100, first, size=1000))
        left = ids(spool.peek("b", 2_000))

        assert spool.next_batch("a", 5) == batch
        assert ids(spool.peek("a")) == ["id0", "id1", "id2", "id3", "id4"]
        assert spool.stats("a").lost_to_size == 5
        assert left == [f"id{n}" for n in range(2_010 - len(left), 2_010)]
        assert spool.ack("a", batch[-1].number) == 5
        assert spool.stats("a").lost == 5

        # With nothing behind them, the batches on their way have to go.
        begun = len(spool.next_batch("b", 2_000))
        spool.append("a", make(60, 5, size=1000))
        assert ids(spool.peek("a")) == [f"id{n}" for n in range(5, 65)]
        assert spool.stats("b").pending < begun
        assert spool.stats("b").lost == 2_010 - spool.stats("b").pending


def test_what_is_acknowledged_but_not_removed_is_no_batch_on_its_way(path: Path, make: Make) -> None:
    """It goes first, since nobody loses it."""
    with Spool(path, max_bytes=MIB) as spool:
        spool.append("a", make(60, size=1000))
        spool.append("b", make(2, size=1000))
        spool._marks.set(spool._find("a"), Mark(acknowledged=50, batch_end=60))
        while not spool.stats("b").lost:
            spool.append("c", make(20, size=1000))

        assert ids(spool.peek("a")) == [f"id{n}" for n in range(50, 60)]
        assert spool.stats("a").lost == 0


def test_a_batch_that_was_begun_stays_as_it_was(path: Path, make: Make) -> None:
    """For the next process too, with a lower limit or a higher one; the limit is for the batch after it."""
    with Spool(path) as spool:
        spool.append("a", make(12))
        assert ids(spool.next_batch("a", 6)) == ids(make(6))
    for limit in (2, 9):
        with Spool(path) as spool:
            assert ids(spool.next_batch("a", limit)) == ids(make(6))
    with Spool(path) as spool:
        assert ids(spool.next_batch("a", 2, after=6)) == ["id6", "id7"]
        spool.ack("a", 6)
        assert ids(spool.next_batch("a", 9)) == ["id6", "id7"]
        spool.ack("a", 8)
        assert ids(spool.next_batch("a", 2)) == ["id8", "id9"]
        assert spool.next_batch("b") == []


def test_a_file_larger_than_max_bytes_is_brought_within_it(path: Path, make: Make) -> None:
    """By whoever opens it with a lower bound."""
    with Spool(path, max_bytes=8 * MIB) as spool:
        spool.append("a", make(5_000, size=1000))
    assert path.stat().st_size > 5 * MIB
    with Spool(path, max_bytes=MIB) as spool:
        left = ids(spool.peek("a", 5_000))
        assert spool.stats("a").lost_to_size == 5_000 - len(left)
        assert left[-1] == "id4999"
        spool.append("a", make(300, size=100))
        assert spool.size <= MIB
    assert path.stat().st_size <= MIB


def test_what_is_too_old_goes_before_anything_comes_or_is_read(path: Path) -> None:
    """By its own time, wherever it stands in the queue."""
    now = [10**9]
    with Spool(path, max_age=5, clock=lambda: now[0]) as spool:
        spool.append("a", [Record("x", 3 * 10**9, b""), Record("y", 10**9, b""), Record("z", 2 * 10**9, b"")])
        now[0] = 6 * 10**9
        assert ids(spool.peek("a")) == ["x", "y", "z"]
        now[0] += 1
        assert ids(spool.peek("a")) == ["x", "z"]
        now[0] += 10**9
        spool.append("b", [])
        spool.append("b", [Record("late", 10**9, b""), Record("new", now[0], b"")])
        assert spool.stats("a") == QueueStats(pending=1, oldest=3 * 10**9, lost_to_age=2)
        assert ids(spool.peek("b")) == ["new"]
        assert spool.stats("b").lost_to_age == 1


def test_what_could_not_be_stored_is_counted_for_the_next_process(path: Path) -> None:
    """Together with what the bounds dropped."""
    with Spool(path) as spool:
        spool.count_lost("a", 3)
        spool.count_lost("a", 4)
    with Spool(path) as spool:
        assert spool.stats("a") == QueueStats(not_stored=7)
        assert spool.stats("a").lost == 7


def test_a_record_that_is_too_large_is_refused_and_none_with_it_is_stored(path: Path, make: Make) -> None:
    """With what would help."""
    with Spool(path, max_bytes=MIB) as spool:
        fits = Record("fits", 0, bytes(spool.max_record_bytes - 4 - 128))
        with pytest.raises(SpoolRecordError, match=r"record id7 takes 65667 bytes, more than the 65536 .* max_bytes"):
            spool.append("a", [*make(3), *make(1, 7, size=65536)])
        assert spool.peek("a") == []
        spool.append("a", [fits])
        assert spool.peek("a") == [fits._replace(number=1)]


@pytest.mark.parametrize(
    "arguments",
    [{"max_bytes": MIB - 1}, {"max_age": 0}, {"durability": "always"}, {"on_corrupt": "delete"}],
)
def test_arguments_that_do_not_fit_are_refused(path: Path, arguments: dict[str, Any]) -> None:
    """By name, before there is a file."""
    ((name, value),) = arguments.items()
    with pytest.raises(ConfigurationError, match=f"{name}={value!r} does not fit a Spool; give "):
        Spool(path, **arguments)
    assert list(path.parent.iterdir()) == []


def test_a_closed_spool_says_so(path: Path) -> None:
    """And can be closed again."""
    spool = Spool(path)
    spool.close()
    spool.close()
    with pytest.raises(SpoolError, match=r"logger.spool is closed; open it again") as caught:
        spool.peek("a")
    assert caught.value.path == path


def test_a_file_has_one_spool_at_a_time(path: Path, make: Make) -> None:
    """In one process too; the error names the file and the ways out, and the first spool does not notice."""
    with Spool(path) as spool:
        with pytest.raises(SpoolInUseError, match=rf"{re.escape(str(path))} is open already.* file of its own"):
            Spool(path)
        spool.append("a", make(1))
    with Spool(path) as spool:
        assert ids(spool.peek("a")) == ["id0"]


def test_a_queue_has_one_reader_at_a_time(path: Path) -> None:
    """A second one would send everything again; the error names the queue and the ways out."""
    with Spool(path) as spool:
        spool.claim("a")
        with pytest.raises(
            SpoolInUseError, match=r"queue 'a' of the spool .* is read already.* another name"
        ) as caught:
            spool.claim("a")
        assert caught.value.path == path
        spool.claim("b")
        spool.release("a")
        spool.claim("a")
        spool.release("a")
        spool.release("a")
    with Spool(path) as spool:
        spool.claim("b")


def test_of_threads_that_claim_a_queue_at_once_one_gets_it(path: Path) -> None:
    """Without waiting for whoever is in the file: an event loop may do it."""
    refused: list[SpoolInUseError] = []
    together = threading.Barrier(8)

    def claim() -> None:
        together.wait()
        try:
            spool.claim("a")
        except SpoolInUseError as error:
            refused.append(error)

    with Spool(path) as spool, spool._mutex:
        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(refused) == 7


def test_another_program_in_the_file_is_an_error_that_says_so(path: Path) -> None:
    """Someone with a transaction under way in sqlite3."""
    Spool(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(SpoolInUseError, match=r"another program has the spool .* close it there"):
        Spool(path)
    other.close()
    Spool(path).close()


def test_a_directory_that_is_not_there_is_an_error(path: Path) -> None:
    """The spool makes none: a wrong path would stay unnoticed."""
    with pytest.raises(SpoolError, match=r"cannot be used: .*No such file or directory"):
        Spool(path / "no" / "spool")
    path.mkdir()
    with pytest.raises(SpoolError, match="cannot be used: unable to open database file"):
        Spool(path)
    path.rmdir()
    Spool(path).close()


def damage_header(path: Path) -> None:
    """Not a database any more."""
    path.write_bytes(b"nonsense" * 1000)


def damage_middle(path: Path) -> None:
    """A header that is all right, and pages that are not."""
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(bytes(4096 * 5))


def cut_off(path: Path) -> None:
    """A copy that was interrupted."""
    with path.open("r+b") as file:
        file.truncate(4096 * 3 + 100)


@pytest.mark.parametrize("damage", [damage_header, damage_middle, cut_off])
def test_a_damaged_file_is_named_and_moved_aside_only_on_request(
    path: Path, make: Make, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is deleted, and the file is not held after the error."""
    with Spool(path) as spool:
        spool.append("a", make(500, size=100))
    damage(path)
    damaged = path.read_bytes()

    with pytest.raises(SpoolCorruptError, match=rf"{re.escape(str(path))} is damaged: .*on_corrupt='set_aside'"):
        Spool(path)
    assert path.read_bytes() == damaged
    (path.parent / f"{path.name}-wal").write_bytes(b"")
    with Spool(path, on_corrupt="set_aside") as spool:
        assert spool.set_aside is not None
        assert spool.set_aside.read_bytes() == damaged
        assert spool.set_aside.name.startswith("logger.spool.corrupt-2")
        assert [record.getMessage() for record in caplog.records] == [
            f"the spool {path} was damaged; it is now {spool.set_aside}, and a new one begins"
        ]
        assert spool.append("a", make(1)) == 1
    with Spool(path, on_corrupt="set_aside") as spool:
        assert spool.set_aside is None


def test_damage_that_comes_while_it_is_open_is_named(path: Path, make: Make) -> None:
    """When a read meets it."""
    with Spool(path) as spool:
        spool.append("a", make(5_000, size=1000))
    with Spool(path) as spool:
        damage_middle(path)
        with pytest.raises(SpoolCorruptError, match="is damaged"):
            spool.peek("a", 1000)


def test_a_file_of_another_version_or_program_is_left_alone(path: Path) -> None:
    """Each with its own way out, `set_aside` or not: it is whole, and somebody's."""
    Spool(path).close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 3")
    other.close()
    with pytest.raises(SpoolError, match="has version 3 of the format, and this is version 2; let the version"):
        Spool(path, on_corrupt="set_aside")
    foreign = path.with_name("foreign.db")
    other = sqlite3.connect(foreign)
    other.execute("CREATE TABLE mine (x)")
    other.close()
    before = foreign.read_bytes()
    with pytest.raises(SpoolError, match="is a SQLite file but no spool; give the spool a path of its own"):
        Spool(foreign, on_corrupt="set_aside")
    assert foreign.read_bytes() == before


def test_what_a_transaction_made_is_forgotten_when_it_fails(path: Path, make: Make) -> None:
    """A queue that was new in it is made again by the next one."""
    with Spool(path) as spool:
        with pytest.raises(OverflowError):
            spool.append("a", [Record("x", 2**70, b"")])
        assert spool.queues() == []
        spool.append("a", make(1))
        assert ids(spool.peek("a")) == ["id0"]


def test_threads_share_a_spool(path: Path, make: Make) -> None:
    """Each its own queue: all is there, each queue in its order, while others acknowledge."""
    acknowledged: list[str] = []

    def append(queue: str) -> None:
        for first in range(0, 200, 5):
            spool.append(queue, make(5, first))

    def drain() -> None:
        while len(acknowledged) < 200:
            if found := spool.peek("0", 7):
                spool.ack("0", found[-1].number)
                acknowledged.extend(ids(found))

    with Spool(path) as spool:
        threads = [threading.Thread(target=append, args=(str(queue),)) for queue in range(4)]
        threads.append(threading.Thread(target=drain))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [f"id{n}" for n in range(200)]
        assert acknowledged == expected
        assert [ids(spool.peek(str(queue), 300)) for queue in range(4)] == [[], expected, expected, expected]


def test_power_durability_stores_the_same(path: Path, make: Make) -> None:
    """It only waits for the disk, as SQLite is told to."""
    with Spool(path, durability="power") as spool:
        spool.append("a", make(3))
        assert spool._database.pragma("synchronous") == 2
        assert ids(spool.peek("a")) == ["id0", "id1", "id2"]
    with Spool(path) as spool:
        assert spool._database.pragma("synchronous") == 1
