"""One process copies, the others wait; and a copy is not removed while a process uses it.

Both are ``flock`` locks, which the kernel drops when a process ends, however it ends. So a lock is never stale: when it
can be had, whoever held it is gone, and the record beside it (``stage_record``) tells what was left undone. A lock file
with a process number in it could not tell a process of another container from a dead one.
"""

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lightning_feed.archive.stage_record import StagePlace
from lightning_feed.archive.stage_tree import shown
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SAY_AFTER_S = 1.0
"""A wait that is over sooner, for a process that finds the copy up to date, is not worth a line."""
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FileLock:
    """A lock on a file for this process, which its forked children do not inherit.

    Args:
        path: the lock file, made when it is not there.
        shared: many processes may hold it at once, as long as no one holds it for itself.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self._path = path
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._fd: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free now.

        Raises:
            ArchiveError: when the file system has no locks.
            FileNotFoundError: when the folder of the lock is gone.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, self._kind | fcntl.LOCK_NB)
            # Who held it before may have removed the file: then this lock is on a file that nobody else can find.
            current = os.path.lexists(self._path) and os.path.samestat(os.fstat(fd), self._path.stat())
        except OSError as error:
            os.close(fd)
            if error.errno in _BUSY:
                return False
            raise ArchiveError(
                f"{shown(self._path)} cannot be locked: {error.strerror}. Stage to a tmpfs or a local disk."
            ) from error
        if not current:
            os.close(fd)
            return False
        self._fd = fd
        _inherited.add(fd)
        return True

    def release(self) -> None:
        """Give the lock back. Nothing happens when it is not held."""
        fd, self._fd = self._fd, None
        if fd is not None and _inherited.discard(fd):
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


class _InheritedLocks:
    """File descriptors that a forked child closes: a flock belongs to the open file, and would live on in the child."""

    def __init__(self) -> None:
        self._fds: set[int] = set()
        self._lock = threading.Lock()
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._close_in_child
        )

    def add(self, fd: int) -> None:
        with self._lock:
            self._fds.add(fd)

    def discard(self, fd: int) -> bool:
        """Forget a descriptor; False in a child, where it is closed and its number may be another file's by now."""
        with self._lock:
            known = fd in self._fds
            self._fds.discard(fd)
            return known

    def _close_in_child(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._lock.release()


_inherited = _InheritedLocks()


def claim(
    place: StagePlace,
    *,
    wait_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FileLock:
    """Wait until no other process copies to this place, then keep them all out until the lock is released.

    Args:
        place: where the copy goes; the folder beside it is made when it is not there.
        wait_s: how long to wait, in seconds. None waits for as long as the other process lives.
        clock: seconds.
        sleep: called between two tries.

    Raises:
        ArchiveError: when another process still copies after ``wait_s``, or when the folder cannot be written.
    """
    lock = FileLock(place.lock)
    began = clock()
    said = False
    while True:
        _make_folder(place.folder)
        try:
            if lock.try_acquire():
                return lock
        except ArchiveError:
            raise
        except FileNotFoundError:
            continue  # removed just now, with the copy: make it again
        except OSError as error:
            raise ArchiveError(
                f"{shown(place.lock)} cannot be opened: {error.strerror}. Give a folder of your own as DEST."
            ) from error
        other = place.read_copying()
        who = other.described() if other else "another process"
        waited_s = clock() - began
        if wait_s is not None and waited_s >= wait_s:
            raise ArchiveError(
                f"{shown(place.target)} is being copied by {who}, and is not complete after the {wait_s:g} s that were "
                "given to wait. Wait longer, or stop that process: what it has copied is kept."
            )
        if not said and waited_s >= _SAY_AFTER_S:
            logger.warning("Waiting for the copy at %s, which is being made by %s.", shown(place.target), who)
            said = True
        sleep(_POLL_S)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        todo = "Give SRC a shorter name" if error.errno == errno.ENAMETOOLONG else "Give a folder of your own as DEST"
        raise ArchiveError(f"{shown(folder)} cannot be made: {error.strerror}. {todo}.") from error
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return  # removed between the two calls: the caller comes again
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ArchiveError(
            f"{shown(folder)} belongs to another user, or is not a folder. Give a folder of your own as DEST."
        )
