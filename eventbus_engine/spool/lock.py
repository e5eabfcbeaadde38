"""One writer at a time: a lock that the system frees when its holder dies, and children that keep their hands off."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from weakref import WeakSet

from eventbus_engine.errors import SpoolInUseError
from eventbus_engine.spool.database import Database

if sys.platform == "win32":  # pragma: no cover -- the lock call differs, what it promises does not
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


__all__ = ["FileLock", "ForkGuard"]


class FileLock:
    """An exclusive lock on the file beside a spool, held until `release` or the end of the process.

    The file stays: were it deleted, two processes could hold locks on two files of one name.

    Args:
        path: the spool, to whose name `.lock` is added.

    Raises:
        SpoolInUseError: another process, or another spool of this process, holds it.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(self._descriptor)
        except OSError as error:
            self.release()
            raise SpoolInUseError(
                f"the spool {path} is open already, in another process or as another Spool of this one; close that "
                f"one, share its Spool under another queue name, or give this one a file of its own",
                path,
            ) from error

    def release(self) -> None:
        """Let others have it. In a forked child it gives up the child's hold, and the parent keeps its own."""
        if self._descriptor is not None:
            # Closing frees the lock with its last holder; unlocking would take it from the parent too.
            os.close(self._descriptor)
            self._descriptor = None


class ForkGuard:
    """Has forked children leave a spool alone, and hold no lock that would outlive their parent's, while it is there.

    Args:
        mutex: held by whoever uses the database, which is to be nobody at a fork.
        lock: on the file.
        database: the file.
    """

    def __init__(self, mutex: threading.RLock, lock: FileLock, database: Database) -> None:
        self.mutex: threading.RLock = mutex
        self._lock = lock
        self._database = database
        with guarding:
            guards.add(self)

    def leave(self) -> None:
        """In the child."""
        self._lock.release()
        # Closing it would empty the log into the file, under whoever writes it by then.
        self._database.leave_open()


guards: WeakSet[ForkGuard] = WeakSet()
"""Of all spools."""

guarding: threading.Lock = threading.Lock()
"""Held from before a fork until after it, so that no guard hears only of its end."""

_held: list[ForkGuard] = []


def _before() -> None:
    guarding.acquire()
    _held.extend(guards)
    for guard in _held:
        # So that no thread is in the middle of a transaction, which the child's copy of the connection would roll back.
        guard.mutex.acquire()


def _after_in_parent() -> None:
    for guard in _held:
        guard.mutex.release()
    _held.clear()
    guarding.release()


def _after_in_child() -> None:
    for guard in _held:
        guard.leave()
    _after_in_parent()


if hasattr(os, "register_at_fork"):  # pragma: no branch -- where there are no forks
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
