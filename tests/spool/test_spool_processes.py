"""What a spool promises to processes that die, that come too late, that fork, and that find the disk full."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eventbus_engine import SpoolInUseError
from eventbus_engine.spool import Record, Spool

Start = Callable[..., subprocess.Popen[str]]
Make = Callable[..., list[Record]]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals, forks and limits of POSIX")

PUBLISH = """
import os, sys
from eventbus_engine.spool import Record, Spool

path, first, batch, size = sys.argv[1], *map(int, sys.argv[2:])
spool = Spool(path, max_bytes=2**26)
while True:
    records = [Record(str(n), n, bytes(size)) for n in range(first, first + batch)]
    spool.append("logger", records)
    first += batch
    os.write(1, b"%d\\n" % first)  # all before this number has been promised to be there
    if first % 1000 == 0:
        spool.ack("logger", spool.peek("logger", 1)[0].number + 300)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_what_append_returned_for_survives_sigkill(kills: int, path: Path, start: Start) -> None:
    """A publisher killed at a random moment, again and again on the same file: all there, in order, nothing twice."""
    draw = random.Random(kills)
    promised = 0
    for _ in range(kills):
        batch, size = draw.choice([1, 10]), draw.choice([10, 5_000])
        process = start(PUBLISH, path, promised, batch, size)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(draw.randrange(1, 60))]
        process.kill()
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL

        with Spool(path, max_bytes=2**26) as spool:
            found = [int(record.id) for record in spool.peek("logger", 1_000_000)]
            stats = spool.stats("logger")
            assert stats.lost == 0
            # It may have stored one batch more than it came to say.
            assert found == list(range(found[0], found[-1] + 1))
            assert found[-1] + 1 >= int(lines[-1])
            promised = found[-1] + 1


HOLD = """
import sys
from eventbus_engine.spool import Record, Spool

spool = Spool(sys.argv[1])
spool.append("a", [Record("theirs", 0, b"")])
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_takes_over_once_the_first_is_dead(
    path: Path, make: Make, start: Start
) -> None:
    """However it died: the system frees the lock, nobody has to clean up."""
    first = start(HOLD, path)
    assert first.stdout is not None
    assert first.stdout.readline() == "holding\n"
    with pytest.raises(SpoolInUseError, match=r"logger.spool is open already, in another process"):
        Spool(path)

    first.kill()
    first.wait()

    with Spool(path) as spool:
        spool.append("a", make(1))
        assert [record.id for record in spool.peek("a")] == ["theirs", "id0"]
        second = start(HOLD, path)
        assert "SpoolInUseError" in second.communicate()[1]


FORK = """
import gc, os, sys, threading
from eventbus_engine import SpoolError, SpoolInUseError
from eventbus_engine.spool import Record, Spool

spool = Spool(sys.argv[1])
closed = Spool(sys.argv[1] + ".closed")
closed.close()
gone = Spool(sys.argv[1] + ".gone")
del gone
spool.append("a", [Record("before", 0, b"")])

busy = threading.Event()
def append():
    for number in range(400):
        spool.append("b", [Record(str(number), 0, bytes(3000))])
        busy.set()
thread = threading.Thread(target=append)
thread.start()
busy.wait()
children = []
for number in range(8):
    child = os.fork()
    if not child:
        try:
            spool.append("a", [Record("child's", 0, b"")])
        except SpoolError as error:
            assert "belongs to the process that this one was forked from" in str(error), error
        else:
            raise AssertionError
        spool.close()  # as a `with` block around the fork would
        try:
            Spool(sys.argv[1])
        except SpoolInUseError:
            pass
        else:
            raise AssertionError
        del spool
        gc.collect()
        sys.exit(0)  # through the whole of the interpreter's end, which frees what there is
    children.append(child)
thread.join()
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
spool.append("a", [Record("after", 0, b"")])
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_cannot_touch_its_parents_spool(path: Path, start: Start) -> None:
    """Not by using it, not by closing it, not by ending: while the parent's threads go on appending."""
    process = start(FORK, path)
    printed, errors = process.communicate()

    assert (printed, process.returncode) == (f"{[0] * 8}\n", -signal.SIGKILL), errors
    with Spool(path) as spool:
        assert [record.id for record in spool.peek("a")] == ["before", "after"]
        assert [record.id for record in spool.peek("b", 1000)] == [str(n) for n in range(400)]


MANY = """
import gc, os, sys, weakref
from eventbus_engine.spool import Spool
from eventbus_engine.spool.lock import guards

def spool(number):
    return Spool(f"{sys.argv[1]}.{number}")

kept = [spool(number) for number in range(3)]
gone = [weakref.ref(spool(number)) for number in range(3, 6)]
gc.collect()
assert [found() for found in gone] == [None] * 3
assert len(guards) == 3, len(guards)
for _ in range(2):
    child = os.fork()
    if not child:
        spool(6).close()
        spool(7)  # as the parent's, it hears of the forks of its own process
        if not (grandchild := os.fork()):
            spool(8).close()
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for mine in kept:
    mine.close()
"""


def test_a_process_may_have_many_spools_and_its_children_too(path: Path, start: Start) -> None:
    """One hook sees to all that are there at a fork, and to none that are gone."""
    printed, errors = start(MANY, path).communicate()

    assert printed == "0\n0\n", errors


ORPHAN = """
import os, sys
from eventbus_engine.spool import Record, Spool

spool = Spool(sys.argv[1])
spool.append("a", [Record("parent's", 0, b"")])
if not os.fork():
    os.kill(os.getppid(), 9)
    sys.stdin.readline()
    sys.exit(0)
os.wait()
"""


def test_an_orphan_does_not_keep_the_next_process_out_nor_undo_its_work(path: Path, start: Start) -> None:
    """The child outlives its parent and ends only after the spool has been taken over and changed."""
    process = start(ORPHAN, path)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.wait() == -signal.SIGKILL

    with Spool(path) as spool:
        for number in range(50):
            spool.append("a", [Record(str(number), 0, bytes(5000))])
        spool.ack("a", 20)
    process.stdin.write("end\n")
    process.stdin.flush()
    process.stdout.read()  # to its end, which is that of the child

    with Spool(path) as spool:
        assert [record.id for record in spool.peek("a")] == [str(n) for n in range(19, 50)]


FULL = """
import os, sys
from pathlib import Path
from eventbus_engine import SpoolFullError
from eventbus_engine.spool import Record, Spool

folder = Path(sys.argv[1])
ballast = folder / "ballast"
ballast.write_bytes(bytes(300_000))
stored, refused = [], 0
with Spool(folder / "spool", max_bytes=2**21) as spool:
    def append(count):
        global refused
        for number in range(count):
            name = f"{len(stored)}"
            try:
                spool.append("a", [Record(name, 0, bytes(2000))])
                stored.append(name)
            except SpoolFullError as error:
                assert "there is no room on the disk for the spool" in str(error), error
                assert error.stored == 0
                refused += 1
    append(1000)
    assert refused > 100, refused
    assert [r.id for r in spool.peek("a", 2000)] == stored
    before = len(stored)
    parts = [Record(f"part {n}", 0, bytes(spool.max_record_bytes // 2)) for n in range(9)]
    try:
        spool.append("a", parts)
    except SpoolFullError as error:
        assert error.stored == 0
    ballast.unlink()
    refused = 0
    append(20)
    assert (refused, len(stored)) == (0, before + 20)
    spool.count_lost("a", 980)
    assert spool.ack("a", spool.peek("a", 10)[-1].number) == 10
with Spool(folder / "spool", max_bytes=2**21) as spool:
    assert [r.id for r in spool.peek("a", 2000)] == stored[10:]
    assert spool.stats("a").lost == 980
print("recovered", before)
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="needs a mount of its own")
def test_a_full_disk_is_an_error_that_passes(tmp_path: Path, start: Start) -> None:
    """A file system of 1 MiB: what was stored before is there, and the spool goes on once there is room."""
    mount = ["unshare", "--user", "--map-root-user", "--mount"]
    mounts = subprocess.run([*mount, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False)
    if mounts.returncode:
        pytest.skip("no mount namespaces here")
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -W error -c "$3" "$1"'
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*mount, "sh", "-c", script, "sh", tmp_path, sys.executable, FULL],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("recovered ")) > 100


AGAIN = """
import sys
from eventbus_engine import SpoolFullError
from eventbus_engine.spool import Record, Spool

path, stored = sys.argv[1] + "/spool", 0
for life in range(4):
    with Spool(path) as spool:
        assert spool.stats("a").pending == 0
        assert spool.peek("a") == []
        first = stored
        try:
            while True:
                spool.append("a", [Record(f"{stored}", 0, bytes(2000))])
                stored += 1
        except SpoolFullError:
            pass
        assert stored - first > 10, (life, stored - first)
        found = spool.peek("a", 1000)
        assert [record.id for record in found] == [f"{n}" for n in range(first, stored)]
        assert [record.number for record in found] == list(range(first + 1, stored + 1))
        assert spool.ack("a", found[-1].number) == len(found)
        try:
            spool.count_lost("a", 1)
        except SpoolFullError:
            raise SystemExit("not even that")
print(stored, Spool(path).stats("a").lost)
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="needs a mount of its own")
def test_a_spool_that_has_filled_the_disk_gives_it_back_once_all_is_delivered(tmp_path: Path) -> None:
    """It would be full for ever of what its log has on records that are long gone. What it has counted stays."""
    mount = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*mount, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    script = 'mount -t tmpfs -o size=400k tmpfs "$1" && exec "$2" -W error -c "$3" "$1"'
    done = subprocess.run(
        [*mount, "sh", "-c", script, "sh", tmp_path, sys.executable, AGAIN],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "4"


LIMITED = """
import resource, sys
from eventbus_engine import SpoolFullError
from eventbus_engine.spool import Record, Spool

path, now = sys.argv[1], [0]
with Spool(path, max_bytes=2**26, max_age=1, clock=lambda: now[0]) as spool:
    spool.append("a", [Record("before", 0, bytes(1000))] * 100)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    try:
        while True:
            spool.append("a", [Record("more", 0, bytes(1000))])
    except SpoolFullError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    now[0] = 2 * 10**9  # too old now, but with no room to drop them they are better delivered
    count = len(spool.peek("a", 1000))
    assert count > 100
    now[0] = 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    spool.append("a", [Record("after", 0, bytes(1000))])
    assert [r.id for r in spool.peek("a", 1000)] == ["before"] * 100 + ["more"] * (count - 100) + ["after"]
"""


def test_a_limit_on_the_size_of_files_is_the_same_error(path: Path, start: Start) -> None:
    """As is a quota: to the spool there is no room, whoever says so."""
    printed, errors = start(LIMITED, path).communicate()

    assert "there is no room on the disk for the spool" in printed, errors
    with Spool(path) as spool:
        assert spool.peek("a", 1000)[-1].id == "after"
