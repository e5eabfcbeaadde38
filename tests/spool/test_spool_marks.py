"""What a spool notes in place, so that a full disk is no reason to deliver anything twice."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from eventbus_engine import SpoolError, SpoolFullError
from eventbus_engine.spool import QueueStats, Record, Spool
from eventbus_engine.spool.marks import BLOCK, Mark, Marks

IDENTITY = bytes(range(16))

MIB = 2**20
Make = Callable[..., list[Record]]


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """As if the disk had no room for more; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def written(path: Path) -> Path:
    """The file with the marks of queues 1 and 200."""
    marks = Marks(path, IDENTITY, sync=True)
    marks.reserve(200)
    assert marks.set(1, Mark(7, 9))
    assert marks.set(200, Mark(8, 8))
    marks.close()
    return path.with_name(f"{path.name}.marks")


def test_marks_are_there_for_the_next_process(path: Path, written: Path) -> None:
    """As many as there are queues, in whole blocks."""
    marks = Marks(path, IDENTITY, sync=False)

    assert [marks.get(queue) for queue in (1, 2, 200)] == [Mark(7, 9), Mark(), Mark(8, 8)]
    assert written.stat().st_size == 2 * BLOCK
    marks.close()


def test_a_mark_takes_no_room(path: Path, written: Path) -> None:
    """None beyond what was taken when the queue was made: it is written over."""
    marks = Marks(path, IDENTITY, sync=False)
    before = written.stat().st_size
    with no_file_larger_than(before):
        assert marks.set(200, Mark(99, 100))
        marks.reserve(100_000)
        assert not marks.set(100_000, Mark(1, 1))
    marks.close()
    marks = Marks(path, IDENTITY, sync=False)

    assert marks.get(200) == Mark(99, 100)
    assert marks.get(100_000) == Mark()
    marks.close()


def test_a_mark_that_cannot_be_written_holds_for_this_process(path: Path, written: Path) -> None:
    """And says that it does so for this one only."""
    marks = Marks(path, IDENTITY, sync=False)
    with no_file_larger_than(0):
        assert not marks.set(1, Mark(10, 10))
    assert marks.get(1) == Mark(10, 10)
    marks.close()


@pytest.mark.parametrize("place", range(64))
def test_a_torn_mark_counts_as_none(path: Path, written: Path, place: int) -> None:
    """Better to deliver again what it acknowledged."""
    data = bytearray(written.read_bytes())
    data[place] ^= 0x41
    written.write_bytes(data)
    marks = Marks(path, IDENTITY, sync=False)
    known = marks.get(1)

    assert known == (Mark(7, 9) if 16 <= place < 32 or place >= 52 else Mark())
    marks.close()


def test_marks_of_another_spool_mean_nothing(path: Path, written: Path) -> None:
    """The old spool was deleted, or is damaged and set aside, and the numbers of the new one begin at 1 again."""
    marks = Marks(path, IDENTITY[::-1], sync=False)

    assert marks.get(1) == marks.get(200) == Mark()
    assert written.stat().st_size == BLOCK
    marks.close()


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, reason: int) -> None:
    """Have the system refuse to open a file."""
    opened = os.open

    def open_others(name: str, *arguments: int) -> int:
        if name == str(path):
            raise OSError(reason, os.strerror(reason), name)
        return opened(name, *arguments)

    monkeypatch.setattr(os, "open", open_others)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_without_a_file_for_its_marks_a_spool_needs_room_to_acknowledge(
    path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """As where nothing is overwritten in place."""
    refuse(monkeypatch, path.with_name(f"{path.name}.marks"), reason)
    with Spool(path) as spool:
        spool.append("a", make(3))
        with no_file_larger_than(4096), pytest.raises(SpoolFullError):
            spool.ack("a", 2)
        assert spool.ack("a", 2) == 0
        assert [record.id for record in spool.peek("a")] == ["id2"]
        spool.append("b", make(1, 3))


def test_marks_that_cannot_be_opened_are_an_error(path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may say that records have been delivered; only those that there is no room for say nothing."""
    with Spool(path) as spool:
        spool.append("a", make(2))
        with no_file_larger_than(4096):
            spool.ack("a", 1)
    with monkeypatch.context() as patch:
        refuse(patch, path.with_name(f"{path.name}.marks"), errno.EACCES)
        with pytest.raises(SpoolError, match=r"logger.spool cannot be used: .*Permission denied.*\.marks.*check that"):
            Spool(path)
    with Spool(path) as spool:
        assert [record.id for record in spool.peek("a")] == ["id1"]


def test_marks_that_cannot_be_read_are_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And everything is closed again."""
    files: list[BinaryIO] = []

    def read(marks: Marks, file: BinaryIO) -> None:
        files.append(file)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Marks, "_read", read)
        with pytest.raises(SpoolError, match=r"logger.spool cannot be used: .*Input/output error; check that path"):
            Spool(path)
    assert [file.closed for file in files] == [True]
    Spool(path).close()


def test_what_is_acknowledged_on_a_full_disk_is_gone(path: Path, make: Make) -> None:
    """To whoever looks, and to the bounds, which lose no more than what was to be delivered still."""
    now = [1000]
    with Spool(path, max_age=1e-6, clock=lambda: now[0]) as spool:
        spool.append("a", make(4))
        spool.append("b", make(1, 4))
        with no_file_larger_than(4096):
            assert spool.ack("a", 2) == 2
            assert spool.ack("a", 2) == 0
            assert [record.id for record in spool.peek("a")] == ["id2", "id3"]
            assert spool.stats("a").pending == 2
        now[0] = 10_000
        assert spool.peek("a") == []
        assert (spool.stats("a").lost, spool.stats("b").lost) == (2, 1)


DYING = """
import os, resource, sys
from eventbus_engine.spool import QueueStats, Record, Spool

spool = Spool(sys.argv[1])
spool.append("a", [Record(f"id{n}", 0, b"") for n in range(10)])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
assert spool.ack("a", 3) == 3
print(*[record.id for record in spool.next_batch("a", 2)], flush=True)
os._exit(1)
"""


def test_the_next_process_knows_what_was_acknowledged_and_begun_on_a_full_disk(
    path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """It neither repeats the one nor puts together the other in another way; and clears away what is left."""
    printed, errors = start(DYING, path).communicate()
    assert printed == "id3 id4\n", errors

    with Spool(path) as spool:
        assert [record.id for record in spool.next_batch("a", 5)] == ["id3", "id4"]
        assert spool.stats("a").pending == 7
        assert spool._database.execute("SELECT count(*) FROM records").fetchone() == (7,)


def test_a_spool_that_finds_no_room_when_it_is_opened_lets_go_of_the_file(path: Path, make: Make) -> None:
    """So that it can be opened once there is some."""
    with Spool(path, max_bytes=8 * MIB) as spool:
        spool.append("a", make(1200, size=4000))
    with no_file_larger_than(1000), pytest.raises(SpoolFullError, match="it goes on once there is room"):
        Spool(path, max_bytes=MIB)
    with Spool(path, max_bytes=MIB) as spool:
        assert spool.stats("a").lost_to_size > 0
        assert spool.size <= MIB


def test_a_spool_without_work_to_do_opens_on_a_full_disk(path: Path, make: Make) -> None:
    """And delivers what it holds."""
    with Spool(path) as spool:
        spool.append("a", make(3))
    with no_file_larger_than(0), Spool(path) as spool:
        assert [record.id for record in spool.peek("a")] == ["id0", "id1", "id2"]


def test_what_a_full_disk_does_not_let_go_of_stays_acknowledged(path: Path, make: Make) -> None:
    """In the next process too, and in that after it, for as long as there is no room: nothing is delivered twice."""
    with Spool(path) as spool:
        spool.append("a", make(4))
        with no_file_larger_than(4096):
            spool.ack("a", 2)
    for _ in range(2):
        with no_file_larger_than(4096), Spool(path) as spool:
            assert [record.id for record in spool.peek("a")] == ["id2", "id3"]
    with no_file_larger_than(4096), Spool(path) as spool:
        spool.ack("a", 4)
    with no_file_larger_than(4096), Spool(path) as spool:
        assert spool.peek("a") == []
    with Spool(path) as spool:
        assert spool._database.execute("SELECT count(*) FROM records").fetchone() == (0,)
        spool.append("a", make(1, 4))
        assert [record.id for record in spool.peek("a")] == ["id4"]


def go_back(path: Path, backup: Path) -> None:
    """The file as it was when the backup was made: what came later never reached the disk."""
    shutil.copy(backup, path)
    path.with_name(f"{path.name}-wal").unlink(missing_ok=True)


@pytest.fixture
def ahead(path: Path, make: Make) -> Path:
    """A file of ten records whose marks know of twenty, that of the last batch, and have acknowledged so many."""
    backup = path.with_name("backup")
    with Spool(path) as spool:
        spool.append("a", make(10))
    shutil.copy(path, backup)
    with Spool(path) as spool:
        spool.append("a", make(10, 10))
        spool.append("b", make(1))
        assert len(spool.next_batch("a", 20)) == 20
        with no_file_larger_than(4096):
            assert spool.ack("a", 15) == 15
    go_back(path, backup)
    return path


def test_marks_that_are_ahead_of_the_file_say_nothing_about_new_records(ahead: Path, make: Make) -> None:
    """Their numbers are given out again, to records that nobody has delivered, nor put together."""
    with Spool(ahead) as spool:
        assert spool.peek("a") == []
        spool.append("b", make(1, 99))
        spool.append("a", make(8, 100))
        assert [record.id for record in spool.next_batch("a", 3)] == ["id100", "id101", "id102"]
        assert spool.stats("a") == QueueStats(pending=8, size=160, oldest=1100)
        assert [record.id for record in spool.peek("b")] == ["id99"]


def test_marks_that_were_ahead_stay_back(ahead: Path, make: Make) -> None:
    """Once the file has come past where they were, nothing would show that they mean other records."""
    with Spool(ahead) as spool:
        spool.append("a", make(30, 100))
    with Spool(ahead) as spool:
        assert spool.stats("a").pending == 30
        assert len(spool.next_batch("a", 25)) == 25


def test_marks_that_cannot_be_taken_back_are_an_error(ahead: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same reason; the next attempt is to succeed."""
    with (
        no_file_larger_than(0),
        pytest.raises(SpoolFullError, match=r"no room on the disk for the spool .*File too large"),
    ):
        Spool(ahead)
    with Spool(ahead) as spool:
        spool.append("a", make(2, 100))
        assert [record.id for record in spool.peek("a")] == ["id100", "id101"]


def test_a_batch_whose_end_the_file_has_lost_is_what_is_left_of_it(path: Path, make: Make) -> None:
    """What is new comes after it."""
    with Spool(path) as spool:
        spool.append("a", make(3))
    shutil.copy(path, path.with_name("backup"))
    with Spool(path) as spool:
        spool.append("a", make(3, 3))
        assert len(spool.next_batch("a", 6)) == 6
    go_back(path, path.with_name("backup"))
    with Spool(path) as spool:
        spool.append("a", make(3, 100))
        assert [record.id for record in spool.next_batch("a", 6)] == ["id0", "id1", "id2"]


def test_marks_up_to_the_last_record_are_not_ahead(path: Path, make: Make) -> None:
    """All of them were acknowledged on a full disk: they stay so, and the numbers go on behind them."""
    with Spool(path) as spool:
        spool.append("a", make(5))
        spool.next_batch("a", 5)
        with no_file_larger_than(4096):
            assert spool.ack("a", 5) == 5
    marks = path.with_name(f"{path.name}.marks")
    before = marks.read_bytes()
    with no_file_larger_than(4096), Spool(path) as spool:
        assert spool.peek("a") == []
    with Spool(path) as spool:
        assert marks.read_bytes() == before
        spool.append("a", make(1, 5))
        assert [record.number for record in spool.next_batch("a")] == [6]
