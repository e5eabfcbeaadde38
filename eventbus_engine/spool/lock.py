"""One writer at a time: a lock that the system frees when its holder dies, and children that keep their hands off."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from eventbus_engine.errors import SpoolInUseError

if TYPE_CHECKING:
    from eventbus_engine.spool.store import Spool

if sys.platform == "win32":  # pragma: no cover -- the lock call differs, what it promises does not
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


__all__ = ["FileLock", "watch_forks"]


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


def watch_forks(spool: Spool) -> None:
    """See to it that a forked child leaves the file alone, and holds no lock that would outlive its parent's."""
    if not hasattr(os, "register_at_fork"):  # pragma: no cover -- a platform without forks
        return
    found = weakref.ref(spool)

    def before() -> None:
        # So that no thread is in the middle of a transaction, which the child's copy of the connection would roll back.
        if (spool := found()) is not None:
            spool._mutex.acquire()

    def after_in_parent() -> None:
        if (spool := found()) is not None:
            spool._mutex.release()

    def after_in_child() -> None:
        if (spool := found()) is not None:
            spool._lock.release()
            # Never to be freed here: closing it would empty the log into the file, under whoever writes it by then.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(spool._database))
            spool._mutex.release()

    os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)
