"""Queues of records in one SQLite file, bounded by size and by age: `Spool`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Self

from eventbus_engine.errors import SpoolError, SpoolFullError, SpoolInUseError, SpoolRecordError
from eventbus_engine.spool.database import PAGE, open_database, typed_errors
from eventbus_engine.spool.lock import FileLock, ForkGuard
from eventbus_engine.spool.marks import BLOCK, Marks
from eventbus_engine.spool.records import QueueStats, Record, check_limits, split

__all__ = ["QueueStats", "Record", "Spool"]

log: logging.Logger = logging.getLogger("eventbus_engine")


class Spool:
    """A durable queue for each name, in one file, for one writer at a time.

    What `append` has returned for is in the file and stays there until it is acknowledged or a bound drops it.
    `next_batch` and `ack` in this order deliver at least once. `max_bytes` drops the oldest records, but those of a
    batch that was begun only once there are no others: they may arrive, and would count as lost all the same.
    `max_age` spares none.

    The files are `path` itself, `path-wal` beside it while the spool is open or after a crash, `path.marks`, where
    it notes on a full disk what has been delivered, and the empty `path.lock`, which holds no disk space. All calls
    block, for milliseconds on a good disk: call them on a worker thread of an event loop's. Safe to use from several
    threads. A forked child cannot use its parent's spool.

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
        SpoolFullError: there is no room on the disk to make the file, or to bring it within `max_bytes`.
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
        check_limits(max_bytes, max_age, durability, on_corrupt)
        self.path: Path = Path(path)
        self.max_record_bytes: int = min(max_bytes // 16, 4 * 2**20)
        # The log beside the file is emptied above this; a transaction adds at most its records, twice, and 64 pages.
        max_log = min(max_bytes // 8, 4 * 2**20)
        self._max_pages = (max_bytes - max_log - 2 * self.max_record_bytes - BLOCK) // PAGE - 64
        self._chunk = self.max_record_bytes // PAGE
        self._max_age = None if max_age is None else int(max_age * 1e9)
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._queues: dict[str, int] = {}
        self._claims: dict[str, object] = {}
        self._mutex = threading.RLock()
        self.set_aside: Path | None = None
        with ExitStack() as opened, typed_errors(self.path):
            self._lock = FileLock(self.path)
            opened.callback(self._lock.release)
            self._database, self.set_aside = open_database(self.path, durability, max_log, on_corrupt == "set_aside")
            opened.callback(self._database.close)
            self._guard = ForkGuard(self._mutex, self._lock, self._database)
            (identity,) = self._database.execute("SELECT identity FROM spool").fetchone()
            self._marks = marks = Marks(self.path, identity, sync=durability == "power")
            opened.callback(marks.close)
            (last,) = self._database.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence").fetchone()
            marks.take_back(last)
            self._database.define("in_flight", lambda queue, number: marks.get(queue).in_flight(number))
            if self.set_aside is not None:
                log.warning("the spool %s was damaged; it is now %s, and a new one begins", self.path, self.set_aside)
            with self._use():
                self._forget_acknowledged()
                self._shrink_to_bounds()
            self._close = opened.pop_all().close

    def claim(self, queue: str) -> None:
        """Become the one reader of a queue, until `release`, or `close`: two would deliver everything twice.

        Does not block, and keeps nobody from reading who does not ask.

        Raises:
            SpoolInUseError: it has a reader.
        """
        claim = object()
        # One step for all threads.
        if self._claims.setdefault(queue, claim) is not claim:
            raise SpoolInUseError(
                f"the queue {queue!r} of the spool {self.path} is read already, by another engine, callback or sender "
                f"with this Spool; give the callback another name, or a spool of its own, or close the other one first",
                self.path,
            )

    def release(self, queue: str) -> None:
        """Let others read a queue. Only for whoever has claimed it; safe to call again. Does not block."""
        self._claims.pop(queue, None)

    def append(self, queue: str, records: Iterable[Record]) -> int:
        """Store records at the end of a queue, durable when this returns. Where room is short, drops the oldest of all.

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
        records, stored = list(records), 0
        for record in records:
            self.check(record)
        try:
            with self._use():
                self._drop_aged()
                for part in split(records, self.max_record_bytes):
                    try:
                        self._store(queue, part)
                    except SpoolFullError:
                        if not (self._is_done() and self._database.start_over()):
                            raise
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
        if record.size > self.max_record_bytes:
            raise SpoolRecordError(
                f"record {record.id} takes {record.size} bytes, more than the {self.max_record_bytes} that the spool "
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
            return self._read(self._find(queue), limit, after)

    def next_batch(self, queue: str, limit: int = 100, after: int = 0) -> list[Record]:
        """The records to send together next: as `peek`, but the same ones again until the last is acknowledged.

        Where one batch ends stays in the file, so that the next process repeats it as it was.

        Args:
            queue: its name.
            limit: the most for a new batch. One that was begun comes whole, but for what a bound has dropped of it.
            after: only those with a higher `number`.
        """
        with self._use():
            number = self._find(queue)
            mark = self._marks.get(number)
            # To SQLite a limit below 0 is none.
            if begun := self._read(number, -1, after, mark.batch_end):
                return begun
            if records := self._read(number, limit, after):
                # Better to deliver than to remember how, if the disk does not even take that.
                _ = self._marks.set(number, mark._replace(batch_end=records[-1].number))
            return records

    def ack(self, queue: str, upto: int) -> int:
        """Remove what has been delivered: the records of a queue up to and including a number.

        Returns:
            How many were there to remove.

        Raises:
            SpoolFullError: the disk has no room to note it, nor does it overwrite in place. Acknowledge again later.
        """
        removed = 0
        with self._use():
            number = self._find(queue)
            try:
                while True:
                    with self._transaction():
                        found = self._take("queue = ? AND number <= ?", (number, upto))
                    removed += len(self._alive(found))
                    if len(found) < self._chunk:
                        self._give_back()
                        return removed
            except SpoolFullError:
                mark = self._marks.get(number)
                query = "SELECT count(*), max(number) FROM records WHERE queue = ? AND number > ? AND number <= ?"
                rest, last = self._database.execute(query, (number, mark.acknowledged, upto)).fetchone()
                if rest and not self._marks.set(number, mark._replace(acknowledged=last)):
                    raise
                if self._is_done():
                    _ = self._database.start_over()
                return removed + int(rest)

    def count_lost(self, queue: str, count: int) -> None:
        """Add to the losses of a queue what could not be stored, so that the next process knows of it too."""
        with self._use(), self._transaction():
            self._count("not_stored", {self._number_of(queue): count})

    def stats(self, queue: str) -> QueueStats:
        """How a queue stands; all zero if there is none of that name."""
        query = (
            "SELECT count(number), coalesce(sum(length(data)), 0), min(time), lost_to_size, lost_to_age, not_stored "
            "FROM queues LEFT JOIN records ON queue = queues.id AND number > ? WHERE queues.id = ? GROUP BY queues.id"
        )
        with self._use():
            number = self._find(queue)
            row = self._database.execute(query, (self._marks.get(number).acknowledged, number)).fetchone()
            return QueueStats(*row) if row else QueueStats()

    def queues(self) -> list[str]:
        """The names of all queues that ever held a record, or lost one, sorted."""
        with self._use():
            return [name for (name,) in self._database.execute("SELECT name FROM queues ORDER BY name")]

    @property
    def size(self) -> int:
        """Bytes that the files take on the disk."""
        return self._database.size

    def close(self) -> None:
        """Close the files and free the lock. What is in the queues stays. Safe to call again, and in a forked child."""
        if os.getpid() == self._pid:
            with self._mutex:
                self._closed = True
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        known = dict(self._queues)
        try:
            with self._database.transaction():
                yield
        except BaseException:
            self._queues = known
            raise

    def _store(self, queue: str, records: Sequence[Record]) -> None:
        with self._transaction():
            number = self._number_of(queue)
            # A page may be half empty after a split, so twice their size; the rest is for the trees above the leaves.
            needed = 2 * sum(record.size for record in records) // PAGE + 16
            while self._database.pages + needed > self._max_pages and self._drop_oldest(1):
                pass
            self._database.executemany(
                "INSERT INTO records (queue, time, id, data) VALUES (?, ?, ?, ?)",
                [(number, record.time, record.id, record.data) for record in records],
            )

    def _number_of(self, queue: str) -> int:
        if queue not in self._queues:
            self._database.execute("INSERT OR IGNORE INTO queues (name) VALUES (?)", (queue,))
            self._marks.reserve(self._find(queue))
        return self._queues[queue]

    def _find(self, queue: str) -> int:
        """The number of a queue; 0 if there is none of that name."""
        if queue not in self._queues:
            row = self._database.execute("SELECT id FROM queues WHERE name = ?", (queue,)).fetchone()
            if row is None:
                return 0
            (self._queues[queue],) = row
        return self._queues[queue]

    def _read(self, queue: int, limit: int, after: int, upto: int = 2**63 - 1) -> list[Record]:
        try:
            self._drop_aged()
        except SpoolFullError:
            pass  # With no room even for dropping some, better to deliver what is too old than nothing.
        query = (
            "SELECT id, time, data, number FROM records WHERE queue = ? AND number > ? AND number <= ? "
            "ORDER BY number LIMIT ?"
        )
        after = max(after, self._marks.get(queue).acknowledged)
        return [Record(*row) for row in self._database.execute(query, (queue, after, upto, limit))]

    def _drop_aged(self) -> None:
        if self._max_age is None:
            return
        cutoff = self._clock() - self._max_age
        while self._database.execute("SELECT 1 FROM records WHERE time < ? LIMIT 1", (cutoff,)).fetchone():
            with self._transaction():
                self._count("lost_to_age", Counter(self._alive(self._take("time < ?", (cutoff,)))))

    def _drop_oldest(self, limit: int) -> bool:
        """Drop so many records for their size, of a batch on its way only if there are no others."""
        found = self._take("NOT in_flight(queue, number)", (), limit) or self._take("number > 0", (), limit)
        self._count("lost_to_size", Counter(self._alive(found)))
        return bool(found)

    def _take(self, where: str, parameters: tuple[object, ...], limit: int | None = None) -> list[tuple[int, int]]:
        """Remove the first records that a condition holds for, and return their numbers and their queues'."""
        found = self._database.execute(
            f"SELECT number, queue FROM records WHERE {where} ORDER BY number LIMIT ?",  # noqa: S608 -- our own text
            (*parameters, limit or self._chunk),
        ).fetchall()
        self._database.executemany("DELETE FROM records WHERE number = ?", [(number,) for number, _ in found])
        return found

    def _alive(self, records: Sequence[tuple[int, int]]) -> list[int]:
        """The queues of those records that have not been acknowledged while there was no room to remove them."""
        return [queue for number, queue in records if number > self._marks.get(queue).acknowledged]

    def _count(self, reason: str, queues: Mapping[int, int]) -> None:
        self._database.executemany(
            f"UPDATE queues SET {reason} = {reason} + ? WHERE id = ?",  # noqa: S608 -- our own text
            [(count, queue) for queue, count in queues.items()],
        )

    def _give_back(self) -> None:
        """Let the file system have the space of a spool that has become empty, if that is worth it."""
        if self._database.pragma("freelist_count") > self._max_pages // 4 and self._is_done():
            self._database.shorten(self._database.pragma("freelist_count"))
            self._database.empty_log()

    def _is_done(self) -> bool:
        """Whether all that it holds has been delivered."""
        query = "SELECT 1 FROM records WHERE queue = ? AND number > ? LIMIT 1"
        queues = [queue for (queue,) in self._database.execute("SELECT id FROM queues").fetchall()]
        return not any(
            self._database.execute(query, (queue, self._marks.get(queue).acknowledged)).fetchone() for queue in queues
        )

    def _forget_acknowledged(self) -> None:
        """Remove what an earlier spool had no room to remove."""
        for queue in self.queues():
            if acknowledged := self._marks.get(self._find(queue)).acknowledged:
                _ = self.ack(queue, acknowledged)

    def _shrink_to_bounds(self) -> None:
        """Bring a file within `max_bytes` that a spool with a larger one has left."""
        while self._database.pages > self._max_pages and not self._is_done():
            with self._transaction():
                self._drop_oldest(self._chunk)
        while self._database.pragma("page_count") > self._max_pages and self._database.pragma("freelist_count"):
            self._database.shorten(self._chunk)
            self._database.empty_log()
