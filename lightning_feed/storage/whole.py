"""Makes a file or a folder completely or not at all: in a private folder beside its path, and renamed at the end."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_feed.errors import ArchiveError
from lightning_feed.machine.private_files import make_private

logger = logging.getLogger(__name__)

_SAY_AFTER_S = 1.0
"""A longer wait, in seconds, is logged."""


class Workshop:
    """The private folder ``.NAME.SUFFIX`` beside a target, in which one process at a time makes the target.

    Args:
        target: the file or folder to make.
        suffix: name of the operation that makes the target: ``packing``, ``staging``.

    Attributes:
        folder: the private folder, which only this user can enter.
        whole: path inside this folder at which the target is made.
    """

    def __init__(self, target: Path, suffix: str) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}.{suffix}")
        self.whole = self.folder / "whole"
        self._replaced = self.folder / "replaced"

    @contextmanager
    def claimed(self, *, wait: bool) -> Iterator[None]:
        """Exclude other processes until the block ends. Remains of a killed process are removed first.

        The kernel drops the lock when the process that holds it ends in any way.

        Args:
            wait: True to wait for another process that makes the same target. In this case the folder is kept
                afterwards.

        Raises:
            ArchiveError: if the folder cannot be made, belongs to another user, or, without ``wait``, is in use; and if
                the disk is full.
        """
        try:
            make_private(self.folder)
            lock = FileLock(self.folder / "lock", fallback_to_soft=False)  # a soft lock would outlive a killed process
            self._acquire(lock, wait=wait)
        except ArchiveError:
            raise
        except OSError as error:
            raise ArchiveError(
                f"{self.folder} cannot be created or written to: {error.strerror}. Choose another DEST."
            ) from error
        try:
            self._clear()
            yield
        except Exception as error:
            if not _is_full_disk(error):
                raise
            raise ArchiveError(f"{self.target.parent} is full. Make room there, and start again.") from error
        finally:
            self._clear()
            if not wait:  # no other process waits for the lock in this folder
                remove(self.folder)
            lock.release()

    def put_in_place(self) -> None:
        """Move the complete target to its path. An earlier file or folder at this path is removed."""
        if os.path.lexists(self.target):
            self.target.rename(self._replaced)
        self.whole.rename(self.target)
        remove(self._replaced)

    def _acquire(self, lock: FileLock, *, wait: bool) -> None:
        try:
            lock.acquire(timeout=_SAY_AFTER_S if wait else 0)
            return
        except Timeout:
            if not wait:
                raise ArchiveError(
                    f"Another process is writing {self.target}. Wait for it, or choose another DEST."
                ) from None
        logger.warning("Waiting for %s, which another process is writing.", self.target)
        lock.acquire()

    def _clear(self) -> None:
        remove(self.whole)
        remove(self._replaced)


def _is_full_disk(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)
    # LMDB reports an input/output error if a write fitted in part.
    return "No space left" in text or (text.startswith("mdb_") and "Input/output error" in text)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it. Does nothing if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
