"""The SQLite file of a spool: how it is opened and checked, and what its errors mean."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from eventbus_engine.errors import SpoolCorruptError, SpoolError, SpoolFullError, SpoolInUseError

__all__ = ["PAGE", "open_database", "typed_errors"]

PAGE = 4096
"""Bytes of a page."""

APPLICATION = 0x45425350
"""Says in the file's header that it is a spool."""

VERSION = 1
"""Of the tables below."""

# Numbers are never used again (AUTOINCREMENT), so one that was acknowledged cannot come to mean another record.
TABLES = """
CREATE TABLE queues (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    lost_to_size INTEGER NOT NULL DEFAULT 0, lost_to_age INTEGER NOT NULL DEFAULT 0,
    not_stored INTEGER NOT NULL DEFAULT 0, batch_end INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE records (
    number INTEGER PRIMARY KEY AUTOINCREMENT, queue INTEGER NOT NULL REFERENCES queues,
    time INTEGER NOT NULL, id TEXT NOT NULL, data BLOB NOT NULL
);
CREATE INDEX records_by_queue ON records (queue);
CREATE INDEX records_by_time ON records (time);
"""


def open_database(path: Path, durability: str, set_aside: bool) -> tuple[sqlite3.Connection, Path | None]:
    """Open or make the file. The caller holds its lock.

    Args:
        path: the file.
        durability: `"process"` or `"power"`.
        set_aside: whether to rename a damaged file and make a new one.

    Returns:
        The connection, and what a damaged file was renamed to.

    Raises:
        SpoolError: of the kind that says what is wrong.
    """
    try:
        return _open(path, durability), None
    except SpoolCorruptError:
        if not set_aside:
            raise
    moved = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    # The log goes with its file: to another one it would mean nothing, or damage.
    for suffix in ("-wal", "-shm", ""):
        if (file := path.with_name(path.name + suffix)).exists():
            file.rename(moved.with_name(moved.name + suffix))
    return _open(path, durability), moved


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


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Raise what SQLite and the system say about the file as a `SpoolError` that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        # A quota, or a limit on the size of files, shows as a write that fails.
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
            raise SpoolFullError(
                f"there is no room on the disk for the spool {path}: {error}; what it holds is safe, and it goes on "
                f"once there is room",
                path,
            ) from error
        if code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _corrupt(path, error) from error
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise SpoolInUseError(
                f"another program has the spool {path} open as a SQLite file; close it there", path
            ) from error
        raise SpoolError(f"the spool {path} cannot be used: {error}; check that path", path) from error
    except OSError as error:
        raise SpoolError(f"the spool {path} cannot be used: {error}; check that path", path) from error
