"""Files that exist for as long as any process has them open, however the processes end.

``flock`` (shared, from opening on) says "in use". It belongs to the open file, so forked workers hold it with their
parent, and the kernel drops it with the last descriptor. A file on which nobody holds it is left over.
"""

import fcntl
import logging
import os
import stat
import threading
from collections.abc import Collection
from pathlib import Path

from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

process_lock = threading.RLock()
"""Between the threads of this process; read it from this module, since a forked child has a new one."""


def _renew_lock() -> None:
    global process_lock  # another thread of the parent may have held the old one
    process_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Descriptor:
    """Closes a file when nobody holds this object any more, so that its number cannot become another file's before."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with process_lock:  # closing drops the POSIX locks of this process on the file
            os.close(self.fd)


def open_marked(path: Path) -> Descriptor:
    """The file that lies under ``path`` now, made if there is none, marked as in use until :func:`give_up`.

    Raises:
        ArchiveError: when it cannot be opened, or is another user's.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ArchiveError(
                f"The cache {path} cannot be opened: {error.strerror}. Give another directory."
            ) from error
        found = Descriptor(fd)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_uid != os.getuid():
            raise ArchiveError(f"The cache {path} belongs to another user. Give another name or directory.")
        if is_linked(fd, path):
            return found
        # Else its last user removed it between the two calls.


def remove_leftovers(directory: Path, pattern: str, *, keep: Collection[str] = ()) -> list[Path]:
    """Remove the files of a pattern that no process has open, and tell which they were.

    In a folder that all may write to another user can give a file, a FIFO or a folder such a name: it stays.
    """
    removed = []
    with process_lock:
        for path in directory.glob(pattern):
            if str(path) in keep:
                continue
            try:
                found = Descriptor(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK))
            except OSError:
                continue  # gone in the meantime, or not ours to open
            status = os.fstat(found.fd)
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                continue
            if give_up(found, path):
                removed.append(path)
                logger.info("Removed %s, which a run that has ended left behind.", path)
    return removed


def give_up(file: Descriptor, path: Path) -> bool:
    """Take the mark away, and remove the file where nobody else has it open. Tells whether it was removed."""
    with process_lock:
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        else:
            alone = is_linked(file.fd, path)
            if alone:
                path.unlink()
        # Not left to close(): a mapping that is still looked at keeps the open file, and its lock, alive.
        fcntl.flock(file.fd, fcntl.LOCK_UN)
        return alone


def is_linked(fd: int, path: Path) -> bool:
    """Whether the open file is the one that lies under ``path`` now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))  # noqa: PTH116
    except OSError:
        return False
