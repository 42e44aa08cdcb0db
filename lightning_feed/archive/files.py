"""Files: written atomically, private to their user, or removed by the last process that has them open."""

import fcntl
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)


# --- atomic writes ----------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block ends without an error.

    Args:
        path: the file.
        mode: who may read it; by default everybody.

    Raises:
        OSError: when it cannot be written. ``path`` is then as it was.
    """
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            os.fchmod(handle, mode)  # made for its owner alone; by name, it could be another file by now
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


# --- private files ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of results kept between runs: ``$XDG_CACHE_HOME/lightning_feed`` or ``~/.cache/lightning_feed``."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "lightning_feed"
    try:
        return Path.home() / ".cache" / "lightning_feed"
    except RuntimeError:  # as in containers: $HOME is not set, and the user is not in /etc/passwd
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"lightning_feed-{os.getuid()}"


def read_private(path: Path) -> bytes:
    """The content of a file that only this user can have written.

    Raises:
        OSError: when there is none (``FileNotFoundError``), or it cannot be read or trusted.
    """
    # Opening must not wait for ever for whoever writes into a FIFO, nor follow another user's link.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        others_may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or others_may_write:
            raise PermissionError(f"it is not a file of user {os.getuid()} alone")
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically that only this user can read, in a folder that only this user can enter.

    Raises:
        OSError: when it cannot be written.
    """
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_write(path, mode=0o600) as file:
        file.write(content)


# --- refcounted files -------------------------------------------------------------------------------------------------

process_lock = threading.RLock()
"""A lock between the threads of this process. Read it from this module: a forked child has a new one."""


def _renew_lock() -> None:
    global process_lock  # another thread of the parent may have held the old one
    process_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class RefcountedFile:
    """An open file that its last user removes, however the processes end.

    A shared ``flock`` says that it is in use. The lock belongs to the open file, so forked workers hold it with their
    parent, and the kernel drops it with the last descriptor. A file on which nobody holds it is a leftover.

    Attributes:
        fd: open until nobody holds this object, so that the number cannot become another file's before.
    """

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            with process_lock:  # closing drops the POSIX locks of this process on the file
                os.close(self.fd)

    def is_linked(self) -> bool:
        """Whether it is the file that lies under its path now."""
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.lstat())
        except OSError:
            return False

    def give_up(self) -> bool:
        """Drop the lock, and remove the file where nobody else holds one. Returns whether it was removed."""
        with process_lock:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = self.is_linked()
            except BlockingIOError:
                alone = False
            if alone:
                self.path.unlink()
            # Not left to close(): a mapping that is still looked at keeps the open file, and its lock, alive.
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            return alone


def open_refcounted(path: Path) -> RefcountedFile:
    """The file at ``path``, made if there is none, in use until :meth:`RefcountedFile.give_up`.

    Raises:
        ArchiveError: when it cannot be opened, or is another user's.
    """
    while True:
        try:
            found = RefcountedFile(path, os.O_CREAT)
        except OSError as error:
            raise ArchiveError(
                f"The cache {path} cannot be opened: {error.strerror}. Give another directory."
            ) from error
        fcntl.flock(found.fd, fcntl.LOCK_SH)
        if os.fstat(found.fd).st_uid != os.getuid():
            raise ArchiveError(f"The cache {path} belongs to another user. Give another name or directory.")
        if found.is_linked():  # else its last user removed it between the two calls
            return found


def remove_leftovers(directory: Path, pattern: str, *, keep: Collection[str] = ()) -> None:
    """Remove the files of a pattern that no process has open.

    Another user can give a file, a FIFO or a folder such a name in a folder that all may write to: these stay.
    """
    with process_lock:
        for path in directory.glob(pattern):
            if str(path) in keep:
                continue
            try:
                found = RefcountedFile(path, os.O_NONBLOCK)
            except OSError:
                continue  # gone in the meantime, or not ours to open
            status = os.fstat(found.fd)
            if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode) and found.give_up():
                logger.info("Removed %s, which a run that has ended left behind.", path)
