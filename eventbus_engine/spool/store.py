"""Queues of records in one SQLite file, bounded by size and by age: `Spool`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from eventbus_engine.errors import ConfigurationError, SpoolError, SpoolFullError, SpoolRecordError
from eventbus_engine.spool.database import PAGE, open_database, typed_errors
from eventbus_engine.spool.lock import FileLock, watch_forks
from eventbus_engine.spool.records import QueueStats, Record

__all__ = ["QueueStats", "Record", "Spool"]

log: logging.Logger = logging.getLogger("eventbus_engine")

MIN_BYTES = 2**20
OVERHEAD = 128
"""Bytes that a record takes besides its data and its id: its row and its entries in two indexes, generously."""


class Spool:
    """A durable queue for each name, in one file, for one writer at a time.

    What `append` has returned for is in the file and stays there until it is acknowledged or a bound drops it, oldest
    first. `peek` and `ack` in this order deliver at least once. A record that a bound drops while it is being
    delivered counts as lost although it may have arrived.

    The files are `path` itself, `path-wal` beside it while the spool is open or after a crash, and the empty
    `path.lock`, which holds no disk space. All calls block, for milliseconds on a good disk: call them on a worker
    thread of an event loop's. Safe to use from several threads. A forked child cannot use its parent's spool.

    Args:
        path: the file; its directory has to be there, on a local disk.
        max_bytes: the most that the files may take, at least 1 MiB. A record may take up to a sixteenth of that.
        max_age: the seconds after which a record is dropped, by its own time; default: never.
        durability: what a stored record survives: `"process"`, the death of the process in any way, or `"power"`,
            that of the machine too, for an fsync with every append.
        on_corrupt: `"raise"`, or `"set_aside"` to rename a damaged file, log a warning and begin a new one.
        clock: nanoseconds since the epoch.

    Attributes:
        path: the file.
        max_record_bytes: the largest size of a record, its id and 128 bytes for its row included.
        set_aside: what a damaged file was renamed to, if that happened.

    Raises:
        ConfigurationError: an argument that does not fit.
        SpoolInUseError: another process, or another spool of this one, has the file open.
        SpoolCorruptError: the file is damaged.
        SpoolFullError: there is no room on the disk.
        SpoolError: the file cannot be opened, is no spool, or was written by another version.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 64 * 2**20,
        max_age: float | None = None,
        durability: Literal["process", "power"] = "process",
        on_corrupt: Literal["raise", "set_aside"] = "raise",
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        _check("max_bytes", max_bytes, max_bytes >= MIN_BYTES, f"at least {MIN_BYTES} (1 MiB)")
        _check("max_age", max_age, max_age is None or max_age > 0, "a number of seconds above 0, or None")
        _check("durability", durability, durability in ("process", "power"), "'process' or 'power'")
        _check("on_corrupt", on_corrupt, on_corrupt in ("raise", "set_aside"), "'raise' or 'set_aside'")
        self.path: Path = Path(path)
        self.max_record_bytes: int = min(max_bytes // 16, 4 * 2**20)
        # The log beside the file is emptied above this; a transaction adds at most its records, twice, and 64 pages.
        self._max_log = min(max_bytes // 8, 4 * 2**20)
        self._max_pages = (max_bytes - self._max_log - 2 * self.max_record_bytes) // PAGE - 64
        self._chunk = self.max_record_bytes // PAGE
        self._max_age = None if max_age is None else int(max_age * 1e9)
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._refused = False
        self._queues: dict[str, int] = {}
        self._mutex = threading.RLock()
        self.set_aside: Path | None = None
        with typed_errors(self.path):
            self._lock = FileLock(self.path)
            try:
                self._database, self.set_aside = open_database(self.path, durability, on_corrupt == "set_aside")
            except BaseException:
                self._lock.release()
                raise
        if self.set_aside is not None:
            log.warning("the spool %s was damaged; it is now %s, and a new one begins", self.path, self.set_aside)
        watch_forks(self)
        with self._use():
            self._shrink_to_bounds()

    def append(self, queue: str, records: Iterable[Record]) -> int:
        """Store records at the end of a queue, durable when this returns. Drops the oldest of all where room is short.

        Args:
            queue: its name; a new one is made.
            records: in the order in which to deliver them. Their `number` does not matter.

        Returns:
            How many it stored: all.

        Raises:
            SpoolRecordError: one is larger than `max_record_bytes`; none is stored then.
            SpoolFullError: there is no room on the disk; `stored` of them, the first ones, were stored before.
            SpoolError: the spool is closed, or its parent process's.
        """
        parts, stored = list(self._split(records)), 0
        try:
            with self._use():
                self._drop_aged()
                for part in parts:
                    self._store(queue, part)
                    stored += len(part)
        except SpoolFullError as error:
            error.stored = stored
            raise
        return stored

    def check(self, record: Record) -> None:
        """Make sure that a record is not too large for `append`. Does not block.

        Raises:
            SpoolRecordError: it is.
        """
        if (size := _size_of(record)) > self.max_record_bytes:
            raise SpoolRecordError(
                f"record {record.id} takes {size} bytes, more than the {self.max_record_bytes} that the spool "
                f"{self.path} takes; raise its max_bytes, of which a record may have a sixteenth up to 4 MiB, or log "
                f"less at once",
                self.path,
            )

    def peek(self, queue: str, limit: int = 100, after: int = 0) -> list[Record]:
        """The next records of a queue, in order. They stay until they are acknowledged.

        Args:
            queue: its name.
            limit: the most to return.
            after: only those with a higher `number`.
        """
        with self._use():
            try:
                self._drop_aged()
            except SpoolFullError:
                pass  # With no room even for dropping some, better to deliver what is too old than nothing.
            query = (
                "SELECT records.id, time, data, number FROM records JOIN queues ON queues.id = queue "
                "WHERE name = ? AND number > ? ORDER BY number LIMIT ?"
            )
            return [Record(*row) for row in self._database.execute(query, (queue, after, limit))]

    def next_batch(self, queue: str, limit: int = 100, after: int = 0) -> list[Record]:
        """The records to send together next: as `peek`, but the same ones again until the last is acknowledged.

        Where one batch ends stays in the file, so that the next process repeats it as it was.
        """
        with self._use():
            row = self._database.execute("SELECT batch_end FROM queues WHERE name = ?", (queue,)).fetchone()
            end = row[0] if row else 0
            records = self.peek(queue, limit, after)
            begun = [record for record in records if record.number <= end]
            if begun or not records:
                return begun
            try:
                with self._transaction():
                    self._database.execute(
                        "UPDATE queues SET batch_end = ? WHERE name = ?", (records[-1].number, queue)
                    )
            except SpoolFullError:
                pass  # Better to deliver than to remember how.
            return records

    def batches(self, queue: str, limit: int = 100) -> Iterator[list[Record]]:
        """All records of a queue in order, so many at a time, whether they are acknowledged meanwhile or not."""
        after = 0
        while batch := self.peek(queue, limit, after):
            yield batch
            after = batch[-1].number

    def ack(self, queue: str, upto: int) -> int:
        """Remove what has been delivered: the records of a queue up to and including a number.

        Returns:
            How many were there to remove.

        Raises:
            SpoolFullError: there is no room on the disk to note it. Acknowledge again, or a later number, later.
        """
        removed = 0
        with self._use():
            while True:
                with self._transaction():
                    found = self._take("queue = (SELECT id FROM queues WHERE name = ?) AND number <= ?", (queue, upto))
                removed += len(found)
                if len(found) < self._chunk:
                    self._give_back()
                    return removed

    def count_lost(self, queue: str, count: int) -> None:
        """Add to the losses of a queue what could not be stored, so that the next process knows of it too."""
        with self._use(), self._transaction():
            self._count("not_stored", {self._number_of(queue): count})

    def stats(self, queue: str) -> QueueStats:
        """How a queue stands; all zero if there is none of that name."""
        query = (
            "SELECT count(number), coalesce(sum(length(data)), 0), min(time), lost_to_size, lost_to_age, not_stored "
            "FROM queues LEFT JOIN records ON queue = queues.id WHERE name = ? GROUP BY queues.id"
        )
        with self._use():
            row = self._database.execute(query, (queue,)).fetchone()
            return QueueStats(*row) if row else QueueStats()

    def queues(self) -> list[str]:
        """The names of all queues that ever held a record, or lost one, sorted."""
        with self._use():
            return [name for (name,) in self._database.execute("SELECT name FROM queues ORDER BY name")]

    @property
    def size(self) -> int:
        """Bytes that the files take on the disk."""
        return sum(file.stat().st_size for file in (self.path, self._log_file) if file.exists())

    def close(self) -> None:
        """Close the files and free the lock. What is in the queues stays. Safe to call again, and in a forked child."""
        if os.getpid() == self._pid:
            with self._mutex:
                self._closed = True
                self._database.close()
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _log_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}-wal")

    @contextmanager
    def _use(self) -> Iterator[None]:
        # Before the mutex, which a thread of the parent's may have held at the fork.
        if os.getpid() != self._pid:
            raise SpoolError(
                f"the spool {self.path} belongs to the process that this one was forked from; hand the records over to "
                f"that one, or open a Spool on another file here",
                self.path,
            )
        with self._mutex, typed_errors(self.path):
            if self._closed:
                raise SpoolError(
                    f"the spool {self.path} is closed; open it again: Spool({str(self.path)!r})", self.path
                )
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with typed_errors(self.path):
            # After a refusal too: the log may hold many versions of a page, of which the file needs one.
            if self._refused or self._log_file.stat().st_size > self._max_log:
                self._empty_log()
            known, self._refused = dict(self._queues), True
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
                self._refused = False
            except BaseException:
                self._queues = known
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _empty_log(self) -> None:
        self._pragma("wal_checkpoint(TRUNCATE)")

    def _split(self, records: Iterable[Record]) -> Iterator[list[Record]]:
        """Parts that are each small enough for one transaction."""
        part: list[Record] = []
        total = 0
        for record in records:
            self.check(record)
            size = _size_of(record)
            if total + size > self.max_record_bytes:
                yield part
                part, total = [], 0
            part.append(record)
            total += size
        if part:
            yield part

    def _store(self, queue: str, records: Sequence[Record]) -> None:
        with self._transaction():
            number = self._number_of(queue)
            # A page may be half empty after a split, so twice their size; the rest is for the trees above the leaves.
            needed = 2 * sum(map(_size_of, records)) // PAGE + 16
            while self._pages() + needed > self._max_pages and (found := self._take("number > 0", (), 1)):
                self._count("lost_to_size", Counter(found))
            self._database.executemany(
                "INSERT INTO records (queue, time, id, data) VALUES (?, ?, ?, ?)",
                [(number, record.time, record.id, record.data) for record in records],
            )

    def _number_of(self, queue: str) -> int:
        if queue not in self._queues:
            self._database.execute("INSERT OR IGNORE INTO queues (name) VALUES (?)", (queue,))
            (self._queues[queue],) = self._database.execute("SELECT id FROM queues WHERE name = ?", (queue,)).fetchone()
        return self._queues[queue]

    def _pages(self) -> int:
        """Pages of the file that hold something."""
        return self._pragma("page_count") - self._pragma("freelist_count")

    def _pragma(self, name: str) -> int:
        return int(self._database.execute(f"PRAGMA {name}").fetchone()[0])

    def _drop_aged(self) -> None:
        if self._max_age is None:
            return
        cutoff = self._clock() - self._max_age
        while self._database.execute("SELECT 1 FROM records WHERE time < ? LIMIT 1", (cutoff,)).fetchone():
            with self._transaction():
                self._count("lost_to_age", Counter(self._take("time < ?", (cutoff,))))

    def _take(self, where: str, parameters: tuple[object, ...], limit: int | None = None) -> list[int]:
        """Remove the first records that a condition holds for, and return which queue each was in."""
        found = self._database.execute(
            f"SELECT number, queue FROM records WHERE {where} ORDER BY number LIMIT ?",  # noqa: S608 -- our own text
            (*parameters, limit or self._chunk),
        ).fetchall()
        self._database.executemany("DELETE FROM records WHERE number = ?", [(number,) for number, _ in found])
        return [queue for _, queue in found]

    def _count(self, reason: str, queues: Mapping[int, int]) -> None:
        self._database.executemany(
            f"UPDATE queues SET {reason} = {reason} + ? WHERE id = ?",  # noqa: S608 -- our own text
            [(count, queue) for queue, count in queues.items()],
        )

    def _give_back(self) -> None:
        """Let the file system have the space of a spool that has become empty, if that is worth it."""
        if self._pragma("freelist_count") > self._max_pages // 4 and not self._pending():
            self._shorten(self._pragma("freelist_count"))
            self._empty_log()

    def _pending(self) -> bool:
        return self._database.execute("SELECT 1 FROM records LIMIT 1").fetchone() is not None

    def _shrink_to_bounds(self) -> None:
        """Bring a file within `max_bytes` that a spool with a larger one has left."""
        while self._pages() > self._max_pages and self._pending():
            with self._transaction():
                self._count("lost_to_size", Counter(self._take("number > 0", ())))
        while self._pragma("page_count") > self._max_pages and self._pragma("freelist_count"):
            self._shorten(self._chunk)
            self._empty_log()

    def _shorten(self, pages: int) -> None:
        # A script runs the statement to its end; `execute` would stop after the first page.
        self._database.executescript(f"PRAGMA incremental_vacuum({pages})")


def _size_of(record: Record) -> int:
    return len(record.data) + len(record.id.encode()) + OVERHEAD


def _check(name: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigurationError(f"{name}={value!r} does not fit a Spool; give {wanted}")
