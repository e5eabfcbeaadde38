"""The SQLite file of a spool: how it is opened and checked, and what its errors mean."""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from eventbus_engine.errors import SpoolCorruptError, SpoolError, SpoolFullError, SpoolInUseError

__all__ = ["NO_ROOM", "PAGE", "Database", "open_database", "typed_errors"]

PAGE = 4096
"""Bytes of a page."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""How a disk, a quota and a limit on the size of files say that there is none."""

APPLICATION = 0x45425350
"""Says in the file's header that it is a spool."""

VERSION = 2
"""Of the tables below."""

# Numbers are never used again (AUTOINCREMENT), so one that was acknowledged cannot come to mean another record.
TABLES = """
CREATE TABLE spool (identity BLOB NOT NULL);
INSERT INTO spool VALUES (randomblob(16));
CREATE TABLE queues (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    lost_to_size INTEGER NOT NULL DEFAULT 0, lost_to_age INTEGER NOT NULL DEFAULT 0,
    not_stored INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE records (
    number INTEGER PRIMARY KEY AUTOINCREMENT, queue INTEGER NOT NULL REFERENCES queues,
    time INTEGER NOT NULL, id TEXT NOT NULL, data BLOB NOT NULL
);
CREATE INDEX records_by_queue ON records (queue);
CREATE INDEX records_by_time ON records (time);
"""


WORTHWHILE = 50 * PAGE
"""Bytes that an empty file and its log take, twice."""

KEPT = ("spool", "queues", "sqlite_sequence")
"""Tables that outlive the records: which spool it is, what it has lost, and the last number that it gave out."""


class Database:
    """An open file: its statements, its transactions, and the room that it takes. For one thread at a time.

    Args:
        path: the file.
        durability: `"process"` or `"power"`.
        max_log: bytes above which the log beside it (WAL) is emptied before a transaction.

    Raises:
        SpoolError: of the kind that says why it cannot be opened.
    """

    def __init__(self, path: Path, durability: str, max_log: int) -> None:
        self._path = path
        self._durability = durability
        self._log = path.with_name(f"{path.name}-wal")
        self._connection = _open(path, durability)
        self._functions: dict[str, Callable[[int, int], bool]] = {}
        self._max_log = max_log
        self._refused = False

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Run a statement."""
        return self._connection.execute(statement, values)

    def executemany(self, statement: str, values: Iterable[Sequence[object]]) -> None:
        """Run a statement once for each of some values."""
        self._connection.executemany(statement, values)

    def define(self, name: str, function: Callable[[int, int], bool]) -> None:
        """Let statements call a function of two numbers. It must not raise."""
        self._functions[name] = function
        self._connection.create_function(name, 2, function)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Do all of it, or nothing.

        Raises:
            SpoolError: of the kind that says why it was nothing.
        """
        with typed_errors(self._path):
            # After a refusal too: the log may hold many versions of a page, of which the file needs one.
            if self._refused or self._log.stat().st_size > self._max_log:
                self.empty_log()
            self._refused = True
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
                self._refused = False
            except BaseException:
                if self._connection.in_transaction:
                    self.execute("ROLLBACK")
                raise

    def pragma(self, name: str) -> int:
        """What the file, or SQLite, has for a number of that name."""
        return int(self.execute(f"PRAGMA {name}").fetchone()[0])

    @property
    def pages(self) -> int:
        """Pages of the file that hold something."""
        return self.pragma("page_count") - self.pragma("freelist_count")

    @property
    def size(self) -> int:
        """Bytes that the file and its log take on the disk."""
        return sum(file.stat().st_size for file in (self._path, self._log) if file.exists())

    def empty_log(self) -> None:
        """Move what is in the log to the file."""
        self.pragma("wal_checkpoint(TRUNCATE)")

    def shorten(self, pages: int) -> None:
        """Give up to so many empty pages back to the file system; those of the file go with the next emptied log."""
        # A script runs the statement to its end; `execute` would stop after the first page.
        self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")

    def start_over(self) -> bool:
        """Give all its room back at once, and keep of it what it has counted, and which numbers it has given out.

        That is for a full disk, and a spool whose records have all been delivered. Emptying its log would take the
        room that the log occupies. False if there is not enough of that for a new beginning.
        """
        if self.size < WORTHWHILE:
            return False
        kept = {table: self.execute(f"SELECT * FROM {table}").fetchall() for table in KEPT}  # noqa: S608 -- our own text
        self._connection.close()
        # The log first: to another file than its own it would mean damage.
        self._log.unlink(missing_ok=True)
        os.truncate(self._path, 0)
        self._connection, self._refused = _open(self._path, self._durability), False
        for name, function in self._functions.items():
            self.define(name, function)
        with self.transaction():
            for table, rows in kept.items():
                self.execute(f"DELETE FROM {table}")  # noqa: S608
                for row in rows:
                    self.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608
        return True

    def close(self) -> None:
        """Close it. Safe to call again."""
        self._connection.close()

    def leave_open(self) -> None:
        """See to it that it is never closed, not even by the end of the process."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))


def open_database(path: Path, durability: str, max_log: int, set_aside: bool) -> tuple[Database, Path | None]:
    """Open or make the file. The caller holds its lock.

    Args:
        path: the file.
        durability: `"process"` or `"power"`.
        max_log: bytes above which its log is emptied.
        set_aside: whether to rename a damaged file and make a new one.

    Returns:
        The open file, and what a damaged file was renamed to.

    Raises:
        SpoolError: of the kind that says what is wrong.
    """
    try:
        return Database(path, durability, max_log), None
    except SpoolCorruptError:
        if not set_aside:
            raise
    moved = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    # The log goes with its file: to another one it would mean nothing, or damage.
    for suffix in ("-wal", "-shm", ""):
        if (file := path.with_name(path.name + suffix)).exists():
            file.rename(moved.with_name(moved.name + suffix))
    return Database(path, durability, max_log), moved


def _open(path: Path, durability: str) -> sqlite3.Connection:
    with typed_errors(path):
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            _prepare(database, path, durability)
        except BaseException:
            database.close()
            raise
        return database


def _prepare(database: sqlite3.Connection, path: Path, durability: str) -> None:
    run = database.execute
    run(f"PRAGMA page_size = {PAGE}")
    # Nobody else may use the file, so its index stays in memory: one file less, and none that is mapped.
    run("PRAGMA locking_mode = EXCLUSIVE")
    # Each page goes to the log once per transaction, however large that is.
    run("PRAGMA cache_spill = OFF")
    # Some systems build SQLite to overwrite what is deleted: twice the writing, and a log that no bound would hold.
    run("PRAGMA secure_delete = OFF")
    run("PRAGMA wal_autocheckpoint = 0")
    run(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    empty = not run("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    application, version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if empty and not application:
        run("PRAGMA auto_vacuum = INCREMENTAL")
    elif application != APPLICATION:
        raise SpoolError(f"{path} is a SQLite file but no spool; give the spool a path of its own", path)
    elif version != VERSION:
        raise SpoolError(
            f"the spool {path} has version {version} of the format, and this is version {VERSION}; let the version of "
            f"eventbus-engine that wrote it deliver what it holds, or give the spool another path",
            path,
        )
    run("PRAGMA journal_mode = WAL").fetchall()
    if empty:
        database.executescript(
            f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
        )
    elif (found := run("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise _corrupt(path, str(found).splitlines()[-1])


def _corrupt(path: Path, what: object) -> SpoolCorruptError:
    return SpoolCorruptError(
        f"the spool {path} is damaged: {what}; Spool(..., on_corrupt='set_aside') renames it and begins a new one, "
        f"and the renamed file can still be looked into with sqlite3's .recover",
        path,
    )


def _full(path: Path, what: object) -> SpoolFullError:
    return SpoolFullError(
        f"there is no room on the disk for the spool {path}: {what}; what it holds is safe, and it goes on once there "
        f"is room",
        path,
    )


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Raise what SQLite and the system say about the file as a `SpoolError` that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        # A quota, or a limit on the size of files, shows as a write that fails.
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
            raise _full(path, error) from error
        if code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _corrupt(path, error) from error
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise SpoolInUseError(
                f"another program has the spool {path} open as a SQLite file; close it there", path
            ) from error
        raise SpoolError(f"the spool {path} cannot be used: {error}; check that path", path) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _full(path, error) from error
        raise SpoolError(f"the spool {path} cannot be used: {error}; check that path", path) from error
